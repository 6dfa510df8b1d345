use super::{forward_to_backward, lowest_among};
use crate::observation::{Candidate, Pressure};
use crate::plan::{Action, Plan};
use crate::policy::{Choice, Policy};
use crate::sweep::Problem;

/// Offloads as many of vDNN's feature maps as the budget needs, and awaits no copy before it must (Shriram, Garg and
/// Kulkarni, *Dynamic Memory Management for GPU-Based Training of Deep Neural Networks* (vDNN++), IPDPS 2019).
///
/// Only the paper's abstract was at hand. From it: no synchronisation at the end of a layer. Ours: at a pressure point
/// the feature map goes that has been idle longest, which in a chain of layers the backward pass needs last.
/// Deviations: offloaded data is not compressed; there is no allocator whose fragments an order of allocations could
/// avoid; a "feature map" is what it is to `vdnn-all`.
#[derive(Default)]
pub struct VdnnPlus {
    /// Per window: whether it is a feature map.
    feature_map: Vec<bool>,
}

impl Policy for VdnnPlus {
    fn open(&mut self, problem: &Problem<'_>) -> Plan {
        let windows = problem.lineage.windows().len();
        self.feature_map.clear();
        self.feature_map.resize(windows, false);
        for id in forward_to_backward(problem) {
            self.feature_map[id.index()] = true;
        }
        Plan::keep_all(windows)
    }

    fn decides_unopened(&self) -> bool {
        false
    }

    fn choose(&mut self, pressure: &Pressure<'_>) -> Option<Choice> {
        let feature_map = |candidate: &Candidate| self.feature_map[candidate.window.index()];
        lowest_among(pressure, Action::Swap, feature_map, |candidate| -(candidate.staleness_ns as f64))
    }
}
