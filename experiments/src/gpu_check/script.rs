//! Programs in Python that a part runs, with PyTorch as its users run it. Each prints a line of JSON for whatever it finds.

use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::Context;
use plimsoll_env::workload::WorkloadConfig;
use serde_json::{Value, json};

use super::{Deadline, Member, Request, telling_line};

/// The programs and what they import, written for PyTorch 2.11.
const FILES: [(&str, &str); 17] = [
    ("models.py", include_str!("models.py")),
    (PLAIN_PYTORCH, include_str!("plain_pytorch.py")),
    (BUDGETED_JOB, include_str!("budgeted_job.py")),
    ("job.py", include_str!("../../../tests/jobs/job.py")),
    ("python_job.py", include_str!("../../../tests/jobs/python_job.py")),
    ("bystanders.py", include_str!("../../../tests/jobs/bystanders.py")),
    ("captured.py", include_str!("../../../tests/jobs/captured.py")),
    ("cast.py", include_str!("../../../tests/jobs/cast.py")),
    ("drawing.py", include_str!("../../../tests/jobs/drawing.py")),
    ("joined.py", include_str!("../../../tests/jobs/joined.py")),
    ("lent.py", include_str!("../../../tests/jobs/lent.py")),
    ("deep_copies.py", include_str!("../../../tests/jobs/deep_copies.py")),
    ("gathers.py", include_str!("../../../tests/jobs/gathers.py")),
    ("list_operators.py", include_str!("../../../tests/jobs/list_operators.py")),
    ("one_kernel.py", include_str!("../../../tests/jobs/one_kernel.py")),
    ("side_streams.py", include_str!("../../../tests/jobs/side_streams.py")),
    ("signalled.py", include_str!("../../../tests/jobs/signalled.py")),
];
/// PyTorch's own means.
pub const PLAIN_PYTORCH: &str = "plain_pytorch.py";
/// A job within a budget.
pub const BUDGETED_JOB: &str = "budgeted_job.py";
/// How often a program is looked after.
const PAUSE: Duration = Duration::from_millis(200);

/// How a program ended.
pub enum Ended {
    /// It could not be started.
    NotStarted(String),
    /// By force: its time was over.
    OutOfTime,
    /// By itself, and the line of its complaints that says why.
    ByItself(ExitStatus, String),
}

/// Runs a program that is asked in JSON until a deadline, and tells each line it prints, as soon as it does.
pub fn run(
    request: &Request,
    program: &str,
    asked: &Value,
    until: Deadline,
    tell: impl FnMut(Value) -> anyhow::Result<()>,
) -> anyhow::Result<Ended> {
    run_with(request, program, &[asked.to_string()], &[], until, tell)
}

/// The same with those arguments, and more in its environment.
fn run_with(
    request: &Request,
    program: &str,
    arguments: &[String],
    environment: &[(&str, &str)],
    until: Deadline,
    mut tell: impl FnMut(Value) -> anyhow::Result<()>,
) -> anyhow::Result<Ended> {
    let folder = tempfile::tempdir_in(&request.out).context("a folder for programs in Python")?;
    for (name, text) in FILES {
        std::fs::write(folder.path().join(name), text).context(name)?;
    }
    // Files: a pipe would stop the program when full, and be open for as long as whatever it started.
    let [printed_at, complained_at] = ["printed.jsonl", "complaints"].map(|name| folder.path().join(name));
    let create = |path: &Path| std::fs::File::create(path).with_context(|| path.display().to_string());
    let (printed, complained) = (create(&printed_at)?, create(&complained_at)?);
    let mut command = Command::new(&request.python);
    command.arg(folder.path().join(program)).args(arguments).envs(environment.iter().copied());
    if let Some(package) = &request.package {
        let others = std::env::var_os("PYTHONPATH").unwrap_or_default();
        let others = std::env::split_paths(&others).filter(|path| !path.as_os_str().is_empty());
        command.env("PYTHONPATH", std::env::join_paths([package.clone()].into_iter().chain(others))?);
    }
    command.stdin(Stdio::null()).stdout(printed).stderr(complained);
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return Ok(Ended::NotStarted(format!("{}: {error}", request.python))),
    };
    let mut told = 0;
    let status = loop {
        let ended = child.try_wait()?;
        // To give page-locked memory back takes a killed program longer than there may be left.
        let lines = std::fs::read_to_string(&printed_at)?;
        // The last one may not be whole yet; and what a library prints is none of ours.
        for line in lines.split_inclusive('\n').skip(told).take_while(|line| line.ends_with('\n')) {
            serde_json::from_str(line).map_or(Ok(()), &mut tell)?;
            told += 1;
        }
        if let Some(status) = ended {
            break status;
        }
        if until.is_over() {
            child.kill()?;
            child.wait()?;
            return Ok(Ended::OutOfTime);
        }
        std::thread::sleep(PAUSE);
    };
    let complaints = String::from_utf8_lossy(&std::fs::read(&complained_at)?).into_owned();
    // Libraries may have more to say when the error has been told.
    let said = telling_line(&complaints, tells_error);
    Ok(Ended::ByItself(status, said.unwrap_or_default().to_owned()))
}

/// Whether that is where Python says what was raised.
fn tells_error(line: &str) -> bool {
    line.split_once(':').is_some_and(|(raised, _)| raised.ends_with("Error") && !raised.contains(' '))
}

/// Why a program came to nothing.
pub enum Nothing {
    /// Its time was over.
    CutShort,
    /// What it says.
    Failed(String),
}

/// Runs a program with those arguments, and more in its environment, `until` then at most. The last line it prints, or why there is
/// none.
pub fn run_to_its_end(
    request: &Request,
    program: &str,
    arguments: &[String],
    environment: &[(&str, &str)],
    until: Deadline,
) -> anyhow::Result<Result<Value, Nothing>> {
    let mut printed = None;
    let ended = run_with(request, program, arguments, environment, until, |line| {
        printed = Some(line);
        Ok(())
    })?;
    Ok(match (ended, printed) {
        (Ended::ByItself(status, complaint), _) if !status.success() => {
            Err(Nothing::Failed(format!("{status}: {complaint}")))
        }
        // To give page-locked memory back may take longer than there is left.
        (_, Some(printed)) => Ok(printed),
        (Ended::OutOfTime, None) => Err(Nothing::CutShort),
        (Ended::NotStarted(why), None) => Err(Nothing::Failed(why)),
        (Ended::ByItself(..), None) => Err(Nothing::Failed("it printed nothing".to_owned())),
    })
}

/// The loop as the programs read it: what its configuration says, and where it runs.
pub fn described(member: &Member, request: &Request) -> anyhow::Result<Value> {
    let (family, config) = match &member.config {
        WorkloadConfig::Gpt(config) => ("gpt", serde_json::to_value(config)?),
        WorkloadConfig::Resnet(config) => ("resnet", serde_json::to_value(config)?),
        _ => ("", Value::Null),
    };
    let device = request.device.to_string();
    Ok(json!({ "device": device, "family": family, "config": config, "bf16": member.manner.bf16 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_python_raised_is_told_apart_from_what_libraries_say() {
        let said = "Traceback (most recent call last):\ntorch.OutOfMemoryError: 8 bytes\n[W ProcessGroupNCCL] Error: not destroyed\n";
        assert_eq!(telling_line(said, tells_error), Some("torch.OutOfMemoryError: 8 bytes"));
        assert_eq!(telling_line("Aborted\n\n", tells_error), Some("Aborted"));
    }
}
