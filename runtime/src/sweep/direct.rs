//! The promise: what a sweep keeps from one pressure point to the next is what it would find out anew.
//!
//! Facts and features are written down here once more, by their definitions, with nothing kept.

use crate::hardware::Tier;
use crate::lineage::{VersionId, Window, WindowId};
use crate::observation::{Candidate, FEATURES, Wait};
use crate::plan::{Action, ActionSet, Plan};
use crate::policy::Choice;
use crate::sweep::{Problem, Sweep};
use crate::timeline::{Pressed, Timeline};
use crate::{Lineage, Link, SlowTiers};

#[path = "../../tests/support/draw.rs"]
#[allow(dead_code)]
mod draw;
#[path = "../../tests/support/random_edges.rs"]
mod random_edges;
#[path = "../../tests/support/random_trace.rs"]
mod random_trace;

use self::draw::Draw;
use self::random_edges::random_edges;
use self::random_trace::random_trace;

/// Reruns looked at when a candidate's recompute time is estimated.
const ANCESTORS_MAX: usize = 256;

/// A pressure point of a sweep.
struct Point<'s, 'a> {
    problem: Problem<'a>,
    timeline: &'s Timeline<'a>,
    operator: usize,
    pressed: Pressed,
}

impl Point<'_, '_> {
    fn dropped(&self) -> Vec<VersionId> {
        self.timeline.dropped().collect()
    }

    /// Windows that are swapped, with what their prefetches take; nothing for those that are never used again.
    fn swapped(&self) -> impl Iterator<Item = (&Window, WindowId, u64)> {
        let lineage = self.problem.lineage;
        let ids = (0..lineage.windows().len() as u32).map(WindowId);
        ids.filter(|id| self.timeline.actions()[id.index()] == Action::Swap).map(|id| {
            let window = lineage.window(id);
            let prefetch_ns = self.timeline.copies().prefetch_ns(window.storage, self.timeline.placement().tier(id));
            (window, id, if window.used_again { prefetch_ns } else { 0 })
        })
    }

    /// Prefetch time claimed between the pressure point and operator index `end`, that included.
    fn prefetch_claimed_ns(&self, end: usize) -> u64 {
        let within = |window: &Window| (self.operator + 1..=end).contains(&(window.end as usize));
        self.swapped().filter(|(window, ..)| within(window)).map(|(.., prefetch_ns)| prefetch_ns).sum()
    }

    fn offload_claimed_ns(&self) -> u64 {
        let begun = self.swapped().filter(|(window, ..)| window.start as usize <= self.operator);
        let sent = begun.filter(|(_, id, _)| !self.problem.lineage.begins_away(*id));
        let placement = self.timeline.placement();
        sent.map(|(window, id, _)| self.timeline.copies().offload_ns(window.storage, placement.tier(id))).sum()
    }

    /// Its producer and every ancestor that will be dropped or dead by then.
    fn rebuild_ns(&self, window: &Window) -> u64 {
        let (lineage, dropped) = (self.problem.lineage, self.dropped());
        let mut visited = vec![window.version];
        let mut stack = vec![window.version];
        let (mut total_ns, mut reruns) = (0, 0);
        while let Some(version) = stack.pop() {
            let Some(producer) = lineage.version(version).producer else { continue };
            total_ns += lineage.cost_ns(producer);
            reruns += 1;
            if reruns == ANCESTORS_MAX {
                break;
            }
            visited.extend(lineage.replay_outputs(producer));
            for &input in lineage.replay_inputs(producer) {
                let there = lineage.version(input).until >= window.end && !dropped.contains(&input);
                if !there && !visited.contains(&input) {
                    visited.push(input);
                    stack.push(input);
                }
            }
        }
        total_ns
    }

    /// Bytes and rebuild time of dropped storages that `version` would help to rebuild.
    fn children(&self, version: VersionId) -> (u64, u64) {
        let (lineage, dropped) = (self.problem.lineage, self.dropped());
        let (mut bytes, mut ns) = (0, 0);
        for &consumer in lineage.consumers(version) {
            let outputs = lineage.replay_outputs(consumer);
            let lost: Vec<_> = outputs.iter().filter(|output| dropped.contains(output)).collect();
            bytes += lost.iter().map(|output| lineage.bytes(lineage.version(**output).storage)).sum::<u64>();
            ns += if lost.is_empty() { 0 } else { lineage.cost_ns(consumer) };
        }
        (bytes, ns)
    }

    fn candidates(&self) -> Vec<Candidate> {
        let windows = 0..self.problem.lineage.windows().len() as u32;
        windows.map(WindowId).filter_map(|id| self.candidate(id)).collect()
    }

    fn candidate(&self, id: WindowId) -> Option<Candidate> {
        let Point { problem, timeline, operator, .. } = *self;
        let (lineage, copies) = (problem.lineage, timeline.copies());
        let window = lineage.window(id);
        if !timeline.open_windows().contains(&id) {
            return None;
        }
        let bytes = lineage.bytes(window.storage);
        let idle_since_ns = if window.start == 0 { 0 } else { timeline.finished_ns(window.start as usize - 1) };
        let now_ns = timeline.now_ns();
        let end_ns = lineage.start_ns(window.end as usize);
        let to_use_ns = end_ns.saturating_sub(lineage.start_ns(operator));
        let room = timeline.placement().room_for(window, bytes);
        let tier = room.unwrap_or(Tier::Host);
        let offload_ns = copies.offload_ns(window.storage, tier);
        let again = u64::from(window.used_again);
        let prefetch_ns = again * copies.prefetch_ns(window.storage, tier);
        let offload_exposed_ns = (timeline.offload_free_ns().max(idle_since_ns) + offload_ns).saturating_sub(now_ns);
        let claimed_ns = self.prefetch_claimed_ns(window.end as usize);
        let prefetch_exposed_ns = again * (claimed_ns + prefetch_ns).saturating_sub(to_use_ns);
        let can_recompute = window.recomputable && problem.actions.recompute;
        let (dropped_children_bytes, dropped_children_ns) = self.children(window.version);
        Some(Candidate {
            window: id,
            bytes,
            staleness_ns: now_ns.saturating_sub(idle_since_ns),
            gap_ns: end_ns.saturating_sub(lineage.start_ns(window.start as usize)),
            to_use_ns,
            transfer_ns: offload_ns + prefetch_ns,
            swap_exposed_ns: offload_exposed_ns + prefetch_exposed_ns,
            contention_ns: copies.contention_ns(window.storage, tier) * (1 + again),
            own_recompute_ns: lineage.version(window.version).producer.map_or(0, |producer| lineage.cost_ns(producer)),
            recompute_ns: if can_recompute && window.used_again { self.rebuild_ns(window) } else { 0 },
            dropped_children_bytes,
            dropped_children_ns,
            used_again: window.used_again,
            can_swap: self.pressed.actions.swap && room.is_some(),
            can_recompute: can_recompute && self.pressed.actions.recompute,
        })
        .filter(|candidate| candidate.can_swap || candidate.can_recompute)
    }

    /// Time, and bytes × time, over the budget from the pressure point to `end`, with what is evicted gone.
    fn excess(&self, end: usize) -> (u64, f64) {
        let Point { problem, timeline, operator, .. } = *self;
        let lineage = problem.lineage;
        let (mut time_ns, mut area) = (0, 0.0);
        for index in operator..end.min(problem.trace.operators.len()) {
            let gone = timeline.evicted().iter().map(|&id| lineage.window(id));
            let gone = gone.filter(|window| (window.start..window.end).contains(&(index as u32)));
            let relieved: u64 = gone.map(|window| lineage.bytes(window.storage)).sum();
            let over_bytes = lineage.keep_all_bytes()[index] as i64 - relieved as i64 - problem.budget_bytes as i64;
            if over_bytes > 0 {
                let span_ns = lineage.start_ns(index + 1) - lineage.start_ns(index);
                time_ns += span_ns;
                area += over_bytes as f64 * span_ns as f64;
            }
        }
        (time_ns, area)
    }

    fn row(&self, candidates: &[Candidate], candidate: &Candidate) -> [f32; FEATURES] {
        let lineage = self.problem.lineage;
        let window = lineage.window(candidate.window);
        let makespan = lineage.keep_all_makespan_ns().max(1) as f32;
        let (elapsed, deficit) = (lineage.start_ns(self.operator) as f32, self.pressed.deficit_bytes.max(1) as f32);
        let left = (makespan - elapsed).max(1.0);
        let horizon = self.problem.trace.operators.len();
        let total_bytes: u64 = candidates.iter().map(|candidate| candidate.bytes).sum();
        let per_byte = |candidate: &Candidate| candidate.price_ns() as f32 / candidate.bytes.max(1) as f32;
        let cheapest = candidates.iter().map(per_byte).fold(f32::INFINITY, f32::min);
        let rank = |other: &Candidate| (per_byte(other), other.window);
        let is_cheaper = |other: &&Candidate| rank(other) < rank(candidate);
        let cheaper: u64 = candidates.iter().filter(is_cheaper).map(|candidate| candidate.bytes).sum();
        let ahead = (self.operator..=horizon).rev();
        let peak = ahead.max_by_key(|&index| lineage.keep_all_bytes()[index]).unwrap() as u32;
        let ((all_ns, all_area), (time_ns, area)) = (self.excess(horizon), self.excess(window.end as usize));
        let share = |part: f64, whole: f64| if whole > 0.0 { (part / whole) as f32 } else { 1.0 };
        let time_share = share(time_ns as f64, all_ns as f64);
        let area_share = share(area.min(candidate.bytes as f64 * time_ns as f64), all_area);
        let compressed = |share: f32| (1000.0 * share).ln_1p();
        let bytes = candidate.bytes as f32;
        let covered = (bytes / deficit).min(1.0);
        let (transfer, gap) = (candidate.transfer_ns.max(1) as f32, candidate.gap_ns.max(1) as f32);
        let recompute = candidate.recompute_ns as f32;
        let own = (candidate.own_recompute_ns as f32).min(recompute);
        let price = candidate.price_ns() as f32;
        let claimed_ns = self.prefetch_claimed_ns(window.end as usize);
        let wait = self.pressed.wait;
        let of_wait = |share: &dyn Fn(Wait) -> f32| wait.map_or(0.0, share);
        [
            covered,
            (bytes / deficit).ln().clamp(-6.0, 6.0),
            (cheaper as f32 / deficit).min(4.0) / 4.0,
            f32::from(u8::from((window.start..window.end).contains(&peak))),
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
            (self.offload_claimed_ns() as f32 / elapsed.max(1.0)).min(4.0) / 4.0,
            (self.prefetch_claimed_ns(horizon) as f32 / left).min(4.0) / 4.0,
            f32::from(u8::from(candidate.can_recompute)),
            elapsed / makespan,
            (deficit / total_bytes.max(1) as f32).min(1.0),
            time_share,
            area_share,
            compressed(price / makespan / area_share.max(1e-3)),
            ((price / bytes.max(1.0) + 1e-4) / (cheapest + 1e-4)).ln().min(6.0) / 6.0,
            ((claimed_ns as f32 + transfer) / candidate.to_use_ns.max(1) as f32).min(4.0) / 4.0,
            0.0,
            of_wait(&|_| 1.0),
            of_wait(&|wait| compressed(wait.stall_ns as f32 / makespan)),
            of_wait(&|wait| wait.slack_ns as f32 / makespan),
        ]
    }
}

/// What was compared, so that a test that compares nothing fails.
#[derive(Debug, Default)]
struct Compared {
    candidates: usize,
    with_dropped_ancestors: usize,
    with_children: usize,
    over_budget_in_part: usize,
    waits: usize,
}

fn compare(sweep: &Sweep<'_>, compared: &mut Compared, seed: u64) {
    // Where a sweep stands follows from what was decided, not from how it came there.
    let mut fresh = Sweep::new(sweep.problem, Plan::keep_all(sweep.problem.lineage.windows().len()));
    fresh.return_to(&sweep.mark());
    let stands =
        |sweep: &Sweep<'_>| sweep.pressed.map(|(operator, pressed)| (operator, pressed, sweep.candidates.clone()));
    assert_eq!(stands(&fresh), stands(sweep), "seed {seed}");
    let Some(pressure) = sweep.pressure() else { return };
    let (operator, pressed) = sweep.pressed.expect("there is a pressure point");
    let point = Point { problem: sweep.problem, timeline: &sweep.timeline, operator, pressed };
    compared.waits += usize::from(pressed.wait.is_some());
    let expected = point.candidates();
    assert_eq!(pressure.candidates, expected, "seed {seed}, before operator {operator}");
    for (row, candidate) in expected.iter().enumerate() {
        let expected = point.row(&expected, candidate);
        assert_eq!(pressure.row(row), expected, "seed {seed}, before operator {operator}: {candidate:?}");
        compared.candidates += 1;
        compared.with_dropped_ancestors += usize::from(candidate.recompute_ns > candidate.own_recompute_ns);
        compared.with_children += usize::from(candidate.dropped_children_bytes > 0);
        compared.over_budget_in_part += usize::from(expected[21] > 0.0 && expected[21] < 1.0);
    }
}

#[test]
fn what_is_kept_between_pressure_points_is_what_would_be_found_anew() {
    let mut compared = Compared::default();
    for seed in 0..400 {
        let draw = &mut Draw::new(seed);
        let trace = random_trace(draw, 120);
        let lineage = Lineage::between(&trace, random_edges(draw, &trace));
        let host = Link {
            contention_ns_per_byte: draw.pick(&[0.0, 0.01]),
            contention_each_ns: draw.pick(&[0, 0, 30]),
            ..Link::symmetric(1e10, 10)
        };
        let least = *lineage.keep_all_bytes().last().unwrap();
        let over = lineage.keep_all_peak_bytes() - least;
        let tiers = SlowTiers { host_limit_bytes: draw.pick(&[u64::MAX, u64::MAX, over / 3]), ..host.into() };
        let problem = Problem {
            trace: &trace,
            lineage: &lineage,
            tiers,
            budget_bytes: least + over * draw.within(10, 80) / 100,
            actions: ActionSet { swap: draw.chance(70), recompute: true },
        };
        let start = Plan::keep_all(lineage.windows().len());
        let mut sweep =
            if draw.chance(50) { Sweep::weighing_waits(problem, start) } else { Sweep::new(problem, start) };
        let mut plans = vec![sweep.plan().clone()];
        for _ in 0..3 {
            compare(&sweep, &mut compared, seed);
            while let Some(pressure) = sweep.pressure() {
                let choices: Vec<Choice> = pressure.choices().chain(pressure.waiting()).collect();
                sweep.take(draw.pick(&choices));
                compare(&sweep, &mut compared, seed);
                plans.push(sweep.plan().clone());
            }
            // From a plan that it was at before: forwards or backwards, with much changed or little.
            let restarted = draw.below(plans.len() as u64) as usize;
            sweep.restart(&plans[restarted]);
        }
    }
    let Compared { candidates, with_dropped_ancestors, with_children, over_budget_in_part, waits } = compared;
    assert!(candidates > 40_000, "{compared:?}");
    assert!(with_dropped_ancestors.min(with_children).min(over_budget_in_part) > 500, "{compared:?}");
    assert!(waits > 50, "{compared:?}");
}
