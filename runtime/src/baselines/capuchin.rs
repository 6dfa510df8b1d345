use super::lowest;
use crate::observation::{Candidate, Pressure};
use crate::plan::Action;
use crate::policy::{Choice, Policy};

/// Swaps while the copies are hidden, longest Free Time first; after that takes whichever of swap and recompute
/// costs less per byte saved (Peng et al., *Capuchin: Tensor-based GPU Memory Management for Deep Learning*, ASPLOS
/// 2020, sections 4.3 and 4.4; Free Time = swap-in start − swap-out end, MSPS = saving / recompute time).
///
/// Deviations: it decides at pressure points, and a swap's cost counts the copies claimed already, which makes it
/// stronger than the paper's; the in-trigger is the timeline's.
pub struct Capuchin;

impl Policy for Capuchin {
    fn name(&self) -> &str {
        "capuchin"
    }

    fn reads_features(&self) -> bool {
        false
    }

    fn choose(&mut self, pressure: &Pressure<'_>) -> Option<Choice> {
        let hidden = lowest(pressure, Action::Swap, |candidate| {
            let free_time_ns = candidate.gap_ns as f64 - candidate.transfer_ns as f64;
            if candidate.swap_exposed_ns == 0 { -free_time_ns } else { f64::INFINITY }
        })
        .filter(|choice| pressure.candidates[choice.candidate].swap_exposed_ns == 0);
        hidden.or_else(|| {
            let swap_price = |facts: &Candidate| facts.swap_ns() as f64 / facts.bytes as f64;
            let rebuild_price = |facts: &Candidate| facts.recompute_ns as f64 / facts.bytes as f64;
            let swap = lowest(pressure, Action::Swap, swap_price);
            let recompute = lowest(pressure, Action::Recompute, rebuild_price);
            match (swap, recompute) {
                (Some(swap), Some(recompute)) => {
                    let by_swap = swap_price(&pressure.candidates[swap.candidate]);
                    let by_recompute = rebuild_price(&pressure.candidates[recompute.candidate]);
                    Some(if by_recompute < by_swap { recompute } else { swap })
                }
                (swap, recompute) => swap.or(recompute),
            }
        })
    }
}
