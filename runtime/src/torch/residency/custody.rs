//! What is held alive, because dropped storages are to be rebuilt from it.

use super::{Fault, Residency};
use crate::torch::ancestry::{Custody, VersionId};
use crate::torch::shim::{self, Entry};

impl Residency {
    pub(in crate::torch) fn take_custody(&mut self) -> Result<(), Fault> {
        match self.ancestry.has_custody() {
            true => self.carry_out_custody(),
            false => Ok(()),
        }
    }

    fn carry_out_custody(&mut self) -> Result<(), Fault> {
        let mut taken = Ok(());
        for custody in self.ancestry.take_custody() {
            match custody {
                Custody::Hold(entry) => match shim::hold(entry) {
                    Ok(()) => _ = self.held.insert(entry),
                    Err(error) => {
                        // It has died, and nobody has been told yet: in another thread, or as what libtorch's allocator did
                        // not give out.
                        if let Some(version) = self.get(entry).and_then(|live| live.version) {
                            self.ancestry.lose(version);
                        }
                        taken = Err(error.into());
                    }
                },
                Custody::Unhold(entry) => {
                    self.held.remove(&entry);
                    if self.get(entry).is_some() {
                        shim::unhold(entry)?;
                    }
                }
            }
        }
        taken
    }

    /// Whether what stands is held for dropped storages though it could be made again, for a program that is followed tells when it
    /// lets go of that; roots alone otherwise. Returns whether anything was let go of.
    pub(crate) fn hold_near(&mut self, near: bool) -> Result<bool, Fault> {
        let held = self.ancestry.hold_near(near);
        if held.is_empty() {
            return Ok(false);
        }
        let (mut is_read, mut gone) = (false, Ok(true));
        for version in held {
            if self.ancestry.version(version).is_wanted() {
                is_read = true;
            } else if let Err(fault) = self.hold_above(version) {
                gone = Err(fault);
            }
        }
        if is_read {
            // A rerun in another thread is about to. What it reads is looked at again when the next operator arrives.
            self.ancestry.hold_near(true);
        }
        gone
    }

    /// Holds what a version is made from in its stead, if it is held though it could be made again. Whether it was.
    pub(in crate::torch) fn hold_above(&mut self, version: VersionId) -> Result<bool, Fault> {
        while self.ancestry.anchor_above(version) {
            // Something of it may have died meanwhile, in another thread.
            let is_anchored = self.take_custody().is_ok();
            self.ancestry.let_go(version, is_anchored);
            self.take_custody()?;
            if is_anchored {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// What a storage holds is about to go. Where dropped storages are to be rebuilt from it, what it is made from is held in its stead,
    /// or what was made from it. Whether they can do without it.
    pub(super) fn let_go(&mut self, version: VersionId) -> Result<bool, Fault> {
        if !self.ancestry.is_held(version) {
            return Ok(true);
        }
        // A rerun, in another thread perhaps, is to read it where it stands.
        if self.ancestry.version(version).is_wanted() {
            return Ok(false);
        }
        if self.hold_above(version)? {
            return Ok(true);
        }
        let Some(heirs) = self.ancestry.heirs(version) else { return Ok(false) };
        let entries: Vec<Entry> = heirs.iter().map(|&(_, heir)| self.ancestry.version(heir).entry).collect();
        for (held, &entry) in entries.iter().enumerate() {
            if shim::hold(entry).is_err() {
                // It has died, in another thread.
                entries[..held].iter().try_for_each(|&other| shim::unhold(other))?;
                self.has_died(entry)?;
                return Ok(false);
            }
        }
        self.ancestry.relinquish(heirs);
        self.take_custody()?;
        // Some of them are not wanted after all.
        entries.into_iter().filter(|entry| !self.held.contains(entry)).try_for_each(shim::unhold)?;
        Ok(true)
    }

    /// The program has let go of a storage that is held for dropped ones: it goes, where they can do without it. Whether nothing was
    /// using it, so that this could be looked at.
    pub(crate) fn relinquish(&mut self, entry: Entry) -> Result<bool, Fault> {
        let live = self.live(entry)?;
        let is_wanted = live.version.is_some_and(|version| self.ancestry.version(version).is_wanted());
        let is_used = live.users + live.awaited > 0 || is_wanted;
        if let Some(version) = live.version.filter(|_| !is_used) {
            self.let_go(version)?;
        }
        Ok(!is_used)
    }
}
