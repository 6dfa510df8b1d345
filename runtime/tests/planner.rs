//! The promise: planning is never worse than any of its parts, says whose plan it is, tells the truth about it, and gives
//! the same plan for the same seed and the same numbers.

mod support;

use std::time::Duration;

use plimsoll_runtime::baselines::{BASELINES, KeepAll, baseline};
use plimsoll_runtime::decode::completed;
use plimsoll_runtime::planner::{LEARNED, LEARNED_SEARCH, PORTFOLIO, SEARCH};
use plimsoll_runtime::search::Limits;
use plimsoll_runtime::{Decided, Planned, Planner, Problem, Timeline, least_feasible_budget, plan};
use support::drawn_policy::drawn_policy;
use support::problems::for_random_problems;

fn evaluations(evaluations: u64, seed: u64) -> Limits {
    Limits { seed, ..Limits::evaluations(evaluations) }
}

fn assert_true(seed: u64, problem: &Problem<'_>, decided: &Decided) {
    let Planned { plan, prediction, .. } = &decided.planned;
    let mut timeline = Timeline::new(problem.trace, problem.lineage, problem.tiers);
    assert_eq!(timeline.predict(plan, problem.budget_bytes), *prediction, "seed {seed}: {}", decided.by);
}

#[test]
fn planning_is_never_worse_than_a_decode_or_a_baseline_of_its_portfolio_and_tells_who_was_best() {
    let mut names = Vec::new();
    for_random_problems(80, 60, |seed, problem| {
        let policy = drawn_policy(seed);
        let planner =
            |portfolio, evaluated| Planner { decodes: 3, portfolio, limits: evaluations(evaluated, seed), threads: 1 };
        for (planner, policy) in [
            (planner(&PORTFOLIO[..], 100), Some(&policy)),
            (planner(&PORTFOLIO[..], 0), Some(&policy)),
            (planner(&[], 100), Some(&policy)),
            (planner(&PORTFOLIO[..], 100), None),
        ] {
            let decided = planner.plan(*problem, policy);
            assert_true(seed, problem, &decided);
            let decodes = policy.map(|policy| plan(*problem, &mut policy.clone()));
            let asked = planner.portfolio.iter().map(|name| plan(*problem, baseline(name, seed).unwrap().as_mut()));
            for other in decodes.into_iter().chain(asked) {
                assert!(
                    decided.planned.prediction.rank() <= other.prediction.rank(),
                    "seed {seed}: {} is worse than a part",
                    decided.by
                );
            }
            let again = planner.plan(*problem, policy);
            assert_eq!((again.planned.plan, again.by), (decided.planned.plan, decided.by), "seed {seed}");
            names.push(decided.by);
        }
    });
    let is_named = |name: &str| names.contains(&name);
    assert!(is_named(LEARNED) && is_named(LEARNED_SEARCH) && is_named(SEARCH), "{names:?}");
    assert!(PORTFOLIO.iter().any(|name| is_named(name)), "{names:?}");
}

#[test]
fn every_baseline_but_two_is_in_the_portfolio() {
    let missing: Vec<_> = BASELINES.iter().filter(|name| !PORTFOLIO.contains(name)).collect();
    assert_eq!(missing, [&"keep-all", &"random"]);
}

#[test]
fn without_time_there_is_one_decode_and_where_it_does_not_fit_whatever_baseline_does() {
    let (mut decodes, mut others) = (0, 0);
    for_random_problems(150, 60, |seed, problem| {
        let policy = drawn_policy(seed);
        let limits = Limits::wall(Duration::ZERO);
        let decided = Planner { limits, ..Planner::default() }.plan(*problem, Some(&policy));
        let decode = plan(*problem, &mut policy.clone());
        if decode.fits() {
            decodes += 1;
            assert_eq!((&decided.planned.plan, decided.by), (&decode.plan, LEARNED), "seed {seed}");
        } else {
            let mut all = BASELINES.iter().map(|name| plan(*problem, baseline(name, 0).unwrap().as_mut()));
            let one_fits = all.any(|planned| planned.fits());
            assert_eq!(decided.planned.fits(), one_fits, "seed {seed}: decided by {}", decided.by);
            others += usize::from(one_fits);
        }
    });
    assert!(decodes > 20 && others > 2, "{decodes} decodes fit, {others} baselines where those did not");
}

#[test]
fn more_is_never_worse() {
    for_random_problems(60, 60, |seed, problem| {
        let policy = drawn_policy(seed);
        let alone = plan(*problem, &mut policy.clone());
        let decodes = Planner::decoding(4, 0).plan(*problem, Some(&policy));
        let whole = Planner { decodes: 4, limits: evaluations(200, 0), ..Planner::default() };
        let whole = whole.plan(*problem, Some(&policy));
        let ranks = [&whole.planned, &decodes.planned, &alone].map(|planned| planned.prediction.rank());
        assert!(ranks.is_sorted(), "seed {seed}: {ranks:?}");
    });
}

#[test]
fn no_plan_takes_less_than_what_cannot_be_avoided_and_some_take_just_that() {
    let mut exact = 0;
    for_random_problems(150, 60, |seed, problem| {
        let unavoidable = problem.unavoidable_bytes();
        let hopeless = Problem { budget_bytes: unavoidable.saturating_sub(1), ..*problem };
        let policies = || BASELINES.iter().map(|name| baseline(name, seed).unwrap());
        let taken = policies().map(|mut policy| {
            let opened = policy.open(&hopeless);
            completed(hopeless, opened, policy.as_mut()).prediction.peak_bytes
        });
        let taken = taken.min().unwrap();
        assert!(taken >= unavoidable, "seed {seed}: {taken} bytes, fewer than {unavoidable}");
        let least = least_feasible_budget(*problem, &mut policies().collect::<Vec<_>>());
        assert!(least >= unavoidable, "seed {seed}: a budget of {least} bytes is held, fewer than {unavoidable}");
        exact += usize::from(taken == unavoidable);
        let keep_all = plan(hopeless, &mut KeepAll);
        assert!(policies().all(|mut policy| plan(hopeless, policy.as_mut()).plan == keep_all.plan), "seed {seed}");
    });
    assert!(exact > 50, "the bound is met {exact} times");
}

#[test]
fn several_threads_plan_no_worse_than_a_decode_and_the_same_where_evaluations_are_limited() {
    let mut names = Vec::new();
    for_random_problems(60, 60, |seed, problem| {
        let policy = drawn_policy(seed);
        let on = |threads, limits| {
            Planner { decodes: 3, limits, threads, ..Planner::default() }.plan(*problem, Some(&policy))
        };
        let [one, four] = [1, 4].map(|threads| on(threads, evaluations(100, seed)));
        assert_eq!((one.planned.plan, one.by), (four.planned.plan, four.by), "seed {seed}");
        let decode = plan(*problem, &mut policy.clone());
        // Ends between two moves, in the middle of a sweep, before the search begins.
        for wall in [20_000, 2_000, 500].map(Duration::from_micros) {
            let decided = on(4, Limits { seed, ..Limits::wall(wall) });
            assert_true(seed, problem, &decided);
            assert!(
                decided.planned.prediction.rank() <= decode.prediction.rank(),
                "seed {seed}: {} is worse than a part",
                decided.by
            );
            names.push(decided.by);
        }
    });
    assert!(names.contains(&LEARNED_SEARCH), "{names:?}");
}
