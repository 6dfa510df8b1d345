//! The promise: what a real GPU's loops were recorded as is planned here as it was there, better than by the baselines.

use std::path::{Path, PathBuf};

use plimsoll_env::hardware::HardwareProfile;
use plimsoll_runtime::baselines::baseline;
use plimsoll_runtime::search::Limits;
use plimsoll_runtime::{ActionSet, Lineage, Planner, PolicyFile, Problem, Trace, plan};

/// Plans that the search may try: as many on every machine.
const EVALUATIONS: u64 = 2_000;

fn at(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// A trace of `experiments/traces/`.
fn recorded(name: &str) -> Trace {
    Trace::load(at(&format!("experiments/traces/{name}.plimsoll.gz"))).unwrap()
}

#[test]
fn loops_recorded_on_an_h200_are_planned_better_than_by_baselines() {
    let link = HardwareProfile::load(at("configs/hardware/h200-measured.toml")).unwrap().link;
    assert!(link.contention_each_ns > 0, "a GPU's host queues copies");
    for (name, policy) in [("h200-gpt2-small", "gpt2"), ("h200-gpt2-medium", "gpt2"), ("h200-resnet50", "resnet224")] {
        let trace = recorded(name);
        assert_eq!(trace.device, "NVIDIA H200");
        let lineage = Lineage::of(&trace);
        assert_eq!(lineage.keep_all_peak_bytes(), trace.peak_bytes, "{name}");
        let budget_bytes = (0.6 * trace.peak_bytes as f64) as u64;
        let problem =
            Problem { trace: &trace, lineage: &lineage, tiers: link.into(), budget_bytes, actions: ActionSet::ALL };
        let policy = PolicyFile::load(at(&format!("configs/policies/{policy}.policy"))).unwrap().into_policy();
        let planner = Planner { limits: Limits::evaluations(EVALUATIONS), ..Planner::default() };
        let planned = planner.plan(problem, Some(&policy)).planned;
        assert!(planned.fits(), "{name}");
        for other in ["dtr", "dtr-swap", "capuchin", "chen", "vdnn-dyn"] {
            let by_other = plan(problem, baseline(other, 0).unwrap().as_mut());
            assert!(planned.is_better_than(&by_other), "{name}: {other} is no worse");
        }
    }
}
