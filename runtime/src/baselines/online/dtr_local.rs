use super::heuristic::{Heuristic, per};
use super::program::SeatId;
use super::simulator::World;

/// DTR's score of a storage alone, h = c₀ / (bytes · staleness) (DTR, h_DTR-local).
pub(super) struct DtrLocal;

impl Heuristic for DtrLocal {
    fn score(&mut self, world: &World<'_>, storage: SeatId) -> f64 {
        per(world.seat(storage).cost_ns as i64, world.bytes_and_staleness(storage))
    }
}
