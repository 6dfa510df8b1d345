use super::heuristic::{Heuristic, per};
use super::program::SeatId;
use super::simulator::World;

/// Evicts the largest storage (DTR, h_size = 1 / bytes; GreedyRemat of Kumar et al., *Efficient
/// Rematerialization for Deep Networks*, NeurIPS 2019).
pub(super) struct Largest;

impl Heuristic for Largest {
    fn score(&mut self, world: &World<'_>, storage: SeatId) -> f64 {
        per(1, world.seat(storage).bytes as f64)
    }
}
