//! One iteration as it is recorded, and the trace that several equal ones make.
//!
//! It listens to operators and to the deaths of storages, whoever drives the iteration: alone, or beside evictions,
//! whose time it leaves out.

use std::collections::HashMap;
use std::time::Instant;

use super::ladder::Sizes;
use super::recorder::RecordError;
use super::session::operator_name;
use super::shim::{self, DeviceTimes, Entry, OnDevice, RESIZED, RawOperator};
use super::span::Span;
use crate::lineage::{EVICTION_FLOOR_BYTES, Lineage};
use crate::trace::{Access, AccessMode, Class, Operator, Phase, Storage, StorageId, Trace};

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

    /// What a step lets go of, but for what is locked and what may be disregarded.
    fn frees(&self, step: &Step, may_be: impl Fn(Local) -> bool) -> impl Iterator<Item = Local> {
        let counts = move |local: &Local| self.storage(*local).locked.is_none() && !may_be(*local);
        self.frees[step.frees.range()].iter().copied().filter(counts)
    }

    /// From where autograd first recorded an operator to the last update.
    fn training(&self) -> &[Step] {
        let last = self.steps.iter().rposition(|step| step.phase == Phase::Update);
        let end = last.map_or(self.steps.len(), |last| last + 1);
        self.first_recorded.and_then(|first| self.steps.get(first..end)).unwrap_or_default()
    }

    /// Whether both train alike, in operators and sizes, whatever they do before and after.
    pub(crate) fn trains_like(&self, other: &RecordedIteration) -> bool {
        let does = |iteration: &RecordedIteration, step: &Step| {
            let accesses = iteration.accesses(step).iter().map(|&(local, mode)| (iteration.storage(local).bytes, mode));
            let creates = iteration.creates(step).iter().map(|created| created.bytes);
            (step.name, accesses.collect::<Vec<_>>(), creates.collect::<Vec<_>>())
        };
        let (steps, others) = (self.training(), other.training());
        !steps.is_empty()
            && steps.len() == others.len()
            && steps.iter().zip(others).all(|(step, like)| does(self, step) == does(other, like))
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

    /// The first of as many operators that does something else, or to other storages. What is too small to be evicted in both does not
    /// tell them apart: which one that it made an iteration reads, and which lives longer, may depend on which of two numbers is the
    /// larger. What is locked may die whenever another thread lets go of it.
    fn differs_at(&self, other: &RecordedIteration) -> Option<usize> {
        let is_small = |local: Local| [self, other].iter().all(|it| it.storage(local).bytes < EVICTION_FLOOR_BYTES);
        let is_number = |local: Local| matches!(local, Local::Created(_)) && is_small(local);
        let does = |step: &Step| (step.name, step.phase, step.not_replayable, step.creates);
        let uses_alike = |a: &[(Local, AccessMode)], b: &[(Local, AccessMode)]| {
            let is_alike = |((local, mode), (like, as_mode)): (&(Local, AccessMode), &(Local, AccessMode))| {
                mode == as_mode && (local == like || is_number(*local) && is_number(*like))
            };
            a.len() == b.len() && a.iter().zip(b).all(is_alike)
        };
        let is_like = |(a, b): (&Step, &Step)| {
            does(a) == does(b)
                && uses_alike(self.accesses(a), other.accesses(b))
                && self.frees(a, is_small).eq(other.frees(b, is_small))
        };
        self.steps.iter().zip(&other.steps).position(|both| !is_like(both))
    }

    /// Whether the same operators do the same to the same storages, which may be of other sizes.
    pub(crate) fn same_but_for_sizes(&self, other: &RecordedIteration) -> bool {
        let locks =
            |iteration: &RecordedIteration| iteration.storages().map(|storage| storage.locked).collect::<Vec<_>>();
        self.steps.len() == other.steps.len()
            && self.initial.len() == other.initial.len()
            && locks(self) == locks(other)
            && self.differs_at(other).is_none()
    }

    /// Whether the same operators do the same to the same storages.
    pub(crate) fn same_steps(&self, other: &RecordedIteration) -> Result<(), RecordError> {
        let differ = |what: String| Err(RecordError::NotRepeating(what));
        if self.steps.len() != other.steps.len() {
            return differ(format!("{} operators, then {}", self.steps.len(), other.steps.len()));
        }
        if self.initial != other.initial || self.created != other.created {
            return differ("as many operators use storages of other sizes".to_owned());
        }
        let Some(index) = self.differs_at(other) else { return Ok(()) };
        let name = |iteration: &RecordedIteration| operator_name(iteration.steps[index].name);
        differ(format!("operator {index} is {}, then {}", name(self), name(other)))
    }
}

/// Makes a trace of iterations that did the same; storages are named as in the last one.
///
/// `names` are those of workload, family and device. Iterations that were not timed say what the whole takes where nobody asks.
pub(crate) fn trace_of(
    iterations: &[&RecordedIteration],
    marks: &HashMap<Entry, Class>,
    [workload, family, device]: [&str; 3],
) -> Result<Trace, RecordError> {
    if iterations.len() < 2 {
        return Err(RecordError::TooFew(iterations.len()));
    }
    trace_of_alike(iterations, marks, [workload, family, device])
}

/// The same of iterations of which the caller knows that their program repeats: one will do.
pub(crate) fn trace_of_alike(
    iterations: &[&RecordedIteration],
    marks: &HashMap<Entry, Class>,
    [workload, family, device]: [&str; 3],
) -> Result<Trace, RecordError> {
    let (&last, others) = iterations.split_last().expect("at least one");
    if last.steps.is_empty() {
        return Err(RecordError::Empty);
    }
    for other in others {
        other.same_steps(last)?;
    }
    let (timed, untimed): (Vec<&RecordedIteration>, Vec<_>) =
        iterations.iter().partition(|iteration| iteration.is_timed);
    if timed.is_empty() {
        return Err(RecordError::TooFew(0));
    }
    let (names, operators) = operators_of(iterations, &timed, last);
    let storages = last.storages().map(|storage| Storage {
        bytes: storage.bytes,
        class: Class::Temporary,
        locked: storage.locked.map(str::to_owned),
    });
    // A storage that outlived the last iteration but one, and what the last one found it to be.
    let carried = last.known_as.iter().map(|(&to, &from)| (last.id(from), StorageId(to)));
    let initial_bytes: u64 = last.initial.iter().map(|storage| storage.bytes).sum();
    let median = |of: &[&RecordedIteration], measure: fn(&RecordedIteration) -> u64| {
        median_and_spread(of.iter().map(|iteration| measure(iteration)).collect()).0
    };
    let mut trace = Trace {
        workload: workload.to_owned(),
        family: family.to_owned(),
        device: device.to_owned(),
        recorded_iterations: iterations.len() as u32,
        unseen_bytes: last.start_bytes.saturating_sub(initial_bytes),
        tail_ns: median(&timed, |iteration| iteration.tail_ns),
        makespan_ns: median(&timed, |iteration| iteration.makespan_ns),
        peak_bytes: iterations.iter().map(|iteration| iteration.peak_bytes).max().expect("at least one"),
        names,
        storages: storages.collect(),
        initial_storages: last.initial.len() as u32,
        operators,
        carried: carried.filter(|(from, to)| from != to).collect(),
    };
    trace.carried.sort_unstable();
    let marked = marks.iter().filter_map(|(&entry, &class)| Some((last.id(last.local(entry)?), class)));
    classify(&mut trace, marked.collect());
    if !untimed.is_empty() {
        trace.cut_to(median(&untimed, |iteration| iteration.makespan_ns));
    }
    debug_assert_eq!(trace.check(), Ok(()));
    if iterations.iter().any(|iteration| iteration.is_pressed) {
        // What was measured is not what the untouched loop takes; what was recorded tells.
        let lineage = Lineage::of(&trace);
        trace.peak_bytes = lineage.keep_all_peak_bytes();
        trace.makespan_ns = lineage.keep_all_makespan_ns();
    }
    Ok(trace)
}

/// Puts the times that `iterations` took, in the median, into a trace of the same iteration.
pub(crate) fn retime(iterations: &[&RecordedIteration], trace: &mut Trace) {
    for iteration in iterations {
        assert_eq!(iteration.measured.len(), trace.operators.len(), "the iteration is the one of the trace");
    }
    let median = |of: &dyn Fn(&RecordedIteration) -> u64| {
        median_and_spread(iterations.iter().map(|iteration| of(iteration)).collect()).0
    };
    for (index, operator) in trace.operators.iter_mut().enumerate() {
        operator.cost_ns = median(&|iteration| iteration.measured[index].cost_ns);
        operator.gap_ns = median(&|iteration| iteration.measured[index].gap_ns);
    }
    trace.tail_ns = median(&|iteration| iteration.tail_ns);
    trace.makespan_ns = trace.times_ns();
}

/// Puts into a trace whichever is less of its times and of those that another iteration of it took. Each was measured while
/// something came between, which made some operators longer.
pub(crate) fn retime_at_most(iteration: &RecordedIteration, trace: &mut Trace) {
    assert_eq!(iteration.measured.len(), trace.operators.len(), "the iteration is the one of the trace");
    for (operator, measured) in trace.operators.iter_mut().zip(&iteration.measured) {
        operator.cost_ns = operator.cost_ns.min(measured.cost_ns);
        operator.gap_ns = operator.gap_ns.min(measured.gap_ns);
    }
    trace.tail_ns = trace.tail_ns.min(iteration.tail_ns);
    trace.makespan_ns = trace.times_ns();
}

fn operators_of(
    iterations: &[&RecordedIteration],
    timed: &[&RecordedIteration],
    last: &RecordedIteration,
) -> (Vec<String>, Vec<Operator>) {
    let (mut names, mut name_ids) = (Vec::new(), HashMap::new());
    let mut operators = Vec::with_capacity(last.steps.len());
    for (index, step) in last.steps.iter().enumerate() {
        let name = *name_ids.entry(step.name).or_insert_with(|| {
            names.push(operator_name(step.name));
            names.len() as u32 - 1
        });
        let over = |of: &[&RecordedIteration], measure: fn(&Measured) -> u64| {
            of.iter().map(|iteration| measure(&iteration.measured[index])).collect::<Vec<_>>()
        };
        let (cost_ns, spread_ns) = median_and_spread(over(timed, |measured| measured.cost_ns));
        let (gap_ns, _) = median_and_spread(over(timed, |measured| measured.gap_ns));
        let created: u64 = last.creates(step).iter().map(|created| created.bytes).sum();
        let ids = |locals: &mut dyn Iterator<Item = Local>| locals.map(|local| last.id(local)).collect();
        let accesses = last.accesses(step).iter();
        let peak = over(iterations, |measured| measured.peak_bytes).into_iter().max().expect("at least one");
        operators.push(Operator {
            name,
            phase: step.phase,
            cost_ns,
            spread_ns,
            gap_ns,
            workspace_bytes: peak.saturating_sub(created),
            accesses: accesses.map(|&(local, mode)| Access { storage: last.id(local), mode }).collect(),
            creates: ids(&mut step.creates.range().map(|index| Local::Created(index as u32))),
            frees: ids(&mut last.frees[step.frees.range()].iter().copied()),
            not_replayable: step.not_replayable.map(str::to_owned),
        });
    }
    (names, operators)
}

/// The median, of two the smaller, for what came between made the other longer; and the median distance from it.
fn median_and_spread(mut values: Vec<u64>) -> (u64, u64) {
    values.sort_unstable();
    let median = values[(values.len() - 1) / 2];
    let mut distances: Vec<u64> = values.into_iter().map(|value| value.abs_diff(median)).collect();
    distances.sort_unstable();
    (median, distances[distances.len() / 2])
}

/// Says what each storage is for: by the caller's marks, then by how the iteration uses it.
fn classify(trace: &mut Trace, marks: HashMap<StorageId, Class>) {
    /// What the iteration does with a storage.
    #[derive(Clone, Copy, Default)]
    struct Use {
        in_forward: bool,
        in_backward: bool,
        in_update: bool,
        /// Made from nothing in the forward pass.
        is_filled: bool,
        is_written: bool,
        /// Made or written by the backward pass.
        is_propagated: bool,
        is_updated: bool,
    }

    let mut uses = vec![Use::default(); trace.storages.len()];
    for operator in &trace.operators {
        for access in &operator.accesses {
            let used = &mut uses[access.storage.index()];
            let writes = access.mode.writes();
            used.is_written |= writes;
            match operator.phase {
                Phase::Forward => used.in_forward = true,
                Phase::Backward => (used.in_backward, used.is_propagated) = (true, used.is_propagated || writes),
                Phase::Update => (used.in_update, used.is_updated) = (true, used.is_updated || writes),
            }
        }
        for storage in &operator.creates {
            let made = &mut uses[storage.index()];
            made.in_forward = operator.phase == Phase::Forward;
            made.is_propagated = operator.phase == Phase::Backward;
            made.is_filled = made.in_forward && operator.accesses.is_empty();
        }
    }
    for (index, used) in uses.into_iter().enumerate() {
        let initial = index < trace.initial_storages as usize;
        trace.storages[index].class = match marks.get(&StorageId(index as u32)) {
            Some(&class) => class,
            None if used.is_propagated && used.in_update => Class::Gradient,
            None if initial && used.is_updated && used.in_forward => Class::Parameter,
            None if initial && used.is_updated => Class::OptimizerState,
            None if (initial || used.is_filled) && used.in_forward && !used.is_written => Class::Input,
            None if !initial && used.in_forward && used.in_backward => Class::Activation,
            None => Class::Temporary,
        };
    }
    // What lives on into the next iteration is there what it is here.
    for &(from, to) in &trace.carried.clone() {
        for (source, target) in [(from, to), (to, from)] {
            if let Some(&class) = marks.get(&source) {
                trace.storages[target.index()].class = class;
            }
        }
        if trace.storages[to.index()].class == Class::Temporary {
            trace.storages[to.index()].class = trace.storages[from.index()].class;
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

    #[test]
    fn of_times_taken_early_and_those_taken_again_the_smaller_count() {
        let operator = |cost_ns, gap_ns| Operator {
            name: 0,
            phase: Phase::Forward,
            cost_ns,
            spread_ns: 0,
            gap_ns,
            workspace_bytes: 0,
            accesses: Vec::new(),
            creates: Vec::new(),
            frees: Vec::new(),
            not_replayable: None,
        };
        let mut trace = Trace {
            workload: "two".to_owned(),
            family: String::new(),
            device: "cuda".to_owned(),
            recorded_iterations: 2,
            unseen_bytes: 0,
            tail_ns: 3,
            makespan_ns: 1_153,
            peak_bytes: 0,
            names: vec!["aten::mm".to_owned()],
            storages: Vec::new(),
            initial_storages: 0,
            // The first waited for an eviction; the second will wait for a copy.
            operators: vec![operator(900, 10), operator(200, 40)],
            carried: Vec::new(),
        };
        let again = [(100, 30), (700, 0)].map(|(cost_ns, gap_ns)| Measured { cost_ns, gap_ns, ..Measured::default() });
        let again = RecordedIteration { measured: again.to_vec(), tail_ns: 5, ..RecordedIteration::default() };
        retime_at_most(&again, &mut trace);
        let times: Vec<_> = trace.operators.iter().map(|operator| (operator.cost_ns, operator.gap_ns)).collect();
        assert_eq!((times, trace.tail_ns, trace.makespan_ns), (vec![(100, 10), (200, 0)], 3, 313));
    }

    #[test]
    fn of_two_measurements_the_smaller_counts() {
        assert_eq!(median_and_spread(vec![900, 100]), (100, 800));
        assert_eq!(median_and_spread(vec![3, 1, 2]), (2, 1));
        assert_eq!(median_and_spread(vec![7]), (7, 0));
    }
}
