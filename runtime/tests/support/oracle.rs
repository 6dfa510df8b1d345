//! The timeline once more, as simply as it can be written: every operator in turn, every storage looked at, nothing kept
//! from one run to the next. What the library's event-driven timeline predicts and schedules must equal this. Rules of copies,
//! rebuilds and retention are the same in both: an error in what is passed over shows here, one in a rule does not.

use std::collections::VecDeque;

use plimsoll_runtime::hardware::{Link, PAGE_BYTES, SLAB_MEMBER_BYTES_MAX, SlowTiers, Tier};
use plimsoll_runtime::lineage::{VersionId, WindowId};
use plimsoll_runtime::schedule::Instruction;
use plimsoll_runtime::trace::{OperatorId, StorageId};
use plimsoll_runtime::{Action, Lineage, Plan, Prediction, Trace};

/// How many dead generations a materialised version may be away from the dropped child that needs it.
const RETAIN_DEPTH: u32 = 3;
/// Prefetches start this much earlier than their copy needs.
const PREFETCH_LEAD: f64 = 1.25;
const NO_WINDOW: u32 = u32::MAX;
const NO_OPERATOR: u32 = u32::MAX;

type Steps = Vec<(u32, Instruction)>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Residency {
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

/// Bytes on the device that nothing uses just now and that can be restored again.
#[derive(Clone, Copy, Debug)]
enum Retained {
    /// A storage restored before its window ended.
    Storage(StorageId),
    /// A version materialised beside its storage.
    Version(VersionId),
}

#[derive(Clone, Copy, Debug)]
struct RetainedEntry {
    what: Retained,
    next_use: u32,
}

#[derive(Clone, Copy, Debug)]
struct PendingOffload {
    storage: StorageId,
    done_ns: u64,
}

/// Storages that are copied together, before one operator.
#[derive(Debug, Default)]
struct Slab {
    /// Where the copy stands: nothing joins the slab from another tier.
    tier: Tier,
    members: Vec<StorageId>,
}

/// What a plan is predicted to cost, and the steps of its schedule.
pub fn predict(
    trace: &Trace,
    lineage: &Lineage,
    tiers: impl Into<SlowTiers>,
    plan: &Plan,
    budget_bytes: u64,
) -> (Prediction, Steps) {
    let mut oracle = Oracle::new(trace, lineage, tiers.into(), plan, budget_bytes);
    for index in 0..=trace.operators.len() {
        oracle.operator = index;
        oracle.operate();
    }
    oracle.at.result.makespan_ns = oracle.at.now_ns;
    oracle.at.result.over_budget_bytes = oracle.at.result.peak_bytes.saturating_sub(budget_bytes);
    (oracle.at.result, oracle.steps)
}

#[derive(Default)]
struct Moment {
    now_ns: u64,
    offload_free_ns: u64,
    prefetch_free_ns: u64,
    resident_bytes: u64,
    slow_bytes: [u64; 2],
    result: Prediction,
    residency: Vec<Residency>,
    current: Vec<VersionId>,
    window: Vec<u32>,
    copy_done_ns: Vec<u64>,
    beside: Vec<bool>,
    offloads: VecDeque<PendingOffload>,
    due: Vec<WindowId>,
    retained: Vec<RetainedEntry>,
}

/// Room in a tier that is given back at once.
struct PlacedSlab {
    tier: Tier,
    bytes: u64,
    /// What others that are placed with it may be in it, too.
    kind: Option<u32>,
    /// Those in it whose windows have not ended.
    there: Vec<WindowId>,
}

struct Oracle<'a> {
    trace: &'a Trace,
    lineage: &'a Lineage,
    tiers: SlowTiers,
    /// With `Keep` for swaps that no tier has room for.
    actions: Vec<Action>,
    tier: Vec<Tier>,
    prefetch_before: Vec<Option<usize>>,
    /// Per operator: versions that storages come to hold.
    writes: Vec<Vec<VersionId>>,
    budget_bytes: u64,
    steps: Steps,
    operator: usize,
    at: Moment,
    wanted_by: Vec<u32>,
    version_locks: Vec<u32>,
    stack: Vec<OperatorId>,
    slab: Slab,
}

/// Versions are numbered in order of production: what is there at the start, then what each operator writes and creates.
fn writes(trace: &Trace) -> Vec<Vec<VersionId>> {
    let mut next = trace.initial_storages;
    let mut take = |count: usize| {
        next += count as u32;
        (next - count as u32..next).map(VersionId).collect()
    };
    let written = |operator: &plimsoll_runtime::trace::Operator| {
        operator.accesses.iter().filter(|access| access.mode.writes()).count() + operator.creates.len()
    };
    trace.operators.iter().map(|operator| take(written(operator))).collect()
}

impl<'a> Oracle<'a> {
    fn new(trace: &'a Trace, lineage: &'a Lineage, tiers: SlowTiers, plan: &Plan, budget_bytes: u64) -> Self {
        let (storages, versions) = (trace.storages.len(), lineage.versions().len());
        let initial = trace.initial_storages as usize;
        let resident_bytes =
            trace.unseen_bytes + trace.storages[..initial].iter().map(|storage| storage.bytes).sum::<u64>();
        let mut at = Moment {
            resident_bytes,
            result: Prediction { peak_bytes: resident_bytes, ..Prediction::default() },
            residency: vec![Residency::Absent; storages],
            current: vec![VersionId(u32::MAX); storages],
            window: vec![NO_WINDOW; storages],
            copy_done_ns: vec![0; storages],
            beside: vec![false; versions],
            ..Moment::default()
        };
        at.residency[..initial].fill(Residency::Resident);
        (0..initial).for_each(|index| at.current[index] = VersionId(index as u32));
        let mut oracle = Oracle {
            trace,
            lineage,
            tiers,
            actions: plan.actions().to_vec(),
            tier: vec![Tier::Host; lineage.windows().len()],
            prefetch_before: vec![None; lineage.windows().len()],
            writes: writes(trace),
            budget_bytes,
            steps: Vec::new(),
            operator: 0,
            at,
            wanted_by: vec![NO_OPERATOR; storages],
            version_locks: vec![0; versions],
            stack: Vec::new(),
            slab: Slab::default(),
        };
        for &window in lineage.decided() {
            oracle.actions[window.index()] = Action::Swap;
        }
        oracle.place();
        let away = lineage.decided().iter().filter(|id| lineage.begins_away(**id));
        let away = away.filter(|id| oracle.actions[id.index()] == Action::Swap);
        let away_bytes: u64 = away.map(|id| oracle.bytes(lineage.window(*id).storage)).sum();
        oracle.at.result.peak_bytes -= away_bytes;
        oracle.decide_prefetches();
        oracle
    }

    fn link(&self, tier: Tier) -> Link {
        match tier {
            Tier::Host => self.tiers.host,
            Tier::File => self.tiers.file.expect("nothing is placed in a file that there is not").link,
        }
    }

    /// The tier of every swap, in order of their starts. Small ones that start together are in one slab, which is there until the
    /// last of them has ended.
    fn place(&mut self) {
        let mut slabs: Vec<PlacedSlab> = Vec::new();
        for index in 0..=self.trace.operators.len() {
            self.leave(index, false, &mut slabs);
            let earlier = slabs.len();
            let mut starting = self.lineage.windows_starting(index).to_vec();
            starting.sort_by_key(|&id| !self.lineage.begins_away(id));
            for id in starting {
                let bytes = self.bytes(self.lineage.window(id).storage);
                if self.actions[id.index()] == Action::Swap {
                    let pages = bytes.div_ceil(PAGE_BYTES) * PAGE_BYTES;
                    let used = |tier| slabs.iter().filter(|slab| slab.tier == tier).map(|slab| slab.bytes).sum::<u64>();
                    let roomy = |tier: &Tier| used(*tier) + pages <= self.tiers.limit_bytes(*tier);
                    if let Some(tier) = [Tier::Host, Tier::File].into_iter().find(roomy) {
                        self.tier[id.index()] = tier;
                        let kind = self.kind(id);
                        let alike = |slab: &&mut PlacedSlab| kind.is_some() && slab.kind == kind && slab.tier == tier;
                        match slabs[earlier..].iter_mut().find(alike) {
                            Some(slab) => {
                                slab.bytes += pages;
                                slab.there.push(id);
                            }
                            None => slabs.push(PlacedSlab { tier, bytes: pages, kind, there: vec![id] }),
                        }
                    } else {
                        self.actions[id.index()] = Action::Keep;
                        self.at.result.refused_bytes += bytes;
                    }
                }
            }
            self.leave(index, true, &mut slabs);
        }
    }

    /// Small ones are in a slab with those of the same kind. What is away when the iteration begins is of the kind of the operator from
    /// which on it is away when it ends, if it is.
    fn kind(&self, id: WindowId) -> Option<u32> {
        const NOW: u32 = u32::MAX;
        const LEAVING: u32 = u32::MAX - 1;
        let storage = self.lineage.window(id).storage;
        if self.bytes(storage) > SLAB_MEMBER_BYTES_MAX {
            return None;
        }
        if !self.lineage.begins_away(id) {
            return Some(if self.lineage.leaving().contains(&id) { LEAVING } else { NOW });
        }
        let end = self.trace.operators.len() as u32;
        let last = self.lineage.windows().iter().find(|window| window.storage == storage && window.end == end);
        last.filter(|_| self.lineage.edges().stays.contains(&storage)).map(|last| last.start)
    }

    fn leave(&self, index: usize, used_again: bool, slabs: &mut Vec<PlacedSlab>) {
        let is_over = |id: &WindowId| {
            let window = self.lineage.window(*id);
            window.used_again == used_again && window.end as usize == index
        };
        slabs.iter_mut().for_each(|slab| slab.there.retain(|id| !is_over(id)));
        slabs.retain(|slab| !slab.there.is_empty());
    }

    /// As late as the copies behind each other allow, and only where the bytes are free from then on.
    fn decide_prefetches(&mut self) {
        let (lineage, count) = (self.lineage, self.trace.operators.len());
        let mut slack_bytes: Vec<i128> = (0..=count)
            .map(|index| i128::from(self.budget_bytes) - i128::from(lineage.keep_all_bytes()[index]))
            .collect();
        for (window, &action) in lineage.windows().iter().zip(&self.actions) {
            if action != Action::Keep {
                let span = window.start as usize..(window.end as usize).min(count + 1);
                slack_bytes[span].iter_mut().for_each(|slack| *slack += i128::from(self.bytes(window.storage)));
            }
        }
        let mut channel_ns = u64::MAX;
        for id in (0..lineage.windows().len() as u32).map(WindowId).rev() {
            let window = lineage.window(id);
            if self.actions[id.index()] != Action::Swap || !window.used_again {
                continue;
            }
            let bytes = self.bytes(window.storage);
            let lead = (self.link(self.tier[id.index()]).prefetch_ns(bytes) as f64 * PREFETCH_LEAD) as u64;
            channel_ns = channel_ns.min(lineage.start_ns(window.end as usize)).saturating_sub(lead);
            let mut before = window.end as usize;
            while before > window.start as usize + 1
                && lineage.start_ns(before) > channel_ns
                && slack_bytes[before - 1] >= i128::from(bytes)
            {
                before -= 1;
                slack_bytes[before] -= i128::from(bytes);
            }
            self.prefetch_before[id.index()] = Some(before);
        }
    }

    /// Whether `version` is what its storage holds, and it was dropped, when the last run stopped.
    fn is_dropped(&self, version: VersionId) -> bool {
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

    /// One operator, or the iteration's end.
    fn operate(&mut self) {
        let (trace, lineage, index) = (self.trace, self.lineage, self.operator);
        let operator = trace.operators.get(index);
        self.at.now_ns += operator.map_or(trace.tail_ns, |operator| operator.gap_ns);
        self.forget_used_retained();
        self.slab.members.clear();
        // What is leaving already goes first.
        for &id in lineage.leaving().iter().filter(|_| index == 0) {
            if self.actions[id.index()] == Action::Swap {
                self.start_window(id, Action::Swap);
            }
        }
        self.slab.members.clear();
        // Small storages first, so that they leave side by side.
        for small in [true, false] {
            for &id in lineage.windows_starting(index) {
                let action = self.actions[id.index()];
                let is_leaving = lineage.leaving().contains(&id);
                if action != Action::Keep && self.is_gathered(id) == small && !is_leaving {
                    self.start_window(id, action);
                }
            }
        }
        self.finish_done_offloads();
        self.issue_due_prefetches();
        let Some(operator) = operator else { return self.restore_all() };
        for access in &operator.accesses {
            self.wanted_by[access.storage.index()] = index as u32;
        }
        self.fetch_together();
        for access in &operator.accesses {
            self.restore(access.storage);
        }
        let demand = lineage.demand_bytes(index);
        self.make_room(demand);
        self.note_peak(demand);
        self.at.now_ns += operator.cost_ns;
        for &storage in &operator.creates {
            self.at.residency[storage.index()] = Residency::Resident;
            self.at.resident_bytes += self.bytes(storage);
        }
        for &version in &self.writes[index].clone() {
            self.at.current[lineage.version(version).storage.index()] = version;
        }
        for &storage in &operator.frees {
            self.free(storage);
        }
    }

    /// Whether a window's storage is copied together with others.
    fn is_gathered(&self, id: WindowId) -> bool {
        self.actions[id.index()] == Action::Swap && self.bytes(self.lineage.window(id).storage) <= SLAB_MEMBER_BYTES_MAX
    }

    fn start_window(&mut self, id: WindowId, action: Action) {
        let window = self.lineage.window(id);
        let storage = window.storage;
        debug_assert_eq!(self.at.residency[storage.index()], Residency::Resident, "window {} starts", id.0);
        self.at.window[storage.index()] = id.0;
        match action {
            Action::Keep => unreachable!("a kept window changes nothing"),
            Action::Swap => self.offload(id),
            Action::Recompute => {
                debug_assert!(window.recomputable, "window {} cannot be recomputed", id.0);
                self.drop_storage(storage);
            }
        }
    }

    fn offload(&mut self, id: WindowId) {
        let (storage, tier) = (self.lineage.window(id).storage, self.tier[id.index()]);
        self.at.slow_bytes[tier as usize] += self.bytes(storage);
        let [host_bytes, file_bytes] = self.at.slow_bytes;
        self.at.result.host_peak_bytes = self.at.result.host_peak_bytes.max(host_bytes);
        self.at.result.file_peak_bytes = self.at.result.file_peak_bytes.max(file_bytes);
        if self.lineage.begins_away(id) {
            self.at.resident_bytes -= self.bytes(storage);
            self.at.residency[storage.index()] = Residency::Offloaded;
            return self.emit(Instruction::LeaveAway { storage, tier });
        }
        let transfer_ns = self.link(tier).offload_transfer_ns(self.bytes(storage));
        let joins = self.joins_slab(storage, tier);
        let begin_ns = if joins {
            self.at.offload_free_ns
        } else {
            self.at.now_ns.max(self.at.offload_free_ns) + self.link(tier).latency_ns()
        };
        let done_ns = begin_ns + transfer_ns;
        self.at.offload_free_ns = done_ns;
        self.at.offloads.push_back(PendingOffload { storage, done_ns });
        for &member in &self.slab.members {
            self.at.copy_done_ns[member.index()] = done_ns;
        }
        self.at.copy_done_ns[storage.index()] = done_ns;
        let together = self.at.offloads.len() - self.slab.members.len().max(1);
        self.at.offloads.iter_mut().skip(together).for_each(|offload| offload.done_ns = done_ns);
        self.at.result.offloaded_bytes += self.bytes(storage);
        self.at.residency[storage.index()] = Residency::Offloading;
        self.emit(Instruction::Offload { storage, tier, joins });
        self.contend(storage, tier);
    }

    /// Puts `storage` into the slab that is being gathered, or into a new one if it is small. Whether it moves together
    /// with the one before it.
    fn joins_slab(&mut self, storage: StorageId, tier: Tier) -> bool {
        let small = self.bytes(storage) <= SLAB_MEMBER_BYTES_MAX;
        let joins = small && !self.slab.members.is_empty() && self.slab.tier == tier;
        if !joins {
            self.slab.members.clear();
        }
        if small {
            self.slab.tier = tier;
            self.slab.members.push(storage);
        }
        joins
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
        let due_now = |id: &WindowId| self.prefetch_before[id.index()] == Some(self.operator);
        self.at.due.extend((0..lineage.windows().len() as u32).map(WindowId).filter(due_now));
        let demand = if self.operator < self.trace.operators.len() { lineage.demand_bytes(self.operator) } else { 0 };
        let mut waiting = 0;
        self.slab.members.clear();
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
                self.prefetch(id);
                self.retain(Retained::Storage(storage));
            } else {
                self.at.due[waiting] = id;
                waiting += 1;
            }
        }
        self.at.due.truncate(waiting);
    }

    fn prefetch(&mut self, id: WindowId) {
        let (storage, tier) = (self.lineage.window(id).storage, self.tier[id.index()]);
        let bytes = self.bytes(storage);
        let joins = self.joins_slab(storage, tier);
        let begin_ns = if joins {
            self.at.prefetch_free_ns
        } else {
            self.at.now_ns.max(self.at.prefetch_free_ns) + self.link(tier).latency_ns()
        };
        let done_ns = begin_ns + self.link(tier).prefetch_transfer_ns(self.bytes(storage));
        self.at.prefetch_free_ns = done_ns;
        for &member in &self.slab.members {
            self.at.copy_done_ns[member.index()] = done_ns;
        }
        self.at.copy_done_ns[storage.index()] = done_ns;
        self.at.resident_bytes += bytes;
        self.at.result.prefetched_bytes += bytes;
        self.at.residency[storage.index()] = Residency::Prefetching;
        self.note_peak(0);
        self.emit(Instruction::Prefetch { storage, joins });
        self.contend(storage, tier);
    }

    /// Charges compute with what a copy beside it takes.
    fn contend(&mut self, storage: StorageId, tier: Tier) {
        let lost_ns = self.link(tier).contention_ns(self.bytes(storage));
        self.at.now_ns += lost_ns;
        self.at.result.contention_ns += lost_ns;
    }

    /// At the iteration's end everything that still lives is resident again.
    fn restore_all(&mut self) {
        let ending = self.lineage.windows_ending(self.operator).iter().map(|&id| self.lineage.window(id));
        for window in ending.clone().filter(|window| window.used_again) {
            self.wanted_by[window.storage.index()] = self.operator as u32;
        }
        self.fetch_together();
        for window in ending.filter(|window| window.used_again) {
            self.restore(window.storage);
        }
        while let Some(entry) = self.at.retained.pop() {
            if let Retained::Version(version) = entry.what {
                self.release_version(version);
            }
        }
    }

    /// Starts the copies of small storages that the operator at hand uses and that are not on their way yet.
    fn fetch_together(&mut self) {
        self.slab.members.clear();
        for &id in self.lineage.windows_ending(self.operator) {
            let window = self.lineage.window(id);
            if window.used_again
                && self.is_gathered(id)
                && self.at.residency[window.storage.index()] == Residency::Offloaded
            {
                self.make_room(self.bytes(window.storage));
                self.prefetch(id);
            }
        }
    }

    /// Makes `storage` readable and closes its window.
    fn restore(&mut self, storage: StorageId) {
        if self.at.residency[storage.index()] != Residency::Resident {
            self.materialise(storage);
        }
        self.close_window(storage);
    }

    /// The storage is used or freed: a copy of it has no use any more.
    fn close_window(&mut self, storage: StorageId) {
        let window = std::mem::replace(&mut self.at.window[storage.index()], NO_WINDOW);
        if window != NO_WINDOW && self.actions[window as usize] == Action::Swap {
            self.at.slow_bytes[self.tier[window as usize] as usize] -= self.bytes(storage);
        }
    }

    /// Makes `storage` readable.
    fn materialise(&mut self, storage: StorageId) {
        match self.at.residency[storage.index()] {
            Residency::Resident => {}
            Residency::Offloading => {
                self.wait_until(self.at.copy_done_ns[storage.index()]);
                self.at.residency[storage.index()] = Residency::Resident;
                self.emit(Instruction::Recall(storage));
            }
            Residency::Offloaded => {
                self.make_room(self.bytes(storage));
                self.slab.members.clear();
                self.prefetch(WindowId(self.at.window[storage.index()]));
                self.finish_prefetch(storage);
            }
            Residency::Prefetching => self.finish_prefetch(storage),
            Residency::Dropped => self.rebuild(self.at.current[storage.index()]),
            Residency::Absent => unreachable!("storage {} is used before or after its life", storage.0),
        }
    }

    fn finish_prefetch(&mut self, storage: StorageId) {
        self.wait_until(self.at.copy_done_ns[storage.index()]);
        self.at.residency[storage.index()] = Residency::Resident;
        self.emit(Instruction::FinishPrefetch(storage));
    }

    /// Reruns what `version` depends on until it stands in its storage. An explicit stack, not recursion: chains
    /// can be as long as the iteration.
    fn rebuild(&mut self, version: VersionId) {
        debug_assert!(self.stack.is_empty());
        self.push_rerun(version);
        while let Some(&operator) = self.stack.last() {
            match self.missing_input(operator) {
                Some(input) => self.push_rerun(input),
                None => self.rerun(operator),
            }
        }
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
    fn missing_input(&mut self, operator: OperatorId) -> Option<VersionId> {
        for &input in self.lineage.replay_inputs(operator) {
            let storage = self.lineage.version(input).storage;
            if self.at.beside[input.index()] {
                continue;
            }
            if self.at.current[storage.index()] != input || self.at.residency[storage.index()] == Residency::Absent {
                return Some(input);
            }
            match self.at.residency[storage.index()] {
                Residency::Resident => {}
                Residency::Dropped => return Some(input),
                _ => {
                    let retained_already = self.at.residency[storage.index()] == Residency::Prefetching;
                    self.materialise(storage);
                    if !retained_already {
                        self.retain(Retained::Storage(storage));
                    }
                }
            }
        }
        None
    }

    /// Reruns the operator on top of the stack.
    fn rerun(&mut self, operator: OperatorId) {
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
        self.make_room(demand);
        self.note_peak(demand);
        self.emit(Instruction::Rerun(operator));
        self.at.now_ns += facts.cost_ns;
        self.at.result.recompute_ns += facts.cost_ns;
        self.at.result.reruns += 1;
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
        let position = self.at.retained.partition_point(|other| other.next_use <= entry.next_use);
        self.at.retained.insert(position, entry);
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
        while self.at.retained.first().is_some_and(|entry| (entry.next_use as usize) < self.operator) {
            let RetainedEntry { what, .. } = self.at.retained.remove(0);
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

    /// The retained entry to give up first: the unlocked one with the farthest next use.
    fn farthest_retained(&self) -> Option<usize> {
        self.at.retained.iter().rposition(|entry| match entry.what {
            Retained::Storage(storage) => !self.is_locked(storage) && self.at.window[storage.index()] != NO_WINDOW,
            Retained::Version(version) => self.version_locks[version.index()] == 0,
        })
    }

    /// Bytes of a retained entry, and the time that restoring them again takes.
    fn price(&self, retained: Retained) -> (u64, u64) {
        let (storage, version) = match retained {
            Retained::Version(version) => (self.lineage.version(version).storage, version),
            Retained::Storage(storage) => {
                let window = WindowId(self.at.window[storage.index()]);
                if self.actions[window.index()] == Action::Swap {
                    let tier = self.tier[window.index()];
                    let (link, bytes) = (self.link(tier), self.bytes(storage));
                    let copy_ns = link.prefetch_ns(bytes) + link.contention_ns(bytes);
                    return (self.bytes(storage), copy_ns);
                }
                (storage, self.lineage.window(window).version)
            }
        };
        let producer = self.lineage.version(version).producer;
        let rerun_ns = producer.map_or(0, |producer| self.trace.operators[producer.index()].cost_ns);
        (self.bytes(storage), rerun_ns)
    }

    /// Evicts again what was restored early, or releases a version.
    fn release_retained(&mut self, position: usize) {
        match self.at.retained.remove(position).what {
            Retained::Version(version) => self.release_version(version),
            Retained::Storage(storage) => {
                if self.at.residency[storage.index()] == Residency::Prefetching {
                    self.finish_prefetch(storage);
                }
                match self.actions[self.at.window[storage.index()] as usize] {
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
    }

    /// Sees to it that `needed` more bytes fit, by what is decided already.
    #[inline]
    fn make_room(&mut self, needed: u64) {
        if self.at.resident_bytes + needed <= self.budget_bytes {
        } else {
            self.free_bytes(needed)
        }
    }

    /// Waits for offloads and releases what is retained, whichever costs less time per byte that is missing, until
    /// `needed` more bytes fit.
    fn free_bytes(&mut self, needed: u64) {
        while self.at.resident_bytes + needed > self.budget_bytes {
            let deficit_bytes = self.at.resident_bytes + needed - self.budget_bytes;
            match (self.at.offloads.front().copied(), self.farthest_retained()) {
                (Some(offload), Some(position)) if self.is_cheaper_to_release(position, offload, deficit_bytes) => {
                    self.release_retained(position);
                }
                (Some(_), _) => self.finish_next_offload(),
                (None, Some(position)) => self.release_retained(position),
                (None, None) => break,
            }
        }
    }

    /// Whether restoring a retained entry once more would take less time than waiting for the oldest offload now, each
    /// per byte of the deficit that it covers.
    fn is_cheaper_to_release(&self, position: usize, offload: PendingOffload, deficit_bytes: u64) -> bool {
        let wait_ns = offload.done_ns.saturating_sub(self.at.now_ns);
        let (bytes, restore_ns) = self.price(self.at.retained[position].what);
        let covered = |bytes: u64| u128::from(bytes.min(deficit_bytes));
        u128::from(restore_ns) * covered(self.bytes(offload.storage)) < u128::from(wait_ns) * covered(bytes)
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
        self.close_window(storage);
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
        if !matches!(instruction, Instruction::Offload { .. } | Instruction::Prefetch { .. }) {
            // What comes after another step moves alone.
            self.slab.members.clear();
        }
        self.steps.push((self.operator as u32, instruction));
    }
}
