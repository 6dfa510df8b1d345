//! The promise: what features say of the time ahead is what a look at every operator says.

mod support;

use plimsoll_runtime::baselines::baseline;
use plimsoll_runtime::observation::{FEATURE_TABLE, Pressure};
use plimsoll_runtime::{Action, ActionSet, Lineage, Link, Plan, Problem, Sweep};
use support::draw::Draw;
use support::random_trace::random_trace;

fn column(name: &str) -> usize {
    FEATURE_TABLE.iter().position(|feature| feature.name == name).unwrap()
}

/// For each candidate: the share of the time over the budget that its window spans, and that of bytes × time, at most,
/// which its eviction would take away; by their definitions.
fn expected(problem: &Problem<'_>, plan: &Plan, pressure: &Pressure<'_>) -> Vec<[f64; 2]> {
    let lineage = problem.lineage;
    let over_bytes = |operator: usize| {
        let covers = |&(index, window): &(usize, &plimsoll_runtime::lineage::Window)| {
            plan.actions()[index] != Action::Keep && (window.start as usize..window.end as usize).contains(&operator)
        };
        let relieved: u64 = lineage
            .windows()
            .iter()
            .enumerate()
            .filter(covers)
            .map(|(_, window)| problem.trace.storages[window.storage.index()].bytes)
            .sum();
        lineage.keep_all_bytes()[operator].saturating_sub(relieved + problem.budget_bytes)
    };
    let ahead: Vec<(usize, f64, f64)> = (pressure.operator..problem.trace.operators.len())
        .map(|operator| (operator, over_bytes(operator), lineage.start_ns(operator + 1) - lineage.start_ns(operator)))
        .filter(|&(_, over, _)| over > 0)
        .map(|(operator, over, ns)| (operator, over as f64, ns as f64))
        .collect();
    let time: f64 = ahead.iter().map(|(_, _, ns)| ns).sum();
    let area: f64 = ahead.iter().map(|(_, over, ns)| over * ns).sum();
    let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 1.0 };
    let of_candidate = |candidate: &plimsoll_runtime::observation::Candidate| {
        let window = lineage.window(candidate.window);
        let spanned = ahead.iter().filter(|(operator, ..)| *operator < window.end as usize);
        let (own_time, own_area) =
            spanned.fold((0.0, 0.0), |(time, area), (_, over, ns)| (time + ns, area + over * ns));
        [share(own_time, time), share(own_area.min(candidate.bytes as f64 * own_time), area)]
    };
    pressure.candidates.iter().map(of_candidate).collect()
}

#[test]
fn what_is_still_over_the_budget_is_told_as_it_is() {
    let (time, area) = (column("over_budget_time"), column("over_budget_area"));
    let (mut compared, mut partial) = (0, 0);
    for seed in 0..400 {
        let draw = &mut Draw::new(seed);
        let trace = random_trace(draw, 40);
        let lineage = Lineage::of(&trace);
        let problem = Problem {
            trace: &trace,
            lineage: &lineage,
            tiers: Link::symmetric(1e10, 10).into(),
            budget_bytes: lineage.keep_all_peak_bytes() * draw.within(30, 95) / 100,
            actions: ActionSet::ALL,
        };
        let mut policy = baseline("cheapest", 0).unwrap();
        let mut sweep = Sweep::new(problem, Plan::keep_all(lineage.windows().len()));
        while let Some(pressure) = sweep.pressure() {
            let expected = expected(&problem, sweep.plan(), &pressure);
            for (candidate, [of_time, of_area]) in expected.into_iter().enumerate() {
                let row = pressure.row(candidate);
                assert!((f64::from(row[time]) - of_time).abs() < 1e-4, "seed {seed}: {} is not {of_time}", row[time]);
                assert!((f64::from(row[area]) - of_area).abs() < 1e-4, "seed {seed}: {} is not {of_area}", row[area]);
                compared += 1;
                partial += usize::from(of_area > 0.0 && of_area < 1.0 && of_time < 1.0);
            }
            match policy.choose(&pressure) {
                Some(choice) => sweep.take(choice),
                None => sweep.give_up(),
            }
        }
    }
    assert!(compared > 1000 && partial > 100, "{compared} candidates, {partial} of them neither nothing nor all");
}
