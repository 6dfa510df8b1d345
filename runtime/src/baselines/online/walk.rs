//! Walks through evicted storages, from neighbour to neighbour.

use super::program::SeatId;
use super::simulator::{Place, Seat, World};

/// Which way dependencies are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// To what a storage is made from.
    Ancestors,
    /// To what is made from it.
    Descendants,
}

/// The scratch that a walk needs.
#[derive(Debug)]
pub(super) struct Walk {
    /// Per storage: the last walk that met it.
    met_by: Vec<u32>,
    walks: u32,
    stack: Vec<SeatId>,
}

impl Walk {
    pub(super) fn new(storages: usize) -> Self {
        Walk { met_by: vec![0; storages], walks: 0, stack: Vec::new() }
    }

    /// Tells `meet` of every storage but `from` that is reached from there, once. The walk goes on from evicted storages
    /// alone: present ones are its shore.
    pub(super) fn from(
        &mut self,
        world: &World<'_>,
        from: SeatId,
        direction: Direction,
        mut meet: impl FnMut(SeatId, &Seat),
    ) {
        self.walks += 1;
        self.met_by[from.index()] = self.walks;
        self.stack.push(from);
        while let Some(storage) = self.stack.pop() {
            let neighbours = match direction {
                Direction::Ancestors => world.program.parents(storage),
                Direction::Descendants => world.program.children(storage),
            };
            for neighbour in neighbours {
                let next = neighbour.storage;
                if neighbour.since > world.call || self.met_by[next.index()] == self.walks {
                    continue;
                }
                self.met_by[next.index()] = self.walks;
                let seat = world.seat(next);
                meet(next, seat);
                if seat.place == Place::Evicted {
                    self.stack.push(next);
                }
            }
        }
    }

    /// Cost of the evicted storages that are reached; `shore` is told of the present ones.
    pub(super) fn cost_ns(
        &mut self,
        world: &World<'_>,
        from: SeatId,
        direction: Direction,
        mut shore: impl FnMut(SeatId),
    ) -> u64 {
        let mut sum_ns = 0;
        self.from(world, from, direction, |storage, seat| match seat.place {
            Place::Present => shore(storage),
            Place::Evicted => sum_ns += seat.cost_ns,
            Place::Gone => {}
        });
        sum_ns
    }
}
