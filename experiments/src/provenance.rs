//! Where a result comes from: the command that made it, the commit of its tree, the time.

use std::path::Path;
use std::time::{Duration, SystemTime};

use plimsoll_env::config::FamilyConfig;
use plimsoll_runtime::policy_file::Provenance;
use serde::{Deserialize, Serialize};

use crate::outputs::{read_json, write_json};

/// The calls of the command that have made something, or are about to.
#[derive(Default, Serialize, Deserialize)]
pub struct Calls {
    commands: Vec<String>,
    seconds: f64,
}

impl Calls {
    /// This one, after those that are told of at `path`, if something is.
    pub fn and_this(path: &Path) -> anyhow::Result<Self> {
        let mut calls = if path.exists() { read_json(path)? } else { Calls::default() };
        calls.commands.push(command_line());
        Ok(calls)
    }

    /// This one alone.
    pub fn this() -> Self {
        Calls { commands: vec![command_line()], seconds: 0.0 }
    }

    /// So much more time has gone into it.
    pub fn took(&mut self, time: Duration) {
        self.seconds += time.as_secs_f64();
    }

    /// Tells of them at `path`.
    pub fn save(&self, path: &Path) -> anyhow::Result<()> {
        write_json(path, self)
    }
}

/// The provenance of a policy that learned on what these devices recorded by those calls, with figures by name that say how good it is.
pub fn provenance_of<const FIGURES: usize>(
    config: &FamilyConfig,
    recorded_on: Vec<String>,
    seed: u64,
    calls: &Calls,
    quality: [(&str, f64); FIGURES],
) -> Provenance {
    Provenance {
        command: calls.commands.join("; "),
        configuration: config.text.clone(),
        recorded_on,
        seed,
        commit: commit(),
        date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
        training_seconds: calls.seconds,
        quality: quality.map(|(name, value)| (name.to_owned(), value)).into(),
    }
}

/// The command line, as it was given.
pub fn command_line() -> String {
    let mut words = std::env::args();
    words.next();
    std::iter::once("plimsoll".to_owned()).chain(words).collect::<Vec<_>>().join(" ")
}

/// The commit of the tree that the command was built in, as it is now, where that is there; `-dirty` where there is more in it.
pub fn commit() -> String {
    let mut git = std::process::Command::new("git");
    git.args([
        "--no-optional-locks",
        "-C",
        env!("CARGO_MANIFEST_DIR"),
        "describe",
        "--always",
        "--exclude=*",
        "--abbrev=12",
        "--dirty",
    ]);
    match git.output() {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        _ => "unknown".to_owned(),
    }
}
