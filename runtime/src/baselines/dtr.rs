use super::lowest;
use crate::observation::Pressure;
use crate::plan::Action;
use crate::policy::{Choice, Policy};

/// Evicts the storage with the least projected cost, h = (c₀ + Σ c₀ of its evicted neighbourhood) / (bytes ·
/// staleness) (Kirisame et al., *Dynamic Tensor Rematerialization*, ICLR 2021, section 4.1).
///
/// Deviations: a storage that nothing can rebuild is swapped at its transfer time, where the paper would fail; the
/// neighbourhood reaches one generation down; a choice counts from the start of the window, not from the moment of
/// pressure.
pub struct Dtr;

impl Policy for Dtr {
    fn name(&self) -> &str {
        "dtr"
    }

    fn reads_features(&self) -> bool {
        false
    }

    fn choose(&mut self, pressure: &Pressure<'_>) -> Option<Choice> {
        let per_byte_and_time =
            |cost_ns: u64, bytes: u64, staleness_ns: u64| cost_ns as f64 / (bytes as f64 * staleness_ns.max(1) as f64);
        lowest(pressure, Action::Recompute, |candidate| {
            let neighbourhood_ns = candidate.recompute_ns + candidate.dropped_children_ns;
            per_byte_and_time(neighbourhood_ns, candidate.bytes, candidate.staleness_ns)
        })
        .or_else(|| {
            lowest(pressure, Action::Swap, |candidate| {
                per_byte_and_time(candidate.transfer_ns, candidate.bytes, candidate.staleness_ns)
            })
        })
    }
}
