//! A program that is known: its trace, what to do while it runs, and whether what runs now is it.
//!
//! Nothing here moves bytes. Where the program is another one, it says how.

mod known;
mod leaving;
mod standing;

pub(crate) use self::known::{Known, Scheduled};
use self::leaving::Leaving;
pub(crate) use self::leaving::{Follows, Leaves};
pub(super) use self::standing::put;
use self::standing::{Name, Standing, Uses};
use super::ladder::{Fit, Ladder, Rung};
use super::session::operator_name;
use super::shim::{Entry, RawAccess, RawOperator};
use crate::lineage::{EVICTION_FLOOR_BYTES, Edges, VersionId};
use crate::schedule::Instruction;
use crate::trace::{OperatorId, StorageId, Trace};

/// A program, and how far it has been followed in this iteration.
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
    /// What all that came just before it may have left away, in order: nothing, once it came after code that nobody listens to. None
    /// while nobody knows.
    left_before: Option<Vec<StorageId>>,
    /// What of it may still be leaving when the program begins.
    leaving: Leaving,
    /// What it may leave away itself, as far as it was seen what follows.
    pub(crate) leaves: Option<Leaves>,
    /// Storages that a plan may evict, and of which only an operator of this iteration told which they are.
    pub(crate) found: Vec<(StorageId, Entry)>,
    /// Those of which it was told before the first one.
    told: Vec<StorageId>,
    /// Whether one of these is another.
    pub(crate) is_misled: bool,
    /// Whether all that has run so far is this program, or what has run since it was found again.
    pub(crate) matches: bool,
    /// Where it was found again in this iteration after other operators than its own: of each of its operators so far, which of those of
    /// the iteration it was.
    ran_as: Option<Vec<Option<usize>>>,
    /// Whether the iteration did otherwise with what is too small to be evicted.
    differs_in_small: bool,
    /// Operators that have run.
    pub(crate) operator: usize,
    step: usize,
    /// A storage that tells that the iteration is at other sizes than it seemed, if one has told just now.
    misfit: Option<StorageId>,
    /// Whether another was done until here than the plan has.
    is_off_plan: bool,
    /// Its name: no two programs of a driver have the same.
    pub(crate) serial: u64,
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
            left_before: None,
            leaving: Leaving::default(),
            leaves: None,
            serial: rung.serial,
            ladder: Ladder::new(rung),
            names: Vec::new(),
            standing: Standing::of(storages),
            found: Vec::new(),
            told: Vec::new(),
            is_misled: false,
            matches: false,
            ran_as: None,
            differs_in_small: false,
            operator: 0,
            step: 0,
            misfit: None,
            is_off_plan: false,
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
        self.matches = true;
        self.ran_as = None;
        self.differs_in_small = false;
        self.operator = 0;
        self.step = 0;
        self.misfit = None;
        self.is_off_plan = false;
        self.ladder.begin(line_bytes);
        self.found.clear();
        self.told.clear();
        self.is_misled = false;
    }

    /// Is told which storages that are there stand for initial ones, as far as it does not know that.
    pub(crate) fn tell(&mut self, names: impl Iterator<Item = (StorageId, Entry)>) {
        for (storage, entry) in names {
            if self.standing.entry(storage).is_none() && self.standing.storage(entry).is_none() {
                self.standing.put(entry, storage);
                self.told.push(storage);
            }
        }
    }

    /// A storage that was expected to be unused and there is not, or may not be evicted any more.
    pub(crate) fn miss(&mut self, storage: StorageId) {
        if self.is_unused[storage.index()] {
            self.missed.push(storage);
        }
    }

    /// What it was expected to leave unused and is not the same any more, and all else of these sizes, which may be the next: of several
    /// batches that are there all the time, say.
    pub(crate) fn take_missed(&mut self) -> Vec<StorageId> {
        let missed = std::mem::take(&mut self.missed);
        if missed.is_empty() {
            return missed;
        }
        let storages = &self.trace().storages;
        let bytes = |storage: StorageId| storages[storage.index()].bytes;
        let alike = |storage: &StorageId| missed.iter().any(|&missed| bytes(missed) == bytes(*storage));
        let unused = (0..).map(StorageId).take(storages.len()).filter(|storage| self.is_unused[storage.index()]);
        let missed: Vec<StorageId> = unused.filter(alike).collect();
        for storage in &missed {
            self.is_unused[storage.index()] = false;
            self.is_lasting[storage.index()] = false;
        }
        missed
    }

    /// What it may leave away when it ends.
    pub(crate) fn leavable(&self) -> impl Iterator<Item = (StorageId, Entry)> {
        let storages = (0..self.initial() as u32).map(StorageId).filter(|&storage| self.may_leave(storage));
        storages.filter_map(|storage| Some((storage, self.entry(storage)?)))
    }

    fn may_leave(&self, storage: StorageId) -> bool {
        match self.leaves {
            None => false,
            Some(Leaves::Unused) => self.is_unused[storage.index()],
            Some(Leaves::Lasting) => self.is_lasting[storage.index()],
        }
    }

    /// How it stands to what comes before it and after, where these storages are away in between.
    pub(crate) fn edges(&self, away: &[Entry]) -> Edges {
        let mut storages: Vec<StorageId> = away.iter().filter_map(|&entry| self.standing.storage(entry)).collect();
        storages.sort_unstable();
        let left_before = self.left_before.as_deref().unwrap_or_default();
        let (mut away, mut stays) = (storages.clone(), storages);
        away.retain(|storage| left_before.binary_search(storage).is_ok());
        stays.retain(|&storage| self.may_leave(storage));
        Edges { away, leaving: Vec::new(), stays }.with_leaving(self.leaving.storages())
    }

    /// What comes before it and after is not what it was.
    pub(crate) fn forget_neighbours(&mut self) {
        (self.left_before, self.leaving, self.leaves) = (None, Leaving::default(), None);
    }

    /// Whether it was seen what comes before it.
    pub(crate) fn knows_before(&self) -> bool {
        self.left_before.is_some()
    }

    /// What came before it may have left these away, of which those that are `leaving` were still on their way.
    pub(crate) fn comes_after(&mut self, left: &[Entry], leaving: &[Entry]) {
        let known = |entries: &[Entry]| -> Vec<StorageId> {
            let storages = entries.iter().filter_map(|&entry| self.standing.storage(entry));
            storages.filter(|storage| storage.index() < self.initial()).collect()
        };
        let (mut left, leaving) = (known(left), known(leaving));
        left.sort_unstable();
        if let Some(before) = &self.left_before {
            left.retain(|storage| before.binary_search(storage).is_ok());
        }
        self.left_before = Some(left);
        self.leaving.note(leaving);
    }

    /// That is what follows it now.
    pub(crate) fn comes_before(&mut self, follows: Follows) {
        let leaves = match follows {
            Follows::Unheard => return,
            Follows::Part => Leaves::Unused,
            Follows::Iteration => Leaves::Lasting,
        };
        self.leaves = Some(self.leaves.map_or(leaves, |before| before.min(leaves)));
    }

    /// Whether that is what its plan has for away when it begins, and for leaving.
    pub(crate) fn begins_without(&self, (away, leaving): &(Vec<Entry>, Vec<Entry>)) -> bool {
        let edges = self.ladder.rung().known.lineage.edges();
        let are_expected = |entries: &[Entry], expected: &[StorageId]| {
            let stands = |entry: &Entry| self.standing.storage(*entry);
            let is_expected = |entry| stands(entry).is_some_and(|storage| expected.contains(&storage));
            entries.len() == expected.len() && entries.iter().all(is_expected)
        };
        are_expected(away, &edges.away) && are_expected(leaving, &edges.leaving)
    }

    /// Whether its plan leaves anything away when it ends.
    pub(crate) fn leaves_any(&self) -> bool {
        !self.ladder.rung().known.lineage.edges().stays.is_empty()
    }

    /// Whether its plan leaves a storage away when it ends.
    pub(crate) fn stays(&self, entry: Entry) -> bool {
        let stays = &self.ladder.rung().known.lineage.edges().stays;
        self.standing.storage(entry).is_some_and(|storage| stays.binary_search(&storage).is_ok())
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
        let initial = self.initial();
        let mut next: Vec<Option<Entry>> = self.standing.entries()[..initial].to_vec();
        for &(_, to) in &self.trace().carried {
            next[to.index()] = None;
        }
        if completed {
            for &(from, to) in &self.trace().carried {
                next[to.index()] = self.standing.entry(from);
            }
        }
        self.standing.reset(&next);
        self.matches = false;
    }

    /// The program has let go of a storage.
    pub(crate) fn freed(&mut self, entry: Entry) {
        if let Some(storage) = self.standing.storage(entry) {
            self.miss(storage);
        }
        self.standing.remove(entry);
    }

    pub(crate) fn entry(&self, storage: StorageId) -> Option<Entry> {
        self.standing.entry(storage)
    }

    fn name(&self, operator: usize) -> &str {
        self.trace().operator_name(OperatorId(operator as u32))
    }

    /// Whether it has come to its end.
    pub(crate) fn is_over(&self) -> bool {
        self.operator == self.trace().operators.len()
    }

    /// Whether the iteration was this program from its beginning to its end.
    pub(crate) fn is_complete(&self) -> bool {
        self.is_over() && !self.has_gaps()
    }

    /// Whether it was found again in this iteration, after other operators than its own.
    pub(crate) fn has_gaps(&self) -> bool {
        self.ran_as.is_some()
    }

    /// Which of the iteration's operators it was.
    pub(crate) fn ran_as(&self, operator: OperatorId) -> Option<usize> {
        match &self.ran_as {
            Some(ran_as) => ran_as.get(operator.index()).copied().flatten(),
            None => (operator.index() < self.operator).then(|| operator.index()),
        }
    }

    /// Whether the iteration had other bytes than were predicted, by some that are too small to be evicted.
    pub(crate) fn differs_in_small(&self) -> bool {
        self.differs_in_small
    }

    /// Why an iteration that ends here is not this program.
    pub(crate) fn ends_early(&self) -> String {
        format!("the iteration ends before {}", self.place())
    }

    /// How far it has come, in words.
    pub(crate) fn place(&self) -> String {
        match self.is_over() {
            true => "after the last operator".to_owned(),
            false => format!("operator {} ({})", self.operator, self.name(self.operator)),
        }
    }

    pub(crate) fn failed(&self) -> String {
        self.here("it failed")
    }

    /// Whether its plan needs the recipe of the operator that comes next.
    pub(crate) fn wants_recipe(&self) -> bool {
        self.ladder.wants_recipe(self.operator)
    }

    /// Whether its plan still fits where an iteration starts with so many bytes.
    pub(crate) fn fits_from(&self, start_bytes: u64, line_bytes: u64) -> bool {
        let surplus_bytes = start_bytes.saturating_sub(self.trace().start_bytes());
        let planned_bytes = self.scheduled().prediction.map_or(0, |prediction| prediction.peak_bytes);
        surplus_bytes == 0 || planned_bytes.saturating_add(surplus_bytes) <= line_bytes
    }

    /// What the operator under way takes, as recorded.
    pub(crate) fn cost_ns(&self) -> u64 {
        self.trace().operators.get(self.operator).map_or(0, |operator| operator.cost_ns)
    }

    /// Whether the program is about to run what the trace says, on the storages that the trace says.
    pub(crate) fn check(&mut self, operator: &RawOperator) -> Result<(), String> {
        self.check_frees()?;
        self.check_operator(operator)
    }

    /// What the trace calls an operator.
    fn look_up(&mut self, operator: &RawOperator) -> Name {
        let mut name = self.names.get(operator.name as usize).copied().unwrap_or_default();
        if name == Name::Unseen {
            let text = operator_name(operator.name);
            let position = self.trace().names.iter().position(|name| *name == text);
            name = position.map_or(Name::Absent, |position| Name::At(position as u32));
            put(&mut self.names, operator.name as usize, name);
        }
        name
    }

    fn check_operator(&mut self, operator: &RawOperator) -> Result<(), String> {
        let name = self.look_up(operator);
        let Some(expected) = self.trace().operators.get(self.operator) else {
            return Err(format!("{} comes after the last operator of the trace", operator_name(operator.name)));
        };
        let accesses = operator.accesses();
        if name != Name::At(expected.name) {
            return Err(self.here(&format!("the program runs {}", operator_name(operator.name))));
        }
        if accesses.len() != expected.accesses.len() {
            return Err(self.here(&format!("{} inputs, expected {}", accesses.len(), expected.accesses.len())));
        }
        for (index, found) in accesses.iter().enumerate() {
            let expected = self.trace().operators[self.operator].accesses[index];
            if found.mode() != expected.mode {
                return Err(self.here(&format!("storage {} differs in use", expected.storage.0)));
            }
            if self.entry(expected.storage) != Some(found.entry) {
                self.may_stand_for(expected.storage, found, name, operator)?;
            }
        }
        for (index, found) in accesses.iter().enumerate() {
            let storage = self.trace().operators[self.operator].accesses[index].storage;
            if self.entry(storage) == Some(found.entry) {
                self.see(storage, found.bytes);
            }
        }
        accesses.iter().filter(|access| access.is_filled()).try_for_each(|access| self.filled(access.entry))
    }

    /// The operator that comes next, called `name`, uses what stands for another storage than the trace has there, or for none: says
    /// why it is not this program's, unless it may be what the trace has.
    fn may_stand_for(
        &mut self,
        storage: StorageId,
        found: &RawAccess,
        name: Name,
        operator: &RawOperator,
    ) -> Result<(), String> {
        let initial = self.initial();
        let Program { ladder, standing, uses, is_unused, .. } = self;
        let Rung { known, scheduled, .. } = ladder.rung();
        let trace = &*known.trace;
        let expected = &trace.storages[storage.index()];
        let is_initial = |storage: StorageId| storage.index() < initial;
        let other = standing.storage(found.entry);
        if is_small(expected.bytes)
            && is_small(found.bytes)
            && !is_initial(storage)
            && other.is_none_or(|other| !is_initial(other))
        {
            self.differs_in_small = true;
            return Ok(());
        }
        if standing.entry(storage).is_none() && is_initial(storage) && other.is_none() {
            standing.put(found.entry, storage);
            if expected.locked.is_none() {
                self.found.push((storage, found.entry));
            }
            return Ok(());
        }
        // The operator is one that is still to come: what is between them is left out. What the program writes to, its parameters say,
        // is not another one every time.
        let is_ahead = |other: StorageId| {
            uses.writes(other) && uses.next(self.operator + 1, trace, standing, name, operator).is_some()
        };
        // Nothing has been done about an initial storage so far.
        let is_untouched = |storage: StorageId| is_initial(storage) && !scheduled.has_moved(storage, self.step);
        // Another one every time, a row of a data set say, may have been taken for the one before. What was not used so far
        // may be away; it comes back.
        let may_be_mistaken = |other: StorageId| is_unused[other.index()] || is_untouched(other) && !is_ahead(other);
        if is_untouched(storage) && other.is_none_or(may_be_mistaken) {
            self.missed.extend(other.filter(|other| is_unused[other.index()]));
            standing.correct(found.entry, storage);
            return Ok(());
        }
        self.is_misled = self.told.contains(&storage) || other.is_some_and(|other| self.told.contains(&other));
        Err(self.here(&format!("another storage stands for storage {}", storage.0)))
    }

    /// Says of the operator that comes next what is the matter with it.
    fn here(&self, what: &str) -> String {
        format!("{}: {what}", self.place())
    }

    /// Goes on after other operators than the program's own, where one arrives that it has still to come to: the first that does the
    /// same to the same storages, as far as these are known. At least one has to be; what stands for none of the program's takes
    /// the place of one that nothing stands for, as what another piece of the iteration made does. Whether it goes on.
    pub(crate) fn find_again(&mut self, operator: &RawOperator) -> bool {
        let name = self.look_up(operator);
        let Program { ladder, standing, uses, .. } = self;
        let trace = &*ladder.rung().known.trace;
        let Some(found) = uses.next(self.operator, trace, standing, name, operator) else { return false };
        for (found, access) in operator.accesses().iter().zip(&trace.operators[found].accesses) {
            if standing.entry(access.storage).is_none() {
                standing.correct(found.entry, access.storage);
            }
        }
        let ran_as = self.ran_as.get_or_insert_with(|| (0..self.operator).map(Some).collect());
        ran_as.resize(found, None);
        self.operator = found;
        self.ladder.skip_to(self.operator);
        self.matches = self.check_operator(operator).is_ok();
        self.matches
    }

    /// The operator that comes next uses a storage that was filled in past the dispatcher since it was made.
    pub(crate) fn filled(&self, entry: Entry) -> Result<(), String> {
        match self.standing.storage(entry) {
            Some(storage) if self.may_be_rebuilt[storage.index()] => {
                Err(self.here(&format!("storage {} was filled in outside the dispatcher", storage.0)))
            }
            _ => Ok(()),
        }
    }

    /// Storages that the program should have let go of after the last operator, and that are still there.
    pub(crate) fn overdue(&self) -> impl Iterator<Item = (StorageId, Entry)> {
        let last = self.operator.checked_sub(1).map(|last| &self.trace().operators[last]);
        let frees = last.into_iter().flat_map(|last| &last.frees).copied();
        frees.filter_map(|storage| Some((storage, self.entry(storage)?)))
    }

    /// Checks that the program has let go of what the trace says it lets go of after the last operator. Locked storages may
    /// be held by another thread for a while: one that sends them to another process, say; what is small for as long as it likes.
    fn check_frees(&mut self) -> Result<(), String> {
        let storages = &self.trace().storages;
        let mut is_any = false;
        for (storage, _) in self.overdue() {
            let outlives = &storages[storage.index()];
            if outlives.locked.is_none() && !is_small(outlives.bytes) {
                let last = self.operator - 1;
                return Err(format!("storage {} outlives operator {last} ({})", storage.0, self.name(last)));
            }
            is_any |= outlives.locked.is_none();
        }
        self.differs_in_small |= is_any;
        Ok(())
    }

    /// Books what an operator made, the `nth` of the iteration, if it is what the trace says.
    pub(crate) fn ran(&mut self, operator: &RawOperator, nth: usize) -> Result<(), String> {
        // Of two that two threads run at once the last may have come too late.
        let expected = self.trace().operators.get(self.operator).map_or(0, |expected| expected.creates.len());
        if self.is_over() || operator.created().len() != expected {
            return Err(format!("{} made {} storages, expected {expected}", self.place(), operator.created().len()));
        }
        self.ladder.ran(operator.peak_bytes);
        if let Some(ran_as) = &mut self.ran_as {
            ran_as.push(Some(nth));
        }
        self.operator += 1;
        for (index, found) in operator.created().iter().enumerate() {
            let storage = self.trace().operators[self.operator - 1].creates[index];
            self.standing.put(found.entry, storage);
            self.see(storage, found.bytes);
        }
        Ok(())
    }

    /// A storage is of this size, which may tell that the iteration is at other sizes than it seemed, and has another plan.
    fn see(&mut self, storage: StorageId, bytes: u64) {
        let Some(before) = self.ladder.see(storage, bytes) else { return };
        self.misfit = Some(storage);
        if self.is_waiting() {
            return;
        }
        let done = &self.ladder.rungs()[before].scheduled.schedule.steps()[..self.step];
        let here = self.step_here();
        self.is_off_plan |= *done != self.steps()[..here];
        self.step = here;
    }

    /// A storage that has just told that the iteration is at other sizes than it seemed so far.
    pub(crate) fn take_misfit(&mut self) -> Option<StorageId> {
        self.misfit.take()
    }

    pub(crate) fn fit(&self) -> Fit {
        self.ladder.fit()
    }

    /// Whether nothing was done so far, for it was not told what is to be done.
    pub(crate) fn is_waiting(&self) -> bool {
        self.operator <= self.ladder.begins_at()
    }

    /// The next instruction that is due before the next operator.
    pub(crate) fn next_instruction(&mut self) -> Option<Instruction> {
        let &(_, instruction) = self.steps().get(self.step).filter(|_| self.is_due())?;
        self.step += 1;
        Some(instruction)
    }

    /// Whether an instruction is due before the next operator. After a change of programs some lie behind.
    pub(crate) fn is_due(&self) -> bool {
        self.operator >= self.ladder.begins_at()
            && self.steps().get(self.step).is_some_and(|&(before, _)| before as usize <= self.operator)
    }

    /// Whether its latest operator has read something out. Before its first one it may have, as a loss between iterations.
    pub(crate) fn has_read_out(&self) -> bool {
        let latest = self.operator.checked_sub(1);
        latest.is_none_or(|latest| self.ladder.rung().known.trace.operators[latest].is_read_out())
    }

    /// The storages of `first` and of the instructions that move together with it. Takes those as well.
    pub(crate) fn with_joining(&mut self, first: StorageId) -> Vec<StorageId> {
        let mut together = vec![first];
        while let Some(&(_, step)) = self.steps().get(self.step)
            && let Instruction::Offload { storage, joins: true, .. } | Instruction::Prefetch { storage, joins: true } =
                step
        {
            together.push(storage);
            self.step += 1;
        }
        together
    }

    /// Leaves out the instructions that were due earlier.
    pub(crate) fn skip_to_here(&mut self) {
        let here = self.step_here();
        self.is_off_plan |= here > self.step;
        self.step = here.max(self.step);
    }

    /// The first step of the plan that was not due before an earlier operator.
    fn step_here(&self) -> usize {
        self.steps().partition_point(|&(before, _)| (before as usize) < self.operator)
    }

    /// Whether instructions that were due earlier were left out.
    pub(crate) fn is_off_plan(&self) -> bool {
        self.is_off_plan
    }

    /// Whether anything was carried out so far.
    pub(crate) fn has_acted(&self) -> bool {
        self.step > 0
    }

    /// The operator that makes a version, and which of its results that is.
    pub(crate) fn made_by(&self, version: VersionId) -> Option<(OperatorId, usize)> {
        let lineage = &self.ladder.rung().known.lineage;
        let producer = lineage.version(version).producer?;
        let position = lineage.replay_outputs(producer).iter().position(|output| *output == version)?;
        Some((producer, position))
    }
}

/// Whether so many bytes are never evicted: what holds no more may be another number, which the program chose by its value.
fn is_small(bytes: u64) -> bool {
    bytes < EVICTION_FLOOR_BYTES
}
