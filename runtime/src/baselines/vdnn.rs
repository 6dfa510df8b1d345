use crate::observation::Pressure;
use crate::plan::{Action, Plan};
use crate::policy::{Choice, Policy};
use crate::sweep::Problem;

/// Offloads whatever the forward pass leaves for the backward pass (Rhu et al., *vDNN*, MICRO 2016, vDNN-all).
///
/// Deviations: it needs no layers, so a "feature map" is any storage whose window starts in the forward pass and
/// ends in the backward pass; copies are not awaited at every layer, as in vDNN++.
pub struct VdnnAll;

impl Policy for VdnnAll {
    fn name(&self) -> &str {
        "vdnn-all"
    }

    fn open(&mut self, problem: &Problem<'_>) -> Plan {
        let mut plan = Plan::keep_all(problem.lineage.windows().len());
        if problem.actions.swap {
            for id in super::forward_to_backward(problem) {
                plan.set(id, Action::Swap);
            }
        }
        plan
    }

    fn reads_features(&self) -> bool {
        false
    }

    fn choose(&mut self, _pressure: &Pressure<'_>) -> Option<Choice> {
        None
    }
}
