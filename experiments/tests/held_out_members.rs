//! Members of a family are drawn, recorded and projected by one command each; a policy is trained on some of them and
//! judged on others, of another structure, beside every baseline.

use std::path::PathBuf;
use std::sync::OnceLock;

use plimsoll_runtime::baselines::BASELINES;
use plimsoll_runtime::{PolicyFile, Trace};
use plimsoll_tests::bench;
use plimsoll_tests::command::Bench;
use serde_json::Value;

/// The gpt family with members so small that recording them takes no time.
fn small_members(configuration: &str) -> String {
    let mut table = String::new();
    let small = |line: &str| {
        if line.starts_with('[') {
            table = line.to_owned();
        }
        let key = line.split(" = ").next().unwrap_or_default();
        match (table.as_str(), key) {
            ("[randomisation]", "members") => "members = 2".to_owned(),
            ("[randomisation]", "validation_members") => "validation_members = 1".to_owned(),
            ("[members.train]", "layers") => "layers = { choice = [1, 2] }".to_owned(),
            ("[members.train]", "width") => "width = { choice = [16, 32] }".to_owned(),
            ("[members.train]", "sequence") => "sequence = { choice = [16, 24] }".to_owned(),
            ("[members.held_out]", "layers") => "layers = 3".to_owned(),
            ("[members.held_out]", "width") => "width = 24".to_owned(),
            ("[members.held_out]", "sequence") => "sequence = 32".to_owned(),
            _ => line.to_owned(),
        }
    };
    configuration.lines().map(small).collect::<Vec<_>>().join("\n")
}

/// A bench with a policy in `gpt.policy`, trained for little, and two held-out members in `held/`.
fn bench() -> &'static Bench {
    static BENCH: OnceLock<Bench> = OnceLock::new();
    BENCH.get_or_init(|| {
        let bench = bench!("held-out");
        let configuration = std::fs::read_to_string(bench.path("gpt.toml")).unwrap();
        bench.write("gpt.toml", small_members(&configuration));
        bench.succeed("train --config gpt.toml --out gpt.policy --updates 2 --logdir runs --seed 5");
        bench.succeed("record --config gpt.toml --members held-out --count 2 --out held --iterations 3");
        bench
    })
}

/// Workloads of the traces in a folder, in order.
fn recorded(bench: &Bench, folder: &str) -> Vec<String> {
    let of_folder = |name: &String| name.strip_prefix(folder)?.strip_suffix(".plimsoll").map(str::to_owned);
    let mut names: Vec<String> = bench.files().iter().filter_map(of_folder).collect();
    names.sort();
    names
}

#[test]
fn training_draws_and_records_members_and_judging_draws_others() {
    let bench = bench();
    let (trained, held) = (recorded(bench, "gpt.policy.traces/"), recorded(bench, "held/"));
    assert_eq!(trained.len(), 4, "one that has a name, two to train on, one to validate by: {trained:?}");
    assert_eq!(held.len(), 2);
    for name in &held {
        assert!(name.starts_with("gpt-d3-w24-") && name.contains("-s32-"), "{name} is not of the held-out structure");
        let trace = Trace::load(bench.path(&format!("held/{name}.plimsoll"))).unwrap();
        assert_eq!((&trace.workload, trace.device.as_str(), trace.recorded_iterations), (name, "cpu", 3));
    }
    assert!(bench.json("held/recorded-on.json")["flops_per_s"].as_f64() > Some(1e6));
    // The same seed draws the same members.
    bench.succeed("record --config gpt.toml --members held-out --count 2 --out again --iterations 3");
    assert_eq!(recorded(bench, "again/"), held);
}

fn number(value: &Value, pointer: &str) -> f64 {
    value.pointer(pointer).and_then(Value::as_f64).unwrap_or_else(|| panic!("{pointer} in {value:#}"))
}

const JUDGE: &str = "evaluate --config gpt.toml --policy gpt.policy --held-out --traces held --hardware titan-v \
                     --reference-seconds 0.05 --search-plans 200";

#[test]
fn a_policy_is_judged_beside_every_baseline_and_searches_of_the_same_effort() {
    let bench = bench();
    let stdout = bench.succeed(&format!("{JUDGE} --beside dtr --auto-perf-maxing --json held.json")).stdout;
    for word in ["over reference", "recompute only", "policy + search", "best baselines: "] {
        assert!(stdout.contains(word), "{word} in {stdout}");
    }
    let report = bench.json("held.json");
    assert_eq!(report["policies"][0]["family"], "gpt");
    assert!(report["command"].as_str().unwrap().contains("--held-out"));
    let points = report["points"].as_array().unwrap();
    assert!(!points.is_empty());
    for point in points {
        assert_eq!(point["device"], "titan-v");
        let baselines = point["baselines"].as_object().unwrap();
        assert_eq!(baselines.len(), BASELINES.len());
        let best = baselines.values().filter_map(Value::as_u64).min();
        let outcome = |name: &str| point["outcomes"][name]["makespan_ns"].as_u64();
        assert_eq!(outcome("best baseline"), best, "{point:#}");
        let reference = number(point, "/reference/makespan_ns") as u64;
        for name in [
            "policy alone",
            "policy + search",
            "dtr alone",
            "dtr + search",
            "search",
            "best baseline + search",
            "auto-perf-maxing",
        ] {
            assert!(point["outcomes"][name].is_object(), "{name} in {point:#}");
            assert!(outcome(name).is_none_or(|makespan_ns| makespan_ns >= reference), "{name} in {point:#}");
        }
        // What starts from a plan ends no worse than it.
        assert!(outcome("best baseline + search") <= best || best.is_none(), "{point:#}");
        assert!(outcome("dtr + search") <= outcome("dtr alone") || outcome("dtr alone").is_none(), "{point:#}");
        assert_eq!(outcome("dtr alone"), baselines["dtr"].as_u64(), "{point:#}");
        let swaps = point["link_bytes_per_s"].as_f64();
        assert!(swaps.is_none_or(|rate| [12e9, 25e9].contains(&rate)), "{point:#}");
    }
    let summed: f64 = ["links", "recompute-only", "near-least"].iter().map(|group| points_of(&report, group)).sum();
    assert_eq!(summed, points.len() as f64);
}

/// Points of a group, as the summary of the policy says.
fn points_of(report: &Value, group: &str) -> f64 {
    let rows = report["summary"].as_array().unwrap().iter();
    let mut rows = rows.filter(|row| row["group"] == group && row["name"] == "policy alone");
    rows.next().map_or(0.0, |row| number(row, "/points"))
}

#[test]
fn a_policy_can_carry_its_judgement() {
    let bench = bench();
    let before = PolicyFile::load(bench.path("gpt.policy")).unwrap();
    std::fs::copy(bench.path("gpt.policy"), bench.path("signed.policy")).unwrap();
    let line = JUDGE.replace("gpt.policy", "signed.policy");
    bench.succeed(&format!("{line} --points-max 3 --sign --json signed.json"));
    let after = PolicyFile::load(bench.path("signed.policy")).unwrap();
    assert_eq!(after.weights, before.weights);
    assert_eq!(after.provenance.command, before.provenance.command);
    let rows = bench.json("signed.json")["summary"].clone();
    let rows = rows.as_array().unwrap().iter();
    for row in rows.filter(|row| row["name"] == "policy + search") {
        let group = row["group"].as_str().unwrap().replace('-', "_");
        let signed = after.provenance.quality[&format!("held_out.{group}.planned.over_reference")];
        assert_eq!(signed, number(row, "/excess_mean"));
    }
    assert!(
        bench
            .refuse(&line.replace("signed.policy", "dtr").replace("--held-out", "--held-out --sign"))
            .contains("--sign")
    );
}

#[test]
fn a_judgement_is_repeated_to_the_nanosecond_and_takes_references_from_the_last() {
    let bench = bench();
    bench.succeed(&format!("{JUDGE} --points-max 5 --auto-perf-maxing --json first.json"));
    bench.succeed(&format!("{JUDGE} --points-max 5 --auto-perf-maxing --known first.json --json second.json"));
    let [first, second] = ["first.json", "second.json"].map(|name| bench.json(name)["points"].clone());
    assert_eq!(first.as_array().unwrap().len(), 5);
    for (first, second) in first.as_array().unwrap().iter().zip(second.as_array().unwrap()) {
        assert_eq!(first["reference"], second["reference"]);
        assert_eq!(first["baselines"], second["baselines"]);
        for (name, outcome) in first["outcomes"].as_object().unwrap() {
            assert_eq!(outcome["makespan_ns"], second["outcomes"][name]["makespan_ns"], "{name}");
        }
    }
    // Side by side: a row each, and one for both. What they hold is the same.
    let table = bench.succeed("summarise first.json second.json").stdout;
    assert!(table.contains("auto-perf-maxing holds "), "{table}");
    let row = |name: &str| {
        let start = format!("| {name} | ");
        let line =
            table.lines().find_map(|line| line.strip_prefix(&start)).unwrap_or_else(|| panic!("{name} in {table}"));
        line.split_once(" | ").map(|(points, rest)| (points.parse::<usize>().unwrap(), rest.to_owned())).unwrap()
    };
    let (first, both) = (row("`first`"), row("all"));
    assert_eq!(row("`second`"), first);
    assert_eq!(both, (2 * first.0, first.1));
    let twins = bench.refuse(&format!("{JUDGE} --beside dtr --beside dtr"));
    assert!(twins.contains("--beside dtr: another policy of this call"), "{twins}");
}

#[test]
fn a_policy_is_trained_on_the_traces_of_a_folder_without_those_left_out() {
    let bench = bench();
    let held = recorded(bench, "held/");
    let line = "train --config gpt.toml --traces held --hardware titan-v --updates 1 --logdir runs --out folder.policy";
    bench.succeed(&format!("{line} --leave-out {}", held[0]));
    let policy = PolicyFile::load(bench.path("folder.policy")).unwrap();
    assert_eq!(policy.family, "gpt");
    assert!(policy.provenance.command.contains("--leave-out"));
    assert!(!bench.path("folder.policy.traces").exists(), "nothing was recorded");
    let none = bench.refuse(&format!("{line} --leave-out {} --leave-out {}", held[0], held[1]));
    assert!(none.contains("no trace is left"), "{none}");
    let unknown = bench.refuse(&format!("{line} --leave-out gpt-d99"));
    assert!(unknown.contains("gpt-d99"), "{unknown}");
}

#[test]
fn members_that_no_budget_can_hold_are_not_trained_on() {
    let bench = bench();
    // Parameters, gradients and moments are nearly all that stands on the device.
    let heavy = std::fs::read_to_string(bench.path("gpt.toml")).unwrap();
    let heavy = heavy.replace("width = 24", "width = 256");
    let heavy =
        heavy.replace("sequence = 32", "sequence = 4").replace("batch = { choice = [2, 3, 14, 16] }", "batch = 2");
    bench.write("heavy.toml", heavy);
    bench.succeed("record --config heavy.toml --members held-out --count 1 --out heavy --iterations 3");
    let train = "train --config gpt.toml --traces heavy --updates 1 --logdir runs --out light.policy";
    let refusal = bench.refuse(train);
    assert!(refusal.contains("no trace of which more than 10 % of the peak can be evicted"), "{refusal}");
    let light = format!("{}.plimsoll", recorded(bench, "held/")[0]);
    std::fs::copy(bench.path("held").join(&light), bench.path("heavy").join(&light)).unwrap();
    let said = bench.succeed(train).stderr;
    assert!(said.contains("1 of 2 members are left out"), "{said}");
}

#[test]
fn what_cannot_be_projected_or_judged_is_refused() {
    let bench = bench();
    let machine = bench.refuse("train --config gpt.toml --out no.policy --hardware cray --logdir runs");
    assert!(machine.contains("no machine `cray`") && machine.contains("as-recorded"), "{machine}");
    bench.succeed("plan --trace held/TRACE --policy vdnn-all --budget 80% --link 12GB/s --hardware hardware/titan-v.toml --json projected.json"
        .replace("TRACE", &format!("{}.plimsoll", recorded(bench, "held/")[0])).as_str());
    let projected = bench.json("projected.json");
    let makespan_ns = number(&projected, "/predicted/makespan_ns");
    assert!(makespan_ns < 1e8);
    assert!(number(&projected, "/actions/swap") > 0.0);
    let taken_ns = number(&projected, "/predicted/delay/other_ns");
    assert!(taken_ns < 0.01 * makespan_ns, "the copies of that machine, not of this one: {taken_ns} of {makespan_ns}");
    let empty = bench.refuse("evaluate --config gpt.toml --policy gpt.policy --held-out --traces runs");
    assert!(empty.contains("no traces"), "{empty}");
    assert!(!bench.call("evaluate --config gpt.toml --policy gpt.policy --held-out --real").succeeded);
    assert!(!bench.call("evaluate --config gpt.toml --policy gpt.policy --points-max 3").succeeded);
}

#[test]
fn logs_of_simrd_are_a_family_of_their_own() {
    let Some(logs) = std::env::var_os("PLIMSOLL_SIMRD").map(PathBuf::from) else {
        println!("not run: PLIMSOLL_SIMRD names no folder with logs of simrd");
        return;
    };
    let bench = bench!("simrd");
    let configuration = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../configs/traces.toml");
    bench.write("traces.toml", std::fs::read(configuration).unwrap());
    std::fs::create_dir(bench.path("logs")).unwrap();
    for log in ["resnet32-56.log.gz", "unet-6.log.gz"] {
        std::os::unix::fs::symlink(logs.join(log), bench.path("logs").join(log)).unwrap();
    }
    bench.succeed(
        "train --config traces.toml --traces logs --leave-out unet-6 --algorithm evolution --updates 1 --logdir runs --out \
         simrd.policy",
    );
    assert_eq!(PolicyFile::load(bench.path("simrd.policy")).unwrap().family, "simrd");
    bench.succeed(
        "evaluate --config traces.toml --policy simrd.policy --held-out --traces logs --only unet-6 --hardware as-recorded \
         --recompute-only --reference-seconds 0.1 --search-plans 100 --points-max 3 --json simrd.json",
    );
    let points = bench.json("simrd.json")["points"].clone();
    let points = points.as_array().unwrap();
    assert_eq!(points.len(), 3);
    for point in points {
        assert_eq!((&point["workload"], &point["device"]), (&"unet-6".into(), &"simrd".into()));
        assert!(point["link_bytes_per_s"].is_null(), "nothing is swapped");
    }
}
