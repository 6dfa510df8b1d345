//! The same models in plain PyTorch: as they are, with `torch.utils.checkpoint` around every block, and with saved tensors
//! offloaded by PyTorch itself.

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context;
use plimsoll_env::workload::WorkloadConfig;
use serde_json::{Value, json};

use super::members::{member, names};
use super::{Findings, Member, Request};

/// Written for PyTorch 2.11 and torchvision 0.26; prints one line of JSON for each model and way.
const SCRIPT: &str = include_str!("plain_pytorch.py");
/// How often the script is looked after.
const PAUSE: Duration = Duration::from_millis(200);

/// Runs the part.
pub fn run(request: &Request, findings: &mut Findings) -> anyhow::Result<()> {
    let models = names(request.device).iter().map(|name| Ok(described(&member(name)?)));
    let models = models.collect::<anyhow::Result<Vec<Value>>>()?;
    let asked = json!({ "device": request.device.to_string(), "models": models }).to_string();
    let (script, found) = (request.out.join("plain_pytorch.py"), request.out.join("plain_pytorch.jsonl"));
    std::fs::write(&script, SCRIPT).with_context(|| script.display().to_string())?;
    let out = std::fs::File::create(&found).with_context(|| found.display().to_string())?;
    let mut command = Command::new(&request.python);
    command.arg(&script).arg(asked).stdin(Stdio::null()).stdout(out).stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return findings.not_run(format!("{}: {error}", request.python)),
    };
    let mut stderr = child.stderr.take().context("it is piped")?;
    // Read all the while: a full pipe would stop the script.
    let complaints = std::thread::spawn(move || std::io::read_to_string(&mut stderr).unwrap_or_default());
    let mut told = 0;
    let mut tell = |findings: &mut Findings| -> anyhow::Result<()> {
        let lines = std::fs::read_to_string(&found)?;
        for line in lines.lines().skip(told).map_while(|line| serde_json::from_str::<Value>(line).ok()) {
            findings.push("ways", line)?;
            told += 1;
        }
        Ok(())
    };
    let status = loop {
        let ended = child.try_wait()?;
        // To give page-locked memory back takes a killed script longer than there may be left.
        tell(findings)?;
        if ended.is_some() {
            break ended;
        }
        if request.deadline.is_over() {
            child.kill()?;
            child.wait()?;
            break None;
        }
        std::thread::sleep(PAUSE);
    };
    let (_, _) = (std::fs::remove_file(&script), std::fs::remove_file(&found));
    let complaints = complaints.join().unwrap_or_default();
    match status {
        None => findings.set("cut_short", true),
        Some(status) if status.success() => Ok(()),
        Some(_) => findings.not_run(complaints.lines().last().unwrap_or("python3 failed")),
    }
}

/// A model as the script reads it: what its configuration says, and its name.
fn described(member: &Member) -> Value {
    let Member { name, config, manner, .. } = member;
    let (family, config) = match config {
        WorkloadConfig::Gpt(config) => ("gpt", json!(config)),
        WorkloadConfig::Resnet(config) => ("resnet", json!(config)),
        _ => ("", Value::Null),
    };
    json!({ "name": name, "family": family, "config": config, "bf16": manner.bf16 })
}
