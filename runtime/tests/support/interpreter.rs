//! A second opinion on what a schedule means: carries it out on symbolic bytes, beside the program itself.
//!
//! Written from the documentation of the instructions and not from the timeline. It knows nothing of time, budgets
//! or plans; versions are numbered here anew, in order of production. Every version has a symbolic value, so bytes of
//! the wrong version are noticed where they are used. Whatever is unlawful panics.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use plimsoll_runtime::hardware::{PAGE_BYTES, Tier};
use plimsoll_runtime::lineage::{EVICTION_FLOOR_BYTES, Edges};
use plimsoll_runtime::schedule::Instruction;
use plimsoll_runtime::trace::{AccessMode, OperatorId, StorageId};
use plimsoll_runtime::{Schedule, Trace};

type Value = u64;
/// A version's position in the order of production.
type Version = usize;

/// What the program without any eviction would compute, operator by operator.
struct Truth {
    /// What each version is.
    value: Vec<Value>,
    /// Per operator and access: the version that is accessed.
    accessed: Vec<Vec<Version>>,
    /// Per operator and access: the version that is left there, if it is written.
    left: Vec<Vec<Option<Version>>>,
    /// Per operator: the version of each storage that it creates.
    created: Vec<Vec<Version>>,
}

impl Truth {
    fn of(trace: &Trace) -> Self {
        let mut truth = Truth { value: Vec::new(), accessed: vec![], left: vec![], created: vec![] };
        let mut holds = vec![usize::MAX; trace.storages.len()];
        for (storage, holds) in holds.iter_mut().enumerate().take(trace.initial_storages as usize) {
            *holds = truth.version(hash(("initial", storage)));
        }
        for (index, operator) in trace.operators.iter().enumerate() {
            let accessed: Vec<Version> = operator.accesses.iter().map(|access| holds[access.storage.index()]).collect();
            let inputs = reads(trace, index).map(|position| truth.value[accessed[position]]).collect::<Vec<_>>();
            let mut left = Vec::new();
            for (position, access) in operator.accesses.iter().enumerate() {
                let old = truth.value[accessed[position]];
                left.push(match access.mode {
                    AccessMode::Read => None,
                    AccessMode::SideEffect => Some(truth.version(hash((old, index, &inputs)))),
                    AccessMode::Write | AccessMode::Overwrite => {
                        Some(truth.version(output_value(index, position, &inputs)))
                    }
                });
            }
            let first = operator.accesses.len();
            let created = (first..first + operator.creates.len())
                .map(|position| truth.version(output_value(index, position, &inputs)))
                .collect::<Vec<_>>();
            for (access, left) in operator.accesses.iter().zip(&left) {
                holds[access.storage.index()] = left.unwrap_or(holds[access.storage.index()]);
            }
            for (storage, version) in operator.creates.iter().zip(&created) {
                holds[storage.index()] = *version;
            }
            truth.accessed.push(accessed);
            truth.left.push(left);
            truth.created.push(created);
        }
        truth
    }

    fn version(&mut self, value: Value) -> Version {
        self.value.push(value);
        self.value.len() - 1
    }
}

/// Positions of the accesses whose bytes matter to the operator's results.
fn reads(trace: &Trace, operator: usize) -> impl Iterator<Item = usize> {
    let accesses = &trace.operators[operator].accesses;
    let matters = |mode| matches!(mode, AccessMode::Read | AccessMode::Write);
    accesses.iter().enumerate().filter(move |(_, access)| matters(access.mode)).map(|(position, _)| position)
}

fn output_value(operator: usize, position: usize, inputs: &[Value]) -> Value {
    hash(("output", operator, position, inputs))
}

fn hash(what: impl Hash) -> Value {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    hasher.finish()
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Absent,
    Resident,
    Offloading,
    Offloaded,
    Prefetching,
    Dropped,
}

#[derive(Clone, Copy, Debug)]
struct Seat {
    place: Place,
    /// The version that the program expects in it.
    holds: Version,
    /// The bytes on the device.
    device: Option<Value>,
    /// The bytes in the slow tier.
    copy: Option<Value>,
}

/// What an iteration under a schedule amounted to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Carried {
    /// Most device bytes at any moment.
    pub peak_bytes: u64,
    /// Time of the reruns.
    pub rerun_ns: u64,
    /// Reruns.
    pub reruns: u64,
    /// Bytes copied to the slow tier.
    pub offloaded_bytes: u64,
    /// Bytes copied back.
    pub prefetched_bytes: u64,
    /// Most bytes of copies in the host's memory, and in the file.
    pub slow_peak_bytes: [u64; 2],
    /// The same with what engines hold for them: whole pages, and slabs until the last copy in them goes.
    pub held_peak_bytes: [u64; 2],
    /// Copies that moved together with the one before them.
    pub joined: u64,
}

/// Copies that were made together.
#[derive(Debug)]
struct Slab {
    tier: Tier,
    bytes: u64,
    /// Those that are still wanted.
    copies: usize,
}

impl Slab {
    /// What it takes of its tier.
    fn held_bytes(&self) -> u64 {
        if self.copies == 0 { 0 } else { self.bytes.div_ceil(PAGE_BYTES) * PAGE_BYTES }
    }
}

struct Interpreter<'a> {
    trace: &'a Trace,
    edges: &'a Edges,
    truth: Truth,
    seats: Vec<Seat>,
    beside: BTreeMap<Version, (StorageId, Value)>,
    /// Operators that have run.
    done: usize,
    device_bytes: u64,
    slabs: Vec<Slab>,
    /// Per storage: the slab that its copy is in.
    slab: Vec<Option<usize>>,
    /// Per storage that stays away: which of the schedule's copies is its last.
    last_copy: Vec<Option<usize>>,
    /// The slab of such a copy of the iteration before, which went by the same schedule.
    earlier: BTreeMap<usize, usize>,
    slow_bytes: [u64; 2],
    held_bytes: [u64; 2],
    /// The step before the one at hand, if both stand before the same operator.
    previous: Option<Instruction>,
    carried: Carried,
}

/// Runs one iteration of `trace`, or a part of one between `edges`, under `schedule`. Panics where the schedule does anything unlawful.
pub fn carry_out(trace: &Trace, edges: &Edges, schedule: &Schedule) -> Carried {
    let truth = Truth::of(trace);
    let seats = (0..trace.storages.len())
        .map(|index| match index < trace.initial_storages as usize {
            true => Seat { place: Place::Resident, holds: index, device: Some(truth.value[index]), copy: None },
            false => Seat { place: Place::Absent, holds: usize::MAX, device: None, copy: None },
        })
        .collect();
    let mut interpreter = Interpreter {
        trace,
        edges,
        truth,
        seats,
        beside: BTreeMap::new(),
        done: 0,
        device_bytes: trace.unseen_bytes,
        slabs: Vec::new(),
        slab: vec![None; trace.storages.len()],
        last_copy: last_copies(trace, edges, schedule),
        earlier: BTreeMap::new(),
        slow_bytes: [0; 2],
        held_bytes: [0; 2],
        previous: None,
        carried: Carried::default(),
    };
    let initial: u64 = trace.storages[..trace.initial_storages as usize].iter().map(|storage| storage.bytes).sum();
    let away = schedule.steps().iter().filter_map(|(_, step)| match step {
        Instruction::LeaveAway { storage, .. } => Some(interpreter.bytes(*storage)),
        _ => None,
    });
    let away_bytes: u64 = away.sum();
    interpreter.allocate(initial - away_bytes);
    interpreter.device_bytes += away_bytes;
    let mut steps = schedule.steps().iter().peekable();
    for index in 0..=trace.operators.len() {
        while let Some(&(_, instruction)) = steps.next_if(|(before, _)| *before as usize == index) {
            interpreter.carry_out(instruction);
            interpreter.previous = Some(instruction);
        }
        interpreter.previous = None;
        if index < trace.operators.len() {
            interpreter.operate(index);
        }
    }
    assert_eq!(steps.next(), None, "a step is out of order or beyond the end");
    interpreter.finish()
}

/// [`Interpreter::last_copy`].
fn last_copies(trace: &Trace, edges: &Edges, schedule: &Schedule) -> Vec<Option<usize>> {
    let (mut last, mut copies) = (vec![None; trace.storages.len()], 0);
    for (_, step) in schedule.steps() {
        if let Instruction::Offload { storage, joins, .. } = step {
            copies += usize::from(!joins);
            last[storage.index()] = edges.stays.contains(storage).then_some(copies);
        }
    }
    last
}

impl Interpreter<'_> {
    fn bytes(&self, storage: StorageId) -> u64 {
        self.trace.storages[storage.index()].bytes
    }

    fn allocate(&mut self, bytes: u64) {
        self.device_bytes += bytes;
        self.carried.peak_bytes = self.carried.peak_bytes.max(self.device_bytes);
    }

    fn release(&mut self, bytes: u64) {
        self.device_bytes -= bytes;
    }

    fn new_slab(&mut self, tier: Tier) -> usize {
        self.slabs.push(Slab { tier, bytes: 0, copies: 0 });
        self.slabs.len() - 1
    }

    /// A copy is made.
    fn copy_into(&mut self, slab: usize, storage: StorageId) {
        assert_eq!(self.slab[storage.index()].replace(slab), None, "storage {} has a copy", storage.0);
        let (bytes, tier) = (self.bytes(storage), self.slabs[slab].tier);
        self.change(slab, |slab| {
            slab.bytes += bytes;
            slab.copies += 1;
        });
        self.slow_bytes[tier as usize] += bytes;
        let most = [
            (&mut self.carried.slow_peak_bytes, &self.slow_bytes),
            (&mut self.carried.held_peak_bytes, &self.held_bytes),
        ];
        for (most, now) in most {
            most[tier as usize] = most[tier as usize].max(now[tier as usize]);
        }
    }

    fn change(&mut self, slab: usize, change: impl FnOnce(&mut Slab)) {
        let slab = &mut self.slabs[slab];
        let before = slab.held_bytes();
        change(slab);
        let held = &mut self.held_bytes[slab.tier as usize];
        *held = *held - before + slab.held_bytes();
    }

    /// A copy's room is given back.
    fn forget_copy(&mut self, storage: StorageId) {
        self.seats[storage.index()].copy = None;
        if let Some(slab) = self.slab[storage.index()].take() {
            self.slow_bytes[self.slabs[slab].tier as usize] -= self.bytes(storage);
            self.change(slab, |slab| slab.copies -= 1);
        }
    }

    /// The tier that its copy is in.
    fn tier(&self, storage: StorageId) -> Option<Tier> {
        self.slab[storage.index()].map(|slab| self.slabs[slab].tier)
    }

    fn expect(&self, storage: StorageId, place: Place, what: Instruction) {
        let seat = self.seats[storage.index()];
        assert_eq!(seat.place, place, "{what:?} before operator {}: {seat:?}", self.done);
        let facts = &self.trace.storages[storage.index()];
        assert!(facts.locked.is_none() && facts.bytes >= EVICTION_FLOOR_BYTES, "{what:?} of {facts:?}");
    }

    fn carry_out(&mut self, instruction: Instruction) {
        match instruction {
            Instruction::Offload { storage, tier, joins } => {
                self.expect(storage, Place::Resident, instruction);
                if joins {
                    let alike = |other| matches!(other, Instruction::Offload { tier: before, .. } if before == tier);
                    assert!(self.previous.is_some_and(alike), "{instruction:?} joins {:?}", self.previous);
                    self.carried.joined += 1;
                }
                let slab = if joins { self.slabs.len() - 1 } else { self.new_slab(tier) };
                self.copy_into(slab, storage);
                self.carried.offloaded_bytes += self.bytes(storage);
                let seat = &mut self.seats[storage.index()];
                (seat.place, seat.copy) = (Place::Offloading, seat.device);
            }
            Instruction::LeaveAway { storage, tier } => {
                self.expect(storage, Place::Resident, instruction);
                assert!(self.done == 0 && self.edges.away.contains(&storage), "{instruction:?} is not away");
                let earlier = self.last_copy[storage.index()].and_then(|copy| self.earlier.get(&copy).copied());
                let slab = earlier.filter(|&slab| self.slabs[slab].tier == tier).unwrap_or_else(|| self.new_slab(tier));
                self.earlier.extend(self.last_copy[storage.index()].map(|copy| (copy, slab)));
                self.copy_into(slab, storage);
                self.seats[storage.index()].copy = self.seats[storage.index()].device;
                self.vacate(storage, Place::Offloaded);
            }
            Instruction::FinishOffload(storage) => {
                self.expect(storage, Place::Offloading, instruction);
                self.vacate(storage, Place::Offloaded);
            }
            Instruction::Recall(storage) => {
                self.expect(storage, Place::Offloading, instruction);
                self.seats[storage.index()].place = Place::Resident;
            }
            Instruction::Prefetch { storage, joins } => {
                self.expect(storage, Place::Offloaded, instruction);
                if joins {
                    let alike = |other| match other {
                        Instruction::Prefetch { storage: before, .. } => self.tier(before) == self.tier(storage),
                        _ => false,
                    };
                    assert!(self.previous.is_some_and(alike), "{instruction:?} joins {:?}", self.previous);
                    self.carried.joined += 1;
                }
                self.carried.prefetched_bytes += self.bytes(storage);
                self.allocate(self.bytes(storage));
                self.seats[storage.index()].place = Place::Prefetching;
            }
            Instruction::FinishPrefetch(storage) => {
                self.expect(storage, Place::Prefetching, instruction);
                let seat = &mut self.seats[storage.index()];
                (seat.place, seat.device) = (Place::Resident, seat.copy);
            }
            Instruction::Discard(storage) => {
                self.expect(storage, Place::Resident, instruction);
                let seat = self.seats[storage.index()];
                assert!(seat.copy.is_some() && seat.copy == seat.device, "{instruction:?} has no equal copy");
                self.vacate(storage, Place::Offloaded);
            }
            Instruction::Drop(storage) => {
                self.expect(storage, Place::Resident, instruction);
                self.vacate(storage, Place::Dropped);
            }
            Instruction::Rerun(operator) => self.rerun(operator),
            Instruction::Release(version) => {
                let found = self.beside.remove(&version.index());
                let (storage, _) = found.unwrap_or_else(|| panic!("{instruction:?} of what is not there"));
                self.release(self.bytes(storage));
            }
        }
    }

    fn vacate(&mut self, storage: StorageId, place: Place) {
        self.release(self.bytes(storage));
        let seat = &mut self.seats[storage.index()];
        (seat.place, seat.device) = (place, None);
    }

    fn rerun(&mut self, operator: OperatorId) {
        let (trace, index) = (self.trace, operator.index());
        let facts = &trace.operators[index];
        assert!(index < self.done, "operator {index} is rerun before it ran");
        assert!(facts.not_replayable.is_none(), "operator {index} cannot be rerun");
        let mut inputs = Vec::new();
        for position in reads(trace, index) {
            let access = facts.accesses[position];
            let version = self.truth.accessed[index][position];
            let beside = self.beside.get(&version).map(|&(_, value)| value);
            let seat = self.seats[access.storage.index()];
            let in_place = (seat.place == Place::Resident && seat.holds == version).then_some(seat.device).flatten();
            assert!(
                access.mode != AccessMode::Write || beside.is_some(),
                "a rerun of operator {index} would write over storage {}",
                access.storage.0,
            );
            let value = beside.or(in_place);
            let value = value.unwrap_or_else(|| panic!("a rerun of operator {index} misses version {version}"));
            assert_eq!(value, self.truth.value[version], "a rerun of operator {index} reads other bytes");
            inputs.push(value);
        }
        let workspace = facts.workspace_bytes;
        let mut made = Vec::new();
        for (position, access) in facts.accesses.iter().enumerate() {
            let Some(version) = self.truth.left[index][position] else { continue };
            match access.mode {
                AccessMode::Read | AccessMode::SideEffect => {}
                AccessMode::Overwrite => {
                    self.allocate(self.bytes(access.storage));
                    made.push((access.storage, version, position));
                }
                AccessMode::Write => {
                    self.beside.remove(&self.truth.accessed[index][position]).expect("it was found above");
                    made.push((access.storage, version, position));
                }
            }
        }
        for (offset, &storage) in facts.creates.iter().enumerate() {
            self.allocate(self.bytes(storage));
            made.push((storage, self.truth.created[index][offset], facts.accesses.len() + offset));
        }
        self.allocate(workspace);
        self.release(workspace);
        for (storage, version, position) in made {
            let value = output_value(index, position, &inputs);
            let seat = &mut self.seats[storage.index()];
            if seat.place == Place::Dropped && seat.holds == version {
                (seat.place, seat.device) = (Place::Resident, Some(value));
            } else {
                let twice = self.beside.insert(version, (storage, value));
                assert_eq!(twice, None, "a rerun of operator {index} makes version {version} a second time");
            }
        }
        self.carried.reruns += 1;
        self.carried.rerun_ns += facts.cost_ns;
    }

    /// The program runs its next operator.
    fn operate(&mut self, index: usize) {
        let operator = &self.trace.operators[index];
        for (access, &version) in operator.accesses.iter().zip(&self.truth.accessed[index]) {
            let seat = &mut self.seats[access.storage.index()];
            let expected = Some(self.truth.value[version]);
            assert!(
                seat.place == Place::Resident && seat.holds == version && seat.device == expected,
                "operator {index} reads storage {}: {seat:?}",
                access.storage.0,
            );
        }
        for access in &operator.accesses {
            self.forget_copy(access.storage);
        }
        let created: u64 = operator.creates.iter().map(|&storage| self.bytes(storage)).sum();
        self.allocate(created + operator.workspace_bytes);
        self.release(operator.workspace_bytes);
        let written = operator.accesses.iter().map(|access| access.storage).zip(self.truth.left[index].clone());
        let created = operator.creates.iter().copied().zip(self.truth.created[index].iter().copied().map(Some));
        for (storage, version) in written.chain(created).collect::<Vec<_>>() {
            let Some(version) = version else { continue };
            let device = Some(self.truth.value[version]);
            self.seats[storage.index()] = Seat { place: Place::Resident, holds: version, device, copy: None };
        }
        for &storage in &operator.frees {
            match self.seats[storage.index()].place {
                Place::Resident | Place::Offloading | Place::Prefetching => self.vacate(storage, Place::Absent),
                Place::Offloaded | Place::Dropped => self.seats[storage.index()].place = Place::Absent,
                Place::Absent => panic!("storage {} is freed twice", storage.0),
            }
            self.forget_copy(storage);
        }
        self.done += 1;
    }

    fn finish(self) -> Carried {
        assert!(self.beside.is_empty(), "left beside their storages: {:?}", self.beside);
        let mut live_bytes = self.trace.unseen_bytes;
        for (index, seat) in self.seats.iter().enumerate() {
            let is_initial = index < self.trace.initial_storages as usize;
            let storage = StorageId(index as u32);
            let is_leaving = seat.place == Place::Offloading;
            let is_away = is_leaving || seat.place == Place::Offloaded;
            if is_away && is_initial && self.edges.stays.contains(&storage) {
                assert_eq!(seat.copy, Some(self.truth.value[seat.holds]), "storage {index} stays away: {seat:?}");
                live_bytes += if is_leaving { self.trace.storages[index].bytes } else { 0 };
            } else if seat.place != Place::Absent {
                let right = seat.place == Place::Resident && seat.device == Some(self.truth.value[seat.holds]);
                assert!(right, "storage {index} at the iteration's end: {seat:?}");
                live_bytes += self.trace.storages[index].bytes;
            }
        }
        assert_eq!(self.device_bytes, live_bytes);
        self.carried
    }
}
