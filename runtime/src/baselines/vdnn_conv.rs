use super::{CONVOLUTIONS, vdnn};
use crate::plan::Plan;
use crate::policy::Policy;
use crate::sweep::Problem;

/// Offloads what the forward pass leaves for the backward pass and a convolution reads (Rhu et al., *vDNN*, MICRO 2016,
/// vDNN-conv): convolutions take long enough to hide the copy.
///
/// Deviations: those of `vdnn-all`; a convolution is an operator with `conv` in its name.
pub struct VdnnConv;

impl Policy for VdnnConv {
    fn open(&mut self, problem: &Problem<'_>) -> Plan {
        vdnn::offload(problem, &CONVOLUTIONS)
    }
}
