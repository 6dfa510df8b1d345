//! A PyTorch job in Python, by the package, within a budget: its bits beside those of the job that is left alone, its peak, and
//! what either takes.

use anyhow::{Context, bail};
use plimsoll_runtime::torch::settings::Determinism;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::script::{self, Nothing};
use super::{Findings, Member, Request};

/// What a job is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// As users write it.
    Plain,
    /// `torch.compile` has compiled its blocks.
    Compiled,
    /// It works in two streams beside each other.
    Streams,
    /// Parameters, gradients and the optimizer's state exceed its budget; one operator steps all parameters.
    Throughout,
    /// The same where several operators do, one after another, as is PyTorch's default.
    Foreach,
}

impl Kind {
    /// How its optimizer steps all parameters, where its budget is less than what is there between iterations.
    fn optimizer(self) -> Option<&'static str> {
        match self {
            Kind::Plain | Kind::Compiled | Kind::Streams => None,
            Kind::Throughout => Some("fused"),
            Kind::Foreach => Some("foreach"),
        }
    }

    /// Whether all of its loop is listened to.
    fn is_throughout(self) -> bool {
        self.optimizer().is_some()
    }
}

/// No budget: what the job takes is counted, and what that costs.
const WATCHED_BYTES: u64 = 1 << 50;
/// Shares of the keep-all peak, of which the first that can be held counts.
const SHARES: [f64; 2] = [0.75, 0.9];
/// The same where that is the optimizer's state, mostly.
const SHARES_OF_STATE: [f64; 3] = [0.6, 0.75, 0.9];
/// What a job says that cannot be held within its budget.
const NO_ROOM: &str = "OutOfMemoryError";

/// What a job prints.
#[derive(Deserialize)]
#[serde(untagged)]
enum Printed {
    Done(Job),
    Failed { failure: String },
}

/// What a job came to.
#[derive(Deserialize)]
struct Job {
    came_to: CameTo,
    makespan_ns: u64,
    /// Whether it gives the same bits twice: of one that is left alone.
    repeats: Option<bool>,
    /// The runtime's, of one that is not.
    report: Option<Value>,
}

/// The bits of a job.
#[derive(Deserialize, PartialEq)]
struct CameTo {
    losses: Vec<String>,
    parameters: String,
}

/// A job within a budget, beside the one left alone.
#[derive(Serialize)]
struct Verdict {
    budget_bytes: u64,
    peak_bytes: u64,
    identical: bool,
    first_loss_that_differs: Option<usize>,
    /// Fastest of three.
    makespan_ns: u64,
    /// Of what the job left alone takes.
    overhead: f64,
    /// What the runtime says, its last iteration aside.
    report: Value,
    /// The last iteration.
    last: Value,
}

impl Verdict {
    fn of(kind: Kind, job: Job, budget_bytes: u64, untouched: &Job) -> anyhow::Result<Self> {
        let mut report = job.report.context("a job within a budget reports")?;
        let Value::Array(mut iterations) = report["latest"].take() else { bail!("iterations were run") };
        if kind.is_throughout() {
            // It ends with the loop, and with everything resident.
            iterations.pop();
        }
        let peaks = iterations.iter().filter_map(|iteration| iteration["peak_bytes"].as_u64());
        let peak_bytes = peaks.max().context("a report tells peaks")?;
        let last = iterations.pop().context("iterations were run")?;
        let losses = job.came_to.losses.iter().zip(&untouched.came_to.losses);
        Ok(Verdict {
            budget_bytes,
            peak_bytes,
            identical: job.came_to == untouched.came_to,
            first_loss_that_differs: losses.into_iter().position(|(a, b)| a != b),
            makespan_ns: job.makespan_ns,
            overhead: job.makespan_ns as f64 / untouched.makespan_ns as f64 - 1.0,
            report,
            last,
        })
    }
}

/// Runs the part on a job of that kind.
pub fn run(request: &Request, member: &Member, kind: Kind, findings: &mut Findings) -> anyhow::Result<()> {
    if request.package.is_none() {
        return findings.not_run("--package names no folder that holds the Python package");
    }
    let policy = request.policies.iter().find(|path| path.file_stem() == Some(member.configuration.as_ref()));
    findings.set("policy", policy)?;
    let mut asked = script::described(member, request)?;
    asked["compiled"] = (kind == Kind::Compiled).into();
    asked["streams"] = (kind == Kind::Streams).into();
    asked["throughout"] = kind.is_throughout().into();
    if let Some(optimizer) = kind.optimizer() {
        asked["optimizer"] = optimizer.into();
        asked["config"]["batch"] = 1.into();
    }
    asked["strict"] = (member.config.determinism() == Determinism::Required).into();
    asked["policy"] = serde_json::to_value(policy)?;
    let mut job = |budget_bytes: Option<u64>| {
        asked["budget_bytes"] = budget_bytes.into();
        run_job(request, &asked)
    };
    let untouched = match job(None)? {
        Ok(untouched) => untouched,
        // Whatever keeps PyTorch from it: no compiler, no such model.
        Err(Nothing::Failed(why)) => return findings.not_run(why),
        Err(Nothing::CutShort) => return findings.cut_short(),
    };
    let repeats = untouched.repeats == Some(true);
    findings.set("untouched_job_repeats", repeats)?;
    if kind == Kind::Streams && !repeats {
        findings.fail("left alone it gives other bits each time, so they say nothing".to_owned())?;
    }
    findings.set("untouched_makespan_ns", untouched.makespan_ns)?;
    let judge = |key: &str, job: Job, budget_bytes, findings: &mut Findings| -> anyhow::Result<u64> {
        let verdict = Verdict::of(kind, job, budget_bytes, &untouched)?;
        if verdict.peak_bytes > budget_bytes {
            findings.fail(format!("{key}: a peak of {} bytes within {budget_bytes}", verdict.peak_bytes))?;
        }
        if verdict.last["followed"] != true {
            findings.fail(format!("{key}: the last iteration did not go as planned: {}", verdict.last))?;
        }
        if repeats && !verdict.identical {
            findings.fail(format!("{key}: other bits than those of the job left alone"))?;
        }
        findings.set(key, &verdict)?;
        Ok(verdict.peak_bytes)
    };
    let keep_all_peak_bytes = match job(Some(WATCHED_BYTES))? {
        Ok(watched) => judge("watched", watched, WATCHED_BYTES, findings)?,
        Err(Nothing::Failed(why)) => return findings.fail(format!("watched: {why}")),
        Err(Nothing::CutShort) => return findings.cut_short(),
    };
    let shares = if kind.is_throughout() { &SHARES_OF_STATE[..] } else { &SHARES };
    for share in shares {
        let budget_bytes = (share * keep_all_peak_bytes as f64) as u64;
        match job(Some(budget_bytes))? {
            Ok(job) => return judge("within_a_budget", job, budget_bytes, findings).map(drop),
            Err(Nothing::Failed(why)) if why.contains(NO_ROOM) => findings.push("no_room", why)?,
            Err(Nothing::Failed(why)) => return findings.fail(format!("within {budget_bytes} bytes: {why}")),
            Err(Nothing::CutShort) => return findings.cut_short(),
        }
    }
    findings.fail("no budget that was tried could be held".to_owned())
}

/// What a job came to, or why it came to nothing.
fn run_job(request: &Request, asked: &Value) -> anyhow::Result<Result<Job, Nothing>> {
    let printed =
        match script::run_to_its_end(request, script::BUDGETED_JOB, &[asked.to_string()], &[], request.deadline)? {
            Ok(printed) => printed,
            Err(nothing) => return Ok(Err(nothing)),
        };
    Ok(match serde_json::from_value(printed)? {
        Printed::Done(job) => Ok(job),
        Printed::Failed { failure } => Err(Nothing::Failed(failure)),
    })
}
