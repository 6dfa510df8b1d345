//! One program at several sizes, as batches of any length make it: the same operators on the same storages, which are smaller or
//! larger, and a plan for some of the sizes.
//!
//! An iteration goes by the plan for its very sizes, or by that for the least ones that are nowhere smaller: what holds a budget
//! there holds it here. Where it is larger than any, it goes by the largest's. Sizes get a plan of their own where that one let
//! bytes run short, where the one that there is is for much larger sizes, and where they come again. Mimose
//! (Liao et al., arXiv 2209.02478) has a plan for each size too; it foresees what a size takes by a regression, where here an
//! iteration of it has told.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::program::{Known, Scheduled};
use super::shim::RESIZED;
use crate::trace::{Storage, StorageId, Trace};

/// Share of a plan's bytes from which on an iteration goes by it as well as by one of its own.
const NEAR: f64 = 0.9;
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
    /// What was there when it began.
    pub(crate) start_bytes: u64,
}

/// A program at certain sizes, and what to do while it runs at those.
pub(crate) struct Rung {
    pub(crate) known: Known,
    pub(crate) scheduled: Scheduled,
    /// Its name: no two of a driver have the same.
    pub(crate) serial: u64,
    /// The iteration that it last was.
    pub(crate) last_seen: u64,
    /// Whether no iteration had these sizes: they are the largest of several.
    is_hull: bool,
    /// All storages together.
    bytes: u64,
}

impl Rung {
    pub(crate) fn new(known: Known, scheduled: Scheduled, serial: u64, last_seen: u64) -> Self {
        let bytes = known.trace.storages.iter().map(|storage| storage.bytes).sum();
        Rung { known, scheduled, serial, last_seen, is_hull: false, bytes }
    }

    /// Whether `is` holds for all of `sizes` and those that it was made for.
    fn all(&self, sizes: &[Option<u64>], is: fn(&u64, &u64) -> bool) -> bool {
        let mut pairs = self.known.trace.storages.iter().zip(sizes);
        pairs.all(|(storage, seen)| seen.is_none_or(|seen| varies(storage) || is(&seen, &storage.bytes)))
    }

    /// Whether everything fits where nothing is done.
    fn is_idle(&self) -> bool {
        self.scheduled.schedule.is_idle() && !self.scheduled.exceeds_budget()
    }
}

/// Whether a storage changes within an iteration: a trace has the largest that it had.
fn varies(storage: &Storage) -> bool {
    storage.locked.as_deref() == Some(RESIZED)
}

/// The sizes of a program that there are plans for.
pub(crate) struct Ladder {
    /// From the smallest on; never empty.
    rungs: Vec<Rung>,
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
        Ladder { rungs: vec![rung], at: 0, fit: Fit::Exact, sizes: Sizes::default(), met: VecDeque::new(), refined: 0 }
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

    pub(crate) fn fit(&self) -> Fit {
        self.fit
    }

    /// Where the next iteration is expected to be.
    pub(crate) fn expect(&mut self, rung: usize) {
        self.at = rung;
    }

    /// Starts another iteration.
    pub(crate) fn begin(&mut self, start_bytes: u64) {
        self.fit = Fit::Exact;
        self.sizes.storages.clear();
        self.sizes.storages.resize(self.rung().known.trace.storages.len(), None);
        self.sizes.peaks.clear();
        self.sizes.start_bytes = start_bytes;
    }

    /// An operator has run, and had so many bytes allocated at once.
    pub(crate) fn ran(&mut self, peak_bytes: u64) {
        self.sizes.peaks.push(peak_bytes);
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
    /// sizes. It may have run short of bytes; `has_place` says whether there is a place for a plan that could be done without.
    pub(crate) fn propose(&mut self, ran_short: bool, has_place: bool) -> Option<Proposal> {
        let is_well_served = self.fit == Fit::Exact || self.rung().is_idle() && !ran_short;
        if is_well_served {
            return None;
        }
        let is_own = self.meet() && has_place;
        let storages = self.rung().known.trace.storages.iter().zip(&self.sizes.storages);
        let bytes: u64 = storages.map(|(storage, seen)| seen.unwrap_or(storage.bytes)).sum();
        let (less, more) = (bytes.min(self.rung().bytes), bytes.max(self.rung().bytes));
        let is_far = (less as f64) < NEAR * more as f64;
        let is_hull = match self.fit {
            _ if is_own => false,
            Fit::Beyond if is_far || ran_short => !self.rung().all(&self.sizes.storages, u64::ge),
            Fit::Within if is_far && self.refined < REFINED_MAX => {
                self.refined += 1;
                false
            }
            _ => return None,
        };
        Some(Proposal { trace: at_sizes(&self.rung().known.trace, &self.sizes, is_hull), is_hull })
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
    pub(crate) fn insert(&mut self, mut rung: Rung, is_hull: bool) -> Option<u64> {
        rung.is_hull = is_hull;
        let is_outgrown = is_hull && self.rungs.last().is_some_and(|last| last.is_hull);
        let outgrown = if is_outgrown { self.rungs.pop() } else { None };
        self.at = self.rungs.partition_point(|other| other.bytes <= rung.bytes);
        self.rungs.insert(self.at, rung);
        outgrown.map(|rung| rung.serial)
    }

    /// Takes a rung away: its name, and whether it was the last.
    pub(crate) fn remove(&mut self, rung: usize) -> (u64, bool) {
        let removed = self.rungs.remove(rung);
        self.at = self.at.min(self.rungs.len().saturating_sub(1));
        (removed.serial, self.rungs.is_empty())
    }
}

/// A program at sizes that it has no plan for.
pub(crate) struct Proposal {
    /// Its keep-all peak is not looked for yet.
    pub(crate) trace: Trace,
    /// Whether these are the largest of several iterations'.
    pub(crate) is_hull: bool,
}

/// The trace at other sizes; as a hull at whichever is larger. An operator is taken to have as much more to do as those of its
/// storages are larger that are not the same.
fn at_sizes(trace: &Trace, sizes: &Sizes, is_hull: bool) -> Trace {
    let either = |new: u64, old: u64| if is_hull { new.max(old) } else { new };
    let mut resized = trace.clone();
    for (storage, seen) in resized.storages.iter_mut().zip(&sizes.storages) {
        if let Some(seen) = *seen {
            storage.bytes = either(seen, storage.bytes);
        }
    }
    let storages = std::mem::take(&mut resized.storages);
    let bytes = |storage: &StorageId| storages[storage.index()].bytes;
    for (operator, &peak_bytes) in resized.operators.iter_mut().zip(&sizes.peaks) {
        // What it made was of the iteration's sizes, whatever those of the trace are now.
        let made = |storage: &StorageId| sizes.storages[storage.index()].unwrap_or_default();
        let workspace_bytes = peak_bytes.saturating_sub(operator.creates.iter().map(made).sum());
        operator.workspace_bytes = either(workspace_bytes, operator.workspace_bytes);
        let touched = operator.accesses.iter().map(|access| access.storage).chain(operator.creates.iter().copied());
        let pairs = touched.map(|storage| (bytes(&storage), trace.storages[storage.index()].bytes));
        let (new, old) =
            pairs.filter(|(new, old)| new != old).fold((0, 0), |sum, (new, old)| (sum.0 + new, sum.1 + old));
        if old > 0 {
            operator.cost_ns = (operator.cost_ns as f64 * new as f64 / old as f64) as u64;
        }
    }
    let initial_bytes: u64 = storages[..trace.initial_storages as usize].iter().map(|storage| storage.bytes).sum();
    resized.unseen_bytes = either(sizes.start_bytes.saturating_sub(initial_bytes), trace.unseen_bytes);
    resized.storages = storages;
    debug_assert_eq!(resized.check(), Ok(()));
    resized.makespan_ns = resized.times_ns();
    resized
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Plan;
    use crate::schedule::Schedule;
    use crate::trace::{Access, AccessMode, Class, Operator, Phase};

    /// A program that makes a storage, and another from it.
    fn rung(serial: u64, bytes: [u64; 2]) -> Rung {
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
        let trace = Trace {
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
        };
        let known = Known::of(trace);
        let plan = Plan::keep_all(known.lineage.windows().len());
        let scheduled = Scheduled::new(&known, plan, Schedule::default(), None);
        Rung::new(known, scheduled, serial, 0)
    }

    /// An iteration at these sizes: the rung that it ends on, and how it fits.
    fn run(ladder: &mut Ladder, bytes: [u64; 2]) -> (u64, Fit) {
        ladder.begin(100);
        for (storage, bytes) in (0..).map(StorageId).zip(bytes) {
            ladder.see(storage, bytes);
            ladder.ran(bytes + 16);
        }
        (ladder.rung().serial, ladder.fit())
    }

    #[test]
    fn an_iteration_goes_by_its_own_sizes_or_the_least_that_are_nowhere_smaller() {
        let mut ladder = Ladder::new(rung(1, [40, 400]));
        ladder.insert(rung(3, [80, 800]), false);
        ladder.insert(rung(2, [60, 600]), false);
        assert_eq!(run(&mut ladder, [40, 400]), (1, Fit::Exact));
        assert_eq!(run(&mut ladder, [80, 800]), (3, Fit::Exact));
        assert_eq!(run(&mut ladder, [50, 500]), (2, Fit::Within));
        assert_eq!(run(&mut ladder, [50, 700]), (3, Fit::Within), "the second storage tells");
        assert_eq!(run(&mut ladder, [90, 10]), (3, Fit::Beyond));
        assert_eq!(run(&mut ladder, [60, 600]), (2, Fit::Exact));
    }

    #[test]
    fn larger_sizes_are_planned_for_where_bytes_run_short_and_a_hull_makes_way_for_a_larger_one() {
        let mut ladder = Ladder::new(rung(1, [40, 400]));
        assert_eq!(run(&mut ladder, [50, 300]), (1, Fit::Beyond));
        assert!(ladder.propose(false, true).is_none(), "everything fits");
        let Proposal { trace, is_hull } = ladder.propose(true, false).expect("bytes ran short");
        let bytes = |trace: &Trace| trace.storages.iter().map(|storage| storage.bytes).collect::<Vec<_>>();
        assert_eq!((bytes(&trace), is_hull, trace.unseen_bytes), (vec![50, 400], true, 100));
        let costs: Vec<_> = trace.operators.iter().map(|operator| operator.cost_ns).collect();
        assert_eq!(costs, [1_250, 1_250], "as much more as what has grown");
        assert_eq!(trace.operators[1].workspace_bytes, 16);
        assert_eq!(ladder.insert(rung(2, [50, 400]), true), None);
        assert_eq!(run(&mut ladder, [45, 350]), (2, Fit::Within));
        assert_eq!(run(&mut ladder, [40, 400]), (1, Fit::Exact));
        assert_eq!(run(&mut ladder, [55, 300]), (2, Fit::Beyond));
        assert!(ladder.propose(true, false).is_some_and(|proposal| proposal.is_hull));
        assert_eq!(ladder.insert(rung(3, [55, 400]), true), Some(2));
        assert_eq!(ladder.rungs().len(), 2);
    }

    #[test]
    fn sizes_that_come_again_are_planned_for_where_there_is_a_place() {
        let mut ladder = Ladder::new(rung(1, [40, 400]));
        let mut again = |has_place| {
            run(&mut ladder, [39, 390]);
            ladder.propose(true, has_place).map(|proposal| proposal.is_hull)
        };
        assert_eq!([again(true), again(false), again(true)], [None, None, Some(false)]);
    }
}
