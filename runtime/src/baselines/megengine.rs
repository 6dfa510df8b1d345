use super::dtr::{per_byte_and_time, with_neighbourhood_ns};
use super::lowest_among;
use crate::observation::{Candidate, Pressure};
use crate::plan::Action;
use crate::policy::{Choice, Policy};

/// No smaller storage is evicted: MegEngine's `evictee_minimum_size`, in bytes.
const EVICTEE_BYTES_MIN: u64 = 1 << 20;

/// DTR as MegEngine ships it: nothing under 1 MiB is evicted (MegEngine's documentation of
/// `megengine.dtr`, `evictee_minimum_size`; DTR: Kirisame et al., ICLR 2021).
///
/// Deviations: those of `dtr`; MegEngine also counts the free bytes beside a storage, which nothing here knows of.
pub struct MegEngine;

impl Policy for MegEngine {
    fn choose(&mut self, pressure: &Pressure<'_>) -> Option<Choice> {
        let large = |candidate: &Candidate| candidate.bytes >= EVICTEE_BYTES_MIN;
        let by_recompute = |candidate: &Candidate| per_byte_and_time(with_neighbourhood_ns(candidate), candidate);
        let by_swap = |candidate: &Candidate| per_byte_and_time(candidate.transfer_ns, candidate);
        lowest_among(pressure, Action::Recompute, large, by_recompute)
            .or_else(|| lowest_among(pressure, Action::Swap, large, by_swap))
    }
}
