//! What jobs ran within a budget is what a policy for their model learns on, which later jobs load.

use std::collections::BTreeMap;
use std::path::Path;

use plimsoll_env::workload::Workload;
use plimsoll_runtime::planner::LEARNED;
use plimsoll_runtime::torch::{Budget, Runtime};
use plimsoll_runtime::{Planner, PolicyFile, Trace};
use plimsoll_tests::bench;
use plimsoll_tests::budget::{Untouched, assert_held, run_under, runtime};
use plimsoll_tests::{Recorded, Stage, build, fast_link, one_at_a_time, shipped_workload};

const ITERATIONS: usize = 8;

fn iterate(workload: &mut Box<dyn Workload>, _: usize) -> f64 {
    workload.iteration().unwrap()
}

/// The traces that a job of the workload, within a budget, has saved in a folder.
fn saved(name: &str, folder: &Path) -> Vec<Trace> {
    let make = || build(&shipped_workload(name), 3);
    let untouched = Untouched::run(make, iterate, ITERATIONS);
    let mut runtime = runtime(untouched.between(0.5));
    assert!(runtime.traces("mine", "cpu").is_empty(), "nothing has run");
    run_under(&mut runtime, &mut make(), iterate, ITERATIONS);
    let traces = runtime.traces("mine", "cpu");
    traces.into_iter().map(|trace| Trace::load(trace.save_in(folder).unwrap()).unwrap()).collect()
}

#[test]
fn a_policy_learns_from_jobs_and_plans_later_ones() {
    let _running = one_at_a_time();
    let bench = bench!("own-policy");
    let configuration = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/traces.toml");
    bench.write("traces.toml", std::fs::read(configuration).unwrap());
    std::fs::create_dir(bench.path("traces")).unwrap();
    for name in ["gpt-tiny", "gpt-tiny-fused"] {
        let recorded = Recorded::of(&shipped_workload(name), 3).trace;
        let traces = saved(name, &bench.path("traces"));
        let [trace] = &traces[..] else { panic!("{name}: {} programs", traces.len()) };
        // Of a job within a budget it is what the loop does left alone; more may be known to be there all the time.
        let does = |trace: &Trace| trace.operators.iter().map(|operator| operator.name).collect::<Vec<_>>();
        assert_eq!((&trace.names, does(trace)), (&recorded.names, does(&recorded)), "{name}");
        assert_eq!(trace.peak_bytes, recorded.peak_bytes, "{name}");
    }
    let train = "train --config traces.toml --traces traces --algorithm evolution --updates 1 --logdir runs --out";
    let trained = bench.succeed(&format!("{train} mine.policy"));
    assert!(!trained.stderr.contains("was trained on"), "{}", trained.stderr);
    let again = bench.succeed(&format!("{train} other.policy --from mine.policy"));
    assert!(!again.stderr.contains("was trained on"), "{}", again.stderr);

    let make = || build(&shipped_workload("bert-tiny"), 5);
    let policy = PolicyFile::load(bench.path("mine.policy")).unwrap();
    assert_eq!(policy.family, "mine");
    let untouched = Untouched::run(make, iterate, ITERATIONS);
    let budget_bytes = untouched.between(0.5);
    let builder = Runtime::builder().policy(policy).planner(Planner::decoding(0, 0)).link(fast_link());
    let (mut runtime, mut workload) = (builder.budget(Budget::bytes(budget_bytes)).build().unwrap(), make());
    let (losses, reports) = run_under(&mut runtime, &mut workload, iterate, ITERATIONS);
    assert_held(&reports, budget_bytes, "by its own policy");
    Stage::of(&losses, &workload).assert_same(&untouched.stage, "by its own policy");
    let report = runtime.report();
    assert!(report.plans > 0 && report.plans_by == BTreeMap::from([(LEARNED, report.plans)]), "{report}");
}
