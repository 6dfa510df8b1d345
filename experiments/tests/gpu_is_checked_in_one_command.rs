//! `plimsoll gpu-check` finds out everything about a device in one command, writes as it goes, and tells in words what
//! could not be done. Tried on the CPU, on tiny loops.

use std::path::Path;
use std::sync::LazyLock;

use plimsoll_env::hardware::HardwareProfile;
use plimsoll_tests::bench;
use plimsoll_tests::command::Bench;
use plimsoll_tests::python::{compiler, has_headers, package, torch_packages};
use plimsoll_tests::stand_in::StandIn;
use serde_json::{Value, json};

/// In place of NVIDIA's libraries, which torch is linked with.
static STAND_IN: LazyLock<Option<StandIn>> =
    LazyLock::new(|| StandIn::make(&Path::new(env!("CARGO_TARGET_TMPDIR")).join("stand-in")));

fn bench(name: &str) -> Bench {
    bench!(format!("gpu-check-{name}"))
}

/// What a part found on a loop. The part must have been done.
fn found<'a>(report: &'a Value, part: &str, member: &str) -> &'a Value {
    let step = step(report, part, member);
    assert_eq!(step["outcome"], "done", "{step}");
    &step["found"]
}

fn step<'a>(report: &'a Value, part: &str, member: &str) -> &'a Value {
    let steps = report["steps"].as_array().unwrap();
    let step = steps.iter().find(|step| step["part"] == part && step["member"] == member);
    step.unwrap_or_else(|| panic!("{part} on {member} is missing: {steps:?}"))
}

#[test]
fn bits_are_compared_and_budgets_held_for_both_families() {
    let bench = bench("identity");
    bench.succeed("gpu-check --device cpu --part identity --minutes 30 --out out");
    let report = bench.json("out/gpu-check.json");
    for member in ["gpt-tiny", "resnet-tiny"] {
        let found = found(&report, "identity", member);
        assert_eq!((&found["untouched_loop_repeats"], &found["do_not_repeat"]), (&true.into(), &json!([])), "{found}");
        assert_eq!(found.get("failures"), None, "{found}");
        let verdicts = found["verdicts"].as_array().unwrap();
        assert_eq!(verdicts.len(), 4, "swap, recompute, both, and a budget from the first iteration on");
        for verdict in verdicts {
            assert_eq!((&verdict["identical"], &verdict["held"]), (&true.into(), &true.into()), "{verdict}");
            let peaks = ["peak_bytes", "budget_bytes", "keep_all_peak_bytes"].map(|key| verdict[key].as_u64().unwrap());
            assert!(0 < peaks[0] && peaks[0] <= peaks[1] && peaks[1] < peaks[2], "{verdict}");
            // A forced plan's peak is the predicted one to the byte.
            if !verdict["actions"].is_null() {
                assert_eq!(verdict["peak_bytes"], verdict["predicted_peak_bytes"], "{verdict}");
                let (swap, recompute) = (&verdict["actions"]["swap"], &verdict["actions"]["recompute"]);
                assert!(*swap == true || verdict["offloaded_bytes"] == 0, "{verdict}");
                assert!(*recompute == true || verdict["reruns"] == 0, "{verdict}");
            }
        }
    }
}

#[test]
fn batches_of_any_length_keep_their_bits_within_a_budget() {
    let bench = bench("lengths");
    bench.succeed("gpu-check --device cpu --part lengths --minutes 10 --out out");
    let report = bench.json("out/gpu-check.json");
    let found = found(&report, "lengths", "gpt-tiny-lengths");
    let alone = found["left_alone"].as_array().unwrap();
    assert!(alone.len() == 2 && alone.iter().all(|alone| alone["repeats"] == true), "{found}");
    let under_budgets = found["under_budgets"].as_array().unwrap();
    assert_eq!(under_budgets.len(), 3);
    for under_budget in under_budgets {
        assert_eq!((&under_budget["identical"], &under_budget["held"]), (&true.into(), &true.into()), "{found}");
        // All but those by which the program was found; of several batches, that and then one for each.
        let known = if under_budget["passes"] == 1 { 50 } else { 20 };
        assert!(under_budget["known"].as_u64() > Some(known), "{found}");
    }
    for tight in [1, 2] {
        assert!(under_budgets[tight]["planned"].as_u64() > Some(0), "{found}");
    }
}

#[test]
fn policies_are_measured_beside_their_predictions() {
    let bench = bench("compare");
    bench.succeed("gpu-check --device cpu --part compare --minutes 30 --out out");
    let report = bench.json("out/gpu-check.json");
    let found = found(&report, "compare", "gpt-tiny");
    let points = found["points"].as_array().unwrap();
    let names: Vec<_> = points.iter().map(|point| point["policy"].as_str().unwrap()).collect();
    assert!(names.starts_with(&["keep-all"]) && names.ends_with(&["recompute-all", "swap-all"]), "{names:?}");
    for point in points {
        assert_eq!((&point["peak_error_bytes"], &point["followed"]), (&0.into(), &true.into()), "{point}");
    }
    let least = |name| points.iter().find(|point| point["policy"] == name).unwrap()["measured"]["peak_bytes"].as_u64();
    assert!(least("recompute-all") < least("keep-all") && least("swap-all") < least("keep-all"));
    // What it leaves can be read elsewhere.
    assert!(bench.path("out/gpt-tiny.plimsoll.gz").exists());
}

/// What parts find of jobs in Python on the processor; none where tests go without Python.
fn jobs(name: &str, parts: &str) -> Option<Value> {
    let torch = torch_packages()?;
    let mut bench = bench(name);
    bench.set("PYTHONPATH", std::env::join_paths(torch).unwrap());
    for (variable, value) in compiler(&bench.path("inductor")) {
        bench.set(variable, value);
    }
    for (variable, value) in STAND_IN.iter().flat_map(|stand_in| stand_in.late(0)) {
        bench.set(variable, value);
    }
    let package = package(&bench.path("package")).display().to_string();
    bench.succeed(&format!("gpu-check --device cpu {parts} --package {package} --minutes 30 --out out"));
    Some(bench.json("out/gpu-check.json"))
}

/// The job of that part kept its bits within its budget, by plan.
fn is_within_budget(report: &Value, part: &str) {
    let found = found(report, part, "gpt-tiny");
    assert_eq!(found["untouched_job_repeats"], true, "{found}");
    for verdict in ["watched", "within_a_budget"].map(|key| &found[key]) {
        assert_eq!(verdict["identical"], true, "{part}: {found}");
    }
    let within = &found["within_a_budget"];
    assert!(within["peak_bytes"].as_u64() <= within["budget_bytes"].as_u64(), "{part}: {found}");
    assert!(within["last"]["offloaded_bytes"].as_u64() > Some(0), "{part}: {found}");
}

#[test]
fn jobs_in_python_keep_their_bits_within_a_budget() {
    let parts = "--part python --part streams --part throughout --part test-jobs --at-once 2";
    let Some(report) = jobs("jobs", parts) else { return };
    for part in ["python", "throughout"] {
        is_within_budget(&report, part);
    }
    assert_eq!(step(&report, "python", "resnet-tiny")["outcome"], "not run: ValueError: there is no such net here");
    assert_eq!(step(&report, "streams", "gpt-tiny")["outcome"], "not run: ValueError: a processor has no streams");
    let judged = &found(&report, "test-jobs", "gpt-tiny")["jobs"][0];
    assert_eq!((&judged["job"], &judged["identical"]), (&"lent.py".into(), &true.into()), "{judged}");
    let bytes = |key: &str| judged[key].as_u64().unwrap();
    assert!(bytes("peak_bytes") <= bytes("budget_bytes"), "{judged}");
    assert!(judged["report"]["reactive_evictions"].as_u64() > Some(20), "{judged}");
    let order: Vec<_> = report["steps"].as_array().unwrap().iter().map(|step| step["part"].as_str().unwrap()).collect();
    assert_eq!(
        (&report["at_once"], &order[3..]),
        (&2.into(), &["python"; 2][..]),
        "what is timed runs alone, afterwards"
    );
}

#[test]
fn jobs_in_python_that_are_compiled_do_too() {
    if !has_headers() {
        return;
    }
    let Some(report) = jobs("compiled-jobs", "--part compiled") else { return };
    is_within_budget(&report, "compiled");
}

#[test]
fn what_could_not_be_done_is_told_and_stops_nothing_else() {
    let bench = bench("told");
    bench.succeed(
        "gpu-check --device cpu --part pytorch --part memory --part batch --part python --part interceptor --part probe \
         --python no-such-python --minutes 10 --out out",
    );
    let report = bench.json("out/gpu-check.json");
    for (part, why) in [
        ("pytorch", "no-such-python: "),
        ("memory", "libtorch does not"),
        ("batch", "libtorch does not"),
        ("python", "--package names no folder"),
    ] {
        let outcome = step(&report, part, "gpt-tiny")["outcome"].as_str().unwrap();
        assert!(outcome.starts_with(&format!("not run: {why}")), "{outcome}");
    }
    let profile = std::fs::read_to_string(bench.path("out/measured.toml")).unwrap();
    let profile = HardwareProfile::parse(Path::new("measured.toml"), &profile).unwrap();
    assert_eq!(found(&report, "probe", "gpt-tiny")["profile"], serde_json::to_value(profile).unwrap());
    let cost = &found(&report, "interceptor", "gpt-tiny")["cost"];
    assert!(cost["operators"].as_u64() > Some(100) && cost["plain_ns"].as_u64() > Some(0), "{cost}");
}

#[test]
fn a_machine_without_a_gpu_gets_one_clear_line() {
    let bench = bench("refused");
    let refusal = bench.refuse("gpu-check --device cuda:1000 --out out");
    assert!(refusal.contains("no NVIDIA driver") || refusal.contains("cuda:1000"), "{refusal}");
    assert!(!bench.path("out").exists());
    assert!(bench.refuse("gpu-check --minutes 0 --out out").contains("--minutes"));
    assert!(bench.refuse("gpu-check --device cpu --policy dtr --out out").contains("--policy: dtr"));
    assert!(!bench.path("out").exists());
}

#[test]
fn a_machine_is_probed_and_described_as_the_shipped_ones_are() {
    let bench = bench("probe");
    bench.succeed("probe --name this-one --out this-one.toml --json copies.json");
    let text = std::fs::read_to_string(bench.path("this-one.toml")).unwrap();
    let profile = HardwareProfile::parse(Path::new("this-one.toml"), &text).unwrap();
    assert_eq!(profile.name, "this-one");
    let copies = bench.json("copies.json");
    let rates = copies["rates"].as_array().unwrap();
    assert!(rates.len() > 2 && rates.windows(2).all(|pair| pair[0]["bytes"].as_u64() < pair[1]["bytes"].as_u64()));
    let last = rates.last().unwrap();
    assert_eq!(last["offload_bytes_per_s"].as_f64(), Some(profile.link.offload_bytes_per_s));
    assert!(bench.refuse("probe --name ../escape").contains("--name"));
}
