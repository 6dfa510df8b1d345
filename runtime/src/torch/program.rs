//! A program that is known: its trace, what to do while it runs, and whether what runs now is it.
//!
//! Nothing here moves bytes. Where the program is another one, it says how.

mod checks;
mod known;
mod neighbours;
mod standing;
mod steps;

use std::collections::HashSet;

pub(crate) use self::known::{Known, Scheduled};
pub(crate) use self::neighbours::Follows;
use self::neighbours::Neighbours;
pub(super) use self::standing::put;
use self::standing::{Name, Standing, Uses};
use super::ladder::{Fit, Ladder, Rung};
use super::names::ProgramName;
use super::shim::Entry;
use crate::lineage::VersionId;
use crate::schedule::Instruction;
use crate::trace::{OperatorId, StorageId, Trace};

/// A program.
pub(crate) struct Program {
    /// What it does, at the sizes that there are plans for.
    pub(crate) ladder: Ladder,
    /// The trace's names for the dispatcher's, by the shim's numbers, as far as they have been looked up.
    names: Vec<Name>,
    /// Where it uses which storage.
    uses: Uses,
    /// Per storage: whether what made it may run again, so that bytes filled in past the dispatcher would be lost.
    may_be_rebuilt: Vec<bool>,
    standing: Standing,
    /// Per storage: whether it is there all the time and never used.
    is_unused: Vec<bool>,
    /// Those of these that the loop has let go of, or used after all.
    missed: Vec<StorageId>,
    /// Per storage: whether it is there all the time, by the same name, and could be away when the program ends.
    is_lasting: Vec<bool>,
    neighbours: Neighbours,
    progress: Progress,
    pub(crate) name: ProgramName,
}

/// How far an iteration has been a program, and how it has gone.
#[derive(Default)]
struct Progress {
    /// Whether all that has run so far is this program, or what has run since it was found again.
    matches: bool,
    /// Operators that have run.
    operator: usize,
    /// Instructions that were carried out, or left out.
    step: usize,
    /// Storages that a plan may evict, and of which only an operator of this iteration told which they are, or their end.
    found: Vec<(StorageId, Entry)>,
    /// Those of them of which their end told.
    ended: HashSet<StorageId>,
    /// Those of which it was told before the first one.
    told: Vec<StorageId>,
    /// Whether one of these is another.
    is_misled: bool,
    /// Where it was found again after other operators than its own: of each of its operators so far, which of those of the iteration it
    /// was.
    ran_as: Option<Vec<Option<usize>>>,
    /// Whether the iteration did otherwise with what is too small to be evicted.
    differs_in_small: bool,
    /// A storage that tells that the iteration is at other sizes than it seemed, if one has told just now.
    misfit: Option<StorageId>,
    /// Whether another was done until here than the plan has.
    is_off_plan: bool,
}

impl Program {
    pub(crate) fn new(rung: Rung) -> Self {
        let known = &rung.known;
        let storages = known.trace.storages.len();
        let mut may_be_rebuilt = vec![false; storages];
        for operator in known.trace.operators.iter().filter(|operator| operator.not_replayable.is_none()) {
            operator.creates.iter().for_each(|storage| may_be_rebuilt[storage.index()] = true);
        }
        let mut is_unused = vec![false; storages];
        is_unused[..known.trace.initial_storages as usize].fill(true);
        for operator in &known.trace.operators {
            let touched = operator.accesses.iter().map(|access| access.storage).chain(operator.frees.iter().copied());
            touched.for_each(|storage| is_unused[storage.index()] = false);
        }
        let mut is_lasting = vec![false; storages];
        for &window in known.lineage.windows_ending(known.trace.operators.len()) {
            let window = known.lineage.window(window);
            is_lasting[window.storage.index()] = window.used_again && window.storage.0 < known.trace.initial_storages;
        }
        let renamed = known.trace.carried.iter().flat_map(|(from, to)| [from, to]);
        renamed.for_each(|storage| is_lasting[storage.index()] = false);
        Program {
            uses: Uses::of(&known.trace),
            may_be_rebuilt,
            is_unused,
            missed: Vec::new(),
            is_lasting,
            neighbours: Neighbours::default(),
            progress: Progress::default(),
            name: ProgramName(rung.name),
            ladder: Ladder::new(rung),
            names: Vec::new(),
            standing: Standing::of(storages),
        }
    }

    /// Bytes that it has at most, at any of the sizes that there are plans for.
    pub(crate) fn most_bytes(&self) -> u64 {
        let rungs = self.ladder.rungs().iter();
        rungs.map(|rung| rung.known.lineage.keep_all_peak_bytes()).max().unwrap_or(0)
    }

    /// What it does, at the sizes that it has so far.
    fn trace(&self) -> &Trace {
        &self.ladder.rung().known.trace
    }

    /// The plan for those.
    pub(crate) fn scheduled(&self) -> &Scheduled {
        &self.ladder.rung().scheduled
    }

    fn steps(&self) -> &[(u32, Instruction)] {
        self.scheduled().schedule.steps()
    }

    fn initial(&self) -> usize {
        self.trace().initial_storages as usize
    }

    /// Says which storages the program knows by which names.
    pub(crate) fn bind(&mut self, bindings: impl IntoIterator<Item = (StorageId, Entry)>) {
        for (storage, entry) in bindings {
            self.standing.put(entry, storage);
        }
        self.hand_over(true);
    }

    /// Starts another iteration, within so many bytes.
    pub(crate) fn begin(&mut self, line_bytes: u64) {
        self.progress = Progress { matches: true, ..Progress::default() };
        self.ladder.begin(line_bytes);
    }

    /// Is told which storages that are there stand for initial ones, as far as it does not know that.
    pub(crate) fn tell(&mut self, names: impl Iterator<Item = (StorageId, Entry)>) {
        for (storage, entry) in names {
            if self.standing.entry(storage).is_none() && self.standing.storage(entry).is_none() {
                self.standing.put(entry, storage);
                self.progress.told.push(storage);
            }
        }
    }

    /// What it calls every storage of the trace that is there.
    pub(crate) fn entries(&self) -> &[Option<Entry>] {
        self.standing.entries()
    }

    /// Whether every initial storage that a schedule may touch is known before the first operator.
    pub(crate) fn is_bound(&self) -> bool {
        let storages = self.trace().storages[..self.initial()].iter();
        storages.zip(self.standing.entries()).all(|(storage, entry)| entry.is_some() || storage.locked.is_some())
    }

    /// Ends the iteration; `completed` says whether it was this program to its end. Storages that live on get the
    /// names that the next iteration knows them by.
    pub(crate) fn hand_over(&mut self, completed: bool) {
        let Program { ladder, standing, .. } = self;
        let trace = &*ladder.rung().known.trace;
        standing.hand_over(trace.initial_storages as usize, &trace.carried, completed);
        self.rule_out();
    }

    /// The program has let go of a storage of so many bytes.
    pub(crate) fn freed(&mut self, entry: Entry, bytes: u64) {
        match self.standing.storage(entry) {
            Some(storage) => self.miss(storage),
            None => self.find_by_end(entry, bytes),
        }
        self.standing.remove(entry);
    }

    /// What nobody knows, and goes where the trace has one go that was there before and that no operator uses, is that one: a gradient
    /// that is not added to, say.
    fn find_by_end(&mut self, entry: Entry, bytes: u64) {
        let Some(last) = self.progress.operator.checked_sub(1).filter(|_| self.progress.matches) else { return };
        let trace = &*self.ladder.rung().known.trace;
        let is_it = |storage: &StorageId| {
            let known = &trace.storages[storage.index()];
            storage.0 < trace.initial_storages
                && (known.bytes, known.locked.is_none()) == (bytes, true)
                && self.standing.entry(*storage).is_none()
                && !self.progress.ended.contains(storage)
        };
        let Some(storage) = trace.operators[last].frees.iter().copied().find(is_it) else { return };
        self.progress.ended.insert(storage);
        self.progress.found.push((storage, entry));
    }

    pub(crate) fn entry(&self, storage: StorageId) -> Option<Entry> {
        self.standing.entry(storage)
    }

    fn operator_name(&self, operator: usize) -> &str {
        self.trace().operator_name(OperatorId(operator as u32))
    }

    /// Whether all that has run so far is this program, or what has run since it was found again.
    pub(crate) fn matches(&self) -> bool {
        self.progress.matches
    }

    /// It is not this program that runs.
    pub(crate) fn rule_out(&mut self) {
        self.progress.matches = false;
    }

    /// Storages that a plan may evict, and of which only an operator of this iteration told which they are.
    pub(crate) fn found(&self) -> &[(StorageId, Entry)] {
        &self.progress.found
    }

    /// Whether it was told before the first operator that a storage is another than it is.
    pub(crate) fn is_misled(&self) -> bool {
        self.progress.is_misled
    }

    /// Whether it has come to its end.
    pub(crate) fn is_over(&self) -> bool {
        self.progress.operator == self.trace().operators.len()
    }

    /// Whether the iteration was this program from its beginning to its end.
    pub(crate) fn is_complete(&self) -> bool {
        self.is_over() && !self.has_gaps()
    }

    /// Whether it was found again in this iteration, after other operators than its own.
    pub(crate) fn has_gaps(&self) -> bool {
        self.progress.ran_as.is_some()
    }

    /// Which of the iteration's operators it was.
    pub(crate) fn ran_as(&self, operator: OperatorId) -> Option<usize> {
        match &self.progress.ran_as {
            Some(ran_as) => ran_as.get(operator.index()).copied().flatten(),
            None => (operator.index() < self.progress.operator).then(|| operator.index()),
        }
    }

    /// Whether the iteration had other bytes than were predicted, by some that are too small to be evicted.
    pub(crate) fn differs_in_small(&self) -> bool {
        self.progress.differs_in_small
    }

    /// Why an iteration that ends here is not this program.
    pub(crate) fn ends_early(&self) -> String {
        format!("the iteration ends before {}", self.place())
    }

    /// How far it has come, in words.
    pub(crate) fn place(&self) -> String {
        match self.is_over() {
            true => "after the last operator".to_owned(),
            false => format!("operator {} ({})", self.progress.operator, self.operator_name(self.progress.operator)),
        }
    }

    /// Whether its plan needs the recipe of the operator that comes next.
    pub(crate) fn wants_recipe(&self) -> bool {
        self.ladder.wants_recipe(self.progress.operator)
    }

    /// Whether its plan still fits where an iteration starts with so many bytes.
    pub(crate) fn fits_from(&self, start_bytes: u64, line_bytes: u64) -> bool {
        let surplus_bytes = start_bytes.saturating_sub(self.trace().start_bytes());
        let planned_bytes = self.scheduled().prediction.map_or(0, |prediction| prediction.peak_bytes);
        surplus_bytes == 0 || planned_bytes.saturating_add(surplus_bytes) <= line_bytes
    }

    /// What the operator under way takes, as recorded.
    pub(crate) fn cost_ns(&self) -> u64 {
        self.trace().operators.get(self.progress.operator).map_or(0, |operator| operator.cost_ns)
    }

    /// Storages that the program should have let go of after the last operator, and that are still there.
    pub(crate) fn overdue(&self) -> impl Iterator<Item = (StorageId, Entry)> {
        let last = self.progress.operator.checked_sub(1).map(|last| &self.trace().operators[last]);
        let frees = last.into_iter().flat_map(|last| &last.frees).copied();
        frees.filter_map(|storage| Some((storage, self.entry(storage)?)))
    }

    /// A storage that has just told that the iteration is at other sizes than it seemed so far.
    pub(crate) fn take_misfit(&mut self) -> Option<StorageId> {
        self.progress.misfit.take()
    }

    pub(crate) fn fit(&self) -> Fit {
        self.ladder.fit()
    }

    /// Whether nothing was done so far, for it was not told what is to be done.
    pub(crate) fn is_waiting(&self) -> bool {
        self.progress.operator <= self.ladder.begins_at()
    }

    /// Whether anything was carried out so far.
    pub(crate) fn has_acted(&self) -> bool {
        self.progress.step > 0
    }

    /// The operator that makes a version, and which of its results that is.
    pub(crate) fn made_by(&self, version: VersionId) -> Option<(OperatorId, usize)> {
        let lineage = &self.ladder.rung().known.lineage;
        let producer = lineage.version(version).producer?;
        let position = lineage.replay_outputs(producer).iter().position(|output| *output == version)?;
        Some((producer, position))
    }
}
