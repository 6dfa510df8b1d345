//! Records iterations of a training loop and makes a trace of them.

use std::collections::HashMap;
use std::time::Instant;

use tch::Tensor;

use super::session::{Observer, Session, SessionError, Wish, operator_name};
use super::shim::{self, Entry, RawOperator};
use crate::trace::{Access, AccessMode, Class, Operator, Phase, Storage, StorageId, Trace};

/// Why iterations did not make a trace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// Another loop is being observed.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// Too few iterations were recorded.
    #[error("a trace needs at least 2 recorded iterations, found {0}")]
    TooFew(usize),
    /// The iterations are not alike.
    #[error("iterations differ: {0}")]
    NotRepeating(String),
    /// Nothing ran.
    #[error("the recorded iteration holds no operator")]
    Empty,
}

/// A storage as one iteration sees it: by order of appearance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Local {
    /// It existed before the iteration.
    Initial(u32),
    /// The iteration made it.
    Created(u32),
}

#[derive(Clone, Debug, PartialEq)]
struct RawStorage {
    bytes: u64,
    locked: Option<&'static str>,
}

#[derive(Clone, Debug, PartialEq)]
struct Step {
    name: u32,
    phase: u32,
    not_replayable: Option<&'static str>,
    accesses: Vec<(Local, u32)>,
    creates: Vec<Local>,
    frees: Vec<Local>,
}

/// What was measured of one operator.
#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    cost_ns: u64,
    gap_ns: u64,
    peak_bytes: u64,
}

#[derive(Default)]
struct Iteration {
    steps: Vec<Step>,
    measured: Vec<Measured>,
    initial: Vec<RawStorage>,
    created: Vec<RawStorage>,
    /// The step that made each created storage.
    made_by: Vec<usize>,
    /// Storages that live on: what the next iteration will find.
    local: HashMap<Entry, Local>,
    /// What the previous iteration knew an initial storage as.
    known_as: HashMap<u32, Local>,
    start_bytes: u64,
    peak_bytes: u64,
    tail_ns: u64,
    makespan_ns: u64,
}

/// Records whole iterations; at the end makes one trace of them.
pub struct Recorder {
    session: Session,
    done: Vec<Iteration>,
    now: Iteration,
    /// Storages that the previous iteration left alive.
    before: HashMap<Entry, (Local, RawStorage)>,
    freed: Vec<Entry>,
    last_end: Option<Instant>,
    arrived: Option<Instant>,
    marks: HashMap<Entry, Class>,
}

impl Recorder {
    /// A recorder with nothing recorded.
    pub fn new(session: Session) -> Self {
        Recorder {
            session,
            done: Vec::new(),
            now: Iteration::default(),
            before: HashMap::new(),
            freed: Vec::new(),
            last_end: None,
            arrived: None,
            marks: HashMap::new(),
        }
    }

    /// Runs one iteration under observation. The first ones may still warm up; [`Recorder::finish`] says how many
    /// to leave out.
    pub fn iteration<R>(&mut self, body: impl FnOnce() -> R) -> Result<R, RecordError> {
        self.drain_freed();
        self.freed.drain(..).for_each(shim::forget);
        self.now = Iteration { start_bytes: self.session.live_bytes(), ..Iteration::default() };
        self.session.reset_peak();
        let started = Instant::now();
        self.last_end = Some(started);
        let session = self.session;
        let result = session.observe(self, body)?;
        let ended = Instant::now();
        self.absorb_freed();
        let mut iteration = std::mem::take(&mut self.now);
        iteration.peak_bytes = self.session.peak_bytes();
        iteration.makespan_ns = (ended - started).as_nanos() as u64;
        iteration.tail_ns = (ended - self.last_end.expect("set above")).as_nanos() as u64;
        self.before =
            iteration.local.iter().map(|(&entry, &local)| (entry, (local, iteration.storage(local).clone()))).collect();
        self.done.push(iteration);
        Ok(result)
    }

    /// Says what a tensor is for. Call it after the last iteration, once intercepted operators have seen the tensor.
    pub fn mark(&mut self, tensor: &Tensor, class: Class) {
        if let Some(entry) = shim::entry_of(tensor) {
            self.marks.insert(entry, class);
        }
    }

    /// Makes a trace of all iterations but the first `warm_up`.
    pub fn finish(mut self, warm_up: usize, workload: &str, family: &str, device: &str) -> Result<Trace, RecordError> {
        let iterations = self.done.split_off(warm_up.min(self.done.len()));
        if iterations.len() < 2 {
            return Err(RecordError::TooFew(iterations.len()));
        }
        let last = iterations.last().expect("at least two");
        if last.steps.is_empty() {
            return Err(RecordError::Empty);
        }
        for other in &iterations {
            same_steps(other, last)?;
        }
        let initial = last.initial.len() as u32;
        let id = |local: Local| match local {
            Local::Initial(index) => StorageId(index),
            Local::Created(index) => StorageId(initial + index),
        };
        let mut names = Vec::new();
        let mut name_ids = HashMap::new();
        let mut resident = last.start_bytes;
        let bytes_of = |local: &Local| match *local {
            Local::Initial(index) => last.initial[index as usize].bytes,
            Local::Created(index) => last.created[index as usize].bytes,
        };
        let mut operators = Vec::with_capacity(last.steps.len());
        for (index, step) in last.steps.iter().enumerate() {
            let name = *name_ids.entry(step.name).or_insert_with(|| {
                names.push(operator_name(step.name));
                names.len() as u32 - 1
            });
            let over = |measure: fn(&Measured) -> u64| {
                iterations.iter().map(|iteration| measure(&iteration.measured[index])).collect::<Vec<_>>()
            };
            let (cost_ns, spread_ns) = median_and_spread(over(|measured| measured.cost_ns));
            let (gap_ns, _) = median_and_spread(over(|measured| measured.gap_ns));
            let created: u64 = step.creates.iter().map(bytes_of).sum();
            let peak = over(|measured| measured.peak_bytes).into_iter().max().expect("at least two");
            operators.push(Operator {
                name,
                phase: [Phase::Forward, Phase::Backward, Phase::Update][step.phase as usize],
                cost_ns,
                spread_ns,
                gap_ns,
                workspace_bytes: peak.saturating_sub(resident + created),
                accesses: step
                    .accesses
                    .iter()
                    .map(|&(local, mode)| Access { storage: id(local), mode: MODES[mode as usize] })
                    .collect(),
                creates: step.creates.iter().copied().map(id).collect(),
                frees: step.frees.iter().copied().map(id).collect(),
                not_replayable: step.not_replayable.map(str::to_owned),
            });
            resident += created;
            resident -= step.frees.iter().map(bytes_of).sum::<u64>().min(resident);
        }
        // A storage that outlived the last iteration but one, and what the last one found it to be.
        let carried = last
            .known_as
            .iter()
            .map(|(&to, &from)| (id(from), StorageId(to)))
            .filter(|(from, to)| from != to)
            .collect::<Vec<_>>();
        let mut trace = Trace {
            workload: workload.to_owned(),
            family: family.to_owned(),
            device: device.to_owned(),
            recorded_iterations: iterations.len() as u32,
            unseen_bytes: last.start_bytes - last.initial.iter().map(|storage| storage.bytes).sum::<u64>(),
            tail_ns: median_and_spread(iterations.iter().map(|iteration| iteration.tail_ns).collect()).0,
            makespan_ns: median_and_spread(iterations.iter().map(|iteration| iteration.makespan_ns).collect()).0,
            peak_bytes: iterations.iter().map(|iteration| iteration.peak_bytes).max().expect("at least two"),
            names,
            storages: last
                .initial
                .iter()
                .chain(&last.created)
                .map(|storage| Storage {
                    bytes: storage.bytes,
                    class: Class::Temporary,
                    locked: storage.locked.map(str::to_owned),
                })
                .collect(),
            initial_storages: initial,
            operators,
            carried,
        };
        trace.carried.sort_unstable();
        let marked = self.marks.iter().filter_map(|(entry, &class)| Some((id(*last.local.get(entry)?), class)));
        classify(&mut trace, marked.collect());
        debug_assert_eq!(trace.check(), Ok(()));
        Ok(trace)
    }

    fn drain_freed(&mut self) {
        shim::take_freed(&mut self.freed);
    }

    /// Books what the program has let go of since the last operator.
    fn absorb_freed(&mut self) {
        self.drain_freed();
        let nothing_ran = self.now.steps.is_empty();
        for entry in self.freed.drain(..) {
            if nothing_ran {
                // Let go of before the first operator, like the gradients of the iteration before: no part of this one.
                self.before.remove(&entry);
                shim::forget(entry);
                continue;
            }
            let local = match self.now.local.remove(&entry) {
                Some(local) => Some(local),
                // Never used by this iteration, but known from the one before.
                None => self.before.remove(&entry).map(|(known, storage)| self.now.add_initial(storage, Some(known))),
            };
            if let (Some(local), Some(step)) = (local, self.now.steps.last_mut()) {
                step.frees.push(local);
            }
            shim::forget(entry);
        }
    }
}

const MODES: [AccessMode; 4] = [AccessMode::Read, AccessMode::Write, AccessMode::Overwrite, AccessMode::SideEffect];

impl Iteration {
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
}

impl Observer for Recorder {
    fn before(&mut self, _operator: &RawOperator) -> Result<Wish, String> {
        self.arrived = Some(Instant::now());
        self.absorb_freed();
        if self.now.steps.is_empty() {
            self.now.start_bytes = self.session.live_bytes();
        }
        Ok(Wish { recipe: false, watch: true })
    }

    fn after(&mut self, operator: &RawOperator) {
        let gap = self.arrived.zip(self.last_end).map_or(0, |(arrived, ended)| (arrived - ended).as_nanos() as u64);
        let mut accesses = Vec::with_capacity(operator.accesses().len());
        for access in operator.accesses() {
            let local = match self.now.local.get(&access.entry) {
                Some(&local) => local,
                None => {
                    let storage = RawStorage { bytes: access.bytes, locked: access.locked() };
                    let known = self.before.get(&access.entry).map(|&(known, _)| known);
                    let local = self.now.add_initial(storage, known);
                    self.now.local.insert(access.entry, local);
                    local
                }
            };
            let storage = self.now.storage_mut(local);
            storage.locked = storage.locked.or(access.locked());
            if storage.bytes != access.bytes {
                storage.locked = Some("changes its size");
                storage.bytes = storage.bytes.max(access.bytes);
            }
            if access.is_filled()
                && let Local::Created(index) = local
            {
                let made_by = self.now.made_by[index as usize];
                self.now.steps[made_by].not_replayable = Some("its bytes are filled in outside the dispatcher");
            }
            accesses.push((local, access.mode));
        }
        let mut creates = Vec::with_capacity(operator.created().len());
        for created in operator.created() {
            let local = Local::Created(self.now.created.len() as u32);
            self.now.made_by.push(self.now.steps.len());
            self.now.created.push(RawStorage { bytes: created.bytes, locked: created.locked() });
            self.now.local.insert(created.entry, local);
            creates.push(local);
        }
        self.now.steps.push(Step {
            name: operator.name,
            phase: operator.phase,
            not_replayable: operator.not_replayable(),
            accesses,
            creates,
            frees: Vec::new(),
        });
        self.now.measured.push(Measured {
            cost_ns: operator.end_ns - operator.start_ns,
            gap_ns: gap,
            peak_bytes: operator.peak_bytes,
        });
        self.last_end = Some(Instant::now());
    }

    fn failed(&mut self) {
        self.last_end = Some(Instant::now());
    }
}

fn same_steps(one: &Iteration, other: &Iteration) -> Result<(), RecordError> {
    let differ = |what: String| Err(RecordError::NotRepeating(what));
    if one.steps.len() != other.steps.len() {
        return differ(format!("{} operators, then {}", one.steps.len(), other.steps.len()));
    }
    for (index, (a, b)) in one.steps.iter().zip(&other.steps).enumerate() {
        if a != b {
            return differ(format!("operator {index} is {}, then {}", operator_name(a.name), operator_name(b.name)));
        }
    }
    if one.initial != other.initial || one.created != other.created {
        return differ("the same operators use storages of other sizes".to_owned());
    }
    Ok(())
}

fn median_and_spread(mut values: Vec<u64>) -> (u64, u64) {
    let middle = |values: &mut Vec<u64>| {
        values.sort_unstable();
        values[values.len() / 2]
    };
    let median = middle(&mut values);
    let mut deviations = values.iter().map(|value| value.abs_diff(median)).collect();
    (median, middle(&mut deviations))
}

/// Says what each storage is for: by the caller's marks, then by how the iteration uses it.
fn classify(trace: &mut Trace, marks: HashMap<StorageId, Class>) {
    let count = trace.storages.len();
    let (mut forward, mut backward, mut updated) = (vec![false; count], vec![false; count], vec![false; count]);
    let (mut filled, mut written) = (vec![false; count], vec![false; count]);
    for operator in &trace.operators {
        for access in &operator.accesses {
            let index = access.storage.index();
            match operator.phase {
                Phase::Forward => forward[index] = true,
                Phase::Backward => backward[index] = true,
                Phase::Update => updated[index] |= access.mode.writes(),
            }
            written[index] |= access.mode.writes();
        }
        for storage in &operator.creates {
            forward[storage.index()] |= operator.phase == Phase::Forward;
            filled[storage.index()] = operator.accesses.is_empty() && operator.phase == Phase::Forward;
        }
    }
    for index in 0..count {
        let initial = index < trace.initial_storages as usize;
        trace.storages[index].class = if let Some(&class) = marks.get(&StorageId(index as u32)) {
            class
        } else if initial && updated[index] {
            Class::OptimizerState
        } else if (initial || filled[index]) && forward[index] && !written[index] {
            Class::Input
        } else if !initial && forward[index] && backward[index] {
            Class::Activation
        } else {
            Class::Temporary
        };
    }
    // What lives on into the next iteration is there what it is here.
    for &(from, to) in &trace.carried.clone() {
        for (source, target) in [(from, to), (to, from)] {
            if let Some(&class) = marks.get(&source) {
                trace.storages[target.index()].class = class;
            }
        }
    }
}
