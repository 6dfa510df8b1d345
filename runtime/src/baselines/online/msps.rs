use super::heuristic::{Heuristic, per};
use super::neighbourhood::Neighbourhood;
use super::program::{Program, SeatId};
use super::simulator::World;

/// Recompute time with evicted ancestors, per byte (DTR, h_MSPS: Capuchin's memory saving per second, Peng
/// et al., ASPLOS 2020, put upside down).
pub(super) struct Msps {
    neighbourhood: Neighbourhood,
}

impl Msps {
    pub(super) fn new(program: &Program) -> Self {
        Msps { neighbourhood: Neighbourhood::new(program.bytes.len()) }
    }
}

impl Heuristic for Msps {
    fn evicted(&mut self, _world: &World<'_>, _storage: SeatId) {
        self.neighbourhood.evicted();
    }

    fn materialised(&mut self, world: &World<'_>, storage: SeatId) {
        self.neighbourhood.materialised(world, storage);
    }

    fn score(&mut self, world: &World<'_>, storage: SeatId) -> f64 {
        let seat = world.seat(storage);
        per((seat.cost_ns + self.neighbourhood.ancestors_ns(world, storage)) as i64, seat.bytes as f64)
    }

    fn score_at_least(&self, world: &World<'_>, storage: SeatId) -> f64 {
        let seat = world.seat(storage);
        per((seat.cost_ns + self.neighbourhood.ancestors_ns_min(storage)) as i64, seat.bytes as f64)
    }
}
