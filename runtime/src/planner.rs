//! The planner: a policy's decisions, predicted, as one plan.

use std::time::Instant;

use crate::baselines::{BASELINES, baseline};
use crate::learned::LearnedPolicy;
use crate::plan::Plan;
use crate::policy::Policy;
use crate::sweep::{Problem, Sweep};
use crate::timeline::Prediction;

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
        self.prediction.over_budget_bytes == 0
    }

    /// Whether it exceeds the budget by less, or by as much and takes less time.
    pub fn is_better_than(&self, other: &Planned) -> bool {
        let rank = |planned: &Planned| (planned.prediction.over_budget_bytes, planned.prediction.makespan_ns);
        rank(self) < rank(other)
    }
}

/// Lets `policy` plan `problem`.
pub fn plan(problem: Problem<'_>, policy: &mut dyn Policy) -> Planned {
    let started = Instant::now();
    let opened = policy.open(&problem);
    let planned = completed(problem, opened, policy);
    Planned { decide_ns: started.elapsed().as_nanos() as u64, ..planned }
}

/// Lets `policy` decide what `plan` leaves open at pressure points.
pub(crate) fn completed(problem: Problem<'_>, plan: Plan, policy: &mut dyn Policy) -> Planned {
    let started = Instant::now();
    let mut sweep = Sweep::new(problem, plan);
    sweep.decide(policy);
    Planned {
        plan: sweep.plan().clone(),
        prediction: sweep.prediction(),
        decisions: sweep.decisions(),
        decide_ns: started.elapsed().as_nanos() as u64,
    }
}

/// A plan, and the name of the policy or baseline that it is by.
#[derive(Clone, Debug)]
pub struct Decided {
    /// The plan.
    pub planned: Planned,
    /// Whose it is.
    pub by: &'static str,
}

/// The name of plans that a learned policy made.
pub const LEARNED: &str = "learned";

/// Lets a learned policy plan `problem`: one greedy decode and `decodes` sampled ones, of which the best predicted is
/// kept. Where none of them holds the budget, the best baseline that does stands in, under its own name.
pub fn plan_learned(problem: Problem<'_>, policy: &LearnedPolicy, decodes: u64) -> Decided {
    let started = Instant::now();
    let mut best = Decided { planned: plan(problem, &mut policy.clone()), by: LEARNED };
    let mut offer = |by: &'static str, planned: Planned| {
        if planned.is_better_than(&best.planned) {
            best = Decided { planned, by };
        }
    };
    for seed in 0..decodes {
        offer(LEARNED, plan(problem, &mut policy.with_seed(seed)));
    }
    if !best.planned.fits() {
        for name in BASELINES {
            let mut baseline = baseline(name, 0).expect("every name in the list is known");
            let planned = plan(problem, baseline.as_mut());
            if planned.is_better_than(&best.planned) {
                best = Decided { planned, by: name };
            }
        }
    }
    best.planned.decide_ns = started.elapsed().as_nanos() as u64;
    best
}

/// The least budget, in bytes, for which some policy of `policies` finds a plan that fits, to within 1/1024 of the
/// keep-all peak.
///
/// Whether a policy fits is not strictly monotone in the budget, so this is the least that bisection finds.
pub fn least_feasible_budget(problem: Problem<'_>, policies: &mut [Box<dyn Policy + Send>]) -> u64 {
    let mut fits = |budget_bytes: u64| {
        let problem = Problem { budget_bytes, ..problem };
        policies.iter_mut().any(|policy| plan(problem, policy.as_mut()).fits())
    };
    let peak = problem.lineage.keep_all_peak_bytes();
    let (mut too_little, mut enough) = (0, peak);
    while enough - too_little > peak / 1024 {
        let middle = too_little + (enough - too_little) / 2;
        if fits(middle) { enough = middle } else { too_little = middle }
    }
    enough
}
