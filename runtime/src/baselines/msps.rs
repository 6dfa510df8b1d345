use super::lowest;
use crate::observation::Pressure;
use crate::plan::Action;
use crate::policy::{Choice, Policy};

/// Evicts what saves most memory per second of recompute, evicted ancestors included (memory saving per second: Peng et
/// al., *Capuchin*, ASPLOS 2020; as an online rule h = (c₀ + Σ c₀ of evicted ancestors) / bytes: Kirisame et
/// al., *Dynamic Tensor Rematerialization*, ICLR 2021).
///
/// Deviations: a storage that nothing can rebuild is swapped, the most bytes per second of transfer first; a choice
/// counts from the start of the window; what is never used again costs nothing.
pub struct Msps;

impl Policy for Msps {
    fn choose(&mut self, pressure: &Pressure<'_>) -> Option<Choice> {
        let per_byte = |cost_ns: u64, bytes: u64| cost_ns as f64 / bytes as f64;
        lowest(pressure, Action::Recompute, |candidate| per_byte(candidate.recompute_ns, candidate.bytes))
            .or_else(|| lowest(pressure, Action::Swap, |candidate| per_byte(candidate.transfer_ns, candidate.bytes)))
    }
}
