//! What it gains to gather small storages into one slab: 256 of 8 KiB, one by one and together, there and back.
//!
//! One item is one storage. The paced host emulates a link of 12 GB/s and 10 µs, which every copy pays once.

use std::hint::black_box;

use divan::{Bencher, counter::ItemsCount};
use plimsoll_runtime::Link;
use plimsoll_runtime::hardware::Tier;
use plimsoll_runtime::torch::{CopyEngine, DeviceBytes, FileEngine, FileTier, HostEngine};

const STORAGES: usize = 256;
const BYTES: usize = 8 << 10;

/// The engine, its tier, and what must outlive it.
type Bench = (Box<dyn CopyEngine>, Tier, Option<tempfile::TempDir>);

fn host() -> Bench {
    (Box::new(HostEngine::new(None)), Tier::Host, None)
}

fn paced_host() -> Bench {
    (Box::new(HostEngine::new(Some(Link::symmetric(12e9, 10_000)))), Tier::Host, None)
}

fn file() -> Bench {
    let directory = tempfile::tempdir().expect("a directory for temporary files");
    let tier = FileTier { directory: directory.path().to_owned(), limit_bytes: 64 << 20, pace: None };
    let engine = FileEngine::new(tier).expect("a file there");
    (Box::new(engine), Tier::File, Some(directory))
}

/// Copies all pieces there and back, in groups of `together`. Everything is asked for before anything is waited for.
fn there_and_back(engine: &mut dyn CopyEngine, tier: Tier, pieces: &[DeviceBytes], together: usize) {
    let mut under_way = Vec::with_capacity(pieces.len());
    let mut copies = Vec::with_capacity(pieces.len());
    for group in pieces.chunks(together) {
        // SAFETY: the pieces live to the end, and nobody writes them before the waits.
        let (made, ticket) = unsafe { engine.offload(group, tier) }.expect("room");
        copies.extend(made);
        under_way.push(ticket);
    }
    under_way.drain(..).for_each(|ticket| engine.wait(&ticket).expect("a copy"));
    for (copies, pieces) in copies.chunks(together).zip(pieces.chunks(together)) {
        let ends: Vec<_> = copies.iter().zip(pieces).map(|(copy, piece)| (copy, piece.start)).collect();
        // SAFETY: as above.
        under_way.push(unsafe { engine.prefetch(&ends) }.expect("a worker"));
    }
    under_way.iter().for_each(|ticket| engine.wait(ticket).expect("a copy"));
    drop(copies);
}

#[divan::bench(args = [("host", 1), ("host", 256), ("paced host", 1), ("paced host", 256), ("file", 1), ("file", 256)])]
fn small_storages(bencher: Bencher, (engine, together): (&str, usize)) {
    let (mut engine, tier, directory) = match engine {
        "host" => host(),
        "paced host" => paced_host(),
        _ => file(),
    };
    let mut blocks = vec![vec![1_u8; BYTES]; STORAGES];
    let pieces: Vec<_> =
        blocks.iter_mut().map(|block| DeviceBytes { start: block.as_mut_ptr(), bytes: BYTES }).collect();
    bencher
        .counter(ItemsCount::new(STORAGES))
        .bench_local(|| there_and_back(&mut *engine, tier, black_box(&pieces), together));
    drop(engine);
    drop(directory);
}

fn main() {
    divan::main();
}
