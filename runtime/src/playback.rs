//! Playback: what a schedule does beside its trace, event by event, in the order in which an executor does it.
//!
//! Allocator models listen to the blocks, the clock to the copies and the operators. Playback follows residency alone:
//! it knows nothing of time, of links or of budgets, and takes the schedule to be lawful.

use std::collections::HashSet;

use crate::hardware::Tier;
use crate::lineage::{Lineage, VersionId};
use crate::schedule::{Instruction, Schedule};
use crate::timeline::Residency;
use crate::trace::{AccessMode, OperatorId, StorageId, Trace};

/// One allocation, from the moment it is made until it is freed: a storage that is evicted and restored stands in
/// another block afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

impl BlockId {
    /// As an index into per-block arrays.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a block holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occupant {
    /// Bytes that no operator of the iteration touches: one block, since the trace does not say how many they are.
    Unseen,
    /// A storage, in its place or beside it.
    Storage(StorageId),
    /// What an operator allocates and frees before it returns.
    Workspace(OperatorId),
}

/// One thing that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// The program comes to the operator where the playback stands, or to the iteration's end.
    Arrive,
    /// Device bytes are allocated.
    Allocate {
        /// The new block.
        block: BlockId,
        /// What is put there.
        occupant: Occupant,
        /// How large it is; never 0.
        bytes: u64,
    },
    /// Device bytes are freed.
    Free(BlockId),
    /// Copies to a slow tier start: one storage, or several that move as one slab.
    Offload {
        /// What is copied, in order.
        storages: &'a [StorageId],
        /// Where to.
        tier: Tier,
    },
    /// A storage is in a slow tier from the start on.
    LeaveAway {
        /// What is away.
        storage: StorageId,
        /// Where it is.
        tier: Tier,
    },
    /// Copies back start: one storage, or several that move in one copy. Their blocks are allocated.
    Prefetch {
        /// What is copied, in order.
        storages: &'a [StorageId],
    },
    /// Compute waits for the copy of this storage that is under way.
    Await {
        /// What is copied.
        storage: StorageId,
        /// Why it waits.
        wait: Wait,
    },
    /// Bytes are given up that can be restored: a copy of them is in a slow tier.
    Discard(StorageId),
    /// Bytes are given up that can be restored: a rerun makes them.
    Drop(StorageId),
    /// The program runs the operator where the playback stands.
    Run,
    /// An operator is rerun.
    Rerun(OperatorId),
}

/// Why compute waits for a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The bytes that an offload leaves are needed.
    Memory,
    /// The program lets go of a storage that is still being copied.
    Freed,
    /// The program wants the storage.
    Data,
}

struct Playback<'a, H> {
    trace: &'a Trace,
    lineage: &'a Lineage,
    hear: H,
    operator: usize,
    blocks: u32,
    /// Versions so far: they are numbered in order of production.
    versions: u32,
    /// Per storage.
    residency: Vec<Residency>,
    held: Vec<Option<BlockId>>,
    current: Vec<VersionId>,
    /// Per version: its block beside its storage.
    beside: Vec<Option<BlockId>>,
}

/// Plays one iteration of `trace` under `schedule`. `hear` is told the operator index and the event.
pub fn play(trace: &Trace, lineage: &Lineage, schedule: &Schedule, hear: impl FnMut(usize, Event<'_>)) {
    let storages = trace.storages.len();
    let mut playback = Playback {
        trace,
        lineage,
        hear,
        operator: 0,
        blocks: 0,
        versions: 0,
        residency: vec![Residency::Absent; storages],
        held: vec![None; storages],
        current: vec![VersionId(u32::MAX); storages],
        beside: vec![None; lineage.versions().len()],
    };
    playback.begin(schedule);
    let mut steps = schedule.steps();
    for index in 0..=trace.operators.len() {
        playback.operator = index;
        playback.tell(Event::Arrive);
        let here = steps.partition_point(|&(before, _)| before as usize <= index);
        let (now, later) = steps.split_at(here);
        steps = later;
        playback.carry_out(now);
        if index < trace.operators.len() {
            playback.run();
        }
    }
}

impl<H: FnMut(usize, Event<'_>)> Playback<'_, H> {
    fn tell(&mut self, event: Event<'_>) {
        (self.hear)(self.operator, event);
    }

    fn next_version(&mut self) -> VersionId {
        self.versions += 1;
        VersionId(self.versions - 1)
    }

    fn allocate(&mut self, occupant: Occupant, bytes: u64) -> Option<BlockId> {
        if bytes == 0 {
            return None;
        }
        let block = BlockId(self.blocks);
        self.blocks += 1;
        self.tell(Event::Allocate { block, occupant, bytes });
        Some(block)
    }

    fn allocate_storage(&mut self, storage: StorageId) -> Option<BlockId> {
        self.allocate(Occupant::Storage(storage), self.trace.storages[storage.index()].bytes)
    }

    fn free(&mut self, block: Option<BlockId>) {
        if let Some(block) = block {
            self.tell(Event::Free(block));
        }
    }

    fn begin(&mut self, schedule: &Schedule) {
        self.allocate(Occupant::Unseen, self.trace.unseen_bytes);
        let at_once = schedule.steps().iter().take_while(|(before, _)| *before == 0);
        let away: HashSet<StorageId> = at_once
            .filter_map(|(_, step)| match *step {
                Instruction::LeaveAway { storage, .. } => Some(storage),
                _ => None,
            })
            .collect();
        for storage in (0..self.trace.initial_storages).map(StorageId) {
            if !away.contains(&storage) {
                self.held[storage.index()] = self.allocate_storage(storage);
            }
            self.residency[storage.index()] = Residency::Resident;
            self.current[storage.index()] = self.next_version();
        }
    }

    fn carry_out(&mut self, mut steps: &[(u32, Instruction)]) {
        let mut slab = Vec::new();
        while let Some((&(_, first), _)) = steps.split_first() {
            let joined = |instruction: &Instruction| {
                matches!(
                    instruction,
                    Instruction::Offload { joins: true, .. } | Instruction::Prefetch { joins: true, .. }
                )
            };
            let together = 1 + steps[1..].iter().take_while(|(_, instruction)| joined(instruction)).count();
            let (now, later) = steps.split_at(together);
            steps = later;
            slab.clear();
            slab.extend(now.iter().filter_map(|(_, instruction)| match *instruction {
                Instruction::Offload { storage, .. } | Instruction::Prefetch { storage, .. } => Some(storage),
                _ => None,
            }));
            match first {
                Instruction::Offload { tier, .. } => self.offload(&slab, tier),
                Instruction::Prefetch { .. } => self.prefetch(&slab),
                other => self.step(other),
            }
        }
    }

    fn offload(&mut self, storages: &[StorageId], tier: Tier) {
        self.tell(Event::Offload { storages, tier });
        for storage in storages {
            self.residency[storage.index()] = Residency::Offloading;
        }
    }

    fn prefetch(&mut self, storages: &[StorageId]) {
        for &storage in storages {
            self.held[storage.index()] = self.allocate_storage(storage);
            self.residency[storage.index()] = Residency::Prefetching;
        }
        self.tell(Event::Prefetch { storages });
    }

    fn step(&mut self, instruction: Instruction) {
        match instruction {
            Instruction::Offload { .. } | Instruction::Prefetch { .. } => unreachable!("they are carried out together"),
            Instruction::LeaveAway { storage, tier } => {
                self.tell(Event::LeaveAway { storage, tier });
                self.vacate(storage, Residency::Offloaded);
            }
            Instruction::FinishOffload(storage) => {
                self.tell(Event::Await { storage, wait: Wait::Memory });
                self.vacate(storage, Residency::Offloaded);
            }
            Instruction::Recall(storage) | Instruction::FinishPrefetch(storage) => {
                self.tell(Event::Await { storage, wait: Wait::Data });
                self.residency[storage.index()] = Residency::Resident;
            }
            Instruction::Discard(storage) => {
                self.tell(Event::Discard(storage));
                self.vacate(storage, Residency::Offloaded);
            }
            Instruction::Drop(storage) => {
                self.tell(Event::Drop(storage));
                self.vacate(storage, Residency::Dropped);
            }
            Instruction::Rerun(operator) => self.rerun(operator),
            Instruction::Release(version) => {
                let block = self.beside[version.index()].take();
                self.free(block);
            }
        }
    }

    fn vacate(&mut self, storage: StorageId, residency: Residency) {
        let block = self.held[storage.index()].take();
        self.free(block);
        self.residency[storage.index()] = residency;
    }

    /// Runs `operator`, whose outputs are allocated, or reruns it, as `event` says.
    fn work(&mut self, operator: OperatorId, event: Event<'_>) {
        let bytes = self.trace.operators[operator.index()].workspace_bytes;
        let workspace = self.allocate(Occupant::Workspace(operator), bytes);
        self.tell(event);
        self.free(workspace);
    }

    fn rerun(&mut self, operator: OperatorId) {
        let lineage = self.lineage;
        let storage_of = |version: VersionId| lineage.version(version).storage;
        let mut made = Vec::new();
        for &output in lineage.replay_outputs(operator) {
            let inputs = lineage.replay_inputs(operator);
            // Where the operator writes in place, the version that it reads becomes the one that it makes.
            let consumed = inputs.iter().find(|&&input| storage_of(input) == storage_of(output));
            let block = match consumed {
                Some(input) => self.beside[input.index()].take(),
                None => self.allocate_storage(storage_of(output)),
            };
            made.push((output, block));
        }
        self.work(operator, Event::Rerun(operator));
        for (output, block) in made {
            let storage = storage_of(output).index();
            if self.residency[storage] == Residency::Dropped && self.current[storage] == output {
                (self.residency[storage], self.held[storage]) = (Residency::Resident, block);
            } else {
                self.beside[output.index()] = block;
            }
        }
    }

    fn run(&mut self) {
        let trace = self.trace;
        let operator = &trace.operators[self.operator];
        for &storage in &operator.creates {
            self.held[storage.index()] = self.allocate_storage(storage);
            self.residency[storage.index()] = Residency::Resident;
        }
        self.work(OperatorId(self.operator as u32), Event::Run);
        let written = operator.accesses.iter().filter(|access| access.mode.writes()).map(|access| access.storage);
        for storage in written.chain(operator.creates.iter().copied()) {
            self.current[storage.index()] = self.next_version();
        }
        debug_assert!(operator.accesses.iter().all(|access| {
            access.mode == AccessMode::Read || self.residency[access.storage.index()] == Residency::Resident
        }));
        for &storage in &operator.frees {
            if self.residency[storage.index()] == Residency::Offloading {
                self.tell(Event::Await { storage, wait: Wait::Freed });
            }
            self.vacate(storage, Residency::Absent);
        }
    }
}
