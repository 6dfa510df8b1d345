//! Traces written by hand, operator by operator.

use plimsoll_runtime::Trace;
use plimsoll_runtime::trace::{Access, AccessMode, Class, Operator, Phase, Storage, StorageId};

/// Bytes of every storage of a script, unless it says otherwise.
pub const BYTES: u64 = 1 << 20;

/// A trace under construction.
pub struct Script {
    trace: Trace,
}

/// The operator that was added last, to be filled in.
pub struct Line<'a> {
    names: &'a mut Vec<String>,
    storages: &'a mut Vec<Storage>,
    operator: &'a mut Operator,
}

impl Script {
    /// A trace with `initial_storages` storages and no operator.
    pub fn new(initial_storages: u32) -> Self {
        Script {
            trace: Trace {
                workload: "script".into(),
                family: "script".into(),
                device: "none".into(),
                recorded_iterations: 1,
                unseen_bytes: 0,
                tail_ns: 0,
                makespan_ns: 0,
                peak_bytes: 0,
                names: vec!["operator".into()],
                storages: (0..initial_storages).map(|_| storage(BYTES)).collect(),
                initial_storages,
                operators: Vec::new(),
                carried: Vec::new(),
            },
        }
    }

    /// Adds an operator of `cost_ns`.
    pub fn run(&mut self, cost_ns: u64) -> Line<'_> {
        self.trace.operators.push(Operator {
            name: 0,
            phase: Phase::Forward,
            cost_ns,
            spread_ns: 0,
            gap_ns: 0,
            workspace_bytes: 0,
            accesses: Vec::new(),
            creates: Vec::new(),
            frees: Vec::new(),
            not_replayable: None,
        });
        let Trace { names, storages, operators, .. } = &mut self.trace;
        Line { names, storages, operator: operators.last_mut().expect("just added") }
    }

    /// Adds `count` operators of `cost_ns` that use nothing.
    pub fn idles(&mut self, count: u32, cost_ns: u64) {
        for _ in 0..count {
            self.run(cost_ns);
        }
    }

    /// The finished trace.
    pub fn trace(self) -> Trace {
        self.trace.check().expect("the script is lawful");
        self.trace
    }
}

fn storage(bytes: u64) -> Storage {
    Storage { bytes, class: Class::Activation, locked: None }
}

impl Line<'_> {
    fn access(self, storage: u32, mode: AccessMode) -> Self {
        self.operator.accesses.push(Access { storage: StorageId(storage), mode });
        self
    }

    pub fn reads(self, storage: u32) -> Self {
        self.access(storage, AccessMode::Read)
    }

    pub fn writes(self, storage: u32) -> Self {
        self.access(storage, AccessMode::Write)
    }

    pub fn overwrites(self, storage: u32) -> Self {
        self.access(storage, AccessMode::Overwrite)
    }

    pub fn touches(self, storage: u32) -> Self {
        self.access(storage, AccessMode::SideEffect)
    }

    /// Creates the next storage; storages are numbered in this order.
    pub fn creates(self, expected: u32) -> Self {
        self.creates_bytes(expected, BYTES)
    }

    pub fn creates_bytes(self, expected: u32, bytes: u64) -> Self {
        assert_eq!(self.storages.len(), expected as usize, "storages are numbered in order of creation");
        self.storages.push(storage(bytes));
        self.operator.creates.push(StorageId(expected));
        self
    }

    pub fn frees(self, storage: u32) -> Self {
        self.operator.frees.push(StorageId(storage));
        self
    }

    pub fn workspace(self, bytes: u64) -> Self {
        self.operator.workspace_bytes = bytes;
        self
    }

    pub fn named(self, name: &str) -> Self {
        self.operator.name = self.names.len() as u32;
        self.names.push(name.into());
        self
    }

    pub fn backward(self) -> Self {
        self.operator.phase = Phase::Backward;
        self
    }

    pub fn not_replayable(self) -> Self {
        self.operator.not_replayable = Some("scripted".into());
        self
    }
}
