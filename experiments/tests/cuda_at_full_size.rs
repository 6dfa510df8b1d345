//! Models at their published sizes, on a CUDA device that computes nothing and copies nothing, and takes as long for it as an
//! H200 would by its data sheet: what matters there only at such sizes. Bits say nothing here; see `cuda_on_a_stand_in.rs`.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use plimsoll_tests::bench;
use plimsoll_tests::command::Bench;
use plimsoll_tests::python::package;
use plimsoll_tests::stand_in::StandIn;
use serde_json::Value;

/// The device; none where tests go without.
static STAND_IN: LazyLock<Option<StandIn>> =
    LazyLock::new(|| StandIn::make(&Path::new(env!("CARGO_TARGET_TMPDIR")).join("stand-in")));

/// The folder of the Python package.
static PACKAGE: LazyLock<PathBuf> =
    LazyLock::new(|| package(&Path::new(env!("CARGO_TARGET_TMPDIR")).join("full-size-package")).to_owned());

/// Memory of an H200.
const BYTES: u64 = 141_000_000_000;

/// The command before the device, in a folder of its own; none where there is no device.
fn bench(name: &str) -> Option<Bench> {
    let stand_in = STAND_IN.as_ref()?;
    let mut bench = bench!(format!("full-size-{name}"));
    for (variable, value) in stand_in.paced("h200", BYTES) {
        bench.set(variable, value);
    }
    Some(bench)
}

/// What a part of the check finds on a published model within that time; none where there is no device.
fn check(part: &str, member: &str, within: Duration) -> Option<Value> {
    let bench = bench(&format!("{part}-{member}"))?;
    let until = (SystemTime::now() + within).duration_since(UNIX_EPOCH).unwrap().as_secs();
    let package = PACKAGE.display();
    let flags = format!("--device cuda --out . --package {package} --part {part} --member {member}");
    bench.succeed(&format!("gpu-check {flags} --until {until}"));
    Some(bench.json(&format!("{part}-{member}.json")))
}

/// Longer than any check takes.
const NO_LIMIT: Duration = Duration::from_secs(10_000);

#[test]
fn a_loop_that_runs_out_of_memory_finishes_within_three_quarters_of_it() {
    let Some(found) = check("memory", "gpt2-medium", NO_LIMIT) else { return };
    let plain = found["plain_loop_within_the_limit"].as_str().unwrap();
    assert!(plain.contains("CUDA out of memory"), "{plain}");
    let held = &found["under_budget"];
    assert!(held["peak_bytes"].as_u64() <= held["budget_bytes"].as_u64(), "{held}");
    assert!(held["reserved_peak_bytes"].as_u64() <= held["limit_bytes"].as_u64(), "{held}");
}

#[test]
fn twice_the_batch_trains_within_the_same_memory() {
    let Some(found) = check("batch", "gpt2-small", NO_LIMIT) else { return };
    let [plain, under_a_budget] = ["plain", "under_a_budget"].map(|how| found["largest"][how].as_u64().unwrap());
    assert!(plain >= 8 && under_a_budget >= 2 * plain, "{found}");
}

#[test]
fn plans_are_followed_to_the_byte_and_the_host_never_waits() {
    for member in ["gpt2-small", "resnet50"] {
        let Some(found) = check("compare", member, Duration::from_secs(8)) else { return };
        let points = found["points"].as_array().unwrap();
        assert!(points.len() >= 3, "{found}");
        for point in points {
            assert_eq!(
                (&point["peak_error_bytes"], &point["followed"]),
                (&0.into(), &true.into()),
                "{member}: {point}"
            );
            assert_eq!(point["host_waits_and_allocations"], serde_json::json!([0, 0]), "{member}: {point}");
        }
        assert!(found.get("failures").is_none(), "{found}");
    }
}

#[test]
fn plain_pytorch_takes_as_much_memory_and_its_checkpoints_peak_is_held() {
    for member in ["gpt2-small", "resnet50"] {
        let Some(found) = check("pytorch", member, NO_LIMIT) else { return };
        let ways = found["ways"].as_array().unwrap();
        let names: Vec<_> = ways.iter().map(|way| way["way"].as_str().unwrap()).collect();
        assert_eq!(names, ["plain", "checkpoint", "save_on_cpu"]);
        let peaks: Vec<f64> =
            ways.iter().map(|way| way["requested_peak_bytes"].as_f64().expect("no failure")).collect();
        assert!(peaks[0] > peaks[1] && peaks[1] > peaks[2], "{found}");
        let keep_all = found["keep_all_peak_bytes"].as_f64().unwrap();
        assert!((keep_all / peaks[0] - 1.0).abs() < 0.03, "{member}: the same model, {keep_all} and {peaks:?}");
        let point = &found["points"][0];
        assert_eq!(point["budget_bytes"].as_f64(), Some(peaks[1]), "{point}");
        assert_eq!((&point["held"], &point["followed"]), (&true.into(), &true.into()), "{point}");
    }
}

#[test]
fn a_job_in_python_is_timed_again_once_it_is_planned_and_goes_as_predicted() {
    for member in ["gpt2-small", "resnet50"] {
        let Some(found) = check("python", member, NO_LIMIT) else { return };
        assert!(found.get("failures").is_none(), "{found}");
        let within = &found["within_a_budget"];
        let [peak, keep_all] = [within, &found["watched"]].map(|verdict| verdict["peak_bytes"].as_f64().unwrap());
        assert!(peak <= 0.75 * keep_all, "{found}");
        assert_eq!(within["last"]["peak_bytes"], within["last"]["predicted"]["peak_bytes"], "{within}");
        assert_eq!((&within["report"]["plans"], &within["report"]["replans"]), (&2.into(), &1.into()), "{within}");
    }
}

#[test]
fn a_job_in_python_with_more_state_than_budget_goes_as_planned() {
    let Some(found) = check("throughout", "gpt2-small", NO_LIMIT) else { return };
    assert!(found.get("failures").is_none() && found.get("no_room").is_none(), "{found}");
    let last = &found["within_a_budget"]["last"];
    assert!(last["peak_bytes"].is_u64() && last["peak_bytes"] == last["predicted"]["peak_bytes"], "{found}");
}

#[test]
fn policies_for_published_sizes_are_better_there_than_those_they_started_from() {
    let Some(bench) = bench("policies") else { return };
    let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
    let configs = configs.display();
    for (config, family, member, budget) in
        [("gpt2", "gpt", "gpt2-small", "60%"), ("resnet224", "resnet", "resnet50", "45%")]
    {
        bench
            .succeed(&format!("record --config {configs}/{config}.toml --workload {member} --device cuda --out trace"));
        let overhead = |policy: &str| {
            let once = "--link 50GB/s --decodes 0 --search-ms 0 --json plan.json";
            bench.succeed(&format!(
                "plan --trace trace --policy {configs}/policies/{policy}.policy --budget {budget} {once}"
            ));
            bench.json("plan.json")["predicted"]["overhead"].as_f64().unwrap()
        };
        let [here, start] = [config, family].map(overhead);
        assert!(here < start, "{member}: an overhead of {here}, of {start} by the policy of {family}");
    }
}
