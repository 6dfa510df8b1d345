//! What the two channels are given: offloads, prefetches, and the slabs that small ones move in.

use super::{PendingOffload, Residency, Retained, Stopped, Timeline};
use crate::hardware::{SLAB_MEMBER_BYTES_MAX, Tier};
use crate::lineage::WindowId;
use crate::observation::Wait;
use crate::plan::{Action, ActionSet};
use crate::schedule::Instruction;
use crate::trace::StorageId;

impl Timeline<'_> {
    /// Whether a window's storage is copied together with others.
    pub(super) fn is_gathered(&self, id: WindowId) -> bool {
        self.actions[id.index()] == Action::Swap && self.bytes(self.lineage.window(id).storage) <= SLAB_MEMBER_BYTES_MAX
    }

    pub(super) fn offload(&mut self, id: WindowId) {
        let (storage, tier) = (self.lineage.window(id).storage, self.placement.tier(id));
        let bytes = self.bytes(storage);
        self.at.slow_bytes[tier as usize] += bytes;
        let slow_peak_bytes = &mut self.at.segment.slow_peak_bytes[tier as usize];
        *slow_peak_bytes = self.at.slow_bytes[tier as usize].max(*slow_peak_bytes);
        if self.lineage.begins_away(id) {
            self.at.excess_bytes -= bytes as i64;
            self.at.residency[storage.index()] = Residency::Offloaded;
            return self.emit(Instruction::LeaveAway { storage, tier });
        }
        let transfer_ns = self.copies.offload_transfer_ns(storage, tier);
        let joins = self.joins_slab(storage, tier);
        let begin_ns = if joins {
            self.at.offload_free_ns
        } else {
            self.at.now_ns.max(self.at.offload_free_ns) + self.copies.latency_ns(tier)
        };
        let done_ns = begin_ns + transfer_ns;
        if let Some(notes) = &mut self.notes {
            notes.offload_busy_ns += done_ns - begin_ns + if joins { 0 } else { self.copies.latency_ns(tier) };
        }
        self.at.offload_free_ns = done_ns;
        self.at.offloads.push_back(PendingOffload { storage, done_ns });
        for &member in &self.slab.members {
            self.at.copy_done_ns[member.index()] = done_ns;
        }
        self.at.copy_done_ns[storage.index()] = done_ns;
        let together = self.at.offloads.len() - self.slab.members.len().max(1);
        self.at.offloads.range_mut(together..).for_each(|offload| offload.done_ns = done_ns);
        self.at.result.offloaded_bytes += bytes;
        self.at.residency[storage.index()] = Residency::Offloading;
        self.emit(Instruction::Offload { storage, tier, joins });
        self.contend(storage, tier);
    }

    /// Puts `storage` into the slab that is being gathered, or into a new one if it is small. Whether it moves together
    /// with the one before it.
    pub(super) fn joins_slab(&mut self, storage: StorageId, tier: Tier) -> bool {
        let small = self.bytes(storage) <= SLAB_MEMBER_BYTES_MAX;
        let joins = small && !self.slab.members.is_empty() && self.slab.tier == tier;
        if !joins {
            self.slab.members.clear();
        }
        if small {
            self.slab.tier = tier;
            self.slab.members.push(storage);
        }
        joins
    }

    pub(super) fn finish_done_offloads(&mut self) {
        while self.at.offloads.front().is_some_and(|offload| offload.done_ns <= self.at.now_ns) {
            self.finish_next_offload();
        }
    }

    /// Waits for the oldest offload under way and releases its bytes.
    pub(super) fn finish_next_offload(&mut self) {
        let offload = self.at.offloads.pop_front().expect("an offload is under way");
        if !self.at.is_under_way(&offload) {
            return;
        }
        let PendingOffload { storage, done_ns } = offload;
        self.wait_until(done_ns);
        self.at.excess_bytes -= self.bytes(storage) as i64;
        self.at.residency[storage.index()] = Residency::Offloaded;
        self.emit(Instruction::FinishOffload(storage));
    }

    pub(super) fn issue_due_prefetches(&mut self) {
        let lineage = self.lineage;
        self.at.due.extend(self.prefetches.due(self.operator));
        if self.at.due.is_empty() {
            return;
        }
        let mut waiting = 0;
        self.slab.members.clear();
        for position in 0..self.at.due.len() {
            let id = self.at.due[position];
            let window = lineage.window(id);
            let (storage, bytes) = (window.storage, self.bytes(window.storage));
            let needed_still = self.at.window[storage.index()] == id.0 && window.end as usize > self.operator;
            if !needed_still || self.at.residency[storage.index()] != Residency::Offloaded {
                // Used already, recalled, or at its use now: `restore` sees to it.
                if needed_still && self.at.residency[storage.index()] == Residency::Offloading {
                    self.at.due[waiting] = id;
                    waiting += 1;
                }
            } else {
                let room_bytes = self.spare_bytes() - lineage.profile().at(self.operator) - bytes as i64;
                if room_bytes >= 0 {
                    self.note_spare(room_bytes);
                    self.prefetch(id);
                    self.retain(Retained::Storage(storage));
                } else {
                    self.at.segment.idle_bytes = self.at.segment.idle_bytes.min(-room_bytes - 1);
                    self.at.due[waiting] = id;
                    waiting += 1;
                }
            }
        }
        self.at.due.truncate(waiting);
    }

    /// Stops where a prefetch should start that has no room before it is too late.
    pub(super) fn look_at_late_prefetches(&mut self) -> Result<(), Stopped> {
        let first = self.late.partition_point(|late| late.wanted < self.operator);
        for position in first..self.late.len() {
            let late = self.late[position];
            if late.wanted > self.operator {
                break;
            }
            self.press_softly(late.missing_bytes, ActionSet::ALL, |timeline| timeline.wait_to_prefetch(late.window))?;
        }
        Ok(())
    }

    /// What it costs if a prefetch starts only where there is room for it.
    fn wait_to_prefetch(&self, id: WindowId) -> Wait {
        let (window, tier) = (self.lineage.window(id), self.placement.tier(id));
        let start_ns = |operator: usize| self.lineage.start_ns(operator);
        let needed_ns = start_ns(window.end as usize);
        let before = self.prefetches.before(id).expect("a late prefetch is one");
        let done_ns = start_ns(before) + self.copies.prefetch_ns(window.storage, tier);
        Wait {
            stall_ns: done_ns.saturating_sub(needed_ns),
            slack_ns: needed_ns.saturating_sub(start_ns(self.operator)),
        }
    }

    pub(super) fn prefetch(&mut self, id: WindowId) {
        let (storage, tier) = (self.lineage.window(id).storage, self.placement.tier(id));
        let bytes = self.bytes(storage);
        let joins = self.joins_slab(storage, tier);
        let begin_ns = if joins {
            self.at.prefetch_free_ns
        } else {
            self.at.now_ns.max(self.at.prefetch_free_ns) + self.copies.latency_ns(tier)
        };
        let done_ns = begin_ns + self.copies.prefetch_transfer_ns(storage, tier);
        if let Some(notes) = &mut self.notes {
            notes.prefetch_busy_ns += done_ns - begin_ns + if joins { 0 } else { self.copies.latency_ns(tier) };
        }
        self.at.prefetch_free_ns = done_ns;
        for &member in &self.slab.members {
            self.at.copy_done_ns[member.index()] = done_ns;
        }
        self.at.copy_done_ns[storage.index()] = done_ns;
        self.at.excess_bytes += bytes as i64;
        self.at.result.prefetched_bytes += bytes;
        self.at.residency[storage.index()] = Residency::Prefetching;
        self.note_peak(self.operator, self.resident_bytes());
        self.emit(Instruction::Prefetch { storage, joins });
        self.contend(storage, tier);
    }

    /// Charges compute with what a copy beside it takes.
    pub(super) fn contend(&mut self, storage: StorageId, tier: Tier) {
        let lost_ns = self.copies.contention_ns(storage, tier);
        self.at.now_ns += lost_ns;
        self.at.result.contention_ns += lost_ns;
    }

    pub(super) fn finish_prefetch(&mut self, storage: StorageId) {
        self.wait_until(self.at.copy_done_ns[storage.index()]);
        self.at.residency[storage.index()] = Residency::Resident;
        self.emit(Instruction::FinishPrefetch(storage));
    }
}
