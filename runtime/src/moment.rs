//! Moments: where a run of the timeline stands between two operators, and the bookmarks that a later run of almost the
//! same plan starts from.
//!
//! A sweep runs the timeline once per decision, and a decision changes nothing before the window that it evicts. So
//! those runs leave bookmarks, and each starts from the last one that lies before the first difference.

use std::collections::VecDeque;

use crate::lineage::WindowId;
use crate::lineage::{Lineage, VersionId};
use crate::plan::Action;
use crate::prefetch::Prefetches;
use crate::timeline::{PendingOffload, Prediction, Residency, RetainedEntry};

/// Bookmarks in one iteration. More of them cost more to leave than they save.
const BOOKMARKS: usize = 8;

/// All that a run changes from one operator to the next.
#[derive(Debug, Default)]
pub(crate) struct Moment {
    pub(crate) now_ns: u64,
    pub(crate) offload_free_ns: u64,
    pub(crate) prefetch_free_ns: u64,
    pub(crate) resident_bytes: u64,
    pub(crate) result: Prediction,
    // Per storage.
    pub(crate) residency: Vec<Residency>,
    pub(crate) current: Vec<VersionId>,
    pub(crate) window: Vec<u32>,
    pub(crate) copy_done_ns: Vec<u64>,
    // Per version.
    pub(crate) beside: Vec<bool>,
    /// Offloads under way, oldest first.
    pub(crate) offloads: VecDeque<PendingOffload>,
    /// Windows that wait to be prefetched.
    pub(crate) due: Vec<WindowId>,
    pub(crate) retained: Vec<RetainedEntry>,
    /// No entry of `retained` is used before this operator index.
    pub(crate) retained_from: u32,
}

impl Moment {
    /// Becomes a copy of `other`, in the memory that it has.
    fn copy_from(&mut self, other: &Moment) {
        let Moment { residency, current, window, copy_done_ns, beside, offloads, due, retained, .. } = other;
        self.now_ns = other.now_ns;
        self.offload_free_ns = other.offload_free_ns;
        self.prefetch_free_ns = other.prefetch_free_ns;
        self.resident_bytes = other.resident_bytes;
        self.result = other.result;
        self.residency.clone_from(residency);
        self.current.clone_from(current);
        self.window.clone_from(window);
        self.copy_done_ns.clone_from(copy_done_ns);
        self.beside.clone_from(beside);
        self.offloads.clone_from(offloads);
        self.due.clone_from(due);
        self.retained.clone_from(retained);
        self.retained_from = other.retained_from;
    }
}

/// Moments of the last run, and what that run was asked.
#[derive(Debug, Default)]
pub(crate) struct Bookmarks {
    /// The moment before operator (position + 1) · stride. Those from `left` on are of earlier runs.
    moments: Vec<Moment>,
    left: usize,
    stride: usize,
    budget_bytes: u64,
    actions: Vec<Action>,
    prefetch_before: Vec<u32>,
}

impl Bookmarks {
    /// Bookmarks for a trace of so many operators.
    pub(crate) fn new(operators: usize) -> Self {
        Bookmarks { stride: (operators / BOOKMARKS).max(64), ..Bookmarks::default() }
    }

    /// Forgets the last run.
    pub(crate) fn clear(&mut self) {
        self.left = 0;
    }

    /// Leaves a bookmark before operator `index`, where one is due.
    pub(crate) fn pass(&mut self, index: usize, moment: &Moment) {
        if index == (self.left + 1) * self.stride {
            if self.moments.len() == self.left {
                self.moments.push(Moment::default());
            }
            self.moments[self.left].copy_from(moment);
            self.left += 1;
        }
    }

    /// Sets `moment` to the last bookmark that a run of `actions` would pass as well, and says before which operator
    /// that is; none where it has to start afresh. From here on, the bookmarks are of that run.
    pub(crate) fn resume(
        &mut self,
        lineage: &Lineage,
        actions: &[Action],
        prefetches: &Prefetches,
        budget_bytes: u64,
        moment: &mut Moment,
    ) -> Option<usize> {
        if self.budget_bytes != budget_bytes || self.actions.len() != actions.len() {
            self.left = 0;
        }
        if self.left > 0 {
            let same_until = self.same_until(lineage, actions, prefetches);
            self.left = self.left.min(same_until as usize / self.stride);
        }
        self.budget_bytes = budget_bytes;
        self.actions.clear();
        self.actions.extend_from_slice(actions);
        self.prefetch_before.clear();
        self.prefetch_before.extend_from_slice(prefetches.before());
        let last = self.left.checked_sub(1)?;
        moment.copy_from(&self.moments[last]);
        Some(self.left * self.stride)
    }

    /// The first operator index at which a run of `actions` may do something that the last run did not.
    fn same_until(&self, lineage: &Lineage, actions: &[Action], prefetches: &Prefetches) -> u32 {
        let windows = lineage.windows().iter().zip(self.actions.iter().zip(actions));
        let evictions = windows.filter(|(_, (old, new))| old != new).map(|(window, _)| window.start);
        let befores = self.prefetch_before.iter().zip(prefetches.before());
        let copies = befores.filter(|(old, new)| old != new).map(|(&old, &new)| old.min(new));
        evictions.chain(copies).min().unwrap_or(u32::MAX)
    }
}
