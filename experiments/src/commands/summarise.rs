//! `plimsoll summarise`.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use serde::Deserialize;

use crate::held_out::{Digest, Digested, PointReport, called};

/// Flags of `plimsoll summarise`.
#[derive(Args, Clone, Debug)]
pub struct Arguments {
    /// What `evaluate --held-out --json` wrote; reports are called by the names of their files
    #[arg(required = true, value_name = "FILE")]
    reports: Vec<PathBuf>,
}

/// What is read of a report.
#[derive(Deserialize)]
struct Report {
    policies: Vec<PolicyLine>,
    points: Vec<PointReport>,
}

#[derive(Deserialize)]
struct PolicyLine {
    name: String,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> anyhow::Result<()> {
    let digested = arguments.reports.iter().map(|path| read(path)).collect::<anyhow::Result<Vec<_>>>()?;
    print!("{}", Digest(&digested));
    Ok(())
}

fn read(path: &Path) -> anyhow::Result<Digested> {
    let named = || path.display().to_string();
    let bytes = std::fs::read(path).with_context(named)?;
    let report: Report = serde_json::from_slice(&bytes)
        .with_context(|| format!("{}: no report of `evaluate --held-out --json`", path.display()))?;
    let policies = report.policies.iter().enumerate().map(|(index, policy)| called(&policy.name, index)).collect();
    let name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_else(named);
    Ok(Digested { name, policies, points: report.points })
}
