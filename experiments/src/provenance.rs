//! Where a result comes from: the command that made it, the commit of its tree, the time.

use std::time::{Instant, SystemTime};

use plimsoll_env::config::FamilyConfig;
use plimsoll_runtime::policy_file::Provenance;

/// The provenance of a policy that learned on what these devices recorded and whose training began when `started`, with
/// figures by name that say how good it is.
pub fn provenance_of<const FIGURES: usize>(
    config: &FamilyConfig,
    recorded_on: Vec<String>,
    seed: u64,
    started: Instant,
    quality: [(&str, f64); FIGURES],
) -> Provenance {
    Provenance {
        command: command_line(),
        configuration: config.text.clone(),
        recorded_on,
        seed,
        commit: commit(),
        date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
        training_seconds: started.elapsed().as_secs_f64(),
        quality: quality.map(|(name, value)| (name.to_owned(), value)).into(),
    }
}

/// The command line, as it was given.
pub fn command_line() -> String {
    let mut words = std::env::args();
    words.next();
    std::iter::once("plimsoll".to_owned()).chain(words).collect::<Vec<_>>().join(" ")
}

/// The commit of the tree that the command runs in, where there is one.
pub fn commit() -> String {
    let output = std::process::Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).output();
    match output {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        _ => "unknown".to_owned(),
    }
}
