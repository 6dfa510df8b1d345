//! The promise: changes are predicted exactly as the changed plan would be, whatever the base, and wherever that came from.

mod support;

use plimsoll_runtime::baselines::baseline;
use plimsoll_runtime::lineage::WindowId;
use plimsoll_runtime::timeline::CHANGES_MAX;
use plimsoll_runtime::{Action, ActionSet, Lineage, Link, Plan, Problem, SlowTiers, Timeline, Trace, plan};
use support::draw::Draw;
use support::oracle;
use support::random_edges::random_edges;
use support::random_trace::random_trace;
use support::realistic::realistic_trace;

fn random_link(draw: &mut Draw) -> Link {
    let (contention_ns_per_byte, contention_each_ns) = (draw.pick(&[0.0, 0.01]), draw.pick(&[0, 0, 300]));
    let each_ns = draw.pick(&[0, 0, 700]);
    Link {
        contention_ns_per_byte,
        contention_each_ns,
        each_ns,
        ..Link::symmetric(draw.pick(&[1e9, 1e10, 1e11]), 2_000)
    }
}

fn random_action(draw: &mut Draw, recomputable: bool) -> Action {
    let action = draw.pick(&[Action::Keep, Action::Swap, Action::Recompute]);
    if action == Action::Recompute && !recomputable { Action::Swap } else { action }
}

/// Predicts `changes` times some changes of `plan`, now and then going on from the changed plan.
fn check_changes(
    draw: &mut Draw,
    (trace, lineage): (&Trace, &Lineage),
    tiers: SlowTiers,
    mut plan: Plan,
    budget_bytes: u64,
    changes: usize,
) {
    let windows = lineage.windows().len() as u64;
    if windows == 0 {
        return;
    }
    let mut timeline = Timeline::new(trace, lineage, tiers);
    let mut afresh = Timeline::new(trace, lineage, tiers);
    assert_eq!(timeline.rebase(&plan, budget_bytes), afresh.predict(&plan, budget_bytes), "the base");
    for change in 0..changes {
        let mut changed = plan.clone();
        let mut together: Vec<(WindowId, Action)> = Vec::new();
        for _ in 0..draw.pick(&[1, 1, 2, 3, CHANGES_MAX as u64, CHANGES_MAX as u64 + 1]) {
            let mut id = WindowId(draw.below(windows) as u32);
            if draw.chance(30) {
                // Windows of one storage follow each other closely.
                id = together.last().map_or(id, |&(other, _)| WindowId((other.0 + 1).min(windows as u32 - 1)));
            }
            if together.iter().all(|&(other, _)| other != id) {
                let action = random_action(draw, lineage.window(id).recomputable);
                together.push((id, action));
                changed.set(id, action);
            }
        }
        let expected = afresh.predict(&changed, budget_bytes);
        assert_eq!(timeline.predict_changes(&together), expected, "change {change}: {together:?}");
        if draw.chance(30) {
            plan = changed;
            let accepted =
                if draw.chance(80) { timeline.accept_changes(&together) } else { timeline.rebase(&plan, budget_bytes) };
            assert_eq!(accepted, expected, "change {change}: {together:?}, accepted");
        }
    }
}

#[test]
fn changes_of_random_plans_of_random_traces() {
    for seed in 0..1_500 {
        let draw = &mut Draw::new(seed);
        let operators_max = draw.pick(&[30, 100, 500]);
        let trace = random_trace(draw, operators_max);
        let lineage = Lineage::between(&trace, random_edges(draw, &trace));
        let mut plan = Plan::keep_all(lineage.windows().len());
        let evicted_percent = draw.pick(&[2, 10, 50]);
        for (id, window) in (0..).map(WindowId).zip(lineage.windows()) {
            if draw.chance(evicted_percent) {
                plan.set(id, random_action(draw, window.recomputable));
            }
        }
        let host = random_link(draw);
        let limit_bytes = draw.pick(&[u64::MAX, u64::MAX, lineage.keep_all_peak_bytes() / 4]);
        let tiers = SlowTiers { host_limit_bytes: limit_bytes, ..host.into() };
        let budget_bytes = match draw.below(3) {
            0 => u64::MAX,
            _ => lineage.keep_all_peak_bytes() * draw.within(30, 110) / 100,
        };
        check_changes(draw, (&trace, &lineage), tiers, plan, budget_bytes, 20);
    }
}

#[test]
fn changes_of_plans_that_decodes_make_of_long_traces() {
    for seed in 0..12 {
        let draw = &mut Draw::new(seed);
        let trace = realistic_trace(seed, 1_500);
        let lineage = Lineage::of(&trace);
        let tiers = random_link(draw).into();
        let budget_bytes = lineage.keep_all_peak_bytes() * draw.within(60, 95) / 100;
        let problem = Problem { trace: &trace, lineage: &lineage, tiers, budget_bytes, actions: ActionSet::ALL };
        let policy = draw.pick(&["capuchin", "dtr", "lru", "random"]);
        let planned = plan(problem, baseline(policy, seed).expect("it is in the list").as_mut());
        let (expected, steps) = oracle::predict(&trace, &lineage, tiers, &planned.plan, budget_bytes);
        let (schedule, prediction) = Timeline::new(&trace, &lineage, tiers).schedule(&planned.plan, budget_bytes);
        assert_eq!((prediction, planned.prediction), (expected, expected), "seed {seed}");
        assert!(schedule.steps() == steps, "seed {seed}");
        check_changes(draw, (&trace, &lineage), tiers, planned.plan, budget_bytes, 150);
    }
}
