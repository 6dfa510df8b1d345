//! What is wrong with a configuration, in one line.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use super::keys::{key_at, line_at, line_of};

/// A configuration that cannot be used: `configs/gpt.toml:12: workloads.gpt-small.layres: unknown key, …`.
#[derive(Debug, thiserror::Error)]
pub struct ConfigError {
    path: PathBuf,
    /// From one.
    line: Option<usize>,
    key: Option<String>,
    problem: Problem,
}

/// What is wrong.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// The file cannot be read.
    #[error("{0}")]
    Unreadable(io::Error),
    /// Not TOML, or a value of the wrong type or unit.
    #[error("{0}")]
    Malformed(String),
    /// A key that nothing reads.
    #[error("unknown key `{name}`{}", did_you_mean(.nearest))]
    UnknownKey {
        /// The key.
        name: String,
        /// The valid key that is spelled most like it.
        nearest: Option<String>,
    },
    /// A workload that the file does not define.
    #[error("no workload `{name}`{}", did_you_mean(.nearest))]
    UnknownWorkload {
        /// The name.
        name: String,
        /// The workload that is spelled most like it.
        nearest: Option<String>,
    },
    /// A value that makes no sense.
    #[error("{rule}")]
    Implausible {
        /// What the value must be.
        rule: String,
    },
}

impl ConfigError {
    /// What is wrong.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    pub(crate) fn unreadable(path: &Path, error: io::Error) -> Self {
        Self::in_file(path, Problem::Unreadable(error))
    }

    pub(super) fn in_file(path: &Path, problem: Problem) -> Self {
        ConfigError { path: path.to_owned(), line: None, key: None, problem }
    }

    pub(crate) fn at_key(path: &Path, text: &str, key: String, problem: Problem) -> Self {
        ConfigError { path: path.to_owned(), line: line_of(text, &key), key: Some(key), problem }
    }

    pub(crate) fn malformed(path: &Path, text: &str, error: toml::de::Error) -> Self {
        let line = error.span().map(|span| line_at(text, span.start));
        let key = line.and_then(|line| key_at(text, line));
        let problem = Problem::of_message(error.message());
        ConfigError { path: path.to_owned(), line, key, problem }
    }
}

impl Problem {
    /// What a parser's message says.
    pub(super) fn of_message(message: &str) -> Self {
        unknown_key(message).unwrap_or_else(|| Problem::Malformed(one_line(message)))
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        if let Some(key) = &self.key {
            write!(f, ": {key}")?;
        }
        write!(f, ": {}", self.problem)
    }
}

/// Reads serde's own words: "unknown field `x`, expected one of `a`, `b`".
fn unknown_key(message: &str) -> Option<Problem> {
    let mut names = message.strip_prefix("unknown field ")?.split('`').skip(1).step_by(2);
    let name = names.next()?.to_owned();
    let nearest = nearest(&name, names);
    Some(Problem::UnknownKey { name, nearest })
}

fn one_line(message: &str) -> String {
    message.replace("missing field", "missing key").lines().collect::<Vec<_>>().join("; ")
}

/// The one of `known` that is spelled most like `name`.
pub(super) fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let likeness = |other: &&str| strsim::jaro_winkler(name, other);
    known.into_iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b))).map(str::to_owned)
}

fn did_you_mean(nearest: &Option<String>) -> String {
    nearest.as_ref().map(|nearest| format!(", did you mean `{nearest}`?")).unwrap_or_default()
}
