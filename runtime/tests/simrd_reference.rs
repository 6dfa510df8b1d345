//! The promise: online rematerialisation is what its authors' own simulator says it is.
//!
//! The authors' logs and the figures of their simulator are not part of this repository. Where the environment variable
//! PLIMSOLL_SIMRD names a folder that holds them (`MODEL.log.gz`, `reference.json`), the two are compared; where it does
//! not, the test says that it did not run.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;
use plimsoll_runtime::baselines::online::{Outcome, Rule};
use plimsoll_runtime::import::simrd::Log;
use plimsoll_runtime::{Lineage, Plan, Timeline};
use serde::Deserialize;

/// What the authors' simulator gives for one budget.
#[derive(Deserialize)]
struct Point {
    result: String,
    overhead: f64,
    peak: u64,
    remat_compute: u64,
}

/// What it gives for an unlimited one.
#[derive(Deserialize)]
struct KeepAll {
    max_memory: u64,
    model_compute: u64,
}

#[derive(Deserialize)]
struct Model {
    baseline: KeepAll,
    /// Per rule, per share of the keep-all peak.
    #[serde(flatten)]
    rules: BTreeMap<String, BTreeMap<String, Point>>,
}

#[derive(Deserialize)]
struct Reference {
    models: BTreeMap<String, Model>,
}

/// The authors' name of a rule.
fn rule(name: &str) -> Rule {
    match name {
        "DTR" => Rule::Dtr,
        "DTREqClass" => Rule::DtrEq,
        "DTRLocal" => Rule::DtrLocal,
        "MSPS" => Rule::Msps,
        "LRU" => Rule::Lru,
        "LargestStorage" => Rule::Largest,
        _ => panic!("the reference has a rule that is not ours: {name}"),
    }
}

fn open(folder: &Path, model: &str) -> Log {
    let file = File::open(folder.join(format!("{model}.log.gz"))).expect("the log is beside the reference");
    Log::read(BufReader::new(GzDecoder::new(file))).expect("the authors' log is lawful")
}

#[test]
fn the_authors_simulator_is_met_at_every_point_it_was_run_at() {
    let Some(folder) = std::env::var_os("PLIMSOLL_SIMRD").map(PathBuf::from) else {
        println!("not run: PLIMSOLL_SIMRD names no folder with the authors' logs; 0 points compared");
        return;
    };
    let reference = File::open(folder.join("reference.json")).expect("PLIMSOLL_SIMRD holds reference.json");
    let reference: Reference =
        serde_json::from_reader(BufReader::new(reference)).expect("the reference is as described");
    let (mut points, mut failures) = (0, 0);
    for (name, model) in &reference.models {
        let log = open(&folder, name);
        let trace = log.trace(name, name).expect("the log makes a trace");
        let lineage = Lineage::of(&trace);
        let keep_all = Plan::keep_all(lineage.windows().len());
        let link = plimsoll_runtime::Link::symmetric(12e9, 0);
        let prediction = Timeline::new(&trace, &lineage, link).predict(&keep_all, u64::MAX);
        let KeepAll { max_memory, model_compute } = model.baseline;
        assert_eq!((prediction.peak_bytes, prediction.makespan_ns), (max_memory, model_compute), "{name}: keep-all");
        for (rule_name, ratios) in &model.rules {
            for (ratio, expected) in ratios {
                let budget_bytes = (ratio.parse::<f64>().expect("a share") * max_memory as f64) as u64;
                let run = log.program().run(rule(rule_name), budget_bytes, model_compute);
                let result = match run.outcome {
                    Outcome::Held => "ok",
                    Outcome::OutOfMemory { .. } => "OOM",
                    Outcome::Thrashed => "thrash",
                };
                let point = format!("{name}, {rule_name} at {ratio}: {run:?}");
                assert_eq!(result, expected.result, "{point}");
                assert!(run.peak_bytes <= budget_bytes, "{point}");
                let overhead = run.makespan_ns as f64 / model_compute as f64;
                assert!((overhead - expected.overhead).abs() < 0.01, "{point}, expected {}", expected.overhead);
                let found = (run.recompute_ns, run.peak_bytes);
                assert_eq!(found, (expected.remat_compute, expected.peak), "{point}");
                points += 1;
                failures += u32::from(result != "ok");
            }
        }
    }
    println!("{points} points compared, {failures} of them failures, all equal to the byte and the nanosecond");
    assert!(points > 100, "the reference has more points than {points}");
}
