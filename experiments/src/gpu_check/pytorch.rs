//! The same model in plain PyTorch: as it is, with `torch.utils.checkpoint` around every block, and with saved tensors offloaded
//! by PyTorch itself; and what a plan takes within the peak that the checkpoints left.

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context;
use plimsoll_env::workload::WorkloadConfig;
use plimsoll_runtime::Planner;
use serde::Serialize;
use serde_json::{Value, json};

use super::bench::Bench;
use super::{Bed, Deadline, Findings, Member, Request};

/// Written for PyTorch 2.11; prints one line of JSON for each way.
const SCRIPT: &str = include_str!("plain_pytorch.py");
/// How often the script is looked after.
const PAUSE: Duration = Duration::from_millis(200);
/// Of the part's time, so much is the script's.
const SCRIPT_SHARE: f64 = 0.6;
/// What a way says that has run out of the device's memory, among other things.
const OUT_OF_MEMORY: &str = "out of memory";

/// What recomputing every block takes.
pub struct Checkpoint {
    makespan_ns: u64,
    /// Of what the model left alone takes.
    overhead: f64,
    /// Of what the program asked for.
    peak_bytes: u64,
}

/// A plan that takes no more memory, beside it.
#[derive(Serialize)]
struct WithinItsPeak {
    makespan_ns: u64,
    checkpoints_makespan_ns: u64,
    overhead: f64,
    checkpoints_overhead: f64,
}

/// Runs the part's first half. What a plan is to be compared with, where there is any such thing.
pub fn run(request: &Request, member: &Member, findings: &mut Findings) -> anyhow::Result<Option<Checkpoint>> {
    let asked = described(member, request)?.to_string();
    let until = Deadline::after(request.deadline.left().mul_f64(SCRIPT_SHARE));
    let (script, found) = (request.out.join("plain_pytorch.py"), request.out.join("plain_pytorch.jsonl"));
    std::fs::write(&script, SCRIPT).with_context(|| script.display().to_string())?;
    let out = std::fs::File::create(&found).with_context(|| found.display().to_string())?;
    let mut command = Command::new(&request.python);
    command.arg(&script).arg(asked).stdin(Stdio::null()).stdout(out).stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return findings.not_run(format!("{}: {error}", request.python)).map(|()| None),
    };
    let mut stderr = child.stderr.take().context("it is piped")?;
    // Read all the while: a full pipe would stop the script.
    let complaints = std::thread::spawn(move || std::io::read_to_string(&mut stderr).unwrap_or_default());
    let mut ways: Vec<Value> = Vec::new();
    let status = loop {
        let ended = child.try_wait()?;
        // To give page-locked memory back takes a killed script longer than there may be left.
        let lines = std::fs::read_to_string(&found)?;
        for way in lines.lines().skip(ways.len()).map_while(|line| serde_json::from_str::<Value>(line).ok()) {
            findings.push("ways", &way)?;
            ways.push(way);
        }
        if ended.is_some() {
            break ended;
        }
        if until.is_over() {
            child.kill()?;
            child.wait()?;
            break None;
        }
        std::thread::sleep(PAUSE);
    };
    let (_, _) = (std::fs::remove_file(&script), std::fs::remove_file(&found));
    let complaints = complaints.join().unwrap_or_default();
    for way in &ways {
        if let Some(failure) = way["failure"].as_str().filter(|failure| !failure.contains(OUT_OF_MEMORY)) {
            findings.fail(format!("{}: {failure}", way["way"]))?;
        }
    }
    match status {
        None => findings.set("cut_short", true)?,
        Some(status) if status.success() => {}
        Some(_) if ways.is_empty() => findings.not_run(complaints.lines().last().unwrap_or("python3 failed"))?,
        Some(status) => findings.fail(format!("the script ended early: {status}"))?,
    }
    Ok(Checkpoint::of(&ways))
}

impl Checkpoint {
    /// Of the ways' lines; none where it was not measured, or has no peak.
    fn of(ways: &[Value]) -> Option<Self> {
        let number = |name: &str, key: &str| ways.iter().find(|way| way["way"] == name)?[key].as_u64();
        let (makespan_ns, plain_ns) = (number("checkpoint", "makespan_ns")?, number("plain", "makespan_ns")?);
        let overhead = makespan_ns as f64 / plain_ns as f64 - 1.0;
        Some(Checkpoint { makespan_ns, overhead, peak_bytes: number("checkpoint", "requested_peak_bytes")? })
    }

    /// The part's second half: the same loop under the best plan, by learned policies or by none, that takes no more memory.
    pub fn beside(&self, bed: &Bed<'_>, request: &Request, findings: &mut Findings) -> anyhow::Result<()> {
        let (mut bench, mut instance) = Bench::recorded(bed, findings)?;
        instance.budget_bytes = self.peak_bytes;
        let planner = Planner::default();
        let mut best = ("planner".to_owned(), planner.plan(instance.problem(), None));
        for policy in request.learned(&instance.trace.family)? {
            let decided = policy.plan(instance.problem(), &planner);
            if decided.planned.is_better_than(&best.1.planned) {
                best = (policy.name().to_owned(), decided);
            }
        }
        let (policy, decided) = best;
        let ratio = self.peak_bytes as f64 / instance.trace.peak_bytes as f64;
        let took = bench.measure(&instance, ratio, &policy, &decided, findings)?;
        let within = took.map(|took| WithinItsPeak {
            makespan_ns: took.makespan_ns,
            checkpoints_makespan_ns: self.makespan_ns,
            overhead: took.overhead,
            checkpoints_overhead: self.overhead,
        });
        findings.set("within_the_checkpoints_peak", within)
    }
}

/// The loop as the script reads it: what its configuration says, and where it runs.
fn described(member: &Member, request: &Request) -> anyhow::Result<Value> {
    let (family, config) = match &member.config {
        WorkloadConfig::Gpt(config) => ("gpt", serde_json::to_value(config)?),
        WorkloadConfig::Resnet(config) => ("resnet", serde_json::to_value(config)?),
        _ => ("", Value::Null),
    };
    let device = request.device.to_string();
    Ok(json!({ "device": device, "family": family, "config": config, "bf16": member.manner.bf16 }))
}
