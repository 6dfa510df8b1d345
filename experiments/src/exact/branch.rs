//! Branch and bound over the actions of windows: the program bounds, the timeline judges.
//!
//! Best bound first (Land and Doig, *An Automatic Method of Solving Discrete Programming Problems*, Econometrica 1960).
//! At each node the program's linear relaxation, with some windows' actions fixed, bounds every plan that has those
//! actions; its rounding is tried on the timeline. Where few plans are left below a node, the timeline tries them all, and what it
//! says is final. So when no node is left, the best plan is proven, whatever the program leaves out.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use plimsoll_runtime::lineage::WindowId;
use plimsoll_runtime::timeline::CHANGES_MAX;
use plimsoll_runtime::{Action, Plan, Prediction, Problem, Timeline};

use super::program::Program;
use crate::highs::{Answer, Highs, HighsError, Solver};

/// The best plan that fits, so far.
pub struct Incumbent<'a> {
    problem: Problem<'a>,
    timeline: Timeline<'a>,
    /// The plan that the timeline predicts changes of.
    base: Plan,
    /// How the plan at hand differs from it.
    changes: Vec<(WindowId, Action)>,
    /// The least bytes over the budget, then the least makespan.
    pub plan: Plan,
    /// What the timeline says of it.
    pub prediction: Prediction,
}

impl<'a> Incumbent<'a> {
    /// Begins with plain keep-all.
    pub fn new(problem: Problem<'a>) -> Self {
        let mut timeline = Timeline::new(problem.trace, problem.lineage, problem.tiers);
        let plan = Plan::keep_all(problem.lineage.windows().len());
        let prediction = timeline.rebase(&plan, problem.budget_bytes);
        Incumbent { problem, timeline, base: plan.clone(), changes: Vec::new(), plan, prediction }
    }

    /// Predicts `plan` as it differs from the one offered before, and takes it if it is better.
    pub fn offer(&mut self, plan: &Plan) {
        let windows = (0..).map(WindowId).zip(self.base.actions().iter().zip(plan.actions()));
        self.changes.clear();
        self.changes.extend(windows.filter(|(_, (was, is))| was != is).map(|(window, (_, &is))| (window, is)));
        let prediction = if self.changes.len() <= CHANGES_MAX {
            self.timeline.predict_changes(&self.changes)
        } else {
            self.base.clone_from(plan);
            self.timeline.rebase(plan, self.problem.budget_bytes)
        };
        if prediction.rank() < self.prediction.rank() {
            self.plan.clone_from(plan);
            self.prediction = prediction;
        }
    }

    /// Makespan of the best plan that fits; none while none does.
    pub fn makespan_ns(&self) -> Option<u64> {
        self.prediction.fits().then_some(self.prediction.makespan_ns)
    }

    fn beats(&self, bound_ns: u64) -> bool {
        self.makespan_ns().is_some_and(|best| best <= bound_ns)
    }
}

/// Some windows' actions, and a bound on every plan that has them.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Node {
    bound_ns: Reverse<u64>,
    depth: usize,
    /// Per window: the action, or none where that is open. Encoded so that nodes have an order.
    fixed: Vec<u8>,
}

const OPEN: u8 = u8::MAX;

/// Plans below a node up to which all of them are tried: the timeline judges faster than HiGHS bounds.
const TRIED_MAX: u64 = 256;

/// The tree.
pub struct Tree<'a, 'h> {
    problem: Problem<'a>,
    program: &'a Program,
    solver: Solver<'h>,
    /// What the solver's bounds stand for.
    loaded: Vec<u8>,
    open: BinaryHeap<Node>,
    /// Nodes solved.
    pub nodes: u64,
}

impl<'a, 'h> Tree<'a, 'h> {
    /// The tree's root. Windows that nothing may evict are kept.
    pub fn new(highs: &'h Highs, problem: Problem<'a>, program: &'a Program) -> Result<Self, HighsError> {
        let windows = (0..problem.lineage.windows().len() as u32).map(WindowId);
        let fixed: Vec<u8> = windows.map(|id| if problem.may_evict(id) { OPEN } else { Action::Keep as u8 }).collect();
        let loaded = vec![OPEN; fixed.len()];
        let root = Node { bound_ns: Reverse(problem.lineage.keep_all_makespan_ns()), depth: 0, fixed };
        let solver = Solver::new(highs, &program.model, false)?;
        Ok(Tree { problem, program, solver, loaded, open: BinaryHeap::from([root]), nodes: 0 })
    }

    /// A proven bound on what is left open; none where nothing is.
    pub fn bound_ns(&self) -> Option<u64> {
        self.open.peek().map(|node| node.bound_ns.0)
    }

    /// Solves nodes until none is left, or the deadline, or `watch`, which hears the bound so far, says no.
    pub fn run(
        &mut self,
        incumbent: &mut Incumbent<'_>,
        deadline: Instant,
        watch: &(dyn Fn(Option<u64>, u64) -> bool + Sync),
    ) -> Result<(), HighsError> {
        while let Some(node) = self.open.pop() {
            if incumbent.beats(node.bound_ns.0) {
                // Every other node has no better a bound.
                self.open.clear();
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || !watch(incumbent.makespan_ns(), node.bound_ns.0) {
                self.open.push(node);
                return Ok(());
            }
            self.nodes += 1;
            self.expand(node, incumbent, left)?;
        }
        Ok(())
    }

    fn expand(&mut self, node: Node, incumbent: &mut Incumbent<'_>, left: Duration) -> Result<(), HighsError> {
        if self.plans_below(&node.fixed) <= TRIED_MAX {
            self.try_all_below(node.fixed, incumbent);
            return Ok(());
        }
        self.load(&node.fixed)?;
        let (bound, solution) = match self.solver.solve(left, &|_| true)? {
            Answer::Infeasible => return Ok(()),
            Answer::Bounded { bound, solution: Some(solution), .. } if bound.is_finite() => (bound, solution),
            Answer::Bounded { .. } => {
                // Not solved within the time: the node stays as it was.
                self.open.push(node);
                return Ok(());
            }
        };
        let bound_ns = self.program.makespan_ns(bound).max(node.bound_ns.0);
        incumbent.offer(&complete(&node.fixed, Some(&self.program.plan(&solution))));
        if incumbent.beats(bound_ns) {
            return Ok(());
        }
        let window = self.branching_window(&node.fixed, &solution);
        for action in Action::ALL {
            if self.allows(window, action) {
                let mut fixed = node.fixed.clone();
                fixed[window] = action as u8;
                self.open.push(Node { bound_ns: Reverse(bound_ns), depth: node.depth + 1, fixed });
            }
        }
        Ok(())
    }

    fn open_windows(fixed: &[u8]) -> impl Iterator<Item = usize> + '_ {
        (0..fixed.len()).filter(|&window| fixed[window] == OPEN)
    }

    fn plans_below(&self, fixed: &[u8]) -> u64 {
        let actions = |window| Action::ALL.into_iter().filter(|&action| self.allows(window, action)).count() as u64;
        Self::open_windows(fixed).map(actions).fold(1, u64::saturating_mul)
    }

    fn try_all_below(&self, mut fixed: Vec<u8>, incumbent: &mut Incumbent<'_>) {
        let Some(window) = Self::open_windows(&fixed).next() else { return incumbent.offer(&complete(&fixed, None)) };
        for action in Action::ALL {
            if self.allows(window, action) {
                fixed[window] = action as u8;
                self.try_all_below(fixed.clone(), incumbent);
            }
        }
    }

    fn allows(&self, window: usize, action: Action) -> bool {
        self.problem.allows(WindowId(window as u32), action)
    }

    /// Gives the solver the bounds that `fixed` stands for.
    fn load(&mut self, fixed: &[u8]) -> Result<(), HighsError> {
        for (window, &action) in fixed.iter().enumerate() {
            if self.loaded[window] == action {
                continue;
            }
            self.loaded[window] = action;
            let columns = self.program.actions(WindowId(window as u32));
            for (column, of) in columns.into_iter().zip(Action::EVICTIONS) {
                if let Some(column) = column {
                    let (lower, upper) = match action {
                        OPEN => (0.0, 1.0),
                        _ if action == of as u8 => (1.0, 1.0),
                        _ => (0.0, 0.0),
                    };
                    self.solver.bound(column, lower, upper)?;
                }
            }
        }
        Ok(())
    }

    /// The open window whose actions the relaxation splits most evenly; where it splits none, the one that it evicts, or
    /// the largest.
    fn branching_window(&self, fixed: &[u8], solution: &[f64]) -> usize {
        let windows = self.problem.lineage.windows();
        let urgency = |window: usize| {
            let columns = self.program.actions(WindowId(window as u32)).into_iter().flatten();
            let values = columns.map(|column| solution[column.index()]);
            let (split, evicted) = values
                .fold((0.0f64, 0.0f64), |(split, evicted), value| (split.max(value.min(1.0 - value)), evicted + value));
            let bytes = self.problem.trace.storages[windows[window].storage.index()].bytes;
            ((split * 1e6) as u64, (evicted * 1e3) as u64, bytes)
        };
        Self::open_windows(fixed).max_by_key(|&window| urgency(window)).expect("the node has an open window")
    }
}

/// The plan with the actions that are fixed, and those of `open`, or none, elsewhere.
fn complete(fixed: &[u8], open: Option<&Plan>) -> Plan {
    let mut plan = open.cloned().unwrap_or_else(|| Plan::keep_all(fixed.len()));
    for (id, &action) in (0..).map(WindowId).zip(fixed) {
        if let Some(&action) = Action::ALL.get(usize::from(action)) {
            plan.set(id, action);
        }
    }
    plan
}
