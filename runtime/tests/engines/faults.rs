//! Faults, each injected: no byte is lost, nobody waits for ever.

use std::time::Duration;

use plimsoll_runtime::hardware::Tier;
use plimsoll_runtime::torch::copy::{CopiedBy, CopyEngine, CopyError, DeviceBytes, HostEngine, TieredEngine};

use crate::beds::{Block, file};
use crate::draw::Draw;
use crate::faulty::{Call, Fault, FaultyEngine};

/// An engine whose workers can be killed.
trait Mortal: CopyEngine {
    fn kill(&mut self);
}

impl Mortal for HostEngine {
    fn kill(&mut self) {
        self.kill_workers();
    }
}

impl Mortal for plimsoll_runtime::torch::copy::FileEngine {
    fn kill(&mut self) {
        self.kill_workers();
    }
}

fn piece(block: &mut Block) -> DeviceBytes {
    DeviceBytes { bytes: block.len(), start: block.start() }
}

fn block_of(bytes: &[u8]) -> Block {
    let mut block = Block::of(bytes.len());
    // SAFETY: the block has as many bytes.
    unsafe { block.start().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    block
}

fn bytes_of(block: &mut Block) -> &[u8] {
    // SAFETY: the block has as many bytes, and the tests have waited for all copies.
    unsafe { std::slice::from_raw_parts(block.start(), block.len()) }
}

fn survives_the_death_of_its_workers(mut engine: impl Mortal, tier: Tier) {
    let bytes = Draw::seeded(1).bytes(3_000_000);
    let mut block = block_of(&bytes);
    // SAFETY: blocks outlive all copies of this test, and are used between them only.
    unsafe {
        let (copies, made) = engine.offload(&[piece(&mut block)], tier).unwrap();
        engine.wait(&made).unwrap();
        engine.kill();
        assert_eq!(engine.wait(&made), Ok(()), "what was made before stays made");
        assert_eq!(engine.offload(&[piece(&mut block)], tier).map(|_| ()), Err(CopyError::WorkerDied));
        let mut back = Block::of(bytes.len());
        assert_eq!(engine.prefetch(&[(&copies[0], back.start())]).map(|_| ()), Err(CopyError::WorkerDied));
        engine.rescue(&copies[0], back.start()).unwrap();
        assert!(bytes_of(&mut back) == bytes, "bytes are lost");
        assert!(bytes_of(&mut block) == bytes, "an offload that failed has changed what it was to copy");
        let held: u64 = engine.tiers().iter().map(|usage| usage.held_bytes).sum();
        assert_eq!(held, 3_000_000_u64.next_multiple_of(4096), "the room of a copy that failed is lost");
    }
}

#[test]
fn dead_workers_are_an_error_and_bytes_are_saved_without_them() {
    survives_the_death_of_its_workers(HostEngine::copied_by(CopiedBy::Threads, u64::MAX, None), Tier::Host);
    let (engine, _directory) = file(1 << 30);
    survives_the_death_of_its_workers(engine, Tier::File);
}

#[test]
fn a_worker_that_dies_with_orders_queued_wakes_all_who_wait() {
    // A link so slow that the first copy is under way when the second is asked for, and the worker dies behind them.
    let link = plimsoll_runtime::Link::symmetric(1e9, 30_000_000);
    let mut engine = HostEngine::copied_by(CopiedBy::Threads, u64::MAX, Some(link));
    let mut blocks = [Block::of(100), Block::of(100)];
    // SAFETY: blocks outlive the engine's copies.
    unsafe {
        let (first_copy, first) = engine.offload(&[piece(&mut blocks[0])], Tier::Host).unwrap();
        let second = engine.offload(&[piece(&mut blocks[1])], Tier::Host).unwrap();
        let back = engine.prefetch(&[(&first_copy[0], blocks[0].start())]).unwrap();
        engine.kill_workers();
        for ticket in [&first, &second.1, &back] {
            assert_eq!(engine.wait(ticket), Ok(()), "it was asked for before the worker died");
        }
    }
}

#[test]
fn each_call_can_be_made_to_fail_once_and_works_again() {
    let full = CopyError::Full { bytes: 5 };
    let (mut engine, faults) = FaultyEngine::with_faults(HostEngine::new(None));
    let bytes = Draw::seeded(2).bytes(10_000);
    let mut block = block_of(&bytes);
    let mut back = Block::of(bytes.len());
    // SAFETY: blocks outlive all copies of this test, and are used between them only.
    unsafe {
        faults.inject(Call::Offload, 1, Fault::Error(full.clone()));
        let (copies, ticket) = engine.offload(&[piece(&mut block)], Tier::Host).unwrap();
        assert_eq!(engine.offload(&[piece(&mut block)], Tier::Host).map(|_| ()), Err(full.clone()));
        engine.offload(&[piece(&mut block)], Tier::Host).map(|(_, ticket)| engine.wait(&ticket)).unwrap().unwrap();
        faults.inject(Call::Wait, 0, Fault::Error(full.clone()));
        assert_eq!(engine.wait(&ticket), Err(full.clone()));
        assert_eq!(engine.wait(&ticket), Ok(()));
        faults.inject(Call::Prefetch, 0, Fault::Error(full.clone()));
        assert_eq!(engine.prefetch(&[(&copies[0], back.start())]).map(|_| ()), Err(full));
        faults.inject(Call::Wait, 0, Fault::Delay(Duration::from_millis(1)));
        let ticket = engine.prefetch(&[(&copies[0], back.start())]).unwrap();
        engine.wait(&ticket).unwrap();
        assert!(bytes_of(&mut back) == bytes);
        assert_eq!(faults.happened(), 4);
        faults.inject(Call::Wait, 0, Fault::WorkersDie);
        for _ in 0..3 {
            assert_eq!(engine.wait(&ticket), Err(CopyError::WorkerDied));
        }
        assert_eq!(engine.prefetch(&[(&copies[0], back.start())]).map(|_| ()), Err(CopyError::WorkerDied));
        let mut rescued = Block::of(bytes.len());
        engine.rescue(&copies[0], rescued.start()).unwrap();
        assert!(bytes_of(&mut rescued) == bytes);
    }
}

#[test]
fn a_prefetch_from_two_tiers_of_which_one_fails_leaves_nothing_under_way() {
    let (file, _directory) = file(1 << 20);
    let (file, faults) = FaultyEngine::with_faults(file);
    // Slow enough that the host's copy would still be under way.
    let host = HostEngine::new(Some(plimsoll_runtime::Link::symmetric(1e9, 20_000_000)));
    let mut engine = TieredEngine::new(Box::new(host), Box::new(file));
    let bytes = Draw::seeded(3).bytes(5_000);
    let mut block = block_of(&bytes);
    // SAFETY: blocks outlive all copies of this test, and are used between them only.
    unsafe {
        let (in_memory, first) = engine.offload(&[piece(&mut block)], Tier::Host).unwrap();
        let (in_file, second) = engine.offload(&[piece(&mut block)], Tier::File).unwrap();
        engine.wait(&first).and(engine.wait(&second)).unwrap();
        let (mut back, mut beside) = (Block::of(5_000), Block::of(5_000));
        faults.inject(Call::Prefetch, 0, Fault::Error(CopyError::WorkerDied));
        let both = [(&in_memory[0], back.start()), (&in_file[0], beside.start())];
        assert_eq!(engine.prefetch(&both).map(|_| ()), Err(CopyError::WorkerDied));
        // The host's copy has ended: what is written now stays.
        back.start().write_bytes(9, 5_000);
        let ticket = engine.prefetch(&[(&in_file[0], beside.start())]).unwrap();
        engine.wait(&ticket).unwrap();
        assert!(bytes_of(&mut back).iter().all(|&byte| byte == 9));
        assert!(bytes_of(&mut beside) == bytes);
        let both = [(&in_memory[0], back.start()), (&in_file[0], beside.start())];
        let ticket = engine.prefetch(&both).unwrap();
        engine.wait(&ticket).unwrap();
        assert!(bytes_of(&mut back) == bytes && bytes_of(&mut beside) == bytes);
    }
}
