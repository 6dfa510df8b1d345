use super::dtr::{per_byte_and_time, with_neighbourhood_ns};
use super::lower_of_both;
use crate::observation::Pressure;
use crate::policy::{Choice, Policy};

/// DTR's score with a second way out: of swap and recompute goes whichever scores lower, a swap costing what its copies
/// would leave exposed behind those that the channels were given already.
///
/// Of no paper: it is DTR (Kirisame et al., ICLR 2021) that knows of swap and of the load on the channels,
/// so that a policy that knows of both is not compared with rules that do not.
pub struct DtrSwap;

impl Policy for DtrSwap {
    fn choose(&mut self, pressure: &Pressure<'_>) -> Option<Choice> {
        lower_of_both(
            pressure,
            |candidate| per_byte_and_time(candidate.swap_ns(), candidate),
            |candidate| per_byte_and_time(with_neighbourhood_ns(candidate), candidate),
        )
    }
}
