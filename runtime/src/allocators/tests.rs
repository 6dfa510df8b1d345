//! Sequences of requests whose outcome can be worked out by hand, and what must hold of any sequence.

use super::*;
use crate::random::SplitMix64;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Requests from words: `a=3M` allocates, `-a` frees; `K` and `M` are KiB and MiB.
fn requests(script: &str) -> Requests {
    let mut names = Vec::new();
    let mut steps = Vec::new();
    for (position, word) in (0..).zip(script.split_whitespace()) {
        let request = match word.strip_prefix('-') {
            Some(name) => {
                let block = names.iter().position(|known| *known == name).expect("it was allocated");
                names[block] = "";
                Request::Free(BlockId(block as u32))
            }
            None => {
                let (name, size) = word.split_once('=').expect("a name and a size");
                names.push(name);
                let unit = [("K", KIB), ("M", MIB)].into_iter().find(|(unit, _)| size.ends_with(unit));
                let (digits, unit) = unit.map_or((size, 1), |(_, bytes)| (&size[..size.len() - 1], bytes));
                Request::Allocate(BlockId(names.len() as u32 - 1), digits.parse::<u64>().unwrap() * unit)
            }
        };
        steps.push((position, request));
    }
    Requests::new(steps)
}

fn reserved(model: Model, script: &str) -> u64 {
    model.serve(&requests(script), None).unwrap().reserved_bytes
}

#[test]
fn exact_counts_bytes_in_use() {
    assert_eq!(reserved(Model::Exact, "a=3 b=5 -a c=2"), 8);
    assert_eq!(Model::Exact.serve(&requests("a=3 -a b=5"), None).unwrap().fragmentation(), 0.0);
}

#[test]
fn first_fit_takes_the_lowest_gap_and_best_fit_the_smallest() {
    // Gaps of 4 KiB and, above it, of 2 KiB; a block of 2 KiB goes into one of them, then one of 4 KiB comes.
    let script = "a=4K x=1K b=2K y=1K -a -b c=2K d=4K";
    assert_eq!(reserved(Model::FirstFit, script), 12 * KIB);
    assert_eq!(reserved(Model::BestFit, script), 8 * KIB);
}

#[test]
fn gaps_join_on_both_sides_and_the_last_one_grows() {
    for model in [Model::FirstFit, Model::BestFit] {
        assert_eq!(reserved(model, "a=1K b=1K c=1K d=1K -a -c -b e=3K"), 4 * KIB);
        assert_eq!(reserved(model, "a=1K b=1K -b c=2K"), 3 * KIB);
        assert_eq!(reserved(model, "a=1"), 512);
    }
}

#[test]
fn laying_out_in_advance_leaves_no_gap_where_an_order_without_one_exists() {
    // Served in turn, the large block finds no gap; placed first, it leaves the gap to the small ones.
    let script = "a=1K b=1K -a c=2K -b -c";
    assert_eq!(reserved(Model::FirstFit, script), 4 * KIB);
    assert_eq!(reserved(Model::VdnnPlusPlus, script), 3 * KIB);
}

#[test]
fn small_requests_share_segments_of_two_mebibytes() {
    assert_eq!(reserved(Model::Caching, "a=1"), 2 * MIB);
    assert_eq!(reserved(Model::Caching, "a=1M b=512K c=512K"), 2 * MIB);
    assert_eq!(reserved(Model::Caching, "a=1M b=512K c=512K d=1"), 4 * MIB);
}

#[test]
fn large_requests_share_segments_of_twenty_mebibytes() {
    assert_eq!(reserved(Model::Caching, "a=1048577"), 20 * MIB);
    assert_eq!(reserved(Model::Caching, "a=9M b=9M c=2M"), 20 * MIB);
    // What is left over is 1 MiB, too little to be split off.
    assert_eq!(reserved(Model::Caching, "a=9M b=10M c=1025K"), 40 * MIB);
    assert_eq!(reserved(Model::Caching, "a=1 b=2M"), 22 * MIB);
}

#[test]
fn the_largest_requests_have_segments_of_their_own() {
    assert_eq!(reserved(Model::Caching, "a=10M"), 10 * MIB);
    assert_eq!(reserved(Model::Caching, "a=11M"), 12 * MIB);
    assert_eq!(reserved(Model::Caching, "a=11M -a b=12M"), 12 * MIB);
    // A free segment that is large enough is used, however large it is.
    assert_eq!(reserved(Model::Caching, "a=100M -a b=11M c=89M"), 100 * MIB);
}

#[test]
fn neighbours_of_a_segment_join_and_segments_do_not() {
    assert_eq!(reserved(Model::Caching, "a=6M b=6M c=8M -a -b d=12M"), 20 * MIB);
    assert_eq!(reserved(Model::Caching, "a=6M b=6M c=8M -b -a d=12M"), 20 * MIB);
    assert_eq!(reserved(Model::Caching, "a=10M b=10M -a -b c=20M"), 40 * MIB);
}

#[test]
fn empty_segments_are_given_back_before_a_request_is_refused() {
    let script = requests("a=10M b=10M -a -b c=20M");
    let limit = |bytes| Model::Caching.serve(&script, Some(bytes)).map(|footprint| footprint.reserved_bytes);
    assert_eq!(limit(39 * MIB), Ok(20 * MIB));
    assert_eq!(limit(20 * MIB), Ok(20 * MIB));
    let refused = OutOfMemory { operator: 1, needed_bytes: 20 * MIB, limit_bytes: 19 * MIB };
    assert_eq!(limit(19 * MIB), Err(refused));
    // A segment with a block in it stays.
    let script = requests("a=10M b=2M -a c=20M");
    assert!(Model::Caching.serve(&script, Some(39 * MIB)).is_err());
    assert_eq!(Model::Caching.serve(&script, Some(40 * MIB)).unwrap().reserved_bytes, 40 * MIB);
}

/// Sizes on all sides of every threshold, freed in any order.
fn random_requests(seed: u64) -> Requests {
    let mut random = SplitMix64::new(seed);
    let mut below = |end: u64| random.next() % end;
    let (mut steps, mut alive, mut blocks) = (Vec::new(), Vec::new(), 0);
    for now in 0..400 {
        if !alive.is_empty() && below(100) < 45 {
            steps.push((now, Request::Free(alive.swap_remove(below(alive.len() as u64) as usize))));
        } else {
            let most = [600, 5 * KIB, MIB, 2 * MIB, 12 * MIB, 40 * MIB][below(6) as usize];
            let bytes = 1 + below(most);
            alive.push(BlockId(blocks));
            steps.push((now, Request::Allocate(BlockId(blocks), bytes)));
            blocks += 1;
        }
    }
    Requests::new(steps)
}

/// Serves `requests` one by one and checks that no two blocks in use meet.
fn check_apart<A: Allocator>(requests: &Requests, mut allocator: A, place: impl Fn(&A, BlockId) -> (u64, u64)) {
    let mut in_use: Vec<(u64, u64, BlockId)> = Vec::new();
    for &(_, request) in requests.steps() {
        match request {
            Request::Free(block) => {
                allocator.free(block);
                in_use.retain(|&(.., other)| other != block);
            }
            Request::Allocate(block, bytes) => {
                let reserved_bytes = allocator.allocate(block, bytes, u64::MAX);
                let (address, found) = place(&allocator, block);
                assert!(found >= bytes);
                let meets =
                    |&&(other, length, _): &&(u64, u64, BlockId)| address < other + length && other < address + found;
                assert_eq!(in_use.iter().find(meets), None, "block {} stands in another", block.0);
                in_use.push((address, found, block));
                assert!(in_use.iter().map(|&(_, length, _)| length).sum::<u64>() <= reserved_bytes);
            }
        }
    }
}

#[test]
fn blocks_in_use_never_meet() {
    for seed in 0..60 {
        let requests = random_requests(seed);
        for fit in [Fit::First, Fit::Best] {
            check_apart(&requests, Arena::new(fit), |arena, block| arena.place(block));
        }
        check_apart(&requests, Caching::default(), |caching, block| caching.place(block));
    }
}

#[test]
fn every_model_reserves_what_is_used_and_keeps_to_its_limit() {
    for seed in 0..60 {
        let requests = random_requests(seed);
        for model in Model::ALL {
            let free = model.serve(&requests, None).unwrap();
            assert!(free.reserved_bytes >= free.used_bytes && (0.0..1.0).contains(&free.fragmentation()), "{model:?}");
            assert_eq!(model.serve(&requests, Some(free.reserved_bytes)), Ok(free), "{model:?}");
            let least = model.serve(&requests, Some(requests.used_bytes() - 1));
            assert!(least.is_err(), "{model:?} serves more than it may reserve");
        }
    }
}
