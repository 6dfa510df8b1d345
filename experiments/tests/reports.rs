//! The reports on what a job does with its memory, and on what to do about it: every figure in them is one that can be
//! checked against the trace that they are about.

use std::path::Path;
use std::sync::OnceLock;

use plimsoll_runtime::trace::Class;
use plimsoll_runtime::{Lineage, PlanFile, Trace};
use plimsoll_tests::bench;
use plimsoll_tests::command::Bench;
use serde_json::Value;

/// A bench with a trace of the smallest transformer.
fn bench() -> &'static Bench {
    static BENCH: OnceLock<Bench> = OnceLock::new();
    BENCH.get_or_init(|| {
        let bench = bench!("reports");
        bench.succeed("record --config gpt.toml --workload gpt-tiny --out gpt.plimsoll --iterations 3");
        bench
    })
}

#[test]
fn every_report_explains_itself() {
    let bench = bench!("report-help");
    for subcommand in ["advise", "behaviour", "export", "import"] {
        let help = bench.succeed(&format!("{subcommand} --help")).stdout;
        assert!(help.contains("Usage: plimsoll") && help.lines().count() > 12, "{help}");
    }
}

fn data(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/pytorch").join(name);
    path.display().to_string()
}

fn sum(values: &Value, field: &str) -> u64 {
    values.as_array().unwrap().iter().map(|value| value[field].as_u64().unwrap()).sum()
}

#[test]
fn behaviour_accounts_for_every_byte_of_the_peak() {
    let bench = bench();
    let trace = Trace::load(bench.path("gpt.plimsoll")).unwrap();
    let text = bench.succeed("behaviour gpt.plimsoll --link 8GB/s --json behaviour.json --svg behaviour.svg").stdout;
    let report = bench.json("behaviour.json");
    assert!(report["dead_tail_bytes"].as_u64().unwrap() < report["peak_bytes"].as_u64().unwrap(), "{text}");
    assert!(text.contains("dead tails, held after their last use: "), "{text}");
    assert_eq!(report["peak_bytes"], Lineage::of(&trace).keep_all_peak_bytes());
    assert_eq!(sum(&report["at_peak"], "bytes"), report["peak_bytes"]);
    assert_eq!(sum(&report["intervals"]["histogram"], "intervals"), report["intervals"]["count"]);
    let percentiles = report["intervals"]["percentiles"].as_array().unwrap();
    assert!(percentiles.is_sorted_by_key(|percentile| percentile["interval"].as_u64()));
    // A recorded iteration ends where it started, but for the gradients: the next one lets go of them before anything else.
    let iteration = &report["iteration"];
    let gradients: Vec<u64> =
        trace.storages.iter().filter(|storage| storage.class == Class::Gradient).map(|storage| storage.bytes).collect();
    assert_eq!((&iteration["evidence"], &iteration["gone"]), (&"recorded".into(), &0.into()), "{iteration}");
    assert_eq!(iteration["new"], gradients.len(), "{iteration}");
    let grown = iteration["end_bytes"].as_u64().unwrap() - iteration["start_bytes"].as_u64().unwrap();
    assert_eq!(grown, gradients.iter().sum::<u64>(), "{iteration}");
    assert!(text.contains("activations") && text.contains("free to swap at 8.00 GB/s"), "{text}");
    let drawing = std::fs::read_to_string(bench.path("behaviour.svg")).unwrap();
    assert!(
        drawing.starts_with("<svg") && drawing.ends_with("</svg>\n") && drawing.contains("Device memory of gpt-tiny")
    );
}

#[test]
fn a_slower_link_leaves_less_free_to_swap() {
    let bench = bench();
    let free = |link: &str| {
        bench.succeed(&format!("behaviour gpt.plimsoll --link {link} --json {}.json", link.replace('/', "-")));
        let free = bench.json(&format!("{}.json", link.replace('/', "-")))["intervals"]["free_to_swap"].clone();
        (free["intervals"].as_u64().unwrap(), free["bytes_at_peak"].as_u64().unwrap())
    };
    let (fast, slow) = (free("100GB/s"), free("1MB/s"));
    assert!(fast.0 > 0 && fast.1 > 0);
    assert!(slow.0 < fast.0 && slow.1 < fast.1, "{slow:?} {fast:?}");
}

#[test]
fn a_memory_snapshot_is_reported_on() {
    let bench = bench!("snapshot");
    let text = bench.succeed(&format!("behaviour {} --json snapshot.json --svg snapshot.svg", data("snapshot.pickle")));
    let report = bench.json("snapshot.json");
    // Six iterations, each of four activations, a loss, and four gradients.
    let iteration = &report["iteration"];
    assert_eq!((&iteration["evidence"], &iteration["iterations"]), (&"periodic".into(), &6.into()), "{iteration}");
    assert_eq!(iteration["period"]["events"], 9);
    let layers: u64 = (1..=4).map(|layer| 2 * 65_536 * layer).sum();
    assert_eq!(iteration["bytes"], layers + 4);
    // At the peak all four activations, the loss, the first gradient, and a block from before the history.
    assert_eq!(report["peak_bytes"], 65_536 * (1 + 2 + 3 + 4) + 4 + 4 * 65_536 + 8_000);
    assert_eq!(report["reserved_bytes"], (20 + 2) << 20);
    assert!(report["intervals"].is_null() && text.stdout.contains("iterations repeat: 6 times"), "{}", text.stdout);
    let planned = bench.refuse(&format!("import pytorch-snapshot {} --out x.plimsoll", data("snapshot.pickle")));
    assert!(planned.contains("plimsoll behaviour"), "{planned}");
    let other = bench.refuse(&format!("behaviour {} --device 1", data("snapshot.pickle")));
    assert!(other.contains("device 1 has no history"), "{other}");
    bench.write("text.txt", "no pickle");
    assert!(bench.refuse("behaviour text.txt").contains("neither a plimsoll trace, nor a memory snapshot"));
}

#[test]
fn an_execution_trace_is_imported_and_planned() {
    let bench = bench!("import");
    let execution = data("execution.json");
    let untimed = bench.refuse(&format!("import pytorch-trace {execution} --out step.plimsoll"));
    assert!(untimed.contains("--times") && !bench.path("step.plimsoll").exists(), "{untimed}");
    let times = data("kineto.json");
    bench.succeed(&format!("import pytorch-trace {execution} --times {times} --workload step --out step.plimsoll"));
    let trace = Trace::load(bench.path("step.plimsoll")).unwrap();
    assert_eq!((trace.workload.as_str(), trace.family.as_str()), ("step", "pytorch"));
    bench.succeed("plan --trace step.plimsoll --policy dtr --budget 95% --link 8GB/s --json step.json");
    assert_eq!(bench.json("step.json")["feasible"], true);
    let warned = bench.succeed(&format!("import pytorch-trace {execution} --untimed --out untimed.plimsoll"));
    assert!(warned.stderr.contains("without times"), "{}", warned.stderr);
    let wrong = bench.refuse(&format!("import pytorch-trace {times} --untimed --out wrong.plimsoll"));
    assert!(wrong.contains("not an execution trace"), "{wrong}");
}

#[test]
fn plan_says_what_allocators_would_reserve() {
    let bench = bench();
    let text =
        bench.succeed("plan --trace gpt.plimsoll --policy dtr --budget 80% --link 8GB/s --json plan.json").stdout;
    let point = bench.json("plan.json");
    let allocators = point["allocators"].as_array().unwrap();
    let names: Vec<_> = allocators.iter().map(|reserved| reserved["allocator"].as_str().unwrap()).collect();
    assert_eq!(names, ["exact", "first-fit", "best-fit", "vdnn++", "caching"]);
    assert!(names.iter().all(|name| text.contains(name)), "{text}");
    for reserved in allocators {
        assert_eq!(reserved["used_bytes"], point["predicted"]["peak_bytes"]);
        assert!(reserved["reserved_bytes"].as_u64() >= reserved["used_bytes"].as_u64(), "{reserved}");
    }
    assert_eq!((&allocators[0]["fragmentation"], &allocators[0]["within_budget"]), (&0.0.into(), &true.into()));
    // No segment of libtorch's is smaller than 2 MiB.
    assert_eq!(allocators[4]["reserved_bytes"].as_u64().unwrap() % (2 << 20), 0);
}

#[test]
fn export_shows_the_predicted_iteration() {
    let bench = bench();
    bench.succeed(
        "plan --trace gpt.plimsoll --policy capuchin --budget 60% --link 100MB/s --out gpt.plan --json point.json",
    );
    // Over the link that the plan was made for, whatever copies cost this machine by now.
    bench.succeed("export gpt.plimsoll --plan gpt.plan --out chrome.json");
    let trace = Trace::load(bench.path("gpt.plimsoll")).unwrap();
    let (chrome, point) = (bench.json("chrome.json"), bench.json("point.json"));
    let events = chrome["traceEvents"].as_array().unwrap();
    let of = |category: &str| events.iter().filter(|event| event["cat"] == category).count();
    assert_eq!(of("operator"), trace.operators.len());
    assert_eq!(of("copy") > 0, point["actions"]["swap"].as_u64() > Some(0));
    let in_use =
        events.iter().filter(|event| event["ph"] == "C").map(|event| event["args"]["in use"].as_u64().unwrap());
    assert_eq!(in_use.max(), point["predicted"]["peak_bytes"].as_u64());
    assert_eq!(chrome["otherData"]["makespan_ns"], point["predicted"]["makespan_ns"]);
    bench.succeed("export gpt.plimsoll --plan gpt.plan --link 10MB/s --out slow.json");
    let slow_ns = bench.json("slow.json")["otherData"]["makespan_ns"].as_u64();
    assert_eq!(slow_ns > point["predicted"]["makespan_ns"].as_u64(), point["actions"]["swap"].as_u64() > Some(0));
    // The compute lane ends where the program's own last stretch begins, and the counter at the predicted makespan.
    let makespan_us = chrome["otherData"]["makespan_ns"].as_f64().unwrap() / 1e3;
    let ends = events.iter().filter(|event| event["tid"] == 1 && event["ph"] == "X");
    let end_us = ends.map(|event| event["ts"].as_f64().unwrap() + event["dur"].as_f64().unwrap()).fold(0.0, f64::max);
    assert!(0.0 < end_us && end_us <= makespan_us + 1e-3, "{end_us} {makespan_us}");
    let counted_us = events.iter().filter(|event| event["ph"] == "C").map(|event| event["ts"].as_f64().unwrap());
    assert_eq!(counted_us.fold(0.0, f64::max), makespan_us);
    bench.succeed("export gpt.plimsoll --policy dtr --budget 70% --link 1GB/s --out dtr.json");
    let mut other = PlanFile::load(bench.path("gpt.plan")).unwrap();
    other.fingerprint = "0".repeat(32);
    other.save(bench.path("other.plan")).unwrap();
    let refused = bench.refuse("export gpt.plimsoll --plan other.plan --link 1GB/s --out other.json");
    assert!(refused.contains("made for the trace 0000") && !bench.path("other.json").exists(), "{refused}");
}

#[test]
fn advise_compares_every_method_and_runs_those_that_change_nothing() {
    let bench = bench();
    let text = bench
        .succeed(
            "advise --config gpt.toml --workload gpt-tiny --budget 70% --link 1GB/s --batches 4 --held-out 6 \
             --iterations 1 --json advice.json",
        )
        .stdout;
    let advice = bench.json("advice.json");
    let methods = advice["methods"].as_array().unwrap();
    let names: Vec<_> = methods.iter().map(|method| method["method"].as_str().unwrap()).collect();
    assert_eq!(names, ["keep", "recompute", "swap", "swap-fp16", "swap-int8", "policy"]);
    for method in methods {
        let points = method["points"].as_array().unwrap();
        let batches: Vec<_> = points.iter().map(|point| point["batch"].as_i64().unwrap()).collect();
        assert_eq!(batches, [4, 6, 8]);
        // What was run held the peak that was planned; what would change results was not run.
        for point in points {
            let run = point["held_out"] == true && method["exact"] == true;
            assert_eq!(point["measured"].is_null(), !run, "{point}");
            if run {
                assert_eq!(point["measured"]["peak_bytes"], point["full_strength"]["peak_bytes"]);
            }
        }
    }
    let largest =
        |name: &str| methods[names.iter().position(|other| *other == name).unwrap()]["largest_batch"].as_u64();
    assert!(largest("keep") < Some(8) && largest("recompute") > largest("keep"), "{advice:#}");
    assert_eq!(methods[0]["points"][2]["feasible"], false, "keeping everything needs more than 70 % of what it needs");
    let chosen = advice["recommendation"]["method"].as_str().expect("some method holds the budget");
    assert!(text.contains(&format!("use {chosen} at a batch of 8")), "{text}");
    let one = bench.refuse("advise --config gpt.toml --workload gpt-tiny --budget 70% --link 1GB/s --batches 8");
    assert!(one.contains("two different batch sizes"), "{one}");
}
