use super::heuristic::{Heuristic, per};
use super::program::{Program, SeatId};
use super::simulator::World;

const NO_CLASS: u32 = u32::MAX;

/// DTR's score with ẽ*, the neighbourhood as classes of evicted storages that touch (DTR, h_DTR-eq).
///
/// A class is never split: a storage that is rebuilt only takes its own cost away. So a class may cost less than what
/// is in it, as in the paper, and even less than nothing.
pub(super) struct DtrEq {
    /// Per storage: its class while it is evicted.
    class: Vec<u32>,
    /// Per class: the class that it was merged into, or itself.
    merged_into: Vec<u32>,
    cost_ns: Vec<i64>,
    /// Classes met while one storage is scored.
    met: Vec<u32>,
}

impl DtrEq {
    pub(super) fn new(program: &Program) -> Self {
        let storages = program.bytes.len();
        DtrEq { class: vec![NO_CLASS; storages], merged_into: Vec::new(), cost_ns: Vec::new(), met: Vec::new() }
    }

    /// Gives `storage` a class of its own.
    fn open(&mut self, storage: SeatId, cost_ns: u64) -> u32 {
        let class = self.merged_into.len() as u32;
        self.merged_into.push(class);
        self.cost_ns.push(cost_ns as i64);
        self.class[storage.index()] = class;
        class
    }

    fn class_of(&mut self, storage: SeatId) -> u32 {
        let mut class = self.class[storage.index()];
        while self.merged_into[class as usize] != class {
            let above = self.merged_into[class as usize];
            self.merged_into[class as usize] = self.merged_into[above as usize];
            class = above;
        }
        class
    }
}

impl Heuristic for DtrEq {
    fn created(&mut self, _world: &World<'_>, storage: SeatId) {
        self.open(storage, 0);
    }

    fn evicted(&mut self, world: &World<'_>, storage: SeatId) {
        let own = self.open(storage, world.seat(storage).cost_ns);
        for neighbour in world.evicted_neighbours(storage) {
            let other = self.class_of(neighbour);
            if other != own {
                self.merged_into[other as usize] = own;
                self.cost_ns[own as usize] += self.cost_ns[other as usize];
            }
        }
    }

    fn materialised(&mut self, world: &World<'_>, storage: SeatId) {
        let class = self.class_of(storage);
        self.cost_ns[class as usize] -= world.seat(storage).cost_ns as i64;
        self.class[storage.index()] = NO_CLASS;
    }

    fn score(&mut self, world: &World<'_>, storage: SeatId) -> f64 {
        let mut cost_ns = world.seat(storage).cost_ns as i64;
        self.met.clear();
        for neighbour in world.evicted_neighbours(storage) {
            let class = self.class_of(neighbour);
            if !self.met.contains(&class) {
                self.met.push(class);
                cost_ns += self.cost_ns[class as usize];
            }
        }
        per(cost_ns, world.bytes_and_staleness(storage))
    }
}
