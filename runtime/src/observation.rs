//! What a policy sees at a pressure point.
//!
//! One table names every feature, for trainer and runtime alike. All features are dimensionless, so that a
//! policy carries over to other sizes, budgets and links. Candidates also carry the raw quantities that the
//! rules of the literature are written in.

use crate::lineage::WindowId;
use crate::plan::Action;
use crate::policy::Choice;

/// Features per candidate.
pub const FEATURES: usize = FEATURE_TABLE.len();

/// A column of the observation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Feature {
    /// The name, unique in the table.
    pub name: &'static str,
    /// What it measures.
    pub doc: &'static str,
}

const fn feature(name: &'static str, doc: &'static str) -> Feature {
    Feature { name, doc }
}

/// Every feature of a candidate, in column order.
///
/// The row that stands for waiting is zero but for what all rows have in common: both backlogs, progress, severity, and
/// the last four.
pub const FEATURE_TABLE: [Feature; 29] = [
    feature("share_of_deficit", "min(1, bytes / deficit)"),
    feature("log_size_to_deficit", "ln(bytes / deficit), within ±6"),
    feature("cheaper_bytes", "bytes obtainable at a lower price per byte ÷ deficit, at most 4, over 4"),
    feature("covers_peak", "1 where the window spans the operator of the highest demand still to come"),
    feature("log_gap", "ln(idle time of the window ÷ keep-all makespan), within −10..0"),
    feature("log_transfer_to_gap", "ln(round trip of the copies ÷ idle time), within ±6"),
    feature("log_recompute_to_transfer", "ln(recompute time with dropped ancestors ÷ round trip), within ±6"),
    feature(
        "swap_price",
        "exposed swap time and contention ÷ keep-all makespan, per deficit covered, compressed as ln(1 + 1000·x)",
    ),
    feature("recompute_price", "recompute time ÷ keep-all makespan, per deficit covered, compressed likewise"),
    feature("own_recompute", "time of its producer alone ÷ keep-all makespan, compressed likewise"),
    feature("dropped_ancestors", "share of the recompute time that is spent on dropped or dead ancestors"),
    feature(
        "dropped_children",
        "bytes of dropped storages that would be rebuilt from this one ÷ deficit, at most 4, over 4",
    ),
    feature("staleness", "time since the last access ÷ keep-all makespan"),
    feature("time_to_use", "time to the next access ÷ keep-all makespan"),
    feature("never_used_again", "1 where the program only lets go of it"),
    feature("offload_backlog", "offload time already claimed up to this point ÷ time elapsed, at most 4, over 4"),
    feature("prefetch_backlog", "prefetch time already claimed after this point ÷ time left, at most 4, over 4"),
    feature("can_recompute", "1 where recompute is legal"),
    feature("progress", "time elapsed ÷ keep-all makespan"),
    feature("severity", "deficit ÷ bytes of all candidates, at most 1"),
    feature("over_budget_time", "share of the time still to be spent over the budget that the window spans"),
    feature("over_budget_area", "share of the bytes × time still over the budget that the eviction would take away"),
    feature(
        "price_per_area",
        "time of the cheapest eviction ÷ keep-all makespan, per share of bytes × time, compressed as ln(1 + 1000·x)",
    ),
    feature("price_to_cheapest", "ln(price per byte ÷ that of the cheapest candidate), at most 6, over 6"),
    feature(
        "prefetch_load",
        "prefetch time claimed until the next access, with the round trip ÷ time, at most 4, over 4",
    ),
    feature("is_wait", "1 in the row that stands for waiting"),
    feature("may_wait", "1 in all rows where waiting may be chosen"),
    feature("wait_stall", "time that is sure to be waited then ÷ keep-all makespan, compressed as ln(1 + 1000·x)"),
    feature("wait_slack", "time until what waits for room is needed ÷ keep-all makespan"),
];

/// A storage that could be evicted at a pressure point, in raw quantities.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The window that would be evicted.
    pub window: WindowId,
    /// Device bytes it would free.
    pub bytes: u64,
    /// Time since its last access.
    pub staleness_ns: u64,
    /// Idle time of the whole window.
    pub gap_ns: u64,
    /// Time from the pressure point to its next access.
    pub to_use_ns: u64,
    /// Offload plus prefetch on an empty link; offload alone if the storage is never used again.
    pub transfer_ns: u64,
    /// Part of `transfer_ns`, and of the wait behind copies already claimed, that nothing would hide.
    pub swap_exposed_ns: u64,
    /// Compute time that the copies would cost, hidden or not.
    pub contention_ns: u64,
    /// Time of its producer.
    pub own_recompute_ns: u64,
    /// Time of its producer and of every evicted or dead ancestor it would have to rebuild; zero if the
    /// storage is never used again.
    pub recompute_ns: u64,
    /// Bytes of dropped storages that would be rebuilt from this one.
    pub dropped_children_bytes: u64,
    /// Time that those dropped storages take to rebuild.
    pub dropped_children_ns: u64,
    /// Whether an operator will read it again, as opposed to the program letting go of it.
    pub used_again: bool,
    /// Whether it may be swapped.
    pub can_swap: bool,
    /// Whether it may be dropped and rebuilt.
    pub can_recompute: bool,
}

impl Candidate {
    /// Time that swapping it is estimated to add to the makespan.
    pub(crate) fn swap_ns(&self) -> u64 {
        self.swap_exposed_ns + self.contention_ns
    }

    /// Time that its cheapest legal eviction is estimated to add to the makespan.
    pub(crate) fn price_ns(&self) -> u64 {
        let swap = if self.can_swap { self.swap_ns() } else { u64::MAX };
        let recompute = if self.can_recompute { self.recompute_ns } else { u64::MAX };
        swap.min(recompute)
    }

    /// Whether `action` is legal for it.
    pub fn allows(&self, action: Action) -> bool {
        match action {
            Action::Keep => false,
            Action::Swap => self.can_swap,
            Action::Recompute => self.can_recompute,
        }
    }
}

/// What it would cost to evict nothing more at a pressure point, and to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// Time that is sure to be waited.
    pub stall_ns: u64,
    /// Time until what waits for room is needed.
    pub slack_ns: u64,
}

/// A point of the iteration where bytes are missing: the budget would be exceeded, or something has to wait for room.
#[derive(Clone, Copy, Debug)]
pub struct Pressure<'a> {
    /// Operator before or in which the bytes are missing.
    pub operator: usize,
    /// Bytes over the budget.
    pub deficit_bytes: u64,
    /// What waiting would cost, where that may be chosen: only policies that weigh it are asked there.
    pub wait: Option<Wait>,
    /// Storages that could be evicted. Never empty.
    pub candidates: &'a [Candidate],
    /// Row-major `[candidates, FEATURES]`, and one row more for waiting where that may be chosen; empty for a policy that
    /// does not read them.
    pub features: &'a [f32],
}

impl Pressure<'_> {
    /// The legal evictions: all pairs of candidate and action whose mask is 1.
    pub fn choices(&self) -> impl Iterator<Item = Choice> + '_ {
        self.candidates.iter().enumerate().flat_map(|(candidate, facts)| {
            Action::EVICTIONS
                .into_iter()
                .filter(|&action| facts.allows(action))
                .map(move |action| Choice { candidate, action })
        })
    }

    /// The choice to wait, where it may be made.
    pub fn waiting(&self) -> Option<Choice> {
        self.wait.map(|_| Choice { candidate: self.candidates.len(), action: Action::Swap })
    }

    /// Features of one candidate, or of waiting.
    pub fn row(&self, candidate: usize) -> &[f32] {
        &self.features[candidate * FEATURES..(candidate + 1) * FEATURES]
    }
}

/// SHA-256 of the feature table: a policy trained on another table is refused.
pub(crate) fn feature_table_hash() -> String {
    let text: String = FEATURE_TABLE.iter().map(|feature| format!("{}: {}\n", feature.name, feature.doc)).collect();
    crate::file::sha256_hex(text.as_bytes())
}
