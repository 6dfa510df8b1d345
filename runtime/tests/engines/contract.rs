//! The contract of `CopyEngine`, which every engine keeps.

use std::sync::{Arc, Mutex};
use std::thread;

use plimsoll_runtime::hardware::Tier;
use plimsoll_runtime::torch::copy::{CopyError, DeviceBytes, PAGE_BYTES, SlowCopy, Ticket};
use proptest::prelude::*;

use crate::beds::{Bed, Block, beds};
use crate::draw::Draw;

const ROOM: u64 = 64 << 20;

/// Runs a property on every engine and every tier that it has.
fn on_every_engine(limit_bytes: u64, property: impl Fn(&mut Bed, Tier)) {
    for mut bed in beds(limit_bytes) {
        for &tier in bed.tiers {
            property(&mut bed, tier);
            bed.finish();
        }
    }
}

fn pieces(blocks: &mut [Block]) -> Vec<DeviceBytes> {
    blocks.iter_mut().map(|block| DeviceBytes { bytes: block.len(), start: block.start() }).collect()
}

fn offload(bed: &mut Bed, blocks: &mut [Block], tier: Tier) -> Result<(Vec<SlowCopy>, Ticket), CopyError> {
    // SAFETY: every test waits before it writes or drops the blocks.
    unsafe { bed.engine.offload(&pieces(blocks), tier) }
}

fn prefetch(bed: &mut Bed, copies: &[SlowCopy], into: &mut [Block]) -> Result<Ticket, CopyError> {
    let ends: Vec<_> = copies.iter().zip(into.iter_mut()).map(|(copy, block)| (copy, block.start())).collect();
    // SAFETY: every test waits before it reads or drops the blocks.
    unsafe { bed.engine.prefetch(&ends) }
}

/// Blocks of these sizes with bytes drawn for them.
fn drawn(bed: &mut Bed, draw: &mut Draw, sizes: &[usize]) -> (Vec<Block>, Vec<Vec<u8>>) {
    let contents: Vec<Vec<u8>> = sizes.iter().map(|&bytes| draw.bytes(bytes)).collect();
    let blocks = contents
        .iter()
        .map(|bytes| {
            let mut block = Block::of(bytes.len());
            bed.write(&mut block, bytes);
            block
        })
        .collect();
    (blocks, contents)
}

fn assert_restored(bed: &mut Bed, copies: &[SlowCopy], contents: &[Vec<u8>], what: &str) {
    let mut back: Vec<Block> = contents.iter().map(|bytes| Block::of(bytes.len())).collect();
    let ticket = prefetch(bed, copies, &mut back).unwrap();
    bed.engine.wait(&ticket).unwrap();
    for (index, (block, expected)) in back.iter_mut().zip(contents).enumerate() {
        assert!(
            bed.read(block) == *expected,
            "{}: {what}: piece {index} of {} bytes differs",
            bed.name,
            expected.len()
        );
    }
}

#[test]
fn bytes_come_back_equal() {
    on_every_engine(ROOM, |bed, tier| {
        let mut draw = Draw::seeded(1);
        for bytes in [0, 1, 63, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 1 << 20, (5 << 20) + 3] {
            let (mut blocks, contents) = drawn(bed, &mut draw, &[bytes]);
            let (copies, ticket) = offload(bed, &mut blocks, tier).unwrap();
            assert_eq!((copies.len(), copies[0].bytes(), copies[0].tier()), (1, bytes, tier));
            bed.engine.wait(&ticket).unwrap();
            bed.write(&mut blocks[0], &vec![0; bytes]);
            assert_restored(bed, &copies, &contents, "alone");
            assert_restored(bed, &copies, &contents, "a second time");
            drop(copies);
        }
    });
}

#[test]
fn pieces_that_moved_together_come_back_together_apart_and_in_any_order() {
    on_every_engine(ROOM, |bed, tier| {
        let mut draw = Draw::seeded(2);
        let sizes = [8192, 1, 0, 200_000, 4096, 77, 3 << 20, 8192, 4095];
        let (mut blocks, contents) = drawn(bed, &mut draw, &sizes);
        let (mut copies, ticket) = offload(bed, &mut blocks, tier).unwrap();
        bed.engine.wait(&ticket).unwrap();
        assert_restored(bed, &copies, &contents, "together");
        for (copy, bytes) in copies.iter().zip(&contents) {
            assert_restored(bed, std::slice::from_ref(copy), std::slice::from_ref(bytes), "apart");
        }
        copies.reverse();
        let reversed: Vec<_> = contents.iter().rev().cloned().collect();
        assert_restored(bed, &copies, &reversed, "in reverse");
        copies.retain(|copy| copy.bytes() % 2 == 0);
        let even: Vec<_> = reversed.into_iter().filter(|bytes| bytes.len() % 2 == 0).collect();
        assert_restored(bed, &copies, &even, "after some were freed");
    });
}

#[test]
fn a_slab_s_room_comes_back_with_its_last_copy() {
    on_every_engine((8 * PAGE_BYTES) as u64, |bed, tier| {
        let mut draw = Draw::seeded(3);
        for _ in 0..5 {
            let (mut blocks, contents) = drawn(bed, &mut draw, &[3 * PAGE_BYTES, PAGE_BYTES + 5, 100]);
            let (mut copies, ticket) = offload(bed, &mut blocks, tier).unwrap();
            bed.engine.wait(&ticket).unwrap();
            drop(copies.remove(0));
            let mut more = vec![Block::of(4 * PAGE_BYTES)];
            let refused = offload(bed, &mut more, tier).unwrap_err();
            assert_eq!(refused, CopyError::Full { bytes: 4 * PAGE_BYTES }, "{}: two of three copies live", bed.name);
            assert_restored(bed, &copies, &contents[1..], "beside a freed one");
            drop(copies);
            let (copies, ticket) = offload(bed, &mut more, tier).unwrap();
            bed.engine.wait(&ticket).unwrap();
            bed.finish();
            drop(copies);
        }
    });
}

#[test]
fn limits_hold_and_what_was_there_before_stays() {
    let limit_bytes = 40 * PAGE_BYTES as u64;
    on_every_engine(limit_bytes, |bed, tier| {
        let mut draw = Draw::seeded(4);
        let mut live = Vec::new();
        let mut refusals = 0;
        for _ in 0..300 {
            let bytes = 1 + draw.below(9 * PAGE_BYTES);
            let (mut blocks, contents) = drawn(bed, &mut draw, &[bytes]);
            match offload(bed, &mut blocks, tier) {
                Ok((copies, ticket)) => {
                    bed.engine.wait(&ticket).unwrap();
                    bed.finish();
                    live.push((copies, contents));
                }
                Err(error) => {
                    assert_eq!(error, CopyError::Full { bytes: bytes.next_multiple_of(PAGE_BYTES) }, "{}", bed.name);
                    refusals += 1;
                    bed.finish();
                    assert!(!live.is_empty(), "{}: refused though all was free", bed.name);
                    let index = draw.below(live.len());
                    let (copies, contents) = live.swap_remove(index);
                    assert_restored(bed, &copies, &contents, "at the limit");
                }
            }
            for usage in bed.engine.tiers() {
                let copies = live.iter().flat_map(|(copies, _): &(Vec<SlowCopy>, _)| copies);
                let expected: usize = copies.map(|copy| copy.bytes().next_multiple_of(PAGE_BYTES)).sum();
                assert!(usage.held_bytes + usage.kept_bytes <= limit_bytes, "{}: {usage:?}", bed.name);
                assert_eq!(usage.limit_bytes, limit_bytes, "{}", bed.name);
                if usage.tier == tier {
                    assert_eq!(usage.held_bytes as usize, expected, "{}: {usage:?}", bed.name);
                }
                assert!(usage.high_water_bytes >= usage.held_bytes && usage.high_water_bytes <= limit_bytes);
            }
        }
        assert!(refusals > 20, "{}: only {refusals} refusals", bed.name);
        drop(live);
        assert!(bed.engine.high_water_bytes() > limit_bytes / 2, "{}", bed.name);
    });
}

#[test]
fn a_prefetch_follows_the_offload_that_it_needs_without_being_told_to_wait() {
    on_every_engine(ROOM, |bed, tier| {
        let mut draw = Draw::seeded(5);
        for _ in 0..30 {
            let (mut blocks, contents) = drawn(bed, &mut draw, &[300_000, 64]);
            let (copies, offloaded) = offload(bed, &mut blocks, tier).unwrap();
            assert_restored(bed, &copies, &contents, "before the offload was waited for");
            bed.engine.wait(&offloaded).unwrap();
        }
    });
}

#[test]
fn copies_are_of_the_bytes_as_they_were_when_asked_for() {
    on_every_engine(ROOM, |bed, tier| {
        let mut draw = Draw::seeded(6);
        let mut block = [Block::of(500_000)];
        let mut kept = Vec::new();
        for _ in 0..8 {
            let bytes = draw.bytes(500_000);
            bed.write(&mut block[0], &bytes);
            let (copies, ticket) = offload(bed, &mut block, tier).unwrap();
            bed.engine.wait(&ticket).unwrap();
            kept.push((copies, bytes));
        }
        for (copies, bytes) in kept {
            assert_restored(bed, &copies, &[bytes], "versions");
        }
    });
}

#[test]
fn copies_may_be_freed_and_tickets_waited_for_at_any_time() {
    on_every_engine((64 * PAGE_BYTES) as u64, |bed, tier| {
        let mut draw = Draw::seeded(7);
        let mut old = None;
        for _ in 0..40 {
            let (mut blocks, contents) = drawn(bed, &mut draw, &[20 * PAGE_BYTES, 3 * PAGE_BYTES]);
            let (copies, offloaded) = offload(bed, &mut blocks, tier).unwrap();
            let mut back: Vec<Block> = contents.iter().map(|bytes| Block::of(bytes.len())).collect();
            let prefetched = prefetch(bed, &copies, &mut back).unwrap();
            // Both copies are under way.
            drop(copies);
            for ticket in [&prefetched, &offloaded, &prefetched, old.as_ref().unwrap_or(&prefetched)] {
                bed.engine.wait(ticket).unwrap();
            }
            for (block, expected) in back.iter_mut().zip(&contents) {
                assert!(bed.read(block) == *expected, "{}", bed.name);
            }
            old = Some(offloaded);
        }
    });
}

#[test]
fn a_tier_that_is_not_there_is_refused() {
    for mut bed in beds(ROOM) {
        for tier in [Tier::Host, Tier::File] {
            let mut block = [Block::of(10)];
            let refused = offload(&mut bed, &mut block, tier).map(|(_, ticket)| bed.engine.wait(&ticket));
            bed.finish();
            match bed.tiers.contains(&tier) {
                true => assert_eq!(refused.unwrap(), Ok(())),
                false => assert_eq!(refused.unwrap_err(), CopyError::NoTier(tier)),
            }
        }
    }
}

#[test]
fn a_rescue_brings_back_what_a_prefetch_would() {
    on_every_engine(ROOM, |bed, tier| {
        let (mut blocks, contents) = drawn(bed, &mut Draw::seeded(8), &[70_000, 4 << 20]);
        let (copies, _) = offload(bed, &mut blocks, tier).unwrap();
        for (copy, expected) in copies.iter().zip(&contents) {
            let mut back = Block::of(expected.len());
            // SAFETY: the block has as many bytes, and is used after the rescue.
            unsafe { bed.engine.rescue(copy, back.start()) }.unwrap();
            assert!(bed.read(&mut back) == *expected, "{}", bed.name);
        }
    });
}

#[test]
fn copies_outlive_their_engine_and_those_under_way_end_with_it() {
    for bed in beds(ROOM) {
        let mut bed = bed;
        let tier = bed.tiers[0];
        let (mut blocks, contents) = drawn(&mut bed, &mut Draw::seeded(9), &[1 << 20, 50]);
        let (copies, _) = offload(&mut bed, &mut blocks, tier).unwrap();
        let mut back: Vec<Block> = contents.iter().map(|bytes| Block::of(bytes.len())).collect();
        let ticket = prefetch(&mut bed, &copies, &mut back).unwrap();
        bed.engine = Box::new(plimsoll_runtime::torch::copy::HostEngine::new(None));
        for (block, expected) in back.iter_mut().zip(&contents) {
            assert!(bed.read(block) == *expected, "{}: a copy under way was lost", bed.name);
        }
        drop((copies, ticket));
    }
}

#[test]
fn many_threads_may_share_an_engine() {
    for bed in beds(ROOM) {
        let (tier, bed) = (bed.tiers[0], Arc::new(Mutex::new(bed)));
        let threads: Vec<_> = (0..8)
            .map(|seed| {
                let bed = Arc::clone(&bed);
                thread::spawn(move || {
                    let mut draw = Draw::seeded(seed);
                    for _ in 0..20 {
                        let sizes = [1 + draw.below(60_000), 1 + draw.below(300)];
                        let (mut blocks, contents) = drawn(&mut bed.lock().unwrap(), &mut draw, &sizes);
                        let (copies, ticket) = offload(&mut bed.lock().unwrap(), &mut blocks, tier).unwrap();
                        thread::yield_now();
                        bed.lock().unwrap().engine.wait(&ticket).unwrap();
                        assert_restored(&mut bed.lock().unwrap(), &copies, &contents, "threads");
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        bed.lock().unwrap().finish();
    }
}

/// What is offloaded, with the blocks for as long as they may be read.
struct Live {
    copies: Vec<SlowCopy>,
    contents: Vec<Vec<u8>>,
    ticket: Ticket,
    blocks: Vec<Block>,
}

/// One step of a random sequence.
#[derive(Clone, Debug)]
enum Step {
    Offload(Vec<usize>),
    Wait(usize),
    Restore(usize),
    Free(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        prop::collection::vec(0_usize..30_000, 1..5).prop_map(Step::Offload),
        any::<usize>().prop_map(Step::Wait),
        any::<usize>().prop_map(Step::Restore),
        any::<usize>().prop_map(Step::Free),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_sequence_gives_back_every_byte(steps in prop::collection::vec(step(), 1..40), seed in any::<u64>()) {
        on_every_engine(30 * PAGE_BYTES as u64, |bed, tier| {
            let mut draw = Draw::seeded(seed);
            let mut live: Vec<Live> = Vec::new();
            for step in &steps {
                match step {
                    Step::Offload(sizes) => {
                        let (mut blocks, contents) = drawn(bed, &mut draw, sizes);
                        let wanted = sizes.iter().sum::<usize>().max(1).next_multiple_of(PAGE_BYTES);
                        match offload(bed, &mut blocks, tier) {
                            Ok((copies, ticket)) => live.push(Live { copies, contents, ticket, blocks }),
                            Err(error) => {
                                assert_eq!(error, CopyError::Full { bytes: wanted });
                                bed.finish();
                            }
                        }
                    }
                    _ if live.is_empty() => {}
                    Step::Wait(index) => {
                        let index = index % live.len();
                        let Live { ticket, blocks, .. } = &mut live[index];
                        bed.engine.wait(ticket).unwrap();
                        for block in blocks {
                            bed.write(block, &vec![0x11; block.len()]);
                        }
                    }
                    Step::Restore(index) => {
                        let Live { copies, contents, .. } = &live[index % live.len()];
                        assert_restored(bed, copies, contents, "sequence");
                    }
                    Step::Free(index) => {
                        let Live { copies, ticket, blocks, .. } = live.swap_remove(index % live.len());
                        drop(copies);
                        bed.engine.wait(&ticket).unwrap();
                        bed.finish();
                        drop(blocks);
                    }
                }
            }
            for Live { copies, contents, ticket, blocks } in live {
                assert_restored(bed, &copies, &contents, "end");
                bed.engine.wait(&ticket).unwrap();
                bed.finish();
                drop(blocks);
            }
            assert!(bed.engine.tiers().iter().all(|usage| usage.held_bytes == 0), "{}: room is lost", bed.name);
        });
    }
}
