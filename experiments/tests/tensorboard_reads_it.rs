//! TensorBoard itself reads what `train` and `evaluate` log: one run per policy, with its curves.

use std::path::Path;
use std::process::Command;

use plimsoll_tests::bench;
use serde_json::Value;

/// What TensorBoard's own reader finds in a log directory: runs, tags, and (step, value) pairs.
fn read(logdir: &Path) -> Value {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    assert!(root.join(".tools/tensorboard").exists(), "run `make tools` first");
    let output =
        Command::new("python3").arg(root.join("experiments/tests/read_events.py")).arg(logdir).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The points of a curve.
fn curve<'a>(runs: &'a Value, run: &str, tag: &str) -> &'a Vec<Value> {
    runs[run][tag].as_array().unwrap_or_else(|| panic!("{run} has no {tag}: {runs:#}"))
}

#[test]
fn what_train_and_evaluate_log() {
    let bench = bench!("tensorboard");
    bench.succeed(
        "train --config resnet.toml --algorithm ppo --out resnet.policy --updates 3 --seed 2 --logdir runs/train",
    );
    bench.succeed(
        "evaluate --config resnet.toml --policy resnet.policy --real --logdir runs/compare --json compare.json",
    );

    let training = read(&bench.path("runs/train"));
    let run = "train-resnet-2";
    for tag in ["train/return_mean", "train/policy_loss", "train/value_loss", "train/entropy", "train/approx_kl"] {
        let steps: Vec<_> = curve(&training, run, tag).iter().map(|point| point[0].as_u64()).collect();
        assert_eq!(steps, [Some(1), Some(2), Some(3)], "{tag}");
        assert!(curve(&training, run, tag).iter().all(|point| point[1].is_number()), "{tag} is finite");
    }
    let text = curve(&training, run, "configuration")[0][1].as_str().unwrap();
    assert!(text.contains("resnet-tiny"), "{text}");
    let hyperparameters = &curve(&training, run, "_hparams_/session_start_info")[0][1];
    assert_eq!(hyperparameters["updates"], 3.0, "{hyperparameters}");

    let compared = read(&bench.path("runs/compare"));
    let results = bench.json("compare.json")["results"].clone();
    for point in results.as_array().unwrap() {
        let policy = point["policy"].as_str().unwrap().trim_end_matches(".policy");
        let share = point["budget_bytes"].as_f64().unwrap() / point["keep_all_peak_bytes"].as_f64().unwrap();
        let value = |tag: &str| {
            let points = curve(&compared, policy, &format!("resnet-tiny/{tag}"));
            let at = points.iter().find(|found| found[0] == (100.0 * share).round());
            at.unwrap_or_else(|| panic!("{policy} has no {tag} at {share}"))[1].as_f64().unwrap()
        };
        let feasible = point["feasible"].as_bool().unwrap();
        assert_eq!(value("feasible"), f64::from(u8::from(feasible)));
        if feasible {
            let overhead = point["measured"]["overhead"].as_f64().unwrap();
            assert!((value("measured_overhead") - overhead).abs() <= 1e-5 * overhead.abs().max(1.0), "{policy}");
            assert!(value("measured_peak_share") <= share, "{policy} holds its budget");
            assert_eq!([value("held"), value("identical")], [1.0, 1.0], "{policy}");
            let [low, middle, high] = ["_low", "", "_high"].map(|end| value(&format!("median_overhead{end}")));
            assert!(low <= middle && middle <= high, "{policy}: {low} to {middle} to {high}");
        }
    }
    let runs: Vec<&String> = compared.as_object().unwrap().keys().collect();
    assert_eq!(runs, ["capuchin", "chen", "dtr", "dtr-swap", "keep-all", "knapsack", "msps", "resnet", "vdnn-all"]);
}
