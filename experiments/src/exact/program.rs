//! The program: a mixed-integer relaxation of the timeline, whose optimum no plan that fits can undercut.
//!
//! It decides what three formulations decide: keep/recompute is Checkmate's (Jain et al., *Checkmate: Breaking the Memory
//! Wall with Optimal Tensor Rematerialization*, MLSys 2020), keep/swap is AutoTM's (Hildebrand et al.,
//! *AutoTM*, ASPLOS 2020), and all three actions have POET's variables (Patil et al., *POET*, ICML 2022),
//! with the capacity of both copy channels added. The rows are ours: Checkmate's stages and its count of memory within one,
//! AutoTM's synchronous moves and POET's energy are not in it.
//!
//! # What is counted where
//!
//! Some operators that keep-all would run over the budget are *cuts*; between two cuts lies a segment. The columns are,
//! for a window w, a cut k that it spans, an operator p, a segment σ and a version u:
//!
//! - `swap[w]`, `recompute[w]`: the plan's action;
//! - `away[w,k]`, `dropped[w,k]`: the storage is offloaded, or dropped, while operator k runs;
//! - `rerun[p,σ]`: p is rerun in the segment at least once;
//! - `beside[u,k]`: a dead version is materialised beside its storage while operator k runs;
//! - `delay[k]`: how much later than in keep-all operator k starts.
//!
//! The rows say what every run of the timeline obeys: at each cut, the bytes that are away or dropped, less those
//! materialised beside, cover what keep-all would have over the budget; what is dropped at one cut and not at the next
//! was rerun in between; a rerun had each input there, which is to say not dropped at the cut before, or beside it, or
//! rerun too; copies of storages that are away at a cut went through the offload channel before it and will go through
//! the prefetch channel after it, within the time that there is; and the delay grows by each rerun, each offload's
//! contention, and whatever the channels make compute wait.
//!
//! # What is left out, so that this is a relaxation
//!
//! Bytes are counted at cuts alone, and not inside reruns. A second rerun of an operator in one segment is free, and so
//! is a second prefetch of a storage. What the timeline decides by rules of its own (what it retains, which prefetch
//! goes first) the program is free to choose. So its optimum is a lower bound on the makespan of any plan that the
//! timeline accepts, whatever the cuts are: fewer of them make the bound looser, never wrong. It relies on two of the
//! timeline's habits: a swapped storage is offloaded once, at its window's start; and a version stands beside its storage
//! while an operator runs only where the storage holds another one.
//!
//! With keep and recompute alone and a cut at every operator it usually is the optimum: what it then leaves out is the
//! bytes that reruns take for themselves. With swaps it usually is not, but close: a copy also waits for the copy before
//! it and for its window to begin, of which the rows know only sums.

use std::collections::HashMap;

use plimsoll_runtime::lineage::{VersionId, Window, WindowId};
use plimsoll_runtime::trace::OperatorId;
use plimsoll_runtime::{Action, Plan, Problem};
use serde::Serialize;

use crate::highs::{Column, Model};

/// A term of a row.
type Term = (Column, f64);

/// An operator at which bytes are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Its index.
    pub operator: usize,
    /// What keep-all would have over the budget there.
    pub deficit_bytes: u64,
}

/// The operators at which keep-all exceeds the budget; where they are more than `cuts_max`, the worst of each of
/// `cuts_max` stretches of them.
pub fn choose_cuts(problem: &Problem<'_>, cuts_max: usize) -> Vec<Cut> {
    let operators = &problem.lineage.keep_all_bytes()[..problem.trace.operators.len()];
    let over = operators.iter().enumerate().filter(|(_, bytes)| **bytes > problem.budget_bytes);
    let over: Vec<Cut> =
        over.map(|(operator, bytes)| Cut { operator, deficit_bytes: bytes - problem.budget_bytes }).collect();
    let stretch = over.len().div_ceil(cuts_max.max(1)).max(1);
    over.chunks(stretch).filter_map(|cuts| cuts.iter().copied().max_by_key(|cut| cut.deficit_bytes)).collect()
}

/// How large a program is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Size {
    /// Operators at which bytes are counted.
    pub cuts: usize,
    /// Columns.
    pub columns: usize,
    /// Rows.
    pub rows: usize,
}

/// What stands for one window.
#[derive(Clone, Debug, Default)]
struct WindowColumns {
    swap: Option<Column>,
    recompute: Option<Column>,
    /// First cut that it spans.
    first_cut: usize,
    /// Per cut that it spans.
    away: Vec<Column>,
    dropped: Vec<Column>,
}

/// The program, and how its columns are read.
pub struct Program {
    /// What HiGHS solves.
    pub model: Model,
    windows: Vec<WindowColumns>,
    cuts: usize,
    keep_all_ns: u64,
    unit_ns: f64,
}

impl Program {
    /// The program of `problem` with bytes counted at `cuts`.
    pub fn new(problem: &Problem<'_>, cuts: &[Cut]) -> Self {
        Builder::new(problem, cuts).build()
    }

    /// How large it is.
    pub fn size(&self) -> Size {
        Size { cuts: self.cuts, columns: self.model.columns(), rows: self.model.rows() }
    }

    /// Columns for the actions of `window`: swap and recompute, each where it is possible.
    pub fn actions(&self, window: WindowId) -> [Option<Column>; 2] {
        let columns = &self.windows[window.index()];
        [columns.swap, columns.recompute]
    }

    /// Makespan, in nanoseconds, that an objective bounded by `bound` stands for, rounded down by the tolerance to which
    /// HiGHS proves it and up to the next nanosecond: makespans are whole.
    pub fn makespan_ns(&self, bound: f64) -> u64 {
        if bound <= 0.0 {
            return self.keep_all_ns;
        }
        let delay_ns = bound * self.unit_ns;
        self.keep_all_ns + (delay_ns - 1e-6 * delay_ns - 1e-2 * self.unit_ns).ceil().max(0.0) as u64
    }

    /// The plan that a solution stands for, actions above one half being taken: Checkmate's two-phase rounding. It may
    /// not fit, since the program is a relaxation.
    pub fn plan(&self, solution: &[f64]) -> Plan {
        let mut plan = Plan::keep_all(self.windows.len());
        for (id, columns) in (0..).map(WindowId).zip(&self.windows) {
            let value = |column: Option<Column>| column.map_or(0.0, |column| solution[column.index()]);
            let (swap, recompute) = (value(columns.swap), value(columns.recompute));
            if swap.max(recompute) >= 0.5 {
                plan.set(id, if swap > recompute { Action::Swap } else { Action::Recompute });
            }
        }
        plan
    }
}

struct Builder<'a> {
    problem: &'a Problem<'a>,
    cuts: &'a [Cut],
    model: Model,
    windows: Vec<WindowColumns>,
    reruns: HashMap<(OperatorId, usize), Column>,
    /// Reruns whose inputs have yet to be seen to.
    unsettled: Vec<(OperatorId, usize, Column)>,
    beside: HashMap<(VersionId, usize), Column>,
    /// Per version: its window that spans each cut, where that may be recomputed.
    dropped_at: HashMap<(VersionId, usize), Column>,
    /// Per cut, and for the iteration's end: how late it is. Empty where nothing can be swapped.
    delays: Vec<Column>,
    unit_ns: f64,
    unit_bytes: f64,
}

impl<'a> Builder<'a> {
    fn new(problem: &'a Problem<'a>, cuts: &'a [Cut]) -> Self {
        let lineage = problem.lineage;
        Builder {
            problem,
            cuts,
            model: Model::default(),
            windows: vec![WindowColumns::default(); lineage.windows().len()],
            reruns: HashMap::new(),
            unsettled: Vec::new(),
            beside: HashMap::new(),
            dropped_at: HashMap::new(),
            delays: Vec::new(),
            unit_ns: (lineage.keep_all_makespan_ns() as f64 / 1e5).max(1.0),
            unit_bytes: problem.trace.storages.iter().map(|storage| storage.bytes).max().unwrap_or(1).max(1) as f64,
        }
    }

    fn build(mut self) -> Program {
        if self.problem.actions.swap {
            let last = self.cuts.len();
            self.delays = (0..=last).map(|cut| self.model.continuous(f64::from(u8::from(cut == last)))).collect();
        }
        self.add_windows();
        self.add_restores();
        self.settle_reruns();
        self.add_memory();
        if self.problem.actions.swap {
            self.add_delays();
            self.add_channels();
        }
        Program {
            model: self.model,
            windows: self.windows,
            cuts: self.cuts.len(),
            keep_all_ns: self.problem.lineage.keep_all_makespan_ns(),
            unit_ns: self.unit_ns,
        }
    }

    fn window(&self, id: usize) -> Window {
        self.problem.lineage.windows()[id]
    }

    fn bytes(&self, id: usize) -> u64 {
        self.problem.trace.storages[self.window(id).storage.index()].bytes
    }

    /// The segment that operator index `index` lies in: behind so many cuts.
    fn segment(&self, index: usize) -> usize {
        self.cuts.partition_point(|cut| cut.operator < index)
    }

    fn add_windows(&mut self) {
        let actions = self.problem.actions;
        for id in 0..self.windows.len() {
            let window = self.window(id);
            let (first, last) = (self.segment(window.start as usize), self.segment(window.end as usize));
            if first == last {
                continue;
            }
            let mut columns = WindowColumns { first_cut: first, ..WindowColumns::default() };
            if actions.swap {
                let (action, at_cuts) = self.action_columns(last - first);
                (columns.swap, columns.away) = (Some(action), at_cuts);
            }
            if actions.recompute && window.recomputable {
                let (action, at_cuts) = self.action_columns(last - first);
                (columns.recompute, columns.dropped) = (Some(action), at_cuts);
                for (offset, &column) in columns.dropped.iter().enumerate() {
                    self.dropped_at.insert((window.version, first + offset), column);
                }
            }
            if let (Some(swap), Some(recompute)) = (columns.swap, columns.recompute) {
                self.model.at_least(-1.0, [(swap, -1.0), (recompute, -1.0)]);
            }
            self.windows[id] = columns;
        }
    }

    /// A column for an action, and one for each cut at which it may have effect: the same, where there is one cut.
    fn action_columns(&mut self, cuts: usize) -> (Column, Vec<Column>) {
        let action = self.model.binary(0.0);
        if cuts == 1 {
            return (action, vec![action]);
        }
        let at_cuts: Vec<Column> = (0..cuts).map(|_| self.model.binary(0.0)).collect();
        for &column in &at_cuts {
            self.model.at_least(0.0, [(action, 1.0), (column, -1.0)]);
        }
        (action, at_cuts)
    }

    /// What is dropped at one cut and not at the next, or used before it, was rerun in between.
    fn add_restores(&mut self) {
        for id in 0..self.windows.len() {
            let (window, dropped) = (self.window(id), self.windows[id].dropped.clone());
            let Some(producer) = self.problem.lineage.version(window.version).producer else { continue };
            for (offset, &column) in dropped.iter().enumerate() {
                let next = dropped.get(offset + 1).copied();
                if next.is_none() && !window.used_again {
                    continue;
                }
                let rerun = self.rerun(producer, self.windows[id].first_cut + offset + 1);
                let still = next.map(|next| (next, 1.0));
                self.model.at_least(0.0, [(rerun, 1.0), (column, -1.0)].into_iter().chain(still));
            }
        }
    }

    fn rerun(&mut self, operator: OperatorId, segment: usize) -> Column {
        if let Some(&column) = self.reruns.get(&(operator, segment)) {
            return column;
        }
        let cost = self.problem.trace.operators[operator.index()].cost_ns as f64 / self.unit_ns;
        let column = self.model.binary(if self.delays.is_empty() { cost } else { 0.0 });
        self.reruns.insert((operator, segment), column);
        self.unsettled.push((operator, segment, column));
        column
    }

    /// The inputs of reruns are there, or are rerun as well; and so on back in time.
    fn settle_reruns(&mut self) {
        let lineage = self.problem.lineage;
        while let Some((operator, segment, rerun)) = self.unsettled.pop() {
            let Some(cut) = segment.checked_sub(1) else { continue };
            let index = self.cuts[cut].operator;
            for &input in lineage.replay_inputs(operator) {
                let version = *lineage.version(input);
                let Some(producer) = version.producer.filter(|producer| producer.index() < index) else { continue };
                if version.until as usize <= index {
                    // Dead since then: it stands beside its storage, or is rerun.
                    let beside = self.beside(input, cut);
                    let again = self.rerun(producer, segment);
                    let there = beside.map(|column| (column, 1.0));
                    self.model.at_least(0.0, [(again, 1.0), (rerun, -1.0)].into_iter().chain(there));
                } else if let Some(&dropped) = self.dropped_at.get(&(input, cut)) {
                    let again = self.rerun(producer, segment);
                    self.model.at_least(-1.0, [(again, 1.0), (rerun, -1.0), (dropped, -1.0)]);
                }
            }
        }
    }

    /// Whether a version stands beside its storage at a cut; none at cuts at which it still is what its storage holds.
    fn beside(&mut self, id: VersionId, cut: usize) -> Option<Column> {
        let version = *self.problem.lineage.version(id);
        if self.cuts[cut].operator <= version.until as usize {
            return None;
        }
        if let Some(&column) = self.beside.get(&(id, cut)) {
            return Some(column);
        }
        let producer = version.producer.expect("only versions that can be rebuilt are materialised beside");
        // From this cut back to the first one after its death, each staying or being rerun.
        let mut back = cut;
        let column = self.model.binary(0.0);
        let mut at_cut = column;
        loop {
            self.beside.insert((id, back), at_cut);
            let again = self.rerun(producer, back);
            let before = back.checked_sub(1).filter(|&before| self.cuts[before].operator > version.until as usize);
            let known = before.and_then(|before| self.beside.get(&(id, before)).copied());
            let earlier = before.map(|_| known.unwrap_or_else(|| self.model.binary(0.0)));
            let stays = earlier.map(|column| (column, 1.0));
            self.model.at_least(0.0, [(again, 1.0), (at_cut, -1.0)].into_iter().chain(stays));
            match (earlier, known) {
                (Some(earlier), None) => (back, at_cut) = (back - 1, earlier),
                _ => return Some(column),
            }
        }
    }

    /// At each cut, what is gone covers the deficit and what is materialised beside.
    fn add_memory(&mut self) {
        let mut rows: Vec<Vec<Term>> = vec![Vec::new(); self.cuts.len()];
        for (id, columns) in self.windows.iter().enumerate() {
            let share = self.bytes(id) as f64 / self.unit_bytes;
            for gone in [&columns.away, &columns.dropped] {
                for (offset, &column) in gone.iter().enumerate() {
                    rows[columns.first_cut + offset].push((column, share));
                }
            }
        }
        for (&(version, cut), &column) in &self.beside {
            let storage = self.problem.lineage.version(version).storage;
            rows[cut].push((column, -(self.problem.trace.storages[storage.index()].bytes as f64) / self.unit_bytes));
        }
        for (cut, row) in self.cuts.iter().zip(rows) {
            self.model.at_least(cut.deficit_bytes as f64 / self.unit_bytes, row);
        }
    }

    /// Delays grow by reruns and by what copies cost compute. Prefetches take their share somewhere before the end.
    fn add_delays(&mut self) {
        let last = self.cuts.len();
        let tiers = self.problem.tiers;
        let mut rows: Vec<Vec<Term>> = vec![Vec::new(); last + 1];
        for (&(operator, segment), &column) in &self.reruns {
            let cost = self.problem.trace.operators[operator.index()].cost_ns as f64;
            rows[segment].push((column, -cost / self.unit_ns));
        }
        let mut prefetches: Vec<Term> = Vec::new();
        for (id, columns) in self.windows.iter().enumerate() {
            let (window, lost_ns) = (self.window(id), tiers.least_contention_ns(self.bytes(id)) as f64);
            if let Some(swap) = columns.swap.filter(|_| lost_ns > 0.0) {
                rows[self.segment(window.start as usize)].push((swap, -lost_ns / self.unit_ns));
                if window.used_again {
                    prefetches.push((swap, -lost_ns / self.unit_ns));
                }
            }
        }
        let waits: Vec<Column> = match prefetches.is_empty() {
            true => Vec::new(),
            false => rows.iter().map(|_| self.model.continuous(0.0)).collect(),
        };
        for (segment, mut row) in rows.into_iter().enumerate() {
            row.push((self.delays[segment], 1.0));
            row.extend(segment.checked_sub(1).map(|before| (self.delays[before], -1.0)));
            row.extend(waits.get(segment).map(|&wait| (wait, -1.0)));
            self.model.at_least(0.0, row);
        }
        // Prefetches and waiting for copies may share time, as far as the program knows.
        self.model.at_least(0.0, waits.into_iter().map(|wait| (wait, 1.0)).chain(prefetches));
    }

    /// Both channels copy what has to be away at a cut within the time before it, and after it.
    fn add_channels(&mut self) {
        for cut in 0..self.cuts.len() {
            let mut back = 1;
            while back <= cut {
                self.add_offloads(cut, Some(cut - back));
                back *= 2;
            }
            self.add_offloads(cut, None);
            let mut ahead = 1;
            while cut + ahead < self.cuts.len() {
                self.add_prefetches(cut, cut + ahead);
                ahead *= 2;
            }
            self.add_prefetches(cut, self.cuts.len());
        }
    }

    /// Windows that are away at a cut.
    fn away_at(&self, cut: usize) -> impl Iterator<Item = (usize, Column)> + '_ {
        self.windows.iter().enumerate().filter_map(move |(id, columns)| {
            let offset = cut.checked_sub(columns.first_cut)?;
            columns.away.get(offset).map(|&column| (id, column))
        })
    }

    /// When operator `index` has ended in keep-all.
    fn ended_ns(&self, index: usize) -> u64 {
        self.problem.lineage.start_ns(index) + self.problem.trace.operators[index].cost_ns
    }

    /// What went away after the cut `from`, or since the start, and is away at `cut`, was offloaded in between.
    fn add_offloads(&mut self, cut: usize, from: Option<usize>) {
        let after = from.map_or(0, |from| self.cuts[from].operator + 1);
        let mut row: Vec<Term> = Vec::new();
        let mut first = usize::MAX;
        for (id, column) in self.away_at(cut) {
            let start = self.window(id).start as usize;
            if start >= after {
                let copy_ns = self.problem.tiers.least_offload_ns(self.bytes(id)) as f64;
                row.push((column, -copy_ns / self.unit_ns));
                first = first.min(start);
            }
        }
        if row.is_empty() {
            return;
        }
        let lineage = self.problem.lineage;
        let began_ns = from.map_or_else(|| lineage.start_ns(first), |from| self.ended_ns(self.cuts[from].operator));
        let time_ns = lineage.start_ns(self.cuts[cut].operator) as f64 - began_ns as f64;
        row.push((self.delays[cut], 1.0));
        row.extend(from.map(|from| (self.delays[from], -1.0)));
        self.model.at_least(-time_ns / self.unit_ns, row);
    }

    /// What is away at `cut` and used by the cut `until`, or by the end, is prefetched in between.
    fn add_prefetches(&mut self, cut: usize, until: usize) {
        let operators = self.problem.trace.operators.len();
        let used_by = self.cuts.get(until).map_or(operators, |cut| cut.operator);
        let mut row: Vec<Term> = Vec::new();
        for (id, column) in self.away_at(cut) {
            let window = self.window(id);
            if window.used_again && window.end as usize <= used_by {
                let copy_ns = self.problem.tiers.least_prefetch_ns(self.bytes(id)) as f64;
                row.push((column, -copy_ns / self.unit_ns));
            }
        }
        if row.is_empty() {
            return;
        }
        let time_ns = self.problem.lineage.start_ns(used_by) as f64 - self.ended_ns(self.cuts[cut].operator) as f64;
        row.push((self.delays[until], 1.0));
        row.push((self.delays[cut], -1.0));
        self.model.at_least(-time_ns / self.unit_ns, row);
    }
}
