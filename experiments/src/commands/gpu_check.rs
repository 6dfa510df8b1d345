//! `plimsoll gpu-check`.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use plimsoll_runtime::PolicyFile;
use plimsoll_runtime::torch::device::{CudaDevice, DeviceName, cuda_devices};
use rayon::prelude::*;
use serde::Serialize;
use serde_json::Value;

use crate::gpu_check::{Deadline, Findings, Outcome, Part, Request, Step, at_once, member, schedule, telling_line};
use crate::outputs::write_json;
use crate::provenance::command_line;

/// How often a part is looked after.
const PAUSE: Duration = Duration::from_millis(50);
/// What a part is given beyond its time to write what it has found.
const GRACE: Duration = Duration::from_secs(10);

/// The least share of the time that a step has which others run beside: they slow it down, and wait for none of it.
const BESIDE_SHARE_MIN: f64 = 0.3;
/// Of what a part complains of, so much is kept.
const COMPLAINTS_BYTES_MAX: usize = 8 << 10;

/// Flags.
#[derive(Args)]
pub struct Arguments {
    /// Where the results go
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Minutes that the whole may take
    #[arg(long, default_value_t = 8.0, value_name = "N")]
    minutes: f64,
    /// Where loops run: cuda, cuda:N, or cpu to try the check itself on tiny loops
    #[arg(long, default_value = "cuda", value_name = "DEVICE")]
    device: DeviceName,
    /// Check these parts alone; may be given several times
    #[arg(long, value_name = "PART")]
    part: Vec<Part>,
    /// Run so many steps beside each other, of those that nobody times [default: as the device's memory and the cores allow]
    #[arg(long, value_name = "N")]
    at_once: Option<NonZeroUsize>,
    /// A learned policy, compared beside the baselines on loops of its family; may be given several times
    #[arg(long, value_name = "FILE")]
    policy: Vec<PathBuf>,
    /// The Python that has PyTorch
    #[arg(long, default_value = "python3", value_name = "PROGRAM")]
    python: String,
    /// The folder that holds the Python package
    #[arg(long, value_name = "DIR")]
    package: Option<PathBuf>,
    /// Run one part on this loop, in this process
    #[arg(long, hide = true, requires = "until")]
    member: Option<String>,
    /// When that part is to end, in seconds of Unix time
    #[arg(long, hide = true)]
    until: Option<u64>,
}

/// All that a check found.
#[derive(Serialize)]
struct Report {
    command: String,
    version: &'static str,
    device: String,
    cuda_devices: Vec<CudaDevice>,
    processor_cores: usize,
    minutes: f64,
    /// So many steps that nobody times ran beside each other.
    at_once: usize,
    steps: Vec<StepReport>,
}

/// What one step came to.
#[derive(Serialize)]
struct StepReport {
    part: Part,
    member: &'static str,
    outcome: Outcome,
    /// The end of what it complained of, whatever it came to.
    complaints: String,
    seconds: f64,
    found: Value,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> anyhow::Result<()> {
    if !(arguments.minutes > 0.0 && arguments.minutes <= 1e4) {
        bail!("--minutes: must be above 0 and at most 10000, is {}", arguments.minutes);
    }
    match (&arguments.member, &arguments.part[..], arguments.until) {
        (Some(name), [part], Some(until)) => run_step(&arguments, *part, name, Deadline::at_unix_s(until)),
        (Some(_), ..) => bail!("--member: expected one --part and --until with it"),
        (None, ..) => run_all(&arguments),
    }
}

/// One step, in a process of its own.
fn run_step(arguments: &Arguments, part: Part, name: &str, deadline: Deadline) -> anyhow::Result<()> {
    let member = member(name)?;
    let request = Request {
        device: arguments.device,
        out: arguments.out.clone(),
        deadline,
        python: arguments.python.clone(),
        package: arguments.package.clone(),
        policies: arguments.policy.clone(),
    };
    part.run(&request, &member, &mut Findings::at(findings_path(&arguments.out, part, name)))
}

fn findings_path(out: &Path, part: Part, member: &str) -> PathBuf {
    out.join(format!("{}-{member}.json", part.name()))
}

fn run_all(arguments: &Arguments) -> anyhow::Result<()> {
    // Before anything is written: a machine without the device gets one clear line.
    arguments.device.check()?;
    for path in &arguments.policy {
        PolicyFile::load(path).context("--policy")?;
    }
    std::fs::create_dir_all(&arguments.out).with_context(|| format!("--out {}", arguments.out.display()))?;
    let whole = Duration::from_secs_f64(60.0 * arguments.minutes);
    let end = Deadline::after(whole);
    let processor_cores = std::thread::available_parallelism().map_or(1, usize::from);
    let memory_bytes = arguments.device.cuda_device().map_or(0, |device| device.total_memory_bytes);
    let at_once = arguments.at_once.map_or_else(|| at_once(memory_bytes, processor_cores), NonZeroUsize::get);
    let path = arguments.out.join("gpu-check.json");
    let report = Mutex::new(Report {
        command: command_line(),
        version: env!("CARGO_PKG_VERSION"),
        device: arguments.device.to_string(),
        cuda_devices: cuda_devices().unwrap_or_default(),
        processor_cores,
        minutes: arguments.minutes,
        at_once,
        steps: Vec::new(),
    });
    let run = |step: Step| -> anyhow::Result<()> {
        let time = end.left().min(whole.mul_f64(step.share_max));
        let done = if time.is_zero() { skipped(step) } else { watched(arguments, step, time)? };
        eprintln!("{} on {}: {} ({:.0} s)", done.part.name(), done.member, done.outcome, done.seconds);
        let mut report = report.lock().unwrap_or_else(PoisonError::into_inner);
        report.steps.push(done);
        write_json(&path, &*report)
    };
    let steps = schedule(arguments.device, &arguments.part);
    let (alone, mut beside): (Vec<Step>, Vec<Step>) =
        steps.into_iter().partition(|step| at_once == 1 || step.part.is_timed());
    beside.iter_mut().for_each(|step| step.share_max = step.share_max.max(BESIDE_SHARE_MIN));
    let pool = rayon::ThreadPoolBuilder::new().num_threads(at_once).build()?;
    pool.install(|| beside.into_iter().par_bridge().try_for_each(run))?;
    alone.into_iter().try_for_each(run)?;
    let report = report.into_inner().unwrap_or_else(PoisonError::into_inner);
    println!("{}", path.display());
    let failed = report.steps.iter().filter(|step| matches!(step.outcome, Outcome::Failed(_))).count();
    if failed > 0 {
        bail!("{failed} of {} steps failed; {} says why", report.steps.len(), path.display());
    }
    Ok(())
}

fn skipped(Step { part, member, .. }: Step) -> StepReport {
    StepReport {
        part,
        member,
        outcome: Outcome::Failed("no time was left".to_owned()),
        complaints: String::new(),
        seconds: 0.0,
        found: Value::Null,
    }
}

/// Runs a step in a process of its own, and ends it when its time is over.
fn watched(arguments: &Arguments, step: Step, time: Duration) -> anyhow::Result<StepReport> {
    let Step { part, member, .. } = step;
    let found_at = findings_path(&arguments.out, part, member);
    // What an earlier check left.
    let _ = std::fs::remove_file(&found_at);
    let mut command = Command::new(std::env::current_exe().context("this program's own path")?);
    command.args(["gpu-check", "--device", &arguments.device.to_string(), "--python", &arguments.python]);
    if let Some(package) = &arguments.package {
        command.arg("--package").arg(package);
    }
    command.args(["--part", &part.name(), "--member", member]);
    command.args(["--until", &Deadline::after(time).unix_s().to_string()]).arg("--out").arg(&arguments.out);
    for policy in &arguments.policy {
        command.arg("--policy").arg(policy);
    }
    command.env("RUST_BACKTRACE", "1").stdin(Stdio::null()).stdout(Stdio::null());
    let complaints_at = found_at.with_extension("stderr.txt");
    command.stderr(std::fs::File::create(&complaints_at).with_context(|| complaints_at.display().to_string())?);
    let started = Instant::now();
    let mut child = command.spawn().context("starting a step")?;
    let ended = wait(&mut child, time + GRACE)?;
    let seconds = started.elapsed().as_secs_f64();
    let mut complaints = end_of(&std::fs::read(&complaints_at).unwrap_or_default());
    let _ = std::fs::remove_file(&complaints_at);
    let found = Findings::read(&found_at);
    let _ = std::fs::remove_file(&found_at);
    let outcome = match ended {
        None => Outcome::of_broken(&found, "ended by force, its time was over".to_owned()),
        Some(status) if status.success() => Outcome::of(&found),
        Some(status) => {
            let ours = telling_line(&complaints, |line| line.starts_with("plimsoll: "));
            let how = format!("{status}: {}", ours.unwrap_or("it said nothing"));
            complaints.push_str(&status.to_string());
            Outcome::of_broken(&found, how)
        }
    };
    Ok(StepReport { part, member, outcome, complaints, seconds, found })
}

/// The last [`COMPLAINTS_BYTES_MAX`] of a text.
fn end_of(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(COMPLAINTS_BYTES_MAX)..]).into_owned()
}

fn wait(child: &mut Child, time: Duration) -> anyhow::Result<Option<ExitStatus>> {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if started.elapsed() > time {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(PAUSE);
    }
}
