//! What comes before a program and after it, and what is away between them.

use std::collections::HashSet;

use super::Program;
use crate::lineage::Edges;
use crate::torch::shim::Entry;
use crate::trace::StorageId;

/// What follows an iteration, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Follows {
    /// Code that nobody listens to: it finds everything resident.
    Unheard,
    /// The iteration's next part.
    Part,
    /// The loop's next iteration, all of which is listened to.
    Iteration,
}

/// What a program may leave away when it ends, and what comes next finds so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Leaves {
    /// What it does not use: it is a part of an iteration that goes on.
    Unused,
    /// Whatever is there all the time: it is the last part of an iteration that another one follows.
    Lasting,
}

/// What is known of what comes before a program and after it.
#[derive(Debug, Default)]
pub(super) struct Neighbours {
    /// What all that came just before it may have left away, in order: nothing, once it came after code that nobody listens to. None
    /// while nobody knows.
    left_before: Option<Vec<StorageId>>,
    /// What of it may still be leaving when the program begins.
    leaving: Leaving,
    /// What the program may leave away itself, as far as it was seen what follows.
    leaves: Option<Leaves>,
}

/// What may still be leaving when a program begins. It depends on plans, which depend on it, and may never settle: so it grows at
/// once, and shrinks ever more rarely; and only then is its order another one. What a plan takes for leaving, and is gone, is no harm.
#[derive(Debug, Default)]
struct Leaving {
    /// In the order in which they leave.
    storages: Vec<StorageId>,
    /// How often it was less in a row, and how often that has to be.
    less: u32,
    patience: u32,
}

impl Leaving {
    /// These were, in the order in which they left.
    fn note(&mut self, now: Vec<StorageId>) {
        let is_new = |storage: &StorageId| !self.storages.contains(storage);
        let is_less = !now.iter().any(is_new) && now.len() < self.storages.len();
        self.less = if is_less { self.less + 1 } else { 0 };
        if now.iter().any(is_new) {
            // What has gone already went first.
            let gone = self.storages.iter().copied().filter(|storage| !now.contains(storage));
            self.storages = gone.chain(now.iter().copied()).collect();
        }
        if self.less > self.patience {
            self.patience = 2 * (self.patience + 1);
            (self.storages, self.less) = (now, 0);
        }
    }
}

impl Program {
    /// A storage that was expected to be unused and there is not, or may not be evicted any more.
    pub(crate) fn miss(&mut self, storage: StorageId) {
        if self.is_unused[storage.index()] {
            self.missed.push(storage);
        }
    }

    /// What it was expected to leave unused and is not the same any more, and all else of these sizes, which may be the next: of several
    /// batches that are there all the time, say.
    pub(crate) fn take_missed(&mut self) -> Vec<StorageId> {
        let missed = std::mem::take(&mut self.missed);
        if missed.is_empty() {
            return missed;
        }
        let storages = &self.trace().storages;
        let bytes = |storage: StorageId| storages[storage.index()].bytes;
        let alike = |storage: &StorageId| missed.iter().any(|&missed| bytes(missed) == bytes(*storage));
        let unused = (0..).map(StorageId).take(storages.len()).filter(|storage| self.is_unused[storage.index()]);
        let missed: Vec<StorageId> = unused.filter(alike).collect();
        for storage in &missed {
            self.is_unused[storage.index()] = false;
            self.is_lasting[storage.index()] = false;
        }
        missed
    }

    /// What it may leave away when it ends.
    pub(crate) fn leavable(&self) -> impl Iterator<Item = (StorageId, Entry)> {
        let storages = (0..self.initial() as u32).map(StorageId).filter(|&storage| self.may_leave(storage));
        storages.filter_map(|storage| Some((storage, self.entry(storage)?)))
    }

    fn may_leave(&self, storage: StorageId) -> bool {
        match self.neighbours.leaves {
            None => false,
            Some(Leaves::Unused) => self.is_unused[storage.index()],
            Some(Leaves::Lasting) => self.is_lasting[storage.index()],
        }
    }

    /// How it stands to what comes before it and after, where these storages are away in between.
    pub(crate) fn edges(&self, away: &[Entry]) -> Edges {
        let mut storages: Vec<StorageId> = away.iter().filter_map(|&entry| self.standing.storage(entry)).collect();
        storages.sort_unstable();
        let left_before = self.neighbours.left_before.as_deref().unwrap_or_default();
        let (mut away, mut stays) = (storages.clone(), storages);
        away.retain(|storage| left_before.binary_search(storage).is_ok());
        stays.retain(|&storage| self.may_leave(storage));
        Edges { away, leaving: Vec::new(), stays }.with_leaving(&self.neighbours.leaving.storages)
    }

    /// What comes before it and after is not what it was.
    pub(crate) fn forget_neighbours(&mut self) {
        self.neighbours = Neighbours::default();
    }

    /// What it may leave away itself, as far as it was seen what follows.
    pub(crate) fn leaves(&self) -> Option<Leaves> {
        self.neighbours.leaves
    }

    /// Whether it was seen what comes before it.
    pub(crate) fn knows_before(&self) -> bool {
        self.neighbours.left_before.is_some()
    }

    /// What came before it may have left these away, of which those that are `leaving` were still on their way.
    pub(crate) fn comes_after(&mut self, left: &[Entry], leaving: &[Entry]) {
        let known = |entries: &[Entry]| -> Vec<StorageId> {
            let storages = entries.iter().filter_map(|&entry| self.standing.storage(entry));
            storages.filter(|storage| storage.index() < self.initial()).collect()
        };
        let (mut left, leaving) = (known(left), known(leaving));
        left.sort_unstable();
        if let Some(before) = &self.neighbours.left_before {
            left.retain(|storage| before.binary_search(storage).is_ok());
        }
        self.neighbours.left_before = Some(left);
        self.neighbours.leaving.note(leaving);
    }

    /// That is what follows it now.
    pub(crate) fn comes_before(&mut self, follows: Follows) {
        let leaves = match follows {
            Follows::Unheard => return,
            Follows::Part => Leaves::Unused,
            Follows::Iteration => Leaves::Lasting,
        };
        self.neighbours.leaves = Some(self.neighbours.leaves.map_or(leaves, |before| before.min(leaves)));
    }

    /// Whether that is what its plan has for away when it begins, and for leaving.
    pub(crate) fn begins_without(&self, (away, leaving): &(Vec<Entry>, Vec<Entry>)) -> bool {
        let edges = self.ladder.rung().known.lineage.edges();
        let are_expected = |entries: &[Entry], expected: &[StorageId]| {
            let expected: HashSet<StorageId> = expected.iter().copied().collect();
            let is_expected =
                |entry: &Entry| self.standing.storage(*entry).is_some_and(|storage| expected.contains(&storage));
            entries.len() == expected.len() && entries.iter().all(is_expected)
        };
        are_expected(away, &edges.away) && are_expected(leaving, &edges.leaving)
    }

    /// Whether its plan leaves anything away when it ends.
    pub(crate) fn leaves_any(&self) -> bool {
        !self.ladder.rung().known.lineage.edges().stays.is_empty()
    }

    /// Whether its plan leaves a storage away when it ends.
    pub(crate) fn stays(&self, entry: Entry) -> bool {
        let stays = &self.ladder.rung().known.lineage.edges().stays;
        self.standing.storage(entry).is_some_and(|storage| stays.binary_search(&storage).is_ok())
    }
}
