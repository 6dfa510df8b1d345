//! The `plimsoll` command as its user has it: shipped configurations cut down to tiny work, and what a call came to.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A folder in which the command is called.
pub struct Bench {
    binary: PathBuf,
    folder: PathBuf,
    environment: Vec<(&'static str, OsString)>,
}

/// What a call came to.
#[derive(Debug)]
pub struct Call {
    /// Whether it exited with 0.
    pub succeeded: bool,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Bench {
    /// An empty folder at `folder` with `gpt.toml` and `resnet.toml`, and the profiles of machines that they name.
    pub fn new(binary: &str, folder: impl Into<PathBuf>) -> Self {
        let folder = folder.into();
        // What an earlier run of the tests left.
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        let bench = Bench { binary: binary.into(), folder, environment: Vec::new() };
        for family in ["gpt", "resnet"] {
            bench.write(&format!("{family}.toml"), tiny_configuration(family));
        }
        std::fs::create_dir(bench.path("hardware")).unwrap();
        bench.write("hardware/titan-v.toml", std::fs::read(configs().join("hardware/titan-v.toml")).unwrap());
        bench
    }

    /// Sets a variable of the command's environment.
    pub fn set(&mut self, variable: &'static str, value: impl Into<OsString>) {
        self.environment.push((variable, value.into()));
    }

    /// A path in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Writes a file.
    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        std::fs::write(self.path(name), bytes).unwrap();
    }

    /// Reads a JSON file.
    pub fn json(&self, name: &str) -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(self.path(name)).unwrap()).unwrap()
    }

    /// The command with arguments that are parted by spaces, ready to be started in the folder.
    pub fn command(&self, line: &str) -> Command {
        let mut command = Command::new(&self.binary);
        command.args(line.split_whitespace()).current_dir(&self.folder).stdin(Stdio::null());
        // Tests run beside each other.
        command.env("GOMP_SPINCOUNT", "0").envs(self.environment.iter().cloned());
        command
    }

    /// Calls the command and waits for it.
    pub fn call(&self, line: &str) -> Call {
        let output = self.command(line).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).expect("the command speaks UTF-8");
        let call =
            Call { succeeded: output.status.success(), stdout: text(output.stdout), stderr: text(output.stderr) };
        assert!(output.status.code().is_some(), "plimsoll {line}: killed, {call:?}");
        assert!(!call.stderr.contains("panicked"), "plimsoll {line}: {}", call.stderr);
        call
    }

    /// Calls the command, which must succeed.
    pub fn succeed(&self, line: &str) -> Call {
        let call = self.call(line);
        assert!(call.succeeded, "plimsoll {line}: {}", call.stderr);
        call
    }

    /// Calls the command, which must fail with one line on standard error. Returns it.
    pub fn refuse(&self, line: &str) -> String {
        let call = self.call(line);
        assert!(!call.succeeded, "plimsoll {line} succeeded: {}", call.stdout);
        let lines: Vec<&str> = call.stderr.lines().collect();
        assert!(lines.len() == 1 && lines[0].starts_with("plimsoll: "), "plimsoll {line}: {}", call.stderr);
        lines[0].to_owned()
    }

    /// Names of all files in the folder and below.
    pub fn files(&self) -> Vec<String> {
        let mut found = Vec::new();
        list(&self.folder, &self.folder, &mut found);
        found
    }
}

fn list(root: &Path, folder: &Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            list(root, &path, found);
        } else {
            found.push(path.strip_prefix(root).unwrap().to_string_lossy().into_owned());
        }
    }
}

/// The folder of the shipped configurations.
fn configs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs")
}

/// The shipped configuration of a family, with the work of its agent and its evaluation cut down to its tiny member.
fn tiny_configuration(family: &str) -> String {
    let path = configs().join(format!("{family}.toml"));
    let (mut table, mut text) = (String::new(), String::new());
    for line in std::fs::read_to_string(path).unwrap().lines() {
        if line.starts_with('[') {
            table = line.to_owned();
        }
        let key = line.split(" = ").next().unwrap_or_default();
        let tiny = match (table.as_str(), key) {
            ("[randomisation]" | "[evaluation]", "workloads") => format!("workloads = [\"{family}-tiny\"]"),
            ("[randomisation]", "members" | "validation_members") => format!("{key} = 0"),
            ("[ppo]", _) => continue,
            ("[evaluation]", "budgets") => "budgets = [\"80%\", \"65%\"]".to_owned(),
            ("[evaluation]", "iterations") => "iterations = 1".to_owned(),
            _ => line.to_owned(),
        };
        text.push_str(&tiny);
        text.push('\n');
    }
    text + "\n[ppo]\ninstances_per_update = 2\nepisodes_per_instance = 2\n"
}

/// A [`Bench`] for the command that the calling test was built beside, in a folder of that name.
#[macro_export]
macro_rules! bench {
    ($name:expr) => {
        $crate::command::Bench::new(
            env!("CARGO_BIN_EXE_plimsoll"),
            std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join($name),
        )
    };
}
