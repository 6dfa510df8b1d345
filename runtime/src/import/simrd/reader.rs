//! The instructions of a log, carried out.

use std::collections::HashMap;
use std::io::BufRead;

use super::lines::{BYTES_MAX, ENTRIES_MAX, Instruction, Lines, NS_MAX, Number, Reason};
use super::{Called, Log};
use crate::baselines::online::{Output, TensorId, Writer};
use crate::trace::Phase;

/// What was read of a log.
pub(super) struct Reader<R> {
    pub(super) lines: Lines<R>,
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
    pub(super) fn new(source: R) -> Self {
        Reader {
            lines: Lines::new(source),
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

    pub(super) fn read(&mut self) -> Result<Log, Reason> {
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
