use super::{lower_of_both, lowest_among};
use crate::observation::{Candidate, Pressure};
use crate::plan::Action;
use crate::policy::{Choice, Policy};

/// Swaps while the copies are hidden, longest Free Time first; after that takes whichever of swap and recompute
/// costs less per byte saved (Peng et al., *Capuchin: Tensor-based GPU Memory Management for Deep Learning*, ASPLOS
/// 2020, sections 4.3 and 4.4; Free Time = swap-in start − swap-out end, MSPS = saving / recompute time).
///
/// Deviations: it decides at pressure points; a swap's cost counts copies that were claimed already, but not how its own
/// push out those that end later, nor, where it asks whether they are hidden, what they take from compute: over a busy link it may swap
/// far too much; the in-trigger is the timeline's; a candidate's recompute counts what has to be rebuilt for it, and not how often it would be rebuilt itself for what was dropped before, because the timeline keeps what it rebuilt
/// while there is room.
pub struct Capuchin;

impl Policy for Capuchin {
    fn choose(&mut self, pressure: &Pressure<'_>) -> Option<Choice> {
        let hidden = |candidate: &Candidate| candidate.swap_exposed_ns == 0;
        let hidden = lowest_among(pressure, Action::Swap, hidden, |candidate| {
            let free_time_ns = candidate.gap_ns as f64 - candidate.transfer_ns as f64;
            -free_time_ns
        });
        hidden.or_else(|| {
            lower_of_both(
                pressure,
                |candidate| candidate.swap_ns() as f64 / candidate.bytes as f64,
                |candidate| candidate.recompute_ns as f64 / candidate.bytes as f64,
            )
        })
    }
}
