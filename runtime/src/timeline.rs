//! The timeline: predicts makespan and peak of a plan, and writes its schedule.
//!
//! Three clocks run: compute, offload channel, prefetch channel. Bytes are exact. What was restored early, and
//! what a rerun materialised beside its storage for a dropped child that still needs it, stays until its memory
//! is needed, farthest next use first. Nothing here chooses what to evict: where a budget would be exceeded
//! and nothing that is already decided can make room, the run stops and says so.
//!
//! A run stops only at operators where a plan makes a difference. Between two of them every operator takes its time and
//! its bytes as with nothing evicted, plus a lag and an excess that stay the same: the profile of the trace says
//! where such a stretch peaks, and where it ends for want of bytes. So a run costs what its plan does, not what the
//! trace is long, and predicts the same as a walk over every operator.

mod agenda;
mod begun;
mod change;
mod copies;
mod explain;
mod moment;
mod placement;
pub(crate) mod prefetch;
mod rebuild;
mod retention;

use std::ops::Range;

use self::agenda::Agenda;
use self::begun::Begun;
use self::change::Base;
pub use self::change::CHANGES_MAX;
use self::explain::Notes;
pub use self::explain::{Explanation, PeakBytes, TimeByCause};
use self::moment::{LastRun, Moment, Segment};
use self::placement::Placement;
use self::prefetch::{Facts, Late, Prefetches, clamped};
use crate::hardware::{CopyTimes, SlowTiers, Tier};
use crate::lineage::{Lineage, Version, VersionId, Window, WindowId};
use crate::observation::Wait;
use crate::plan::{Action, ActionSet, Plan};
use crate::schedule::{Instruction, Schedule};
use crate::trace::{Operator, OperatorId, StorageId, Trace};

/// Reruns for each operator of a trace, and some beside, after which a plan is given up: what rebuilds so much is no plan,
/// and a chain whose ancestors are dropped again and again takes exponentially many.
const RERUNS_PER_OPERATOR_MAX: u64 = 8;
const RERUNS_MAX_AT_LEAST: u64 = 2048;

/// How many dead generations a materialised version may be away from the dropped child that needs it.
const RETAIN_DEPTH: u32 = 3;

pub(crate) const NO_WINDOW: u32 = u32::MAX;

/// Where a storage's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residency {
    /// Not created yet, or freed, or another version has its place.
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
    /// Operators that run again.
    pub reruns: u64,
    /// Bytes offloaded.
    pub offloaded_bytes: u64,
    /// Bytes prefetched.
    pub prefetched_bytes: u64,
    /// Bytes over the budget at the worst moment.
    pub over_budget_bytes: u64,
    /// Most bytes whose copies are in the host's memory at any moment.
    pub host_peak_bytes: u64,
    /// Most bytes whose copies are in the file at any moment.
    pub file_peak_bytes: u64,
    /// Bytes of swaps that the plan asks for and no slow tier has room for: those storages stay on the device.
    pub refused_bytes: u64,
    /// Whether the plan was given up because it reruns too much. It then counts as holding no budget: as large as keep-all,
    /// and slower than any plan that is not given up.
    pub given_up: bool,
}

impl Prediction {
    /// Whether the budget is held.
    pub fn fits(&self) -> bool {
        self.over_budget_bytes == 0
    }

    /// The order of plans: bytes over the budget first, then time.
    pub fn rank(&self) -> (u64, u64) {
        (self.over_budget_bytes, self.makespan_ns)
    }

    /// The prediction of a plan that is given up, the same whichever way it was found to be too long.
    fn given_up(trace: &Trace, lineage: &Lineage, budget_bytes: u64) -> Self {
        let peak_bytes = lineage.keep_all_peak_bytes();
        let peak_operator = lineage.keep_all_bytes().iter().position(|&bytes| bytes == peak_bytes).unwrap_or(0);
        let reruns = reruns_max(trace) + 1;
        Prediction {
            makespan_ns: lineage.keep_all_makespan_ns().saturating_mul(1 + reruns),
            peak_bytes,
            peak_operator,
            reruns,
            over_budget_bytes: peak_bytes.saturating_sub(budget_bytes).max(1),
            given_up: true,
            ..Prediction::default()
        }
    }

    /// Adds the peaks of a stretch, with so many bytes more on the device and in the host's memory.
    pub(crate) fn include(&mut self, segment: &Segment, more_bytes: i64, more_host_bytes: i64) {
        let (bytes, operator) = segment.peak;
        let bytes = if bytes == 0 { 0 } else { bytes.saturating_add_signed(more_bytes) };
        if bytes > self.peak_bytes {
            (self.peak_bytes, self.peak_operator) = (bytes, operator);
        }
        let [host_bytes, file_bytes] = segment.slow_peak_bytes;
        self.host_peak_bytes = self.host_peak_bytes.max(host_bytes.saturating_add_signed(more_host_bytes));
        self.file_peak_bytes = self.file_peak_bytes.max(file_bytes);
    }

    /// Adds what came together between two moments of another run.
    pub(crate) fn add_span(&mut self, from: &Prediction, to: &Prediction) {
        self.stall_ns += to.stall_ns - from.stall_ns;
        self.contention_ns += to.contention_ns - from.contention_ns;
        self.recompute_ns += to.recompute_ns - from.recompute_ns;
        self.reruns += to.reruns - from.reruns;
        self.offloaded_bytes += to.offloaded_bytes - from.offloaded_bytes;
        self.prefetched_bytes += to.prefetched_bytes - from.prefetched_bytes;
    }
}

/// How a run of the timeline ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Run {
    /// The iteration's end was reached.
    Finished(Prediction),
    /// So many bytes are missing before or in this operator, and windows are open that could be evicted
    /// ([`Timeline::open_windows`]).
    Pressed { operator: usize, pressed: Pressed },
}

/// What the timeline may do about a lack of bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnPressure {
    /// Stop where one of these evictions can be chosen, so that it can be; elsewhere, go over the budget. From the operator
    /// `patient_until` on, stop as well where something has to wait for room.
    Stop { actions: ActionSet, patient_until: usize },
    /// Go over the budget.
    Exceed,
}

impl OnPressure {
    /// Whether a run stops at questions that a run like `other` went past.
    fn asks_more_than(self, other: OnPressure) -> bool {
        let patience = |on_pressure| match on_pressure {
            OnPressure::Stop { patient_until, .. } => Some(patient_until),
            OnPressure::Exceed => None,
        };
        patience(self).zip(patience(other)).is_some_and(|(own, others)| own < others)
    }
}

/// Bytes on the device that nothing uses just now and that can be restored again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Retained {
    /// A storage restored before its window ended.
    Storage(StorageId),
    /// A version materialised beside its storage.
    Version(VersionId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RetainedEntry {
    pub(crate) what: Retained,
    next_use: u32,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingOffload {
    pub(crate) storage: StorageId,
    pub(crate) done_ns: u64,
}

/// Something must be chosen before a run can go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pressed {
    pub(crate) deficit_bytes: u64,
    /// What it costs to go on as decided; none where that exceeds the budget.
    pub(crate) wait: Option<Wait>,
    /// Evictions that can help.
    pub(crate) actions: ActionSet,
}

/// Control flow inside a run that ends before the iteration does.
enum Stopped {
    /// Something must be chosen first.
    Pressed(Pressed),
    /// There are too many reruns.
    GivenUp,
}

/// The most reruns of a plan that is not given up.
fn reruns_max(trace: &Trace) -> u64 {
    RERUNS_PER_OPERATOR_MAX * trace.operators.len() as u64 + RERUNS_MAX_AT_LEAST
}

/// Storages that are copied together, before one operator.
#[derive(Debug, Default)]
struct Slab {
    /// Where the copy stands: nothing joins the slab from another tier.
    tier: Tier,
    members: Vec<StorageId>,
}

/// Windows that two plans treat differently.
fn differences<'p>(one: &'p [Action], other: &'p [Action]) -> impl Iterator<Item = WindowId> + 'p {
    const STRIDE: usize = 64;
    let strides = (0..).zip(one.chunks(STRIDE).zip(other.chunks(STRIDE)));
    strides.filter(|(_, (one, other))| one != other).flat_map(|(stride, (one, other))| {
        let first = stride * STRIDE as u32;
        let windows = (first..).map(WindowId).zip(one.iter().zip(other));
        windows.filter(|(_, (one, other))| one != other).map(|(window, _)| window)
    })
}

/// A wait of less than one in so many parts of the iteration is not worth a question.
const WAIT_SHARE_MIN: u64 = 10_000;

/// The predictor for one trace and its slow tiers. Reusable: a run allocates nothing once its buffers have grown.
pub struct Timeline<'a> {
    trace: &'a Trace,
    lineage: &'a Lineage,
    copies: CopyTimes,
    placement: Placement,
    /// The plan's, with `Keep` for swaps that no tier has room for.
    actions: Vec<Action>,

    // What the run was asked.
    budget_bytes: u64,
    on_pressure: OnPressure,
    schedule: Option<Schedule>,
    notes: Option<Notes>,

    // Where the run stands.
    operator: usize,
    at: Moment,
    /// Operators at which the plan starts, ends or prefetches something; and the iteration's end.
    agenda: Agenda,
    /// Per version: how many reruns under way read it.
    version_locks: Vec<u32>,
    stack: Vec<OperatorId>,

    prefetches: Prefetches,
    /// The budget that prefetches were decided for.
    prefetches_for_bytes: Option<u64>,
    last_run: LastRun,
    base: Base,
    /// Whether the run under way is to be the base of changes.
    leaves_base: bool,
    /// The plan of the last run, where swaps of it may be refused.
    asked: Plan,
    /// Per operator: how far it finished behind its keep-all time in the last run that could stop.
    lag_ns: Vec<u64>,
    begun: Begun,
    /// One bit per window that could be rebuilt.
    recomputable: Vec<u64>,
    /// One bit per window that the run's plan keeps; nothing until somebody asks.
    kept: Vec<u64>,
    open: Vec<WindowId>,
    /// Prefetches that start later than they should, in order, where the run may stop for them.
    late: Vec<Late>,
    slab: Slab,
}

impl<'a> Timeline<'a> {
    /// A timeline for `trace`, whose lineage is `lineage`.
    pub fn new(trace: &'a Trace, lineage: &'a Lineage, tiers: impl Into<SlowTiers>) -> Self {
        let tiers = tiers.into();
        let (storages, versions) = (trace.storages.len(), lineage.versions().len());
        Timeline {
            trace,
            lineage,
            copies: CopyTimes::of(trace, tiers),
            placement: Placement::new(trace, lineage, tiers),
            actions: vec![Action::Keep; lineage.windows().len()],
            budget_bytes: u64::MAX,
            on_pressure: OnPressure::Exceed,
            schedule: None,
            notes: None,
            operator: 0,
            at: Moment::new(storages, versions),
            agenda: Agenda::new(trace.operators.len() + 1),
            version_locks: vec![0; versions],
            stack: Vec::new(),
            prefetches: Prefetches::new(trace.operators.len(), lineage.windows().len()),
            prefetches_for_bytes: None,
            last_run: LastRun::new(trace.operators.len()),
            base: Base::new(trace.operators.len()),
            leaves_base: false,
            asked: Plan::keep_all(0),
            lag_ns: vec![0; trace.operators.len()],
            begun: Begun::new(lineage.windows().len()),
            recomputable: Begun::words(lineage.windows(), |window| window.recomputable).collect(),
            kept: Vec::new(),
            open: Vec::new(),
            late: Vec::new(),
            slab: Slab::default(),
        }
    }

    /// Predicts `plan` under `budget_bytes`, going over it where the plan leaves no other way.
    pub fn predict(&mut self, plan: &Plan, budget_bytes: u64) -> Prediction {
        match self.run(plan, budget_bytes, OnPressure::Exceed) {
            Run::Finished(prediction) => prediction,
            Run::Pressed { .. } => unreachable!("a run that may exceed the budget never stops"),
        }
    }

    /// Predicts `plan` and writes out what the driver has to do: nothing, where the plan is given up.
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

    /// What is still on its way to a slow tier where the last run has ended, as it leaves: some of what stays away.
    pub(crate) fn leaving(&self) -> Vec<StorageId> {
        let is_leaving = |offload: &&PendingOffload| self.at.is_under_way(offload);
        self.at.offloads.iter().filter(is_leaving).map(|offload| offload.storage).collect()
    }

    /// Postpones offloads of the last run, whose schedule this is, that are still under way at its end and could not begin before
    /// what the program reads out last, until after that. A device copies in the order in which it is asked to, and a host that is far
    /// ahead in asking would have the program wait behind bytes that need not be gone.
    pub fn let_read_out(&self, schedule: &mut Schedule) {
        let Some(last) = self.trace.operators.iter().rposition(Operator::is_read_out) else { return };
        // At the latest: what holds compute up may yet come behind it.
        let read_ns = self.lineage.end_ns(last) + self.at.lag_ns;
        let mut postponed = Vec::new();
        // Of those that are copied one after another, or as one: until when the link has others to copy.
        let (mut taken_until_ns, mut done_ns) = (0, 0);
        for offload in &self.at.offloads {
            if offload.done_ns != done_ns {
                (taken_until_ns, done_ns) = (done_ns, offload.done_ns);
            }
            if taken_until_ns >= read_ns && self.at.is_under_way(offload) {
                postponed.push(offload.storage);
            }
        }
        schedule.postpone(last, postponed);
    }

    /// The windows that the last run's plan evicts.
    pub(crate) fn evicted(&self) -> &[WindowId] {
        self.prefetches.evicted()
    }

    /// What was dropped when the last run stopped.
    pub(crate) fn dropped(&self) -> impl Iterator<Item = VersionId> + '_ {
        let dropped = |storage: &&StorageId| self.at.residency[storage.index()] == Residency::Dropped;
        let held = |storage: &StorageId| self.lineage.window(WindowId(self.at.window[storage.index()])).version;
        self.at.in_flight().iter().filter(dropped).map(held)
    }

    /// Whether `version` is what its storage holds, and it was dropped, when the last run stopped.
    fn is_dropped(&self, version: VersionId) -> bool {
        self.residency_of(version) == Residency::Dropped
    }

    /// Where `version` is as far as its storage goes: absent if that holds another one.
    fn residency_of(&self, version: VersionId) -> Residency {
        let Version { storage, since, until, .. } = *self.lineage.version(version);
        self.at.segment.look_at(storage);
        if (since as usize..=until as usize).contains(&self.operator) {
            self.at.residency[storage.index()]
        } else {
            Residency::Absent
        }
    }

    /// Whether `version` is materialised, in its storage or beside it.
    fn is_materialised(&self, version: VersionId) -> bool {
        self.at.beside[version.index()] || !matches!(self.residency_of(version), Residency::Absent | Residency::Dropped)
    }

    /// What copies of storages take.
    pub(crate) fn copies(&self) -> &CopyTimes {
        &self.copies
    }

    /// The last run's actions, with `Keep` for swaps that no tier has room for.
    pub(crate) fn actions(&self) -> &[Action] {
        &self.actions
    }

    /// Where copies of the last run's plan stand.
    pub(crate) fn placement(&self) -> &Placement {
        &self.placement
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
        self.lineage.end_ns(index) + self.lag_ns[index]
    }

    pub(crate) fn run(&mut self, plan: &Plan, budget_bytes: u64, on_pressure: OnPressure) -> Run {
        self.budget_bytes = budget_bytes;
        if on_pressure.asks_more_than(self.on_pressure) {
            // The last run went past questions that this one stops at.
            self.last_run.bookmarks.clear();
        }
        self.on_pressure = on_pressure;
        self.base.forget();
        self.kept.clear();
        self.decide_prefetches(plan);
        self.note_agenda();
        self.operator = self.start();
        self.run_on()
    }

    /// Decides when `plan` prefetches, with what is decided whatever it says: anew, or where the last plan was the same
    /// but for one window, from there on.
    fn decide_prefetches(&mut self, plan: &Plan) {
        let Self { lineage, budget_bytes, ref copies, .. } = *self;
        let asked_again = self.prefetches_for_bytes.replace(budget_bytes) == Some(budget_bytes);
        if asked_again && self.placement.is_unlimited() {
            let changed = differences(&self.actions, plan.actions());
            let mut changed = changed.filter(|&window| !lineage.is_decided(window));
            let (first, second) = (changed.next(), changed.next());
            drop(changed);
            if second.is_none() {
                let Some(window) = first else { return };
                let action = plan.action(window);
                let was = std::mem::replace(&mut self.actions[window.index()], action);
                let facts = Facts { lineage, copies, placement: &self.placement };
                self.prefetches.change(facts, window, was, &self.actions, budget_bytes);
                self.prefetches.commit();
                return;
            }
        }
        self.actions.copy_from_slice(plan.actions());
        lineage.decided().iter().for_each(|window| self.actions[window.index()] = Action::Swap);
        if !self.placement.is_unlimited() {
            self.asked = plan.clone();
            self.placement.decide(self.trace, lineage, &mut self.actions);
        }
        let facts = Facts { lineage, copies, placement: &self.placement };
        self.prefetches.decide(facts, &self.actions, budget_bytes);
    }

    /// Runs from the operator at hand to the end, or to where something must be chosen first.
    fn run_on(&mut self) -> Run {
        let on_pressure = self.on_pressure;
        loop {
            if on_pressure != OnPressure::Exceed {
                self.last_run.bookmarks.pass(self.operator, &mut self.at);
            } else if self.leaves_base {
                self.base.bookmarks.pass(self.operator, &mut self.at);
            }
            match self.operate() {
                Ok(()) => {}
                Err(Stopped::Pressed(pressed)) => return Run::Pressed { operator: self.operator, pressed },
                Err(Stopped::GivenUp) => return Run::Finished(self.give_up()),
            }
            if self.operator == self.trace.operators.len() {
                return Run::Finished(self.conclude());
            }
            let next = self.pass_over();
            if on_pressure != OnPressure::Exceed {
                self.lag_ns[self.operator + 1..next].fill(self.at.lag_ns);
            }
            self.operator = next;
        }
    }

    /// The run ends here, in the middle of reruns.
    fn give_up(&mut self) -> Prediction {
        self.abandon_reruns();
        if let Some(schedule) = &mut self.schedule {
            schedule.clear();
        }
        Prediction::given_up(self.trace, self.lineage, self.budget_bytes)
    }

    /// Forgets reruns that were under way when a run stopped.
    fn abandon_reruns(&mut self) {
        if !self.stack.is_empty() {
            self.version_locks.fill(0);
            self.at.beside.fill(false);
            self.stack.clear();
        }
    }

    fn conclude(&mut self) -> Prediction {
        if self.leaves_base {
            self.base.bookmarks.close_last(&mut self.at);
        } else {
            self.at.close_segment();
        }
        let result = &mut self.at.result;
        result.makespan_ns = self.at.now_ns;
        result.over_budget_bytes = result.peak_bytes.saturating_sub(self.budget_bytes);
        result.refused_bytes = self.placement.refused_bytes;
        *result
    }

    fn note_agenda(&mut self) {
        self.agenda.clear();
        self.agenda.note(0);
        self.agenda.note(self.trace.operators.len());
        for &id in self.prefetches.evicted() {
            let window = self.lineage.window(id);
            self.agenda.note(window.start as usize);
            self.agenda.note(window.last_operator());
            if let Some(before) = self.prefetches.before(id) {
                self.agenda.note(before);
            }
        }
        self.late.clear();
        if let OnPressure::Stop { patient_until, .. } = self.on_pressure {
            self.late.extend(self.prefetches.late().filter(|late| late.wanted >= patient_until));
            self.late.sort_unstable_by_key(|late| (late.wanted, late.window));
            for late in &self.late {
                self.agenda.note(late.wanted);
            }
        }
    }

    /// Passes over the operators after the one at hand that nothing happens at. The next one that something does.
    fn pass_over(&mut self) -> usize {
        let (lineage, after) = (self.lineage, self.operator + 1);
        let mut next = self.agenda.next(after);
        if let Some(soonest) = self.at.retained.front() {
            next = next.min(after.max(soonest.next_use as usize + 1));
        }
        if let Some(offload) = self.at.offloads.front() {
            next = lineage.first_start_from(after..next, offload.done_ns.saturating_sub(self.at.lag_ns));
        }
        if !self.at.due.is_empty() {
            next = self.next_room_for_due(after..next);
        }
        let profile = lineage.profile();
        let may_press =
            self.on_pressure != OnPressure::Exceed || !self.at.offloads.is_empty() || !self.at.retained.is_empty();
        let spare_bytes = self.spare_bytes();
        if may_press && let Some(pressed) = profile.first_above(after..next, spare_bytes) {
            next = pressed;
        }
        if let Some((operator, bytes)) = profile.peak(after..next) {
            self.note_peak(operator, (bytes + self.at.excess_bytes) as u64);
            if may_press {
                self.note_spare(spare_bytes - bytes);
            }
        }
        next
    }

    /// The first operator of `range` at which a prefetch that waits for room finds it, or has to be looked at again;
    /// the end of `range` where there is none.
    fn next_room_for_due(&mut self, range: Range<usize>) -> usize {
        let mut least = None;
        for &id in &self.at.due {
            let storage = self.lineage.window(id).storage;
            if self.at.window[storage.index()] == id.0 {
                match self.at.residency[storage.index()] {
                    Residency::Offloaded => least = Some(self.bytes(storage).min(least.unwrap_or(u64::MAX))),
                    Residency::Offloading => {}
                    _ => return range.start,
                }
            }
        }
        let end = range.end;
        if least.is_some() {
            self.at.segment.idle_bytes = 0;
        }
        let room = least.and_then(|bytes| {
            self.lineage.profile().first_at_most(range, self.spare_bytes().saturating_sub(bytes as i64))
        });
        room.unwrap_or(end)
    }

    /// Device bytes when the first operator arrives.
    fn start_bytes(&self) -> u64 {
        let away = self.lineage.decided().iter().filter(|id| self.lineage.begins_away(**id));
        let away = away.filter(|id| self.actions[id.index()] == Action::Swap);
        let away_bytes: u64 = away.map(|id| self.bytes(self.lineage.window(*id).storage)).sum();
        self.lineage.resident_bytes(0) as u64 - away_bytes
    }

    /// How high the keep-all profile may be for the budget to hold.
    fn spare_bytes(&self) -> i64 {
        clamped(self.budget_bytes) - self.at.excess_bytes
    }

    /// Device bytes before the operator at hand allocates any.
    fn resident_bytes(&self) -> u64 {
        (self.lineage.resident_bytes(self.operator) + self.at.excess_bytes) as u64
    }

    /// Goes to where the run has to start, and says before which operator that is.
    fn start(&mut self) -> usize {
        self.abandon_reruns();
        if self.schedule.is_some() || self.leaves_base {
            // It has to be written from the first operator on.
            self.last_run.bookmarks.clear();
        }
        let Self { lineage, actions, prefetches, budget_bytes, at, .. } = self;
        let bookmark = self.last_run.resume(lineage, actions, prefetches, *budget_bytes, at);
        if self.on_pressure == OnPressure::Exceed {
            // Beyond where it went over the budget, a run that stops there would not pass.
            self.last_run.bookmarks.clear();
        }
        match bookmark {
            Some(operator) => operator,
            None => {
                self.reset();
                0
            }
        }
    }

    fn reset(&mut self) {
        if let Some(schedule) = &mut self.schedule {
            schedule.clear();
        }
        self.at.reset();
        self.at.result.peak_bytes = self.start_bytes();
    }

    /// One operator, or the iteration's end.
    fn operate(&mut self) -> Result<(), Stopped> {
        let (lineage, index) = (self.lineage, self.operator);
        self.at.now_ns = lineage.start_ns(index) + self.at.lag_ns;
        self.forget_used_retained();
        self.start_windows();
        self.finish_done_offloads();
        self.issue_due_prefetches();
        self.look_at_late_prefetches()?;
        self.restore_used()?;
        if index == self.trace.operators.len() {
            self.let_go();
            return Ok(());
        }
        let demand = lineage.demand_bytes(index);
        self.make_room(demand)?;
        self.note_peak(index, self.resident_bytes() + demand);
        self.lag_ns[index] = self.at.now_ns - lineage.start_ns(index);
        self.at.now_ns += lineage.end_ns(index) - lineage.start_ns(index);
        for &id in lineage.windows_ending(index + 1) {
            let is_evicted = self.actions[id.index()] != Action::Keep;
            if is_evicted && !lineage.window(id).used_again && !lineage.stays_away(id) {
                self.free(lineage.window(id).storage);
            }
        }
        self.at.lag_ns = self.at.now_ns - lineage.end_ns(index);
        Ok(())
    }

    fn start_windows(&mut self) {
        self.slab.members.clear();
        if self.operator == 0 {
            for &id in self.lineage.leaving() {
                if self.actions[id.index()] == Action::Swap {
                    self.start_window(id, Action::Swap);
                }
            }
            self.slab.members.clear();
        }
        // Small storages first, so that they leave side by side.
        for small in [true, false] {
            for &id in self.lineage.windows_starting(self.operator) {
                let action = self.actions[id.index()];
                if action != Action::Keep && self.is_gathered(id) == small && !self.lineage.begins_leaving(id) {
                    self.start_window(id, action);
                }
            }
        }
    }

    /// Evicted windows that the operator at hand ends by using their storages, in the order of its accesses.
    fn used(&self) -> impl Iterator<Item = WindowId> + use<'a> {
        let (lineage, index) = (self.lineage, self.operator);
        lineage.windows_ending(index).iter().copied().filter(move |&id| lineage.window(id).used_again)
    }

    /// Makes all that the operator at hand uses readable. At the iteration's end that is everything that still lives.
    fn restore_used(&mut self) -> Result<(), Stopped> {
        self.slab.members.clear();
        // Small storages that are not on their way yet come together.
        for id in self.used() {
            let storage = self.lineage.window(id).storage;
            if self.is_gathered(id) && self.at.residency[storage.index()] == Residency::Offloaded {
                self.make_room(self.bytes(storage))?;
                self.prefetch(id);
            }
        }
        for id in self.used() {
            if self.actions[id.index()] != Action::Keep {
                self.restore(self.lineage.window(id).storage)?;
            }
        }
        Ok(())
    }

    /// At the iteration's end nothing is kept beside its storage any more.
    fn let_go(&mut self) {
        while let Some(entry) = self.at.retained.pop_back() {
            if let Retained::Version(version) = entry.what {
                self.release_version(version);
            }
        }
    }

    fn start_window(&mut self, id: WindowId, action: Action) {
        let window = self.lineage.window(id);
        let storage = window.storage;
        debug_assert_eq!(self.at.residency[storage.index()], Residency::Resident, "window {} starts", id.0);
        self.at.open_window(storage, id);
        match action {
            Action::Keep => unreachable!("a kept window changes nothing"),
            Action::Swap => self.offload(id),
            Action::Recompute => {
                debug_assert!(window.recomputable, "window {} cannot be recomputed", id.0);
                self.drop_storage(storage);
            }
        }
    }

    fn drop_storage(&mut self, storage: StorageId) {
        self.at.excess_bytes -= self.bytes(storage) as i64;
        self.at.residency[storage.index()] = Residency::Dropped;
        self.emit(Instruction::Drop(storage));
    }

    /// Makes `storage` readable and closes its window.
    fn restore(&mut self, storage: StorageId) -> Result<(), Stopped> {
        if self.at.residency[storage.index()] != Residency::Resident {
            self.materialise(storage)?;
        }
        self.close_window(storage);
        Ok(())
    }

    /// The storage is used or freed: a copy of it has no use any more.
    fn close_window(&mut self, storage: StorageId) {
        if let Some(window) = self.at.close_window(storage)
            && self.actions[window.index()] == Action::Swap
        {
            self.at.slow_bytes[self.placement.tier(window) as usize] -= self.bytes(storage);
        }
    }

    /// Makes `storage` readable.
    fn materialise(&mut self, storage: StorageId) -> Result<(), Stopped> {
        match self.at.residency[storage.index()] {
            Residency::Resident => {}
            Residency::Offloading => {
                self.wait_until(self.at.copy_done_ns[storage.index()]);
                self.at.residency[storage.index()] = Residency::Resident;
                self.emit(Instruction::Recall(storage));
            }
            Residency::Offloaded => {
                self.make_room(self.bytes(storage))?;
                self.slab.members.clear();
                self.prefetch(WindowId(self.at.window[storage.index()]));
                self.finish_prefetch(storage);
            }
            Residency::Prefetching => self.finish_prefetch(storage),
            Residency::Dropped => {
                let window = WindowId(self.at.window[storage.index()]);
                self.rebuild(self.lineage.window(window).version)?;
            }
            Residency::Absent => unreachable!("storage {} is used before or after its life", storage.0),
        }
        Ok(())
    }

    /// Finds the windows that one of `actions` could evict.
    fn collect_open_windows(&mut self, actions: ActionSet) {
        if self.kept.is_empty() {
            self.kept.extend(Begun::words(&self.actions, |&action| action == Action::Keep));
        }
        let mut open = std::mem::take(&mut self.open);
        open.clear();
        let evictable = |word: usize| if actions.swap { u64::MAX } else { self.recomputable[word] };
        open.extend(self.begun.open(self.lineage, self.operator, |word| self.kept[word] & evictable(word)));
        open.retain(|&id| {
            let window = self.lineage.window(id);
            !self.is_locked(window) && self.may_evict(window, actions)
        });
        self.open = open;
    }

    /// Stops the run, where it may stop although the budget holds, and where one of the evictions that are `of_use` could
    /// avoid the `wait`.
    fn press_softly(
        &mut self,
        deficit_bytes: u64,
        of_use: ActionSet,
        wait: impl FnOnce(&Self) -> Wait,
    ) -> Result<(), Stopped> {
        let OnPressure::Stop { actions, patient_until } = self.on_pressure else { return Ok(()) };
        if self.operator < patient_until {
            return Ok(());
        }
        let wait = wait(self);
        if wait.stall_ns.saturating_mul(WAIT_SHARE_MIN) <= self.lineage.keep_all_makespan_ns() {
            return Ok(());
        }
        let actions = actions.and(of_use);
        self.collect_open_windows(actions);
        if self.open.is_empty() {
            return Ok(());
        }
        Err(Stopped::Pressed(Pressed { deficit_bytes, wait: Some(wait), actions }))
    }

    fn may_evict(&self, window: &Window, actions: ActionSet) -> bool {
        actions.recompute && window.recomputable
            || actions.swap && self.placement.room_for(window, self.bytes(window.storage)).is_some()
    }

    /// The program lets go of an evicted storage.
    fn free(&mut self, storage: StorageId) {
        match self.at.residency[storage.index()] {
            Residency::Resident | Residency::Prefetching => {}
            Residency::Offloading => self.wait_until(self.at.copy_done_ns[storage.index()]),
            // Its bytes, which are free already, are not freed with the others of the profile.
            Residency::Offloaded | Residency::Dropped => self.at.excess_bytes += self.bytes(storage) as i64,
            Residency::Absent => unreachable!("storage {} is freed twice", storage.0),
        }
        self.at.residency[storage.index()] = Residency::Resident;
        self.close_window(storage);
    }

    fn wait_until(&mut self, moment_ns: u64) {
        if moment_ns > self.at.now_ns {
            self.at.result.stall_ns += moment_ns - self.at.now_ns;
            self.at.now_ns = moment_ns;
        }
    }

    fn note_peak(&mut self, operator: usize, bytes: u64) {
        if bytes > self.at.segment.peak.0 {
            self.at.segment.peak = (bytes, operator);
            if self.notes.is_some() {
                self.note_residents(operator, bytes);
            }
        }
    }

    fn bytes(&self, storage: StorageId) -> u64 {
        self.lineage.bytes(storage)
    }

    fn emit(&mut self, instruction: Instruction) {
        if !matches!(instruction, Instruction::Offload { .. } | Instruction::Prefetch { .. }) {
            // What comes after another step moves alone.
            self.slab.members.clear();
        }
        if let Some(schedule) = &mut self.schedule {
            schedule.push(self.operator, instruction);
        }
    }
}
