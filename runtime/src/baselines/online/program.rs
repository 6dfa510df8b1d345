//! A program as an online rule meets it: calls, tensors, and the references that the program holds.
//!
//! It knows what depends on what; it knows nothing of budgets. Mutation is not in it: an operator that changes a tensor
//! makes another one from it (copy on write, as in the prototype of Kirisame et al., *Dynamic Tensor Rematerialization*,
//! ICLR 2021).

use crate::lineage::{EVICTION_FLOOR_BYTES, Lists};
use crate::trace::{AccessMode, Operator, Trace};

/// A tensor's index: the order in which tensors are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TensorId(pub(crate) u32);

impl TensorId {
    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A call's index: the order in which the program makes its calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CallId(pub(crate) u32);

/// An online storage's index. Every version of a trace's storage is a storage of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SeatId(pub(crate) u32);

impl SeatId {
    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a call returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// A tensor in a storage of its own, of so many bytes.
    New(u64),
    /// A view of the argument at this position.
    Alias(usize),
}

/// One operator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) cost_ns: u64,
    /// Time that the program itself takes before it; no rerun takes it again.
    pub(super) gap_ns: u64,
    /// Bytes that it needs beside its outputs while it runs.
    pub(super) workspace_bytes: u64,
    /// Bytes of all its outputs.
    pub(crate) output_bytes: u64,
    arguments: (u32, u32),
    outputs: (u32, u32),
}

/// What a tensor is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tensor {
    pub(crate) storage: SeatId,
    pub(crate) call: CallId,
    /// Bytes that it adds to the device: none for an alias.
    pub(crate) bytes: u64,
}

/// What the program does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Runs the next call.
    Call(CallId),
    /// Makes sure of a tensor; from then on its storage stays.
    Lock(TensorId),
    /// Takes another reference to a tensor.
    Retain(TensorId),
    /// Gives a reference up.
    Release(TensorId),
}

/// A neighbour of a storage, since a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Neighbour {
    pub(super) storage: SeatId,
    pub(super) since: CallId,
}

/// A program that can be run under a budget.
#[derive(Clone, Debug)]
pub struct Program {
    pub(crate) calls: Vec<Call>,
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) steps: Vec<Step>,
    /// Bytes of each storage.
    pub(crate) bytes: Vec<u64>,
    /// Per storage: the tensor that it was made for. All others in it are views.
    roots: Vec<TensorId>,
    arguments: Vec<TensorId>,
    /// What a storage is made from, constants left out; and what is made from it.
    parents: Lists<Neighbour>,
    children: Lists<Neighbour>,
    pub(super) unseen_bytes: u64,
    /// Time from the last call's end to the program's end.
    pub(super) tail_ns: u64,
    /// Whether a locked storage goes when the program lets go of it.
    pub(super) roots_are_freed: bool,
}

impl Program {
    /// The program that `trace` is a recording of. Initial storages, and what cannot be evicted or rebuilt, are locked.
    ///
    /// Views have no tensors of their own here, so that a rerun does not make them again; a side effect is a read.
    pub fn of(trace: &Trace) -> Program {
        let (unseen_bytes, tail_ns) = (trace.unseen_bytes, trace.tail_ns);
        let mut writer = Writer { unseen_bytes, tail_ns, roots_are_freed: true, ..Writer::default() };
        let mut holds: Vec<Option<TensorId>> = vec![None; trace.storages.len()];
        for (storage, holds) in trace.storages.iter().zip(&mut holds).take(trace.initial_storages as usize) {
            *holds = Some(writer.constant(storage.bytes));
        }
        for operator in &trace.operators {
            writer.record(trace, operator, &mut holds);
        }
        let survivors: Vec<TensorId> = holds.into_iter().flatten().collect();
        survivors.into_iter().for_each(|tensor| writer.lock(tensor));
        writer.finish()
    }

    /// Time of all operators if nothing is evicted.
    pub fn compute_ns(&self) -> u64 {
        self.calls.iter().map(|call| call.cost_ns).sum()
    }

    pub(crate) fn call(&self, id: CallId) -> &Call {
        &self.calls[id.0 as usize]
    }

    pub(crate) fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.index()]
    }

    pub(crate) fn arguments(&self, id: CallId) -> &[TensorId] {
        let (from, to) = self.call(id).arguments;
        &self.arguments[from as usize..to as usize]
    }

    pub(crate) fn outputs(&self, id: CallId) -> impl Iterator<Item = TensorId> + use<> {
        let (from, to) = self.call(id).outputs;
        (from..to).map(TensorId)
    }

    /// Whether `tensor` is the one that its storage was made for, and not a view.
    pub(crate) fn is_root(&self, tensor: TensorId) -> bool {
        self.roots[self.tensor(tensor).storage.index()] == tensor
    }

    /// Storages that `storage` is made from.
    pub(super) fn parents(&self, storage: SeatId) -> &[Neighbour] {
        self.parents.of(storage.index())
    }

    /// Storages that are made from `storage`.
    pub(super) fn children(&self, storage: SeatId) -> &[Neighbour] {
        self.children.of(storage.index())
    }
}

/// Writes a program down, step by step.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    calls: Vec<Call>,
    tensors: Vec<Tensor>,
    steps: Vec<Step>,
    bytes: Vec<u64>,
    constant: Vec<bool>,
    roots: Vec<TensorId>,
    arguments: Vec<TensorId>,
    unseen_bytes: u64,
    tail_ns: u64,
    roots_are_freed: bool,
}

impl Writer {
    /// A tensor that is there without being computed, and stays.
    pub(crate) fn constant(&mut self, bytes: u64) -> TensorId {
        let tensor = self.call(0, &[], [Output::New(bytes)]);
        self.constant[self.tensors[tensor.index()].storage.index()] = true;
        self.lock(tensor);
        tensor
    }

    /// The first of a call's outputs; the others follow it.
    pub(crate) fn call(
        &mut self,
        cost_ns: u64,
        arguments: &[TensorId],
        outputs: impl IntoIterator<Item = Output>,
    ) -> TensorId {
        let first = TensorId(self.tensors.len() as u32);
        let call = CallId(self.calls.len() as u32);
        let mut output_bytes = 0;
        for output in outputs {
            let (storage, bytes) = match output {
                Output::Alias(argument) => (self.tensors[arguments[argument].index()].storage, 0),
                Output::New(bytes) => {
                    self.bytes.push(bytes);
                    self.constant.push(false);
                    self.roots.push(TensorId(self.tensors.len() as u32));
                    (SeatId(self.bytes.len() as u32 - 1), bytes)
                }
            };
            output_bytes += bytes;
            self.tensors.push(Tensor { storage, call, bytes });
        }
        let from = self.arguments.len() as u32;
        self.arguments.extend_from_slice(arguments);
        self.calls.push(Call {
            cost_ns,
            gap_ns: 0,
            workspace_bytes: 0,
            output_bytes,
            arguments: (from, self.arguments.len() as u32),
            outputs: (first.0, self.tensors.len() as u32),
        });
        self.steps.push(Step::Call(call));
        first
    }

    pub(crate) fn retain(&mut self, tensor: TensorId) {
        self.steps.push(Step::Retain(tensor));
    }

    pub(crate) fn release(&mut self, tensor: TensorId) {
        self.steps.push(Step::Release(tensor));
    }

    pub(crate) fn lock(&mut self, tensor: TensorId) {
        self.steps.push(Step::Lock(tensor));
    }

    /// Bytes of the storage behind `tensor`.
    pub(crate) fn storage_bytes(&self, tensor: TensorId) -> u64 {
        self.bytes[self.tensors[tensor.index()].storage.index()]
    }

    /// One operator of a trace; `holds` says which tensor each storage holds.
    fn record(&mut self, trace: &Trace, operator: &Operator, holds: &mut [Option<TensorId>]) {
        let read = operator.accesses.iter().filter(|access| access.mode != AccessMode::Overwrite);
        let arguments: Vec<TensorId> = read.filter_map(|access| holds[access.storage.index()]).collect();
        let rewritten = operator
            .accesses
            .iter()
            .filter(|access| matches!(access.mode, AccessMode::Write | AccessMode::Overwrite))
            .map(|access| access.storage);
        let made: Vec<_> = rewritten.chain(operator.creates.iter().copied()).collect();
        let outputs = made.iter().map(|storage| Output::New(trace.storages[storage.index()].bytes));
        let first = self.call(operator.cost_ns, &arguments, outputs);
        let call = self.calls.last_mut().expect("just written");
        (call.gap_ns, call.workspace_bytes) = (operator.gap_ns, operator.workspace_bytes);
        for (tensor, &storage) in (first.0..).map(TensorId).zip(&made) {
            let facts = &trace.storages[storage.index()];
            let stays = facts.locked.is_some() || facts.bytes < EVICTION_FLOOR_BYTES;
            if stays || operator.not_replayable.is_some() {
                self.lock(tensor);
            }
            if let Some(old) = holds[storage.index()].replace(tensor) {
                self.release(old);
            }
        }
        for storage in &operator.frees {
            if let Some(tensor) = holds[storage.index()].take() {
                self.release(tensor);
            }
        }
    }

    /// Pairs of a parent and a child, each once, with the first call that made them so.
    fn dependencies(&self) -> Vec<(SeatId, SeatId, CallId)> {
        let mut pairs = Vec::new();
        for (index, call) in (0..).zip(&self.calls) {
            for output in &self.tensors[call.outputs.0 as usize..call.outputs.1 as usize] {
                for argument in &self.arguments[call.arguments.0 as usize..call.arguments.1 as usize] {
                    let parent = self.tensors[argument.index()].storage;
                    if parent != output.storage {
                        pairs.push((parent, output.storage, CallId(index)));
                    }
                }
            }
        }
        pairs.sort_unstable();
        pairs.dedup_by_key(|&mut (parent, child, _)| (parent, child));
        pairs
    }

    pub(crate) fn finish(self) -> Program {
        let storages = self.bytes.len();
        let pairs = self.dependencies();
        let varying = pairs.iter().filter(|(parent, ..)| !self.constant[parent.index()]);
        let up = varying.map(|&(parent, child, since)| (child.0, Neighbour { storage: parent, since }));
        let down = pairs.iter().map(|&(parent, child, since)| (parent.0, Neighbour { storage: child, since }));
        Program {
            parents: Lists::gather(storages, &up.collect::<Vec<_>>()),
            children: Lists::gather(storages, &down.collect::<Vec<_>>()),
            calls: self.calls,
            tensors: self.tensors,
            steps: self.steps,
            bytes: self.bytes,
            roots: self.roots,
            arguments: self.arguments,
            unseen_bytes: self.unseen_bytes,
            tail_ns: self.tail_ns,
            roots_are_freed: self.roots_are_freed,
        }
    }
}
