//! The comparison: every policy at every budget, predicted, and measured on the running loop.

use std::sync::Arc;

use plimsoll_env::Instance;
use plimsoll_env::config::FamilyConfig;
use plimsoll_env::real::run_plan;
use plimsoll_runtime::{Lineage, Planner};

use crate::chosen::Chosen;
use crate::loops::{LoopFlags, RECORDED_ITERATIONS, RecordedLoop, Untouched};
use crate::results::{PointResult, at_speed_of};
use crate::tiers::OpenTiers;

/// How to compare.
pub struct Comparison<'a> {
    /// The family.
    pub config: &'a FamilyConfig,
    /// The policies.
    pub policies: &'a [Chosen],
    /// Where copies go, and what they cost: emulated; none for the device's own memory and link.
    pub tiers: Option<OpenTiers>,
    /// What helps learned policies.
    pub planner: Planner<'static>,
    /// Whether plans are run on the loop.
    pub real: bool,
    /// Flags of the loop.
    pub flags: &'a LoopFlags,
}

impl Comparison<'_> {
    /// Compares on the workload `name`, at every budget of the configuration. `progress` hears of every point.
    ///
    /// A machine is not as fast at noon as in the morning. So where plans are run, each is made, and predicted, with the
    /// times of the untouched iterations beside the plan before it: the last that are known before it runs itself.
    pub fn on(&self, name: &str, mut progress: impl FnMut(&PointResult)) -> anyhow::Result<Vec<PointResult>> {
        let mut open = RecordedLoop::open(self.config, name, self.flags, RECORDED_ITERATIONS)?;
        let mut trace = Arc::new(open.trace.clone());
        let mut lineage = Arc::new(Lineage::of(&trace));
        let tiers = open.on.tiers(self.tiers.clone())?;
        let mut results = Vec::new();
        let mut iterations_done = open.losses.len();
        let mut firsts = Vec::new();
        for budget in &self.config.evaluation.budgets {
            for policy in self.policies {
                let instance = Instance {
                    trace: trace.clone(),
                    lineage: lineage.clone(),
                    tiers: tiers.tiers,
                    budget_bytes: budget.resolve(open.trace.peak_bytes),
                    actions: self.config.evaluation.actions,
                };
                let problem = instance.problem();
                let decided = policy.plan(problem, &self.planner);
                let mut result = PointResult::planned(policy.name(), &problem, self.tiers.is_some(), &decided);
                firsts.push(iterations_done);
                if self.real && result.feasible {
                    let engine = open.on.engine(&tiers)?;
                    let measured = run_plan(
                        open.on.session,
                        open.workload.as_mut(),
                        &problem,
                        &decided.planned.plan,
                        engine,
                        self.config.evaluation.iterations,
                        true,
                    )?;
                    iterations_done += measured.losses.len();
                    result.measure(&problem, &decided.planned.plan, &measured);
                    if let Some(untouched) = &measured.untouched {
                        trace = Arc::new(at_speed_of(untouched));
                        lineage = Arc::new(Lineage::of(&trace));
                    }
                }
                progress(&result);
                results.push(result);
            }
        }
        if self.real {
            // One untouched loop of as many iterations shows for every point at once that nothing changed.
            let untouched = Untouched::run(self.config, name, self.flags, iterations_done)?;
            let variables = untouched.has_variables_of(open.workload.as_ref())?;
            for (result, first) in results.iter_mut().zip(firsts).filter(|(result, _)| result.measured.is_some()) {
                result.identical = Some(variables && untouched.has_losses(first, &result.losses));
            }
        }
        Ok(results)
    }
}

/// Broken promises among the results of one comparison: budgets not held, results changed, and budgets that a baseline
/// holds and a learned policy does not.
pub fn broken_promises(policies: &[Chosen], results: &[PointResult]) -> Vec<String> {
    let mut broken = Vec::new();
    for result in results {
        let at = format!("{} on {} at {} bytes", result.policy, result.workload, result.budget_bytes);
        if result.held == Some(false) {
            broken.push(format!("{at}: measured over the budget"));
        }
        if result.identical == Some(false) {
            broken.push(format!("{at}: losses or parameters changed"));
        }
        let learned =
            policies.iter().any(|policy| matches!(policy, Chosen::Learned { name, .. } if *name == result.policy));
        let held_by_another = results.iter().any(|other| {
            other.feasible && other.workload == result.workload && other.budget_bytes == result.budget_bytes
        });
        if learned && !result.feasible && held_by_another {
            broken.push(format!("{at}: not held, though a baseline holds it"));
        }
    }
    broken
}
