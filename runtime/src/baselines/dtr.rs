use super::lowest;
use crate::observation::{Candidate, Pressure};
use crate::plan::Action;
use crate::policy::{Choice, Policy};

/// Evicts the storage with the least projected cost, h = (c₀ + Σ c₀ of its evicted neighbourhood) / (bytes ·
/// staleness) (Kirisame et al., *Dynamic Tensor Rematerialization*, ICLR 2021).
///
/// Deviations: a storage that nothing can rebuild is swapped at its transfer time, where the paper would fail; the
/// neighbourhood reaches one generation down; a choice counts from the start of the window, not from the moment of
/// pressure; the trace knows what is to come, so what is never used again costs nothing to rebuild itself, and an ancestor that is dead
/// by the time of the rebuild counts as evicted. [`super::online`] has the rule without these deviations.
pub struct Dtr;

impl Policy for Dtr {
    fn choose(&mut self, pressure: &Pressure<'_>) -> Option<Choice> {
        lowest(pressure, Action::Recompute, |candidate| per_byte_and_time(with_neighbourhood_ns(candidate), candidate))
            .or_else(|| lowest(pressure, Action::Swap, |candidate| per_byte_and_time(candidate.transfer_ns, candidate)))
    }
}

/// Recompute time of `candidate` and of its evicted neighbourhood.
pub(super) fn with_neighbourhood_ns(candidate: &Candidate) -> u64 {
    candidate.recompute_ns + candidate.dropped_children_ns
}

/// Recompute time of `candidate` by itself: none where it is never used again.
pub(super) fn own_ns(candidate: &Candidate) -> u64 {
    candidate.own_recompute_ns.min(candidate.recompute_ns)
}

/// h of what costs `cost_ns`.
pub(super) fn per_byte_and_time(cost_ns: u64, candidate: &Candidate) -> f64 {
    cost_ns as f64 / (candidate.bytes as f64 * candidate.staleness_ns.max(1) as f64)
}
