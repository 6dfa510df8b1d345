//! The evicted neighbourhood e*: what a storage would be rebuilt from, and what would be rebuilt from it, through
//! evicted storages alone.
//!
//! Its cost is a sum over a graph that changes with every eviction. The sums last found are kept, and are never above
//! the truth: an eviction elsewhere only adds to a sum, and what a storage takes away that is there again is taken off
//! at once. So a storage whose kept sum is too high already need not be looked at.

use super::program::SeatId;
use super::simulator::World;
use super::walk::{Direction, Walk};

/// A sum that is not above the truth.
#[derive(Clone, Copy, Default)]
struct Sum {
    cost_ns: u64,
    /// The moment at which it was exact.
    at: u32,
}

/// Costs of neighbourhoods, upwards and downwards.
pub(super) struct Neighbourhood {
    ancestors: Vec<Sum>,
    descendants: Vec<Sum>,
    /// Counts evictions and rebuilt storages.
    moment: u32,
    walk: Walk,
    shore: Vec<SeatId>,
}

impl Neighbourhood {
    pub(super) fn new(storages: usize) -> Self {
        Neighbourhood {
            ancestors: vec![Sum::default(); storages],
            descendants: vec![Sum::default(); storages],
            moment: 0,
            walk: Walk::new(storages),
            shore: Vec::new(),
        }
    }

    pub(super) fn evicted(&mut self) {
        self.moment += 1;
    }

    /// `storage` is there again: those that reached something through it do so no longer.
    pub(super) fn materialised(&mut self, world: &World<'_>, storage: SeatId) {
        self.moment += 1;
        let own_ns = world.seat(storage).cost_ns;
        self.shore.clear();
        let above_ns = self.walk.cost_ns(world, storage, Direction::Ancestors, |shore| self.shore.push(shore));
        let above = self.shore.len();
        let below_ns = self.walk.cost_ns(world, storage, Direction::Descendants, |shore| self.shore.push(shore));
        for (position, shore) in self.shore.iter().enumerate() {
            let (sum, lost_ns) = match position < above {
                true => (&mut self.descendants[shore.index()], own_ns + below_ns),
                false => (&mut self.ancestors[shore.index()], own_ns + above_ns),
            };
            sum.cost_ns = sum.cost_ns.saturating_sub(lost_ns);
        }
        self.ancestors[storage.index()] = Sum { cost_ns: above_ns, at: self.moment };
        self.descendants[storage.index()] = Sum { cost_ns: below_ns, at: self.moment };
    }

    /// Not more than [`Self::ancestors_ns`].
    pub(super) fn ancestors_ns_min(&self, storage: SeatId) -> u64 {
        self.ancestors[storage.index()].cost_ns
    }

    /// Not more than [`Self::descendants_ns`].
    pub(super) fn descendants_ns_min(&self, storage: SeatId) -> u64 {
        self.descendants[storage.index()].cost_ns
    }

    /// Cost of the evicted storages that `storage` would be rebuilt from.
    pub(super) fn ancestors_ns(&mut self, world: &World<'_>, storage: SeatId) -> u64 {
        let sum = &mut self.ancestors[storage.index()];
        if sum.at != self.moment {
            let cost_ns = self.walk.cost_ns(world, storage, Direction::Ancestors, |_| ());
            *sum = Sum { cost_ns, at: self.moment };
        }
        sum.cost_ns
    }

    /// Cost of the evicted storages that would be rebuilt from `storage`.
    pub(super) fn descendants_ns(&mut self, world: &World<'_>, storage: SeatId) -> u64 {
        let sum = &mut self.descendants[storage.index()];
        if sum.at != self.moment {
            let cost_ns = self.walk.cost_ns(world, storage, Direction::Descendants, |_| ());
            *sum = Sum { cost_ns, at: self.moment };
        }
        sum.cost_ns
    }
}
