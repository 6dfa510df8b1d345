//! A trace: one iteration of a training loop as its allocator and dispatcher saw it.
//!
//! A trace knows operators, storages and measured times. It knows nothing of layers, of budgets or of
//! what anybody decides. Everything in it is in the order of execution, so an operator's index is its time.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::file::{FileError, FileKind, read_json, write_json};

/// The newest trace format that this build reads and writes.
const TRACE_VERSION: u32 = 1;
/// How the name of a trace's file ends in a folder of traces.
pub const TRACE_EXTENSION: &str = "plimsoll";

/// A storage's index in [`Trace::storages`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct StorageId(pub u32);

impl StorageId {
    /// As an index into per-storage arrays.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// An operator's index in [`Trace::operators`]: its position in the iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct OperatorId(pub u32);

impl OperatorId {
    /// As an index into per-operator arrays.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a storage is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// A learnt weight or a model's buffer.
    Parameter,
    /// The gradient of a parameter.
    Gradient,
    /// What the optimizer keeps from one iteration to the next.
    OptimizerState,
    /// Made in the forward pass and read in the backward pass.
    Activation,
    /// Data that the loop feeds to the model.
    Input,
    /// Everything else.
    Temporary,
}

/// The part of an iteration that an operator belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Gradient recording is on.
    Forward,
    /// Run by the autograd engine.
    Backward,
    /// Neither: the optimizer, or code under a no-gradient guard.
    Update,
}

/// One allocation behind any number of tensor views: the unit of placement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Storage {
    /// Device bytes.
    pub bytes: u64,
    /// What it is for.
    pub class: Class,
    /// Why it must stay where it is, or none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub locked: Option<String>,
}

/// How an operator uses a storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AccessMode {
    /// Its bytes are read.
    Read,
    /// Its bytes are read and changed.
    Write,
    /// All its bytes are replaced; what they were does not matter.
    Overwrite,
    /// Its bytes are changed as a side effect that a rerun of the operator must not repeat
    /// (batch-norm's running statistics).
    SideEffect,
}

impl AccessMode {
    /// Whether the storage holds another version afterwards.
    pub const fn writes(self) -> bool {
        !matches!(self, AccessMode::Read)
    }
}

/// One storage among an operator's inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Access {
    /// The storage.
    pub storage: StorageId,
    /// How it is used.
    pub mode: AccessMode,
}

/// One ATen operator of the iteration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Operator {
    /// Index into [`Trace::names`].
    pub name: u32,
    /// The part of the iteration.
    pub phase: Phase,
    /// Time of the operator itself: median over the recorded iterations.
    pub cost_ns: u64,
    /// Spread of that time: median absolute deviation over the recorded iterations.
    pub spread_ns: u64,
    /// Time between the previous operator's end and this one's start: the program itself.
    pub gap_ns: u64,
    /// Bytes allocated at the worst moment inside the operator, beyond its inputs and outputs.
    pub workspace_bytes: u64,
    /// Distinct storages among its inputs, in order of first appearance.
    pub accesses: Vec<Access>,
    /// Storages that it allocated and returned.
    pub creates: Vec<StorageId>,
    /// Storages that the program let go of after this operator and before the next.
    pub frees: Vec<StorageId>,
    /// Why it cannot be rerun bit for bit, or none where it can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_replayable: Option<String>,
}

impl Operator {
    /// Whether its program may wait for what it reads, for nothing else comes of it that the trace has: as of a number, or a copy on a
    /// GPU's host.
    pub(crate) fn is_read_out(&self) -> bool {
        !self.accesses.is_empty() && self.creates.is_empty() && !self.accesses.iter().any(|access| access.mode.writes())
    }
}

/// One recorded iteration of a training loop, in its steady rhythm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trace {
    /// The workload's name.
    pub workload: String,
    /// The model family it belongs to.
    pub family: String,
    /// Where it was recorded.
    pub device: String,
    /// How many iterations the times are medians of.
    pub recorded_iterations: u32,
    /// Device bytes at the iteration's start that no operator of it ever touches.
    pub unseen_bytes: u64,
    /// Time from the last operator's end to the iteration's end.
    pub tail_ns: u64,
    /// Median measured makespan of the recorded iterations.
    pub makespan_ns: u64,
    /// Peak device bytes measured at the allocator.
    pub peak_bytes: u64,
    /// Operator names, each once.
    pub names: Vec<String>,
    /// Storages; those that exist before the iteration starts come first.
    pub storages: Vec<Storage>,
    /// How many of `storages` exist before the iteration starts.
    pub initial_storages: u32,
    /// Operators in order of execution.
    pub operators: Vec<Operator>,
    /// Which storage of the next iteration's start a storage of this iteration's end becomes
    /// (a gradient that outlives the iteration, say). A storage that is its own successor is not listed.
    pub carried: Vec<(StorageId, StorageId)>,
}

impl Trace {
    /// Reads a trace and checks that every index in it is in range.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, FileError> {
        let path = path.as_ref();
        let trace: Trace = read_json(path, FileKind::Trace, TRACE_VERSION)?;
        trace.check().map_err(|message| FileError::malformed(path, FileKind::Trace, message))?;
        Ok(trace)
    }

    /// Writes the trace, whole or not at all.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), FileError> {
        write_json(path.as_ref(), FileKind::Trace, TRACE_VERSION, self)
    }

    /// Where the trace of a workload stands in a folder of traces.
    pub fn path_in(folder: impl AsRef<Path>, workload: &str) -> PathBuf {
        folder.as_ref().join(format!("{workload}.{TRACE_EXTENSION}"))
    }

    /// Writes the trace into a folder of traces, which is there. Returns its path.
    pub fn save_in(&self, folder: impl AsRef<Path>) -> Result<PathBuf, FileError> {
        let path = Self::path_in(folder, &self.workload);
        self.save(&path)?;
        Ok(path)
    }

    /// Bytes allocated when the iteration begins.
    pub(crate) fn start_bytes(&self) -> u64 {
        self.unseen_bytes + self.initial_bytes()
    }

    /// What is unseen of an iteration that begins with so many bytes allocated.
    pub(crate) fn unseen_of(&self, start_bytes: u64) -> u64 {
        start_bytes.saturating_sub(self.initial_bytes())
    }

    fn initial_bytes(&self) -> u64 {
        self.storages[..self.initial_storages as usize].iter().map(|storage| storage.bytes).sum()
    }

    /// Scales all times until they add up to `makespan_ns`.
    pub fn scale_to(&mut self, makespan_ns: u64) {
        let factor = makespan_ns as f64 / self.times_ns().max(1) as f64;
        let scale = |time_ns: &mut u64| *time_ns = (*time_ns as f64 * factor).round() as u64;
        for operator in &mut self.operators {
            scale(&mut operator.gap_ns);
            scale(&mut operator.cost_ns);
        }
        scale(&mut self.tail_ns);
        self.makespan_ns = makespan_ns;
    }

    /// Takes from all times what finding them out took, for without that the iteration takes `makespan_ns`: the same from every
    /// operator, from the pause before it first and of its own time no more than half, and the rest in proportion.
    pub(crate) fn cut_to(&mut self, makespan_ns: u64) {
        let each_ns = self.times_ns().saturating_sub(makespan_ns) / (self.operators.len() as u64).max(1);
        for operator in &mut self.operators {
            let of_gap_ns = each_ns.min(operator.gap_ns);
            operator.gap_ns -= of_gap_ns;
            operator.cost_ns -= (each_ns - of_gap_ns).min(operator.cost_ns / 2);
        }
        self.scale_to(makespan_ns);
    }

    /// All times together.
    pub(crate) fn times_ns(&self) -> u64 {
        let of_operators = self.operators.iter().map(|operator| operator.gap_ns + operator.cost_ns);
        of_operators.sum::<u64>() + self.tail_ns
    }

    /// An operator's name, such as `aten::mm`.
    pub fn operator_name(&self, operator: OperatorId) -> &str {
        &self.names[self.operators[operator.index()].name as usize]
    }

    /// SHA-256 over what happens, not how long it takes: names, accesses, bytes, frees.
    pub fn fingerprint(&self) -> String {
        let mut hash = Sha256::new();
        let mut word = |value: u64| hash.update(value.to_le_bytes());
        word(u64::from(self.initial_storages));
        self.storages.iter().for_each(|storage| word(storage.bytes));
        for operator in &self.operators {
            word(u64::from(operator.name));
            operator.accesses.iter().for_each(|access| word(u64::from(access.storage.0) << 2 | access.mode as u64));
            word(u64::MAX);
            operator.creates.iter().chain(&operator.frees).for_each(|storage| word(u64::from(storage.0)));
            word(u64::MAX);
        }
        self.names.iter().for_each(|name| hash.update(name.as_bytes()));
        hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
    }

    /// Checks every index, and that storages are created once, freed once and used only in between, by each operator
    /// at most once.
    pub fn check(&self) -> Result<(), String> {
        #[derive(Clone, Copy, PartialEq)]
        enum Life {
            Unborn,
            Alive,
            Freed,
        }
        let initial = self.initial_storages as usize;
        if initial > self.storages.len() {
            return Err(format!("{initial} initial storages of {}", self.storages.len()));
        }
        if u32::try_from(self.operators.len()).is_err() || u32::try_from(self.storages.len()).is_err() {
            return Err("more operators or storages than an index counts".to_owned());
        }
        let total = self.storages.iter().try_fold(self.unseen_bytes, |sum, storage| sum.checked_add(storage.bytes));
        if total.is_none_or(|total| total.max(self.peak_bytes) > 1 << 60) {
            return Err("storages of more than an exbibyte".to_owned());
        }
        let times = self.operators.iter().map(|operator| operator.cost_ns.saturating_add(operator.gap_ns));
        let total = times.fold(self.tail_ns, u64::saturating_add);
        if total.max(self.makespan_ns) > 1 << 50 {
            return Err("an iteration of more than 13 days".to_owned());
        }
        let mut life = vec![Life::Alive; initial];
        life.resize(self.storages.len(), Life::Unborn);
        let mut used_by = vec![usize::MAX; self.storages.len()];
        for (index, operator) in self.operators.iter().enumerate() {
            let complain = |what: &str, storage: StorageId| format!("operator {index} {what} storage {}", storage.0);
            if operator.name as usize >= self.names.len() {
                return Err(format!("operator {index} has name {} of {}", operator.name, self.names.len()));
            }
            if operator.workspace_bytes > 1 << 60 {
                return Err(format!("operator {index} has a workspace beyond any machine"));
            }
            let mut expect = |storage: StorageId, from: Life, to: Life, what: &str| match life.get_mut(storage.index())
            {
                Some(found) if *found == from => {
                    *found = to;
                    Ok(())
                }
                _ => Err(complain(what, storage)),
            };
            for access in &operator.accesses {
                expect(access.storage, Life::Alive, Life::Alive, "uses an absent")?;
                if std::mem::replace(&mut used_by[access.storage.index()], index) == index {
                    return Err(complain("lists twice", access.storage));
                }
            }
            for &storage in &operator.creates {
                expect(storage, Life::Unborn, Life::Alive, "creates an existing")?;
            }
            for &storage in &operator.frees {
                expect(storage, Life::Alive, Life::Freed, "frees an absent")?;
            }
        }
        for &(from, to) in &self.carried {
            if life.get(from.index()) != Some(&Life::Alive) || to.index() >= initial {
                return Err(format!("storage {} cannot become storage {} of the next iteration", from.0, to.0));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITE: Access = Access { storage: StorageId(0), mode: AccessMode::Write };
    const READ: Access = Access { storage: StorageId(0), mode: AccessMode::Read };

    /// One storage, and an operator of 1 ns for each of `accesses`.
    fn trace(accesses: &[Access]) -> Trace {
        let operator = |&access: &Access| Operator {
            name: 0,
            phase: Phase::Forward,
            cost_ns: 1,
            spread_ns: 0,
            gap_ns: 0,
            workspace_bytes: 0,
            accesses: vec![access],
            creates: Vec::new(),
            frees: Vec::new(),
            not_replayable: None,
        };
        let trace = Trace {
            workload: String::new(),
            family: String::new(),
            device: String::new(),
            recorded_iterations: 1,
            unseen_bytes: 0,
            tail_ns: 0,
            makespan_ns: 0,
            peak_bytes: 0,
            names: vec!["aten::add_".into()],
            storages: vec![Storage { bytes: 8, class: Class::Temporary, locked: None }],
            initial_storages: 1,
            operators: accesses.iter().map(operator).collect(),
            carried: Vec::new(),
        };
        assert_eq!(trace.check(), Ok(()));
        trace
    }

    #[test]
    fn a_storage_that_one_operator_lists_twice_is_refused() {
        let mut trace = trace(&[WRITE, READ]);
        trace.operators[1].accesses.push(WRITE);
        assert_eq!(trace.check(), Err("operator 1 lists twice storage 0".into()));
    }

    #[test]
    fn what_finding_times_out_took_is_taken_from_every_operator_alike() {
        let mut trace = trace(&[WRITE, READ, READ]);
        for (operator, (gap_ns, cost_ns)) in trace.operators.iter_mut().zip([(500, 9_000), (30, 400), (2_000, 100)]) {
            (operator.gap_ns, operator.cost_ns) = (gap_ns, cost_ns);
        }
        trace.tail_ns = 70;
        // 12,100 ns together. Of the 1,500 that go, 500 are each operator's; of the second's 400 no more than half may go.
        trace.cut_to(10_600);
        let times = |trace: &Trace| {
            let of = trace.operators.iter().map(|operator| (operator.gap_ns, operator.cost_ns));
            (of.collect::<Vec<_>>(), trace.tail_ns, trace.makespan_ns)
        };
        let factor = 10_600.0 / 10_870.0;
        let scaled = |time_ns: f64| (time_ns * factor).round() as u64;
        let expected = vec![(0, scaled(9_000.0)), (0, scaled(200.0)), (scaled(1_500.0), scaled(100.0))];
        assert_eq!(times(&trace), (expected, scaled(70.0), 10_600));
        let before = times(&trace);
        trace.scale_to(2 * 10_600);
        assert_eq!(trace.operators[0].cost_ns, 2 * before.0[0].1);
    }
}
