//! A history of device memory: which blocks lived when, and when each was accessed.
//!
//! Time is counted in ticks, one for each moment at which anything changes, because many of them can share a
//! nanosecond. What a block is for is a kind: a class of the trace, or what only some sources tell apart.

use plimsoll_runtime::Trace;
use plimsoll_runtime::trace::{Class, OperatorId, StorageId};
use serde::Serialize;

/// What bytes are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// [`Class::Parameter`].
    Parameter,
    /// [`Class::Gradient`].
    Gradient,
    /// [`Class::OptimizerState`].
    OptimizerState,
    /// [`Class::Activation`].
    Activation,
    /// [`Class::Input`].
    Input,
    /// [`Class::Temporary`].
    Temporary,
    /// What an operator allocates and frees before it returns.
    Workspace,
    /// The source does not say, or no operator ever touches them.
    Unknown,
}

impl Kind {
    /// All kinds, in the order in which they are shown.
    pub const ALL: [Kind; 8] = [
        Kind::Parameter,
        Kind::Gradient,
        Kind::OptimizerState,
        Kind::Input,
        Kind::Activation,
        Kind::Temporary,
        Kind::Workspace,
        Kind::Unknown,
    ];

    /// Its place in [`Kind::ALL`].
    pub fn place(self) -> usize {
        Kind::ALL.iter().position(|&kind| kind == self).expect("the list is complete")
    }

    /// Its name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Parameter => "parameters",
            Kind::Gradient => "gradients",
            Kind::OptimizerState => "optimizer state",
            Kind::Activation => "activations",
            Kind::Input => "inputs",
            Kind::Temporary => "temporaries",
            Kind::Workspace => "workspace",
            Kind::Unknown => "unknown",
        }
    }
}

impl From<Class> for Kind {
    fn from(class: Class) -> Self {
        match class {
            Class::Parameter => Kind::Parameter,
            Class::Gradient => Kind::Gradient,
            Class::OptimizerState => Kind::OptimizerState,
            Class::Activation => Kind::Activation,
            Class::Input => Kind::Input,
            Class::Temporary => Kind::Temporary,
        }
    }
}

/// One block of device memory.
#[derive(Clone, Debug)]
pub struct Block {
    /// Its size.
    pub bytes: u64,
    /// What it is for.
    pub kind: Kind,
    /// What it goes by: the number of its storage and the operator that made it.
    pub label: String,
    /// The first tick at which it is there; none where it was there before.
    pub born: Option<usize>,
    /// The first tick at which it is gone; none where it survives.
    pub died: Option<usize>,
    /// Ticks at which accesses begin and end, in order. Its making is the first access.
    pub accesses: Vec<(usize, usize)>,
}

/// What changes over a history.
#[derive(Clone, Debug)]
pub struct History {
    /// What it is a history of, in words.
    pub subject: String,
    /// Time of each tick, in nanoseconds from the start, or counted in events where no times are known.
    pub ticks: Vec<u64>,
    /// Whether `ticks` are nanoseconds.
    pub timed: bool,
    /// The blocks, in the order of their making.
    pub blocks: Vec<Block>,
    /// Whether accesses are known, beside lives.
    pub has_accesses: bool,
}

impl History {
    /// The history of a recorded iteration, with nothing evicted.
    pub fn of_trace(trace: &Trace) -> Self {
        let timed = trace.operators.iter().any(|operator| operator.cost_ns > 0);
        let mut ticks = Vec::with_capacity(2 * trace.operators.len() + 1);
        let mut now_ns = 0;
        for operator in &trace.operators {
            now_ns += operator.gap_ns;
            ticks.push(now_ns);
            now_ns += operator.cost_ns;
            ticks.push(now_ns);
        }
        ticks.push(now_ns + trace.tail_ns);
        if !timed {
            ticks = (0..ticks.len() as u64).collect();
        }
        History {
            subject: format!("{} (family {}) on {}", trace.workload, trace.family, trace.device),
            ticks,
            timed,
            blocks: blocks(trace),
            has_accesses: true,
        }
    }

    /// Time of a tick, which may be the end.
    pub fn at(&self, tick: usize) -> u64 {
        self.ticks[tick.min(self.ticks.len() - 1)]
    }

    /// Time from start to end.
    pub fn length(&self) -> u64 {
        self.at(self.ticks.len())
    }

    /// First tick of a block's life, and the first after it.
    pub fn life(&self, block: &Block) -> (usize, usize) {
        (block.born.unwrap_or(0), block.died.unwrap_or(self.ticks.len()))
    }

    /// Bytes of each kind at each tick, by kind's place in [`Kind::ALL`].
    pub fn bytes_by_kind(&self) -> Vec<[u64; Kind::ALL.len()]> {
        let mut changes = vec![[0i64; Kind::ALL.len()]; self.ticks.len() + 1];
        for block in &self.blocks {
            let kind = block.kind.place();
            let (born, died) = self.life(block);
            changes[born][kind] += block.bytes as i64;
            changes[died][kind] -= block.bytes as i64;
        }
        let mut now = [0i64; Kind::ALL.len()];
        let running = changes[..self.ticks.len()].iter().map(|change| {
            now.iter_mut().zip(change).for_each(|(now, change)| *now += change);
            now.map(|bytes| bytes as u64)
        });
        running.collect()
    }

    /// Most bytes of a kind at once.
    pub fn peak_bytes_of(&self, kind: Kind) -> u64 {
        self.bytes_by_kind().iter().map(|bytes| bytes[kind.place()]).max().unwrap_or(0)
    }
}

/// Operator `index` takes from tick 2 · `index` to the next.
fn blocks(trace: &Trace) -> Vec<Block> {
    let name = |index: usize| trace.operator_name(OperatorId(index as u32));
    let block = |storage: StorageId, label: String, born: Option<usize>| {
        let facts = &trace.storages[storage.index()];
        let accesses = born.map(|tick| (tick, tick + 1)).into_iter().collect();
        Block { bytes: facts.bytes, kind: facts.class.into(), label, born, died: None, accesses }
    };
    let mut made: Vec<Option<Block>> = vec![None; trace.storages.len()];
    for id in (0..trace.initial_storages).map(StorageId) {
        made[id.index()] = Some(block(id, format!("#{}", id.0), None));
    }
    let mut passing = Vec::new();
    for (index, operator) in trace.operators.iter().enumerate() {
        let (start, end) = (2 * index, 2 * index + 1);
        for access in &operator.accesses {
            made[access.storage.index()].as_mut().expect("used in its life").accesses.push((start, end));
        }
        for &storage in &operator.creates {
            let label = format!("#{} {}", storage.0, name(index));
            made[storage.index()] = Some(block(storage, label, Some(start)));
        }
        for &storage in &operator.frees {
            made[storage.index()].as_mut().expect("freed in its life").died = Some(end);
        }
        if operator.workspace_bytes > 0 {
            passing.push(Block {
                bytes: operator.workspace_bytes,
                kind: Kind::Workspace,
                label: format!("workspace of {}", name(index)),
                born: Some(start),
                died: Some(end),
                accesses: vec![(start, end)],
            });
        }
    }
    if trace.unseen_bytes > 0 {
        passing.push(Block {
            bytes: trace.unseen_bytes,
            kind: Kind::Unknown,
            label: "never touched".to_owned(),
            born: None,
            died: None,
            accesses: Vec::new(),
        });
    }
    // Empty storages take no memory.
    made.into_iter().flatten().chain(passing).filter(|block| block.bytes > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_of_what_is_saved_leaves_everything_else_out() {
        let block = |bytes, kind, born, died| {
            let label = String::new();
            Block { bytes, kind, label, born: Some(born), died, accesses: Vec::new() }
        };
        let history = History {
            subject: String::new(),
            ticks: (0..9).collect(),
            timed: false,
            blocks: vec![
                block(5, Kind::Activation, 0, Some(4)),
                block(100, Kind::Temporary, 0, None),
                block(3, Kind::Activation, 2, None),
                block(4, Kind::Activation, 4, None),
            ],
            has_accesses: false,
        };
        assert_eq!(history.peak_bytes_of(Kind::Activation), 8);
    }
}
