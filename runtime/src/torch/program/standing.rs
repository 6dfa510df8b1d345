//! Which storages stand for those of the trace, and where the trace uses them.

use crate::torch::shim::{Entry, RawOperator};
use crate::trace::{StorageId, Trace};

/// What the trace calls an operator.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Name {
    /// Nobody has looked yet.
    #[default]
    Unseen,
    /// It does not occur.
    Absent,
    /// Its place among the names.
    At(u32),
}

/// Which storages stand for those of the trace.
pub(super) struct Standing {
    /// By the trace's number.
    entry: Vec<Option<Entry>>,
    /// By the shim's.
    storage: Vec<Option<StorageId>>,
    /// What will stand for the first ones in the next iteration: kept for the room that it has.
    next: Vec<Option<Entry>>,
}

impl Standing {
    /// None, for none of so many.
    pub(super) fn of(storages: usize) -> Self {
        Standing { entry: vec![None; storages], storage: Vec::new(), next: Vec::new() }
    }

    /// What stands for every one of the trace.
    pub(super) fn entries(&self) -> &[Option<Entry>] {
        &self.entry
    }

    pub(super) fn entry(&self, storage: StorageId) -> Option<Entry> {
        self.entry[storage.index()]
    }

    pub(super) fn storage(&self, entry: Entry) -> Option<StorageId> {
        self.storage.get(entry.index()).copied().flatten()
    }

    pub(super) fn put(&mut self, entry: Entry, storage: StorageId) {
        self.entry[storage.index()] = Some(entry);
        put(&mut self.storage, entry.index(), Some(storage));
    }

    /// The same where either may have been taken for another.
    pub(super) fn correct(&mut self, entry: Entry, storage: StorageId) {
        self.remove(entry);
        if let Some(before) = self.entry(storage) {
            self.remove(before);
        }
        self.put(entry, storage);
    }

    pub(super) fn remove(&mut self, entry: Entry) {
        if let Some(storage) = self.storage.get_mut(entry.index()).and_then(Option::take) {
            self.entry[storage.index()] = None;
        }
    }

    /// Leaves but those that stand for the `initial` first storages; for those that one is carried to, what stands for that one, where the
    /// iteration `completed`.
    pub(super) fn hand_over(&mut self, initial: usize, carried: &[(StorageId, StorageId)], completed: bool) {
        let mut next = std::mem::take(&mut self.next);
        next.clear();
        next.extend_from_slice(&self.entry[..initial]);
        for &(_, to) in carried {
            next[to.index()] = None;
        }
        if completed {
            for &(from, to) in carried {
                next[to.index()] = self.entry(from);
            }
        }
        self.entry.fill(None);
        self.storage.fill(None);
        for (index, entry) in (0..).zip(&next) {
            if let Some(entry) = *entry {
                self.put(entry, StorageId(index));
            }
        }
        self.next = next;
    }
}

/// Where a program uses which storage.
pub(super) struct Uses {
    /// Per storage: operators, in order.
    operators: Vec<Vec<u32>>,
    /// Per storage: whether one of them writes to it.
    is_written: Vec<bool>,
}

impl Uses {
    pub(super) fn of(trace: &Trace) -> Self {
        let storages = trace.storages.len();
        let mut uses = Uses { operators: vec![Vec::new(); storages], is_written: vec![false; storages] };
        for (index, operator) in (0..).zip(&trace.operators) {
            for access in &operator.accesses {
                uses.operators[access.storage.index()].push(index);
                uses.is_written[access.storage.index()] |= access.mode.writes();
            }
        }
        uses
    }

    /// Whether any operator writes to a storage.
    pub(super) fn writes(&self, storage: StorageId) -> bool {
        self.is_written[storage.index()]
    }

    /// The first operator, from that place on, that does the same as `operator` to the same storages, as far as these are known; at
    /// least one has to be.
    pub(super) fn next(
        &self,
        from: usize,
        trace: &Trace,
        standing: &Standing,
        name: Name,
        operator: &RawOperator,
    ) -> Option<usize> {
        let is_same = |index: u32| {
            let expected = &trace.operators[index as usize];
            let mut pairs = operator.accesses().iter().zip(&expected.accesses);
            Name::At(expected.name) == name
                && operator.accesses().len() == expected.accesses.len()
                && pairs.all(|(found, access)| {
                    let stands = standing.entry(access.storage);
                    found.mode() == access.mode && stands.is_none_or(|stands| stands == found.entry)
                })
        };
        let known = operator.accesses().iter().filter_map(|found| standing.storage(found.entry));
        let firsts = known.filter_map(|storage| {
            let all = &self.operators[storage.index()];
            let to_come = &all[all.partition_point(|&index| (index as usize) < from)..];
            to_come.iter().copied().find(|&index| is_same(index))
        });
        firsts.min().map(|index| index as usize)
    }
}

/// Puts an item into its place in a table that grows.
pub(in crate::torch) fn put<T: Clone + Default>(table: &mut Vec<T>, index: usize, item: T) {
    if table.len() <= index {
        table.resize(index + 1, T::default());
    }
    table[index] = item;
}
