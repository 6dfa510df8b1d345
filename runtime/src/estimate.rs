//! What evicting a storage would cost, given what is evicted already: the facts and features of candidates.

use crate::hardware::Tier;
use crate::lineage::{Lineage, VersionId, WindowId};
use crate::observation::{Candidate, FEATURES};
use crate::plan::Action;
use crate::sweep::Problem;
use crate::timeline::Timeline;

/// Reruns looked at when a candidate's recompute time is estimated.
const ANCESTORS_MAX: usize = 256;

/// Estimates what evicting a window would cost, given what is evicted already. Owns the scratch it needs.
pub(crate) struct Estimator {
    /// Prefetch time claimed by swapped windows that end before each operator index, running total.
    prefetch_claimed_ns: Vec<u64>,
    offload_claimed_ns: u64,
    /// Whether anything is dropped at the pressure point.
    has_dropped: bool,
    /// Per window: time to rebuild it where nothing is dropped, once it is known.
    undropped_ns: Vec<Option<u64>>,
    visited: Vec<u32>,
    visit: u32,
    stack: Vec<VersionId>,
    by_price: Vec<(f32, u32)>,
    cheaper_bytes: Vec<u64>,
}

impl Estimator {
    pub(crate) fn new(problem: &Problem<'_>) -> Self {
        Estimator {
            prefetch_claimed_ns: vec![0; problem.trace.operators.len() + 2],
            offload_claimed_ns: 0,
            has_dropped: false,
            undropped_ns: vec![None; problem.lineage.windows().len()],
            visited: vec![0; problem.lineage.versions().len()],
            visit: 0,
            stack: Vec::new(),
            by_price: Vec::new(),
            cheaper_bytes: Vec::new(),
        }
    }

    /// Adds up what the copy channels were given.
    pub(crate) fn look(&mut self, problem: &Problem<'_>, timeline: &Timeline<'_>, operator: usize) {
        let copies = timeline.copies();
        self.has_dropped = timeline.has_dropped();
        self.prefetch_claimed_ns.fill(0);
        self.offload_claimed_ns = 0;
        for &id in timeline.evicted() {
            let window = problem.lineage.window(id);
            if timeline.actions()[id.index()] == Action::Swap {
                let tier = timeline.placement().tier(id);
                if (window.start as usize) <= operator {
                    self.offload_claimed_ns += copies.offload_ns(window.storage, tier);
                }
                if window.used_again {
                    self.prefetch_claimed_ns[window.end as usize + 1] += copies.prefetch_ns(window.storage, tier);
                }
            }
        }
        for index in 1..self.prefetch_claimed_ns.len() {
            self.prefetch_claimed_ns[index] += self.prefetch_claimed_ns[index - 1];
        }
    }

    /// Prefetch time claimed between the pressure point and operator index `end`, that included.
    fn prefetch_claimed_until(&self, operator: usize, end: usize) -> u64 {
        self.prefetch_claimed_ns[end + 1] - self.prefetch_claimed_ns[operator + 1]
    }

    pub(crate) fn candidate(
        &mut self,
        problem: &Problem<'_>,
        timeline: &Timeline<'_>,
        operator: usize,
        id: WindowId,
    ) -> Candidate {
        let (lineage, copies) = (problem.lineage, timeline.copies());
        let window = lineage.window(id);
        let bytes = lineage.bytes(window.storage);
        let idle_since_ns = if window.start == 0 { 0 } else { timeline.finished_ns(window.start as usize - 1) };
        let now_ns = timeline.now_ns();
        let staleness_ns = now_ns - idle_since_ns.min(now_ns);
        let end_ns = lineage.start_ns(window.end as usize);
        let to_use_ns = end_ns.saturating_sub(lineage.start_ns(operator));
        let room = timeline.placement().room_for(window, bytes);
        let tier = room.unwrap_or(Tier::Host);
        let offload_ns = copies.offload_ns(window.storage, tier);
        let prefetch_ns = if window.used_again { copies.prefetch_ns(window.storage, tier) } else { 0 };
        let offload_exposed_ns = (timeline.offload_free_ns().max(idle_since_ns) + offload_ns).saturating_sub(now_ns);
        let prefetch_exposed_ns = if window.used_again {
            let claimed = self.prefetch_claimed_until(operator, window.end as usize);
            (claimed + prefetch_ns).saturating_sub(to_use_ns)
        } else {
            0
        };
        let producer = lineage.version(window.version).producer;
        let own_recompute_ns = producer.map_or(0, |producer| lineage.cost_ns(producer));
        let can_recompute = window.recomputable && problem.actions.recompute;
        let recompute_ns = if can_recompute && window.used_again {
            match self.undropped_ns[id.index()] {
                Some(rebuild_ns) if !self.has_dropped => rebuild_ns,
                _ => {
                    let rebuild_ns = self.rebuild_ns(problem, timeline, window.version, window.end);
                    if !self.has_dropped {
                        self.undropped_ns[id.index()] = Some(rebuild_ns);
                    }
                    rebuild_ns
                }
            }
        } else {
            0
        };
        let (dropped_children_bytes, dropped_children_ns) =
            if self.has_dropped { dropped_children(problem, timeline, window.version) } else { (0, 0) };
        Candidate {
            window: id,
            bytes,
            staleness_ns,
            gap_ns: end_ns.saturating_sub(lineage.start_ns(window.start as usize)),
            to_use_ns,
            transfer_ns: offload_ns + prefetch_ns,
            swap_exposed_ns: offload_exposed_ns + prefetch_exposed_ns,
            contention_ns: copies.contention_ns(window.storage, tier) * if window.used_again { 2 } else { 1 },
            own_recompute_ns,
            recompute_ns,
            dropped_children_bytes,
            dropped_children_ns,
            used_again: window.used_again,
            can_swap: problem.actions.swap && room.is_some(),
            can_recompute,
        }
    }

    /// Time to rebuild `version` before operator index `end`: its producer and every ancestor that will be dropped
    /// or dead by then.
    fn rebuild_ns(&mut self, problem: &Problem<'_>, timeline: &Timeline<'_>, version: VersionId, end: u32) -> u64 {
        let lineage = problem.lineage;
        self.visit += 1;
        self.stack.clear();
        self.stack.push(version);
        self.visited[version.index()] = self.visit;
        let (mut total, mut reruns) = (0, 0);
        while let Some(version) = self.stack.pop() {
            let Some(producer) = lineage.version(version).producer else { continue };
            total += lineage.cost_ns(producer);
            reruns += 1;
            if reruns == ANCESTORS_MAX {
                break;
            }
            for &output in lineage.replay_outputs(producer) {
                self.visited[output.index()] = self.visit;
            }
            for &input in lineage.replay_inputs(producer) {
                let there = lineage.version(input).until >= end && !timeline.is_dropped(input);
                if !there && self.visited[input.index()] != self.visit {
                    self.visited[input.index()] = self.visit;
                    self.stack.push(input);
                }
            }
        }
        total
    }

    /// Fills `features`, row-major `[candidates, FEATURES]`, in the order of the feature table.
    pub(crate) fn describe(
        &mut self,
        problem: &Problem<'_>,
        operator: usize,
        deficit_bytes: u64,
        candidates: &[Candidate],
        features: &mut [f32],
    ) {
        let lineage = problem.lineage;
        let makespan = lineage.keep_all_makespan_ns().max(1) as f32;
        let deficit = deficit_bytes.max(1) as f32;
        let total_bytes: u64 = candidates.iter().map(|candidate| candidate.bytes).sum();
        let elapsed = lineage.start_ns(operator) as f32;
        let left = (makespan - elapsed).max(1.0);
        let horizon = problem.trace.operators.len();
        let claimed_after = self.prefetch_claimed_until(operator.min(horizon), horizon) as f32;
        let peak_ahead = peak_ahead(lineage, operator);
        self.rank_by_price(candidates);
        let rows = features.chunks_exact_mut(FEATURES);
        for ((candidate, row), &cheaper) in candidates.iter().zip(rows).zip(&self.cheaper_bytes) {
            let window = lineage.window(candidate.window);
            let bytes = candidate.bytes as f32;
            let covered = (bytes / deficit).min(1.0);
            let transfer = candidate.transfer_ns.max(1) as f32;
            let gap = candidate.gap_ns.max(1) as f32;
            let recompute = candidate.recompute_ns as f32;
            let own = (candidate.own_recompute_ns as f32).min(recompute);
            let values: [f32; FEATURES] = [
                covered,
                (bytes / deficit).ln().clamp(-6.0, 6.0),
                (cheaper as f32 / deficit).min(4.0) / 4.0,
                f32::from(u8::from(window.start <= peak_ahead && peak_ahead < window.end)),
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
                (self.offload_claimed_ns as f32 / elapsed.max(1.0)).min(4.0) / 4.0,
                (claimed_after / left).min(4.0) / 4.0,
                f32::from(u8::from(candidate.can_recompute)),
                elapsed / makespan,
                (deficit / total_bytes.max(1) as f32).min(1.0),
            ];
            row.copy_from_slice(&values);
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

/// Operator index of the highest keep-all bytes from `operator` on.
fn peak_ahead(lineage: &Lineage, operator: usize) -> u32 {
    let ahead = &lineage.keep_all_bytes()[operator..];
    let mut peak = 0;
    for (offset, &bytes) in ahead.iter().enumerate() {
        if bytes > ahead[peak] {
            peak = offset;
        }
    }
    (operator + peak) as u32
}

/// Bytes and rebuild time of dropped storages that `version` would help to rebuild.
fn dropped_children(problem: &Problem<'_>, timeline: &Timeline<'_>, version: VersionId) -> (u64, u64) {
    let lineage = problem.lineage;
    let (mut bytes, mut time) = (0, 0);
    for &consumer in lineage.consumers(version) {
        let mut feeds = false;
        for &output in lineage.replay_outputs(consumer) {
            if timeline.is_dropped(output) {
                bytes += lineage.bytes(lineage.version(output).storage);
                feeds = true;
            }
        }
        if feeds {
            time += lineage.cost_ns(consumer);
        }
    }
    (bytes, time)
}

fn compressed(share: f32) -> f32 {
    (1000.0 * share).ln_1p()
}
