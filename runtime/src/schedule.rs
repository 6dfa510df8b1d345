//! A schedule: a plan written out as instructions by operator index.
//!
//! The timeline writes it while it predicts; the driver carries it out without deciding anything. So what
//! was predicted and what is done cannot differ in order or in bytes.

use std::fmt;
use std::ops::Range;

use crate::hardware::Tier;
use crate::lineage::VersionId;
use crate::trace::{OperatorId, StorageId};

/// One step of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instruction {
    /// Start copying a storage to the slow tier. Its bytes count until the offload is finished.
    Offload {
        /// What is copied.
        storage: StorageId,
        /// Where to.
        tier: Tier,
        /// Whether it moves in one slab with the offload before it.
        joins: bool,
    },
    /// A storage that the iteration's last part may have sent to the slow tier is not to be on the device: where it is, it goes, and
    /// its bytes are released when others need them.
    LeaveAway {
        /// What is away.
        storage: StorageId,
        /// Where it is.
        tier: Tier,
    },
    /// Wait for the offload and release the device bytes.
    FinishOffload(StorageId),
    /// Wait for the offload and put the bytes back in place: the program wants them already.
    Recall(StorageId),
    /// Allocate device bytes and start copying a storage back.
    Prefetch {
        /// What is copied.
        storage: StorageId,
        /// Whether it moves in one copy with the prefetch before it.
        joins: bool,
    },
    /// Wait until the prefetched bytes have arrived.
    FinishPrefetch(StorageId),
    /// Release device bytes of which the slow tier still holds an equal copy.
    Discard(StorageId),
    /// Release device bytes that a rerun can restore.
    Drop(StorageId),
    /// Rerun an operator. Every version it makes is materialised: in its storage where that storage is
    /// dropped at this version, else beside it.
    Rerun(OperatorId),
    /// Release a version that was materialised beside its storage.
    Release(VersionId),
}

impl Instruction {
    /// The storage whose bytes it moves, if it is about one.
    pub fn storage(&self) -> Option<StorageId> {
        match *self {
            Instruction::Offload { storage, .. }
            | Instruction::LeaveAway { storage, .. }
            | Instruction::FinishOffload(storage)
            | Instruction::Recall(storage)
            | Instruction::Prefetch { storage, .. }
            | Instruction::FinishPrefetch(storage)
            | Instruction::Discard(storage)
            | Instruction::Drop(storage) => Some(storage),
            Instruction::Rerun(_) | Instruction::Release(_) => None,
        }
    }
}

impl fmt::Display for Instruction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Instruction::Offload { storage, .. } => write!(f, "offload storage {}", storage.0),
            Instruction::LeaveAway { storage, .. } => write!(f, "leave storage {} away", storage.0),
            Instruction::FinishOffload(storage) => write!(f, "finish the offload of storage {}", storage.0),
            Instruction::Recall(storage) => write!(f, "recall storage {}", storage.0),
            Instruction::Prefetch { storage, .. } => write!(f, "prefetch storage {}", storage.0),
            Instruction::FinishPrefetch(storage) => write!(f, "finish the prefetch of storage {}", storage.0),
            Instruction::Discard(storage) => write!(f, "discard storage {}", storage.0),
            Instruction::Drop(storage) => write!(f, "drop storage {}", storage.0),
            Instruction::Rerun(operator) => write!(f, "rerun operator {}", operator.0),
            Instruction::Release(version) => write!(f, "release version {}", version.0),
        }
    }
}

/// Instructions for one iteration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// In order of execution: operator index before which to act (the number of operators for the
    /// iteration's end), and what to do.
    steps: Vec<(u32, Instruction)>,
}

impl Schedule {
    pub(crate) fn clear(&mut self) {
        self.steps.clear();
    }

    pub(crate) fn push(&mut self, before: usize, instruction: Instruction) {
        self.steps.push((before as u32, instruction));
    }

    /// Has the last offloads of these storages wait until the operator `after` has run, in the order in which they are; but for one that
    /// is made together with one of another storage.
    pub(crate) fn postpone(&mut self, after: usize, mut storages: Vec<StorageId>) {
        let end = self.steps.partition_point(|&(before, _)| before as usize <= after);
        let later = self.steps.split_off(end);
        for (_, instruction) in &later {
            if let Instruction::Offload { storage, .. } = instruction {
                storages.retain(|asked| asked != storage);
            }
        }
        let mut copies: Vec<Range<usize>> = Vec::new();
        for (step, (_, instruction)) in self.steps.iter().enumerate() {
            match (instruction, copies.last_mut()) {
                (Instruction::Offload { joins: true, .. }, Some(copy)) => copy.end = step + 1,
                (Instruction::Offload { .. }, _) => copies.push(step..step + 1),
                _ => {}
            }
        }
        let mut is_postponed = vec![false; end];
        for copy in copies.into_iter().rev() {
            let moved: Vec<_> = self.steps[copy.clone()].iter().filter_map(|(_, offload)| offload.storage()).collect();
            is_postponed[copy].fill(moved.iter().all(|storage| storages.contains(storage)));
            storages.retain(|storage| !moved.contains(storage));
        }
        let steps = std::mem::take(&mut self.steps).into_iter().zip(is_postponed);
        let (postponed, kept): (Vec<_>, Vec<_>) = steps.partition(|&(_, is_postponed)| is_postponed);
        let postponed = postponed.into_iter().map(|((_, offload), _)| (after as u32 + 1, offload));
        self.steps = kept.into_iter().map(|(step, _)| step).chain(postponed).chain(later).collect();
    }

    /// All steps, in order of execution: operator index and instruction.
    pub fn steps(&self) -> &[(u32, Instruction)] {
        &self.steps
    }

    /// Whether nothing is ever evicted.
    pub(crate) fn is_idle(&self) -> bool {
        self.steps.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offload(before: u32, storage: u32, joins: bool) -> (u32, Instruction) {
        (before, Instruction::Offload { storage: StorageId(storage), tier: Tier::Host, joins })
    }

    #[test]
    fn the_last_offloads_are_postponed_in_their_order_but_for_those_that_are_made_together_with_others() {
        let dropped = |before| (before, Instruction::Drop(StorageId(9)));
        let (again, alone) = (offload(1, 0, false), offload(7, 5, false));
        let together = [offload(2, 1, false), offload(2, 2, true)];
        let asked = [offload(3, 3, false), offload(3, 4, true), offload(4, 0, false)];
        let steps = [again, together[0], together[1], asked[0], asked[1], dropped(3), asked[2], dropped(6), alone];
        let mut schedule = Schedule { steps: steps.to_vec() };
        schedule.postpone(5, [0, 1, 3, 4, 5].map(StorageId).to_vec());
        let moved = asked.map(|(_, offload)| (6, offload));
        let expected = [again, together[0], together[1], dropped(3), moved[0], moved[1], moved[2], dropped(6), alone];
        assert_eq!(schedule.steps(), expected);
    }
}
