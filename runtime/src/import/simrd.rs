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

use std::collections::HashMap;
use std::io::{BufRead, Read};

use serde::Deserialize;

use crate::baselines::online::{CallId, Output, Program, Step, TensorId, Writer};
use crate::lineage::Lineage;
use crate::trace::{Access, AccessMode, Class, Operator, Phase, Storage, StorageId, Trace};

/// No line of a log is longer.
const LINE_BYTES_MAX: u64 = 1 << 20;
/// No log has more calls, arguments, results, names and references, taken together.
const ENTRIES_MAX: usize = 1 << 26;
/// The storages of no log are larger, taken together: an exbibyte.
const BYTES_MAX: i128 = 1 << 60;
/// The operators of no log take longer, taken together: 13 days.
const NS_MAX: i128 = 1 << 50;

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

#[derive(Debug, thiserror::Error)]
enum Reason {
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
enum Number {
    Text(String),
    Plain(i64),
}

impl Number {
    fn read(self, what: &'static str, least: i128, most: i128) -> Result<i128, Reason> {
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
enum Instruction {
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
    fn word(&self) -> &'static str {
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

/// The lines of a log, counted.
struct Lines<R> {
    source: R,
    line: u64,
    text: Vec<u8>,
}

impl<R: BufRead> Lines<R> {
    /// The next instruction, or none at the end.
    fn next(&mut self) -> Result<Option<Instruction>, Reason> {
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
    fn follow(&mut self, expected: &'static str) -> Result<Instruction, Reason> {
        self.next()?.ok_or(Reason::Ended { expected })
    }

    /// The bytes of `tensor`, which have to follow.
    fn memory(&mut self, tensor: &str) -> Result<u64, Reason> {
        match self.follow("MEMORY")? {
            Instruction::Memory { name, memory } if name == tensor => Ok(memory.read("MEMORY", 0, BYTES_MAX)? as u64),
            found => Err(out_of_order("MEMORY", tensor, &found)),
        }
    }

    /// Which argument `tensor` is an alias of, which has to follow.
    fn alias(&mut self, tensor: &str, arguments: usize) -> Result<Option<usize>, Reason> {
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

/// What was read of a log.
struct Reader<R> {
    lines: Lines<R>,
    writer: Writer,
    called: Vec<Option<Called>>,
    names: Vec<String>,
    name_of: HashMap<String, u32>,
    /// Per name of a tensor: its position in `bound`.
    position: HashMap<String, u32>,
    /// What names stand for, in the order in which they were first given.
    bound: Vec<TensorId>,
    /// Per tensor: references that the log holds.
    references: Vec<u32>,
    /// Bytes of all storages so far.
    bytes: i128,
    /// Time of all calls so far.
    cost_ns: i128,
    /// What counts towards [`ENTRIES_MAX`].
    entries: usize,
    phase: Phase,
}

impl<R: BufRead> Reader<R> {
    fn new(source: R) -> Self {
        Reader {
            lines: Lines { source, line: 0, text: Vec::new() },
            writer: Writer::default(),
            called: Vec::new(),
            names: Vec::new(),
            name_of: HashMap::new(),
            position: HashMap::new(),
            bound: Vec::new(),
            references: Vec::new(),
            bytes: 0,
            cost_ns: 0,
            entries: 0,
            phase: Phase::Forward,
        }
    }

    fn read(&mut self) -> Result<Log, Reason> {
        loop {
            match self.lines.follow("the annotation START")? {
                Instruction::Annotate { annotation } if annotation == "START" => break,
                _ => {}
            }
        }
        while let Some(instruction) = self.lines.next()? {
            self.carry_out(instruction)?;
        }
        for &tensor in &self.bound {
            if self.references[tensor.index()] > 0 {
                self.writer.lock(tensor);
            }
        }
        let program = std::mem::take(&mut self.writer).finish();
        Ok(Log { program, called: std::mem::take(&mut self.called), names: std::mem::take(&mut self.names) })
    }

    fn carry_out(&mut self, instruction: Instruction) -> Result<(), Reason> {
        match instruction {
            Instruction::Annotate { annotation } => {
                if annotation == "BACKWARD" {
                    self.phase = Phase::Backward;
                }
            }
            Instruction::Constant { name } => {
                let bytes = self.lines.memory(&name)?;
                self.add(&[Output::New(bytes)], 0)?;
                let tensor = self.writer.constant(bytes);
                self.note(None, 0, 1)?;
                self.bind(name, tensor)?;
            }
            Instruction::Call { name, args, result, time } => self.call(&name, &args, result, time)?,
            Instruction::Mutate { name, args, mutate, time } => self.mutate(&name, &args, &mutate, time)?,
            Instruction::Copy { dst, src } => {
                let tensor = self.alive(&src)?;
                self.retain(tensor)?;
                self.bind(dst, tensor)?;
            }
            Instruction::CopyFrom { dst, src } => {
                let tensor = self.alive(&src)?;
                // The new reference first: the two may be the same tensor.
                self.retain(tensor)?;
                self.rebind(&dst, tensor)?;
            }
            // simrd passes over names that it never met: they are of the set-up.
            Instruction::Release { name } => {
                if self.position.contains_key(&name) {
                    let tensor = self.alive(&name)?;
                    self.release(tensor)?;
                }
            }
            found @ (Instruction::Memory { .. } | Instruction::Alias { .. }) => {
                let expected = "what belongs to no other instruction".to_owned();
                return Err(Reason::Order { expected, found: found.word() });
            }
        }
        Ok(())
    }

    fn call(&mut self, name: &str, args: &[String], result: Vec<String>, time: Number) -> Result<(), Reason> {
        let cost_ns = time.read("TIME", 0, NS_MAX)? as u64;
        let arguments = self.arguments(args)?;
        let mut outputs = Vec::new();
        for tensor in &result {
            let bytes = self.lines.memory(tensor)?;
            let alias = self.lines.alias(tensor, arguments.len())?;
            outputs.push(alias.map_or(Output::New(bytes), Output::Alias));
        }
        self.add(&outputs, cost_ns)?;
        let first = self.writer.call(cost_ns, &arguments, outputs);
        let called = self.called_as(name);
        self.note(Some(called), arguments.len(), result.len())?;
        for (tensor, name) in (first.0..).map(TensorId).zip(result) {
            self.bind(name, tensor)?;
        }
        Ok(())
    }

    fn mutate(&mut self, name: &str, args: &[String], mutated: &[usize], time: Number) -> Result<(), Reason> {
        let cost_ns = time.read("TIME", 0, NS_MAX)? as u64;
        let arguments = self.arguments(args)?;
        if let Some(&beyond) = mutated.iter().find(|&&position| position >= arguments.len()) {
            let expected = format!("below {}", arguments.len());
            return Err(Reason::Range { what: "MUTATE", expected, found: beyond as i128 });
        }
        let outputs = mutated.iter().map(|&position| Output::New(self.writer.storage_bytes(arguments[position])));
        let outputs: Vec<Output> = outputs.collect();
        self.add(&outputs, cost_ns)?;
        let first = self.writer.call(cost_ns, &arguments, outputs);
        let called = self.called_as(name);
        self.note(Some(called), arguments.len(), mutated.len())?;
        for (tensor, &position) in (first.0..).map(TensorId).zip(mutated) {
            self.rebind(&args[position], tensor)?;
        }
        Ok(())
    }

    fn called_as(&mut self, name: &str) -> Called {
        let count = self.names.len() as u32;
        let index = *self.name_of.entry(name.to_owned()).or_insert(count);
        if index == count {
            self.names.push(name.to_owned());
        }
        Called { name: index, phase: self.phase }
    }

    /// Notes a call that was just written, and the references to what it returned.
    fn note(&mut self, called: Option<Called>, arguments: usize, outputs: usize) -> Result<(), Reason> {
        self.grow(1 + arguments + outputs)?;
        self.called.push(called);
        self.references.extend(std::iter::repeat_n(1, outputs));
        Ok(())
    }

    /// Adds to what the log holds altogether, before it is written down.
    fn add(&mut self, outputs: &[Output], cost_ns: u64) -> Result<(), Reason> {
        let bytes = outputs.iter().map(|output| if let Output::New(bytes) = output { i128::from(*bytes) } else { 0 });
        self.bytes += bytes.sum::<i128>();
        self.cost_ns += i128::from(cost_ns);
        let within = |what, found, most| match found > most {
            true => Err(Reason::Range { what, expected: format!("at most {most}"), found }),
            false => Ok(()),
        };
        within("the sum of all bytes", self.bytes, BYTES_MAX)?;
        within("the sum of all times", self.cost_ns, NS_MAX)
    }

    fn grow(&mut self, entries: usize) -> Result<(), Reason> {
        self.entries += entries;
        if self.entries > ENTRIES_MAX { Err(Reason::TooMany) } else { Ok(()) }
    }

    fn arguments(&self, args: &[String]) -> Result<Vec<TensorId>, Reason> {
        args.iter().map(|name| self.alive(name)).collect()
    }

    fn named(&self, name: &str) -> Result<u32, Reason> {
        self.position.get(name).copied().ok_or_else(|| Reason::Unknown(name.to_owned()))
    }

    fn alive(&self, name: &str) -> Result<TensorId, Reason> {
        let tensor = self.bound[self.named(name)? as usize];
        if self.references[tensor.index()] == 0 { Err(Reason::Dead(name.to_owned())) } else { Ok(tensor) }
    }

    fn bind(&mut self, name: String, tensor: TensorId) -> Result<(), Reason> {
        self.grow(1)?;
        let position = self.bound.len() as u32;
        if self.position.contains_key(&name) {
            return Err(Reason::Twice(name));
        }
        self.position.insert(name, position);
        self.bound.push(tensor);
        Ok(())
    }

    /// Lets `name` stand for `tensor`, and gives up what it stood for.
    fn rebind(&mut self, name: &str, tensor: TensorId) -> Result<(), Reason> {
        let position = self.named(name)? as usize;
        let old = self.alive(name)?;
        self.bound[position] = tensor;
        self.release(old)
    }

    fn retain(&mut self, tensor: TensorId) -> Result<(), Reason> {
        self.references[tensor.index()] += 1;
        self.writer.retain(tensor);
        self.grow(1)
    }

    fn release(&mut self, tensor: TensorId) -> Result<(), Reason> {
        self.references[tensor.index()] -= 1;
        self.writer.release(tensor);
        self.grow(1)
    }
}

/// A trace under construction.
struct Draft<'a> {
    log: &'a Log,
    /// Per storage of the program: its id in the trace. Initial ones come first.
    id: Vec<StorageId>,
    /// Per storage of the program: whether it is a constant from before the first operator.
    initial: Vec<bool>,
    /// The name of operators that bring a constant in.
    constant: u32,
    references: Vec<u32>,
    /// What is released before the first operator: freed after it.
    freed_early: Vec<StorageId>,
    operators: Vec<Operator>,
}

impl<'a> Draft<'a> {
    fn new(log: &'a Log) -> Self {
        let program = &log.program;
        let mut initial = vec![false; program.bytes.len()];
        let first_operator = log.called.iter().position(Option::is_some).unwrap_or(log.called.len());
        for tensor in &program.tensors {
            initial[tensor.storage.index()] |= (tensor.call.0 as usize) < first_operator;
        }
        let (mut early, mut late) = (0, initial.iter().filter(|&&initial| initial).count() as u32);
        let number = |&initial: &bool| {
            let counter = if initial { &mut early } else { &mut late };
            *counter += 1;
            StorageId(*counter - 1)
        };
        let id = initial.iter().map(number).collect();
        Draft {
            log,
            id,
            initial,
            constant: log.names.len() as u32,
            references: vec![0; program.bytes.len()],
            freed_early: Vec::new(),
            operators: Vec::new(),
        }
    }

    fn step(&mut self, step: Step) {
        let program = &self.log.program;
        match step {
            Step::Lock(_) => {}
            Step::Retain(tensor) => self.references[program.tensor(tensor).storage.index()] += 1,
            Step::Release(tensor) => {
                let storage = program.tensor(tensor).storage.index();
                self.references[storage] -= 1;
                if self.references[storage] == 0 {
                    let frees = self.operators.last_mut().map_or(&mut self.freed_early, |last| &mut last.frees);
                    frees.push(self.id[storage]);
                }
            }
            Step::Call(id) => {
                for output in program.outputs(id) {
                    self.references[program.tensor(output).storage.index()] += 1;
                }
                let initial = program.outputs(id).any(|output| self.initial[program.tensor(output).storage.index()]);
                match self.log.called[id.0 as usize] {
                    Some(called) => self.operator(id, called, None),
                    None if initial => {}
                    None => {
                        let phase = self.operators.last().map_or(Phase::Forward, |operator| operator.phase);
                        self.operator(id, Called { name: self.constant, phase }, Some("brought in from outside"));
                    }
                }
            }
        }
    }

    fn operator(&mut self, id: CallId, called: Called, not_replayable: Option<&str>) {
        let program = &self.log.program;
        let call = program.call(id);
        let mut accesses: Vec<Access> = Vec::new();
        for &argument in program.arguments(id) {
            let storage = self.id[program.tensor(argument).storage.index()];
            if accesses.iter().all(|access| access.storage != storage) {
                accesses.push(Access { storage, mode: AccessMode::Read });
            }
        }
        let made = program.outputs(id).filter(|&output| program.is_root(output));
        let creates = made.map(|output| self.id[program.tensor(output).storage.index()]).collect();
        self.operators.push(Operator {
            name: called.name,
            phase: called.phase,
            cost_ns: call.cost_ns,
            spread_ns: 0,
            gap_ns: 0,
            workspace_bytes: 0,
            accesses,
            creates,
            frees: std::mem::take(&mut self.freed_early),
            not_replayable: not_replayable.map(str::to_owned),
        });
    }

    fn finish(self, workload: &str, family: &str) -> Trace {
        let program = &self.log.program;
        let mut names = self.log.names.clone();
        names.push("constant".to_owned());
        let mut storages = vec![Storage { bytes: 0, class: Class::Temporary, locked: None }; self.id.len()];
        for ((&id, &bytes), &initial) in self.id.iter().zip(&program.bytes).zip(&self.initial) {
            let class = if initial { Class::Parameter } else { Class::Temporary };
            storages[id.index()] = Storage { bytes, class, locked: None };
        }
        classify(&mut storages, &self.operators);
        Trace {
            workload: workload.to_owned(),
            family: family.to_owned(),
            device: "simrd".to_owned(),
            recorded_iterations: 1,
            unseen_bytes: 0,
            tail_ns: 0,
            makespan_ns: self.operators.iter().map(|operator| operator.cost_ns).sum(),
            peak_bytes: 0,
            names,
            initial_storages: self.initial.iter().filter(|&&initial| initial).count() as u32,
            storages,
            operators: self.operators,
            carried: Vec::new(),
        }
    }
}

/// What storages are for, as far as their use tells: made in the forward pass and read in the backward pass is an
/// activation; made in the backward pass and still there at the end is a gradient.
fn classify(storages: &mut [Storage], operators: &[Operator]) {
    let mut maker: Vec<Option<Phase>> = vec![None; storages.len()];
    for operator in operators {
        for &storage in &operator.creates {
            maker[storage.index()] = Some(operator.phase);
            if operator.phase == Phase::Backward {
                storages[storage.index()].class = Class::Gradient;
            }
            if operator.not_replayable.is_some() {
                storages[storage.index()].class = Class::Input;
            }
        }
        for access in &operator.accesses {
            let class = storages[access.storage.index()].class;
            if operator.phase == Phase::Backward
                && class == Class::Temporary
                && maker[access.storage.index()] == Some(Phase::Forward)
            {
                storages[access.storage.index()].class = Class::Activation;
            }
        }
        for storage in &operator.frees {
            let storage = &mut storages[storage.index()];
            if storage.class == Class::Gradient {
                storage.class = Class::Temporary;
            }
        }
    }
}
