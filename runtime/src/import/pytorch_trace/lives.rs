//! Storages and their lives, concluded from the tensors that calls take and return.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde_json::Value;

use super::schema::Schema;
use super::{Call, Node, Tree, Values};
use crate::trace::{Access, AccessMode, Class, Operator, Phase, Storage, StorageId, Trace};

/// A storage: its number in the file is used again by others.
struct Life {
    bytes: u64,
    /// The call that makes it; none where it was there before.
    made_by: Option<usize>,
    /// Calls that use it later, in order: which, how.
    uses: Vec<(usize, AccessMode)>,
    /// Whether the call that makes it returns it.
    returned: bool,
}

/// A tensor as the file has it: `[tensor, storage, offset, elements, bytes of an element, device]`.
struct Seen {
    storage: u64,
    end_bytes: u64,
    device: String,
}

/// The lives of all storages of one device.
pub(super) struct Lives<'a> {
    tree: &'a Tree<'a>,
    calls: &'a [Call<'a>],
    device: String,
    lives: Vec<Life>,
    /// The life that each number stands for at present.
    present: HashMap<u64, usize>,
}

/// A trace, and the calls that its operators are.
pub(super) struct Concluded {
    pub(super) trace: Trace,
    pub(super) calls: Vec<usize>,
}

/// What a call does to the storages that it did not make.
type Uses = BTreeMap<usize, AccessMode>;

impl<'a> Lives<'a> {
    pub(super) fn of(tree: &'a Tree<'a>, calls: &'a [Call<'a>]) -> Self {
        let device = device(calls);
        let mut lives = Lives { tree, calls, device, lives: Vec::new(), present: HashMap::new() };
        for (index, call) in calls.iter().enumerate() {
            let mut uses = Uses::new();
            let given = lives.all_tensors(&call.node.inputs).iter().map(|seen| seen.storage).collect();
            lives.enter(index, call.node, &given, &mut uses);
            lives.note_returned(index, call.node);
            for (life, mode) in uses {
                lives.lives[life].uses.push((index, mode));
            }
        }
        lives
    }

    /// Follows one node of call `index`, and all that it calls. `given` are the storages that the call itself takes: any
    /// other that is seen inside was made there, be it by code that allocates past the dispatcher.
    fn enter(&mut self, index: usize, node: &Node, given: &HashSet<u64>, uses: &mut Uses) {
        let schema = Schema::parse(node.schema());
        for position in 0..node.inputs.values.len() {
            // What a compiled kernel does with its arguments, nobody says.
            let mode = if node.is_compiled() { AccessMode::Write } else { schema.mode(position) };
            for seen in self.tensors(node.inputs.at(position)) {
                if given.contains(&seen.storage) {
                    self.take(&seen, mode, uses);
                } else {
                    self.make(index, &seen);
                }
            }
        }
        for child in self.tree.children(node) {
            self.enter(index, child, given, uses);
        }
        for seen in self.all_tensors(&node.outputs) {
            if given.contains(&seen.storage) {
                // A view of what was taken, or what was taken itself.
                let known = &mut self.lives[self.present[&seen.storage]];
                known.bytes = known.bytes.max(seen.end_bytes);
            } else {
                self.make(index, &seen);
            }
        }
    }

    fn take(&mut self, seen: &Seen, mode: AccessMode, uses: &mut Uses) {
        let life = *self.present.entry(seen.storage).or_insert_with(|| {
            self.lives.push(Life { bytes: 0, made_by: None, uses: Vec::new(), returned: false });
            self.lives.len() - 1
        });
        let known = &mut self.lives[life];
        known.bytes = known.bytes.max(seen.end_bytes);
        let combined = uses.entry(life).or_insert(mode);
        *combined = combine(*combined, mode);
    }

    /// Call `index` has made this storage, now or before.
    fn make(&mut self, index: usize, seen: &Seen) {
        let known = self.present.get(&seen.storage).copied();
        match known.filter(|&life| self.lives[life].made_by == Some(index)) {
            Some(life) => self.lives[life].bytes = self.lives[life].bytes.max(seen.end_bytes),
            None => {
                self.present.insert(seen.storage, self.lives.len());
                let made_by = Some(index);
                self.lives.push(Life { bytes: seen.end_bytes, made_by, uses: Vec::new(), returned: false });
            }
        }
    }

    fn note_returned(&mut self, index: usize, node: &Node) {
        for seen in self.all_tensors(&node.outputs) {
            if let Some(&life) = self.present.get(&seen.storage)
                && self.lives[life].made_by == Some(index)
            {
                self.lives[life].returned = true;
            }
        }
    }

    fn all_tensors(&self, values: &Values) -> Vec<Seen> {
        (0..values.values.len()).flat_map(|position| self.tensors(values.at(position))).collect()
    }

    fn tensors(&self, argument: Argument<'_>) -> Vec<Seen> {
        let mut found = Vec::new();
        argument.collect(&mut found);
        found.retain(|seen| seen.device == self.device && seen.end_bytes > 0);
        found
    }

    /// The trace.
    pub(super) fn trace(self, workload: &str, family: &str) -> Concluded {
        let initial = (0..self.lives.len()).filter(|&life| self.lives[life].made_by.is_none());
        let made = (0..self.lives.len()).filter(|&life| self.lives[life].made_by.is_some() && !self.is_workspace(life));
        let order: Vec<usize> = initial.chain(made).collect();
        let initial_storages = order.iter().take_while(|&&life| self.lives[life].made_by.is_none()).count() as u32;
        let ids: HashMap<usize, StorageId> =
            order.iter().zip(0..).map(|(&life, number)| (life, StorageId(number))).collect();
        let mut names = Vec::new();
        let mut operators: Vec<Operator> =
            self.calls.iter().map(|call| bare(name(&mut names, &call.node.name), call)).collect();
        for (life, facts) in self.lives.iter().enumerate() {
            let Some(&id) = ids.get(&life) else {
                // Nobody sees it but the operator that makes it.
                let workspace = &mut operators[facts.made_by.expect("workspace is made")].workspace_bytes;
                *workspace = workspace.saturating_add(facts.bytes);
                continue;
            };
            for &(call, mode) in &facts.uses {
                operators[call].accesses.push(Access { storage: id, mode });
            }
            if let Some(maker) = facts.made_by {
                operators[maker].creates.push(id);
                let last = facts.uses.last().map_or(maker, |&(call, _)| call);
                operators[last].frees.push(id);
            }
        }
        for operator in &mut operators {
            let written = operator.accesses.iter().filter(|access| access.mode.writes()).count();
            if written > 1 && operator.not_replayable.is_none() {
                operator.not_replayable = Some("writes several storages at once".to_owned());
            }
        }
        let kept: Vec<usize> =
            (0..operators.len()).filter(|&call| self.does_anything(call, &operators[call])).collect();
        let storages = order.iter().map(|&life| self.storage(life)).collect();
        let mut operators: Vec<Option<Operator>> = operators.into_iter().map(Some).collect();
        let trace = Trace {
            workload: workload.to_owned(),
            family: family.to_owned(),
            device: self.device.clone(),
            recorded_iterations: 1,
            unseen_bytes: 0,
            tail_ns: 0,
            makespan_ns: 0,
            peak_bytes: 0,
            names,
            storages,
            initial_storages,
            operators: kept.iter().filter_map(|&call| operators[call].take()).collect(),
            carried: Vec::new(),
        };
        Concluded { trace, calls: kept }
    }

    fn is_workspace(&self, life: usize) -> bool {
        let Life { made_by, uses, returned, .. } = &self.lives[life];
        made_by.is_some() && !returned && uses.is_empty()
    }

    /// Whether a call is more than a view: it makes, writes or frees something, or returns what is no view.
    fn does_anything(&self, call: usize, operator: &Operator) -> bool {
        let writes = operator.accesses.iter().any(|access| access.mode.writes());
        let makes = !operator.creates.is_empty() || operator.workspace_bytes > 0;
        writes || makes || !operator.frees.is_empty() || !Schema::parse(self.calls[call].node.schema()).returns_views
    }

    fn storage(&self, life: usize) -> Storage {
        Storage { bytes: self.lives[life].bytes, class: self.class(life), locked: None }
    }

    /// What a storage is for, from who makes it and who uses it.
    fn class(&self, life: usize) -> Class {
        let Life { made_by, uses, .. } = &self.lives[life];
        let used_in = |phase: Phase| uses.iter().any(|&(call, _)| self.calls[call].phase == phase);
        let written = |phase: Phase| uses.iter().any(|&(call, mode)| self.calls[call].phase == phase && mode.writes());
        match made_by.map(|call| self.calls[call].phase) {
            None if written(Phase::Update) && !used_in(Phase::Forward) && !used_in(Phase::Backward) => {
                Class::OptimizerState
            }
            // Parameters that are trained, and buffers that the forward pass keeps up to date.
            None if written(Phase::Update) || written(Phase::Forward) => Class::Parameter,
            None => Class::Input,
            Some(Phase::Backward) if used_in(Phase::Update) => Class::Gradient,
            Some(Phase::Forward) if used_in(Phase::Backward) => Class::Activation,
            Some(_) => Class::Temporary,
        }
    }
}

/// An operator without its storages.
fn bare(name: u32, call: &Call<'_>) -> Operator {
    let node = call.node;
    let not_replayable = match node.name.as_str() {
        _ if node.is_compiled() => Some("compiled for this program: nobody says what it writes"),
        name if name.starts_with("c10d::") => Some("talks to other processes"),
        name if name.starts_with("aten::empty") || name.starts_with("aten::new_empty") => {
            Some("its bytes are undefined")
        }
        _ => None,
    };
    Operator {
        name,
        phase: call.phase,
        cost_ns: 0,
        spread_ns: 0,
        gap_ns: 0,
        workspace_bytes: 0,
        accesses: Vec::new(),
        creates: Vec::new(),
        frees: Vec::new(),
        not_replayable: not_replayable.map(str::to_owned),
    }
}

fn name(names: &mut Vec<String>, name: &str) -> u32 {
    let known = names.iter().position(|known| known == name);
    known.unwrap_or_else(|| {
        names.push(name.to_owned());
        names.len() - 1
    }) as u32
}

/// How a call uses a storage that it uses in two ways.
fn combine(one: AccessMode, other: AccessMode) -> AccessMode {
    match (one, other) {
        (one, other) if one == other => one,
        (AccessMode::SideEffect, AccessMode::Read) | (AccessMode::Read, AccessMode::SideEffect) => {
            AccessMode::SideEffect
        }
        // What it overwrites first and reads then does not depend on what was there.
        (AccessMode::Overwrite, AccessMode::Read | AccessMode::Write) => AccessMode::Overwrite,
        _ => AccessMode::Write,
    }
}

/// The device that is accounted for: the first that is no CPU, if there is one.
fn device(calls: &[Call<'_>]) -> String {
    let mut found = Vec::new();
    for values in calls.iter().flat_map(|call| [&call.node.inputs, &call.node.outputs]) {
        (0..values.values.len()).for_each(|position| values.at(position).collect(&mut found));
    }
    // Undefined tensors have no device and no bytes.
    let mut devices = found.into_iter().filter(|seen| seen.end_bytes > 0).map(|seen| seen.device);
    devices.find(|device| device != "cpu").unwrap_or_else(|| "cpu".to_owned())
}

/// One argument or result: its value, and its shape and strides where the file has them.
#[derive(Clone, Copy)]
struct Argument<'a> {
    value: &'a Value,
    shape: Option<&'a Value>,
    strides: Option<&'a Value>,
}

impl Values {
    fn at(&self, position: usize) -> Argument<'_> {
        let (shape, strides) = (self.shapes.get(position), self.strides.get(position));
        Argument { value: &self.values[position], shape, strides }
    }
}

impl Argument<'_> {
    /// The tensors in it, which may be a list of them.
    fn collect(&self, found: &mut Vec<Seen>) {
        let Some(items) = self.value.as_array() else { return };
        match self.tensor(items) {
            Some(seen) => found.push(seen),
            None => {
                for (position, value) in items.iter().enumerate() {
                    let shape = self.shape.and_then(|shape| shape.get(position));
                    let strides = self.strides.and_then(|strides| strides.get(position));
                    Argument { value, shape, strides }.collect(found);
                }
            }
        }
    }

    fn tensor(&self, items: &[Value]) -> Option<Seen> {
        let [_, storage, offset, elements, element_bytes, device] = items else { return None };
        let device = device.as_str()?.to_owned();
        let elements = elements.as_u64()?;
        let spanned = self.spanned_elements().unwrap_or(elements);
        let end = if elements == 0 { 0 } else { offset.as_u64()?.checked_add(spanned)? };
        Some(Seen { storage: storage.as_u64()?, end_bytes: end.checked_mul(element_bytes.as_u64()?)?, device })
    }

    /// Elements of the storage from the tensor's first to its last: fewer than it has where it was expanded, more where
    /// it skips some. Older files have no strides.
    fn spanned_elements(&self) -> Option<u64> {
        let numbers = |of: Option<&Value>| of?.as_array()?.iter().map(Value::as_u64).collect::<Option<Vec<u64>>>();
        let (shape, strides) = (numbers(self.shape)?, numbers(self.strides)?);
        if shape.len() != strides.len() {
            return None;
        }
        let steps = shape.iter().zip(&strides).map(|(size, stride)| size.saturating_sub(1).checked_mul(*stride));
        steps.into_iter().try_fold(1u64, |span, step| span.checked_add(step?))
    }
}
