//! A log as a trace.

use super::{Called, Log};
use crate::baselines::online::{CallId, Step};
use crate::trace::{Access, AccessMode, Class, Operator, Phase, Storage, StorageId, Trace};

/// A trace under construction.
pub(super) struct Draft<'a> {
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
    pub(super) operators: Vec<Operator>,
}

impl<'a> Draft<'a> {
    pub(super) fn new(log: &'a Log) -> Self {
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

    pub(super) fn step(&mut self, step: Step) {
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

    pub(super) fn finish(self, workload: &str, family: &str) -> Trace {
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
