//! Lines, and the instructions on them.

use std::io::{BufRead, Read};

use serde::Deserialize;

/// No line of a log is longer.
const LINE_BYTES_MAX: u64 = 1 << 20;
/// No log has more calls, arguments, results, names and references, taken together.
pub(super) const ENTRIES_MAX: usize = 1 << 26;
/// The storages of no log are larger, taken together: an exbibyte.
pub(super) const BYTES_MAX: i128 = 1 << 60;
/// The operators of no log take longer, taken together: 13 days.
pub(super) const NS_MAX: i128 = 1 << 50;

/// What is wrong with a line, in particular.
#[derive(Debug, thiserror::Error)]
pub(super) enum Reason {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("not an instruction of simrd: {0}")]
    Json(#[from] serde_json::Error),
    #[error("a line of more than {LINE_BYTES_MAX} bytes")]
    LineTooLong,
    #[error("more than {ENTRIES_MAX} calls, arguments, results, names and references")]
    TooMany,
    #[error("expected {expected}, found the end of the log")]
    Ended { expected: &'static str },
    #[error("expected {expected}, found {found}")]
    Order { expected: String, found: &'static str },
    #[error("no tensor is called `{0}`")]
    Unknown(String),
    #[error("a tensor is called `{0}` already")]
    Twice(String),
    #[error("{what} is {found}, expected {expected}")]
    Range { what: &'static str, expected: String, found: i128 },
    #[error("expected a whole number, found `{0}`")]
    Number(String),
    #[error("`{0}` is used after its last reference was released")]
    Dead(String),
}

/// A number, which logs write as text.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Number {
    Text(String),
    Plain(i64),
}

impl Number {
    pub(super) fn read(self, what: &'static str, least: i128, most: i128) -> Result<i128, Reason> {
        let found = match self {
            Number::Plain(number) => i128::from(number),
            Number::Text(text) => text.parse().map_err(|_| Reason::Number(text))?,
        };
        if (least..=most).contains(&found) {
            Ok(found)
        } else {
            Err(Reason::Range { what, expected: format!("{least} to {most}"), found })
        }
    }
}

#[derive(Deserialize)]
#[serde(tag = "INSTRUCTION", rename_all = "SCREAMING_SNAKE_CASE", rename_all_fields = "SCREAMING_SNAKE_CASE")]
pub(super) enum Instruction {
    Annotate { annotation: String },
    Constant { name: String },
    Memory { name: String, memory: Number },
    Alias { name: String, alias: Number },
    Call { name: String, args: Vec<String>, result: Vec<String>, time: Number },
    Mutate { name: String, args: Vec<String>, mutate: Vec<usize>, time: Number },
    Copy { dst: String, src: String },
    CopyFrom { dst: String, src: String },
    Release { name: String },
}

impl Instruction {
    pub(super) fn word(&self) -> &'static str {
        match self {
            Instruction::Annotate { .. } => "ANNOTATE",
            Instruction::Constant { .. } => "CONSTANT",
            Instruction::Memory { .. } => "MEMORY",
            Instruction::Alias { .. } => "ALIAS",
            Instruction::Call { .. } => "CALL",
            Instruction::Mutate { .. } => "MUTATE",
            Instruction::Copy { .. } => "COPY",
            Instruction::CopyFrom { .. } => "COPY_FROM",
            Instruction::Release { .. } => "RELEASE",
        }
    }
}

/// The lines of a log, counted.
pub(super) struct Lines<R> {
    source: R,
    /// The last line that was read, counted from 1.
    pub(super) line: u64,
    text: Vec<u8>,
}

impl<R: BufRead> Lines<R> {
    pub(super) fn new(source: R) -> Self {
        Lines { source, line: 0, text: Vec::new() }
    }

    /// The next instruction, or none at the end.
    pub(super) fn next(&mut self) -> Result<Option<Instruction>, Reason> {
        loop {
            self.text.clear();
            let read = self.source.by_ref().take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut self.text)?;
            if read == 0 {
                return Ok(None);
            }
            self.line += 1;
            if read as u64 > LINE_BYTES_MAX {
                return Err(Reason::LineTooLong);
            }
            if !self.text.trim_ascii().is_empty() {
                return Ok(Some(serde_json::from_slice(&self.text)?));
            }
        }
    }

    /// The instruction that has to follow.
    pub(super) fn follow(&mut self, expected: &'static str) -> Result<Instruction, Reason> {
        self.next()?.ok_or(Reason::Ended { expected })
    }

    /// The bytes of `tensor`, which have to follow.
    pub(super) fn memory(&mut self, tensor: &str) -> Result<u64, Reason> {
        match self.follow("MEMORY")? {
            Instruction::Memory { name, memory } if name == tensor => Ok(memory.read("MEMORY", 0, BYTES_MAX)? as u64),
            found => Err(out_of_order("MEMORY", tensor, &found)),
        }
    }

    /// Which argument `tensor` is an alias of, which has to follow.
    pub(super) fn alias(&mut self, tensor: &str, arguments: usize) -> Result<Option<usize>, Reason> {
        match self.follow("ALIAS")? {
            Instruction::Alias { name, alias } if name == tensor => {
                Ok(usize::try_from(alias.read("ALIAS", -1, arguments as i128 - 1)?).ok())
            }
            found => Err(out_of_order("ALIAS", tensor, &found)),
        }
    }
}

fn out_of_order(expected: &str, tensor: &str, found: &Instruction) -> Reason {
    Reason::Order { expected: format!("{expected} of `{tensor}`"), found: found.word() }
}
