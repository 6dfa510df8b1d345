//! One decode: from a policy's decisions to a whole plan, and what the timeline predicts of that.

use std::time::Instant;

use crate::plan::Plan;
use crate::policy::Policy;
use crate::sweep::{Problem, Sweep};
use crate::timeline::{Prediction, Timeline};

/// A complete plan and what it is predicted to cost.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The plan.
    pub plan: Plan,
    /// Its prediction under the budget it was made for.
    pub prediction: Prediction,
    /// Evictions that the policy chose at pressure points.
    pub decisions: usize,
    /// Wall-clock time that planning took.
    pub decide_ns: u64,
}

impl Planned {
    /// Whether the budget is held.
    pub fn fits(&self) -> bool {
        self.prediction.fits()
    }

    /// Whether it exceeds the budget by less, or by as much and takes less time.
    pub fn is_better_than(&self, other: &Planned) -> bool {
        self.prediction.rank() < other.prediction.rank()
    }
}

/// Lets `policy` plan `problem`. Where more than the budget can never be evicted nobody is asked, and nothing is evicted: to
/// miss it by less takes longer than any plan that holds one.
pub fn plan(problem: Problem<'_>, policy: &mut dyn Policy) -> Planned {
    plan_until(problem, policy, &|| false).expect("it is never over")
}

/// The same, unless `is_over` says so between two decisions. What a policy does before the first is not cut short.
pub(crate) fn plan_until(problem: Problem<'_>, policy: &mut dyn Policy, is_over: &dyn Fn() -> bool) -> Option<Planned> {
    let started = Instant::now();
    let planned = if problem.is_hopeless() {
        let plan = Plan::keep_all(problem.lineage.windows().len());
        Planned { prediction: predict(problem, &plan), plan, decisions: 0, decide_ns: 0 }
    } else {
        let opened = policy.open(&problem);
        completed_until(problem, opened, policy, is_over)?
    };
    Some(Planned { decide_ns: started.elapsed().as_nanos() as u64, ..planned })
}

/// What is predicted of a plan under the problem's budget.
pub(crate) fn predict(Problem { trace, lineage, tiers, budget_bytes, .. }: Problem<'_>, plan: &Plan) -> Prediction {
    Timeline::new(trace, lineage, tiers).predict(plan, budget_bytes)
}

/// Lets `policy` decide what `plan` leaves open at pressure points.
pub fn completed(problem: Problem<'_>, plan: Plan, policy: &mut dyn Policy) -> Planned {
    completed_until(problem, plan, policy, &|| false).expect("it is never over")
}

fn completed_until(
    problem: Problem<'_>,
    plan: Plan,
    policy: &mut dyn Policy,
    is_over: &dyn Fn() -> bool,
) -> Option<Planned> {
    let started = Instant::now();
    let start = if policy.weighs_waiting() { Sweep::weighing_waits } else { Sweep::new };
    let mut sweep = start(problem, plan);
    sweep.decide_until(policy, is_over).then(|| Planned {
        plan: sweep.plan().clone(),
        prediction: sweep.prediction(),
        decisions: sweep.decisions(),
        decide_ns: started.elapsed().as_nanos() as u64,
    })
}
