//! Who decides: a learned policy, a baseline, or the planner by itself.

use crate::baselines::{DtrSwap, baseline};
use crate::decode::plan;
use crate::learned::LearnedPolicy;
use crate::plan::Plan;
use crate::planner::{Decided, Planner};
use crate::policy::Policy;
use crate::sweep::Problem;

/// Who decides.
pub(in crate::torch) enum Decider {
    Learned(Box<LearnedPolicy>),
    Baseline(&'static str),
    /// Nobody was named.
    Planner,
}

impl Decider {
    /// The rule that decides when bytes run out: DTR's, for swaps too, where ours has to know the whole iteration.
    pub(in crate::torch) fn reactive(&self) -> Box<dyn Policy + Send> {
        let policy = self.policy();
        if policy.decides_unopened() { policy } else { Box::new(DtrSwap) }
    }

    pub(super) fn policy(&self) -> Box<dyn Policy + Send> {
        match self {
            Decider::Learned(policy) => policy.clone(),
            Decider::Baseline(name) => baseline(name, 0).expect("the builder has asked for it"),
            Decider::Planner => Box::new(DtrSwap),
        }
    }

    /// The decider's plan, which a baseline makes anew, and others from what they had `before`. Where a baseline's own does not
    /// hold the budget, the planner is asked for one that does: it asks the other baselines, and searches.
    pub(super) fn plan(&self, problem: Problem<'_>, planner: &Planner<'_>, before: Option<&Plan>) -> Decided {
        match self {
            Decider::Learned(policy) => planner.improve(problem, Some(policy), before),
            Decider::Planner => planner.improve(problem, None, before),
            Decider::Baseline(name) => {
                let own = Decided { planned: plan(problem, self.policy().as_mut()), by: name };
                if own.planned.fits() {
                    return own;
                }
                let others = planner.improve(problem, None, before);
                if others.planned.is_better_than(&own.planned) { others } else { own }
            }
        }
    }
}
