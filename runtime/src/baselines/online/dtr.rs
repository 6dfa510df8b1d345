use super::heuristic::{Heuristic, per};
use super::neighbourhood::Neighbourhood;
use super::program::{Program, SeatId};
use super::simulator::World;

/// DTR's own score, h = (c₀ + Σ c₀ of the evicted neighbourhood e*) / (bytes · staleness) (DTR, h_DTR).
pub(super) struct Dtr {
    neighbourhood: Neighbourhood,
}

impl Dtr {
    pub(super) fn new(program: &Program) -> Self {
        Dtr { neighbourhood: Neighbourhood::new(program.bytes.len()) }
    }
}

impl Heuristic for Dtr {
    fn evicted(&mut self, _world: &World<'_>, _storage: SeatId) {
        self.neighbourhood.evicted();
    }

    fn materialised(&mut self, world: &World<'_>, storage: SeatId) {
        self.neighbourhood.materialised(world, storage);
    }

    fn score(&mut self, world: &World<'_>, storage: SeatId) -> f64 {
        let ancestors_ns = self.neighbourhood.ancestors_ns(world, storage);
        let descendants_ns = self.neighbourhood.descendants_ns(world, storage);
        let cost_ns = world.seat(storage).cost_ns + ancestors_ns + descendants_ns;
        per(cost_ns as i64, world.bytes_and_staleness(storage))
    }

    fn score_at_least(&self, world: &World<'_>, storage: SeatId) -> f64 {
        let neighbourhood_ns =
            self.neighbourhood.ancestors_ns_min(storage) + self.neighbourhood.descendants_ns_min(storage);
        per((world.seat(storage).cost_ns + neighbourhood_ns) as i64, world.bytes_and_staleness(storage))
    }
}
