//! Whether what runs is the program, operator by operator, and what stands for its storages meanwhile.

use super::standing::{Name, put};
use super::{Program, Progress};
use crate::lineage::EVICTION_FLOOR_BYTES;
use crate::torch::ladder::Rung;
use crate::torch::session::operator_name;
use crate::torch::shim::{Entry, RawAccess, RawOperator};
use crate::trace::StorageId;

impl Program {
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
        if self.is_as_seen(name, operator) {
            return Ok(());
        }
        let Some(expected) = self.trace().operators.get(self.progress.operator) else {
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
            let expected = self.trace().operators[self.progress.operator].accesses[index];
            if found.mode() != expected.mode {
                return Err(self.here(&format!("storage {} differs in use", expected.storage.0)));
            }
            if self.entry(expected.storage) != Some(found.entry) {
                self.may_stand_for(expected.storage, found, name, operator)?;
            }
        }
        for (index, found) in accesses.iter().enumerate() {
            let storage = self.trace().operators[self.progress.operator].accesses[index].storage;
            if self.entry(storage) == Some(found.entry) {
                self.see(storage, found.bytes);
            }
        }
        accesses.iter().filter(|access| access.is_filled()).try_for_each(|access| self.filled(access.entry))
    }

    /// Whether the operator that comes next, called `name`, is the trace's and tells nothing new: it uses what stands for what the trace
    /// has there, each of a size that an operator has told before, and nothing that was filled in past the dispatcher. Nearly all do.
    fn is_as_seen(&self, name: Name, operator: &RawOperator) -> bool {
        let (trace, accesses) = (self.trace(), operator.accesses());
        trace.operators.get(self.progress.operator).is_some_and(|expected| {
            name == Name::At(expected.name)
                && accesses.len() == expected.accesses.len()
                && accesses.iter().zip(&expected.accesses).all(|(found, expected)| {
                    found.mode() == expected.mode
                        && self.entry(expected.storage) == Some(found.entry)
                        && self.ladder.has_seen(expected.storage, found.bytes)
                        && !found.is_filled()
                })
        })
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
        let Program { ladder, standing, uses, is_unused, missed, progress, .. } = self;
        let Progress { operator: at, step, found: found_here, told, is_misled, differs_in_small, .. } = progress;
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
            *differs_in_small = true;
            return Ok(());
        }
        if standing.entry(storage).is_none() && is_initial(storage) && other.is_none() {
            standing.put(found.entry, storage);
            if expected.locked.is_none() {
                found_here.push((storage, found.entry));
            }
            return Ok(());
        }
        // The operator is one that is still to come: what is between them is left out. What the program writes to, its parameters say,
        // is not another one every time.
        let is_ahead =
            |other: StorageId| uses.writes(other) && uses.next(*at + 1, trace, standing, name, operator).is_some();
        // Nothing has been done about an initial storage so far.
        let is_untouched = |storage: StorageId| is_initial(storage) && !scheduled.has_moved(storage, *step);
        // Another one every time, a row of a data set say, may have been taken for the one before. What was not used so far
        // may be away; it comes back.
        let may_be_mistaken = |other: StorageId| is_unused[other.index()] || is_untouched(other) && !is_ahead(other);
        if is_untouched(storage) && other.is_none_or(may_be_mistaken) {
            missed.extend(other.filter(|other| is_unused[other.index()]));
            standing.correct(found.entry, storage);
            return Ok(());
        }
        *is_misled = told.contains(&storage) || other.is_some_and(|other| told.contains(&other));
        Err(self.here(&format!("another storage stands for storage {}", storage.0)))
    }

    /// Says of the operator that comes next what is the matter with it.
    fn here(&self, what: &str) -> String {
        format!("{}: {what}", self.place())
    }

    /// Says that the operator under way has failed.
    pub(crate) fn failed(&self) -> String {
        self.here("it failed")
    }

    /// Goes on after other operators than the program's own, where one arrives that it has still to come to: the first that does the
    /// same to the same storages, as far as these are known. At least one has to be; what stands for none of the program's takes
    /// the place of one that nothing stands for, as what another piece of the iteration made does. Whether it goes on.
    pub(crate) fn find_again(&mut self, operator: &RawOperator) -> bool {
        let name = self.look_up(operator);
        let Program { ladder, standing, uses, .. } = self;
        let trace = &*ladder.rung().known.trace;
        let Some(found) = uses.next(self.progress.operator, trace, standing, name, operator) else { return false };
        for (found, access) in operator.accesses().iter().zip(&trace.operators[found].accesses) {
            if standing.entry(access.storage).is_none() {
                standing.correct(found.entry, access.storage);
            }
        }
        let ran_as = self.progress.ran_as.get_or_insert_with(|| (0..self.progress.operator).map(Some).collect());
        ran_as.resize(found, None);
        self.progress.operator = found;
        self.ladder.skip_to(self.progress.operator);
        self.progress.matches = self.check_operator(operator).is_ok();
        self.progress.matches
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

    /// Checks that the program has let go of what the trace says it lets go of after the last operator. Locked storages may
    /// be held by another thread for a while: one that sends them to another process, say; what is small for as long as it likes.
    fn check_frees(&mut self) -> Result<(), String> {
        let storages = &self.trace().storages;
        let mut is_any = false;
        for (storage, _) in self.overdue() {
            let outlives = &storages[storage.index()];
            if outlives.locked.is_none() && !is_small(outlives.bytes) {
                let last = self.progress.operator - 1;
                return Err(format!("storage {} outlives operator {last} ({})", storage.0, self.operator_name(last)));
            }
            is_any |= outlives.locked.is_none();
        }
        self.progress.differs_in_small |= is_any;
        Ok(())
    }

    /// Books what an operator made, the `nth` of the iteration, if it is what the trace says.
    pub(crate) fn ran(&mut self, operator: &RawOperator, nth: usize) -> Result<(), String> {
        // Of two that two threads run at once the last may have come too late.
        let expected = self.trace().operators.get(self.progress.operator).map_or(0, |expected| expected.creates.len());
        if self.is_over() || operator.created().len() != expected {
            return Err(format!("{} made {} storages, expected {expected}", self.place(), operator.created().len()));
        }
        self.ladder.ran(operator.peak_bytes);
        if let Some(ran_as) = &mut self.progress.ran_as {
            ran_as.push(Some(nth));
        }
        self.progress.operator += 1;
        for (index, found) in operator.created().iter().enumerate() {
            let storage = self.trace().operators[self.progress.operator - 1].creates[index];
            self.standing.put(found.entry, storage);
            self.see(storage, found.bytes);
        }
        Ok(())
    }

    /// A storage is of this size, which may tell that the iteration is at other sizes than it seemed, and has another plan.
    fn see(&mut self, storage: StorageId, bytes: u64) {
        let Some(before) = self.ladder.see(storage, bytes) else { return };
        self.progress.misfit = Some(storage);
        if self.is_waiting() {
            return;
        }
        let done = &self.ladder.rungs()[before].scheduled.schedule.steps()[..self.progress.step];
        let here = self.step_here();
        self.progress.is_off_plan |= *done != self.steps()[..here];
        self.progress.step = here;
    }
}

/// Whether so many bytes are never evicted: what holds no more may be another number, which the program chose by its value.
fn is_small(bytes: u64) -> bool {
    bytes < EVICTION_FLOOR_BYTES
}
