//! What operators use: it stays from when they wait for it until they have run, and what they write over holds something else then.

use super::{Fault, Live, Place, Residency};
use crate::torch::ancestry::VersionId;
use crate::torch::shim::{self, Entry, RawAccess, RawOperator};

/// What an operator under way is writing over.
pub(crate) struct Written {
    /// Which of its accesses.
    pub(super) access: usize,
    /// What the storage held.
    pub(super) version: VersionId,
}

impl Live {
    /// Whether it is in its place and as it was known when an operator last used it.
    fn is_ready_for(&self, access: &RawAccess) -> bool {
        matches!(self.place, Place::Resident)
            && self.copy.is_none()
            && self.bytes == access.bytes
            && !access.was_away()
            && !(self.filled_at.is_some() && access.is_filled())
            && (self.locked.is_some() || !access.is_locked())
    }
}

impl Residency {
    /// An operator waits for these storages to be made ready.
    pub(crate) fn begin_wait(&mut self, operator: &RawOperator) {
        for access in operator.accesses() {
            let live = self.known(access.entry, access.bytes, access.locked());
            live.awaited += 1;
            live.locked = live.locked.or(access.locked());
            let is_resized = live.bytes != access.bytes;
            // The shim could not look at what was away: that is done once it is back.
            if !access.was_away()
                && live.filled_at.take().is_some()
                && access.is_filled()
                && let Some(version) = live.version
            {
                self.ancestry.becomes_root(version);
            }
            if is_resized {
                self.resize(access.entry, access.bytes);
            }
        }
    }

    /// The storages that were away when their operator arrived, are back by now, and had been filled in past the dispatcher
    /// before they went. Asked before the operator writes, which would look the same. The shim has looked at the others.
    pub(crate) fn find_filled(&mut self, accesses: &[RawAccess]) -> Result<Vec<Entry>, Fault> {
        let mut filled = Vec::new();
        for entry in accesses.iter().filter(|access| access.was_away()).map(|access| access.entry) {
            let live = self.live_mut(entry)?;
            if !matches!(live.place, Place::Resident) {
                continue;
            }
            let (was_fresh, version) = (live.filled_at.take().is_some(), live.version);
            if shim::is_filled(entry, true)? && was_fresh {
                version.into_iter().for_each(|version| self.ancestry.becomes_root(version));
                filled.push(entry);
            }
        }
        Ok(filled)
    }

    /// The operator uses them now, or never will.
    pub(crate) fn end_wait(&mut self, entries: &[Entry]) {
        for &entry in entries {
            if let Ok(live) = self.live_mut(entry) {
                live.awaited -= 1;
            }
        }
    }

    /// Begins the use of an operator's storages where each is in its place and as it was known: nothing is to be made
    /// ready. Whether that is so.
    pub(crate) fn use_at_once(&mut self, accesses: &[RawAccess]) -> bool {
        if self.written_root(accesses).is_some() || self.is_being_read(accesses) {
            return false;
        }
        for (ready, access) in accesses.iter().enumerate() {
            let live = self.live.get_mut(access.entry.index()).and_then(Option::as_mut);
            let Some(live) = live.filter(|live| live.is_ready_for(access)) else {
                for access in &accesses[..ready] {
                    self.live[access.entry.index()].as_mut().expect("it was ready").users -= 1;
                }
                return false;
            };
            live.users += 1;
            live.filled_at = None;
        }
        true
    }

    /// Whether reruns, for another thread, are reading what `accesses` write over, or will.
    fn is_being_read(&self, accesses: &[RawAccess]) -> bool {
        let mut written = accesses.iter().filter(|access| access.mode().writes());
        let is_read = |version: VersionId| self.ancestry.version(version).is_wanted();
        self.rebuilds > 0
            && written.any(|access| self.get(access.entry).and_then(|live| live.version).is_some_and(is_read))
    }

    /// None of these storages may be evicted until their use ends.
    pub(crate) fn begin_use(&mut self, entries: &[Entry]) -> Result<(), Fault> {
        entries.iter().try_for_each(|&entry| self.live(entry).map(drop))?;
        for &entry in entries {
            self.live_mut(entry)?.users += 1;
        }
        Ok(())
    }

    /// A rerun will use the storage once its other inputs are there. Returns what [`Residency::end_await`] is to be told.
    pub(in crate::torch) fn begin_await(&mut self, entry: Entry) -> Result<(Entry, u64), Fault> {
        let live = self.live_mut(entry)?;
        live.awaited += 1;
        Ok((entry, live.serial))
    }

    /// The rerun has used them, or never will. Some may have died meanwhile, in other threads.
    pub(in crate::torch) fn end_await(&mut self, awaited: &[(Entry, u64)]) {
        for &(entry, serial) in awaited {
            if let Ok(live) = self.live_mut(entry)
                && live.serial == serial
            {
                live.awaited -= 1;
            }
        }
    }

    /// Whether all of them are resident.
    pub(crate) fn are_resident(&self, entries: &[Entry]) -> bool {
        entries.iter().all(|&entry| self.get(entry).is_some_and(|live| matches!(live.place, Place::Resident)))
    }

    /// What the first dropped one of them held.
    pub(crate) fn first_dropped(&self, entries: &[Entry]) -> Option<VersionId> {
        let mut dropped = entries.iter().filter_map(|&entry| self.get(entry));
        dropped.find(|live| matches!(live.place, Place::Dropped)).and_then(|live| live.version)
    }

    /// The operator that used them has run, or will not run.
    pub(crate) fn end_use(&mut self, entries: impl Iterator<Item = Entry>) {
        let last_use_ns = self.clock_ns;
        for entry in entries {
            if let Some(live) = self.live.get_mut(entry.index()).and_then(Option::as_mut) {
                live.users -= 1;
                live.last_use_ns = last_use_ns;
            }
        }
    }

    /// A dropped storage that must be restored before `accesses` write what it is rebuilt from: where what was made from that
    /// stands in storages of its own, those serve in its stead.
    pub(crate) fn at_risk(&mut self, accesses: &[RawAccess]) -> Result<Option<VersionId>, Fault> {
        while let Some(root) = self.written_root(accesses) {
            if !self.let_go(root)? {
                return Ok(self.ancestry.dependent(root, self.dropped.iter().copied()));
            }
        }
        Ok(None)
    }

    /// What `accesses` write over, and dropped storages are to be rebuilt from.
    fn written_root(&self, accesses: &[RawAccess]) -> Option<VersionId> {
        if self.dropped.is_empty() {
            return None;
        }
        let written = accesses.iter().filter(|access| access.mode().writes());
        let mut versions = written.filter_map(|access| self.get(access.entry)?.version);
        versions.find(|&version| self.ancestry.is_held(version))
    }

    /// The operator is about to write: from now on nothing can be rebuilt from what its storages held. Says in `written`
    /// what that was.
    pub(crate) fn begin_writes(
        &mut self,
        accesses: &[RawAccess],
        keeps_recipe: bool,
        written: &mut Vec<Written>,
    ) -> Result<(), Fault> {
        written.clear();
        if !accesses.iter().any(|access| access.mode().writes()) {
            return Ok(());
        }
        for (access, item) in accesses.iter().enumerate().filter(|(_, item)| item.mode().writes()) {
            if keeps_recipe {
                self.version_of(item.entry)?;
            }
            if let Some(version) = self.live_mut(item.entry)?.version.take() {
                self.ancestry.lose(version);
                self.ancestry.version_mut(version).wanted += 1;
                written.push(Written { access, version });
            }
        }
        self.take_custody()
    }

    /// The operator has written, or failed.
    pub(crate) fn end_writes(&mut self, written: &[Written]) {
        for &Written { version, .. } in written {
            self.ancestry.version_mut(version).wanted -= 1;
        }
    }
}
