use super::lower_of_both;
use crate::observation::{Candidate, Pressure};
use crate::policy::{Choice, Policy};

/// Evicts whatever adds least to the makespan per missing byte that it covers, by swap or by recompute, a swap costing
/// what its copies would leave exposed behind those that the channels were given already.
///
/// Of no paper: the plain greedy rule on the very figures that a learned policy sees.
pub struct Cheapest;

impl Policy for Cheapest {
    fn choose(&mut self, pressure: &Pressure<'_>) -> Option<Choice> {
        let per_covered_byte =
            |cost_ns: u64, candidate: &Candidate| cost_ns as f64 / candidate.bytes.min(pressure.deficit_bytes) as f64;
        lower_of_both(
            pressure,
            |candidate| per_covered_byte(candidate.swap_ns(), candidate),
            |candidate| per_covered_byte(candidate.recompute_ns, candidate),
        )
    }
}
