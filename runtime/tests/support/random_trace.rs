//! Small lawful traces, drawn at random: every kind of access, every kind of end, sizes on both sides of the floor.

use plimsoll_runtime::Trace;
use plimsoll_runtime::lineage::EVICTION_FLOOR_BYTES;
use plimsoll_runtime::trace::{Access, AccessMode, Class, Operator, Phase, Storage, StorageId};

use super::draw::Draw;

/// How likely things are in one trace: drawn once, so that traces differ in kind and not only in detail.
struct Temper {
    write: u64,
    overwrite: u64,
    side_effect: u64,
    not_replayable: u64,
    free: u64,
    /// Chance that an input is a recent storage and not any.
    recent: u64,
    locked: u64,
    idle_operators: u64,
}

impl Temper {
    fn draw(draw: &mut Draw) -> Self {
        Temper {
            write: draw.pick(&[0, 10, 30]),
            overwrite: draw.pick(&[0, 5, 10]),
            side_effect: draw.pick(&[0, 5, 10]),
            not_replayable: draw.pick(&[0, 5, 20]),
            free: draw.pick(&[5, 15, 30]),
            recent: draw.pick(&[0, 40, 80]),
            locked: draw.pick(&[0, 0, 10]),
            idle_operators: draw.pick(&[0, 20]),
        }
    }

    fn mode(&self, draw: &mut Draw) -> AccessMode {
        let dice = draw.below(100);
        let (write, overwrite) = (self.write, self.write + self.overwrite);
        match dice {
            _ if dice < write => AccessMode::Write,
            _ if dice < overwrite => AccessMode::Overwrite,
            _ if dice < overwrite + self.side_effect => AccessMode::SideEffect,
            _ => AccessMode::Read,
        }
    }
}

struct Generator<'a> {
    draw: &'a mut Draw,
    temper: Temper,
    storages: Vec<Storage>,
    alive: Vec<StorageId>,
}

/// A trace of at most `operators_max` operators.
pub fn random_trace(draw: &mut Draw, operators_max: u64) -> Trace {
    let temper = Temper::draw(draw);
    let mut generator = Generator { draw, temper, storages: Vec::new(), alive: Vec::new() };
    let initial_storages = generator.draw.below(7) as u32;
    for _ in 0..initial_storages {
        generator.storage();
    }
    let operators = (0..generator.draw.within(1, operators_max)).map(|_| generator.operator()).collect();
    let carried = generator.carried(initial_storages);
    let trace = Trace {
        workload: "random".into(),
        family: "random".into(),
        device: "none".into(),
        recorded_iterations: 1,
        unseen_bytes: generator.draw.pick(&[0, 12_345]),
        tail_ns: generator.draw.below(500),
        makespan_ns: 0,
        peak_bytes: 0,
        names: vec!["a".into(), "b".into()],
        storages: generator.storages,
        initial_storages,
        operators,
        carried,
    };
    trace.check().expect("generated traces are lawful");
    trace
}

impl Generator<'_> {
    fn storage(&mut self) -> StorageId {
        let floor = EVICTION_FLOOR_BYTES;
        let bytes = match self.draw.below(10) {
            0 => self.draw.below(floor),
            1 => floor,
            2..6 => self.draw.within(floor, 4 * floor),
            _ => self.draw.within(4 * floor, 80 * floor),
        };
        let locked = self.draw.chance(self.temper.locked).then(|| "drawn so".to_owned());
        let storage = StorageId(self.storages.len() as u32);
        self.storages.push(Storage { bytes, class: Class::Temporary, locked });
        self.alive.push(storage);
        storage
    }

    fn accesses(&mut self) -> Vec<Access> {
        let mut accesses: Vec<Access> = Vec::new();
        for _ in 0..self.draw.below(5) {
            if self.alive.is_empty() {
                break;
            }
            let count = self.alive.len() as u64;
            let from = if self.draw.chance(self.temper.recent) { count.saturating_sub(4) } else { 0 };
            let storage = self.alive[self.draw.within(from, count - 1) as usize];
            if accesses.iter().all(|access| access.storage != storage) {
                accesses.push(Access { storage, mode: self.temper.mode(self.draw) });
            }
        }
        accesses
    }

    fn operator(&mut self) -> Operator {
        let idle = self.draw.chance(self.temper.idle_operators);
        let accesses = if idle { Vec::new() } else { self.accesses() };
        let creates = (0..self.draw.pick(&[0, 1, 1, 1, 2, 3])).map(|_| self.storage()).collect();
        let mut frees = Vec::new();
        while !self.alive.is_empty() && self.draw.chance(self.temper.free) {
            let victim = self.draw.below(self.alive.len() as u64) as usize;
            frees.push(self.alive.remove(victim));
        }
        Operator {
            name: self.draw.below(2) as u32,
            phase: self.draw.pick(&[Phase::Forward, Phase::Forward, Phase::Backward, Phase::Update]),
            cost_ns: self.draw.pick(&[0, 100, 700, 5_000]) + self.draw.below(100),
            spread_ns: 0,
            gap_ns: self.draw.pick(&[0, 0, 20, 3_000]),
            workspace_bytes: self.draw.pick(&[0, 0, 3_000, 100_000]),
            accesses,
            creates,
            frees,
            not_replayable: self.draw.chance(self.temper.not_replayable).then(|| "drawn so".to_owned()),
        }
    }

    /// Survivors that take the names of initial storages that were freed.
    fn carried(&self, initial_storages: u32) -> Vec<(StorageId, StorageId)> {
        let freed = (0..initial_storages).map(StorageId).filter(|storage| !self.alive.contains(storage));
        self.alive.iter().copied().filter(|storage| storage.0 >= initial_storages).zip(freed).collect()
    }
}
