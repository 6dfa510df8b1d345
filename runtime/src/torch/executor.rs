//! Carries out one plan on a running training loop: how a plan is tried out.
//!
//! A production job uses [`Runtime`](super::Runtime), which makes its plans itself and holds a budget. An executor holds
//! none: it does what the schedule says while the program is the one that was recorded, and nothing once it is not.

use std::sync::Arc;

use super::copy::CopyEngine;
use super::driver::{Driver, Ended, Expected, Open, Record, Shared, Wanted};
use super::ladder::Rung;
use super::names::RungName;
use super::program::{Known, Program, Scheduled};
use super::reactive::Reactive;
use super::recording::{RecordedIteration, retime};
use super::report::IterationReport;
use super::residency::Residency;
use super::session::{Session, SessionError};
use super::shelf::Shelf;
use crate::baselines::Dtr;
use crate::hardware::Link;
use crate::plan::{ActionSet, Plan};
use crate::sweep::Problem;
use crate::timeline::Timeline;
use crate::trace::Trace;

/// Follows a training loop with one schedule.
///
/// The first iteration only matches the program's storages to the trace; from the second on the schedule is
/// carried out.
pub struct Executor {
    session: Session,
    shared: Arc<Shared>,
    watch_next: Option<Record>,
    timed: Vec<RecordedIteration>,
}

/// An iteration by plan.
pub struct TimedIteration<R> {
    /// What the loop returned.
    pub result: R,
    /// What happened.
    pub report: IterationReport,
    /// Of every operator the pause before it, the first since the iteration began, and its own time, in ns: by the clock of
    /// a device that works through them later.
    pub operators: Vec<(u64, u64)>,
}

impl Executor {
    /// An executor of `plan` for `problem`, whose copies `engine` makes.
    pub fn new(session: Session, problem: &Problem<'_>, plan: &Plan, engine: Box<dyn CopyEngine>) -> Self {
        let Problem { trace, lineage, tiers, budget_bytes, .. } = *problem;
        let (schedule, _) = Timeline::new(trace, lineage, tiers).schedule(plan, budget_bytes);
        let known = Known { trace: Arc::new(trace.clone()), lineage: Arc::new(lineage.clone()) };
        let scheduled = Scheduled::new(&known, plan.clone(), schedule, None);
        // Nothing raises pressure where there is no budget.
        let reactive = Reactive::new(Box::new(Dtr), ActionSet::ALL, Link::symmetric(1e9, 0));
        let mut driver = Driver::new(Residency::new(engine, reactive));
        driver.programs.push(Program::new(Rung::new(known, scheduled, Shelf::default(), (RungName::default(), 0))));
        Executor { session, shared: Arc::new(Shared::new(driver)), watch_next: None, timed: Vec::new() }
    }

    /// Runs one iteration of the training loop.
    pub fn iteration<R>(&mut self, body: impl FnOnce() -> R) -> Result<(R, IterationReport), SessionError> {
        let watched = self.watch_next.take();
        let wanted = Wanted {
            act: watched.is_none(),
            strictly: true,
            record: watched.unwrap_or(Record::Nothing),
            is_prelude: false,
            expected: Expected::Any,
        };
        let (result, ended) = self.run(wanted, body)?;
        self.timed.extend(ended.recorded);
        Ok((result, ended.report))
    }

    /// Runs one iteration by plan, as [`Executor::iteration`] does, and tells when operators ran.
    pub fn timed_iteration<R>(&mut self, body: impl FnOnce() -> R) -> Result<TimedIteration<R>, SessionError> {
        let wanted =
            Wanted { act: true, strictly: true, record: Record::Times, is_prelude: false, expected: Expected::Any };
        let (result, ended) = self.run(wanted, body)?;
        let operators = ended.recorded.map_or(Vec::new(), |recorded| recorded.times().collect());
        Ok(TimedIteration { result, report: ended.report, operators })
    }

    fn run<R>(&self, wanted: Wanted, body: impl FnOnce() -> R) -> Result<(R, Ended), SessionError> {
        let listening = self.session.listen(Arc::clone(&self.shared) as _)?;
        let open = Open::begin(listening, &self.shared, Some(0), wanted, u64::MAX)?;
        let result = body();
        Ok((result, open.close()?))
    }

    /// Most bytes that the slow tier has held.
    pub fn slow_tier_high_water_bytes(&self) -> u64 {
        self.shared.lock().residency.engine.high_water_bytes()
    }

    /// `trace`, which this executor was made for, with the times of untouched iterations: per operator the median of
    /// those that `which` names, counted from the first that was timed. They must have done what the trace does.
    pub fn retimed(&self, trace: &Trace, which: &[usize]) -> Trace {
        let iterations: Vec<&RecordedIteration> = which.iter().map(|&index| &self.timed[index]).collect();
        let mut trace = trace.clone();
        retime(&iterations, &mut trace);
        trace
    }

    /// Keeps the recipe of every operator, whatever the plan wants: what observing costs at the most.
    pub fn keep_all_recipes(&mut self) {
        self.shared.lock().keeps_all_recipes = true;
    }

    /// Leaves the next iteration untouched: it is checked against the trace and measured, and nothing is evicted.
    /// Where it is `timed`, what its operators take is found out, too.
    pub fn watch_next(&mut self, timed: bool) {
        self.watch_next = Some(if timed { Record::Times } else { Record::Nothing });
    }
}
