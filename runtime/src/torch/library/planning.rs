//! Plans for programs that are known, within a share of the loop's own time.

use std::collections::HashMap;
use std::time::Instant;

use super::Library;
use crate::baselines::Dtr;
use crate::lineage::{Lineage, WindowId};
use crate::plan::{Action, Plan};
use crate::planner::{Decided, KEEP_ALL, PORTFOLIO, Planner, TIME, least_feasible_budget, time_for};
use crate::search::Limits;
use crate::sweep::Problem;
use crate::timeline::Timeline;
use crate::torch::ladder::Rung;
use crate::torch::program::{Known, Program, Scheduled};
use crate::torch::shelf::{Shelf, Times};
use crate::trace::Trace;

/// Plans after which none may take any time: until then those for the sizes that a program was found at may.
const PLANS_FREE: u64 = 8;
/// What planning may take then, of the loop's own time. What is planned beyond that is decoded greedily.
pub(super) const PLANNING_SHARE: f64 = 0.1;
/// How what is planned beyond that is made, and in which share of the time that planning takes otherwise; without a policy, by the
/// baseline that was the best most often.
const HASTY: Planner<'static> = Planner { portfolio: PORTFOLIO.split_at(1).0, ..Planner::decoding(0, 0) };
const HASTES: u32 = 10;
/// Windows up to which it is found out how much would be enough, where a plan does not fit: that takes a dozen plans.
const SOUNDED_MAX: usize = 10_000;

impl Library {
    /// What the budget leaves a plan.
    pub(super) fn left_bytes(&self, rung: &Rung) -> u64 {
        self.budget.0.saturating_sub(rung.shelf.margin_bytes)
    }

    pub(super) fn problem<'a>(&self, trace: &'a Trace, lineage: &'a Lineage, budget_bytes: u64) -> Problem<'a> {
        Problem { trace, lineage, tiers: self.tiers, budget_bytes, actions: self.actions }
    }

    /// A new rung, planned.
    pub(super) fn plan_for(&mut self, known: Known, before: Option<&Plan>, times: Times) -> Rung {
        let mut shelf = Shelf { times, is_first: before.is_none(), ..Shelf::default() };
        let scheduled = self.plan(&known, before, &mut shelf);
        self.latest_name = self.latest_name.next();
        Rung::new(known, scheduled, shelf, (self.latest_name, self.clock))
    }

    /// Plans a program for what the budget leaves it, from the plan that there was `before`.
    fn plan(&mut self, known: &Known, before: Option<&Plan>, shelf: &mut Shelf) -> Scheduled {
        let started = Instant::now();
        shelf.take_new_plan();
        shelf.is_hasty =
            !(shelf.is_first && self.report.plans < PLANS_FREE || self.report.has_time_to_plan(PLANNING_SHARE));
        let budget_bytes = self.budget.0.saturating_sub(shelf.margin_bytes);
        let (trace, lineage) = (&*known.trace, &*known.lineage);
        let windows = lineage.windows().len();
        let in_haste = Limits { time: Some(TIME.max(time_for(windows) / HASTES)), ..HASTY.limits };
        let planner = if shelf.is_hasty { &Planner { limits: in_haste, ..HASTY } } else { &self.planner };
        let problem = self.problem(trace, lineage, budget_bytes);
        let keep_all = || (Plan::keep_all(windows), KEEP_ALL);
        let (plan, by) = if lineage.keep_all_peak_bytes() <= budget_bytes {
            keep_all()
        } else {
            let Decided { planned, by } = self.decider.plan(problem, planner, before);
            // Where something may be left away, less may do.
            let less_may_do = self.is_loop && self.may_leave_away();
            if !(planned.fits() || shelf.is_hasty || less_may_do) && windows <= SOUNDED_MAX {
                let mut policies = [self.decider.policy(), Box::new(Dtr)];
                let least = least_feasible_budget(problem, &mut policies);
                self.least_feasible_bytes = self.least_feasible_bytes.max(Some(least));
            }
            match planned.fits() || self.actions.swap {
                true => (planned.plan, by),
                // What it drops may have to be rebuilt when there is no room for that, and nothing to swap. Iterations were held
                // before there was a plan, deciding when bytes ran out.
                false => keep_all(),
            }
        };
        let scheduled = self.schedule(known, plan, budget_bytes);
        self.report.plans += 1;
        *self.report.plans_by.entry(by).or_default() += 1;
        self.report.planning_ns += started.elapsed().as_nanos() as u64;
        scheduled
    }

    /// Plans a program anew.
    pub(super) fn replan(&mut self, rung: &mut Rung) {
        let Rung { known, scheduled, shelf, .. } = rung;
        *scheduled = self.plan(known, Some(&scheduled.plan), shelf);
    }

    /// Plans a program anew for iterations that begin with so many bytes allocated.
    pub(super) fn replan_from(&mut self, rung: &mut Rung, start_bytes: u64) {
        let mut trace = Trace::clone(&rung.known.trace);
        trace.unseen_bytes = trace.unseen_of(start_bytes);
        rung.known = rung.known.with(trace);
        self.replan(rung);
    }

    /// Plans a program anew, so that it leaves so many more bytes free. Where no such plan is found the present one stays.
    pub(super) fn leave_free(&mut self, rung: &mut Rung, bytes: u64) -> bool {
        rung.shelf.margin_bytes += bytes;
        let scheduled = self.plan(&rung.known, Some(&rung.scheduled.plan), &mut rung.shelf);
        let fits = !scheduled.exceeds_budget();
        if fits {
            rung.scheduled = scheduled;
        } else {
            rung.shelf.margin_bytes -= bytes;
        }
        fits
    }

    /// Makes every plan anew.
    pub(super) fn replan_all(&mut self, programs: &mut [Program]) {
        self.least_feasible_bytes = None;
        self.absence.doubt();
        programs.iter_mut().flat_map(|program| program.ladder.rungs_mut()).for_each(|rung| self.replan(rung));
    }

    /// Plans a program anew, of which more is known.
    pub(super) fn know(&mut self, rung: &mut Rung, known: Known) {
        let before = carried_over(&rung.scheduled.plan, &rung.known.lineage, &known.lineage);
        rung.scheduled = self.plan(&known, Some(&before), &mut rung.shelf);
        rung.known = known;
    }

    pub(super) fn schedule(&self, known: &Known, plan: Plan, budget_bytes: u64) -> Scheduled {
        let mut timeline = Timeline::new(&known.trace, &known.lineage, self.tiers);
        let (mut schedule, prediction) = timeline.schedule(&plan, budget_bytes);
        timeline.let_read_out(&mut schedule);
        Scheduled::new(known, plan, schedule, Some(prediction))
    }
}

/// What a plan does, for the windows of the same program at other sizes: those of small storages are no windows.
pub(super) fn carried_over(plan: &Plan, from: &Lineage, to: &Lineage) -> Plan {
    let actions: HashMap<_, Action> = from
        .windows()
        .iter()
        .zip(plan.actions())
        .map(|(window, &action)| ((window.storage, window.start), action))
        .collect();
    let mut carried = Plan::keep_all(to.windows().len());
    for (id, window) in (0..).map(WindowId).zip(to.windows()) {
        carried.set(id, actions.get(&(window.storage, window.start)).copied().unwrap_or_default());
    }
    carried
}
