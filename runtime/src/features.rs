//! The features of candidates, computed from their raw quantities: the one place that fills the feature table in.
//!
//! It knows neither traces nor timelines, so that a plan made in advance and a decision made in a running program are
//! described alike.

use crate::observation::{Candidate, FEATURE_TABLE, FEATURES, Wait};

/// What all candidates of a pressure point have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scene {
    /// Makespan of the iteration, if nothing is evicted.
    pub(crate) makespan_ns: u64,
    /// Time since its start.
    pub(crate) elapsed_ns: u64,
    pub(crate) deficit_bytes: u64,
    pub(crate) wait: Option<Wait>,
    /// Offload time already claimed up to this point.
    pub(crate) offload_claimed_ns: u64,
    /// Prefetch time already claimed after it.
    pub(crate) prefetch_claimed_ns: u64,
}

/// What is known of the time that lies ahead of one candidate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ahead {
    /// Whether its window spans the operator of the highest demand still to come.
    pub(crate) covers_peak: bool,
    /// Share of the time still to be spent over the budget that its window spans.
    pub(crate) over_budget_time: f32,
    /// Share of the bytes × time still over the budget that its eviction would take away.
    pub(crate) over_budget_area: f32,
    /// Prefetch time claimed from now until its window's end.
    pub(crate) prefetch_claimed_ns: u64,
}

/// Scratch for [`Describer::describe`].
#[derive(Debug, Default)]
pub(crate) struct Describer {
    by_price: Vec<(f32, u32)>,
    cheaper_bytes: Vec<u64>,
}

impl Describer {
    /// Fills `features`, row-major `[candidates, FEATURES]` and one row more where waiting may be chosen, in the order of the
    /// feature table. `ahead` says, by row, what lies ahead of a candidate.
    pub(crate) fn describe(
        &mut self,
        scene: &Scene,
        candidates: &[Candidate],
        ahead: impl Fn(usize) -> Ahead,
        features: &mut [f32],
    ) {
        let makespan = scene.makespan_ns.max(1) as f32;
        let deficit = scene.deficit_bytes.max(1) as f32;
        let total_bytes: u64 = candidates.iter().map(|candidate| candidate.bytes).sum();
        let elapsed = scene.elapsed_ns as f32;
        let left = (makespan - elapsed).max(1.0);
        let claimed_after = scene.prefetch_claimed_ns as f32;
        let offload_backlog = (scene.offload_claimed_ns as f32 / elapsed.max(1.0)).min(4.0) / 4.0;
        let prefetch_backlog = (claimed_after / left).min(4.0) / 4.0;
        let severity = (deficit / total_bytes.max(1) as f32).min(1.0);
        let may_wait = f32::from(u8::from(scene.wait.is_some()));
        let [wait_stall, wait_slack] = scene
            .wait
            .map_or([0.0; 2], |wait| [compressed(wait.stall_ns as f32 / makespan), wait.slack_ns as f32 / makespan]);
        self.rank_by_price(candidates);
        let (cheapest, _) = self.by_price.first().copied().unwrap_or((0.0, 0));
        let rows = features.chunks_exact_mut(FEATURES);
        for (index, ((candidate, row), &cheaper)) in candidates.iter().zip(rows).zip(&self.cheaper_bytes).enumerate() {
            let bytes = candidate.bytes as f32;
            let covered = (bytes / deficit).min(1.0);
            let transfer = candidate.transfer_ns.max(1) as f32;
            let gap = candidate.gap_ns.max(1) as f32;
            let recompute = candidate.recompute_ns as f32;
            let own = (candidate.own_recompute_ns as f32).min(recompute);
            let ahead = ahead(index);
            let price = candidate.price_ns() as f32;
            let values: [f32; FEATURES] = [
                covered,
                (bytes / deficit).ln().clamp(-6.0, 6.0),
                (cheaper as f32 / deficit).min(4.0) / 4.0,
                f32::from(u8::from(ahead.covers_peak)),
                (gap / makespan).ln().clamp(-10.0, 0.0),
                (transfer / gap).ln().clamp(-6.0, 6.0),
                (recompute.max(1.0) / transfer).ln().clamp(-6.0, 6.0),
                compressed(candidate.swap_ns() as f32 / makespan / covered),
                compressed(recompute / makespan / covered),
                compressed(candidate.own_recompute_ns as f32 / makespan),
                if recompute > 0.0 { 1.0 - own / recompute } else { 0.0 },
                (candidate.dropped_children_bytes as f32 / deficit).min(4.0) / 4.0,
                candidate.staleness_ns as f32 / makespan,
                candidate.to_use_ns as f32 / makespan,
                f32::from(u8::from(!candidate.used_again)),
                offload_backlog,
                prefetch_backlog,
                f32::from(u8::from(candidate.can_recompute)),
                elapsed / makespan,
                severity,
                ahead.over_budget_time,
                ahead.over_budget_area,
                compressed(price / makespan / ahead.over_budget_area.max(SHARE_MIN)),
                ((price / bytes.max(1.0) + PRICE_MIN) / (cheapest + PRICE_MIN)).ln().min(6.0) / 6.0,
                ((ahead.prefetch_claimed_ns as f32 + transfer) / candidate.to_use_ns.max(1) as f32).min(4.0) / 4.0,
                0.0,
                may_wait,
                wait_stall,
                wait_slack,
            ];
            row.copy_from_slice(&values);
        }
        if let Some(row) = features.chunks_exact_mut(FEATURES).nth(candidates.len()) {
            row.fill(0.0);
            for (column, value) in [
                ("offload_backlog", offload_backlog),
                ("prefetch_backlog", prefetch_backlog),
                ("progress", elapsed / makespan),
                ("severity", severity),
                ("is_wait", 1.0),
                ("may_wait", may_wait),
                ("wait_stall", wait_stall),
                ("wait_slack", wait_slack),
            ] {
                row[column_of(column)] = value;
            }
        }
        debug_assert!(features.iter().all(|feature| feature.is_finite()));
    }

    /// For each candidate, the bytes that can be had at a lower price per byte.
    fn rank_by_price(&mut self, candidates: &[Candidate]) {
        self.by_price.clear();
        for (row, candidate) in candidates.iter().enumerate() {
            self.by_price.push((candidate.price_ns() as f32 / candidate.bytes.max(1) as f32, row as u32));
        }
        self.by_price.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        self.cheaper_bytes.resize(candidates.len(), 0);
        let mut cheaper = 0;
        for &(_, row) in &self.by_price {
            self.cheaper_bytes[row as usize] = cheaper;
            cheaper += candidates[row as usize].bytes;
        }
    }
}

/// Nothing takes away less of what is still over the budget, as far as its price is concerned.
const SHARE_MIN: f32 = 1e-3;
/// Prices below this, in nanoseconds per byte, are as good as nothing.
const PRICE_MIN: f32 = 1e-4;

/// Where the feature called `name` stands.
fn column_of(name: &str) -> usize {
    FEATURE_TABLE.iter().position(|feature| feature.name == name).expect("a feature of the table")
}

fn compressed(share: f32) -> f32 {
    (1000.0 * share).ln_1p()
}
