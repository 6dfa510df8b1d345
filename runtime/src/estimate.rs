//! What evicting a storage would cost, given what is evicted already: the facts and features of candidates.

use crate::features::{Ahead, Describer, Scene};
use crate::hardware::Tier;
use crate::lineage::{Lineage, VersionId, WindowId};
use crate::observation::Candidate;
use crate::outlook::Outlook;
use crate::plan::Action;
use crate::sweep::Problem;
use crate::timeline::{Pressed, Timeline};

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
    outlook: Outlook,
    describer: Describer,
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
            outlook: Outlook::default(),
            describer: Describer::default(),
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

    /// Fills `features`, row-major `[candidates, FEATURES]` and one row more where waiting may be chosen, in the order of the
    /// feature table.
    pub(crate) fn describe(
        &mut self,
        problem: &Problem<'_>,
        timeline: &Timeline<'_>,
        (operator, Pressed { deficit_bytes, wait }): (usize, Pressed),
        candidates: &[Candidate],
        features: &mut [f32],
    ) {
        let lineage = problem.lineage;
        self.outlook.look(lineage, timeline.evicted(), operator, problem.budget_bytes);
        let horizon = problem.trace.operators.len();
        let scene = Scene {
            makespan_ns: lineage.keep_all_makespan_ns(),
            elapsed_ns: lineage.start_ns(operator),
            deficit_bytes,
            wait,
            offload_claimed_ns: self.offload_claimed_ns,
            prefetch_claimed_ns: self.prefetch_claimed_until(operator.min(horizon), horizon),
        };
        let peak_ahead = peak_ahead(lineage, operator);
        let (outlook, claimed_ns) = (&self.outlook, &self.prefetch_claimed_ns);
        let ahead = |row: usize| {
            let window = lineage.window(candidates[row].window);
            let (over_budget_time, over_budget_area) = outlook.shares(window, candidates[row].bytes);
            Ahead {
                covers_peak: window.start <= peak_ahead && peak_ahead < window.end,
                over_budget_time,
                over_budget_area,
                prefetch_claimed_ns: claimed_ns[window.end as usize + 1] - claimed_ns[operator + 1],
            }
        };
        self.describer.describe(&scene, candidates, ahead, features);
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
