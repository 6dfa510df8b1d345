//! Every ordering bug that an engine for a device with streams can have, looked for on a simulated device.
//!
//! A program draws what it does: kernels write and check storages, storages are offloaded, prefetched and recalled, copies
//! are freed while they are under way, blocks are handed out again at once in the compute stream's order, as the
//! caching allocator does. The right engine survives every seed. Each kind of wait, left out, is found.

use std::collections::HashMap;
use std::sync::Arc;

use plimsoll_runtime::hardware::Tier;
use plimsoll_runtime::timetable::Lane;
use plimsoll_runtime::torch::copy::{CopyEngine, CopyError, DeviceBytes, PAGE_BYTES, SlowCopy, StreamEngine, Ticket};

use crate::draw::Draw;
use crate::simulated::{BACK, COMPUTE, Failing, OUT, Sabotage, Simulated};

const STORAGES: usize = 12;
const SIZES: [usize; 3] = [200, 4500, 13_000];
const LIMIT_BYTES: u64 = 12 * PAGE_BYTES as u64;

#[derive(Clone, Copy)]
struct Address(*mut u8);
// SAFETY: the heap outlives what is queued.
unsafe impl Send for Address {}

/// Blocks of device memory, handed out last released first: as early as an allocator can.
#[derive(Default)]
struct Heap {
    free: HashMap<usize, Vec<Address>>,
    all: Vec<Box<[u8]>>,
}

impl Heap {
    fn take(&mut self, bytes: usize) -> Address {
        self.free.entry(bytes).or_default().pop().unwrap_or_else(|| {
            self.all.push(vec![0; bytes].into_boxed_slice());
            Address(self.all.last_mut().unwrap().as_mut_ptr())
        })
    }

    fn release(&mut self, bytes: usize, block: Address) {
        self.free.entry(bytes).or_default().push(block);
    }
}

enum Place {
    Resident(Address),
    Offloading(Address, SlowCopy, Ticket),
    Offloaded(SlowCopy),
    Prefetching(Address, Option<SlowCopy>, Ticket),
    /// Its bytes could not be brought back, which is lawful only on a device that is lost.
    Lost,
}

struct Storage {
    bytes: usize,
    version: u64,
    place: Place,
}

/// The program and what it runs on. Declared in the order in which it must end.
struct Program {
    engine: StreamEngine,
    storages: Vec<Storage>,
    device: Arc<Simulated>,
    heap: Heap,
    draw: Draw,
    refusals: u64,
    errors: u64,
}

fn pattern(version: u64, index: usize) -> u8 {
    (version.wrapping_mul(0x9e37_79b9).wrapping_add(index as u64 * 31) >> 3) as u8
}

impl Program {
    fn new(seed: u64) -> Self {
        let device = Arc::new(Simulated::new(seed, 10 * PAGE_BYTES));
        let engine = StreamEngine::new(Arc::clone(&device) as _, LIMIT_BYTES).unwrap();
        let mut heap = Heap::default();
        let storages = (0..STORAGES)
            .map(|index| {
                let bytes = SIZES[index % SIZES.len()];
                Storage { bytes, version: 0, place: Place::Resident(heap.take(bytes)) }
            })
            .collect();
        let mut program =
            Program { engine, storages, device, heap, draw: Draw::seeded(seed ^ 0xABCD), refusals: 0, errors: 0 };
        (0..STORAGES).for_each(|storage| program.write(storage));
        program
    }

    fn compute(&self, kernel: impl FnOnce() -> Option<String> + Send + 'static) {
        self.device.compute(Box::new(kernel));
    }

    fn fill(&self, block: Address, bytes: usize, version: u64) {
        self.compute(move || {
            let Address(start) = { block };
            // SAFETY: the heap outlives what is queued, and gives the block as many bytes.
            let block = unsafe { std::slice::from_raw_parts_mut(start, bytes) };
            block.iter_mut().enumerate().for_each(|(index, byte)| *byte = pattern(version, index));
            None
        });
    }

    fn write(&mut self, storage: usize) {
        let version = self.draw.next();
        if let Place::Resident(block) = self.storages[storage].place {
            self.storages[storage].version = version;
            self.fill(block, self.storages[storage].bytes, version);
        }
    }

    fn check(&self, storage: usize) {
        let Storage { bytes, version, ref place } = self.storages[storage];
        if let &Place::Resident(block) = place {
            self.compute(move || {
                let Address(start) = { block };
                // SAFETY: as above.
                let block = unsafe { std::slice::from_raw_parts(start, bytes) };
                let right = block.iter().enumerate().all(|(index, &byte)| byte == pattern(version, index));
                (!right).then(|| format!("storage {storage} holds other bytes than it was given"))
            });
        }
    }

    /// What an operator does with a temporary: takes a block, writes it, and lets go of it at once.
    fn scratch(&mut self) {
        let bytes = SIZES[self.draw.below(SIZES.len())];
        let block = self.heap.take(bytes);
        let garbage = self.draw.next();
        self.fill(block, bytes, garbage);
        self.heap.release(bytes, block);
    }

    fn some(&mut self, wanted: impl Fn(&Place) -> bool) -> Vec<usize> {
        let count = 1 + self.draw.below(3);
        let first = self.draw.below(STORAGES);
        let all = (0..STORAGES).map(|step| (first + step) % STORAGES);
        all.filter(|&storage| wanted(&self.storages[storage].place)).take(count).collect()
    }

    fn replace(&mut self, storage: usize, place: Place) -> Place {
        std::mem::replace(&mut self.storages[storage].place, place)
    }

    fn offload(&mut self) {
        let together = self.some(|place| matches!(place, Place::Resident(_)));
        if together.is_empty() {
            return;
        }
        let piece = |&storage: &usize| {
            let Storage { bytes, place: Place::Resident(Address(start)), .. } = self.storages[storage] else {
                unreachable!("only those that are resident")
            };
            DeviceBytes { start, bytes }
        };
        let pieces: Vec<DeviceBytes> = together.iter().map(piece).collect();
        // SAFETY: nobody writes the blocks before the wait.
        match unsafe { self.engine.offload(&pieces, Tier::Host) } {
            Ok((copies, ticket)) => {
                for ((storage, piece), copy) in together.into_iter().zip(pieces).zip(copies) {
                    self.replace(storage, Place::Offloading(Address(piece.start), copy, ticket.clone()));
                }
            }
            Err(CopyError::Full { .. }) => self.refusals += 1,
            Err(CopyError::Device { .. }) => self.errors += 1,
            Err(other) => panic!("{other}"),
        }
    }

    fn finish_offload(&mut self) {
        for storage in self.some(|place| matches!(place, Place::Offloading(..))) {
            let Place::Offloading(block, copy, ticket) = self.replace(storage, Place::Lost) else { unreachable!() };
            let place = match self.engine.wait(&ticket) {
                Ok(()) if self.draw.one_in(5) => Place::Resident(block),
                Ok(()) => {
                    self.heap.release(self.storages[storage].bytes, block);
                    Place::Offloaded(copy)
                }
                Err(_) => {
                    self.errors += 1;
                    Place::Resident(block)
                }
            };
            self.replace(storage, place);
        }
    }

    fn prefetch(&mut self) {
        let together = self.some(|place| matches!(place, Place::Offloaded(_)));
        if together.is_empty() {
            return;
        }
        let blocks: Vec<Address> =
            together.iter().map(|&storage| self.heap.take(self.storages[storage].bytes)).collect();
        let copies: Vec<SlowCopy> = together
            .iter()
            .map(|&storage| match self.replace(storage, Place::Lost) {
                Place::Offloaded(copy) => copy,
                _ => unreachable!("only those that are offloaded"),
            })
            .collect();
        let ends: Vec<_> = copies.iter().zip(&blocks).map(|(copy, block)| (copy, block.0)).collect();
        // SAFETY: nobody uses the blocks before the wait.
        let started = unsafe { self.engine.prefetch(&ends) };
        for ((storage, block), copy) in together.into_iter().zip(blocks).zip(copies) {
            match &started {
                Ok(ticket) => {
                    // Freed while it is being read, as often as not.
                    let copy = if self.draw.one_in(2) { None } else { Some(copy) };
                    self.replace(storage, Place::Prefetching(block, copy, ticket.clone()));
                }
                Err(_) => {
                    self.errors += 1;
                    self.heap.release(self.storages[storage].bytes, block);
                    self.replace(storage, Place::Offloaded(copy));
                }
            }
        }
    }

    fn finish_prefetch(&mut self) {
        for storage in self.some(|place| matches!(place, Place::Prefetching(..))) {
            let Place::Prefetching(block, copy, ticket) = self.replace(storage, Place::Lost) else { unreachable!() };
            let mut waited = self.engine.wait(&ticket);
            if let (Err(_), Some(copy)) = (&waited, &copy) {
                self.errors += 1;
                // SAFETY: nobody uses the block before the rescue has returned.
                waited = unsafe { self.engine.rescue(copy, block.0) };
            }
            if waited.is_ok() {
                self.replace(storage, Place::Resident(block));
            }
        }
    }

    /// Prefetches what is still being offloaded into another block, and uses it there before anybody has waited for
    /// the offload.
    fn turn_round(&mut self) {
        for storage in self.some(|place| matches!(place, Place::Offloading(..))) {
            let Place::Offloading(block, copy, offloaded) = self.replace(storage, Place::Lost) else { unreachable!() };
            let bytes = self.storages[storage].bytes;
            let other = self.heap.take(bytes);
            // SAFETY: nobody uses the other block before the wait.
            let started = unsafe { self.engine.prefetch(&[(&copy, other.0)]) };
            if started.and_then(|ticket| self.engine.wait(&ticket)).is_err() {
                self.errors += 1;
                self.heap.release(bytes, other);
                self.replace(storage, Place::Offloading(block, copy, offloaded));
                continue;
            }
            self.replace(storage, Place::Resident(other));
            self.check(storage);
            match self.engine.wait(&offloaded) {
                Ok(()) => self.heap.release(bytes, block),
                Err(_) => self.errors += 1,
            }
        }
    }

    /// What a plan does before an operator: nothing is computed in between.
    fn burst(&mut self) {
        self.engine.compute_stands(true);
        for _ in 0..self.draw.below(20) {
            match self.draw.below(5) {
                0 | 1 => self.offload(),
                2 => self.finish_offload(),
                3 => self.prefetch(),
                _ => self.finish_prefetch(),
            }
        }
        self.engine.compute_stands(false);
    }

    fn step(&mut self) {
        match self.draw.below(13) {
            0 | 1 => self.offload(),
            2 | 3 => self.finish_offload(),
            4 => self.prefetch(),
            5 => self.finish_prefetch(),
            6 => {
                let storage = self.draw.below(STORAGES);
                self.write(storage);
            }
            7 => (0..STORAGES).for_each(|storage| self.check(storage)),
            8 => self.turn_round(),
            9..12 => self.burst(),
            _ => self.scratch(),
        }
    }

    fn run(&mut self, steps: usize) {
        (0..steps).for_each(|_| self.step());
    }

    /// Brings everything back and checks it. Says what went wrong, and how many storages are lost.
    fn end(mut self) -> (Vec<String>, usize) {
        for _ in 0..2 {
            for _ in 0..20 * STORAGES {
                self.finish_offload();
                self.prefetch();
                self.finish_prefetch();
            }
            self.device.finish();
        }
        (0..STORAGES).for_each(|storage| self.check(storage));
        let lost = self.storages.iter().filter(|storage| !matches!(storage.place, Place::Resident(_))).count();
        let Program { engine, storages, device, heap, .. } = self;
        device.finish();
        drop(engine);
        drop(storages);
        let violations = device.finish();
        drop(heap);
        (violations, lost)
    }
}

/// Runs a program to its end on a device that `prepare` has had its way with.
fn violations(seed: u64, prepare: impl FnOnce(&Simulated)) -> Vec<String> {
    let mut program = Program::new(seed);
    prepare(&program.device);
    program.run(300);
    program.end().0
}

#[test]
fn the_engine_survives_every_order_that_a_device_may_choose() {
    let (mut refusals, mut host_waits) = (0, 0);
    for seed in 0..400 {
        let mut program = Program::new(seed);
        program.run(300);
        refusals += program.refusals;
        host_waits += program.engine.host_waits();
        assert_eq!(program.engine.host_waits(), program.device.synchronizations(), "every host wait is counted");
        assert!(program.device.page_locked_bytes() as u64 <= LIMIT_BYTES);
        let device = Arc::clone(&program.device);
        assert_eq!(program.end(), (vec![], 0), "seed {seed}");
        assert_eq!(device.left(), (0, 0), "seed {seed}: page-locked bytes and events are left");
    }
    assert!(refusals > 100 && host_waits > 100, "the limit was not felt: {refusals} refusals, {host_waits} host waits");
}

/// Programs among which there is one that notices a wait left out.
const PROGRAMS_MAX: u64 = 2000;

#[test]
fn each_wait_left_out_is_found() {
    let waits = [(OUT, COMPUTE), (OUT, BACK), (BACK, COMPUTE), (BACK, OUT), (COMPUTE, OUT), (COMPUTE, BACK)];
    let waits = waits.map(|(waiting, on)| Sabotage::NoWait { waiting, on });
    let marks = [COMPUTE, OUT, BACK].map(|on| Sabotage::EarlyMark { on });
    for sabotage in waits.into_iter().chain(marks).chain([Sabotage::NoSynchronize]) {
        let found = (0..PROGRAMS_MAX).find(|&seed| !violations(seed, |device| device.sabotage(sabotage)).is_empty());
        let Some(seed) = found else { panic!("{sabotage:?} makes no difference in {PROGRAMS_MAX} programs") };
        println!("{sabotage:?}: found by program {seed}");
    }
}

#[test]
fn any_one_driver_call_may_fail() {
    let mut errors = 0;
    for seed in 0..6 {
        // In half of the programs copies are timed.
        let start = |failing| {
            let mut program = Program::new(seed);
            program.device.fail(failing);
            if seed % 2 == 1 {
                let _ = program.engine.time_copies();
            }
            program
        };
        let calls = {
            let mut program = start(Failing::Never);
            program.run(120);
            program.device.calls()
        };
        for at in 0..calls {
            let mut program = start(Failing::Once { at });
            program.run(120);
            errors += program.errors;
            let device = Arc::clone(&program.device);
            let (wrong, lost) = program.end();
            let call = device.failed().unwrap_or("none");
            assert_eq!(wrong, Vec::<String>::new(), "seed {seed}, call {at} ({call}) fails");
            // When not even waiting works, the device is lost, and what copies may still use is left alone.
            if !call.starts_with("synchronize") {
                assert_eq!((lost, device.left()), (0, (0, 0)), "seed {seed}, call {at} ({call}) fails");
            }
        }
    }
    assert!(errors > 100, "only {errors} failures reached the program");
}

#[test]
fn copies_are_timed_as_the_device_makes_them() {
    let mut told = 0;
    for seed in 0..100 {
        let mut program = Program::new(seed);
        program.engine.time_copies().unwrap();
        program.run(300);
        let copies = program.engine.take_timed_copies().unwrap();
        assert!(copies.iter().all(|copy| copy.bytes > 0 && copy.start_ns < copy.end_ns), "seed {seed}: {copies:?}");
        for lane in [Lane::Offload, Lane::Prefetch] {
            let of_lane: Vec<_> = copies.iter().filter(|copy| copy.lane == lane).collect();
            let in_order = of_lane.windows(2).all(|pair| pair[0].end_ns <= pair[1].start_ns);
            assert!(in_order, "seed {seed}: a stream makes one copy at a time");
            told += of_lane.len();
        }
        program.run(50);
        assert_eq!(program.engine.take_timed_copies().unwrap(), [], "seed {seed}: nothing is timed any more");
        let device = Arc::clone(&program.device);
        assert_eq!(program.end(), (vec![], 0), "seed {seed}");
        assert_eq!(device.left(), (0, 0), "seed {seed}: page-locked bytes and events are left");
    }
    assert!(told > 1000, "{told} copies");
}

#[test]
fn a_device_that_is_lost_is_left_alone() {
    for seed in 0..4 {
        for at in (0..600).step_by(7) {
            let mut program = Program::new(seed);
            program.device.fail(Failing::From { at });
            program.run(150);
            // Nothing hangs, nothing is freed under a copy, nothing is handed out twice.
            let wrong = program.end().0;
            assert!(wrong.iter().all(|what| what.contains("let go of with work")), "seed {seed}, from {at}: {wrong:?}");
        }
    }
}

#[test]
fn a_steady_loop_never_makes_the_host_wait() {
    let device = Arc::new(Simulated::new(11, usize::MAX));
    let mut engine = StreamEngine::new(Arc::clone(&device) as _, 1 << 20).unwrap();
    let mut blocks: Vec<Vec<u8>> = (0..16).map(|index| vec![index as u8; 1000 * (1 + index % 5)]).collect();
    let mut allocations = 0;
    for iteration in 0..30 {
        for block in &mut blocks {
            let (start, bytes) = (block.as_mut_ptr(), block.len());
            // SAFETY: the block lives until the device has finished, and only copies touch it.
            unsafe {
                let (copies, ticket) = engine.offload(&[DeviceBytes { start, bytes }], Tier::Host).unwrap();
                engine.wait(&ticket).unwrap();
                let ticket = engine.prefetch(&[(&copies[0], start)]).unwrap();
                engine.wait(&ticket).unwrap();
                drop(copies);
            }
        }
        assert_eq!((engine.host_waits(), device.synchronizations()), (0, 0), "iteration {iteration}");
        if iteration == 0 {
            allocations = engine.page_locked_allocations();
        }
    }
    assert_eq!(engine.page_locked_allocations(), allocations, "every size has been seen in the first iteration");
    assert_eq!(device.finish(), Vec::<String>::new());
    let whole = blocks.iter().zip(0_u8..).all(|(block, index)| block.iter().all(|&byte| byte == index));
    assert!(whole, "bytes differ");
}

#[test]
fn offloads_while_compute_stands_mark_it_once() {
    let device = Arc::new(Simulated::new(5, usize::MAX));
    let mut engine = StreamEngine::new(Arc::clone(&device) as _, 1 << 20).unwrap();
    let block = [7_u8; 4096];
    let piece = DeviceBytes { start: block.as_ptr().cast_mut(), bytes: block.len() };
    // SAFETY: the block lives until the device has finished, and nobody writes it.
    let offload = |engine: &mut StreamEngine| unsafe { engine.offload(&[piece], Tier::Host) }.unwrap();
    for round in 1..4 {
        engine.compute_stands(true);
        let copies = [(); 5].map(|()| offload(&mut engine));
        engine.compute_stands(false);
        assert_eq!(device.marks(COMPUTE), 2 * round - 1, "five offloads");
        drop((copies, offload(&mut engine)));
        assert_eq!(device.marks(COMPUTE), 2 * round, "and one that is queued when compute may have gone on");
    }
    assert_eq!(device.finish(), Vec::<String>::new());
}

#[test]
fn page_locked_memory_that_the_system_refuses_is_an_answer() {
    let device = Arc::new(Simulated::new(1, 2 * PAGE_BYTES));
    let mut engine = StreamEngine::new(Arc::clone(&device) as _, 1 << 30).unwrap();
    let mut block = vec![3_u8; 2 * PAGE_BYTES + 1];
    let piece = DeviceBytes { start: block.as_mut_ptr(), bytes: block.len() };
    // SAFETY: the block lives until the device has finished.
    let refused = unsafe { engine.offload(&[piece], Tier::Host) }.unwrap_err();
    assert_eq!(refused, CopyError::Full { bytes: 3 * PAGE_BYTES });
    let piece = DeviceBytes { bytes: 2 * PAGE_BYTES, ..piece };
    // SAFETY: as above.
    let (copies, ticket) = unsafe { engine.offload(&[piece], Tier::Host) }.unwrap();
    engine.wait(&ticket).unwrap();
    assert_eq!(device.finish(), Vec::<String>::new());
    drop(copies);
}

#[test]
fn the_simulated_device_notices_what_it_is_there_to_notice() {
    use plimsoll_runtime::torch::copy::Device;
    let device = Simulated::new(3, usize::MAX);
    let (out, event) = (device.create_stream().unwrap(), device.create_event().unwrap());
    device.record_event(event, out).unwrap();
    device.record_event(event, out).unwrap();
    device.destroy_event(event);
    device.destroy_event(event);
    device.stream_wait_event(out, event).unwrap();
    let memory = device.allocate_page_locked(PAGE_BYTES).unwrap().unwrap();
    let mut block = vec![0; PAGE_BYTES];
    // SAFETY: the device checks what it is given, and the block lives until it has finished.
    unsafe {
        // Enough of them that one is queued yet.
        for _ in 0..20 {
            device.copy_to_device(memory.as_ptr(), block.as_mut_ptr(), PAGE_BYTES, out).unwrap();
        }
        device.free_page_locked(memory, PAGE_BYTES).unwrap();
        device.free_page_locked(memory, PAGE_BYTES).unwrap();
    }
    let noticed = device.finish();
    for what in
        ["is moved", "let go of twice", "after it was let go of", "copies are queued", "not allocated", "runs into"]
    {
        assert!(noticed.iter().any(|violation| violation.contains(what)), "{what}: {noticed:#?}");
    }
}
