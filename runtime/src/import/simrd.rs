//! Logs of simrd, the simulator of *Dynamic Tensor Rematerialization* (Kirisame et al., ICLR 2021): one JSON object per
//! line, in the order in which a PyTorch program called operators, copied references and let go of them.
//!
//! All before the annotation `START` is set-up and is skipped. What a log means is what simrd takes it to mean, so that
//! figures can be compared:
//!
//! - a constant needs no operator, and online nothing ever evicts it; in a trace, one that comes after the first operator
//!   is made by an operator of its own, at no cost, that cannot be rerun;
//! - a mutation makes another tensor of the same bytes, and the program lets go of the old one;
//! - a result with an alias lives in the storage of that argument and adds no bytes;
//! - a storage is freed when the last reference to any of its tensors is released;
//! - what has references left at the end has to be there at the end.
//!
//! The one departure: an operator counts as backward from the annotation `BACKWARD` on, and not from the first operator
//! with `backward` in its name. A log is read line by line; nothing here knows of files or of compression.

mod draft;
mod lines;
mod reader;

use std::io::BufRead;

use self::draft::Draft;
use self::lines::Reason;
use self::reader::Reader;
use crate::baselines::online::Program;
use crate::lineage::Lineage;
use crate::trace::{Phase, Trace};

/// A log that cannot be read, and where.
#[derive(Debug, thiserror::Error)]
pub enum SimrdError {
    /// A line makes no sense where it stands.
    #[error("line {line}: {reason}")]
    Line {
        /// The line, counted from 1.
        line: u64,
        /// What is wrong with it.
        reason: LineError,
    },
    /// Every line makes sense, but no trace comes of them.
    #[error("the log makes no lawful trace: {0}")]
    Unlawful(String),
}

/// What is wrong with a line.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct LineError(#[from] Reason);

/// What a call is beside its place in the program.
#[derive(Clone, Copy, Debug)]
struct Called {
    name: u32,
    phase: Phase,
}

/// A log that was read.
#[derive(Clone, Debug)]
pub struct Log {
    program: Program,
    /// Per call of the program; none for a constant.
    called: Vec<Option<Called>>,
    names: Vec<String>,
}

impl Log {
    /// Reads a log to its end.
    pub fn read(source: impl BufRead) -> Result<Log, SimrdError> {
        let mut reader = Reader::new(source);
        reader.read().map_err(|reason| SimrdError::Line { line: reader.lines.line, reason: reason.into() })
    }

    /// The program, with a tensor for every view: what simrd itself runs.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// The log as a trace. Views have no storage of their own: their operators only read.
    ///
    /// A log says nothing of the program's own time between operators, of workspaces, or of an optimizer step.
    pub fn trace(&self, workload: &str, family: &str) -> Result<Trace, SimrdError> {
        let mut draft = Draft::new(self);
        for &step in &self.program.steps {
            draft.step(step);
        }
        if draft.operators.is_empty() {
            return Err(SimrdError::Unlawful("it has no operator after START".to_owned()));
        }
        let mut trace = draft.finish(workload, family);
        trace.check().map_err(SimrdError::Unlawful)?;
        trace.peak_bytes = Lineage::of(&trace).keep_all_peak_bytes();
        Ok(trace)
    }
}
