use super::lowest;
use crate::observation::Pressure;
use crate::plan::Action;
use crate::policy::{Choice, Policy};

/// Evicts what has been idle longest: DTR's LRU heuristic, h = 1 / staleness (Kirisame et al., *Dynamic Tensor
/// Rematerialization*, ICLR 2021).
///
/// Deviations: a storage that nothing can rebuild is swapped, where the paper would fail; a choice counts from the
/// start of the window, not from the moment of pressure.
pub struct Lru;

impl Policy for Lru {
    fn choose(&mut self, pressure: &Pressure<'_>) -> Option<Choice> {
        let stalest = |action| lowest(pressure, action, |candidate| -(candidate.staleness_ns as f64));
        stalest(Action::Recompute).or_else(|| stalest(Action::Swap))
    }
}
