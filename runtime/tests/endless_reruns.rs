//! The promise: a plan that rebuilds the same storages again and again is given up, soon, and the same way whoever asks.

mod support;

use plimsoll_runtime::baselines::{BASELINES, baseline};
use plimsoll_runtime::lineage::WindowId;
use plimsoll_runtime::search::{Limits, search};
use plimsoll_runtime::{Action, ActionSet, Lineage, Link, Plan, Problem, Timeline, Trace, plan};
use support::script::{BYTES, Script};

/// A recurrence of `steps` steps, each of which reads the two before it: all of them are read again in reverse order.
/// With everything dropped, and no room to keep what was rebuilt, each read rebuilds all steps before it.
fn recurrence(steps: u32) -> Trace {
    let mut script = Script::new(2);
    for step in 2..steps {
        script.run(100).reads(step - 1).reads(step - 2).creates(step);
    }
    for step in (2..steps).rev() {
        script.run(100).reads(step).frees(step);
    }
    script.trace()
}

fn all_recomputed(lineage: &Lineage) -> Plan {
    let mut plan = Plan::keep_all(lineage.windows().len());
    for (index, window) in lineage.windows().iter().enumerate().filter(|(_, window)| window.recomputable) {
        if window.used_again {
            plan.set(WindowId(index as u32), Action::Recompute);
        }
    }
    plan
}

/// Too few for what two branches of the recurrence need beside each other.
const LITTLE: u64 = 4 * BYTES;

#[test]
fn a_plan_that_reruns_without_end_is_given_up_and_keeps_everything() {
    let (short, long) = (recurrence(8), recurrence(400));
    for (trace, given_up) in [(&short, false), (&long, true)] {
        let lineage = Lineage::of(trace);
        let mut timeline = Timeline::new(trace, &lineage, Link::symmetric(1e9, 0));
        let plan = all_recomputed(&lineage);
        let prediction = timeline.predict(&plan, LITTLE);
        assert_eq!(prediction.given_up, given_up, "{prediction:?}");
        let (schedule, scheduled) = timeline.schedule(&plan, LITTLE);
        assert_eq!((scheduled, schedule.steps().is_empty()), (prediction, given_up));
        assert_eq!(timeline.explain(&plan, LITTLE, 3).prediction, prediction);
        let keep_all = timeline.predict(&Plan::keep_all(lineage.windows().len()), LITTLE);
        if given_up {
            assert_eq!(prediction.over_budget_bytes, keep_all.over_budget_bytes);
            assert!(prediction.makespan_ns > keep_all.makespan_ns);
        } else {
            assert!(prediction.reruns > 8, "{prediction:?}");
        }
    }
}

#[test]
fn changes_to_and_from_plans_that_are_given_up_are_predicted_as_whole_plans() {
    let trace = recurrence(160);
    let lineage = Lineage::of(&trace);
    let mut timeline = Timeline::new(&trace, &lineage, Link::symmetric(1e9, 0));
    let mut afresh = Timeline::new(&trace, &lineage, Link::symmetric(1e9, 0));
    let mut plan = all_recomputed(&lineage);
    let mut given_up = [0; 2];
    timeline.rebase(&plan, LITTLE);
    for round in 0..2 {
        // Kept one after another, until nothing is rebuilt too often any more; and back.
        for window in (0..lineage.windows().len() as u32).map(WindowId) {
            let action = if round == 0 { Action::Keep } else { all_recomputed(&lineage).action(window) };
            plan.set(window, action);
            let expected = afresh.predict(&plan, LITTLE);
            assert_eq!(timeline.predict_changes(&[(window, action)]), expected, "{window:?}");
            assert_eq!(timeline.accept_changes(&[(window, action)]), expected, "{window:?}, accepted");
            given_up[usize::from(expected.given_up)] += 1;
        }
    }
    assert!(given_up.iter().all(|&count| count > 10), "{given_up:?}");
}

#[test]
fn every_baseline_and_the_search_come_to_an_end_where_nothing_holds() {
    let trace = recurrence(200);
    let lineage = Lineage::of(&trace);
    let problem = Problem {
        trace: &trace,
        lineage: &lineage,
        tiers: Link::symmetric(1e9, 0).into(),
        budget_bytes: LITTLE - 1,
        actions: ActionSet::RECOMPUTE,
    };
    for name in BASELINES {
        plan(problem, baseline(name, 0).expect("it is in the list").as_mut());
    }
    let start = all_recomputed(&lineage);
    let found = search(problem, &[start], Limits::evaluations(200), None, &mut |_| std::ops::ControlFlow::Continue(()));
    assert!(!found.prediction.given_up);
}
