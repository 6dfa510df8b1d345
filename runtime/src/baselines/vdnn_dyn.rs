use super::{CONVOLUTIONS, fastest_that_fits, vdnn};
use crate::plan::Plan;
use crate::policy::Policy;
use crate::sweep::Problem;

/// Tries no offload, vDNN-conv and vDNN-all, and takes the fastest that fits (Rhu et al., *vDNN*, MICRO 2016, section
/// 3.3, vDNN-dyn). Where none fits, the one that exceeds the budget least.
///
/// Deviations: those of `vdnn-all`; iterations are tried on the timeline and not on the device; there is no choice of
/// convolution algorithms, which the paper downgrades one after another to save workspace.
pub struct VdnnDyn;

impl Policy for VdnnDyn {
    fn open(&mut self, problem: &Problem<'_>) -> Plan {
        let nothing = Plan::keep_all(problem.lineage.windows().len());
        let (convolutions, all) = (vdnn::offload(problem, &CONVOLUTIONS), vdnn::offload(problem, &[]));
        fastest_that_fits(problem, nothing, [convolutions, all])
    }
}
