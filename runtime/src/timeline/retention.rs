//! What stays on the device although nothing uses it just now, until its memory is needed, and how memory is found.

use super::{
    NO_WINDOW, OnPressure, PendingOffload, Pressed, RETAIN_DEPTH, Residency, Retained, RetainedEntry, Stopped,
    Timeline, clamped,
};
use crate::lineage::{VersionId, WindowId};
use crate::observation::Wait;
use crate::plan::{Action, ActionSet};
use crate::schedule::Instruction;

impl Timeline<'_> {
    /// Keeps restored bytes for as long as nothing else needs their room, or releases them at once where nothing
    /// will use them.
    pub(super) fn retain(&mut self, what: Retained) {
        let next_use = match what {
            Retained::Storage(storage) => {
                let window = self.at.window[storage.index()];
                if window == NO_WINDOW {
                    return;
                }
                let window = self.lineage.window(WindowId(window));
                if window.end as usize <= self.operator && window.used_again {
                    return;
                }
                window.end
            }
            Retained::Version(version) => {
                let locked = self.version_locks[version.index()] > 0;
                let next_use = match self.residency_of(version) {
                    // Its storage holds it: what another output's rerun made of it is a second copy.
                    Residency::Resident | Residency::Offloading | Residency::Prefetching => None,
                    Residency::Offloaded => locked.then_some(self.operator as u32),
                    _ => self.next_use(version, RETAIN_DEPTH).or(locked.then_some(self.operator as u32)),
                };
                let Some(next_use) = next_use else { return self.release_version(version) };
                next_use
            }
        };
        self.push_retained(RetainedEntry { what, next_use });
    }

    /// Puts an entry behind all that are used no later.
    pub(super) fn push_retained(&mut self, entry: RetainedEntry) {
        let position = self.at.retained.partition_point(|other| other.next_use <= entry.next_use);
        self.at.retained.insert(position, entry);
    }

    /// When a dropped storage that would be rebuilt from `version` is used next.
    pub(super) fn next_use(&self, version: VersionId, depth: u32) -> Option<u32> {
        let (lineage, mut next) = (self.lineage, None);
        for &consumer in lineage.consumers(version) {
            if consumer.index() >= self.operator {
                break;
            }
            for &output in lineage.replay_outputs(consumer) {
                let storage = lineage.version(output).storage;
                let candidate = if self.is_dropped(output) {
                    match self.at.window[storage.index()] {
                        NO_WINDOW => None,
                        window => {
                            let window = lineage.window(WindowId(window));
                            (window.used_again && window.end as usize > self.operator).then_some(window.end)
                        }
                    }
                } else if depth > 1 && !self.is_materialised(output) {
                    self.next_use(output, depth - 1)
                } else {
                    None
                };
                next = [next, candidate].into_iter().flatten().min();
            }
        }
        next
    }

    /// Lets go of retained entries whose next use has come: storages are in use, versions are looked at again.
    pub(super) fn forget_used_retained(&mut self) {
        while self.at.retained.front().is_some_and(|entry| (entry.next_use as usize) < self.operator) {
            let RetainedEntry { what, .. } = self.at.retained.pop_front().expect("there is a front");
            if let Retained::Version(version) = what {
                match self.next_use(version, RETAIN_DEPTH) {
                    Some(next_use) => self.push_retained(RetainedEntry { what, next_use }),
                    None => self.release_version(version),
                }
            }
        }
    }

    /// Takes a version off the list of what is retained.
    pub(super) fn forget_version(&mut self, version: VersionId) {
        let position = self.at.retained.iter().position(|entry| entry.what == Retained::Version(version));
        position.and_then(|position| self.at.retained.remove(position));
    }

    pub(super) fn release_version(&mut self, version: VersionId) {
        debug_assert!(self.at.beside[version.index()]);
        self.at.beside[version.index()] = false;
        self.at.excess_bytes -= self.bytes(self.lineage.version(version).storage) as i64;
        self.emit(Instruction::Release(version));
    }

    /// The retained entry to give up first: the unlocked one with the farthest next use.
    pub(super) fn farthest_retained(&self) -> Option<usize> {
        self.at.retained.iter().rposition(|entry| match entry.what {
            Retained::Storage(storage) => {
                let window = self.at.window[storage.index()];
                window != NO_WINDOW && !self.is_locked(self.lineage.window(WindowId(window)))
            }
            Retained::Version(version) => self.version_locks[version.index()] == 0,
        })
    }

    /// Bytes of a retained entry, and the time that restoring them again takes.
    pub(super) fn price(&self, retained: Retained) -> (u64, u64) {
        let (storage, version) = match retained {
            Retained::Version(version) => (self.lineage.version(version).storage, version),
            Retained::Storage(storage) => {
                let window = WindowId(self.at.window[storage.index()]);
                if self.actions[window.index()] == Action::Swap {
                    let tier = self.placement.tier(window);
                    let copy_ns = self.copies.prefetch_ns(storage, tier) + self.copies.contention_ns(storage, tier);
                    return (self.bytes(storage), copy_ns);
                }
                (storage, self.lineage.window(window).version)
            }
        };
        let producer = self.lineage.version(version).producer;
        let rerun_ns = producer.map_or(0, |producer| self.lineage.cost_ns(producer));
        (self.bytes(storage), rerun_ns)
    }

    /// Evicts again what was restored early, or releases a version.
    pub(super) fn release_retained(&mut self, position: usize) {
        match self.at.retained.remove(position).expect("it was found there").what {
            Retained::Version(version) => self.release_version(version),
            Retained::Storage(storage) => {
                if self.at.residency[storage.index()] == Residency::Prefetching {
                    self.finish_prefetch(storage);
                }
                match self.actions[self.at.window[storage.index()] as usize] {
                    Action::Recompute => self.drop_storage(storage),
                    Action::Swap => {
                        self.at.excess_bytes -= self.bytes(storage) as i64;
                        self.at.residency[storage.index()] = Residency::Offloaded;
                        self.emit(Instruction::Discard(storage));
                    }
                    Action::Keep => unreachable!("a kept storage is never restored"),
                }
            }
        }
    }

    /// Sees to it that `needed` more bytes fit, by what is decided already.
    #[inline]
    pub(super) fn make_room(&mut self, needed: u64) -> Result<(), Stopped> {
        let room_bytes = clamped(self.budget_bytes) - self.resident_bytes() as i64 - needed as i64;
        self.note_spare(room_bytes);
        if room_bytes >= 0 { Ok(()) } else { self.free_bytes(needed) }
    }

    /// Takes down how many bytes more would still have fitted; if they did not fit, all depends on every byte.
    pub(super) fn note_spare(&mut self, room_bytes: i64) {
        let segment = &mut self.at.segment;
        segment.spare_bytes = segment.spare_bytes.min(room_bytes.max(0));
        if room_bytes < 0 {
            segment.idle_bytes = 0;
        }
    }

    /// Waits for offloads and releases what is retained, whichever costs less time per byte that is missing, until
    /// `needed` more bytes fit.
    pub(super) fn free_bytes(&mut self, needed: u64) -> Result<(), Stopped> {
        let stall_ns = self.at.result.stall_ns;
        while self.resident_bytes() + needed > self.budget_bytes {
            let deficit_bytes = self.resident_bytes() + needed - self.budget_bytes;
            match (self.at.offloads.front().copied(), self.farthest_retained()) {
                (Some(offload), Some(position)) if self.is_cheaper_to_release(position, offload, deficit_bytes) => {
                    self.release_retained(position);
                }
                (Some(_), _) => {
                    // The channel is busy: what is swapped beside would not be gone earlier.
                    let of_use = ActionSet::RECOMPUTE;
                    self.press_softly(deficit_bytes, of_use, |timeline| timeline.wait_for_offloads(deficit_bytes))?;
                    self.finish_next_offload();
                }
                (None, Some(position)) => self.release_retained(position),
                (None, None) => {
                    if let OnPressure::Stop { actions, .. } = self.on_pressure {
                        self.collect_open_windows(actions);
                        if !self.open.is_empty() {
                            return Err(Stopped::Pressed(Pressed { deficit_bytes, wait: None, actions }));
                        }
                    }
                    break;
                }
            }
        }
        if let Some(notes) = &mut self.notes {
            notes.memory_stall_ns += self.at.result.stall_ns - stall_ns;
        }
        Ok(())
    }

    /// What it costs to wait for as many of the offloads under way as give `deficit_bytes` back.
    fn wait_for_offloads(&self, deficit_bytes: u64) -> Wait {
        let (mut freed_bytes, mut done_ns) = (0, self.at.now_ns);
        for offload in &self.at.offloads {
            if freed_bytes >= deficit_bytes {
                break;
            }
            freed_bytes += self.bytes(offload.storage);
            done_ns = offload.done_ns;
        }
        Wait { stall_ns: done_ns.saturating_sub(self.at.now_ns), slack_ns: 0 }
    }

    /// Whether restoring a retained entry once more would take less time than waiting for the oldest offload now, each
    /// per byte of the deficit that it covers.
    pub(super) fn is_cheaper_to_release(&self, position: usize, offload: PendingOffload, deficit_bytes: u64) -> bool {
        let wait_ns = offload.done_ns.saturating_sub(self.at.now_ns);
        let (bytes, restore_ns) = self.price(self.at.retained[position].what);
        let covered = |bytes: u64| u128::from(bytes.min(deficit_bytes));
        u128::from(restore_ns) * covered(self.bytes(offload.storage)) < u128::from(wait_ns) * covered(bytes)
    }
}
