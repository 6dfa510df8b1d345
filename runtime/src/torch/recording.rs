//! One iteration as it is recorded. Whether several are alike, and the trace that they make, is told in files of their own.
//!
//! It listens to operators and to the deaths of storages, whoever drives the iteration: alone, or beside evictions,
//! whose time it leaves out.

mod alike;
mod traced;

use std::collections::HashMap;
use std::time::Instant;

pub(super) use self::traced::{retime, retime_at_most, trace_of};
use super::ladder::Sizes;
use super::shim::{self, DeviceTimes, Entry, OnDevice, RESIZED, RawOperator};
use super::span::Span;
use crate::lineage::EVICTION_FLOOR_BYTES;
use crate::trace::{AccessMode, Phase, StorageId};

/// A storage as one iteration sees it: by order of appearance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Local {
    /// It existed before the iteration.
    Initial(u32),
    /// The iteration made it.
    Created(u32),
}

/// What is known of a storage, wherever it is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RawStorage {
    pub(crate) bytes: u64,
    pub(crate) locked: Option<&'static str>,
}

impl RawStorage {
    /// Why no iteration may evict it.
    fn locked_for_good(&self) -> Option<&'static str> {
        self.locked.filter(|&why| why != MADE_ANEW)
    }
}

/// A storage that was there before the iteration, and what the iteration before knew it as, if that was recorded.
pub(crate) type Known = (Option<Local>, RawStorage);

/// Why an initial storage that nobody knew is locked: it is another one in every iteration, so that no plan can name it
/// before its first use.
const MADE_ANEW: &str = "made anew before each iteration";

/// An operator that ran, and its parts of the iteration's lists.
#[derive(Clone, Copy, Debug)]
struct Step {
    name: u32,
    phase: Phase,
    not_replayable: Option<&'static str>,
    accesses: Span,
    /// Of the storages that the iteration created.
    creates: Span,
    /// What the program let go of between it and the next.
    frees: Span,
}

/// What was measured of one operator.
#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    cost_ns: u64,
    gap_ns: u64,
    /// What came between, on a device, which is not the program's.
    interrupted_ns: u64,
    /// Most bytes that it had allocated at once.
    peak_bytes: u64,
}

/// An iteration that has been recorded.
#[derive(Default)]
pub(crate) struct RecordedIteration {
    steps: Vec<Step>,
    accesses: Vec<(Local, AccessMode)>,
    frees: Vec<Local>,
    measured: Vec<Measured>,
    initial: Vec<RawStorage>,
    created: Vec<RawStorage>,
    /// What was there before it and still is, and was not used.
    unused: HashMap<Entry, RawStorage>,
    /// The step that made each created storage.
    made_by: Vec<usize>,
    /// The first step that autograd recorded, or had recorded something before.
    first_recorded: Option<usize>,
    /// Storages that live on: what the next iteration will find.
    local: HashMap<Entry, Local>,
    /// What the previous iteration knew an initial storage as.
    known_as: HashMap<u32, Local>,
    start_bytes: u64,
    peak_bytes: u64,
    tail_ns: u64,
    makespan_ns: u64,
    /// Whether it was found out what operators took.
    pub(crate) is_timed: bool,
    /// Whether by marks on a device, which it takes longer with.
    pub(crate) is_marked: bool,
    /// Whether storages were evicted meanwhile: then peak and makespan are not those of the untouched loop.
    is_pressed: bool,
}

/// An iteration being recorded.
pub(crate) struct Recording {
    now: RecordedIteration,
    /// Storages that were there before it, as long as it has not used them.
    before: HashMap<Entry, Known>,
    started: Instant,
    last_end: Instant,
    arrived: Instant,
    /// What autograd had recorded of this thread before.
    recorded: u64,
}

impl Default for Recording {
    fn default() -> Self {
        Recording::begin(HashMap::new(), Instant::now())
    }
}

impl Recording {
    /// Starts with the storages that are known.
    pub(crate) fn begin(before: HashMap<Entry, Known>, started: Instant) -> Self {
        let now = RecordedIteration::default();
        Recording { now, before, started, last_end: started, arrived: started, recorded: shim::recorded() }
    }

    /// An operator is about to run. Deaths must have been told. So many bytes were there before the first, if all were resident.
    #[inline(never)]
    pub(crate) fn arrive(&mut self, at: Instant, start_bytes: u64) {
        self.arrived = at;
        if self.now.steps.is_empty() {
            self.now.start_bytes = start_bytes;
        }
        if self.now.first_recorded.is_none() && shim::phase() == Phase::Forward && shim::recorded() != self.recorded {
            self.now.first_recorded = Some(self.now.steps.len());
        }
    }

    /// The program has let go of a storage since the last operator.
    pub(crate) fn freed(&mut self, entry: Entry) {
        if self.now.steps.is_empty() {
            // Let go of before the first operator, like the gradients of the iteration before: no part of this one.
            self.before.remove(&entry);
            return;
        }
        let local = match self.now.local.remove(&entry) {
            Some(local) => Some(local),
            // Never used by this iteration, but known from before.
            None => {
                let known = self.before.remove(&entry).filter(|(_, storage)| storage.locked_for_good().is_none());
                known.map(|(known, storage)| self.now.add_initial(storage, known))
            }
        };
        let RecordedIteration { steps, frees, .. } = &mut self.now;
        if let (Some(local), Some(step)) = (local, steps.last_mut()) {
            step.frees.push(frees, local);
        }
    }

    /// A storage was filled in past the dispatcher since it was made.
    pub(crate) fn filled(&mut self, entry: Entry) {
        if let Some(&Local::Created(index)) = self.now.local.get(&entry) {
            let made_by = self.now.made_by[index as usize];
            self.now.steps[made_by].not_replayable = Some("its bytes are filled in outside the dispatcher");
        }
    }

    /// The operator has run; `lost_ns` of its time went into making room.
    #[inline(never)]
    pub(crate) fn ran(&mut self, operator: &RawOperator, lost_ns: u64) {
        let gap_ns = self.arrived.saturating_duration_since(self.last_end).as_nanos() as u64;
        let mut accesses = Span::of(&mut self.now.accesses, []);
        for access in operator.accesses() {
            let local = match self.now.local.get(&access.entry) {
                Some(&local) => local,
                None => {
                    let mut storage = RawStorage { bytes: access.bytes, locked: access.locked() };
                    let known = match self.before.remove(&access.entry) {
                        Some((known, seen)) => {
                            storage.locked = storage.locked.or(seen.locked_for_good());
                            known
                        }
                        None => {
                            storage.locked = storage.locked.or(Some(MADE_ANEW));
                            None
                        }
                    };
                    let local = self.now.add_initial(storage, known);
                    self.now.local.insert(access.entry, local);
                    local
                }
            };
            let storage = self.now.storage_mut(local);
            storage.locked = access.locked().or(storage.locked);
            if storage.bytes != access.bytes {
                storage.locked = Some(RESIZED);
                storage.bytes = storage.bytes.max(access.bytes);
            }
            if access.is_filled() {
                self.filled(access.entry);
            }
            accesses.push(&mut self.now.accesses, (local, access.mode()));
        }
        for (index, created) in (self.now.created.len() as u32..).zip(operator.created()) {
            self.now.made_by.push(self.now.steps.len());
            self.now.local.insert(created.entry, Local::Created(index));
        }
        let created = operator.created().iter();
        let created = created.map(|created| RawStorage { bytes: created.bytes, locked: created.locked() });
        let creates = Span::of(&mut self.now.created, created);
        self.now.steps.push(Step {
            name: operator.name,
            phase: shim::phase(),
            not_replayable: operator.not_replayable(),
            accesses,
            creates,
            frees: Span::of(&mut self.now.frees, []),
        });
        self.now.measured.push(Measured {
            cost_ns: (operator.end_ns - operator.start_ns).saturating_sub(lost_ns),
            gap_ns,
            interrupted_ns: 0,
            peak_bytes: operator.peak_bytes,
        });
        self.last_end = Instant::now();
    }

    pub(crate) fn failed(&mut self) {
        self.last_end = Instant::now();
    }

    /// Storages were evicted.
    pub(crate) fn pressed(&mut self) {
        self.now.is_pressed = true;
    }

    /// Ends the iteration. The last deaths must have been told.
    ///
    /// `on_device` is what a device took which works through operators after they were issued. None where operators are done
    /// when they return.
    pub(crate) fn end(self, ended: Instant, peak_bytes: u64, on_device: Option<OnDevice>) -> RecordedIteration {
        let mut iteration = self.now;
        iteration.unused = self.before.into_iter().map(|(entry, (_, storage))| (entry, storage)).collect();
        iteration.is_timed = true;
        iteration.peak_bytes = peak_bytes;
        iteration.makespan_ns = (ended - self.started).as_nanos() as u64;
        iteration.tail_ns = ended.saturating_duration_since(self.last_end).as_nanos() as u64;
        if let Some(OnDevice { operators, makespan_ns }) = on_device {
            iteration.makespan_ns = makespan_ns;
            iteration.is_timed = operators.len() == iteration.measured.len();
            iteration.is_marked = iteration.is_timed;
            let mut busy_ns = 0;
            for (measured, DeviceTimes { gap_ns, interrupted_ns, cost_ns }) in
                iteration.measured.iter_mut().zip(operators)
            {
                *measured = Measured { cost_ns, gap_ns, interrupted_ns, ..*measured };
                busy_ns += gap_ns + interrupted_ns + cost_ns;
            }
            iteration.tail_ns = makespan_ns.saturating_sub(busy_ns);
        }
        iteration
    }

    /// How many operators have run.
    pub(crate) fn operators(&self) -> usize {
        self.now.operators()
    }
}

impl RecordedIteration {
    /// One that marks on a device told the times of.
    #[cfg(test)]
    pub(crate) fn marked(operators: usize, makespan_ns: u64) -> Self {
        let step = Step {
            name: 0,
            phase: Phase::Forward,
            not_replayable: None,
            accesses: Span::default(),
            creates: Span::default(),
            frees: Span::default(),
        };
        RecordedIteration {
            steps: vec![step; operators],
            measured: vec![Measured::default(); operators],
            makespan_ns,
            is_timed: true,
            is_marked: true,
            ..RecordedIteration::default()
        }
    }

    fn storage(&self, local: Local) -> &RawStorage {
        match local {
            Local::Initial(index) => &self.initial[index as usize],
            Local::Created(index) => &self.created[index as usize],
        }
    }

    fn storage_mut(&mut self, local: Local) -> &mut RawStorage {
        match local {
            Local::Initial(index) => &mut self.initial[index as usize],
            Local::Created(index) => &mut self.created[index as usize],
        }
    }

    /// An initial storage that appears for the first time, and what the previous iteration knew it as.
    fn add_initial(&mut self, storage: RawStorage, known: Option<Local>) -> Local {
        let index = self.initial.len() as u32;
        self.initial.push(storage);
        if let Some(known) = known {
            self.known_as.insert(index, known);
        }
        Local::Initial(index)
    }

    /// Takes what neither this iteration nor another that is alike has used for initial storages of both, where they may be evicted.
    pub(crate) fn share_unused(&mut self, other: &mut RecordedIteration) {
        let is_evictable = |storage: &RawStorage| storage.locked.is_none() && storage.bytes >= EVICTION_FLOOR_BYTES;
        let mut shared: Vec<(Entry, RawStorage)> = self.unused.drain().collect();
        shared.retain(|(entry, storage)| is_evictable(storage) && other.unused.get(entry) == Some(storage));
        shared.sort_unstable_by_key(|&(entry, _)| entry);
        for (entry, storage) in shared {
            for iteration in [&mut *self, other] {
                let local = iteration.add_initial(storage.clone(), None);
                iteration.local.insert(entry, local);
            }
        }
    }

    /// What the next iteration finds.
    pub(crate) fn survivors(&self) -> HashMap<Entry, Known> {
        self.local.iter().map(|(&entry, &local)| (entry, (Some(local), self.storage(local).clone()))).collect()
    }

    /// The name that the iteration has for a storage that lives on.
    pub(crate) fn local(&self, entry: Entry) -> Option<Local> {
        self.local.get(&entry).copied()
    }

    /// The names of all storages that live on.
    pub(crate) fn locals(&self) -> &HashMap<Entry, Local> {
        &self.local
    }

    /// Forgets what the iteration before knew storages as: it was another program.
    pub(crate) fn forget_predecessor(&mut self) {
        self.known_as.clear();
    }

    /// What the whole took.
    pub(crate) fn makespan_ns(&self) -> u64 {
        self.makespan_ns
    }

    /// Of every operator, the pause before it and its own time, in ns.
    pub(crate) fn times(&self) -> impl Iterator<Item = (u64, u64)> {
        self.measured.iter().map(|measured| (measured.gap_ns + measured.interrupted_ns, measured.cost_ns))
    }

    /// How many operators ran.
    pub(crate) fn operators(&self) -> usize {
        self.steps.len()
    }

    /// Whether anything ran.
    pub(crate) fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    fn id(&self, local: Local) -> StorageId {
        match local {
            Local::Initial(index) => StorageId(index),
            Local::Created(index) => StorageId(self.initial.len() as u32 + index),
        }
    }

    /// The storages that live on, by the names of the trace that this iteration makes.
    pub(crate) fn bindings(&self) -> Vec<(StorageId, Entry)> {
        self.local.iter().map(|(&entry, &local)| (self.id(local), entry)).collect()
    }

    /// What a step uses, and how.
    fn accesses(&self, step: &Step) -> &[(Local, AccessMode)] {
        &self.accesses[step.accesses.range()]
    }

    /// What a step creates.
    fn creates(&self, step: &Step) -> &[RawStorage] {
        &self.created[step.creates.range()]
    }

    /// All storages, in the order of their numbers.
    fn storages(&self) -> impl Iterator<Item = &RawStorage> {
        self.initial.iter().chain(&self.created)
    }

    /// The sizes of its storages, and what its operators had allocated.
    pub(crate) fn sizes(&self) -> Sizes {
        Sizes {
            storages: self.storages().map(|storage| Some(storage.bytes)).collect(),
            peaks: self.measured.iter().map(|measured| measured.peak_bytes).collect(),
            start_bytes: self.start_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_runtime_does_between_operators_is_no_time_of_theirs() {
        let mut recording = Recording::default();
        recording.now.measured = vec![Measured::default(); 2];
        let on_device = [
            DeviceTimes { gap_ns: 10, interrupted_ns: 500, cost_ns: 100 },
            DeviceTimes { gap_ns: 20, interrupted_ns: 0, cost_ns: 200 },
        ];
        let ended = recording.started + std::time::Duration::from_nanos(5);
        let on_device = OnDevice { operators: on_device.to_vec(), makespan_ns: 1_000 };
        let recorded = recording.end(ended, 0, Some(on_device));
        let measured: Vec<_> = recorded.measured.iter().map(|measured| (measured.gap_ns, measured.cost_ns)).collect();
        assert_eq!(measured, [(10, 100), (20, 200)]);
        assert_eq!(recorded.times().collect::<Vec<_>>(), [(510, 100), (20, 200)], "when each begins and ends");
        assert_eq!((recorded.makespan_ns, recorded.tail_ns, recorded.is_marked), (1_000, 170, true));
    }
}
