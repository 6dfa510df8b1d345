//! PyTorch execution traces: the JSON that `torch.profiler.ExecutionTraceObserver` writes.
//!
//! A user records one iteration, with the profiler's own trace beside it for the times:
//!
//! ```python
//! observer = torch.profiler.ExecutionTraceObserver().register_callback("execution.json")
//! with torch.profiler.profile(execution_trace_observer=observer) as profiler:
//!     train_step()
//! profiler.export_chrome_trace("kineto.json")
//! ```
//!
//! One operator of our trace is one outermost ATen operator, with all that it calls. Operators that only make views are
//! left out. What the format does not tell is concluded:
//!
//! - **Sizes.** A storage is as large as the farthest end of any tensor that is seen on it.
//! - **Lives.** Nothing is said of frees: a storage that an operator makes is freed after its last use, so gradients end
//!   with the optimizer's step. One that an operator uses and none has made was there before.
//! - **Identity.** A storage's number is used again once it is free. What an operator works on and has not been given is
//!   a new one. (A cast that autocast keeps from an earlier operator is taken for one as well.)
//! - **Workspace.** What an operator makes, does not return, and nobody uses later; all of it at once, at worst.
//! - **Classes and phases.** From who uses a storage: the autograd engine, a step of an optimizer, or neither.
//! - **Times** are not in the file. They come from the profiler's trace ([`Times`]), by record-function number.

mod lives;
mod schema;
mod times;

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::Value;

use crate::lineage::Lineage;
use crate::trace::{Phase, Trace};
use lives::Lives;
pub use times::Times;

/// Why a file is no execution trace that a trace can be made from.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// It is not the JSON that is expected.
    #[error("not {expected}: {error}")]
    Malformed {
        /// What is expected.
        expected: &'static str,
        /// What is wrong with it.
        error: serde_json::Error,
    },
    /// It holds no ATen operator.
    #[error("no ATen operator among its {nodes} nodes: was the observer started before the iteration?")]
    Empty {
        /// How many nodes it holds.
        nodes: usize,
    },
    /// The profiler's trace does not know all operators.
    #[error(
        "the times of {missing} of {operators} operators are missing, the first being {name} (record function {record})"
    )]
    Untimed {
        /// How many are missing.
        missing: usize,
        /// How many there are.
        operators: usize,
        /// Name of the first one.
        name: String,
        /// Its number.
        record: u64,
    },
    /// What was concluded contradicts itself.
    #[error("the execution trace contradicts itself: {0}")]
    Contradiction(String),
}

/// The file.
#[derive(Deserialize)]
struct File {
    nodes: Vec<Node>,
}

/// An operator, or what called it.
#[derive(Deserialize)]
struct Node {
    id: u64,
    name: String,
    /// The node that called it.
    ctrl_deps: u64,
    inputs: Values,
    outputs: Values,
    attrs: Vec<Attribute>,
}

#[derive(Deserialize)]
struct Values {
    values: Vec<Value>,
    #[serde(default)]
    shapes: Vec<Value>,
    #[serde(default)]
    strides: Vec<Value>,
}

#[derive(Deserialize)]
struct Attribute {
    name: String,
    value: Value,
}

impl Node {
    fn attribute(&self, name: &str) -> Option<&Value> {
        self.attrs.iter().find(|attribute| attribute.name == name).map(|attribute| &attribute.value)
    }

    fn text(&self, name: &str) -> &str {
        self.attribute(name).and_then(Value::as_str).unwrap_or("")
    }

    /// The number by which the profiler knows it: calls are numbered in the order in which they begin.
    fn record(&self) -> u64 {
        self.attribute("rf_id").and_then(Value::as_u64).unwrap_or(0)
    }

    fn schema(&self) -> &str {
        self.text("op_schema")
    }

    /// Whether it computes: an ATen operator, or a kernel that was compiled for this program.
    fn computes(&self) -> bool {
        !self.schema().is_empty() || self.is_compiled()
    }

    fn is_compiled(&self) -> bool {
        !self.text("kernel_backend").is_empty()
    }
}

/// An outermost operator, the nodes that it calls, and the part of the iteration that it belongs to.
struct Call<'a> {
    node: &'a Node,
    phase: Phase,
}

/// Nodes by who called them.
struct Tree<'a> {
    by_id: HashMap<u64, &'a Node>,
    children: HashMap<u64, Vec<&'a Node>>,
}

impl<'a> Tree<'a> {
    fn of(nodes: &'a [Node]) -> Self {
        let mut children: HashMap<u64, Vec<&Node>> = HashMap::new();
        for node in nodes.iter().filter(|node| node.ctrl_deps < node.id) {
            children.entry(node.ctrl_deps).or_default().push(node);
        }
        children.values_mut().for_each(|called| called.sort_by_key(|node| (node.record(), node.id)));
        Tree { by_id: nodes.iter().map(|node| (node.id, node)).collect(), children }
    }

    fn children(&self, node: &Node) -> &[&'a Node] {
        self.children.get(&node.id).map_or(&[], Vec::as_slice)
    }

    /// Who called `node`, from its caller outwards.
    fn callers(&self, node: &Node) -> impl Iterator<Item = &'a Node> {
        let caller = |node: &Node| self.by_id.get(&node.ctrl_deps).copied().filter(|caller| caller.id < node.id);
        std::iter::successors(caller(node), move |node| caller(node))
    }

    /// `node` and all that it calls, callers first.
    fn below(&self, node: &'a Node) -> Vec<&'a Node> {
        let mut found = vec![node];
        let mut next = 0;
        while next < found.len() {
            found.extend(self.children(found[next]));
            next += 1;
        }
        found
    }

    /// The outermost operators, in the order in which they begin.
    fn calls(&self, nodes: &'a [Node]) -> Vec<Call<'a>> {
        let mut calls = Vec::new();
        for node in nodes.iter().filter(|node| node.computes()) {
            let mut phase = Phase::Forward;
            let mut outermost = true;
            for caller in self.callers(node) {
                outermost &= !caller.computes();
                if caller.name.starts_with("autograd::engine::evaluate_function") {
                    phase = Phase::Backward;
                } else if caller.name.starts_with("Optimizer.") {
                    phase = Phase::Update;
                }
            }
            if outermost {
                calls.push(Call { node, phase });
            }
        }
        calls.sort_by_key(|call| (call.node.record(), call.node.id));
        calls
    }
}

/// Makes a trace of one iteration from the execution trace in `json`. Without `times` every operator takes no time.
pub fn read(json: &[u8], times: Option<&Times>, workload: &str, family: &str) -> Result<Trace, ImportError> {
    let expected = "an execution trace";
    let file: File = serde_json::from_slice(json).map_err(|error| ImportError::Malformed { expected, error })?;
    let tree = Tree::of(&file.nodes);
    let calls = tree.calls(&file.nodes);
    if calls.is_empty() {
        return Err(ImportError::Empty { nodes: file.nodes.len() });
    }
    let mut trace = Lives::of(&tree, &calls).trace(workload, family);
    if let Some(times) = times {
        let kept = trace.calls.iter().map(|&call| tree.below(calls[call].node));
        times.fill_in(&mut trace.trace, kept)?;
    }
    let mut trace = trace.trace;
    trace.check().map_err(ImportError::Contradiction)?;
    let lineage = Lineage::of(&trace);
    trace.makespan_ns = lineage.keep_all_makespan_ns();
    trace.peak_bytes = lineage.keep_all_peak_bytes();
    Ok(trace)
}
