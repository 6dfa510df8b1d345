//! The promise: a search is never worse than what it starts from, its plans are lawful and what the timeline says of
//! them is so, the same seed gives the same plan, and where every plan can be tried it finds the best one.

mod support;

use std::ops::ControlFlow;
use std::time::Duration;

use plimsoll_runtime::baselines::{BASELINES, SEARCHES, baseline};
use plimsoll_runtime::lineage::WindowId;
use plimsoll_runtime::search::{Found, Limits, search};
use plimsoll_runtime::{Action, LearnedPolicy, Plan, Prediction, Problem, Timeline, plan};
use support::drawn_policy::drawn_policy;
use support::problems::for_random_problems;

fn allowed(problem: &Problem<'_>, window: usize) -> Vec<Action> {
    let recomputable = problem.lineage.windows()[window].recomputable;
    let lawful = |action: &Action| problem.actions.allows(*action) && (*action != Action::Recompute || recomputable);
    [Action::Keep, Action::Swap, Action::Recompute].into_iter().filter(lawful).collect()
}

fn assert_lawful(seed: u64, problem: &Problem<'_>, plan: &Plan) {
    for (window, action) in plan.actions().iter().enumerate() {
        assert!(allowed(problem, window).contains(action), "seed {seed}: {action:?} for window {window}");
    }
}

/// The best plan of all, where they are few enough to try and one fits.
fn brute_force(problem: &Problem<'_>) -> Option<(Plan, Prediction)> {
    let windows = problem.lineage.windows().len();
    let choices: Vec<_> = (0..windows).map(|window| allowed(problem, window)).collect();
    let count = choices.iter().map(|actions| actions.len() as f64).product::<f64>();
    if count > 3_000.0 {
        return None;
    }
    let mut timeline = Timeline::new(problem.trace, problem.lineage, problem.tiers);
    let plans = (0..count as u64).map(|mut number| {
        let mut plan = Plan::keep_all(windows);
        for (window, actions) in choices.iter().enumerate() {
            plan.set(WindowId(window as u32), actions[(number % actions.len() as u64) as usize]);
            number /= actions.len() as u64;
        }
        plan
    });
    let judged = plans.map(|plan| {
        let prediction = timeline.predict(&plan, problem.budget_bytes);
        (plan, prediction)
    });
    judged.min_by_key(|(_, prediction)| prediction.rank()).filter(|(_, prediction)| prediction.fits())
}

fn searched(problem: &Problem<'_>, starts: &[Plan], limits: Limits, guide: Option<&LearnedPolicy>) -> Found {
    search(*problem, starts, limits, guide, &mut |_| ControlFlow::Continue(()))
}

#[test]
fn a_search_is_never_worse_than_its_starts_and_says_what_is_so() {
    for_random_problems(200, 40, |seed, problem| {
        let planned = BASELINES.map(|name| plan(*problem, baseline(name, seed).unwrap().as_mut()));
        let starts = planned.iter().map(|planned| planned.plan.clone()).collect::<Vec<_>>();
        let limits = Limits { seed, ..Limits::evaluations(500) };
        let found = searched(problem, &starts, limits, None);
        assert_lawful(seed, problem, &found.plan);
        let mut timeline = Timeline::new(problem.trace, problem.lineage, problem.tiers);
        assert_eq!(timeline.predict(&found.plan, problem.budget_bytes), found.prediction, "seed {seed}");
        for start in &planned {
            assert!(found.prediction.rank() <= start.prediction.rank(), "seed {seed}: worse than a start");
        }
        let ranks: Vec<_> = found.curve.iter().map(|improvement| improvement.prediction.rank()).collect();
        assert!(ranks.is_sorted_by(|earlier, later| later < earlier), "seed {seed}: {ranks:?}");
        assert_eq!(ranks.last(), Some(&found.prediction.rank()), "seed {seed}");
        let again = searched(problem, &starts, limits, None);
        assert_eq!((again.plan, again.evaluations), (found.plan, found.evaluations), "seed {seed}");
    });
}

#[test]
fn every_search_finds_the_best_plan_where_all_can_be_tried() {
    let mut found = [0; SEARCHES.len()];
    let mut tried = 0;
    for_random_problems(600, 14, |seed, problem| {
        let Some((_, best)) = brute_force(problem) else { return };
        tried += 1;
        for (name, found) in SEARCHES.into_iter().zip(&mut found) {
            let planned = plan(*problem, baseline(name, seed).unwrap().as_mut());
            assert_lawful(seed, problem, &planned.plan);
            assert!(planned.prediction.rank() >= best.rank(), "seed {seed}: {name} beats brute force");
            *found += usize::from(planned.prediction.rank() == best.rank());
        }
    });
    let shares = found.map(|found| 100 * found / tried);
    eprintln!("{SEARCHES:?} find the best plan in {shares:?} % of {tried} cases");
    assert!(tried >= 150, "{tried} cases are too few");
    for ((name, share), least) in SEARCHES.into_iter().zip(shares).zip([92, 95, 95]) {
        assert!(share >= least, "{name} finds the best plan in {share} % of cases");
    }
}

#[test]
fn searches_give_the_same_plan_for_the_same_seed() {
    for_random_problems(3, 30, |seed, problem| {
        for name in SEARCHES {
            let plans = [0; 2].map(|_| plan(*problem, baseline(name, seed).unwrap().as_mut()).plan);
            assert_eq!(plans[0], plans[1], "{name}, seed {seed}");
        }
    });
}

#[test]
fn a_guide_has_a_part_in_the_search_and_the_promises_hold() {
    let mut others = 0;
    for_random_problems(40, 120, |seed, problem| {
        let limits = Limits { seed, ..Limits::evaluations(1_000) };
        let guide = drawn_policy(seed);
        let guided = searched(problem, &[], limits, Some(&guide));
        assert_lawful(seed, problem, &guided.plan);
        let mut timeline = Timeline::new(problem.trace, problem.lineage, problem.tiers);
        assert_eq!(timeline.predict(&guided.plan, problem.budget_bytes), guided.prediction, "seed {seed}");
        let again = searched(problem, &[], limits, Some(&guide));
        assert_eq!((again.plan, again.evaluations), (guided.plan, guided.evaluations), "seed {seed}");
        others += usize::from(searched(problem, &[], limits, None).curve != guided.curve);
    });
    assert!(others > 20, "a guide made a difference {others} times");
}

#[test]
fn a_search_ends_when_it_is_told_to() {
    let mut ended = 0;
    for_random_problems(20, 30, |seed, problem| {
        let limits = Limits { time: Some(Duration::from_secs(3600)), ..Limits::evaluations(u64::MAX) };
        let mut calls = 0;
        search(*problem, &[], limits, None, &mut |_| {
            calls += 1;
            if calls == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        // None, where keep-all cannot be bettered.
        assert!(calls == 3 || calls == 0, "seed {seed}: it was told {calls} times");
        ended += usize::from(calls == 3);
    });
    assert!(ended > 10, "{ended} searches had to be ended");
}
