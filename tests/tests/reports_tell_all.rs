//! The report of a run agrees with what was measured, as text and as JSON, and the log of events is one that Perfetto
//! reads.

use plimsoll_runtime::ActionSet;
use plimsoll_runtime::torch::{Budget, Report, Runtime};
use plimsoll_tests::budget::{Untouched, run_under};
use plimsoll_tests::perceptron::{Course, Perceptron};
use plimsoll_tests::{fast_link, one_at_a_time};
use serde_json::Value;

const ITERATIONS: usize = 7;

fn run(actions: ActionSet) -> (Runtime, Report) {
    let iterate = |workload: &mut Perceptron, _: usize| workload.iterate(Course::Train(384));
    let untouched = Untouched::run(|| Perceptron::new(12), iterate, ITERATIONS);
    let budget = Budget::bytes(untouched.between(0.6));
    let builder = Runtime::builder().budget(budget).link(fast_link()).actions(actions).log_events();
    let (mut runtime, mut workload) = (builder.build().unwrap(), Perceptron::new(12));
    run_under(&mut runtime, &mut workload, iterate, ITERATIONS);
    let report = runtime.report();
    (runtime, report)
}

#[test]
fn totals_are_those_of_the_iterations() {
    let _running = one_at_a_time();
    let (_, report) = run(ActionSet::SWAP);
    let total = |of: fn(&plimsoll_runtime::torch::IterationReport) -> u64| report.latest.iter().map(of).sum::<u64>();
    assert_eq!(report.iterations as usize, ITERATIONS);
    assert_eq!(report.offloaded_bytes, total(|iteration| iteration.offloaded_bytes));
    assert_eq!(report.prefetched_bytes, total(|iteration| iteration.prefetched_bytes));
    assert_eq!(report.makespan_ns, total(|iteration| iteration.makespan_ns));
    assert_eq!(report.plan_cache_hits + report.plan_cache_misses, report.iterations);
    assert!(report.offloaded_bytes > 0 && report.slow_tier_high_water_bytes > 0);
    assert!(report.prefetched_bytes <= report.offloaded_bytes);

    let json: Value = serde_json::from_str(&report.to_json()).unwrap();
    assert_eq!(json["peak_bytes"], report.peak_bytes);
    assert_eq!(json["latest"].as_array().unwrap().len(), ITERATIONS);
    let last = &json["latest"][ITERATIONS - 1];
    assert_eq!(last["course"], "planned");
    assert_eq!(last["predicted"]["peak_bytes"], last["peak_bytes"]);
    let text = report.to_string();
    assert!(text.contains("plan cache"), "{text}");
}

#[test]
fn the_log_shows_compute_both_channels_and_bytes() {
    let _running = one_at_a_time();
    let (runtime, report) = run(ActionSet::SWAP);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("events.json");
    runtime.write_chrome_trace(&path).unwrap();
    let log: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let events = log["traceEvents"].as_array().unwrap();
    let tracks: Vec<&str> =
        events.iter().filter(|event| event["ph"] == "M").filter_map(|event| event["args"]["name"].as_str()).collect();
    let on = |name: &str| {
        let tid = tracks.iter().position(|track| *track == name).unwrap_or_else(|| panic!("no track {name}"));
        events.iter().filter(move |event| event["ph"] == "X" && event["tid"] == tid)
    };
    assert!(on("compute").any(|event| event["name"].as_str().unwrap().starts_with("aten::")));
    assert!(on("offload channel").count() > 0);
    assert!(on("prefetch channel").count() > 0);
    assert_eq!(on("iterations and stalls").filter(|event| event["name"] == "iteration").count(), ITERATIONS);
    let highest = events.iter().filter(|event| event["ph"] == "C").filter_map(|event| event["args"]["bytes"].as_u64());
    assert!(highest.max().unwrap() <= report.budget_bytes);
    assert!(on("compute").all(|event| event["dur"].as_f64().unwrap() >= 0.0));
}
