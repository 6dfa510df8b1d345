//! Carries out a schedule on a running training loop.
//!
//! The executor decides nothing. Before each operator it checks that the program is where the trace says, and does
//! what the schedule says. Where the program departs from the trace, every storage is restored before the operator
//! runs, and the iteration goes on untouched: bytes may exceed the budget then, results never change, and the report
//! says so.

use std::collections::HashMap;
use std::time::Instant;

use super::copy::{CopyEngine, CopyError, DeviceBytes, SlowCopy, Ticket};
use super::session::{Observer, Session, SessionError, Wish, operator_name};
use super::shim::{self, Entry, RawOperator, Recipe, ShimError};
use crate::hardware::Tier;
use crate::lineage::{Lineage, Version, VersionId};
use crate::plan::{Action, Plan};
use crate::schedule::{Instruction, Schedule};
use crate::trace::{AccessMode, OperatorId, StorageId, Trace};

/// What one iteration did, measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct IterationReport {
    /// Elapsed time.
    pub makespan_ns: u64,
    /// Most device bytes, counted at the allocator.
    pub peak_bytes: u64,
    /// Whether the schedule was carried out to its end.
    pub followed: bool,
    /// Where and how the program departed from the trace.
    pub deviation: Option<String>,
    /// Time spent waiting for copies.
    pub stall_ns: u64,
    /// Time spent on reruns.
    pub rerun_ns: u64,
    /// Operators rerun.
    pub reruns: u64,
    /// Bytes copied to the slow tier.
    pub offloaded_bytes: u64,
    /// Bytes copied back.
    pub prefetched_bytes: u64,
}

/// Where a storage's bytes are, with what it takes to get them back.
#[derive(Debug)]
enum Place {
    Absent,
    Resident,
    Offloading(Ticket),
    Offloaded,
    Prefetching(Ticket),
    Dropped,
}

/// How far the program is known to follow the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Following {
    /// Storages are being matched to the trace; nothing is evicted.
    Matching,
    /// The schedule is being carried out.
    Schedule,
    /// The program departed from the trace in this iteration.
    Lost,
}

/// Something below went wrong.
#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error(transparent)]
    Shim(#[from] ShimError),
    #[error(transparent)]
    Copy(#[from] CopyError),
    #[error("{0}")]
    Broken(String),
}

/// Follows a training loop with one schedule.
///
/// The first iteration only matches the program's storages to the trace; from the second on the schedule is
/// carried out.
pub struct Executor<'a> {
    session: Session,
    trace: &'a Trace,
    lineage: &'a Lineage,
    schedule: Schedule,
    engine: Box<dyn CopyEngine>,
    /// Operators that may have to be rerun.
    recipe_wanted: Vec<bool>,
    /// Storages whose bytes a rerun may start from: kept alive until the trace says that they are freed.
    is_root: Vec<bool>,
    /// The trace's name for the dispatcher's names.
    names: HashMap<u32, Option<u32>>,

    following: Following,
    watch_next: bool,
    entry: Vec<Option<Entry>>,
    storage_of: HashMap<Entry, StorageId>,
    place: Vec<Place>,
    copies: Vec<Option<SlowCopy>>,
    current: Vec<VersionId>,
    held: Vec<bool>,
    beside: Vec<Option<Entry>>,
    recipes: Vec<Option<Recipe>>,
    operator: usize,
    step: usize,
    freed: Vec<Entry>,
    report: IterationReport,
}

impl<'a> Executor<'a> {
    /// An executor of `schedule`, which was made for `plan` on `trace`.
    pub fn new(
        session: Session,
        trace: &'a Trace,
        lineage: &'a Lineage,
        plan: &Plan,
        schedule: Schedule,
        engine: Box<dyn CopyEngine>,
    ) -> Self {
        let (storages, versions) = (trace.storages.len(), lineage.versions().len());
        let (recipe_wanted, is_root) = ancestry(trace, lineage, plan);
        Executor {
            session,
            trace,
            lineage,
            schedule,
            engine,
            recipe_wanted,
            is_root,
            names: HashMap::new(),
            following: Following::Matching,
            watch_next: false,
            entry: vec![None; storages],
            storage_of: HashMap::new(),
            place: (0..storages).map(|_| Place::Absent).collect(),
            copies: (0..storages).map(|_| None).collect(),
            current: vec![VersionId(u32::MAX); storages],
            held: vec![false; storages],
            beside: vec![None; versions],
            recipes: (0..trace.operators.len()).map(|_| None).collect(),
            operator: 0,
            step: 0,
            freed: Vec::new(),
            report: IterationReport::default(),
        }
    }

    /// Runs one iteration of the training loop.
    pub fn iteration<R>(&mut self, body: impl FnOnce() -> R) -> Result<(R, IterationReport), SessionError> {
        self.begin();
        let started = Instant::now();
        let session = self.session;
        let result = session.observe(self, body)?;
        self.end();
        self.report.makespan_ns = started.elapsed().as_nanos() as u64;
        self.report.peak_bytes = session.peak_bytes();
        Ok((result, std::mem::take(&mut self.report)))
    }

    /// Most bytes that the slow tier has held.
    pub fn slow_tier_high_water_bytes(&self) -> u64 {
        self.engine.high_water_bytes()
    }

    /// Leaves the next iteration untouched: it is checked against the trace and measured, and nothing is evicted.
    pub fn watch_next(&mut self) {
        self.watch_next = true;
    }

    fn begin(&mut self) {
        self.report = IterationReport::default();
        self.operator = 0;
        self.step = 0;
        // What died between the iterations.
        shim::take_freed(&mut self.freed);
        for entry in std::mem::take(&mut self.freed) {
            if let Some(storage) = self.storage_of.remove(&entry) {
                self.entry[storage.index()] = None;
            }
            shim::forget(entry);
        }
        let initial = self.trace.initial_storages as usize;
        for index in 0..self.place.len() {
            self.place[index] = if index < initial { Place::Resident } else { Place::Absent };
        }
        self.current[..initial].copy_from_slice(self.lineage.initial_versions());
        if self.following == Following::Schedule {
            let all_known = self.entry[..initial].iter().all(Option::is_some);
            if all_known && !std::mem::take(&mut self.watch_next) {
                (0..initial).for_each(|index| self.hold_root(StorageId(index as u32)));
            } else {
                self.following = Following::Matching;
            }
        }
        self.session.reset_peak();
    }

    fn end(&mut self) {
        self.absorb_freed();
        if self.following != Following::Lost && self.operator < self.trace.operators.len() {
            self.lose(format!("the iteration ends before operator {} ({})", self.operator, self.name(self.operator)));
        }
        if self.following == Following::Schedule
            && let Err(fault) = self.carry_out_steps()
        {
            self.lose(fault.to_string());
        }
        self.report.followed = self.following == Following::Schedule;
        for index in 0..self.held.len() {
            self.unhold(StorageId(index as u32));
        }
        self.recipes.iter_mut().for_each(|recipe| *recipe = None);
        for index in 0..self.copies.len() {
            self.free_copy(StorageId(index as u32));
        }
        self.hand_over();
    }

    /// Gives storages that live on the names that the next iteration knows them by.
    fn hand_over(&mut self) {
        let initial = self.trace.initial_storages as usize;
        if self.following == Following::Lost {
            self.entry.fill(None);
            self.storage_of.clear();
            self.following = Following::Matching;
            return;
        }
        let mut next: Vec<Option<Entry>> = self.entry[..initial].to_vec();
        for &(_, to) in &self.trace.carried {
            next[to.index()] = None;
        }
        for &(from, to) in &self.trace.carried {
            next[to.index()] = self.entry[from.index()];
        }
        self.entry.fill(None);
        self.entry[..initial].copy_from_slice(&next);
        self.storage_of =
            (0u32..).zip(&next).filter_map(|(index, entry)| Some(((*entry)?, StorageId(index)))).collect();
        self.following = Following::Schedule;
    }

    fn name(&self, operator: usize) -> &str {
        self.trace.operator_name(OperatorId(operator as u32))
    }

    /// Books what the program has let go of since the last operator.
    fn absorb_freed(&mut self) {
        shim::take_freed(&mut self.freed);
        for entry in std::mem::take(&mut self.freed) {
            if let Some(storage) = self.storage_of.remove(&entry) {
                if let Place::Offloading(ticket) | Place::Prefetching(ticket) =
                    std::mem::replace(&mut self.place[storage.index()], Place::Absent)
                {
                    // The copy reads or writes bytes that `forget` frees. A dead worker touches them no more.
                    let _ = self.wait(&ticket);
                }
                self.entry[storage.index()] = None;
                self.free_copy(storage);
            }
            shim::forget(entry);
        }
    }

    fn wait(&mut self, ticket: &Ticket) -> Result<(), CopyError> {
        let started = Instant::now();
        let waited = self.engine.wait(ticket);
        self.report.stall_ns += started.elapsed().as_nanos() as u64;
        waited
    }

    fn free_copy(&mut self, storage: StorageId) {
        if let Some(copy) = self.copies[storage.index()].take() {
            self.engine.free(copy);
        }
    }

    /// Whether the program is about to run what the trace says, on the storages that the trace says.
    fn check(&mut self, operator: &RawOperator) -> Result<(), String> {
        let Some(expected) = self.trace.operators.get(self.operator) else {
            return Err(format!("{} comes after the last operator of the trace", operator_name(operator.name)));
        };
        let names = &self.trace.names;
        let name = *self.names.entry(operator.name).or_insert_with(|| {
            let text = operator_name(operator.name);
            names.iter().position(|name| *name == text).map(|position| position as u32)
        });
        let at = |what: String| Err(format!("operator {} ({}): {what}", self.operator, names[expected.name as usize]));
        if name != Some(expected.name) {
            return at(format!("the program runs {}", operator_name(operator.name)));
        }
        if operator.accesses().len() != expected.accesses.len() {
            return at(format!("{} inputs, expected {}", operator.accesses().len(), expected.accesses.len()));
        }
        for (found, access) in operator.accesses().iter().zip(&expected.accesses) {
            let storage = access.storage.index();
            if found.bytes != self.trace.storages[storage].bytes || found.mode != access.mode as u32 {
                return at(format!("storage {storage} differs in size or use"));
            }
            if found.is_filled() {
                return at(format!("storage {storage} was filled in outside the dispatcher"));
            }
            match self.entry[storage] {
                Some(entry) if entry == found.entry => {}
                None if storage < self.trace.initial_storages as usize && self.following == Following::Matching => {
                    self.entry[storage] = Some(found.entry);
                    self.storage_of.insert(found.entry, access.storage);
                }
                _ => return at(format!("another storage stands for storage {storage}")),
            }
        }
        Ok(())
    }

    /// Checks that the program has let go of what the trace says it lets go of after the last operator.
    fn check_frees(&self) -> Result<(), String> {
        let Some(last) = self.operator.checked_sub(1) else { return Ok(()) };
        match self.trace.operators[last].frees.iter().find(|storage| self.entry[storage.index()].is_some()) {
            None => Ok(()),
            Some(storage) => Err(format!("storage {} outlives operator {last} ({})", storage.0, self.name(last))),
        }
    }

    fn hold_root(&mut self, storage: StorageId) {
        if self.is_root[storage.index()]
            && let Some(entry) = self.entry[storage.index()]
            && shim::hold(entry).is_ok()
        {
            self.held[storage.index()] = true;
        }
    }

    fn unhold(&mut self, storage: StorageId) {
        if std::mem::take(&mut self.held[storage.index()])
            && let Some(entry) = self.entry[storage.index()]
        {
            // The entry is known, and holding it cannot have ended otherwise.
            let _ = shim::unhold(entry);
        }
    }

    fn carry_out_steps(&mut self) -> Result<(), Fault> {
        while let Some(&(before, instruction)) = self.schedule.steps().get(self.step)
            && before as usize == self.operator
        {
            self.step += 1;
            match instruction {
                Instruction::Offload { storage, tier, .. } => {
                    let together = self.with_joining(storage);
                    self.offload(&together, tier)?;
                }
                Instruction::Prefetch { storage, .. } => {
                    let together = self.with_joining(storage);
                    self.prefetch(&together)?;
                }
                other => self.carry_out(other)?,
            }
        }
        Ok(())
    }

    /// The storage of the step just taken, with those of the steps that move together with it. Takes them as well.
    fn with_joining(&mut self, storage: StorageId) -> Vec<StorageId> {
        let mut together = vec![storage];
        while let Some(&(_, step)) = self.schedule.steps().get(self.step)
            && let Instruction::Offload { storage, joins: true, .. } | Instruction::Prefetch { storage, joins: true } =
                step
        {
            together.push(storage);
            self.step += 1;
        }
        together
    }

    fn entry_of(&self, storage: StorageId) -> Result<Entry, Fault> {
        self.entry[storage.index()].ok_or_else(|| Fault::Broken(format!("storage {} is gone", storage.0)))
    }

    fn carry_out(&mut self, instruction: Instruction) -> Result<(), Fault> {
        match instruction {
            Instruction::Offload { .. } | Instruction::Prefetch { .. } => unreachable!("they are carried out together"),
            Instruction::FinishOffload(storage) => self.finish_offload(storage),
            Instruction::Recall(storage) => self.recall(storage),
            Instruction::FinishPrefetch(storage) => self.finish_prefetch(storage),
            Instruction::Discard(storage) => {
                self.evict(storage)?;
                self.place[storage.index()] = Place::Offloaded;
                Ok(())
            }
            Instruction::Drop(storage) => {
                // A rerun would bring back what the operator made, not what the program has put there since.
                if shim::is_filled(self.entry_of(storage)?)? {
                    return Err(Fault::Broken(format!("storage {} was filled in outside the dispatcher", storage.0)));
                }
                self.evict(storage)?;
                self.place[storage.index()] = Place::Dropped;
                Ok(())
            }
            Instruction::Rerun(operator) => self.rerun(operator),
            Instruction::Release(version) => self.release(version),
        }
    }

    fn evict(&mut self, storage: StorageId) -> Result<(), Fault> {
        let entry = self.entry_of(storage)?;
        shim::park(entry)?;
        shim::release(entry)?;
        Ok(())
    }

    fn offload(&mut self, storages: &[StorageId], tier: Tier) -> Result<(), Fault> {
        let mut pieces = Vec::with_capacity(storages.len());
        for &storage in storages {
            let bytes = self.trace.storages[storage.index()].bytes as usize;
            pieces.push(DeviceBytes { start: shim::park(self.entry_of(storage)?)?, bytes });
        }
        // SAFETY: the entries keep the bytes until the ticket has been waited for; nothing else can reach them.
        let (copies, ticket) = match unsafe { self.engine.offload(&pieces, tier) } {
            Ok(started) => started,
            Err(error) => {
                for &storage in storages {
                    shim::unpark(self.entry_of(storage)?)?;
                }
                return Err(error.into());
            }
        };
        for (&storage, copy) in storages.iter().zip(copies) {
            self.report.offloaded_bytes += self.trace.storages[storage.index()].bytes;
            self.free_copy(storage);
            self.copies[storage.index()] = Some(copy);
            self.place[storage.index()] = Place::Offloading(ticket.clone());
        }
        Ok(())
    }

    fn finish_offload(&mut self, storage: StorageId) -> Result<(), Fault> {
        // The program may have let go of it meanwhile; then its bytes are free already.
        if let Place::Offloading(ticket) = &self.place[storage.index()] {
            let ticket = ticket.clone();
            self.wait(&ticket)?;
            shim::release(self.entry_of(storage)?)?;
            self.place[storage.index()] = Place::Offloaded;
        }
        Ok(())
    }

    fn recall(&mut self, storage: StorageId) -> Result<(), Fault> {
        if let Place::Offloading(ticket) = &self.place[storage.index()] {
            let ticket = ticket.clone();
            self.wait(&ticket)?;
            shim::unpark(self.entry_of(storage)?)?;
            self.place[storage.index()] = Place::Resident;
        }
        Ok(())
    }

    fn prefetch(&mut self, storages: &[StorageId]) -> Result<(), Fault> {
        let mut ends = Vec::with_capacity(storages.len());
        for &storage in storages {
            let device = shim::allocate(self.entry_of(storage)?)?;
            let copy = self.copies[storage.index()].as_ref();
            ends.push((copy.ok_or_else(|| Fault::Broken(format!("storage {} has no copy", storage.0)))?, device));
        }
        // SAFETY: the entries keep the bytes, and `copies` the copies, until the ticket has been waited for.
        let ticket = unsafe { self.engine.prefetch(&ends) }?;
        for &storage in storages {
            self.report.prefetched_bytes += self.trace.storages[storage.index()].bytes;
            self.place[storage.index()] = Place::Prefetching(ticket.clone());
        }
        Ok(())
    }

    fn finish_prefetch(&mut self, storage: StorageId) -> Result<(), Fault> {
        if let Place::Prefetching(ticket) = &self.place[storage.index()] {
            let ticket = ticket.clone();
            self.wait(&ticket)?;
            shim::unpark(self.entry_of(storage)?)?;
            self.place[storage.index()] = Place::Resident;
        }
        Ok(())
    }

    fn rerun(&mut self, operator: OperatorId) -> Result<(), Fault> {
        let started = Instant::now();
        let facts = &self.trace.operators[operator.index()];
        let mut versions = self.lineage.replay_inputs(operator).iter();
        let mut inputs = Vec::with_capacity(facts.accesses.len());
        for access in &facts.accesses {
            inputs.push(match access.mode {
                AccessMode::Overwrite | AccessMode::SideEffect => Entry::NONE,
                AccessMode::Read | AccessMode::Write => {
                    let version = *versions.next().expect("one version for each access that is read");
                    self.materialised(version)
                        .ok_or_else(|| Fault::Broken(format!("version {} is not there", version.0)))?
                }
            });
        }
        let recipe = self.recipes[operator.index()]
            .as_ref()
            .ok_or_else(|| Fault::Broken(format!("operator {} has no recipe", operator.0)))?;
        let outputs = self.lineage.replay_outputs(operator);
        let mut results = vec![Entry::NONE; outputs.len()];
        shim::rerun(recipe, &inputs, &mut results)?;
        for (&version, &result) in outputs.iter().zip(&results) {
            // Written in place: the version that it was is no more.
            if let Some(consumed) = self.beside.iter_mut().find(|beside| **beside == Some(result)) {
                *consumed = None;
            }
            let storage = self.lineage.version(version).storage;
            let wanted =
                self.current[storage.index()] == version && matches!(self.place[storage.index()], Place::Dropped);
            if let Some(twin) = self.beside[version.index()].take().filter(|twin| *twin != result) {
                // Another output of this operator was wanted, and this one had been made before.
                shim::discard(twin)?;
            }
            if wanted {
                shim::adopt(result, self.entry_of(storage)?)?;
                self.place[storage.index()] = Place::Resident;
            } else {
                self.beside[version.index()] = Some(result);
            }
        }
        self.report.reruns += 1;
        self.report.rerun_ns += started.elapsed().as_nanos() as u64;
        Ok(())
    }

    /// The entry whose bytes are `version` now.
    fn materialised(&self, version: VersionId) -> Option<Entry> {
        let storage = self.lineage.version(version).storage.index();
        let in_place = self.current[storage] == version && matches!(self.place[storage], Place::Resident);
        self.beside[version.index()].or(if in_place { self.entry[storage] } else { None })
    }

    fn release(&mut self, version: VersionId) -> Result<(), Fault> {
        if let Some(entry) = self.beside[version.index()].take() {
            shim::discard(entry)?;
        }
        Ok(())
    }

    /// The program departed from the trace: restores everything and touches nothing until the iteration ends.
    fn lose(&mut self, why: String) {
        if self.following == Following::Schedule
            && let Err(fault) = self.restore_all()
        {
            // Bytes are lost; going on would train on garbage.
            panic!("storages could not be restored after a deviation ({why}): {fault}");
        }
        self.following = Following::Lost;
        self.report.deviation.get_or_insert(why);
    }

    fn restore_all(&mut self) -> Result<(), Fault> {
        for index in 0..self.place.len() {
            self.restore(StorageId(index as u32))?;
        }
        for index in 0..self.beside.len() {
            self.release(VersionId(index as u32))?;
        }
        Ok(())
    }

    fn restore(&mut self, storage: StorageId) -> Result<(), Fault> {
        match self.place[storage.index()] {
            Place::Absent | Place::Resident => Ok(()),
            Place::Offloading(_) => self.recall(storage),
            Place::Prefetching(_) => self.finish_prefetch(storage),
            Place::Offloaded => {
                self.prefetch(&[storage])?;
                self.finish_prefetch(storage)
            }
            Place::Dropped => self.rebuild(self.current[storage.index()]),
        }
    }

    /// Reruns all that `version` needs. What is materialised beside storages stays until the caller releases it.
    fn rebuild(&mut self, version: VersionId) -> Result<(), Fault> {
        let mut stack = vec![version];
        while let Some(&version) = stack.last() {
            if self.materialised(version).is_some() {
                stack.pop();
                continue;
            }
            let storage = self.lineage.version(version).storage;
            let place = &self.place[storage.index()];
            if self.current[storage.index()] == version && !matches!(place, Place::Absent | Place::Dropped) {
                self.restore(storage)?;
                continue;
            }
            let producer = self.lineage.version(version).producer;
            let producer = producer.ok_or_else(|| Fault::Broken(format!("version {} is a lost root", version.0)))?;
            let depth = stack.len();
            let inputs = self.lineage.replay_inputs(producer);
            stack.extend(inputs.iter().copied().filter(|&input| self.materialised(input).is_none()));
            if stack.len() == depth {
                self.rerun(producer)?;
            }
        }
        Ok(())
    }
}

impl Observer for Executor<'_> {
    fn before(&mut self, operator: &RawOperator) -> Result<Wish, String> {
        self.absorb_freed();
        if self.following == Following::Lost {
            return Ok(Wish::default());
        }
        if let Err(why) = self.check_frees().and_then(|()| self.check(operator)) {
            self.lose(why);
            return Ok(Wish::default());
        }
        if self.following == Following::Matching {
            return Ok(Wish::default());
        }
        if let Err(fault) = self.carry_out_steps() {
            self.lose(fault.to_string());
            return Ok(Wish::default());
        }
        let accesses = &self.trace.operators[self.operator].accesses;
        for access in accesses {
            assert!(
                matches!(self.place[access.storage.index()], Place::Resident),
                "storage {} is {:?} at operator {}",
                access.storage.0,
                self.place[access.storage.index()],
                self.operator,
            );
            self.free_copy(access.storage);
        }
        let wanted = self.recipe_wanted[self.operator];
        Ok(Wish { recipe: wanted, watch: wanted })
    }

    fn after(&mut self, operator: &RawOperator) {
        let recipe = operator.take_recipe();
        if self.following == Following::Lost {
            return;
        }
        let trace = self.trace;
        let expected = &trace.operators[self.operator];
        let alike = operator.created().len() == expected.creates.len()
            && operator
                .created()
                .iter()
                .zip(&expected.creates)
                .all(|(found, storage)| found.bytes == trace.storages[storage.index()].bytes);
        if !alike {
            let why = format!("operator {} ({}) made other storages", self.operator, self.name(self.operator));
            self.lose(why);
            return;
        }
        self.recipes[self.operator] = recipe;
        for (found, &storage) in operator.created().iter().zip(&expected.creates) {
            self.entry[storage.index()] = Some(found.entry);
            self.storage_of.insert(found.entry, storage);
            self.place[storage.index()] = Place::Resident;
            if self.following == Following::Schedule {
                self.hold_root(storage);
            }
        }
        for &version in self.lineage.writes(self.operator) {
            self.current[self.lineage.version(version).storage.index()] = version;
        }
        for &storage in &expected.frees {
            self.unhold(storage);
        }
        self.operator += 1;
    }

    fn failed(&mut self) {
        if self.following != Following::Lost {
            let why = format!("operator {} ({}) failed", self.operator, self.name(self.operator));
            self.lose(why);
        }
    }
}

impl Drop for Executor<'_> {
    fn drop(&mut self) {
        // An iteration that panicked may have left storages without their bytes.
        let torn = self.place.iter().any(|place| !matches!(place, Place::Absent | Place::Resident));
        if torn && let Err(fault) = self.restore_all() {
            eprintln!("plimsoll: storages could not be restored: {fault}");
        }
    }
}

/// Which operators may be rerun under `plan`, and which storages hold roots that reruns start from.
fn ancestry(trace: &Trace, lineage: &Lineage, plan: &Plan) -> (Vec<bool>, Vec<bool>) {
    let mut recipe_wanted = vec![false; trace.operators.len()];
    let mut is_root = vec![false; trace.storages.len()];
    let mut seen = vec![false; lineage.versions().len()];
    let mut stack: Vec<VersionId> = lineage
        .windows()
        .iter()
        .zip(plan.actions())
        .filter(|&(_, &action)| action == Action::Recompute)
        .map(|(window, _)| window.version)
        .collect();
    while let Some(version) = stack.pop() {
        if std::mem::replace(&mut seen[version.index()], true) {
            continue;
        }
        match lineage.version(version).producer {
            Some(producer) => {
                recipe_wanted[producer.index()] = true;
                stack.extend(lineage.replay_inputs(producer));
                // Once it cannot be rebuilt any more, reruns start from what its storage holds.
                let Version { storage, until, rebuildable_until, .. } = *lineage.version(version);
                is_root[storage.index()] |= rebuildable_until.is_some_and(|rebuildable| rebuildable < until);
            }
            None => is_root[lineage.version(version).storage.index()] = true,
        }
    }
    (recipe_wanted, is_root)
}
