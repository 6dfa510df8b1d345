//! The timeline: predicts makespan and peak of a plan, operator by operator, and writes its schedule.
//!
//! Three clocks run: compute, offload channel, prefetch channel. Bytes are exact. What was restored early, and
//! what a rerun materialised beside its storage for a dropped child that still needs it, stays until its memory
//! is needed, farthest next use first. Nothing here chooses what to evict: where a budget would be exceeded
//! and nothing that is already decided can make room, the run stops and says so.

use crate::hardware::{CopyTimes, Link, Tier};
use crate::lineage::{Lineage, VersionId, WindowId};
use crate::moment::{Bookmarks, Moment};
use crate::plan::{Action, Plan};
use crate::prefetch::Prefetches;
use crate::schedule::{Instruction, Schedule};
use crate::trace::{OperatorId, StorageId, Trace};

/// How many dead generations a materialised version may be away from the dropped child that needs it.
const RETAIN_DEPTH: u32 = 3;

const NO_WINDOW: u32 = u32::MAX;
const NO_OPERATOR: u32 = u32::MAX;

/// Where a storage's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residency {
    /// Not created yet, or freed.
    Absent,
    /// On the device.
    Resident,
    /// On the device, being copied to the slow tier.
    Offloading,
    /// In the slow tier alone.
    Offloaded,
    /// Being copied back; device bytes are allocated.
    Prefetching,
    /// Nowhere: a rerun restores them.
    Dropped,
}

/// What a plan is predicted to cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prediction {
    /// Elapsed time of the iteration.
    pub makespan_ns: u64,
    /// Most device bytes at any moment.
    pub peak_bytes: u64,
    /// Operator index at which the peak stands.
    pub peak_operator: usize,
    /// Time that compute waited for copies.
    pub stall_ns: u64,
    /// Time that compute lost to copies beside it.
    pub contention_ns: u64,
    /// Time spent on reruns.
    pub recompute_ns: u64,
    /// Bytes offloaded.
    pub offloaded_bytes: u64,
    /// Bytes prefetched.
    pub prefetched_bytes: u64,
    /// Bytes over the budget at the worst moment.
    pub over_budget_bytes: u64,
}

/// How a run of the timeline ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Run {
    /// The iteration's end was reached.
    Finished(Prediction),
    /// The budget would be exceeded before or in this operator, by so many bytes, and windows are open that
    /// could be evicted ([`Timeline::open_windows`]).
    Pressed { operator: usize, deficit_bytes: u64 },
}

/// What the timeline may do about a lack of bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnPressure {
    /// Stop, so that something can be chosen.
    Stop,
    /// Go over the budget.
    Exceed,
}

/// Bytes on the device that nothing uses just now and that can be restored again.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Retained {
    /// A storage restored before its window ended.
    Storage(StorageId),
    /// A version materialised beside its storage.
    Version(VersionId),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct RetainedEntry {
    what: Retained,
    next_use: u32,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingOffload {
    storage: StorageId,
    done_ns: u64,
}

/// Control flow inside a run: something must be chosen first.
struct Pressed {
    deficit_bytes: u64,
}

/// The predictor for one trace and one link. Reusable: a run allocates nothing once its buffers have grown.
pub struct Timeline<'a> {
    trace: &'a Trace,
    lineage: &'a Lineage,
    copies: CopyTimes,

    // What the run was asked.
    budget_bytes: u64,
    on_pressure: OnPressure,
    schedule: Option<Schedule>,

    // Where the run stands.
    operator: usize,
    at: Moment,
    /// Per storage: the last operator that made sure of it.
    wanted_by: Vec<u32>,
    /// Per version: how many reruns under way read it.
    version_locks: Vec<u32>,
    stack: Vec<OperatorId>,

    prefetches: Prefetches,
    bookmarks: Bookmarks,
    finished_ns: Vec<u64>,
    open: Vec<WindowId>,
}

impl<'a> Timeline<'a> {
    /// A timeline for `trace`, whose lineage is `lineage`.
    pub fn new(trace: &'a Trace, lineage: &'a Lineage, link: Link) -> Self {
        let (storages, versions) = (trace.storages.len(), lineage.versions().len());
        Timeline {
            trace,
            lineage,
            copies: CopyTimes::of(trace, &link),
            budget_bytes: u64::MAX,
            on_pressure: OnPressure::Exceed,
            schedule: None,
            operator: 0,
            at: Moment {
                residency: vec![Residency::Absent; storages],
                current: vec![VersionId(u32::MAX); storages],
                window: vec![NO_WINDOW; storages],
                copy_done_ns: vec![0; storages],
                beside: vec![false; versions],
                ..Moment::default()
            },
            wanted_by: vec![NO_OPERATOR; storages],
            version_locks: vec![0; versions],
            stack: Vec::new(),
            prefetches: Prefetches::new(trace.operators.len(), lineage.windows().len()),
            bookmarks: Bookmarks::new(trace.operators.len()),
            finished_ns: vec![0; trace.operators.len()],
            open: Vec::new(),
        }
    }

    /// Predicts `plan` under `budget_bytes`, going over it where the plan leaves no other way.
    pub fn predict(&mut self, plan: &Plan, budget_bytes: u64) -> Prediction {
        match self.run(plan, budget_bytes, OnPressure::Exceed) {
            Run::Finished(prediction) => prediction,
            Run::Pressed { .. } => unreachable!("a run that may exceed the budget never stops"),
        }
    }

    /// Predicts `plan` and writes out what the executor has to do.
    pub fn schedule(&mut self, plan: &Plan, budget_bytes: u64) -> (Schedule, Prediction) {
        self.schedule = Some(Schedule::default());
        let prediction = self.predict(plan, budget_bytes);
        (self.schedule.take().expect("put there above"), prediction)
    }

    /// Windows that could have been evicted at the pressure point where the last run stopped: idle, resident,
    /// kept by the plan and not in use by the rerun under way.
    pub(crate) fn open_windows(&self) -> &[WindowId] {
        &self.open
    }

    /// Whether `version` is what its storage holds, and it was dropped, when the last run stopped.
    pub(crate) fn is_dropped(&self, version: VersionId) -> bool {
        self.residency_of(version) == Residency::Dropped
    }

    /// Where `version` is as far as its storage goes: absent if that holds another one.
    fn residency_of(&self, version: VersionId) -> Residency {
        let storage = self.lineage.version(version).storage.index();
        if self.at.current[storage] == version { self.at.residency[storage] } else { Residency::Absent }
    }

    /// Whether `version` is materialised, in its storage or beside it.
    fn is_materialised(&self, version: VersionId) -> bool {
        self.at.beside[version.index()] || !matches!(self.residency_of(version), Residency::Absent | Residency::Dropped)
    }

    /// What copies of storages take.
    pub(crate) fn copies(&self) -> &CopyTimes {
        &self.copies
    }

    /// Time at which the last run stopped.
    pub(crate) fn now_ns(&self) -> u64 {
        self.at.now_ns
    }

    /// When the offload channel will have done all that it was given.
    pub(crate) fn offload_free_ns(&self) -> u64 {
        self.at.offload_free_ns
    }

    /// When operator `index` ended in the last run.
    pub(crate) fn finished_ns(&self, index: usize) -> u64 {
        self.finished_ns[index]
    }

    pub(crate) fn run(&mut self, plan: &Plan, budget_bytes: u64, on_pressure: OnPressure) -> Run {
        self.budget_bytes = budget_bytes;
        self.on_pressure = on_pressure;
        self.prefetches.decide(self.trace, self.lineage, &self.copies, plan, budget_bytes);
        for index in self.start(plan)..=self.trace.operators.len() {
            self.operator = index;
            if on_pressure == OnPressure::Stop {
                self.bookmarks.pass(index, &self.at);
            }
            if let Err(Pressed { deficit_bytes }) = self.operate(plan) {
                return Run::Pressed { operator: index, deficit_bytes };
            }
        }
        self.at.result.makespan_ns = self.at.now_ns;
        self.at.result.over_budget_bytes = self.at.result.peak_bytes.saturating_sub(budget_bytes);
        Run::Finished(self.at.result)
    }

    /// Goes to where the run has to start, and says before which operator that is.
    fn start(&mut self, plan: &Plan) -> usize {
        self.wanted_by.fill(NO_OPERATOR);
        self.version_locks.fill(0);
        self.stack.clear();
        if self.schedule.is_some() {
            // It has to be written from the first operator on.
            self.bookmarks.clear();
        }
        let (actions, budget_bytes) = (plan.actions(), self.budget_bytes);
        let bookmark = self.bookmarks.resume(self.lineage, actions, &self.prefetches, budget_bytes, &mut self.at);
        if self.on_pressure == OnPressure::Exceed {
            // Beyond where it went over the budget, a run that stops there would not pass.
            self.bookmarks.clear();
        }
        bookmark.unwrap_or_else(|| {
            self.reset();
            0
        })
    }

    fn reset(&mut self) {
        let initial = self.trace.initial_storages as usize;
        if let Some(schedule) = &mut self.schedule {
            schedule.clear();
        }
        let at = &mut self.at;
        at.now_ns = 0;
        at.offload_free_ns = 0;
        at.prefetch_free_ns = 0;
        at.resident_bytes =
            self.trace.unseen_bytes + self.trace.storages[..initial].iter().map(|storage| storage.bytes).sum::<u64>();
        at.result = Prediction { peak_bytes: at.resident_bytes, ..Prediction::default() };
        at.residency.fill(Residency::Absent);
        at.residency[..initial].fill(Residency::Resident);
        at.current[..initial].copy_from_slice(self.lineage.initial_versions());
        at.window.fill(NO_WINDOW);
        at.beside.fill(false);
        at.offloads.clear();
        at.due.clear();
        at.retained.clear();
        at.retained_from = u32::MAX;
    }

    /// One operator, or the iteration's end.
    fn operate(&mut self, plan: &Plan) -> Result<(), Pressed> {
        let (trace, lineage, index) = (self.trace, self.lineage, self.operator);
        let operator = trace.operators.get(index);
        self.at.now_ns += operator.map_or(trace.tail_ns, |operator| operator.gap_ns);
        self.forget_used_retained();
        for &id in lineage.windows_starting(index) {
            self.start_window(id, plan.action(id));
        }
        self.finish_done_offloads();
        self.issue_due_prefetches();
        let Some(operator) = operator else { return self.restore_all(plan) };
        for access in &operator.accesses {
            self.wanted_by[access.storage.index()] = index as u32;
        }
        for access in &operator.accesses {
            self.restore(access.storage, plan)?;
        }
        let demand = lineage.demand_bytes(index);
        self.make_room(demand, plan)?;
        self.note_peak(demand);
        self.at.now_ns += operator.cost_ns;
        self.finished_ns[index] = self.at.now_ns;
        for &storage in &operator.creates {
            self.at.residency[storage.index()] = Residency::Resident;
            self.at.resident_bytes += self.bytes(storage);
        }
        for &version in lineage.writes(index) {
            self.at.current[lineage.version(version).storage.index()] = version;
        }
        for &storage in &operator.frees {
            self.free(storage);
        }
        Ok(())
    }

    fn start_window(&mut self, id: WindowId, action: Action) {
        let window = self.lineage.window(id);
        let storage = window.storage;
        debug_assert_eq!(self.at.residency[storage.index()], Residency::Resident, "window {} starts", id.0);
        match action {
            Action::Keep => return,
            Action::Swap => {
                let bytes = self.bytes(storage);
                let done_ns = self.at.now_ns.max(self.at.offload_free_ns) + self.copies.offload_ns(storage);
                self.at.offload_free_ns = done_ns;
                self.at.copy_done_ns[storage.index()] = done_ns;
                self.at.offloads.push_back(PendingOffload { storage, done_ns });
                self.at.result.offloaded_bytes += bytes;
                self.at.residency[storage.index()] = Residency::Offloading;
                self.emit(Instruction::Offload { storage, tier: Tier::Host, joins: false });
                self.contend(storage);
            }
            Action::Recompute => {
                debug_assert!(window.recomputable, "window {} cannot be recomputed", id.0);
                self.drop_storage(storage);
            }
        }
        self.at.window[storage.index()] = id.0;
    }

    fn drop_storage(&mut self, storage: StorageId) {
        self.at.resident_bytes -= self.bytes(storage);
        self.at.residency[storage.index()] = Residency::Dropped;
        self.emit(Instruction::Drop(storage));
    }

    fn finish_done_offloads(&mut self) {
        while self.at.offloads.front().is_some_and(|offload| offload.done_ns <= self.at.now_ns) {
            self.finish_next_offload();
        }
    }

    /// Waits for the oldest offload under way and releases its bytes.
    fn finish_next_offload(&mut self) {
        let PendingOffload { storage, done_ns } = self.at.offloads.pop_front().expect("an offload is under way");
        if self.at.residency[storage.index()] != Residency::Offloading
            || self.at.copy_done_ns[storage.index()] != done_ns
        {
            return;
        }
        self.wait_until(done_ns);
        self.at.resident_bytes -= self.bytes(storage);
        self.at.residency[storage.index()] = Residency::Offloaded;
        self.emit(Instruction::FinishOffload(storage));
    }

    fn issue_due_prefetches(&mut self) {
        let lineage = self.lineage;
        self.at.due.extend(self.prefetches.due(self.operator));
        let demand = if self.operator < self.trace.operators.len() { lineage.demand_bytes(self.operator) } else { 0 };
        let mut waiting = 0;
        for position in 0..self.at.due.len() {
            let id = self.at.due[position];
            let window = lineage.window(id);
            let (storage, bytes) = (window.storage, self.bytes(window.storage));
            let needed_still = self.at.window[storage.index()] == id.0 && window.end as usize > self.operator;
            if !needed_still || self.at.residency[storage.index()] != Residency::Offloaded {
                // Used already, recalled, or at its use now: `restore` sees to it.
                if needed_still && self.at.residency[storage.index()] == Residency::Offloading {
                    self.at.due[waiting] = id;
                    waiting += 1;
                }
            } else if self.at.resident_bytes + bytes + demand <= self.budget_bytes {
                self.prefetch(storage);
                self.retain(Retained::Storage(storage));
            } else {
                self.at.due[waiting] = id;
                waiting += 1;
            }
        }
        self.at.due.truncate(waiting);
    }

    fn prefetch(&mut self, storage: StorageId) {
        let bytes = self.bytes(storage);
        let done_ns = self.at.now_ns.max(self.at.prefetch_free_ns) + self.copies.prefetch_ns(storage);
        self.at.prefetch_free_ns = done_ns;
        self.at.copy_done_ns[storage.index()] = done_ns;
        self.at.resident_bytes += bytes;
        self.at.result.prefetched_bytes += bytes;
        self.at.residency[storage.index()] = Residency::Prefetching;
        self.note_peak(0);
        self.emit(Instruction::Prefetch { storage, joins: false });
        self.contend(storage);
    }

    /// Charges compute with what a copy beside it takes.
    fn contend(&mut self, storage: StorageId) {
        let lost_ns = self.copies.contention_ns(storage);
        self.at.now_ns += lost_ns;
        self.at.result.contention_ns += lost_ns;
    }

    /// At the iteration's end everything that still lives is resident again.
    fn restore_all(&mut self, plan: &Plan) -> Result<(), Pressed> {
        for &id in self.lineage.windows_ending(self.operator) {
            let window = self.lineage.window(id);
            if window.used_again {
                self.wanted_by[window.storage.index()] = self.operator as u32;
                self.restore(window.storage, plan)?;
            }
        }
        while !self.at.offloads.is_empty() {
            self.finish_next_offload();
        }
        while let Some(entry) = self.at.retained.pop() {
            if let Retained::Version(version) = entry.what {
                self.release_version(version);
            }
        }
        Ok(())
    }

    /// Makes `storage` readable and closes its window.
    fn restore(&mut self, storage: StorageId, plan: &Plan) -> Result<(), Pressed> {
        if self.at.residency[storage.index()] != Residency::Resident {
            self.materialise(storage, plan)?;
        }
        self.at.window[storage.index()] = NO_WINDOW;
        Ok(())
    }

    /// Makes `storage` readable.
    fn materialise(&mut self, storage: StorageId, plan: &Plan) -> Result<(), Pressed> {
        match self.at.residency[storage.index()] {
            Residency::Resident => {}
            Residency::Offloading => {
                self.wait_until(self.at.copy_done_ns[storage.index()]);
                self.at.residency[storage.index()] = Residency::Resident;
                self.emit(Instruction::Recall(storage));
            }
            Residency::Offloaded => {
                self.make_room(self.bytes(storage), plan)?;
                self.prefetch(storage);
                self.finish_prefetch(storage);
            }
            Residency::Prefetching => self.finish_prefetch(storage),
            Residency::Dropped => self.rebuild(self.at.current[storage.index()], plan)?,
            Residency::Absent => unreachable!("storage {} is used before or after its life", storage.0),
        }
        Ok(())
    }

    fn finish_prefetch(&mut self, storage: StorageId) {
        self.wait_until(self.at.copy_done_ns[storage.index()]);
        self.at.residency[storage.index()] = Residency::Resident;
        self.emit(Instruction::FinishPrefetch(storage));
    }

    /// Reruns what `version` depends on until it stands in its storage. An explicit stack, not recursion: chains
    /// can be as long as the iteration.
    fn rebuild(&mut self, version: VersionId, plan: &Plan) -> Result<(), Pressed> {
        debug_assert!(self.stack.is_empty());
        self.push_rerun(version);
        while let Some(&operator) = self.stack.last() {
            match self.missing_input(operator, plan)? {
                Some(input) => self.push_rerun(input),
                None => self.rerun(operator, plan)?,
            }
        }
        Ok(())
    }

    fn push_rerun(&mut self, version: VersionId) {
        let producer = self.lineage.version(version).producer;
        let producer = producer.unwrap_or_else(|| unreachable!("version {} is a lost root", version.0));
        debug_assert!(self.stack.last().is_none_or(|&reader| producer < reader), "reruns only reach back in time");
        self.stack.push(producer);
        for &input in self.lineage.replay_inputs(producer) {
            self.version_locks[input.index()] += 1;
        }
    }

    /// Whether the operator at hand, or a rerun on its behalf, needs what the storage holds.
    fn is_locked(&self, storage: StorageId) -> bool {
        self.wanted_by[storage.index()] == self.operator as u32
            || self.version_locks[self.at.current[storage.index()].index()] > 0
    }

    /// The first input of a rerun that has to be rebuilt before it. Inputs in the slow tier are fetched.
    fn missing_input(&mut self, operator: OperatorId, plan: &Plan) -> Result<Option<VersionId>, Pressed> {
        for &input in self.lineage.replay_inputs(operator) {
            let storage = self.lineage.version(input).storage;
            if self.at.beside[input.index()] {
                continue;
            }
            if self.at.current[storage.index()] != input || self.at.residency[storage.index()] == Residency::Absent {
                return Ok(Some(input));
            }
            match self.at.residency[storage.index()] {
                Residency::Resident => {}
                Residency::Dropped => return Ok(Some(input)),
                _ => {
                    let retained_already = self.at.residency[storage.index()] == Residency::Prefetching;
                    self.materialise(storage, plan)?;
                    if !retained_already {
                        self.retain(Retained::Storage(storage));
                    }
                }
            }
        }
        Ok(None)
    }

    /// Reruns the operator on top of the stack.
    fn rerun(&mut self, operator: OperatorId, plan: &Plan) -> Result<(), Pressed> {
        let (trace, lineage) = (self.trace, self.lineage);
        let facts = &trace.operators[operator.index()];
        let mut created = 0;
        for &output in lineage.replay_outputs(operator) {
            if self.at.beside[output.index()] {
                // Kept since an earlier rerun, for another child: this rerun makes it anew.
                self.forget_version(output);
                self.release_version(output);
            }
            if self.predecessor(operator, output).is_none() {
                created += self.bytes(lineage.version(output).storage);
            }
        }
        let demand = created + facts.workspace_bytes;
        self.make_room(demand, plan)?;
        self.note_peak(demand);
        self.emit(Instruction::Rerun(operator));
        self.at.now_ns += facts.cost_ns;
        self.at.result.recompute_ns += facts.cost_ns;
        self.at.resident_bytes += created;
        for &output in lineage.replay_outputs(operator) {
            if let Some(consumed) = self.predecessor(operator, output) {
                debug_assert!(
                    self.at.beside[consumed.index()],
                    "an in-place rerun consumes a version beside its storage"
                );
                self.at.beside[consumed.index()] = false;
                self.forget_version(consumed);
            }
            let storage = lineage.version(output).storage;
            if self.is_dropped(output) {
                self.at.residency[storage.index()] = Residency::Resident;
            } else {
                self.at.beside[output.index()] = true;
            }
        }
        self.stack.pop();
        for &input in lineage.replay_inputs(operator) {
            self.version_locks[input.index()] -= 1;
        }
        for &output in lineage.replay_outputs(operator) {
            let what = if self.at.beside[output.index()] {
                Retained::Version(output)
            } else {
                Retained::Storage(lineage.version(output).storage)
            };
            self.retain(what);
        }
        for &input in lineage.replay_inputs(operator) {
            if self.at.beside[input.index()] && self.version_locks[input.index()] == 0 {
                self.retain(Retained::Version(input));
            }
        }
        Ok(())
    }

    /// The version that a rerun of `operator` turns into `output` in place, where it reads one.
    fn predecessor(&self, operator: OperatorId, output: VersionId) -> Option<VersionId> {
        let storage = self.lineage.version(output).storage;
        self.lineage
            .replay_inputs(operator)
            .iter()
            .copied()
            .find(|&input| self.lineage.version(input).storage == storage)
    }

    /// Keeps restored bytes for as long as nothing else needs their room, or releases them at once where nothing
    /// will use them.
    fn retain(&mut self, what: Retained) {
        let next_use = match what {
            Retained::Storage(storage) => {
                let window = self.at.window[storage.index()];
                if window == NO_WINDOW {
                    return;
                }
                let window = self.lineage.window(WindowId(window));
                if window.end as usize <= self.operator && window.used_again {
                    return;
                }
                window.end
            }
            Retained::Version(version) => {
                self.forget_version(version);
                let locked = self.version_locks[version.index()] > 0;
                let next_use = match self.residency_of(version) {
                    // Its storage holds it: what another output's rerun made of it is a second copy.
                    Residency::Resident | Residency::Offloading | Residency::Prefetching => None,
                    Residency::Offloaded => locked.then_some(self.operator as u32),
                    _ => self.next_use(version, RETAIN_DEPTH).or(locked.then_some(self.operator as u32)),
                };
                let Some(next_use) = next_use else { return self.release_version(version) };
                next_use
            }
        };
        self.push_retained(RetainedEntry { what, next_use });
    }

    fn push_retained(&mut self, entry: RetainedEntry) {
        self.at.retained_from = self.at.retained_from.min(entry.next_use);
        self.at.retained.push(entry);
    }

    /// When a dropped storage that would be rebuilt from `version` is used next.
    fn next_use(&self, version: VersionId, depth: u32) -> Option<u32> {
        let (lineage, mut next) = (self.lineage, None);
        for &consumer in lineage.consumers(version) {
            if consumer.index() >= self.operator {
                break;
            }
            for &output in lineage.replay_outputs(consumer) {
                let storage = lineage.version(output).storage;
                let candidate = if self.is_dropped(output) {
                    match self.at.window[storage.index()] {
                        NO_WINDOW => None,
                        window => {
                            let window = lineage.window(WindowId(window));
                            (window.used_again && window.end as usize > self.operator).then_some(window.end)
                        }
                    }
                } else if depth > 1 && !self.is_materialised(output) {
                    self.next_use(output, depth - 1)
                } else {
                    None
                };
                next = [next, candidate].into_iter().flatten().min();
            }
        }
        next
    }

    /// Lets go of retained entries whose next use has come: storages are in use, versions are looked at again.
    fn forget_used_retained(&mut self) {
        if self.at.retained_from as usize >= self.operator {
            return;
        }
        self.at.retained_from = u32::MAX;
        let mut position = 0;
        while position < self.at.retained.len() {
            let RetainedEntry { what, next_use } = self.at.retained[position];
            if next_use as usize >= self.operator {
                self.at.retained_from = self.at.retained_from.min(next_use);
                position += 1;
                continue;
            }
            self.at.retained.swap_remove(position);
            if let Retained::Version(version) = what {
                match self.next_use(version, RETAIN_DEPTH) {
                    Some(next_use) => self.push_retained(RetainedEntry { what, next_use }),
                    None => self.release_version(version),
                }
            }
        }
    }

    /// Takes a version off the list of what is retained.
    fn forget_version(&mut self, version: VersionId) {
        self.at.retained.retain(|entry| !matches!(entry.what, Retained::Version(other) if other == version));
    }

    fn release_version(&mut self, version: VersionId) {
        debug_assert!(self.at.beside[version.index()]);
        self.at.beside[version.index()] = false;
        self.at.resident_bytes -= self.bytes(self.lineage.version(version).storage);
        self.emit(Instruction::Release(version));
    }

    /// Evicts again what was restored early, or releases a version: the unlocked one with the farthest next use.
    fn release_farthest(&mut self, plan: &Plan) -> bool {
        let mut farthest: Option<(usize, u32)> = None;
        for (position, entry) in self.at.retained.iter().enumerate() {
            let locked = match entry.what {
                Retained::Storage(storage) => self.is_locked(storage) || self.at.window[storage.index()] == NO_WINDOW,
                Retained::Version(version) => self.version_locks[version.index()] > 0,
            };
            if !locked && farthest.is_none_or(|(_, next_use)| entry.next_use > next_use) {
                farthest = Some((position, entry.next_use));
            }
        }
        let Some((position, _)) = farthest else { return false };
        match self.at.retained.swap_remove(position).what {
            Retained::Version(version) => self.release_version(version),
            Retained::Storage(storage) => {
                if self.at.residency[storage.index()] == Residency::Prefetching {
                    self.finish_prefetch(storage);
                }
                match plan.action(WindowId(self.at.window[storage.index()])) {
                    Action::Recompute => self.drop_storage(storage),
                    Action::Swap => {
                        self.at.resident_bytes -= self.bytes(storage);
                        self.at.residency[storage.index()] = Residency::Offloaded;
                        self.emit(Instruction::Discard(storage));
                    }
                    Action::Keep => unreachable!("a kept storage is never restored"),
                }
            }
        }
        true
    }

    /// Sees to it that `needed` more bytes fit, by what is decided already.
    #[inline]
    fn make_room(&mut self, needed: u64, plan: &Plan) -> Result<(), Pressed> {
        if self.at.resident_bytes + needed <= self.budget_bytes { Ok(()) } else { self.free_bytes(needed, plan) }
    }

    /// Waits for offloads, then releases what is retained, until `needed` more bytes fit.
    fn free_bytes(&mut self, needed: u64, plan: &Plan) -> Result<(), Pressed> {
        while self.at.resident_bytes + needed > self.budget_bytes {
            if !self.at.offloads.is_empty() {
                self.finish_next_offload();
            } else if !self.release_farthest(plan) {
                let deficit_bytes = self.at.resident_bytes + needed - self.budget_bytes;
                if self.on_pressure == OnPressure::Stop {
                    self.collect_open_windows(plan);
                    if !self.open.is_empty() {
                        return Err(Pressed { deficit_bytes });
                    }
                }
                break;
            }
        }
        Ok(())
    }

    fn collect_open_windows(&mut self, plan: &Plan) {
        self.open.clear();
        let index = self.operator as u32;
        let windows = self.lineage.windows();
        // They are ordered by their ends.
        let ended = windows.partition_point(|window| window.end <= index);
        for (id, window) in windows.iter().enumerate().skip(ended) {
            let kept = window.start <= index && plan.actions()[id] == Action::Keep;
            if kept && !self.is_locked(window.storage) {
                self.open.push(WindowId(id as u32));
            }
        }
    }

    fn free(&mut self, storage: StorageId) {
        match self.at.residency[storage.index()] {
            Residency::Resident | Residency::Prefetching => self.at.resident_bytes -= self.bytes(storage),
            Residency::Offloading => {
                self.wait_until(self.at.copy_done_ns[storage.index()]);
                self.at.resident_bytes -= self.bytes(storage);
            }
            Residency::Offloaded | Residency::Dropped => {}
            Residency::Absent => unreachable!("storage {} is freed twice", storage.0),
        }
        self.at.residency[storage.index()] = Residency::Absent;
        self.at.window[storage.index()] = NO_WINDOW;
        if !self.at.retained.is_empty() {
            self.at.retained.retain(|entry| !matches!(entry.what, Retained::Storage(other) if other == storage));
        }
    }

    fn wait_until(&mut self, moment_ns: u64) {
        if moment_ns > self.at.now_ns {
            self.at.result.stall_ns += moment_ns - self.at.now_ns;
            self.at.now_ns = moment_ns;
        }
    }

    fn note_peak(&mut self, transient_bytes: u64) {
        let bytes = self.at.resident_bytes + transient_bytes;
        if bytes > self.at.result.peak_bytes {
            self.at.result.peak_bytes = bytes;
            self.at.result.peak_operator = self.operator;
        }
    }

    fn bytes(&self, storage: StorageId) -> u64 {
        self.trace.storages[storage.index()].bytes
    }

    fn emit(&mut self, instruction: Instruction) {
        if let Some(schedule) = &mut self.schedule {
            schedule.push(self.operator, instruction);
        }
    }
}
