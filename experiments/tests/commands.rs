//! Every subcommand does what its help says, on both families; bad input gets one clear line, and leaves nothing
//! half-written.

use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use plimsoll_runtime::{PlanFile, PolicyFile, Trace};
use plimsoll_tests::bench;
use plimsoll_tests::command::Bench;
use serde_json::Value;

const SUBCOMMANDS: [&str; 8] = ["record", "train", "finetune", "plan", "evaluate", "run", "hold", "inspect"];
const BASELINES: [&str; 8] = ["keep-all", "chen", "knapsack", "vdnn-all", "dtr", "msps", "capuchin", "dtr-swap"];

/// What every point of a result holds, by its JSON pointer.
const FIELDS: [&str; 22] = [
    "/workload",
    "/policy",
    "/budget_bytes",
    "/keep_all_peak_bytes",
    "/dead_tail_bytes",
    "/feasible",
    "/predicted/makespan_ns",
    "/predicted/peak_bytes",
    "/predicted/overhead",
    "/predicted/delay/stall_ns",
    "/retimed",
    "/measured",
    "/decisions",
    "/decide_ns",
    "/actions/keep",
    "/actions/swap",
    "/actions/recompute",
    "/losses",
    "/identical",
    "/decided_by",
    "/link_emulated",
    "/held",
];

/// A bench with a trace of each family's tiny member and a policy for gpt, which took three updates.
fn bench() -> &'static Bench {
    static BENCH: OnceLock<Bench> = OnceLock::new();
    BENCH.get_or_init(|| {
        let bench = bench!("commands");
        for family in ["gpt", "resnet"] {
            bench.succeed(&format!(
                "record --config {family}.toml --workload {family}-tiny --out {family}.plimsoll --iterations 5"
            ));
        }
        bench.succeed("train --config gpt.toml --out gpt.policy --updates 3 --logdir runs --seed 5 --link 500MB/s");
        bench
    })
}

fn assert_complete(point: &Value) {
    for field in FIELDS {
        assert!(point.pointer(field).is_some(), "{field} is missing in {point:#}");
    }
}

fn assert_nothing_half_written(bench: &Bench) {
    let left: Vec<String> = bench.files().into_iter().filter(|name| name.contains(".plimsoll-")).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn every_subcommand_explains_itself() {
    let bench = bench!("help");
    let all = bench.succeed("--help").stdout;
    for subcommand in SUBCOMMANDS {
        assert!(all.contains(subcommand), "{all}");
        let help = bench.succeed(&format!("{subcommand} --help")).stdout;
        assert!(help.contains("Usage: plimsoll"), "{help}");
        if ["record", "train", "evaluate", "run"].contains(&subcommand) {
            assert!(help.contains("--device"), "{help}");
        }
        if ["train", "plan", "evaluate", "run"].contains(&subcommand) {
            assert!(help.contains("--link"), "{help}");
        }
    }
    assert!(!bench.call("").succeeded);
    assert!(!bench.call("sail").succeeded);
}

#[test]
fn a_command_whose_reader_has_had_enough_ends_like_other_tools() {
    let bench = bench();
    for line in ["--help", "inspect gpt.plimsoll", "behaviour gpt.plimsoll"] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = bench.command(line).stdout(writer).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{line}");
        assert_eq!(output.status.signal(), Some(libc::SIGPIPE), "{line}");
    }
}

#[test]
fn record_writes_a_trace_that_inspect_explains() {
    let bench = bench();
    for family in ["gpt", "resnet"] {
        let trace = Trace::load(bench.path(&format!("{family}.plimsoll"))).unwrap();
        assert_eq!(
            (trace.workload, trace.family, trace.recorded_iterations),
            (format!("{family}-tiny"), family.into(), 5)
        );
        let inspected = bench.succeed(&format!("inspect {family}.plimsoll")).stdout;
        assert!(
            inspected.contains(&format!("trace of {family}-tiny")) && inspected.contains("Parameter"),
            "{inspected}"
        );
    }
}

#[test]
fn plan_knows_every_baseline_and_both_kinds_of_budget() {
    let bench = bench();
    let peak = Trace::load(bench.path("gpt.plimsoll")).unwrap().peak_bytes;
    for policy in BASELINES.into_iter().chain(["gpt.policy"]) {
        let generous = format!("plan --trace gpt.plimsoll --policy {policy} --link 1GB/s --budget");
        bench.succeed(&format!("{generous} 100% --json {policy}.json --out {policy}.plan"));
        let point = bench.json(&format!("{policy}.json"));
        assert_complete(&point);
        assert_eq!((point["policy"].as_str(), point["feasible"].as_bool()), (Some(policy), Some(true)));
        assert_eq!((&point["budget_bytes"], &point["keep_all_peak_bytes"]), (&peak.into(), &peak.into()));
        assert!(point["measured"].is_null() && point["identical"].is_null(), "nothing was run");
        let plan = PlanFile::load(bench.path(&format!("{policy}.plan"))).unwrap();
        assert_eq!(plan.policy, policy);
        assert!(bench.succeed(&format!("inspect {policy}.plan")).stdout.contains(&format!("by {policy}")));
        let absolute = format!("{}KiB", peak / 1024 + 1);
        bench.succeed(&format!("{generous} {absolute} --json {policy}.json"));
        assert_eq!(bench.json(&format!("{policy}.json"))["budget_bytes"], (peak / 1024 + 1) * 1024);
    }
}

#[test]
fn plan_by_search_holds_the_budget() {
    let bench = bench();
    let planned = |policy: &str, more: &str| {
        bench.succeed(&format!(
            "plan --trace resnet.plimsoll --policy {policy} --budget 75% --link 1GB/s --json p.json {more}"
        ));
        bench.json("p.json")
    };
    for policy in ["search", "home", "genetic", "auto-perf-maxing"] {
        let point = planned(policy, "");
        assert_complete(&point);
        assert_eq!((point["policy"].as_str(), point["feasible"].as_bool()), (Some(policy), Some(true)));
    }
    assert_eq!(planned("search", "--time-limit 300ms")["decided_by"], "search");
    let drawn = |seed: u32| planned("random", &format!("--search-seed {seed}"))["actions"].clone();
    assert_eq!(drawn(1), drawn(1));
    assert!((2..8).any(|seed| drawn(seed) != drawn(1)), "chance follows its seed");
    let refused = bench.refuse("plan --trace resnet.plimsoll --policy dtr --budget 75% --link 1GB/s --time-limit 1s");
    assert!(refused.contains("--time-limit") && refused.contains("exact"), "{refused}");
    let refused =
        bench.refuse("plan --trace resnet.plimsoll --policy dtr --budget 75% --link 1GB/s --out both --json both");
    assert!(refused.contains("--out and --json: both are both"), "{refused}");
}

#[test]
fn plan_by_the_exact_reference_says_what_is_proven() {
    let bench = bench();
    let line = "plan --trace resnet.plimsoll --policy exact --link 1GB/s --time-limit 5s";
    let stdout = bench.succeed(&format!("{line} --budget 75% --json e.json --out e.plan")).stdout;
    let point = bench.json("e.json");
    assert_complete(&point);
    let number = |pointer: &str| point.pointer(pointer).and_then(Value::as_f64).unwrap_or_else(|| panic!("{point:#}"));
    let (bound, makespan) = (number("/lower_bound_ns"), number("/predicted/makespan_ns"));
    assert!(bound <= makespan, "{point:#}");
    assert!((number("/gap") - (makespan / bound - 1.0)).abs() < 1e-9, "{point:#}");
    assert!(number("/program/columns") > 0.0 && point["decided_by"] == "exact", "{point:#}");
    assert!(stdout.contains("gap") || stdout.contains("proven optimal"), "{stdout}");
    assert_eq!(PlanFile::load(bench.path("e.plan")).unwrap().policy, "exact");
    // Less than what is resident between iterations fits under no plan whatever.
    let forever = line.replace("5s", "500000000000years");
    assert!(bench.refuse(&format!("{forever} --budget 16KiB")).contains("proven"));
    let missing = bench.command(&format!("{line} --budget 75%")).env("PLIMSOLL_HIGHS", "/nowhere.so").output().unwrap();
    let error = String::from_utf8(missing.stderr).unwrap();
    assert!(!missing.status.success() && error.contains("/nowhere.so"), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
}

#[test]
fn plan_takes_only_the_actions_that_it_is_given() {
    let bench = bench();
    for policy in ["capuchin", "gpt.policy"] {
        for (actions, forbidden) in [("keep,swap", "recompute"), ("recompute", "swap"), ("keep,swap,recompute", "")] {
            let json = format!("{policy}-{}.json", actions.replace(',', "-"));
            bench.succeed(&format!(
                "plan --trace gpt.plimsoll --policy {policy} --budget 85% --link 1GB/s --actions {actions} --json {json}"
            ));
            let counts = bench.json(&json)["actions"].clone();
            assert!(counts["swap"].as_u64() > Some(0) || counts["recompute"].as_u64() > Some(0), "{counts}");
            assert!(forbidden.is_empty() || counts[forbidden] == 0, "{policy} with {actions}: {counts}");
        }
    }
    let kept = bench.refuse("plan --trace gpt.plimsoll --policy dtr --budget 85% --link 1GB/s --actions keep");
    assert!(kept.contains("the least budget"), "{kept}");
}

#[test]
fn train_writes_a_policy_that_inspect_explains() {
    let bench = bench();
    let policy = PolicyFile::load(bench.path("gpt.policy")).unwrap();
    assert_eq!((policy.family.as_str(), policy.provenance.seed), ("gpt", 5));
    assert!(policy.provenance.command.starts_with("plimsoll train --config gpt.toml"));
    assert_eq!(policy.provenance.configuration, std::fs::read_to_string(bench.path("gpt.toml")).unwrap());
    assert_eq!(policy.provenance.recorded_on, ["cpu"]);
    assert_eq!(policy.provenance.quality["updates"], 3.0);
    let inspected = bench.succeed("inspect gpt.policy").stdout;
    assert!(inspected.contains("policy for the family gpt") && inspected.contains("seed 5"), "{inspected}");
}

#[test]
fn every_algorithm_makes_a_policy_and_most_start_from_one() {
    let bench = bench();
    let text = std::fs::read_to_string(bench.path("gpt.toml")).unwrap();
    let small = "\n[evolution]\npairs = 2\ninstances_per_update = 2\n\n[imitation]\ninstances_per_update = 2\n\
                 teacher_evaluations = 50\n\n[policy_iteration]\ninstances_per_update = 2\n\n[dqn]\ninstances_per_update = 2\n\
                 steps_per_update = 2\n";
    bench.write("small.toml", text + small);
    // The same episodes for all of them.
    std::fs::create_dir_all(bench.path("given")).unwrap();
    std::fs::copy(bench.path("gpt.plimsoll"), bench.path("given/gpt-tiny.plimsoll")).unwrap();
    let line =
        "train --config small.toml --updates 2 --logdir runs --link 500MB/s --hardware as-recorded --traces given";
    let quality = |name: &str| PolicyFile::load(bench.path(name)).unwrap().provenance.quality;
    for algorithm in ["imitation", "policy-iteration", "dqn"] {
        bench.succeed(&format!("{line} --algorithm {algorithm} --out {algorithm}.policy"));
        assert_eq!(quality(&format!("{algorithm}.policy"))["updates"], 2.0);
    }
    bench.succeed(&format!("{line} --algorithm evolution --from imitation.policy --out refined.policy"));
    bench.succeed(&format!("{line} --algorithm imitation,policy-iteration --out both.policy"));
    // The start is the first best.
    let validated = |name: &str| quality(name)["validation_return"];
    for after in ["refined.policy", "both.policy"] {
        let [before, after] = ["imitation.policy", after].map(validated);
        assert!(after >= before, "{after} after, {before} before");
    }
    assert!(bench.path("both.policy.state").exists() && bench.path("both.policy.state-policy-iteration").exists());
    let refused = bench.refuse(&format!("{line} --algorithm ppo,imitation,ppo --out never.policy"));
    assert!(refused.contains("ppo is named twice"), "{refused}");
    let refused = bench.refuse(&format!("{line} --algorithm dqn --from gpt.policy --out never.policy"));
    assert!(refused.contains("--from gpt.policy") && refused.contains("what choices are worth"), "{refused}");
    let text = std::fs::read_to_string(bench.path("small.toml")).unwrap();
    bench.write("flat.toml", text.replace("[policy_iteration]", "[policy_iteration]\nbranch_points = 0"));
    let two = "--algorithm imitation,policy-iteration --out never.policy";
    let refused = bench.refuse(&format!("{line} {two}").replace("small.toml", "flat.toml"));
    assert!(refused.contains("policy_iteration: branch_points is 0"), "{refused}");
    assert!(!bench.path("never.policy.state").exists(), "what comes later is refused before anything begins");
    let refused = bench.refuse(&format!("{line} --without staleness,smell --out never.policy"));
    assert!(refused.contains("--without smell") && refused.contains("staleness"), "{refused}");

    assert!(!bench.path("never.policy").exists());
}

#[test]
fn finetune_ends_with_the_start_or_with_what_was_measured_faster() {
    let bench = bench();
    let line = "finetune --config gpt.toml --workload gpt-tiny --from gpt.policy --link 500MB/s --budget 80% --updates 2 \
                --iterations 1 --rounds 3 --seed 3";
    for algorithm in ["evolution", "ppo"] {
        let name = format!("tuned-{algorithm}.policy");
        let stdout =
            bench.succeed(&format!("{line} --algorithm {algorithm} --out {name} --logdir runs/{algorithm}")).stdout;
        assert!(stdout.contains("by measurement"), "{stdout}");
        let [start, tuned] = ["gpt.policy", &name].map(|name| PolicyFile::load(bench.path(name)).unwrap());
        let quality = &tuned.provenance.quality;
        let kept = quality["kept_the_start"] == 1.0;
        assert_eq!(tuned.weights == start.weights, kept);
        let (difference, error) = (quality["measured_difference"], quality["measured_difference_standard_error"]);
        assert!(kept || difference < -2.0 * error, "{quality:?}");
        assert!(quality["reward_gap_mean"] != 0.0, "what is measured is never what was predicted: {quality:?}");
        let events = bench.files().into_iter().find(|file| file.starts_with(&format!("runs/{algorithm}/finetune-")));
        let events = std::fs::read(bench.path(&events.expect("an event file"))).unwrap();
        for tag in ["finetune/reward_gap", "finetune/measured_reward", "finetune/predicted_reward"] {
            assert!(events.windows(tag.len()).any(|window| window == tag.as_bytes()), "{tag} is not logged");
        }
    }
    for (budget, why) in [("120%", "needs no plan"), ("1KiB", "bytes can never be evicted")] {
        let none = bench.refuse(&line.replace("80%", budget).replace("--updates", "--out never.policy --updates"));
        assert!(none.contains(why), "{none}");
    }
}

#[test]
fn training_that_was_interrupted_goes_on_bit_for_bit() {
    goes_on_bit_for_bit("ppo");
}

#[test]
fn evolution_that_was_interrupted_goes_on_bit_for_bit() {
    goes_on_bit_for_bit("evolution");
}

#[test]
fn two_algorithms_that_were_interrupted_go_on_bit_for_bit() {
    goes_on_bit_for_bit("imitation,policy-iteration");
}

fn goes_on_bit_for_bit(algorithm: &str) {
    const UPDATES: usize = 12;
    let bench = bench!(format!("interrupted-{}", algorithm.replace(',', "-")));
    let line = |out: &str| {
        format!(
            "train --config gpt.toml --out {out} --algorithm {algorithm} --updates {UPDATES} --seed 3 --logdir runs"
        )
    };
    let (state, from_the_start) = (bench.path("a.policy.state"), bench.path("b.policy.state"));
    let child = bench.command(&line("a.policy")).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let patience = Instant::now() + Duration::from_secs(120);
    let wait_for = |holds: &dyn Fn() -> bool| {
        while !holds() {
            assert!(Instant::now() < patience, "training makes no progress");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    // The state before the first update stands there while that is made.
    wait_for(&|| state.exists());
    std::fs::copy(&state, &from_the_start).unwrap();
    let untrained = std::fs::read(&from_the_start).unwrap();
    wait_for(&|| std::fs::read(&state).unwrap() != untrained);
    let interrupt = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(interrupt.success());
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    let (_, rest) = stderr.split_once("interrupted after ").expect("the command says that it was interrupted");
    let updates: usize = rest.split(' ').next().unwrap().parse().unwrap();
    assert!((1..UPDATES).contains(&updates), "interrupted after {updates} updates");
    assert!(!bench.path("a.policy").exists(), "half a training run makes no policy");

    // The same traces, trained on without interruption.
    std::fs::create_dir(bench.path("b.policy.traces")).unwrap();
    for file in ["gpt-tiny.plimsoll", "recorded-on.json"] {
        let [from, to] = ["a", "b"].map(|name| bench.path(&format!("{name}.policy.traces/{file}")));
        std::fs::copy(from, to).unwrap();
    }
    let elsewhere = bench.refuse(&format!("{} --resume --link 1GB/s", line("a.policy")));
    assert!(elsewhere.contains("a.policy.state") && elsewhere.contains("begun with other traces"), "{elsewhere}");
    bench.succeed(&format!("{} --resume", line("a.policy")));
    bench.succeed(&format!("{} --resume", line("b.policy")));
    let [resumed, uninterrupted] = ["a.policy", "b.policy"].map(|name| PolicyFile::load(bench.path(name)).unwrap());
    assert_eq!(resumed.weights, uninterrupted.weights);
    assert_eq!(resumed.provenance.quality, uninterrupted.provenance.quality);
    let calls: Vec<_> = resumed.provenance.command.split("; ").map(|call| call.ends_with("--resume")).collect();
    assert_eq!(calls, [false, true], "what was refused has made nothing: {}", resumed.provenance.command);
    println!("interrupted after {updates} of {UPDATES} updates; the same weights");
    assert_nothing_half_written(&bench);
}

#[test]
fn evaluate_takes_other_points_than_the_configurations() {
    let bench = bench();
    bench.succeed(
        "evaluate --config resnet.toml --policy dtr --baseline lru --workload resnet-tiny --budget 85% --budget 95% \
         --json narrow.json",
    );
    let report = bench.json("narrow.json");
    let points = report["results"].as_array().unwrap().iter();
    let of =
        |point: &Value| (point["policy"].as_str().unwrap().to_owned(), point["workload"].as_str().unwrap().to_owned());
    let expected = ["dtr", "lru", "dtr", "lru"].map(|policy| (policy.to_owned(), "resnet-tiny".to_owned()));
    assert_eq!(points.map(of).collect::<Vec<_>>(), expected);
    assert!(report["agreement"].is_null(), "nothing was run");
    let message = bench.refuse("evaluate --config resnet.toml --policy dtr --workload resnet-tyni");
    assert!(message.contains("did you mean `resnet-tiny`?"), "{message}");
}

#[test]
fn evaluate_compares_a_policy_with_every_baseline_on_the_real_loop() {
    let bench = bench();
    let call = bench.succeed(
        "evaluate --config gpt.toml --policy gpt.policy --real --logdir compared --json compared.json --scatter compared.svg --iterations 2 \
         --agreement agreed.json",
    );
    let report = bench.json("compared.json");
    assert!(report["command"].as_str().unwrap().starts_with("plimsoll evaluate --config gpt.toml"));
    let results = report["results"].as_array().unwrap();
    assert_eq!(results.len(), 2 * (1 + BASELINES.len()), "every policy at both budgets");
    let run = results.iter().filter(|point| point["feasible"] == true).count();
    assert_eq!(report["agreement"]["points"], run);
    assert!(report["agreement"]["peak_error_max"].as_f64().unwrap() <= 0.01);
    assert!(call.stdout.contains(&format!("{run} points measured: peaks within")), "{}", call.stdout);
    let drawn = std::fs::read_to_string(bench.path("compared.svg")).unwrap();
    assert_eq!(drawn.matches("<title>").count(), run, "one dot for every point that was run");
    let agreed = bench.json("agreed.json");
    for shared in ["agreement", "margin", "command"] {
        assert_eq!(agreed[shared], report[shared]);
    }
    assert!(
        results
            .iter()
            .all(|point| point["ratios"].as_array().unwrap().len() == 2 * usize::from(point["feasible"] == true))
    );
    assert_eq!(report["margin"]["points"], 2, "the policy meets a baseline at both budgets");
    for figure in ["policy", "best_baseline", "less"] {
        let [value, low, high] = ["value", "interval/0", "interval/1"]
            .map(|part| report.pointer(&format!("/margin/{figure}/{part}")).and_then(|of| of.as_f64()).unwrap());
        assert!(low <= value && value <= high, "{figure}: {value} in [{low}, {high}]");
    }
    assert_eq!(agreed["points"].as_array().unwrap().len(), run);
    for point in results {
        assert_complete(point);
        let feasible = point["feasible"].as_bool().unwrap();
        assert_eq!(point["measured"].is_null(), !feasible, "what fits is run: {point:#}");
        if feasible {
            assert_eq!((&point["held"], &point["identical"]), (&true.into(), &true.into()), "{point:#}");
            for field in ["/measured/makespan_ns", "/measured/peak_bytes", "/measured/overhead", "/retimed/overhead"] {
                assert!(point.pointer(field).is_some_and(Value::is_number), "{field}");
            }
            let [predicted, measured] = ["/predicted/peak_bytes", "/measured/peak_bytes"]
                .map(|field| point.pointer(field).unwrap().as_u64().unwrap());
            assert!(predicted.abs_diff(measured) <= predicted / 100, "{point:#}");
        }
        let learned = point["policy"] == "gpt.policy";
        assert!(!learned || feasible, "the trained policy holds what a baseline holds");
    }
    for policy in BASELINES {
        assert!(call.stdout.contains(policy), "{}", call.stdout);
        assert!(bench.files().iter().any(|name| name.starts_with(&format!("compared/{policy}/events."))));
    }
    // Without --real nothing is run, and resnet works as well.
    bench.succeed("evaluate --config resnet.toml --policy dtr --json predicted.json");
    let report = bench.json("predicted.json");
    assert!(report["results"].as_array().unwrap().iter().all(|point| point["measured"].is_null()));
}

#[test]
fn run_holds_the_budget_and_changes_nothing() {
    let bench = bench();
    for (family, policy, budget) in
        [("gpt", "gpt.policy", "70%"), ("gpt", "dtr", "60%"), ("resnet", "capuchin", "70%"), ("resnet", "dtr", "80%")]
    {
        let call = bench.succeed(&format!(
            "run --config {family}.toml --workload {family}-tiny --policy {policy} --budget {budget} --iterations 3 --link 1GB/s --verify --json run-{family}-{policy}.json"
        ));
        assert!(call.stdout.contains("budget held") && call.stdout.contains("bit-identical"), "{}", call.stdout);
        assert!(call.stdout.contains("emulated link"), "{}", call.stdout);
        let point = bench.json(&format!("run-{family}-{policy}.json"));
        assert_complete(&point);
        assert_eq!(point["identical"], true);
        assert!(point["measured"]["peak_bytes"].as_u64() <= point["budget_bytes"].as_u64());
        assert!(point["losses"].as_array().unwrap().len() >= 4);
    }
    let plain = bench.succeed(
        "run --config gpt.toml --workload gpt-tiny --policy keep-all --budget 100% --iterations 1 --interleave --json plain.json",
    );
    assert!(!plain.stdout.contains("emulated"), "{}", plain.stdout);
    assert!(plain.stdout.contains("beside untouched iterations, predicted +0.0%"), "{}", plain.stdout);
    assert!(bench.json("plain.json")["identical"].is_null(), "not compared unless asked");
    let none = bench.call("run --config gpt.toml --workload gpt-tiny --policy dtr --budget 80% --iterations 0");
    assert!(!none.succeeded && none.stderr.contains("--iterations"), "{}", none.stderr);
}

#[test]
fn a_budget_below_what_is_possible_names_the_least_one_before_the_loop_runs() {
    let bench = bench();
    let at = "--link 1GB/s --policy";
    for (call, is_hopeless) in [
        (format!("plan --trace gpt.plimsoll --budget 5% {at} dtr"), true),
        (format!("plan --trace gpt.plimsoll --budget 4KiB {at} gpt.policy"), true),
        (format!("run --config gpt.toml --workload gpt-tiny --budget 5% --iterations 1000000 {at} lru"), true),
        (format!("plan --trace gpt.plimsoll --budget 90% {at} keep-all"), false),
    ] {
        let message = bench.refuse(&call);
        let least: u64 = message
            .split_once("the least budget that any policy was found to hold here is ")
            .and_then(|(_, rest)| rest.split(' ').next()?.parse().ok())
            .unwrap_or_else(|| panic!("{message}"));
        let peak = Trace::load(bench.path("gpt.plimsoll")).unwrap().peak_bytes;
        assert!((peak / 20..peak).contains(&least), "{message}");
        let never = message.split_once(" bytes can never be evicted").and_then(|(why, _)| why.rsplit(' ').next());
        let needed = message.split_once("its plan needs ").and_then(|(_, rest)| rest.split(' ').next());
        assert_eq!((never.is_some(), needed.is_some()), (is_hopeless, !is_hopeless), "{message}");
        assert!(never.is_none_or(|bytes| bytes.parse::<u64>().unwrap() <= least), "{message}");
        assert!(needed.is_none_or(|bytes| bytes.parse::<u64>().unwrap() >= least), "{message}");
    }
    let message = bench.refuse(&format!("plan --trace gpt.plimsoll --budget 5% {at} dtr"));
    let least = message.split_once("to hold here is ").unwrap().1.split(' ').next().unwrap();
    let holds =
        |policy: &str| bench.call(&format!("plan --trace gpt.plimsoll --budget {least} {at} {policy}")).succeeded;
    assert!(BASELINES.into_iter().chain(["random"]).any(holds), "some policy holds {least} bytes");
}

#[test]
fn a_policy_of_another_family_is_a_warning() {
    let bench = bench();
    let call = bench.succeed("plan --trace resnet.plimsoll --policy gpt.policy --budget 80% --link 1GB/s");
    assert!(call.stderr.contains("warning: gpt.policy was trained on the family gpt"), "{}", call.stderr);
    assert_eq!(call.stderr.lines().count(), 1, "{}", call.stderr);
    let by = "--policy gpt.policy --budget 80% --link 1GB/s";
    for other in [
        format!("export resnet.plimsoll {by} --out resnet.json"),
        format!("hold resnet.toml:resnet-tiny {by} --iterations 1"),
    ] {
        let call = bench.succeed(&other);
        assert!(call.stderr.contains("warning: gpt.policy was trained on the family gpt"), "{}", call.stderr);
    }
}

#[test]
fn a_plan_says_over_which_link_and_knows_the_shipped_machines_anywhere() {
    let bench = bench();
    let line = "plan --trace gpt.plimsoll --policy dtr --budget 90%";
    let over = |flags: &str| bench.succeed(&format!("{line} {flags}"));
    assert!(over("--link 1GB/s").stdout.contains(" MiB over a link of 1.0 GB/s: "));
    let shipped = over("--hardware titan-v");
    assert!(shipped.stdout.contains(" over a link of 15.8 GB/s: "), "{}", shipped.stdout);
    let warning = "warning: there is no recorded-on.json: this machine is taken for the one that recorded";
    assert!(shipped.stderr.contains(warning), "{}", shipped.stderr);
    let unknown = bench.refuse(&format!("{line} --hardware titan-w"));
    assert!(unknown.contains("no machine `titan-w`") && unknown.contains("titan-v, a100, h100, h200"), "{unknown}");
}

#[test]
fn a_device_that_is_not_there_gets_one_clear_line() {
    let bench = bench();
    let record = "record --config gpt.toml --workload gpt-tiny --out cuda.plimsoll --device";
    if plimsoll_runtime::torch::device::cuda_devices().is_ok_and(|devices| !devices.is_empty()) {
        println!("a GPU is here");
    } else {
        let message = bench.refuse(&format!("{record} cuda"));
        assert!(message.contains("NVIDIA driver"), "{message}");
    }
    let absent = bench.refuse(&format!("{record} cuda:1000"));
    assert!(absent.contains("no NVIDIA driver") || absent.contains("cuda:1000"), "{absent}");
    assert!(bench.call(&format!("{record} gpu")).stderr.contains("unknown device `gpu`"));
    assert!(!bench.path("cuda.plimsoll").exists());
}

#[test]
fn a_wrong_unit_is_refused_by_its_flag() {
    let bench = bench();
    let plan = "plan --trace gpt.plimsoll --policy dtr";
    for (flags, flag, expected) in [
        ("--budget 60parsecs", "--budget", "expected a budget"),
        ("--budget 0%", "--budget", "expected a budget"),
        ("--budget 60% --link 8GB", "--link", "expected a link speed"),
        ("--budget 60% --actions keep,burn", "--actions", "unknown action `burn`"),
    ] {
        let call = bench.call(&format!("{plan} {flags}"));
        assert!(!call.succeeded && call.stderr.contains(flag) && call.stderr.contains(expected), "{}", call.stderr);
    }
}

#[test]
fn a_wrong_configuration_is_refused_by_file_and_key() {
    let bench = bench();
    let good = std::fs::read_to_string(bench.path("gpt.toml")).unwrap();
    for (name, found, wrong, expected) in [
        (
            "key.toml",
            "layers = 2",
            "layres = 2",
            "workloads.gpt-tiny.layres: unknown key `layres`, did you mean `layers`?",
        ),
        ("table.toml", "[evaluation]", "[evalution]", "did you mean `evaluation`?"),
        ("unit.toml", "\"80%\"", "\"80 parsecs\"", "evaluation.budgets: expected a budget"),
        ("workload.toml", "\"gpt-tiny\"]", "\"gpt-tinny\"]", "did you mean `gpt-tiny`?"),
        ("baseline.toml", "\"capuchin\"", "\"capucin\"", "capucin"),
        ("value.toml", "dropout = 0.1", "dropout = 1.5", "workloads.gpt-tiny.dropout"),
        ("toml.toml", "family = \"gpt\"", "family = \"gpt", "toml.toml"),
        ("family.toml", "family = \"gpt\"", "family = \"mine\"", "no family `mine`: expected gpt, bert"),
    ] {
        assert!(good.contains(found), "{found}");
        bench.write(name, good.replacen(found, wrong, 1));
        let message = bench.refuse(&format!("evaluate --config {name} --policy dtr"));
        assert!(message.contains(expected) && (message.contains(name) || name == "baseline.toml"), "{message}");
    }
    bench.write("ppo.toml", good.replacen("[ppo]", "[ppo]\nupdtes = 3", 1));
    let message = bench.refuse("train --config ppo.toml --algorithm ppo --out ppo.policy");
    assert!(message.contains("ppo.toml") && message.contains("did you mean `updates`?"), "{message}");
    let message = bench.refuse("record --config gpt.toml --workload gpt-tinny --out tinny.plimsoll");
    assert!(message.contains("gpt.toml: no workload `gpt-tinny`, did you mean `gpt-tiny`?"), "{message}");
    assert!(!bench.path("ppo.policy").exists() && !bench.path("tinny.plimsoll").exists());
}

#[test]
fn files_that_cannot_be_used_are_refused_by_name() {
    let bench = bench();
    let plan = |trace: &str, policy: &str| format!("plan --trace {trace} --policy {policy} --budget 80% --link 1GB/s");
    let policy = std::fs::read(bench.path("gpt.policy")).unwrap();
    bench.write("short.policy", &policy[..policy.len() / 2]);
    let mut altered = policy.clone();
    *altered.last_mut().unwrap() ^= 1;
    bench.write("altered.policy", &altered);
    bench.write("foreign.policy", b"\x89PNG");
    let trace = std::fs::read(bench.path("gpt.plimsoll")).unwrap();
    bench.write("short.plimsoll", &trace[..trace.len() / 2]);
    for (call, expected) in [
        (plan("gpt.plimsoll", "dttr"), "dttr: no such file, and no baseline of that name; baselines are keep-all"),
        (plan("missing.plimsoll", "dtr"), "missing.plimsoll: No such file"),
        (plan("short.plimsoll", "dtr"), "short.plimsoll: truncated"),
        (plan("gpt.policy", "dtr"), "gpt.policy: not a plimsoll trace file"),
        (plan("gpt.plimsoll", "short.policy"), "short.policy: malformed policy: truncated"),
        (plan("gpt.plimsoll", "altered.policy"), "altered.policy: altered after it was written"),
        (plan("gpt.plimsoll", "foreign.policy"), "foreign.policy: not a plimsoll policy file"),
        (plan("gpt.plimsoll", "resnet.plimsoll"), "resnet.plimsoll: not a plimsoll policy file"),
        ("inspect missing.plan".to_owned(), "missing.plan: No such file"),
        ("inspect short.plimsoll".to_owned(), "short.plimsoll: truncated"),
        ("inspect short.policy".to_owned(), "short.policy: malformed policy: truncated"),
        ("inspect gpt.toml".to_owned(), "gpt.toml: neither a trace, nor a plan, nor a policy"),
        ("summarise gpt.toml".to_owned(), "gpt.toml: no report of `evaluate --held-out --json`"),
        ("behaviour gpt.policy".to_owned(), "gpt.policy: neither a plimsoll trace, nor a memory snapshot"),
        ("record --config missing.toml --workload gpt-tiny --out x.plimsoll".to_owned(), "missing.toml: No such file"),
        ("train --config gpt.toml --out never.policy --resume".to_owned(), "never.policy.state: No such file"),
    ] {
        let message = bench.refuse(&call);
        assert!(message.contains(expected), "{call}: {message}");
    }
}

#[test]
fn a_directory_that_cannot_be_written_is_named_and_nothing_is_left() {
    let bench = bench!("unwritable");
    bench.write("file", b"not a directory");
    bench.succeed("record --config gpt.toml --workload gpt-tiny --out gpt.plimsoll --iterations 2");
    let before = bench.files();
    for out in ["file/x", "no/such/folder/x"] {
        for call in [
            format!("record --config gpt.toml --workload gpt-tiny --iterations 2 --out {out}"),
            format!("train --config gpt.toml --updates 1 --out {out}"),
            format!("plan --trace gpt.plimsoll --policy dtr --budget 90% --link 1GB/s --out {out}"),
            format!("plan --trace gpt.plimsoll --policy dtr --budget 90% --link 1GB/s --json {out}"),
            format!("evaluate --config gpt.toml --policy dtr --json {out}"),
            format!("run --config gpt.toml --workload gpt-tiny --policy dtr --budget 90% --iterations 1 --json {out}"),
        ] {
            let message = bench.refuse(&call);
            assert!(message.contains(out), "{call}: {message}");
        }
    }
    let message = bench.refuse("evaluate --config gpt.toml --policy dtr --logdir file");
    assert!(message.contains("file"), "{message}");
    assert_eq!(bench.files(), before);
}

#[test]
fn hold_compares_loops_under_budgets_with_their_untouched_selves() {
    let bench = bench!("hold");
    let call = bench.succeed(
        "hold gpt.toml:gpt-tiny resnet.toml:resnet-tiny --policy dtr --budget 80% --budget 55% --budget 5% --iterations 7 \
         --json held.json",
    );
    assert!(call.stdout.contains("resnet-tiny"), "{}", call.stdout);
    let held = bench.json("held.json");
    let points = held["points"].as_array().unwrap();
    assert_eq!(points.len(), 6);
    for point in points {
        let bytes = |field: &str| point[field].as_u64().unwrap();
        assert_eq!(point["held"], true, "{point:#}");
        assert_eq!(point["losses_identical"], true, "{point:#}");
        assert_eq!(point["variables_identical"], true, "{point:#}");
        assert!(bytes("peak_bytes") <= bytes("budget_bytes"), "{point:#}");
        // Nothing can be held below what stays between iterations: then the least that was found takes its place.
        let can_be = bytes("asked_bytes") >= bytes("resident_bytes");
        assert_eq!(bytes("budget_bytes") == bytes("asked_bytes"), can_be, "{point:#}");
        assert!(bytes("planned") > 0 || !can_be, "{point:#}");
    }
}

#[test]
fn hold_does_as_a_job_that_names_no_policy_and_may_not_swap() {
    let bench = bench!("hold-search");
    bench.succeed("hold gpt.toml:gpt-tiny --actions keep,recompute --budget 70% --iterations 7 --json held.json");
    let held = bench.json("held.json");
    let point = &held["points"][0];
    assert_eq!((&point["held"], &point["variables_identical"]), (&Value::Bool(true), &Value::Bool(true)), "{point:#}");
    assert!(point["plans_by"].as_object().unwrap().keys().any(|by| by == "search"), "{point:#}");
    let refused = bench.refuse("hold gpt.toml:gpt-tiny --policy genetic");
    assert!(refused.contains("genetic: it takes too long"), "{refused}");
}

#[test]
fn slow_tiers_are_limited_and_spill_to_a_file_that_leaves_nothing() {
    let bench = bench!("tiers");
    std::fs::create_dir(bench.path("spill")).unwrap();
    let run = "run --config gpt.toml --workload gpt-tiny --policy lru --actions keep,swap --budget 60% --iterations 2 \
               --verify --link 2GB/s";
    bench.succeed(&format!("{run} --host-limit 64KiB --spill spill --spill-limit 64MiB --json spilled.json"));
    let result = bench.json("spilled.json");
    assert_eq!((&result["held"], &result["identical"]), (&Value::Bool(true), &Value::Bool(true)), "{result:#}");
    // More than the memory may take.
    assert!(result["slow_tier_high_water_bytes"].as_u64().unwrap() > 64 << 10, "{result:#}");
    assert_eq!(bench.files().iter().filter(|name| name.starts_with("spill/")).count(), 0);
    // What is measured is compared with the tiers that it ran on: by the slow link alone it would take a hundred times as long.
    let slow = run.replace("2GB/s", "1MB/s");
    bench.succeed(&format!("{slow} --interleave --host-limit 4KiB --spill spill --json slow.json"));
    let makespan_ns = |of: &str| bench.json("slow.json")[of]["makespan_ns"].as_f64().unwrap();
    let [predicted, retimed] = ["predicted", "retimed"].map(makespan_ns);
    assert!(retimed < 10.0 * predicted, "{retimed} retimed, {predicted} predicted");

    let limited = std::fs::read_to_string(bench.path("gpt.toml")).unwrap();
    bench.write("limited.toml", limited.replace("[evaluation]\n", "[evaluation]\nhost_limit = \"100B\"\n"));
    for (call, why) in [
        (format!("{run} --spill nowhere"), "no such folder"),
        (format!("{run} --host-limit 100"), "holds nothing"),
        (run.replace("gpt.toml", "limited.toml"), "evaluation.host_limit"),
        ("hold gpt.toml:gpt-tiny --iterations 0".to_owned(), "nothing to run"),
        ("hold gpt.toml:gpt-huge".to_owned(), "gpt-huge"),
    ] {
        let refused = bench.refuse(&call);
        assert!(refused.contains(why), "{call}: {refused}");
    }
}
