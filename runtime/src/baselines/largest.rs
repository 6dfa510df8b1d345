use super::lowest;
use crate::observation::Pressure;
use crate::plan::Action;
use crate::policy::{Choice, Policy};

/// Evicts the largest storage (GreedyRemat: Kumar et al., *Efficient Rematerialization for Deep Networks*, NeurIPS 2019;
/// h_size = 1 / bytes: Kirisame et al., *Dynamic Tensor Rematerialization*, ICLR 2021).
///
/// Deviations: a storage that nothing can rebuild is swapped, where the paper would fail; a choice counts from the
/// start of the window.
pub struct Largest;

impl Policy for Largest {
    fn choose(&mut self, pressure: &Pressure<'_>) -> Option<Choice> {
        let largest = |action| lowest(pressure, action, |candidate| -(candidate.bytes as f64));
        largest(Action::Recompute).or_else(|| largest(Action::Swap))
    }
}
