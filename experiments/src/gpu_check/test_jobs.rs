//! Small PyTorch jobs, those of the tests, that do what is out of the ordinary: other threads use what is away, memory is shared by
//! its address, storages are copied, streams share gradients, graphs are captured, processes gather and shard. Each left alone and
//! within a budget.

use std::net::TcpListener;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use plimsoll_runtime::torch::device::DeviceName;
use rayon::prelude::*;
use serde::Serialize;
use serde_json::Value;

use super::script::{self, Nothing};
use super::{CUT_SHORT, Deadline, Findings, LEFT_OUT, Request};

/// More than any of the jobs takes, though many begin at once: one that hangs would keep others waiting that run alone.
const JOB_TIME: Duration = Duration::from_secs(150);
/// Cores for each of the jobs that run beside each other.
const CORES: usize = 2;
/// No budget: what a job takes is counted.
const WATCHED: &str = "1TiB";
/// What a job has come to, as far as it says so. One that says nothing by these names has come to all that it says.
const CAME_TO: [&str; 5] = ["losses", "parameters", "found", "looked", "operators"];
/// What stands before the bytes that it takes at the least, where a budget is refused.
const LEAST: &str = "least feasible budget found so far is ";
/// Where findings say what became of jobs.
const JUDGED: &str = "jobs";
/// So often a budget that is refused is made larger.
const TRIES: usize = 6;
/// Where processes find each other, of which there is one; a matrix product's workspace, of which each thread has one, is no larger than
/// a small job's budget; and jobs that compile leave cores to others.
const ENVIRONMENT: [(&str, &str); 6] = [
    ("MASTER_ADDR", "127.0.0.1"),
    ("WORLD_SIZE", "1"),
    ("RANK", "0"),
    ("CUBLAS_WORKSPACE_CONFIG", ":16:8"),
    ("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1"),
    ("TORCHINDUCTOR_COMPILE_THREADS", "4"),
];

/// What a job is left.
enum Left {
    Bytes(u64),
    /// Of what it takes.
    Percent(u64),
}

/// A program, its flags, the flags that make sense within a budget alone, and what it is left.
type Job = (&'static str, &'static str, &'static str, Left);

/// What may be cut short stands last. A process that is alone shards without a gather. The first of them on the CPU, too.
const JOBS: [Job; 24] = [
    ("lent.py", "", "", Left::Bytes(3_600_000)),
    ("python_job.py", "--compiled", "--policy dtr", Left::Percent(70)),
    ("bystanders.py", "--iterations 20", "", Left::Bytes(2_700_000)),
    ("bystanders.py", "--iterations 20", "--detect", Left::Bytes(2_700_000)),
    ("gathers.py", "", "", Left::Bytes(170_000)),
    ("one_kernel.py", "", "", Left::Bytes(3_000_000)),
    ("side_streams.py", "", "", Left::Bytes(1_200_000)),
    ("signalled.py", "", "", Left::Bytes(5_000_000)),
    ("captured.py", "", "", Left::Bytes(2_000_000)),
    ("joined.py", "", "--swap-alone", Left::Bytes(700_000)),
    ("drawing.py", "", "--recompute-alone", Left::Bytes(2_500_000)),
    ("cast.py", "", "--recompute-alone", Left::Bytes(7_100_000)),
    ("python_job.py", "--shared sharded --backend nccl --iterations 16", "", Left::Percent(75)),
    ("deep_copies.py", "", "", Left::Bytes(1_000_000)),
    ("python_job.py", "--iterations 16", "", Left::Percent(70)),
    ("python_job.py", "--streams --iterations 16", "--policy dtr", Left::Percent(70)),
    ("python_job.py", "--past-dispatcher graphs", "", Left::Percent(70)),
    ("python_job.py", "--past-dispatcher lists", "--policy dtr", Left::Percent(70)),
    ("python_job.py", "--in-python", "", Left::Percent(70)),
    ("python_job.py", "--saves --iterations 4", "--detect", Left::Percent(70)),
    ("python_job.py", "--forks --iterations 6", "", Left::Percent(70)),
    ("python_job.py", "--hooked --iterations 16", "--detect", Left::Percent(70)),
    ("python_job.py", "--fused --sequence 4 --iterations 20", "--mark", Left::Percent(70)),
    ("list_operators.py", "", "", Left::Bytes(2_500_000)),
];

/// A job within a budget, beside the one left alone.
#[derive(Serialize)]
struct Verdict {
    job: String,
    budget_bytes: u64,
    /// None of a job that does not pass on what its iterations took.
    peak_bytes: Option<u64>,
    identical: bool,
    /// Whether the job left alone comes to the same twice; asked where the other comes to something else.
    repeats: Option<bool>,
    /// What the runtime says, or what the job passes on of it.
    report: Value,
}

/// Runs the part.
pub fn run(request: &Request, findings: &mut Findings) -> anyhow::Result<()> {
    if request.package.is_none() {
        return findings.not_run("--package names no folder that holds the Python package");
    }
    let jobs = if request.device == DeviceName::Cpu { &JOBS[..1] } else { &JOBS };
    let findings = Mutex::new(findings);
    let at_once = std::thread::available_parallelism()?.get().div_ceil(CORES);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(at_once).build()?;
    pool.install(|| {
        jobs.iter().par_bridge().try_for_each(|job| {
            let judged = judge(request, job)?;
            let mut findings = findings.lock().unwrap_or_else(PoisonError::into_inner);
            judged.tell(&mut findings)
        })
    })?;
    let findings = findings.into_inner().unwrap_or_else(PoisonError::into_inner);
    if findings.has(CUT_SHORT) {
        return Ok(());
    }
    if !findings.has(JUDGED) && !findings.has(super::FAILURES) {
        findings.not_run("no job runs here when it is left alone")?;
    }
    findings.set(super::COMPLETE, true)
}

/// What is to be said of a job.
enum Judged {
    Verdict(Verdict),
    /// What it says where nobody keeps it within a budget.
    LeftOut(String),
    Failed(String),
    CutShort,
}

impl Judged {
    fn tell(self, findings: &mut Findings) -> anyhow::Result<()> {
        match self {
            Judged::Verdict(verdict) => {
                if !verdict.identical && verdict.repeats != Some(false) {
                    findings.fail(format!("{}: other bits than those of the job left alone", verdict.job))?;
                }
                if verdict.peak_bytes > Some(verdict.budget_bytes) {
                    findings.fail(format!("{}: more than its {} bytes", verdict.job, verdict.budget_bytes))?;
                }
                findings.push(JUDGED, verdict)
            }
            Judged::LeftOut(why) => findings.push(LEFT_OUT, why),
            Judged::Failed(why) => findings.fail(why),
            Judged::CutShort => findings.cut_short(),
        }
    }
}

/// Runs a job alone and within its budget, or what it needs at the least.
fn judge(request: &Request, (program, flags, more, left): &Job) -> anyhow::Result<Judged> {
    let alone = || run_job(request, program, flags);
    let within = |budget: &str| run_job(request, program, &format!("{flags} {more} --budget {budget}"));
    let job = [*program, flags, more].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ");
    let untouched = match alone()? {
        Ok(untouched) => untouched,
        Err(Nothing::Failed(why)) => return Ok(Judged::LeftOut(format!("{job}: {why}"))),
        Err(Nothing::CutShort) => return Ok(Judged::CutShort),
    };
    let mut budget_bytes = match left {
        Left::Bytes(bytes) => *bytes,
        Left::Percent(percent) => match within(WATCHED)? {
            Ok(watched) => {
                let peak_bytes = watched["report"]["peak_bytes"].as_u64().context("a report tells a peak")?;
                peak_bytes * percent / 100
            }
            Err(Nothing::Failed(why)) => return Ok(Judged::Failed(format!("{job}, watched: {why}"))),
            Err(Nothing::CutShort) => return Ok(Judged::CutShort),
        },
    };
    let mut tries = 0;
    let held = loop {
        tries += 1;
        match within(&format!("{budget_bytes}B"))? {
            Ok(held) => break held,
            // A device's libraries take some for themselves.
            Err(Nothing::Failed(why)) => match least_bytes(&why).filter(|_| tries < TRIES) {
                Some(least_bytes) => budget_bytes = least_bytes + least_bytes / 50,
                None => return Ok(Judged::Failed(format!("{job}, within {budget_bytes} bytes: {why}"))),
            },
            Err(Nothing::CutShort) => return Ok(Judged::CutShort),
        }
    };
    let identical = came_to(&held) == came_to(&untouched);
    let repeats = match identical {
        true => None,
        false => match alone()? {
            Ok(again) => Some(came_to(&again) == came_to(&untouched)),
            Err(_) => None,
        },
    };
    let report = if held["report"].is_object() { held["report"].clone() } else { without_what_it_came_to(held) };
    let peak_bytes = peak_bytes(&report);
    Ok(Judged::Verdict(Verdict { job, budget_bytes, peak_bytes, identical, repeats, report }))
}

/// The most that iterations took; but for the last one, which may end with all of a loop, and with everything resident.
fn peak_bytes(report: &Value) -> Option<u64> {
    let (_, iterations) = report["latest"].as_array()?.split_last()?;
    iterations.iter().filter_map(|iteration| iteration["peak_bytes"].as_u64()).max()
}

/// What a job prints has come to.
fn came_to(printed: &Value) -> Vec<&Value> {
    let parts: Vec<&Value> = CAME_TO.iter().filter_map(|part| printed.get(part)).collect();
    if parts.is_empty() { vec![printed] } else { parts }
}

/// The rest.
fn without_what_it_came_to(mut printed: Value) -> Value {
    match printed.as_object_mut() {
        Some(all) => all.retain(|part, _| !CAME_TO.contains(&part.as_str())),
        None => printed = Value::Null,
    }
    printed
}

/// What a job needs at the least, where it says so.
fn least_bytes(complaint: &str) -> Option<u64> {
    let (_, after) = complaint.split_once(LEAST)?;
    after.split_once(' ')?.0.parse().ok()
}

fn run_job(request: &Request, program: &str, flags: &str) -> anyhow::Result<Result<Value, Nothing>> {
    let device = request.device.to_string();
    let arguments = ["--device", &device].into_iter().chain(flags.split_whitespace()).map(str::to_owned);
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    let environment = [&ENVIRONMENT[..], &[("MASTER_PORT", &port)]].concat();
    let until = Deadline::after(request.deadline.left().min(JOB_TIME));
    let ended = script::run_to_its_end(request, program, &arguments.collect::<Vec<_>>(), &environment, until)?;
    Ok(ended.map_err(|nothing| match nothing {
        Nothing::CutShort if !request.deadline.is_over() => Nothing::Failed(format!("no end within {JOB_TIME:?}")),
        nothing => nothing,
    }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_a_job_came_to_is_all_that_has_to_be_the_same() {
        let jobs = [json!({ "found": [1.5], "evictions": 3 }), json!({ "found": [1.5], "evictions": 9 })];
        assert_eq!(came_to(&jobs[0]), came_to(&jobs[1]));
        assert_ne!(came_to(&jobs[0]), came_to(&json!({ "found": [2.5], "evictions": 3 })));
        assert_ne!(came_to(&json!(["a"])), came_to(&json!(["b"])), "one that only says what it came to");
        assert_eq!(without_what_it_came_to(jobs[0].clone()), json!({ "evictions": 3 }));
    }

    #[test]
    fn a_job_that_is_refused_says_what_it_needs() {
        let said = "torch.OutOfMemoryError: 8 bytes more exceed it; the least feasible budget found so far is 1048576 bytes (1 MiB)";
        assert_eq!(least_bytes(said), Some(1 << 20));
        assert_eq!(least_bytes("ValueError: 2lights"), None);
    }
}
