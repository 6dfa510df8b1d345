//! The programs that a training loop has been seen to run, each with its plan.
//!
//! An iteration that was followed needs nothing more. One that was not is compared with those recorded before; two that
//! are alike make a trace, and the trace a plan. A program whose makespan drifts is measured and planned anew.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::copy::{TierCopies, retimed, since};
use super::driver::{Driver, Ended, Record};
use super::program::{Known, Program, Scheduled};
use super::recording::{RecordedIteration, retime, retime_at_most, trace_of};
use super::report::{Course, IterationReport, Report};
use crate::baselines::{Dtr, baseline};
use crate::hardware::SlowTiers;
use crate::learned::LearnedPolicy;
use crate::lineage::Lineage;
use crate::plan::{ActionSet, Plan};
use crate::planner::{Planned, Planner, least_feasible_budget, plan};
use crate::policy::Policy;
use crate::sweep::Problem;
use crate::timeline::Timeline;
use crate::trace::Trace;

/// Followed iterations in a row after which recording stops, until a program is not known again.
const CALM: u32 = 4;
/// Followed iterations that drift is judged by.
const WINDOW: usize = 16;
/// Factor by which measured makespans may drift from what they were in relation to the predicted ones.
const DRIFT: f64 = 1.25;
/// Planned iterations in a row that ran out of bytes after which the plan is made for fewer.
const PRESSED_MAX: u32 = 2;
/// Plans after which planning may no longer take any time.
const PLANS_FREE: u64 = 32;
/// What it may take then, of the loop's own time. What is planned beyond that is decoded greedily.
const PLANNING_SHARE: f64 = 0.1;
/// How that is done.
const HASTY: Planner = Planner::decoding(0, 0);

/// Who decides.
pub(super) enum Decider {
    Learned(Box<LearnedPolicy>),
    Baseline(&'static str),
    /// Nobody was named.
    Planner,
}

impl Decider {
    /// The policy that decides when bytes run out: DTR's rule where ours has to see the whole iteration first.
    pub(super) fn reactive(&self) -> Box<dyn Policy + Send> {
        let policy = self.policy();
        if policy.decides_unopened() { policy } else { Box::new(Dtr) }
    }

    fn policy(&self) -> Box<dyn Policy + Send> {
        match self {
            Decider::Learned(policy) => policy.clone(),
            Decider::Baseline(name) => baseline(name, 0).expect("the builder has asked for it"),
            Decider::Planner => Box::new(Dtr),
        }
    }

    /// The decider's plan. Where a baseline's own does not hold the budget, the planner is asked for one that does: it asks
    /// the other baselines, and searches.
    fn plan(&self, problem: Problem<'_>, planner: &Planner) -> Planned {
        match self {
            Decider::Learned(policy) => planner.plan(problem, Some(policy)).planned,
            Decider::Planner => planner.plan(problem, None).planned,
            Decider::Baseline(_) => {
                let own = plan(problem, self.policy().as_mut());
                if own.fits() {
                    return own;
                }
                let others = planner.plan(problem, None).planned;
                if others.is_better_than(&own) { others } else { own }
            }
        }
    }
}

/// What is known of a program's times.
#[derive(Default)]
enum Times {
    /// Its trace has them.
    #[default]
    Known,
    /// An iteration is to be measured for a plan of new times.
    Wanted(Reason),
    /// One was, by marks on the device; the next tells what it takes without.
    Marked(Reason, Box<RecordedIteration>),
}

/// What is wrong with a program's times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    /// They were taken by marks on a device while bytes ran out, or kernels were loaded: none is too small.
    Early,
    /// They no longer are what operators take.
    Drifted,
}

/// An iteration that was measured for a plan of new times.
struct Measured {
    reason: Reason,
    recorded: RecordedIteration,
    /// By how much marks on the device made it longer.
    marks_ns: u64,
}

/// What is remembered of a program beside its trace and schedule.
#[derive(Default)]
struct Shelf {
    /// Measured ÷ predicted makespan of the latest planned iterations.
    ratios: VecDeque<f64>,
    /// What that was when the plan was new.
    reference: Option<f64>,
    /// What its operators take.
    times: Times,
    /// Whether there was no time to plan it well.
    is_hasty: bool,
    /// Planned iterations in a row that ran out of bytes.
    pressed: u32,
    /// Bytes that plans leave free, because something else takes them.
    margin_bytes: u64,
}

/// The plan cache.
pub(super) struct Library {
    decider: Decider,
    tiers: SlowTiers,
    actions: ActionSet,
    planner: Planner,
    /// Of programs, and of iterations that wait for another one like them.
    plans_max: usize,
    /// Beside the driver's programs, by the same index.
    shelves: Vec<Shelf>,
    recorded: VecDeque<RecordedIteration>,
    /// Whether the last of `recorded` is the iteration before this one.
    predecessor_recorded: bool,
    /// The program that came after each, by when they were first seen.
    follows: HashMap<Option<u64>, u64>,
    previous: Option<u64>,
    clock: u64,
    calm: u32,
    makespan_ns: u64,
    /// What copies took until the last iteration ended.
    copies: Vec<TierCopies>,
    least_feasible_bytes: Option<u64>,
}

impl Library {
    pub(super) fn new(
        decider: Decider,
        tiers: SlowTiers,
        actions: ActionSet,
        planner: Planner,
        plans_max: usize,
    ) -> Self {
        Library {
            decider,
            tiers,
            actions,
            planner,
            plans_max,
            shelves: Vec::new(),
            recorded: VecDeque::new(),
            predecessor_recorded: false,
            follows: HashMap::new(),
            previous: None,
            clock: 0,
            calm: 0,
            makespan_ns: 0,
            copies: Vec::new(),
            least_feasible_bytes: None,
        }
    }

    /// The makespan of the last iteration.
    pub(super) fn makespan_ns(&self) -> u64 {
        self.makespan_ns
    }

    /// The least budget for which a plan was found, where one was looked for.
    pub(super) fn least_feasible_bytes(&self) -> Option<u64> {
        self.least_feasible_bytes
    }

    /// The program that the next iteration is expected to be: what followed the last one last time, else the latest.
    pub(super) fn expected(&self, programs: &[Program]) -> Option<usize> {
        let follower = self.follows.get(&self.previous);
        let known = follower.and_then(|serial| programs.iter().position(|program| program.serial == *serial));
        known.or_else(|| (0..programs.len()).max_by_key(|&index| programs[index].last_seen))
    }

    /// What is recorded of the next iteration.
    pub(super) fn records(&self, leader: Option<usize>) -> Record {
        match leader.map(|leader| &self.shelves[leader].times) {
            Some(Times::Marked(..)) => Record::Makespan,
            Some(Times::Wanted(_)) => Record::Whole,
            Some(Times::Known) | None if self.calm < CALM => Record::Whole,
            Some(Times::Known) | None => Record::Nothing,
        }
    }

    /// Learns from an iteration.
    pub(super) fn learn(&mut self, driver: &mut Driver, ended: Ended, budget_bytes: u64, report: &mut Report) {
        self.clock += 1;
        let Ended { report: iteration, recorded, on_device_ns, program } = ended;
        self.makespan_ns = iteration.makespan_ns;
        let before = std::mem::replace(&mut self.copies, driver.residency.engine.copies());
        let copies = since(&self.copies, &before);
        let predecessor_recorded = std::mem::take(&mut self.predecessor_recorded);
        let serial = match program {
            Some(index) => {
                self.calm += 1;
                report.plan_cache_hits += 1;
                driver.programs[index].last_seen = self.clock;
                // What goes otherwise than planned takes longer than it would.
                let measured =
                    iteration.followed.then(|| self.measure(index, recorded, on_device_ns, &copies)).flatten();
                self.watch(driver, index, &iteration, measured, budget_bytes, report);
                Some(driver.programs[index].serial)
            }
            None => {
                self.calm = 0;
                report.plan_cache_misses += 1;
                let recorded = recorded.filter(|recorded| !recorded.is_empty());
                recorded.and_then(|recorded| self.compare(driver, recorded, predecessor_recorded, budget_bytes, report))
            }
        };
        if let Some(serial) = serial {
            self.follows.insert(self.previous, serial);
        }
        self.previous = serial;
        report.add(iteration);
    }

    /// Compares an iteration that was not known with those recorded before. Returns the program that it makes with one
    /// of them.
    fn compare(
        &mut self,
        driver: &mut Driver,
        mut recorded: RecordedIteration,
        predecessor_recorded: bool,
        budget_bytes: u64,
        report: &mut Report,
    ) -> Option<u64> {
        driver.remember(&recorded);
        let same = self.recorded.iter().position(|other| other.same_steps(&recorded).is_ok());
        let Some(same) = same else {
            if self.recorded.len() == self.plans_max {
                self.recorded.pop_front();
            }
            self.recorded.push_back(recorded);
            self.predecessor_recorded = true;
            return None;
        };
        // Where another program came before, its names for storages say nothing.
        if !(predecessor_recorded && same == self.recorded.len() - 1) {
            recorded.forget_predecessor();
        }
        let other = self.recorded.remove(same).expect("found above");
        let trace = trace_of(&[&other, &recorded], &HashMap::new(), ["training loop", "", "cpu"]).ok()?;
        let known = Known { lineage: Arc::new(Lineage::of(&trace)), trace: Arc::new(trace) };
        let times = if recorded.is_marked { Times::Wanted(Reason::Early) } else { Times::Known };
        let mut shelf = Shelf { times, ..Shelf::default() };
        let scheduled = self.plan(&known, budget_bytes, &mut shelf, report);
        let mut program = Program::new(known, scheduled);
        program.bind(recorded.bindings());
        program.serial = self.clock;
        program.last_seen = self.clock;
        if driver.programs.len() == self.plans_max {
            let oldest = (0..driver.programs.len()).min_by_key(|&index| driver.programs[index].last_seen);
            let oldest = oldest.expect("the cache holds at least one plan");
            driver.programs.swap_remove(oldest);
            self.shelves.swap_remove(oldest);
        }
        driver.programs.push(program);
        self.shelves.push(shelf);
        Some(self.clock)
    }

    /// Plans a program for what the budget leaves it.
    fn plan(&mut self, known: &Known, budget_bytes: u64, shelf: &mut Shelf, report: &mut Report) -> Scheduled {
        let started = Instant::now();
        shelf.is_hasty = !has_time(report);
        let planner = if shelf.is_hasty { &HASTY } else { &self.planner };
        let budget_bytes = budget_bytes.saturating_sub(shelf.margin_bytes);
        let (trace, lineage) = (&*known.trace, &*known.lineage);
        let problem = Problem { trace, lineage, tiers: self.tiers, budget_bytes, actions: self.actions };
        let plan = if lineage.keep_all_peak_bytes() <= budget_bytes {
            Plan::keep_all(lineage.windows().len())
        } else {
            let planned = self.decider.plan(problem, planner);
            if !planned.fits() {
                let mut policies = [self.decider.policy(), Box::new(Dtr)];
                let least = least_feasible_budget(problem, &mut policies);
                self.least_feasible_bytes = self.least_feasible_bytes.max(Some(least));
            }
            planned.plan
        };
        let (schedule, prediction) = Timeline::new(trace, lineage, self.tiers).schedule(&plan, budget_bytes);
        report.plans += 1;
        report.planning_ns += started.elapsed().as_nanos() as u64;
        Scheduled::new(known, &plan, schedule, Some(prediction))
    }

    /// Makes every plan anew, for another budget.
    pub(super) fn replan_all(&mut self, programs: &mut [Program], budget_bytes: u64, report: &mut Report) {
        self.least_feasible_bytes = None;
        for (index, program) in programs.iter_mut().enumerate() {
            let mut shelf = Shelf::default();
            program.scheduled = self.plan(&program.known, budget_bytes, &mut shelf, report);
            self.shelves[index] = shelf;
        }
    }

    /// What a program that ran was measured at, where its times are wanted and all is known. What its copies took is measured, too.
    fn measure(
        &mut self,
        index: usize,
        recorded: Option<RecordedIteration>,
        on_device_ns: Option<u64>,
        copies: &[TierCopies],
    ) -> Option<Measured> {
        let times = &mut self.shelves[index].times;
        match (std::mem::take(times), recorded, on_device_ns) {
            // The first planned one makes room on the host for what it copies.
            (Times::Wanted(reason), Some(recorded), _) if self.calm > 1 => {
                self.tiers = retimed(self.tiers, copies);
                if !recorded.is_marked {
                    return Some(Measured { reason, recorded, marks_ns: 0 });
                }
                *times = Times::Marked(reason, Box::new(recorded));
            }
            (Times::Marked(reason, recorded), None, Some(unmarked_ns)) => {
                let marks_ns = recorded.makespan_ns().saturating_sub(unmarked_ns);
                return Some(Measured { reason, recorded: *recorded, marks_ns });
            }
            (before, ..) => *times = before,
        }
        None
    }

    /// Looks at an iteration that was planned: whether it took the time and the bytes that were predicted. Where its program was
    /// `measured`, that is planned anew.
    fn watch(
        &mut self,
        driver: &mut Driver,
        index: usize,
        iteration: &IterationReport,
        measured: Option<Measured>,
        budget_bytes: u64,
        report: &mut Report,
    ) {
        let mut shelf = std::mem::take(&mut self.shelves[index]);
        let start_bytes = driver.start_bytes();
        let program = &mut driver.programs[index];
        if let Some(Measured { reason, recorded, marks_ns }) = measured {
            driver.residency.reactive.link = self.tiers.host;
            let mut trace = Trace::clone(&program.known.trace);
            match reason {
                Reason::Early => retime_at_most(&recorded, &mut trace),
                Reason::Drifted => retime(&[&recorded], &mut trace),
            }
            trace.cut_to(trace.makespan_ns.saturating_sub(marks_ns));
            program.known = Known { lineage: Arc::new(Lineage::of(&trace)), trace: Arc::new(trace) };
            shelf = Shelf { margin_bytes: shelf.margin_bytes, ..Shelf::default() };
            program.scheduled = self.plan(&program.known, budget_bytes, &mut shelf, report);
            report.replans += 1;
        } else if iteration.course == Course::Planned && iteration.reactive_evictions > 0 {
            shelf.pressed += 1;
            if shelf.pressed == PRESSED_MAX {
                // Something that was not recorded takes bytes: leave it some.
                let expected: u64 = program.known.trace.unseen_bytes
                    + program.known.trace.storages[..program.known.trace.initial_storages as usize]
                        .iter()
                        .map(|storage| storage.bytes)
                        .sum::<u64>();
                let surplus_bytes = start_bytes.saturating_sub(expected);
                shelf.margin_bytes += surplus_bytes.max(budget_bytes / 64);
                shelf.pressed = 0;
                program.scheduled = self.plan(&program.known, budget_bytes, &mut shelf, report);
            }
        } else if shelf.is_hasty && has_time(report) {
            program.scheduled = self.plan(&program.known, budget_bytes, &mut shelf, report);
        } else if iteration.followed
            && let Some(predicted) = iteration.predicted
        {
            shelf.pressed = 0;
            shelf.note(iteration.makespan_ns as f64 / predicted.makespan_ns.max(1) as f64);
        }
        self.shelves[index] = shelf;
    }
}

/// Whether a plan may take what a good one takes.
fn has_time(report: &Report) -> bool {
    report.plans < PLANS_FREE || report.planning_ns as f64 <= PLANNING_SHARE * report.makespan_ns as f64
}

impl Shelf {
    /// Notes one more ratio of measured to predicted makespan. Drift is a change of their median over a window from what
    /// it was when the plan was new; a prediction that is off by the same factor all the time does not drift.
    fn note(&mut self, ratio: f64) {
        if self.ratios.len() == WINDOW {
            self.ratios.pop_front();
        }
        self.ratios.push_back(ratio);
        if self.ratios.len() < WINDOW {
            return;
        }
        let mut sorted: Vec<f64> = self.ratios.iter().copied().collect();
        sorted.sort_unstable_by(f64::total_cmp);
        let median = sorted[WINDOW / 2];
        let reference = *self.reference.get_or_insert(median);
        if median > reference * DRIFT || median < reference / DRIFT {
            self.times = Times::Wanted(Reason::Drifted);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_error_of_prediction_is_no_drift_and_a_change_is() {
        let mut shelf = Shelf::default();
        (0..100).for_each(|_| shelf.note(1.6));
        assert!(matches!(shelf.times, Times::Known));
        (0..WINDOW).for_each(|_| shelf.note(2.5));
        assert!(matches!(shelf.times, Times::Wanted(Reason::Drifted)));
    }

    #[test]
    fn planning_may_take_its_share_once_there_are_many_plans() {
        let after = |plans, planning_ns| Report { plans, planning_ns, makespan_ns: 1_000, ..Report::default() };
        assert!(has_time(&after(PLANS_FREE - 1, 1_000_000)));
        assert!(!has_time(&after(PLANS_FREE, 101)));
        assert!(has_time(&after(PLANS_FREE, 100)));
    }

    #[test]
    fn one_slow_iteration_is_no_drift() {
        let mut shelf = Shelf::default();
        (0..WINDOW).for_each(|_| shelf.note(1.0));
        shelf.note(50.0);
        (0..WINDOW).for_each(|_| shelf.note(1.1));
        assert!(matches!(shelf.times, Times::Known));
    }
}
