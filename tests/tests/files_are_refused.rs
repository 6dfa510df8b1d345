//! A damaged, foreign, newer or inconsistent trace or plan is refused in one line that names the file; none panics,
//! and what is accepted can be planned.

use std::path::{Path, PathBuf};

use plimsoll_runtime::baselines::baseline;
use plimsoll_runtime::{FileError, Lineage, Plan, PlanFile, Problem, Trace, plan};
use plimsoll_tests::{Recorded, fast_link, one_at_a_time};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// A folder with a good trace and a good plan.
struct Files {
    folder: tempfile::TempDir,
    trace: PathBuf,
    plan: PathBuf,
}

impl Files {
    fn new() -> Self {
        let _running = one_at_a_time();
        let recorded = Recorded::awkward(1);
        let folder = tempfile::tempdir().unwrap();
        let (trace, plan) = (folder.path().join("good.trace"), folder.path().join("good.plan"));
        recorded.trace.save(&trace).unwrap();
        let file = PlanFile {
            fingerprint: recorded.trace.fingerprint(),
            workload: "awkward".to_owned(),
            policy: "keep-all".to_owned(),
            budget_bytes: 1 << 20,
            device: recorded.trace.device.clone(),
            tiers: fast_link().into(),
            plan: Plan::keep_all(recorded.lineage.windows().len()),
        };
        file.save(&plan).unwrap();
        Files { folder, trace, plan }
    }

    /// Writes `bytes` beside the good files.
    fn bad(&self, bytes: &[u8]) -> PathBuf {
        let path = self.folder.path().join("bad.plimsoll");
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

/// One line that names the file.
fn line(error: FileError) -> String {
    let text = error.to_string();
    assert!(text.contains("bad.plimsoll: ") && !text.contains('\n'), "{text}");
    text
}

fn trace_refusal(path: &Path) -> String {
    line(Trace::load(path).expect_err("a bad trace"))
}

fn plan_refusal(path: &Path) -> String {
    line(PlanFile::load(path).expect_err("a bad plan"))
}

/// The envelope of runtime/src/file.rs around `body`.
fn envelope(kind: &str, version: u32, body: &[u8]) -> Vec<u8> {
    let digest: String = Sha256::digest(body).iter().map(|byte| format!("{byte:02x}")).collect();
    let mut bytes = format!("plimsoll {kind} {version} sha256={digest} bytes={}\n", body.len()).into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

fn body_of(path: &Path) -> Value {
    let bytes = std::fs::read(path).unwrap();
    let newline = bytes.iter().position(|&byte| byte == b'\n').unwrap();
    serde_json::from_slice(&bytes[newline + 1..]).unwrap()
}

#[test]
fn the_good_files_are_good() {
    let files = Files::new();
    Trace::load(&files.trace).unwrap();
    PlanFile::load(&files.plan).unwrap();
    let rewritten = files.bad(&envelope("trace", 1, body_of(&files.trace).to_string().as_bytes()));
    assert_eq!(Trace::load(rewritten).unwrap(), Trace::load(&files.trace).unwrap());
}

#[test]
fn truncated_files() {
    let files = Files::new();
    for (good, refusal) in [(&files.trace, trace_refusal as fn(&Path) -> String), (&files.plan, plan_refusal)] {
        let whole = std::fs::read(good).unwrap();
        let step = (whole.len() / 200).max(1);
        for length in (0..160).chain((160..whole.len()).step_by(step)).chain([whole.len() - 1]) {
            let message = refusal(&files.bad(&whole[..length]));
            assert!(message.contains("truncated") || message.contains("not a plimsoll"), "{length} bytes: {message}");
        }
        let message = refusal(&files.bad(&[&whole[..], b" "].concat()));
        assert!(message.contains("truncated or extended"), "{message}");
    }
}

#[test]
fn altered_files() {
    let files = Files::new();
    for (good, refusal) in [(&files.trace, trace_refusal as fn(&Path) -> String), (&files.plan, plan_refusal)] {
        let whole = std::fs::read(good).unwrap();
        let step = (whole.len() / 400).max(1);
        for index in (0..160).chain((160..whole.len()).step_by(step)) {
            let mut altered = whole.clone();
            altered[index] ^= 0x10;
            refusal(&files.bad(&altered));
        }
        let mut altered = whole.clone();
        *altered.last_mut().unwrap() ^= 1;
        assert!(refusal(&files.bad(&altered)).contains("altered after it was written"));
    }
}

#[test]
fn foreign_files_and_files_of_another_kind() {
    let files = Files::new();
    for foreign in [&b""[..], b"\n", b"{}", b"plimsoll", b"plimsoll \n", b"\x89PNG\r\n\x1a\n", &[0xff; 4096]] {
        let path = files.bad(foreign);
        assert!(trace_refusal(&path).contains("plimsoll trace file"));
        assert!(plan_refusal(&path).contains("plimsoll plan file"));
    }
    let trace = files.bad(&std::fs::read(&files.trace).unwrap());
    assert!(plan_refusal(&trace).contains("expected a plimsoll plan file, found a trace file"));
    let plan = files.bad(&std::fs::read(&files.plan).unwrap());
    assert!(trace_refusal(&plan).contains("expected a plimsoll trace file, found a plan file"));
}

#[test]
fn files_of_a_newer_version() {
    let files = Files::new();
    let newer = files.bad(&envelope("trace", 2, b"[\"who knows\"]"));
    assert!(trace_refusal(&newer).contains("trace format version 2 is newer than 1, the newest this build reads"));
    let newer = files.bad(&envelope("plan", 7, b"{}"));
    assert!(plan_refusal(&newer).contains("plan format version 7 is newer than 3"));
}

#[test]
fn bodies_that_say_something_else() {
    let files = Files::new();
    let plan = body_of(&files.plan);
    for (key, value) in [
        ("tiers", json!(null)),
        ("budget_bytes", json!(-1)),
        ("plan", json!(["keep", "burn"])),
        ("plan", json!(3)),
        ("novelty", json!(1)),
    ] {
        let mut bad = plan.clone();
        bad[key] = value;
        let message = plan_refusal(&files.bad(&envelope("plan", 1, bad.to_string().as_bytes())));
        assert!(message.contains("malformed plan"), "{message}");
    }
    for body in ["", "null", "[]", "{}", "{\"workload\":1}", &"[".repeat(100_000)] {
        let message = trace_refusal(&files.bad(&envelope("trace", 1, body.as_bytes())));
        assert!(message.contains("malformed trace"), "{message}");
    }
}

/// Every place in `value` that holds a number or a list, as a JSON pointer.
fn places(value: &Value, at: &str, found: &mut Vec<String>) {
    match value {
        Value::Number(_) => found.push(at.to_owned()),
        Value::Array(items) => {
            found.push(at.to_owned());
            items.iter().enumerate().for_each(|(index, item)| places(item, &format!("{at}/{index}"), found));
        }
        Value::Object(entries) => {
            entries.iter().for_each(|(key, item)| places(item, &format!("{at}/{key}"), found));
        }
        _ => {}
    }
}

/// A trace whose digest is right and whose numbers are not: either it is refused, or it can be planned.
#[test]
fn traces_whose_numbers_are_wrong() {
    const CHANGES: usize = 1500;
    let files = Files::new();
    let good = body_of(&files.trace);
    let mut everywhere = Vec::new();
    places(&good, "", &mut everywhere);
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let (mut refused, mut planned) = (0, 0);
    for _ in 0..CHANGES {
        let place = &everywhere[random.random_range(0..everywhere.len())];
        let mut bad = good.clone();
        let found = bad.pointer_mut(place).unwrap();
        match found {
            Value::Array(items) if !items.is_empty() => match random.random_range(0..3) {
                0 => drop(items.pop()),
                1 => items.push(items[0].clone()),
                _ => items.reverse(),
            },
            Value::Array(items) => items.push(json!(random.random_range(0..200u32))),
            number => {
                let other = [0, 1, 5, 200, u64::from(u32::MAX) - 1, u64::from(u32::MAX), 1 << 40, 1 << 59, u64::MAX];
                *number = json!(other[random.random_range(0..other.len())]);
            }
        }
        match Trace::load(files.bad(&envelope("trace", 1, bad.to_string().as_bytes()))) {
            Err(error) => {
                assert!(line(error).contains("malformed trace"));
                refused += 1;
            }
            Ok(trace) => {
                let outcome = std::panic::catch_unwind(|| can_be_planned(&trace));
                assert!(outcome.is_ok(), "{place} is {} in a trace that was accepted", bad.pointer(place).unwrap());
                planned += 1;
            }
        }
    }
    println!("{refused} of {CHANGES} changed traces were refused, {planned} could be planned");
    assert!(refused > 0 && planned > 0);
}

fn can_be_planned(trace: &Trace) {
    let lineage = Lineage::of(trace);
    let problem = Problem {
        trace,
        lineage: &lineage,
        tiers: fast_link().into(),
        budget_bytes: lineage.keep_all_peak_bytes() / 2,
        actions: plimsoll_runtime::ActionSet::ALL,
    };
    for name in ["dtr", "capuchin", "vdnn-all"] {
        plan(problem, baseline(name, 0).expect("a baseline of that name").as_mut());
    }
}
