//! What evicting a storage would cost, given what is evicted already: the facts and features of candidates.
//!
//! A decision leaves most of them as they were. What does not change between two pressure points is not found out again:
//! see [`reruns`], [`Outlook`] and [`Describer`].

pub(crate) mod features;
mod outlook;
mod reruns;

use self::features::{Ahead, Describer, Scene};
use self::outlook::Outlook;
pub(crate) use self::reruns::ANCESTORS_MAX;
use self::reruns::Reruns;
use crate::hardware::Tier;
use crate::lineage::{Lineage, WindowId};
use crate::observation::Candidate;
use crate::plan::{Action, ActionSet};
use crate::sweep::Problem;
use crate::timeline::{Pressed, Timeline};

/// Estimates what evicting a window would cost, given what is evicted already. Owns the scratch it needs.
pub(crate) struct Estimator {
    /// Ends of swapped windows after the pressure point, and the prefetch time claimed until each, that included.
    claims: Vec<(u32, u64)>,
    offload_claimed_ns: u64,
    /// Per candidate: prefetch time claimed from the pressure point until its window's end.
    claimed_ns: Vec<u64>,
    /// Per operator index: that of the highest keep-all bytes from it on.
    peak_ahead: Vec<u32>,
    reruns: Reruns,
    outlook: Outlook,
    describer: Describer,
}

impl Estimator {
    pub(crate) fn new(problem: &Problem<'_>) -> Self {
        Estimator {
            claims: Vec::new(),
            offload_claimed_ns: 0,
            claimed_ns: Vec::new(),
            peak_ahead: peaks_ahead(problem.lineage),
            reruns: Reruns::new(problem.lineage),
            outlook: Outlook::new(problem.trace.operators.len()),
            describer: Describer::default(),
        }
    }

    /// Adds up what the copy channels were given.
    fn look(&mut self, problem: &Problem<'_>, timeline: &Timeline<'_>, operator: usize) {
        let copies = timeline.copies();
        self.claims.clear();
        self.offload_claimed_ns = 0;
        let mut claimed_ns = 0;
        for &id in timeline.evicted() {
            if timeline.actions()[id.index()] == Action::Swap {
                let (window, tier) = (problem.lineage.window(id), timeline.placement().tier(id));
                if (window.start as usize) <= operator && !problem.lineage.begins_away(id) {
                    self.offload_claimed_ns += copies.offload_ns(window.storage, tier);
                }
                if window.used_again && window.end as usize > operator {
                    claimed_ns += copies.prefetch_ns(window.storage, tier);
                    self.claims.push((window.end, claimed_ns));
                }
            }
        }
        self.reruns.look(problem.lineage, timeline.dropped());
    }

    /// The windows that one of `actions` can evict at the pressure point before `operator`, with their facts.
    pub(crate) fn find_candidates(
        &mut self,
        problem: &Problem<'_>,
        timeline: &Timeline<'_>,
        (operator, actions): (usize, ActionSet),
        candidates: &mut Vec<Candidate>,
    ) {
        self.look(problem, timeline, operator);
        candidates.clear();
        self.claimed_ns.clear();
        let (mut claimed_ns, mut later) = (0, 0);
        // Open windows are in order of their ends, and so are claims.
        for &id in timeline.open_windows() {
            let end = problem.lineage.window(id).end;
            while let Some(&(_, until_ns)) = self.claims.get(later).filter(|&&(claimed, _)| claimed <= end) {
                (claimed_ns, later) = (until_ns, later + 1);
            }
            let candidate = self.candidate(problem, timeline, (operator, actions), id, claimed_ns);
            if candidate.can_swap || candidate.can_recompute {
                candidates.push(candidate);
                self.claimed_ns.push(claimed_ns);
            }
        }
    }

    fn candidate(
        &mut self,
        problem: &Problem<'_>,
        timeline: &Timeline<'_>,
        (operator, actions): (usize, ActionSet),
        id: WindowId,
        claimed_ns: u64,
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
        let prefetch_exposed_ns =
            if window.used_again { (claimed_ns + prefetch_ns).saturating_sub(to_use_ns) } else { 0 };
        let producer = lineage.version(window.version).producer;
        let own_recompute_ns = producer.map_or(0, |producer| lineage.cost_ns(producer));
        let can_recompute = window.recomputable && actions.recompute;
        let recompute_ns = if can_recompute && window.used_again { self.reruns.rebuild_ns(lineage, id) } else { 0 };
        let children = self.reruns.children(lineage, window.version);
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
            dropped_children_bytes: children.bytes,
            dropped_children_ns: children.ns,
            used_again: window.used_again,
            can_swap: actions.swap && room.is_some(),
            can_recompute,
        }
    }

    /// Fills `features`, row-major `[candidates, FEATURES]` and one row more where waiting may be chosen, in the order of the
    /// feature table, for what [`Self::find_candidates`] found.
    pub(crate) fn describe(
        &mut self,
        problem: &Problem<'_>,
        timeline: &Timeline<'_>,
        (operator, Pressed { deficit_bytes, wait, .. }): (usize, Pressed),
        candidates: &[Candidate],
        features: &mut [f32],
    ) {
        let lineage = problem.lineage;
        self.outlook.look(lineage, timeline.evicted(), operator, problem.budget_bytes);
        let scene = Scene {
            makespan_ns: lineage.keep_all_makespan_ns(),
            elapsed_ns: lineage.start_ns(operator),
            deficit_bytes,
            wait,
            offload_claimed_ns: self.offload_claimed_ns,
            prefetch_claimed_ns: self.claims.last().map_or(0, |&(_, claimed_ns)| claimed_ns),
        };
        let peak_ahead = self.peak_ahead[operator];
        let (outlook, claimed_ns) = (&self.outlook, &self.claimed_ns);
        let ahead = |row: usize| {
            let window = lineage.window(candidates[row].window);
            let (over_budget_time, over_budget_area) = outlook.shares(window, candidates[row].bytes);
            Ahead {
                covers_peak: window.spans(peak_ahead as usize),
                over_budget_time,
                over_budget_area,
                prefetch_claimed_ns: claimed_ns[row],
            }
        };
        self.describer.describe(&scene, candidates, ahead, features);
    }
}

/// Per operator index: that of the highest keep-all bytes from it on, the first of equals.
fn peaks_ahead(lineage: &Lineage) -> Vec<u32> {
    let bytes = lineage.keep_all_bytes();
    let mut peaks = vec![0; bytes.len()];
    let mut peak = bytes.len() - 1;
    for index in (0..bytes.len()).rev() {
        if bytes[index] >= bytes[peak] {
            peak = index;
        }
        peaks[index] = peak as u32;
    }
    peaks
}
