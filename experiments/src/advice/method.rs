//! The ways of saving memory that advice compares, and what each makes of one recorded iteration.

use plimsoll_runtime::baselines::baseline;
use plimsoll_runtime::{
    ActionSet, Lineage, Link, Planned, Planner, Policy, Problem, Trace, least_feasible_budget, plan,
};
use serde::Serialize;

use super::quantisation::{Cost, Form};
use crate::chosen::Chosen;

/// Baselines of which the best plan stands for a method that names actions and no policy.
const PLANNERS: [&str; 3] = ["dtr", "capuchin", "lru"];

/// A way of saving memory.
pub struct Method<'a> {
    /// Its name.
    pub name: &'static str,
    /// Evictions that it may use.
    actions: ActionSet,
    /// What copies cost it.
    link: Link,
    /// Who decides, where it is not the best of [`PLANNERS`].
    policy: Option<&'a Chosen>,
    /// Whether it leaves results as they are, so that Plimsoll carries it out.
    pub exact: bool,
}

/// What a method makes of one iteration.
#[derive(Clone, Debug)]
pub struct Made {
    /// The best plan at the budget.
    pub at_budget: Planned,
    /// The plan at the least budget that the method can hold.
    pub at_full_strength: Planned,
    /// That budget.
    pub least_budget_bytes: u64,
    /// What no plan of the method's can do without.
    pub unavoidable_bytes: u64,
}

/// What a plan comes to.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// Time of an iteration.
    pub latency_ns: u64,
    /// Most device bytes.
    pub peak_bytes: u64,
}

impl From<&Planned> for Figures {
    fn from(planned: &Planned) -> Self {
        Figures { latency_ns: planned.prediction.makespan_ns, peak_bytes: planned.prediction.peak_bytes }
    }
}

/// The methods: keeping everything, each eviction alone, quantised swaps, and `policy`, which may use both.
pub fn methods<'a>(link: Link, half: Cost, int8: Cost, policy: &'a Chosen) -> Vec<Method<'a>> {
    let method = |name, actions, link, exact| Method { name, actions, link, policy: None, exact };
    vec![
        method("keep", ActionSet::NONE, link, true),
        method("recompute", ActionSet::RECOMPUTE, link, true),
        method("swap", ActionSet::SWAP, link, true),
        method("swap-fp16", ActionSet::SWAP, Form::Half.over(link, half), false),
        method("swap-int8", ActionSet::SWAP, Form::Int8.over(link, int8), false),
        Method { policy: Some(policy), ..method("policy", ActionSet::ALL, link, true) },
    ]
}

impl Method<'_> {
    fn policies(&self) -> Vec<Box<dyn Policy + Send>> {
        match self.policy {
            Some(chosen) => vec![chosen.policy()],
            None => PLANNERS.iter().filter_map(|name| baseline(name, 0)).collect(),
        }
    }

    /// The planning problem that the method sees.
    pub fn problem<'a>(&self, trace: &'a Trace, lineage: &'a Lineage, budget_bytes: u64) -> Problem<'a> {
        Problem { trace, lineage, tiers: self.link.into(), budget_bytes, actions: self.actions }
    }

    /// Plans an iteration at `budget_bytes`, and at the least budget that can be held.
    pub fn make(&self, trace: &Trace, lineage: &Lineage, budget_bytes: u64) -> Made {
        let problem = self.problem(trace, lineage, budget_bytes);
        let mut policies = self.policies();
        let least_budget_bytes = least_feasible_budget(problem, &mut policies);
        let mut best = |budget_bytes| {
            let problem = Problem { budget_bytes, ..problem };
            if let Some(chosen) = self.policy {
                return chosen.plan(problem, &Planner::default()).planned;
            }
            let plans = policies.iter_mut().map(|policy| plan(problem, policy.as_mut()));
            plans.reduce(|best, other| if other.is_better_than(&best) { other } else { best }).expect("a policy")
        };
        Made {
            at_budget: best(budget_bytes),
            at_full_strength: best(least_budget_bytes),
            least_budget_bytes,
            unavoidable_bytes: problem.unavoidable_bytes(),
        }
    }
}
