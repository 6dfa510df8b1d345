use super::heuristic::Heuristic;
use super::program::SeatId;
use super::simulator::World;

/// Evicts what was asked for longest ago (DTR, h_LRU).
pub(super) struct Lru;

impl Heuristic for Lru {
    fn score(&mut self, world: &World<'_>, storage: SeatId) -> f64 {
        world.seat(storage).accessed_ns as f64
    }
}
