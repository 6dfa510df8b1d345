//! The same model in plain PyTorch: as it is, with `torch.utils.checkpoint` around every block, and with saved tensors offloaded
//! by PyTorch itself; and what a plan takes within the peak that the checkpoints left.

use plimsoll_runtime::Planner;
use serde::Serialize;
use serde_json::Value;

use super::bench::Bench;
use super::script::{self, Ended};
use super::{Bed, Deadline, Findings, Member, Request};

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
    let until = Deadline::after(request.deadline.left().mul_f64(SCRIPT_SHARE));
    let mut ways: Vec<Value> = Vec::new();
    let ended = script::run(request, script::PLAIN_PYTORCH, &script::described(member, request)?, until, |way| {
        findings.push("ways", &way)?;
        ways.push(way);
        Ok(())
    })?;
    for way in &ways {
        if let Some(failure) = way["failure"].as_str().filter(|failure| !failure.contains(OUT_OF_MEMORY)) {
            findings.fail(format!("{}: {failure}", way["way"]))?;
        }
    }
    match ended {
        Ended::NotStarted(why) => findings.not_run(why)?,
        Ended::OutOfTime => findings.cut_short()?,
        Ended::ByItself(status, _) if status.success() => {}
        Ended::ByItself(_, complaint) if ways.is_empty() => findings.not_run(complaint)?,
        Ended::ByItself(status, _) => findings.fail(format!("the script ended early: {status}"))?,
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
