//! Loops on a CUDA device keep their bits and their budgets: by libtorch's own CUDA half, over a device that is not there.
//! Its kernels are the processor's; what they and copies make is there as late as the order of streams and events allows.
//! See `tests/stand_in/device.h`.

use std::path::Path;
use std::sync::LazyLock;

use plimsoll_tests::bench;
use plimsoll_tests::command::Bench;
use plimsoll_tests::python::{package, torch_packages};
use plimsoll_tests::stand_in::StandIn;
use serde_json::{Value, json};

/// The device; none where tests go without.
static STAND_IN: LazyLock<Option<StandIn>> =
    LazyLock::new(|| StandIn::make(&Path::new(env!("CARGO_TARGET_TMPDIR")).join("stand-in")));

/// A bench before the device.
fn bench(name: &str, seed: u64) -> Option<Bench> {
    let stand_in = STAND_IN.as_ref()?;
    let mut bench = bench!(format!("stand-in-{name}"));
    for (variable, value) in stand_in.late(seed) {
        bench.set(variable, value);
    }
    Some(bench)
}

/// A shipped configuration and a tiny workload of it.
fn tiny(family: &str, workload: &str) -> (String, String) {
    (format!("{}/../configs/{family}.toml", env!("CARGO_MANIFEST_DIR")), format!("{workload}-tiny"))
}

/// Runs a plan, compares every bit, and returns what came of it.
fn run(bench: &Bench, family: &str, workload: &str, policy: &str, more: &str) -> Value {
    let (config, workload) = tiny(family, workload);
    bench.succeed(&format!(
        "run --device cuda --config {config} --workload {workload} --policy {policy} --iterations 3 --verify \
         --json result.json {more}"
    ));
    let result = bench.json("result.json");
    assert_eq!((&result["held"], &result["identical"]), (&true.into(), &true.into()), "{workload}, {policy}: {result}");
    assert_eq!(
        result["measured"]["peak_bytes"], result["predicted"]["peak_bytes"],
        "{workload}, {policy}: the peak is the predicted one"
    );
    result
}

// All families but `lstm`, whose layers libtorch lays out by asking cuDNN.

#[test]
fn loops_keep_their_bits_and_budgets_when_they_recompute() {
    let Some(bench) = bench("recompute", 1) else { return };
    for (family, workload) in
        [("gpt", "gpt"), ("vit", "vit"), ("resnet", "resnet"), ("densenet", "densenet"), ("inception", "squeezenet")]
    {
        let result = run(&bench, family, workload, "dtr", "--budget 85% --actions keep,recompute");
        assert!(result["reruns"].as_u64() > Some(0) && result["offloaded_bytes"] == 0, "{workload}: {result}");
    }
}

#[test]
fn loops_keep_their_bits_and_budgets_when_they_swap() {
    let Some(bench) = bench("swap", 2) else { return };
    for family in ["bert", "vgg", "mobilenet", "unet", "autoencoder"] {
        let result = run(&bench, family, family, "capuchin", "--budget 60% --actions keep,swap");
        assert!(result["offloaded_bytes"].as_u64() > Some(0) && result["reruns"] == 0, "{family}: {result}");
    }
}

#[test]
fn budgets_are_held_from_the_first_iteration_on() {
    let Some(bench) = bench("hold", 3) else { return };
    let loops = ["gpt", "resnet", "vit"].map(|family| {
        let (config, workload) = tiny(family, family);
        format!("{config}:{workload}")
    });
    bench.succeed(&format!("hold --device cuda {} --policy dtr --iterations 9 --json held.json", loops.join(" ")));
    let held = bench.json("held.json");
    let points = held["points"].as_array().unwrap();
    assert_eq!(points.len(), 9, "three loops within three budgets");
    for point in points {
        assert!(point["held"] == true && point["losses_identical"] == true, "{point}");
        assert!(point["planned"].as_u64() > Some(0), "{point}");
        assert_eq!(point["followed"], point["peaks_as_predicted"], "{point}");
    }
}

#[test]
fn batches_of_any_length_keep_their_bits_and_budgets() {
    let Some(bench) = bench("lengths", 5) else { return };
    let (config, workload) = tiny("gpt", "gpt");
    for passes in [1, 3] {
        let hold =
            format!("hold --device cuda {config}:{workload}-lengths --policy dtr --passes {passes} --iterations 30");
        bench.succeed(&format!("{hold} --json held.json"));
        for point in bench.json("held.json")["points"].as_array().unwrap() {
            assert!(point["held"] == true && point["losses_identical"] == true, "{point}");
            assert!(point["known"].as_u64() > Some(20) && point["planned"].as_u64() > Some(0), "{point}");
        }
    }
}

/// Calls for the host to wait, in a run of so many planned iterations.
fn waits(bench: &Bench, policy: &str, iterations: usize) -> i64 {
    let (config, workload) = tiny("gpt", "gpt");
    bench.succeed(&format!(
        "run --device cuda --config {config} --workload {workload} --policy {policy} --budget 100% --iterations {iterations}"
    ));
    bench.json("device.json")["waits"].as_i64().unwrap()
}

#[test]
fn a_plan_makes_the_host_wait_no_oftener_than_no_plan() {
    let Some(mut bench) = bench("waits", 4) else { return };
    bench.set("STAND_IN_REPORT", bench.path("device.json"));
    // Of many, for how often the link is measured before the first one is a matter of time.
    let per_iteration = |policy: &str| ((waits(&bench, policy, 104) - waits(&bench, policy, 4)) as f64 / 100.0).round();
    let (kept, swapped) = (per_iteration("keep-all"), per_iteration("vdnn-all"));
    assert!(kept > 0.0, "the loop reads its loss");
    assert_eq!(swapped, kept, "waits of an iteration that swaps all it can");
    let device = bench.json("device.json");
    assert!(device["late_copies"].as_u64() > Some(100), "{device}");
}

#[test]
fn streams_that_do_not_wait_for_each_other_are_found_out() {
    let (config, workload) = tiny("gpt", "gpt");
    // The default stream for copies, and the copies' streams for it.
    for fault in ["1", "2"] {
        let Some(mut bench) = bench("forgets", 0) else { return };
        bench.set("STAND_IN_FORGETS_WAITS", fault);
        let mut command = bench.command(&format!(
            "run --device cuda --config {config} --workload {workload} --policy vdnn-all --budget 100% --iterations 3 \
             --verify"
        ));
        let output = command.output().unwrap();
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && complaint.contains("the stand-in device: a race: "),
            "{fault}: {complaint}"
        );
    }
}

/// What one part of the check finds on a loop of our own, where nothing is amiss.
fn check(bench: &Bench, part: &str, member: &str, more: &str) -> Value {
    std::fs::create_dir_all(bench.path("out")).unwrap();
    // A time that is never over.
    let until = "--until 99999999999";
    bench.succeed(&format!("gpu-check --device cuda --out out --part {part} --member {member} {until} {more}"));
    let found = bench.json(&format!("out/{part}-{member}.json"));
    assert!(found.get("failures").is_none(), "{found}");
    found
}

/// Jobs in Python of two streams, and of more state than budget, all of which is stepped by several operators in turn.
#[test]
fn the_check_of_jobs_in_python_passes() {
    let (Some(mut bench), Some(torch)) = (bench("jobs", 7), torch_packages()) else { return };
    bench.set("PYTHONPATH", std::env::join_paths(torch).unwrap());
    let package = package(&bench.path("package")).display().to_string();
    for part in ["streams", "foreach"] {
        let found = check(&bench, part, "gpt-tiny-mixed", &format!("--package {package}"));
        assert_eq!(found["untouched_job_repeats"], true, "{found}");
        let within = &found["within_a_budget"];
        assert_eq!((&within["identical"], &within["last"]["course"]), (&true.into(), &"planned".into()), "{found}");
        let count = |of: &str, what: &str| within[of][what].as_u64().unwrap();
        assert!(count("report", "offloaded_bytes") > 0, "{found}");
        // Which it is depends on how long copies take beside operators.
        assert!(count("last", "offloaded_bytes") + count("last", "reruns") > 0, "{found}");
    }
}

#[test]
fn the_check_of_bits_passes() {
    let Some(bench) = bench("identity", 6) else { return };
    for member in ["gpt-tiny", "gpt-tiny-mixed", "resnet-tiny"] {
        let found = check(&bench, "identity", member, "");
        assert_eq!(found["untouched_loop_repeats"], true, "{found}");
        assert_eq!((&found["do_not_repeat"], &found["do_not_repeat_as_timed"]), (&json!([]), &json!([])), "{found}");
        let verdicts = found["verdicts"].as_array().unwrap();
        assert_eq!(verdicts.len(), 4, "{found}");
        for verdict in verdicts {
            assert_eq!((&verdict["identical"], &verdict["held"]), (&true.into(), &true.into()), "{member}: {verdict}");
        }
        assert_eq!(found["engine"][0], 0, "the engine does not wait: {found}");
    }
}

#[test]
fn the_check_of_memory_runs_out_of_it_and_finishes_under_a_budget() {
    for allocator in ["", "expandable_segments:False"] {
        let Some(mut bench) = bench("memory", 7) else { return };
        bench.set("PYTORCH_CUDA_ALLOC_CONF", allocator);
        let found = check(&bench, "memory", "gpt-small", "");
        let plain = found["plain_loop_within_the_limit"].as_str().unwrap();
        assert!(plain.contains("CUDA out of memory"), "{plain}");
        assert_eq!(found["untouched_loop_repeats"], true, "{found}");
        let held = &found["under_budget"];
        assert_eq!((&held["losses_identical"], &held["iterations"]), (&true.into(), &5.into()), "{held}");
        assert!(held["refused_at_first"].as_u64() > Some(0), "the device itself refused: {held}");
        assert!(held["peak_bytes"].as_u64() <= held["budget_bytes"].as_u64(), "{held}");
        assert!(held["reserved_peak_bytes"].as_u64() <= held["limit_bytes"].as_u64(), "{held}");
    }
}

#[test]
fn the_check_of_policies_measures_every_plan() {
    let Some(bench) = bench("compare", 8) else { return };
    let found = check(&bench, "compare", "gpt-tiny", "");
    let points = found["points"].as_array().unwrap();
    assert!(points.len() > 10, "{found}");
    for point in points {
        assert_eq!((&point["peak_error_bytes"], &point["followed"]), (&0.into(), &true.into()), "{point}");
    }
    // One plan's copies as the device noted them.
    let [copies, copy_ns, hidden_ns] =
        ["copies", "copy_ns", "hidden_ns"].map(|key| found["overlap"][key].as_u64().unwrap());
    assert!(copies > 10 && 0 < hidden_ns && hidden_ns <= copy_ns, "{}", found["overlap"]);
    assert!(bench.path("out/gpt-tiny.noted.perfetto.json.gz").exists());
}

#[test]
fn the_check_of_batches_finds_the_largest() {
    let Some(bench) = bench("batch", 9) else { return };
    let found = check(&bench, "batch", "gpt-tiny", "");
    let [plain, under_a_budget] = ["plain", "under_a_budget"].map(|how| found["largest"][how].as_u64().unwrap());
    assert!(0 < plain && plain <= under_a_budget, "{found}");
    assert!(found.get("cut_short").is_none(), "{found}");
    let refused = found["attempts"].as_array().unwrap().iter().filter_map(|attempt| attempt["failure"].as_str());
    assert!(refused.clone().count() >= 2 && refused.clone().all(|why| why.contains("CUDA out of memory")), "{found}");
}
