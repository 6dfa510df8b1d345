//! An instance: one planning problem, and what the hand-written policies make of it.

use std::sync::Arc;

use plimsoll_runtime::baselines::baseline;
use plimsoll_runtime::{ActionSet, Lineage, Plan, Planned, Prediction, Problem, SlowTiers, Sweep, Trace, plan};

/// The policies whose best feasible plan is the reference of the reward: a few that are quick. At 263 points of held-out
/// members of all families the best of them is behind that of all baselines at 60, and by more than half a percent of
/// keep-all's makespan at 13.
pub const REFERENCES: [&str; 5] = ["dtr", "capuchin", "dtr-swap", "appobmem", "autoswap"];

/// A planning problem that owns what it is about.
#[derive(Clone, Debug)]
pub struct Instance {
    /// The recorded iteration.
    pub trace: Arc<Trace>,
    /// Its lineage.
    pub lineage: Arc<Lineage>,
    /// What copies cost, and how much there is room for.
    pub tiers: SlowTiers,
    /// Device bytes that must not be exceeded.
    pub budget_bytes: u64,
    /// Evictions that may be used.
    pub actions: ActionSet,
}

impl Instance {
    /// The problem, as planners take it.
    pub fn problem(&self) -> Problem<'_> {
        Problem {
            trace: &self.trace,
            lineage: &self.lineage,
            tiers: self.tiers,
            budget_bytes: self.budget_bytes,
            actions: self.actions,
        }
    }

    /// What `policy` makes of it; none where no baseline has that name.
    pub fn plan_with(&self, policy: &str) -> Option<Planned> {
        let mut policy = baseline(policy, 0)?;
        Some(plan(self.problem(), policy.as_mut()))
    }

    /// Whether something has to be evicted.
    pub fn asks_for_a_decision(&self) -> bool {
        Sweep::new(self.problem(), Plan::keep_all(self.lineage.windows().len())).pressure().is_some()
    }

    /// The least overhead of a reference policy that holds the budget, or none if none does. Once one takes no more than
    /// `enough`, no more are asked.
    pub fn reference_overhead(&self, enough: f64) -> Option<f64> {
        let mut least = None;
        for planned in REFERENCES.iter().filter_map(|name| self.plan_with(name)).filter(Planned::fits) {
            let overhead = self.overhead(&planned.prediction);
            least = Some(least.map_or(overhead, |other| overhead.min(other)));
            if overhead <= enough {
                break;
            }
        }
        least
    }

    /// Predicted makespan over the keep-all makespan, less one.
    pub fn overhead(&self, prediction: &Prediction) -> f64 {
        prediction.makespan_ns as f64 / self.lineage.keep_all_makespan_ns() as f64 - 1.0
    }
}
