//! When prefetches start: as late as their copies allow, and only where the bytes are free from then on.
//!
//! Decided from the whole plan before a run. What a run meets may still delay a prefetch, never advance it.

use crate::hardware::CopyTimes;
use crate::lineage::{Lineage, WindowId};
use crate::plan::{Action, Plan};
use crate::trace::Trace;

/// Prefetches start this much earlier than their copy needs, against jitter on a real machine.
const PREFETCH_LEAD: f64 = 1.25;

const NONE: u32 = u32::MAX;

/// The operator index before which each swapped storage is prefetched.
#[derive(Debug)]
pub(crate) struct Prefetches {
    /// Per window; `NONE` where there is nothing to prefetch.
    before: Vec<u32>,
    /// Per operator index: the first window that is due there.
    first: Vec<u32>,
    /// Per window: the next one that is due at the same operator index.
    next: Vec<u32>,
    swapped: Vec<WindowId>,
    slack_bytes: Vec<i64>,
}

impl Prefetches {
    pub(crate) fn new(operators: usize, windows: usize) -> Self {
        Prefetches {
            before: vec![NONE; windows],
            first: vec![NONE; operators + 1],
            next: vec![NONE; windows],
            swapped: Vec::new(),
            slack_bytes: vec![0; operators + 1],
        }
    }

    /// Per window: the operator index before which it is prefetched.
    pub(crate) fn before(&self) -> &[u32] {
        &self.before
    }

    /// The windows that are due before operator `index`, soonest used first.
    pub(crate) fn due(&self, index: usize) -> impl Iterator<Item = WindowId> + '_ {
        let some = |window: u32| (window != NONE).then_some(window);
        std::iter::successors(some(self.first[index]), move |&window| some(self.next[window as usize])).map(WindowId)
    }

    /// Decides for every swapped window of `plan`, behind the copies that are needed after it.
    pub(crate) fn decide(
        &mut self,
        trace: &Trace,
        lineage: &Lineage,
        copies: &CopyTimes,
        plan: &Plan,
        budget_bytes: u64,
    ) {
        for &id in &self.swapped {
            self.first[self.before[id.index()] as usize] = NONE;
            self.before[id.index()] = NONE;
        }
        self.swapped.clear();
        for (id, (window, &action)) in (0..).map(WindowId).zip(lineage.windows().iter().zip(plan.actions())) {
            if action == Action::Swap && window.used_again {
                self.swapped.push(id);
            }
        }
        if self.swapped.is_empty() {
            return;
        }
        self.find_slack(trace, lineage, plan, budget_bytes);
        let mut channel_ns = u64::MAX;
        // Windows are ordered by their ends: the last one to be used comes first.
        for &id in self.swapped.iter().rev() {
            let window = lineage.window(id);
            let bytes = trace.storages[window.storage.index()].bytes;
            let lead = (copies.prefetch_ns(window.storage) as f64 * PREFETCH_LEAD) as u64;
            channel_ns = channel_ns.min(lineage.start_ns(window.end as usize)).saturating_sub(lead);
            let mut before = window.end as usize;
            while before > window.start as usize + 1
                && lineage.start_ns(before) > channel_ns
                && self.slack_bytes[before - 1] >= bytes as i64
            {
                before -= 1;
                self.slack_bytes[before] -= bytes as i64;
            }
            self.before[id.index()] = before as u32;
            self.next[id.index()] = std::mem::replace(&mut self.first[before], id.0);
        }
    }

    /// Bytes under the budget at every operator index, once everything that the plan evicts is gone.
    fn find_slack(&mut self, trace: &Trace, lineage: &Lineage, plan: &Plan, budget_bytes: u64) {
        self.slack_bytes.fill(0);
        for (window, &action) in lineage.windows().iter().zip(plan.actions()) {
            if action != Action::Keep {
                let bytes = trace.storages[window.storage.index()].bytes as i64;
                self.slack_bytes[window.start as usize] += bytes;
                self.slack_bytes[window.end as usize] -= bytes;
            }
        }
        let budget = budget_bytes.min(i64::MAX as u64) as i64;
        let mut evicted = 0;
        for (slack, &kept) in self.slack_bytes.iter_mut().zip(lineage.keep_all_bytes()) {
            evicted += *slack;
            *slack = budget.saturating_sub(kept as i64 - evicted);
        }
    }
}
