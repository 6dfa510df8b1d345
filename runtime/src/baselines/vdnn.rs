use super::{forward_to_backward, read_by};
use crate::plan::{Action, Plan};
use crate::policy::Policy;
use crate::sweep::Problem;

/// Offloads whatever the forward pass leaves for the backward pass (Rhu et al., *vDNN*, MICRO 2016, vDNN-all).
///
/// Deviations: it needs no layers, so a "feature map" is any storage whose window starts in the forward pass and
/// ends in the backward pass; copies are not awaited at every layer, as in vDNN++; a prefetch begins when the timeline
/// lets it, and not one convolution ahead.
pub struct VdnnAll;

impl Policy for VdnnAll {
    fn open(&mut self, problem: &Problem<'_>) -> Plan {
        offload(problem, &[])
    }
}

/// Offloads every feature map, or where `readers` is not empty every one that such an operator of the forward pass reads.
pub(super) fn offload(problem: &Problem<'_>, readers: &[&str]) -> Plan {
    let mut plan = Plan::keep_all(problem.lineage.windows().len());
    if problem.actions.swap {
        let read = read_by(problem, readers);
        for id in forward_to_backward(problem) {
            if readers.is_empty() || read[problem.lineage.window(id).storage.index()] {
                plan.set(id, Action::Swap);
            }
        }
    }
    plan
}
