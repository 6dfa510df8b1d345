//! One program at several sizes, as batches of any length make it: the same operators on the same storages, which are smaller or
//! larger, and a plan for some of the sizes.
//!
//! An iteration goes by the plan for its very sizes, or by that for the least ones that are nowhere smaller: what holds a budget
//! there holds it here. Where it is larger than any, it goes by the largest's. Sizes get a plan of their own where that one let
//! bytes run short, where it costs time and left bytes free, and where they come again; but where sizes are told anew within an
//! iteration that cannot be divided there, no plan for others suits all, and only what comes again has one.
//! Mimose (Liao et al., arXiv 2209.02478) has a plan for each size too; it foresees what a size takes by a regression, where here
//! an iteration of it has told.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::names::RungName;
use super::program::{Known, Scheduled};
use super::shelf::Shelf;
use super::shim::RESIZED;
use super::told::Told;
use crate::timeline::Prediction;
use crate::trace::{Storage, StorageId, Trace};

/// Share of a plan's bytes from which on an iteration goes by it as well as by one of its own …
const NEAR: f64 = 0.9;
/// … of its peak …
const NEAR_PEAK: f64 = 0.97;
/// … and of what it takes, that of keeping everything: there is nothing to be gained.
const CHEAP: f64 = 0.99;
/// Plans of their own for sizes that are less than that. Sizes of several kinds, nodes and edges say, are never all near one.
const REFINED_MAX: u32 = 24;
/// Sizes without a plan of their own that are remembered, so that it is noticed when they come again.
const MET_MAX: usize = 64;

/// How an iteration's sizes are to those that its plan was made for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fit {
    /// The same, as far as they are known.
    #[default]
    Exact,
    /// None is larger.
    Within,
    /// Some are larger than in any plan that suits the others.
    Beyond,
}

/// The sizes of one iteration.
#[derive(Default)]
pub(crate) struct Sizes {
    /// By storage, where an operator has told.
    pub(crate) storages: Vec<Option<u64>>,
    /// By operator: most bytes that it had allocated at once.
    pub(crate) peaks: Vec<u64>,
    /// What was there when its first operator arrived.
    pub(crate) start_bytes: u64,
}

/// A program at certain sizes, and what to do while it runs at those.
pub(crate) struct Rung {
    pub(crate) known: Known,
    pub(crate) scheduled: Scheduled,
    /// How its plan did.
    pub(super) shelf: Shelf,
    pub(crate) name: RungName,
    /// The iteration that it last was.
    pub(crate) last_seen: u64,
    /// Whether no iteration had these sizes: they are the largest of several.
    pub(super) is_hull: bool,
    /// All storages together.
    bytes: u64,
}

impl Rung {
    /// One of that name, seen now.
    pub(crate) fn new(known: Known, scheduled: Scheduled, shelf: Shelf, (name, last_seen): (RungName, u64)) -> Self {
        let bytes = known.trace.storages.iter().map(|storage| storage.bytes).sum();
        Rung { known, scheduled, shelf, name, last_seen, is_hull: false, bytes }
    }

    /// Whether `is` holds for all of `sizes` and those that it was made for.
    fn all(&self, sizes: &[Option<u64>], is: fn(&u64, &u64) -> bool) -> bool {
        let mut pairs = self.known.trace.storages.iter().zip(sizes);
        pairs.all(|(storage, seen)| seen.is_none_or(|seen| varies(storage) || is(&seen, &storage.bytes)))
    }

    /// Whether a plan for smaller sizes could take less time, or fit where this one does not.
    fn is_costly(&self) -> bool {
        let keep_all_ns = self.known.lineage.keep_all_makespan_ns() as f64;
        let costs = |prediction: Prediction| keep_all_ns < CHEAP * prediction.makespan_ns as f64;
        self.scheduled.exceeds_budget() || self.scheduled.prediction.is_some_and(costs)
    }

    /// Whether an iteration that went by its plan had much less at its peak.
    fn is_roomy_for(&self, peak_bytes: u64) -> bool {
        let is_less = |prediction: Prediction| (peak_bytes as f64) < NEAR_PEAK * prediction.peak_bytes as f64;
        self.scheduled.prediction.is_some_and(is_less)
    }

    /// Whether everything fits where nothing is done.
    fn is_idle(&self) -> bool {
        self.scheduled.schedule.is_idle() && !self.scheduled.exceeds_budget()
    }
}

/// Whether a storage changes within an iteration: a trace has the largest that it had.
pub(super) fn varies(storage: &Storage) -> bool {
    storage.locked.as_deref() == Some(RESIZED)
}

/// The sizes of a program that there are plans for.
pub(crate) struct Ladder {
    /// From the smallest on; never empty.
    rungs: Vec<Rung>,
    /// Where an iteration tells which of them it is on.
    told: Told,
    /// Where the one under way tells it, if that comes early, and everything fits until then.
    early: Option<usize>,
    /// Whether that was told anew where nothing was left of what had told it first: as each of the batches tells it whose gradients
    /// add up. Then there are plans for what comes again alone, for none suits all.
    is_told_anew: bool,
    /// The one that the iteration under way goes by.
    at: usize,
    fit: Fit,
    /// Those of the iteration under way.
    sizes: Sizes,
    /// Of sizes that have no plan of their own.
    met: VecDeque<u64>,
    refined: u32,
}

impl Ladder {
    pub(crate) fn new(rung: Rung) -> Self {
        let rungs = vec![rung];
        let (fit, sizes, met) = (Fit::Exact, Sizes::default(), VecDeque::new());
        Ladder { rungs, told: Told::default(), early: None, is_told_anew: false, at: 0, fit, sizes, met, refined: 0 }
    }

    /// The rung that the iteration under way, or the last one, goes by.
    pub(crate) fn rung(&self) -> &Rung {
        &self.rungs[self.at]
    }

    pub(crate) fn rung_mut(&mut self) -> &mut Rung {
        &mut self.rungs[self.at]
    }

    pub(crate) fn rungs(&self) -> &[Rung] {
        &self.rungs
    }

    pub(crate) fn rungs_mut(&mut self) -> &mut [Rung] {
        &mut self.rungs
    }

    /// The operator that nothing is to be done before: only then is it known how much is to be done.
    pub(crate) fn begins_at(&self) -> usize {
        self.early.unwrap_or_default()
    }

    /// Whether any of the plans that the iteration may go by from here on may rerun an operator.
    pub(crate) fn wants_recipe(&self, operator: usize) -> bool {
        if self.early.is_some_and(|told| operator >= told) {
            return self.rung().scheduled.wants_recipe(operator);
        }
        self.rungs.iter().any(|rung| rung.scheduled.wants_recipe(operator))
    }

    /// Whether what is done may suit only what came so far.
    pub(crate) fn is_uncertain(&self) -> bool {
        self.is_told_anew && self.fit != Fit::Exact
    }

    /// Whether an iteration told its sizes anew.
    pub(crate) fn is_told_anew(&self) -> bool {
        self.is_told_anew
    }

    pub(crate) fn fit(&self) -> Fit {
        self.fit
    }

    /// Where the next iteration is expected to be.
    pub(crate) fn expect(&mut self, rung: usize) {
        self.at = rung;
    }

    /// Starts another iteration, within so many bytes.
    pub(crate) fn begin(&mut self, line_bytes: u64) {
        let fits =
            |told: &usize| self.rungs.iter().all(|rung| rung.known.lineage.most_bytes_until(*told) <= line_bytes);
        self.early = self.told.early.filter(fits);
        self.fit = Fit::Exact;
        self.sizes.storages.clear();
        self.sizes.storages.resize(self.rung().known.trace.storages.len(), None);
        self.sizes.peaks.clear();
    }

    /// So many bytes were there when the first operator arrived.
    pub(crate) fn starts_with(&mut self, bytes: u64) {
        self.sizes.start_bytes = bytes;
    }

    /// An operator has run, and had so many bytes allocated at once.
    pub(crate) fn ran(&mut self, peak_bytes: u64) {
        self.sizes.peaks.push(peak_bytes);
    }

    /// The program goes on at this operator, after others than its own.
    pub(crate) fn skip_to(&mut self, operator: usize) {
        self.sizes.peaks.resize(operator, 0);
    }

    /// Whether a storage was of this size before, and so tells nothing new.
    pub(crate) fn has_seen(&self, storage: StorageId, bytes: u64) -> bool {
        self.sizes.storages[storage.index()] == Some(bytes)
    }

    /// A storage is of this size. Where that tells that the iteration is at other sizes than it seemed, it goes on by the rung for
    /// those: returns the one before.
    pub(crate) fn see(&mut self, storage: StorageId, bytes: u64) -> Option<usize> {
        let expected = &self.rungs[self.at].known.trace.storages[storage.index()];
        let seen = &mut self.sizes.storages[storage.index()];
        *seen = Some(bytes.max(seen.unwrap_or_default()));
        let goes_on = bytes == expected.bytes
            || varies(expected)
            || match self.fit {
                Fit::Exact => false,
                Fit::Within => bytes < expected.bytes,
                Fit::Beyond => true,
            };
        if goes_on {
            return None;
        }
        let before = self.at;
        self.settle();
        let operators = self.sizes.peaks.len();
        self.is_told_anew |= self.at != before && self.told.anew.is_some_and(|anew| operators >= anew);
        Some(before)
    }

    /// Finds the rung for the sizes so far.
    fn settle(&mut self) {
        let place = |is: fn(&u64, &u64) -> bool| self.rungs.iter().position(|rung| rung.all(&self.sizes.storages, is));
        let exact = place(u64::eq).map(|at| (at, Fit::Exact));
        let found = exact.or_else(|| Some((place(u64::le)?, Fit::Within)));
        (self.at, self.fit) = found.unwrap_or((self.rungs.len() - 1, Fit::Beyond));
    }

    /// Takes an iteration that was recorded for the last one.
    pub(crate) fn recall(&mut self, sizes: Sizes) {
        self.sizes = sizes;
        self.settle();
    }

    /// The program at the sizes of the last iteration, where a plan for those is wanted; the times are guessed from those at other
    /// sizes. `has_place` says whether there is a place for a plan that could be done without.
    pub(crate) fn propose(&mut self, served: Served, has_place: bool) -> Option<Proposal> {
        let ran_short = matches!(served, Served::RanShort);
        let is_well_served = self.fit == Fit::Exact || self.rung().is_idle() && !ran_short;
        if is_well_served {
            return None;
        }
        let is_own = self.meet() && has_place;
        let storages = self.rung().known.trace.storages.iter().zip(&self.sizes.storages);
        let bytes: u64 = storages.map(|(storage, seen)| seen.unwrap_or(storage.bytes)).sum();
        let (less, more) = (bytes.min(self.rung().bytes), bytes.max(self.rung().bytes));
        let is_far = (less as f64) < NEAR * more as f64;
        let is_roomy = match served {
            Served::Within(peak_bytes) => self.rung().is_roomy_for(peak_bytes),
            _ => self.rung().scheduled.is_reactive(),
        };
        let is_hull = match self.fit {
            _ if is_own => false,
            _ if self.is_told_anew => return None,
            Fit::Beyond if is_far || ran_short => !self.rung().all(&self.sizes.storages, u64::ge),
            Fit::Within if (is_far || is_roomy) && self.rung().is_costly() && self.refined < REFINED_MAX => {
                self.refined += 1;
                false
            }
            _ => return None,
        };
        Some(Proposal { trace: at_sizes(&self.rung().known.trace, &self.sizes, is_hull), is_hull })
    }

    /// The trace of the rung that the last iteration went by, with times that `retime` puts into one at that iteration's sizes.
    pub(crate) fn retimed(&self, retime: impl FnOnce(&mut Trace)) -> Trace {
        let mut trace = Trace::clone(&self.rung().known.trace);
        let mut measured = at_sizes(&trace, &self.sizes, false);
        retime(&mut measured);
        guess_times(&measured, &mut trace);
        trace
    }

    /// Whether the sizes of the last iteration have come before.
    fn meet(&mut self) -> bool {
        let mut hasher = DefaultHasher::new();
        self.sizes.storages.hash(&mut hasher);
        let sizes = hasher.finish();
        let again = self.met.contains(&sizes);
        if !again {
            if self.met.len() == MET_MAX {
                self.met.pop_front();
            }
            self.met.push_back(sizes);
        }
        again
    }

    /// Puts a rung where it belongs, and goes there. One that was the largest of several iterations' sizes makes way for one that
    /// is larger yet: it is no iteration's own.
    pub(crate) fn insert(&mut self, mut rung: Rung, is_hull: bool) {
        rung.is_hull = is_hull;
        self.rungs.pop_if(|last| is_hull && last.is_hull);
        self.at = self.rungs.partition_point(|other| other.bytes <= rung.bytes);
        self.rungs.insert(self.at, rung);
        self.look_who_tells();
    }

    /// There are other rungs than before.
    fn look_who_tells(&mut self) {
        self.told = Told::by(self.rungs.iter().map(|rung| &*rung.known.trace));
    }

    /// Takes a rung away. Whether it was the last.
    pub(crate) fn remove(&mut self, rung: usize) -> bool {
        self.rungs.remove(rung);
        self.look_who_tells();
        self.at = self.at.min(self.rungs.len().saturating_sub(1));
        self.rungs.is_empty()
    }
}

/// What became of an iteration with the plan that it went by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Served {
    /// It had so many bytes at its peak.
    Within(u64),
    /// Bytes ran out.
    RanShort,
    /// It went otherwise, or by none.
    Otherwise,
}

/// A program at sizes that it has no plan for.
pub(crate) struct Proposal {
    /// Its keep-all peak is not looked for yet.
    pub(crate) trace: Trace,
    /// Whether these are the largest of several iterations'.
    pub(crate) is_hull: bool,
}

/// The trace at other sizes; as a hull at whichever is larger.
fn at_sizes(trace: &Trace, sizes: &Sizes, is_hull: bool) -> Trace {
    let either = |new: u64, old: u64| if is_hull { new.max(old) } else { new };
    let mut resized = trace.clone();
    for (storage, seen) in resized.storages.iter_mut().zip(&sizes.storages) {
        if let Some(seen) = *seen {
            storage.bytes = either(seen, storage.bytes);
        }
    }
    for (operator, &peak_bytes) in resized.operators.iter_mut().zip(&sizes.peaks) {
        // What it made was of the iteration's sizes, whatever those of the trace are now.
        let made = |storage: &StorageId| sizes.storages[storage.index()].unwrap_or_default();
        let workspace_bytes = peak_bytes.saturating_sub(operator.creates.iter().map(made).sum());
        operator.workspace_bytes = either(workspace_bytes, operator.workspace_bytes);
    }
    resized.unseen_bytes = either(resized.unseen_of(sizes.start_bytes), trace.unseen_bytes);
    debug_assert_eq!(resized.check(), Ok(()));
    guess_times(trace, &mut resized);
    resized
}

/// Puts times into a trace at other sizes: an operator is taken to have as much more to do as those of its storages are larger that
/// are not the same.
fn guess_times(from: &Trace, resized: &mut Trace) {
    for (operator, known) in resized.operators.iter_mut().zip(&from.operators) {
        let touched = operator.accesses.iter().map(|access| access.storage).chain(operator.creates.iter().copied());
        let pairs = touched.map(|id| (resized.storages[id.index()].bytes, from.storages[id.index()].bytes));
        let differing = pairs.filter(|(new, old)| new != old);
        let (new, old) = differing.fold((0, 0), |sum, (new, old)| (sum.0 + new, sum.1 + old));
        let factor = if old > 0 { new as f64 / old as f64 } else { 1.0 };
        (operator.cost_ns, operator.gap_ns) = ((known.cost_ns as f64 * factor) as u64, known.gap_ns);
    }
    resized.tail_ns = from.tail_ns;
    resized.makespan_ns = resized.times_ns();
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::plan::Plan;
    use crate::schedule::{Instruction, Schedule};
    use crate::trace::{Access, AccessMode, Class, Operator, Phase};

    /// A program that makes a storage, and another from it.
    pub(in crate::torch) fn trace(bytes: [u64; 2]) -> Trace {
        let operator = |accesses, creates| Operator {
            name: 0,
            phase: Phase::Forward,
            cost_ns: 1_000,
            spread_ns: 0,
            gap_ns: 0,
            workspace_bytes: 8,
            accesses,
            creates: vec![creates],
            frees: Vec::new(),
            not_replayable: None,
        };
        let read = Access { storage: StorageId(0), mode: AccessMode::Read };
        Trace {
            workload: "two".to_owned(),
            family: String::new(),
            device: "cpu".to_owned(),
            recorded_iterations: 1,
            unseen_bytes: 0,
            tail_ns: 0,
            makespan_ns: 2_000,
            peak_bytes: 0,
            names: vec!["aten::relu".to_owned()],
            storages: bytes.map(|bytes| Storage { bytes, class: Class::Temporary, locked: None }).to_vec(),
            initial_storages: 0,
            operators: vec![operator(Vec::new(), StorageId(0)), operator(vec![read], StorageId(1))],
            carried: Vec::new(),
        }
    }

    fn rung(number: u64, bytes: [u64; 2]) -> Rung {
        let known = Known::of(trace(bytes));
        let plan = Plan::keep_all(known.lineage.windows().len());
        let scheduled = Scheduled::new(&known, plan, Schedule::default(), None);
        Rung::new(known, scheduled, Shelf::default(), (RungName::numbered(number), 0))
    }

    /// An iteration at these sizes: the rung that it ends on, and how it fits.
    fn run(ladder: &mut Ladder, bytes: [u64; 2]) -> (RungName, Fit) {
        ladder.begin(u64::MAX);
        ladder.starts_with(100);
        for (storage, bytes) in (0..).map(StorageId).zip(bytes) {
            ladder.see(storage, bytes);
            ladder.ran(bytes + 16);
        }
        (ladder.rung().name, ladder.fit())
    }

    #[test]
    fn an_iteration_goes_by_its_own_sizes_or_the_least_that_are_nowhere_smaller() {
        let mut ladder = Ladder::new(rung(1, [40, 400]));
        ladder.insert(rung(3, [80, 800]), false);
        ladder.insert(rung(2, [60, 600]), false);
        assert_eq!(run(&mut ladder, [40, 400]), (RungName::numbered(1), Fit::Exact));
        assert_eq!(run(&mut ladder, [80, 800]), (RungName::numbered(3), Fit::Exact));
        assert_eq!(run(&mut ladder, [50, 500]), (RungName::numbered(2), Fit::Within));
        assert_eq!(run(&mut ladder, [50, 700]), (RungName::numbered(3), Fit::Within), "the second storage tells");
        assert_eq!(run(&mut ladder, [90, 10]), (RungName::numbered(3), Fit::Beyond));
        assert_eq!(run(&mut ladder, [60, 600]), (RungName::numbered(2), Fit::Exact));
    }

    #[test]
    fn larger_sizes_are_planned_for_where_bytes_run_short_and_a_hull_makes_way_for_a_larger_one() {
        let mut ladder = Ladder::new(rung(1, [40, 400]));
        assert_eq!(run(&mut ladder, [50, 300]), (RungName::numbered(1), Fit::Beyond));
        assert!(ladder.propose(Served::Otherwise, true).is_none(), "everything fits");
        let Proposal { trace, is_hull } = ladder.propose(Served::RanShort, false).expect("bytes ran short");
        let bytes = |trace: &Trace| trace.storages.iter().map(|storage| storage.bytes).collect::<Vec<_>>();
        assert_eq!((bytes(&trace), is_hull, trace.unseen_bytes), (vec![50, 400], true, 100));
        let costs: Vec<_> = trace.operators.iter().map(|operator| operator.cost_ns).collect();
        assert_eq!(costs, [1_250, 1_250], "as much more as what has grown");
        assert_eq!(trace.operators[1].workspace_bytes, 16);
        ladder.insert(rung(2, [50, 400]), true);
        let names = |ladder: &Ladder| ladder.rungs().iter().map(|rung| rung.name).collect::<Vec<_>>();
        assert_eq!(names(&ladder), [1, 2].map(RungName::numbered));
        assert_eq!(run(&mut ladder, [45, 350]), (RungName::numbered(2), Fit::Within));
        assert_eq!(run(&mut ladder, [40, 400]), (RungName::numbered(1), Fit::Exact));
        assert_eq!(run(&mut ladder, [55, 300]), (RungName::numbered(2), Fit::Beyond));
        assert!(ladder.propose(Served::RanShort, false).is_some_and(|proposal| proposal.is_hull));
        ladder.insert(rung(3, [55, 400]), true);
        assert_eq!(names(&ladder), [1, 3].map(RungName::numbered));
    }

    #[test]
    fn smaller_sizes_are_planned_for_where_a_plan_costs_time_and_leaves_bytes_free() {
        let after = |makespan_ns, peak_bytes| {
            let mut largest = rung(1, [40, 400]);
            let prediction = Prediction { makespan_ns, peak_bytes: 500, ..Prediction::default() };
            let Known { lineage, .. } = &largest.known;
            let plan = Plan::keep_all(lineage.windows().len());
            let mut schedule = Schedule::default();
            schedule.push(1, Instruction::Drop(StorageId(0)));
            largest.scheduled = Scheduled::new(&largest.known, plan, schedule, Some(prediction));
            let mut ladder = Ladder::new(largest);
            assert_eq!(run(&mut ladder, [39, 390]), (RungName::numbered(1), Fit::Within));
            ladder.propose(Served::Within(peak_bytes), true).is_some()
        };
        assert!(after(2_400, 400));
        assert!(!after(2_400, 490), "it took what the plan takes");
        assert!(!after(2_001, 400), "the plan costs next to nothing");
    }

    #[test]
    fn nothing_is_done_before_the_sizes_are_told_where_that_is_early() {
        let begins_at_once = |number, bytes| {
            let mut rung = rung(number, bytes);
            let mut trace = Trace::clone(&rung.known.trace);
            trace.operators[0].cost_ns = 10;
            rung.known = Known::of(trace);
            rung
        };
        let mut ladder = Ladder::new(begins_at_once(1, [40, 400]));
        assert_eq!(ladder.told.early, None, "there is one plan");
        ladder.insert(begins_at_once(2, [40, 500]), false);
        assert_eq!(ladder.told.early, None, "half of the iteration is over then");
        ladder.insert(begins_at_once(3, [50, 500]), false);
        assert_eq!(ladder.told.early, Some(1), "the first operator makes what tells");
        ladder.begin(58);
        assert_eq!(ladder.begins_at(), 1);
        ladder.begin(57);
        assert_eq!(ladder.begins_at(), 0, "the first operator of one takes 58 bytes");
        assert_eq!([ladder.remove(1), ladder.remove(1)], [false; 2]);
        assert_eq!(ladder.told.early, None);
    }

    #[test]
    fn times_that_were_measured_at_other_sizes_are_scaled_to_those_of_the_plan() {
        let mut ladder = Ladder::new(rung(1, [40, 400]));
        run(&mut ladder, [20, 200]);
        let retimed = ladder.retimed(|trace| {
            assert_eq!(trace.operators[1].cost_ns, 500);
            trace.operators[1].cost_ns = 700;
        });
        let costs: Vec<_> = retimed.operators.iter().map(|operator| operator.cost_ns).collect();
        assert_eq!((costs, retimed.makespan_ns), (vec![1_000, 1_400], 2_400));
        assert_eq!(retimed.storages, ladder.rung().known.trace.storages);
    }

    #[test]
    fn sizes_that_come_again_are_planned_for_where_there_is_a_place() {
        let mut ladder = Ladder::new(rung(1, [40, 400]));
        let mut again = |has_place| {
            run(&mut ladder, [39, 390]);
            ladder.propose(Served::RanShort, has_place).map(|proposal| proposal.is_hull)
        };
        assert_eq!([again(true), again(false), again(true)], [None, None, Some(false)]);
    }
}
