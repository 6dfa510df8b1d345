use super::dtr::{own_ns, per_byte_and_time};
use super::lowest;
use crate::observation::Pressure;
use crate::plan::Action;
use crate::policy::{Choice, Policy};

/// DTR's score of a storage alone, h = c₀ / (bytes · staleness): evicted neighbours do not count (Kirisame et al.,
/// *Dynamic Tensor Rematerialization*, ICLR 2021, h_DTR-local).
///
/// Deviations: a storage that nothing can rebuild is swapped at its transfer time, where the paper would fail; a choice
/// counts from the start of the window; what is never used again costs nothing. [`super::online`] has the rule without these deviations.
pub struct DtrLocal;

impl Policy for DtrLocal {
    fn choose(&mut self, pressure: &Pressure<'_>) -> Option<Choice> {
        lowest(pressure, Action::Recompute, |candidate| per_byte_and_time(own_ns(candidate), candidate))
            .or_else(|| lowest(pressure, Action::Swap, |candidate| per_byte_and_time(candidate.transfer_ns, candidate)))
    }
}
