//! A loop that departs from its trace for one iteration is told so, loses no result, and is followed again in the next.

use plimsoll_runtime::{Action, Lineage, Plan};
use plimsoll_tests::{Awkward, Departure, Recorded, Stage, one_at_a_time, plan_by, random_plan};

/// The iteration that departs, under each plan.
const DEPARTS: usize = 3;
const ITERATIONS: usize = 8;
const PLANS: usize = 4;

fn plans(lineage: &Lineage) -> [(&'static str, Plan); PLANS] {
    let greedy = |recomputable: bool| if recomputable { Action::Recompute } else { Action::Swap };
    [
        ("all swapped", plan_by(lineage, |_| Action::Swap)),
        ("all recomputed", plan_by(lineage, greedy)),
        ("random", random_plan(lineage, 1)),
        ("random", random_plan(lineage, 2)),
    ]
}

/// Departs once under every plan, without a budget and under a tight one. Returns what the reports say.
fn survives(departure: Departure) -> Vec<String> {
    let _running = one_at_a_time();
    // Threads play no part here, and on a busy machine convolutions wait long for each other's.
    tch::set_num_threads(1);
    let departs = |iteration| (iteration == DEPARTS).then_some(departure);
    let mut untouched = Awkward::new(7);
    let mut stage = |iterations: usize, departs: &dyn Fn(usize) -> Option<Departure>| {
        let losses: Vec<f64> = (0..iterations).map(|iteration| untouched.iterate(departs(iteration))).collect();
        Stage::of(&losses, &untouched)
    };
    let mut expected = vec![stage(Recorded::<Awkward>::ITERATIONS, &|_| None)];
    expected.extend((0..2 * PLANS).map(|_| stage(ITERATIONS, &departs)));
    // Its bytes would count.
    drop(untouched);

    let mut recorded = Recorded::awkward(7);
    Stage::of(&recorded.losses, &recorded.workload).assert_same(&expected[0], "while recording");
    let half = recorded.trace.peak_bytes / 2;
    let cases: Vec<_> =
        plans(&recorded.lineage).into_iter().flat_map(|plan| [(plan.clone(), u64::MAX), (plan, half)]).collect();
    let mut reasons = Vec::new();
    for (((kind, plan), budget_bytes), expected) in cases.iter().zip(&expected[1..]) {
        let what = format!("{departure:?}, {kind}, within {budget_bytes} bytes");
        let (prediction, reports) = recorded
            .follow(plan, *budget_bytes, ITERATIONS, |workload, iteration| workload.iterate(departs(iteration)));
        let noticed = reports[DEPARTS].deviation.is_some();
        for (iteration, report) in reports.iter().enumerate() {
            // The first iteration only matches the loop to its trace.
            let followed = iteration != 0 && !(noticed && iteration == DEPARTS);
            assert_eq!(report.followed, followed, "{what}, iteration {iteration}: {:?}", report.deviation);
            assert!(report.deviation.is_none() || iteration == DEPARTS, "{what}: {:?}", report.deviation);
            if followed {
                assert_eq!(report.peak_bytes, prediction.peak_bytes, "{what}, iteration {iteration}");
            }
        }
        // Bytes filled in past the dispatcher matter only where the operator that made the storage may be rerun.
        let harmless =
            matches!(departure, Departure::FilledAtOnce | Departure::FilledEarly) && *kind != "all recomputed";
        assert!(noticed || harmless, "{what} went unnoticed");
        reasons.extend(reports[DEPARTS].deviation.clone());
        let losses = &recorded.losses[recorded.losses.len() - ITERATIONS..];
        Stage::of(losses, &recorded.workload).assert_same(expected, &what);
    }
    println!("{departure:?}: {}", reasons[0]);
    reasons
}

fn assert_all_say(reasons: &[String], words: &str) {
    assert!(reasons.iter().all(|reason| reason.contains(words)), "{reasons:#?}");
}

#[test]
fn a_batch_of_another_size() {
    survives(Departure::OtherBatch);
}

#[test]
fn an_operator_that_reads_an_evicted_activation_in_the_middle() {
    assert_all_say(&survives(Departure::ExtraOperator), "the program runs aten::");
}

#[test]
fn an_operator_that_fails() {
    survives(Departure::FailingOperator);
}

#[test]
fn an_iteration_that_gives_up_before_its_backward_pass() {
    assert_all_say(&survives(Departure::EarlyReturn), "the iteration ends before operator");
}

#[test]
fn bytes_filled_in_past_the_dispatcher() {
    assert_all_say(&survives(Departure::FilledAtOnce), "filled in outside the dispatcher");
}

#[test]
fn bytes_filled_in_past_the_dispatcher_long_before_they_are_read() {
    assert_all_say(&survives(Departure::FilledEarly), "filled in outside the dispatcher");
}
