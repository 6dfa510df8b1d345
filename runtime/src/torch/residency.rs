//! Where the bytes of every live storage are, and the only ways to move them.
//!
//! What a plan says is carried out by it (`driver/instructions.rs`), and so is what has to be evicted when bytes run out
//! (`reactive.rs`). An operator finds its inputs resident either way, so a program that leaves its plan loses nothing. Nothing
//! here decides what to evict. How bytes leave and come back is in `swap.rs` and `recompute.rs`.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::ancestry::{Ancestry, Custody, MakerId, VersionId};
use super::copy::{CopyEngine, CopyError, SlowCopy, Ticket};
use super::events::Events;
use super::reactive::Reactive;
use super::report::IterationReport;
use super::session::SessionError;
use super::shim::{self, AllocateError, Entry, RESIZED, RawAccess, RawOperator, Recipe, ShimError};
use crate::hardware::Refusal;
use crate::trace::{AccessMode, Phase};

/// Makers kept before the first pruning.
const MAKERS_MIN: usize = 4096;
/// Operators between two looks at the clock, where nothing needs to know when each of them ended: a look takes as long as
/// all else that an operator costs which finds everything in its place.
const CLOCK_EVERY: u32 = 8;
/// Operators after which what a program fills in past the dispatcher is filled in.
const FILLED_WITHIN: u64 = 16;

/// Where a storage's bytes are, with what it takes to get them back.
#[derive(Debug)]
pub(crate) enum Place {
    Resident,
    Offloading(Ticket),
    Offloaded,
    Prefetching(Ticket),
    Dropped,
}

/// A storage that the program, or a dropped storage, still needs.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) bytes: u64,
    /// Why it may not be evicted.
    pub(crate) locked: Option<&'static str>,
    pub(crate) place: Place,
    /// Its bytes in the slow tier, from the offload to the next use.
    pub(super) copy: Option<SlowCopy>,
    /// What it holds; none while nobody has asked.
    pub(crate) version: Option<VersionId>,
    /// Operators and reruns under way that use its bytes: it must stay.
    pub(crate) users: u32,
    /// Operators and reruns that will use its bytes once their other inputs are there: it should stay, and it is not
    /// dropped.
    pub(crate) awaited: u32,
    /// Tells it apart from another one that has its entry once it has died.
    serial: u64,
    /// In the slow tier, or on its way there, when an iteration ends, or a part of one, and not brought back for the next.
    pub(crate) is_left_away: bool,
    /// Of what was made from nothing and was not used since, for the program may be filling it in past the dispatcher: the number of
    /// operators with which that is done.
    pub(crate) filled_at: Option<u64>,
    /// Made by the backward pass, and not known to be a root.
    pub(crate) is_gradient: bool,
    /// The iteration, or part of one, whose operator made it; none made what was only seen.
    made_in: Option<u32>,
    pub(crate) last_use_ns: u64,
}

impl Live {
    /// Whether it may be evicted, and nothing uses its bytes.
    pub(crate) fn is_idle(&self) -> bool {
        self.locked.is_none() && self.users + self.awaited == 0
    }
}

/// Something below went wrong.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    #[error("{0}")]
    NoRoom(String),
    #[error(transparent)]
    Shim(#[from] ShimError),
    #[error(transparent)]
    Copy(#[from] CopyError),
    #[error("{0}")]
    Broken(String),
}

impl From<Fault> for SessionError {
    fn from(fault: Fault) -> Self {
        SessionError::NotRestored(fault.to_string())
    }
}

impl From<AllocateError> for Fault {
    fn from(error: AllocateError) -> Self {
        match error {
            AllocateError::NoRoom(message) => Fault::NoRoom(message),
            AllocateError::Failed(error) => error.into(),
        }
    }
}

/// What an operator under way is writing over.
pub(crate) struct Written {
    /// Which of its accesses.
    access: usize,
    /// What the storage held.
    version: VersionId,
}

/// Whether the iteration ends: then only what does not undo its end may be evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Anything may be evicted.
    #[default]
    No,
    /// Dropped storages are being rebuilt: others may be swapped.
    Rebuilding,
    /// Swapped storages are coming back: nothing may be evicted.
    Fetching,
}

/// How long a thread may take from its last hold of a storage to the report of its death.
const DYING: Duration = Duration::from_millis(100);

/// How often an iteration goes back to swaps, after a copy to the slow tier has failed, where nothing else is left.
const LAST_RESORTS: u32 = 4;

/// Whether storages go to the slow tier, in an iteration in which copies may have failed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Swaps {
    /// One has: nothing is swapped, until nothing else is left.
    pub(crate) are_refused: bool,
    /// How often they may yet be tried again then.
    pub(crate) more_tries: u32,
    /// Whether one has in any iteration.
    pub(crate) have_failed: bool,
    /// Whether all that there is can go there unless the device fails.
    pub(crate) are_dependable: bool,
}

impl Default for Swaps {
    fn default() -> Self {
        Swaps { are_refused: false, more_tries: LAST_RESORTS, have_failed: false, are_dependable: false }
    }
}

/// The table of live storages.
pub(crate) struct Residency {
    pub(super) live: Vec<Option<Live>>,
    pub(crate) ancestry: Ancestry<Recipe>,
    pub(super) engine: Box<dyn CopyEngine>,
    /// Offloads under way, oldest first.
    pub(super) offloading: VecDeque<Entry>,
    /// Versions that stand beside the program, oldest first.
    pub(super) beside: Vec<VersionId>,
    pub(super) dropped: BTreeSet<VersionId>,
    held: BTreeSet<Entry>,
    /// Offloads whose bytes a plan takes for released: they are when somebody needs them.
    pub(super) unreleased: VecDeque<Entry>,
    pub(crate) swaps: Swaps,
    /// Per tier: what it refused that was news, since somebody asked.
    pub(super) refusals: [Option<Refusal>; 2],
    pub(super) rebuilds: u32,
    /// How often what reruns to come will read was given up, since there was no rebuild under way.
    pub(super) given_up: HashMap<VersionId, u32>,
    pub(crate) ending: Ending,
    /// Whether the line does not count: restoring everything takes more than the budget.
    pub(crate) exempt: bool,
    prune_at: usize,
    pub(super) reactive: Reactive,
    pub(crate) report: IterationReport,
    pub(crate) events: Events,
    pub(super) started: Instant,
    /// How many storages there have been.
    storages: u64,
    /// The number of the iteration under way, or of the part of one; another one once what it knew is forgotten.
    part: u32,
    freed: Vec<Entry>,
    died: Vec<Entry>,
    /// When an operator ended, the last one or one not long before it.
    clock_ns: u64,
    ticks: u32,
    /// Operators that have been booked.
    pub(super) operators: u64,
    /// What the operator being booked read and made: kept for the room that it has.
    read: Vec<Option<VersionId>>,
    made: Vec<VersionId>,
}

impl Residency {
    pub(crate) fn new(engine: Box<dyn CopyEngine>, reactive: Reactive) -> Self {
        Residency {
            live: Vec::new(),
            ancestry: Ancestry::new(),
            engine,
            offloading: VecDeque::new(),
            beside: Vec::new(),
            dropped: BTreeSet::new(),
            held: BTreeSet::new(),
            unreleased: VecDeque::new(),
            swaps: Swaps::default(),
            refusals: [None; 2],
            rebuilds: 0,
            given_up: HashMap::new(),
            ending: Ending::No,
            exempt: false,
            prune_at: MAKERS_MIN,
            reactive,
            report: IterationReport::default(),
            events: Events::default(),
            started: Instant::now(),
            storages: 0,
            part: 0,
            freed: Vec::new(),
            died: Vec::new(),
            clock_ns: 0,
            ticks: 0,
            operators: 0,
            read: Vec::new(),
            made: Vec::new(),
        }
    }

    /// Time since this table was made.
    pub(crate) fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    pub(crate) fn get(&self, entry: Entry) -> Option<&Live> {
        self.live.get(entry.index())?.as_ref()
    }

    pub(super) fn live(&self, entry: Entry) -> Result<&Live, Fault> {
        self.get(entry).ok_or_else(|| Fault::Broken(format!("{entry:?} is gone")))
    }

    pub(super) fn live_mut(&mut self, entry: Entry) -> Result<&mut Live, Fault> {
        let live = self.live.get_mut(entry.index()).and_then(Option::as_mut);
        live.ok_or_else(|| Fault::Broken(format!("{entry:?} is gone")))
    }

    /// Every live storage.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Entry, &Live)> {
        self.live.iter().enumerate().filter_map(|(index, live)| Some((Entry::at(index), live.as_ref()?)))
    }

    /// Bytes that would be allocated if every storage had its own.
    pub(crate) fn bytes_if_resident(&self) -> u64 {
        let is_away = |live: &&Live| matches!(live.place, Place::Offloaded | Place::Dropped);
        let away_bytes: u64 = self.live.iter().flatten().filter(is_away).map(|live| live.bytes).sum();
        shim::live_bytes() + away_bytes
    }

    /// Whether there would be room for all but what is left away.
    pub(crate) fn may_bring_back(&self) -> bool {
        let left_bytes: u64 = self.live.iter().flatten().filter(|live| live.is_left_away).map(|live| live.bytes).sum();
        self.bytes_if_resident().saturating_sub(left_bytes) <= self.reactive.budget_bytes
    }

    /// Decides what is left away of what is away, by whether it was until now.
    pub(crate) fn leave_away(&mut self, stays: impl Fn(Entry, bool) -> bool) {
        for (entry, live) in self.live.iter_mut().enumerate() {
            let Some(live) = live else { continue };
            let is_away = matches!(live.place, Place::Offloading(_) | Place::Offloaded);
            live.is_left_away = is_away && stays(Entry::at(entry), live.is_left_away);
        }
    }

    /// What is in the slow tier alone, and what is on its way there.
    pub(crate) fn away(&self) -> (Vec<Entry>, Vec<Entry>) {
        let away = self.iter().filter(|(_, live)| matches!(live.place, Place::Offloaded)).map(|(entry, _)| entry);
        let is_leaving =
            |entry: &Entry| self.get(*entry).is_some_and(|live| matches!(live.place, Place::Offloading(_)));
        (away.collect(), self.offloading.iter().copied().filter(is_leaving).collect())
    }

    /// Storages held for the sake of dropped ones.
    pub(crate) fn held(&self) -> &BTreeSet<Entry> {
        &self.held
    }

    /// Adds a storage, or looks up one that is known.
    fn known(&mut self, entry: Entry, bytes: u64, locked: Option<&'static str>) -> &mut Live {
        let index = entry.index();
        if self.live.len() <= index {
            self.live.resize_with(index + 1, || None);
        }
        let last_use_ns = self.clock_ns;
        let storages = &mut self.storages;
        self.live[index].get_or_insert_with(|| {
            *storages += 1;
            Live {
                bytes,
                locked,
                place: Place::Resident,
                copy: None,
                version: None,
                users: 0,
                awaited: 0,
                serial: *storages,
                is_left_away: false,
                filled_at: None,
                is_gradient: false,
                made_in: None,
                last_use_ns,
            }
        })
    }

    /// An iteration begins, or a part of one.
    pub(crate) fn begin(&mut self) {
        self.part = self.part.wrapping_add(1);
        self.report = IterationReport::default();
        (self.reactive.started_ns, self.reactive.next_look) = (self.now_ns(), 0);
        self.lock_lent();
    }

    /// Whether an operator of the iteration under way, or of the part of one, has made a storage.
    pub(crate) fn is_made_here(&self, entry: Entry) -> bool {
        self.get(entry).is_some_and(|live| live.made_in == Some(self.part))
    }

    /// Tells apart what arrived in this iteration, or part of one, and what did in others.
    pub(crate) fn part(&self) -> u32 {
        self.part
    }

    /// An operator has ended. Looks at the clock: always, or `rarely`.
    pub(crate) fn tick(&mut self, rarely: bool) {
        self.ticks = self.ticks.wrapping_add(1);
        if !rarely || self.ticks.is_multiple_of(CLOCK_EVERY) {
            self.clock_ns = self.now_ns();
        }
    }

    /// Books the storages that have died since the last call. Those that an operator under way has let go of count as alive
    /// until it has run.
    pub(crate) fn absorb_freed(&mut self) -> Result<(), Fault> {
        // What is let go of for the sake of what died may die in turn.
        let mut more = true;
        while std::mem::take(&mut more) {
            shim::take_freed(&mut self.freed);
            if self.freed.is_empty() {
                return Ok(());
            }
            let (mut freed, mut used) = (std::mem::take(&mut self.freed), Vec::new());
            for entry in freed.drain(..) {
                if self.get(entry).is_some_and(|live| live.users > 0) {
                    used.push(entry);
                    continue;
                }
                if let Some(mut live) = self.live.get_mut(entry.index()).and_then(Option::take) {
                    if let Place::Offloading(ticket) | Place::Prefetching(ticket) = &live.place {
                        // The copy reads or writes bytes that `forget` frees. A dead worker touches them no more.
                        let _ = self.wait(ticket);
                        self.has_left(entry);
                    }
                    if let Some(copy) = live.copy.take() {
                        self.engine.free(copy);
                    }
                    if let Some(version) = live.version {
                        self.dropped.remove(&version);
                        self.ancestry.lose(version);
                        more |= self.ancestry.has_custody();
                        self.take_custody()?;
                    }
                    self.held.remove(&entry);
                    self.died.push(entry);
                }
                shim::forget(entry);
            }
            freed.append(&mut used);
            self.freed = freed;
        }
        Ok(())
    }

    /// Whether a storage is gone that something could not be done with: another thread may let go of it at any time.
    pub(super) fn has_died(&mut self, entry: Entry) -> Result<bool, Fault> {
        let started = Instant::now();
        loop {
            self.absorb_freed()?;
            // What a rerun is about to read stays booked until that is over.
            if self.get(entry).is_none() || self.freed.contains(&entry) {
                return Ok(true);
            }
            // That thread is about to say so.
            if !shim::has_died(entry) || started.elapsed() > DYING {
                return Ok(false);
            }
            std::thread::yield_now();
        }
    }

    /// Whether a storage of that number has died since the last call of [`Residency::drain_died`].
    pub(crate) fn has_told_nobody(&self, entry: Entry) -> bool {
        self.died.contains(&entry)
    }

    /// The storages that have died since the last call, in order.
    pub(crate) fn drain_died(&mut self) -> impl Iterator<Item = Entry> {
        self.died.drain(..)
    }

    pub(super) fn take_custody(&mut self) -> Result<(), Fault> {
        let mut taken = Ok(());
        for custody in self.ancestry.take_custody() {
            match custody {
                Custody::Hold(entry) => match shim::hold(entry) {
                    Ok(()) => _ = self.held.insert(entry),
                    Err(error) => {
                        // It has died, and nobody has been told yet: in another thread, or as what libtorch's allocator did
                        // not give out.
                        if let Some(version) = self.get(entry).and_then(|live| live.version) {
                            self.ancestry.lose(version);
                        }
                        taken = Err(error.into());
                    }
                },
                Custody::Unhold(entry) => {
                    self.held.remove(&entry);
                    if self.get(entry).is_some() {
                        shim::unhold(entry)?;
                    }
                }
            }
        }
        taken
    }

    /// Whether what stands is held for dropped storages though it could be made again, for a program that is followed tells when it
    /// lets go of that; roots alone otherwise. Returns whether anything was let go of.
    pub(crate) fn hold_near(&mut self, near: bool) -> Result<bool, Fault> {
        let held = self.ancestry.hold_near(near);
        if held.is_empty() {
            return Ok(false);
        }
        let (mut is_read, mut gone) = (false, Ok(true));
        for version in held {
            if self.ancestry.version(version).is_wanted() {
                is_read = true;
            } else if let Err(fault) = self.hold_above(version) {
                gone = Err(fault);
            }
        }
        if is_read {
            // A rerun in another thread is about to. What it reads is looked at again when the next operator arrives.
            self.ancestry.hold_near(true);
        }
        gone
    }

    /// Holds what a version is made from in its stead, if it is held though it could be made again. Whether it was.
    pub(super) fn hold_above(&mut self, version: VersionId) -> Result<bool, Fault> {
        while self.ancestry.anchor_above(version) {
            // Something of it may have died meanwhile, in another thread.
            let is_anchored = self.take_custody().is_ok();
            self.ancestry.let_go(version, is_anchored);
            self.take_custody()?;
            if is_anchored {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// What a storage holds is about to go. Where dropped storages are to be rebuilt from it, what it is made from is held in its stead,
    /// or what was made from it. Whether they can do without it.
    fn let_go(&mut self, version: VersionId) -> Result<bool, Fault> {
        if !self.ancestry.is_held(version) {
            return Ok(true);
        }
        // A rerun, in another thread perhaps, is to read it where it stands.
        if self.ancestry.version(version).is_wanted() {
            return Ok(false);
        }
        if self.hold_above(version)? {
            return Ok(true);
        }
        let Some(heirs) = self.ancestry.heirs(version) else { return Ok(false) };
        let entries: Vec<Entry> = heirs.iter().map(|&(_, heir)| self.ancestry.version(heir).entry).collect();
        for (held, &entry) in entries.iter().enumerate() {
            if shim::hold(entry).is_err() {
                // It has died, in another thread.
                entries[..held].iter().try_for_each(|&other| shim::unhold(other))?;
                self.has_died(entry)?;
                return Ok(false);
            }
        }
        self.ancestry.relinquish(heirs);
        self.take_custody()?;
        // Some of them are not wanted after all.
        entries.into_iter().filter(|entry| !self.held.contains(entry)).try_for_each(shim::unhold)?;
        Ok(true)
    }

    /// The program has let go of a storage that is held for dropped ones: it goes, where they can do without it. Whether nothing was
    /// using it, so that this could be looked at.
    pub(crate) fn relinquish(&mut self, entry: Entry) -> Result<bool, Fault> {
        let live = self.live(entry)?;
        let is_wanted = live.version.is_some_and(|version| self.ancestry.version(version).is_wanted());
        let is_used = live.users + live.awaited > 0 || is_wanted;
        if let Some(version) = live.version.filter(|_| !is_used) {
            self.let_go(version)?;
        }
        Ok(!is_used)
    }

    /// An operator waits for these storages to be made ready.
    pub(crate) fn begin_wait(&mut self, operator: &RawOperator) {
        for access in operator.accesses() {
            let live = self.known(access.entry, access.bytes, access.locked());
            live.awaited += 1;
            live.locked = live.locked.or(access.locked());
            if live.bytes != access.bytes {
                live.bytes = access.bytes;
                live.locked = Some(RESIZED);
            }
            // The shim could not look at what was away: that is done once it is back.
            if !access.was_away()
                && live.filled_at.take().is_some()
                && access.is_filled()
                && let Some(version) = live.version
            {
                self.ancestry.becomes_root(version);
            }
        }
    }

    /// The storages that were away when their operator arrived, are back by now, and had been filled in past the dispatcher
    /// before they went. Asked before the operator writes, which would look the same. The shim has looked at the others.
    pub(crate) fn find_filled(&mut self, accesses: &[RawAccess]) -> Result<Vec<Entry>, Fault> {
        let mut filled = Vec::new();
        for entry in accesses.iter().filter(|access| access.was_away()).map(|access| access.entry) {
            let live = self.live_mut(entry)?;
            if !matches!(live.place, Place::Resident) {
                continue;
            }
            let (was_fresh, version) = (live.filled_at.take().is_some(), live.version);
            if shim::is_filled(entry, true)? && was_fresh {
                version.into_iter().for_each(|version| self.ancestry.becomes_root(version));
                filled.push(entry);
            }
        }
        Ok(filled)
    }

    /// The operator uses them now, or never will.
    pub(crate) fn end_wait(&mut self, entries: &[Entry]) {
        for &entry in entries {
            if let Ok(live) = self.live_mut(entry) {
                live.awaited -= 1;
            }
        }
    }

    /// Begins the use of an operator's storages where each is in its place and as it was known: nothing is to be made
    /// ready. Whether that is so.
    pub(crate) fn use_at_once(&mut self, accesses: &[RawAccess]) -> bool {
        let is_ready = |access: &RawAccess| {
            self.get(access.entry).is_some_and(|live| {
                matches!(live.place, Place::Resident)
                    && live.copy.is_none()
                    && live.bytes == access.bytes
                    && !access.was_away()
                    && !(live.filled_at.is_some() && access.is_filled())
                    && (live.locked.is_some() || !access.is_locked())
            })
        };
        if !accesses.iter().all(is_ready) || self.written_root(accesses).is_some() || self.is_being_read(accesses) {
            return false;
        }
        for access in accesses {
            let live = self.live[access.entry.index()].as_mut().expect("looked at above");
            live.users += 1;
            live.filled_at = None;
        }
        true
    }

    /// Whether reruns, for another thread, are reading what `accesses` write over, or will.
    fn is_being_read(&self, accesses: &[RawAccess]) -> bool {
        let mut written = accesses.iter().filter(|access| access.mode().writes());
        let is_read = |version: VersionId| self.ancestry.version(version).is_wanted();
        self.rebuilds > 0
            && written.any(|access| self.get(access.entry).and_then(|live| live.version).is_some_and(is_read))
    }

    /// None of these storages may be evicted until their use ends.
    pub(crate) fn begin_use(&mut self, entries: &[Entry]) -> Result<(), Fault> {
        entries.iter().try_for_each(|&entry| self.live(entry).map(drop))?;
        for &entry in entries {
            self.live_mut(entry)?.users += 1;
        }
        Ok(())
    }

    /// A rerun will use the storage once its other inputs are there. Returns what [`Residency::end_await`] is to be told.
    pub(super) fn begin_await(&mut self, entry: Entry) -> Result<(Entry, u64), Fault> {
        let live = self.live_mut(entry)?;
        live.awaited += 1;
        Ok((entry, live.serial))
    }

    /// The rerun has used them, or never will. Some may have died meanwhile, in other threads.
    pub(super) fn end_await(&mut self, awaited: &[(Entry, u64)]) {
        for &(entry, serial) in awaited {
            if let Ok(live) = self.live_mut(entry)
                && live.serial == serial
            {
                live.awaited -= 1;
            }
        }
    }

    /// Whether all of them are resident.
    pub(crate) fn are_resident(&self, entries: &[Entry]) -> bool {
        entries.iter().all(|&entry| self.get(entry).is_some_and(|live| matches!(live.place, Place::Resident)))
    }

    /// What the first dropped one of them held.
    pub(crate) fn first_dropped(&self, entries: &[Entry]) -> Option<VersionId> {
        let mut dropped = entries.iter().filter_map(|&entry| self.get(entry));
        dropped.find(|live| matches!(live.place, Place::Dropped)).and_then(|live| live.version)
    }

    /// The operator that used them has run, or will not run.
    pub(crate) fn end_use(&mut self, entries: impl Iterator<Item = Entry>) {
        let last_use_ns = self.clock_ns;
        for entry in entries {
            if let Some(live) = self.live.get_mut(entry.index()).and_then(Option::as_mut) {
                live.users -= 1;
                live.last_use_ns = last_use_ns;
            }
        }
    }

    /// A dropped storage that must be restored before `accesses` write what it is rebuilt from: where what was made from that
    /// stands in storages of its own, those serve in its stead.
    pub(crate) fn at_risk(&mut self, accesses: &[RawAccess]) -> Result<Option<VersionId>, Fault> {
        while let Some(root) = self.written_root(accesses) {
            if !self.let_go(root)? {
                return Ok(self.ancestry.dependents(root, self.dropped.iter().copied()).into_iter().next());
            }
        }
        Ok(None)
    }

    /// What `accesses` write over, and dropped storages are to be rebuilt from.
    fn written_root(&self, accesses: &[RawAccess]) -> Option<VersionId> {
        if self.dropped.is_empty() {
            return None;
        }
        let written = accesses.iter().filter(|access| access.mode().writes());
        let mut versions = written.filter_map(|access| self.get(access.entry)?.version);
        versions.find(|&version| self.ancestry.is_held(version))
    }

    /// The operator is about to write: from now on nothing can be rebuilt from what its storages held. Says in `written`
    /// what that was.
    pub(crate) fn begin_writes(
        &mut self,
        accesses: &[RawAccess],
        keeps_recipe: bool,
        written: &mut Vec<Written>,
    ) -> Result<(), Fault> {
        written.clear();
        if !accesses.iter().any(|access| access.mode().writes()) {
            return Ok(());
        }
        for (access, item) in accesses.iter().enumerate().filter(|(_, item)| item.mode().writes()) {
            if keeps_recipe {
                self.version_of(item.entry)?;
            }
            if let Some(version) = self.live_mut(item.entry)?.version.take() {
                self.ancestry.lose(version);
                self.ancestry.version_mut(version).wanted += 1;
                written.push(Written { access, version });
            }
        }
        self.take_custody()
    }

    /// The operator has written, or failed.
    pub(crate) fn end_writes(&mut self, written: &[Written]) {
        for &Written { version, .. } in written {
            self.ancestry.version_mut(version).wanted -= 1;
        }
    }

    /// The version that a storage holds.
    pub(super) fn version_of(&mut self, entry: Entry) -> Result<VersionId, Fault> {
        let live = self.live(entry)?;
        match live.version {
            Some(version) => Ok(version),
            None => {
                let version = self.ancestry.add_version(entry, live.bytes, live.is_gradient);
                self.live_mut(entry)?.version = Some(version);
                Ok(version)
            }
        }
    }

    /// What an operator made may hold what it used, where no operator says so.
    pub(crate) fn lock_used(&mut self, accesses: &[RawAccess]) {
        for access in accesses.iter().filter(|access| access.is_locked()) {
            if let Ok(live) = self.live_mut(access.entry) {
                live.locked = live.locked.or(access.locked());
            }
        }
    }

    /// What was lent while nobody listened stays from now on.
    fn lock_lent(&mut self) {
        // What is not known yet is said to be locked when it is first used.
        for (index, live) in self.live.iter_mut().enumerate() {
            if let Some(live) = live {
                live.locked = live.locked.or_else(|| shim::lent(Entry::at(index)));
            }
        }
    }

    /// Books what an operator made and wrote. Returns the maker of its results, where its recipe was kept.
    pub(crate) fn record(
        &mut self,
        operator: &RawOperator,
        written: &[Written],
        cost_ns: u64,
    ) -> Result<Option<MakerId>, Fault> {
        self.end_writes(written);
        self.lock_used(operator.accesses());
        self.operators += 1;
        // What has undefined bytes, as what else cannot be made again, is filled in when it is used.
        let filled_at = if operator.is_replayable() { self.operators + FILLED_WITHIN } else { u64::MAX };
        let filled_at = operator.accesses().is_empty().then_some(filled_at);
        for created in operator.created() {
            let made_in = Some(self.part);
            let live = self.known(created.entry, created.bytes, created.locked());
            (live.filled_at, live.made_in) = (filled_at, made_in);
        }
        let Some(recipe) = operator.take_recipe().filter(|_| operator.is_replayable()) else { return Ok(None) };
        let (mut read, mut made) = (std::mem::take(&mut self.read), std::mem::take(&mut self.made));
        read.clear();
        made.clear();
        for (index, access) in operator.accesses().iter().enumerate() {
            read.push(match access.mode() {
                AccessMode::Read => Some(self.version_of(access.entry)?),
                AccessMode::Write => written.iter().find(|written| written.access == index).map(|old| old.version),
                _ => None,
            });
            if access.is_written() {
                made.push(self.version_of(access.entry)?);
            }
        }
        let is_gradient = shim::phase() == Phase::Backward;
        for created in operator.created() {
            self.live_mut(created.entry)?.is_gradient = is_gradient;
            made.push(self.version_of(created.entry)?);
        }
        self.take_custody()?;
        let maker = self.ancestry.add_maker(recipe, &read, &made, cost_ns);
        (self.read, self.made) = (read, made);
        Ok(Some(maker))
    }

    /// Forgets recipes that lead nowhere, once there are many.
    pub(crate) fn prune(&mut self) {
        if self.ancestry.makers() > self.prune_at && self.rebuilds == 0 {
            self.ancestry.prune();
            self.prune_at = MAKERS_MIN.max(2 * self.ancestry.makers());
        }
    }

    /// The iteration ends: the program fills nothing in meanwhile.
    pub(crate) fn settle_fresh(&mut self) {
        self.live.iter_mut().flatten().for_each(|live| live.filled_at = None);
    }

    /// Forgets all recipes. Everything must be resident, or left away.
    pub(crate) fn forget_makers(&mut self) {
        self.live.iter_mut().flatten().for_each(|live| live.version = None);
        self.ancestry.clear();
        self.part = self.part.wrapping_add(1);
        self.prune_at = MAKERS_MIN;
        self.swaps = Swaps { have_failed: self.swaps.have_failed, ..Swaps::default() };
    }

    /// The size of a storage now; one that changed its size past an operator's notice is locked from then on.
    pub(super) fn true_bytes(&mut self, entry: Entry) -> Result<u64, Fault> {
        let bytes = shim::bytes_of(entry)?;
        let live = self.live_mut(entry)?;
        if live.bytes != bytes {
            live.bytes = bytes;
            live.locked = Some(RESIZED);
            return Err(Fault::Broken(format!("{entry:?} has changed its size")));
        }
        Ok(bytes)
    }

    /// Lets go of every copy of what is resident and of everything beside the program.
    pub(crate) fn tidy_up(&mut self) -> Result<(), Fault> {
        for entry in (0..self.live.len()).map(Entry::at) {
            if self.are_resident(&[entry]) {
                self.free_copy(entry);
            }
        }
        for version in std::mem::take(&mut self.beside) {
            if let Some(entry) = self.ancestry.version_mut(version).beside.take() {
                shim::discard(entry)?;
            }
        }
        let mut offloading = std::mem::take(&mut self.offloading);
        offloading.retain(|&entry| self.get(entry).is_some_and(|live| live.is_left_away));
        self.unreleased = offloading.clone();
        self.offloading = offloading;
        Ok(())
    }

    /// Checks that the table agrees with itself; in debug builds alone.
    pub(crate) fn check(&self) {
        if !cfg!(debug_assertions) {
            return;
        }
        for (entry, live) in self.iter() {
            let dropped = live.version.is_some_and(|version| self.dropped.contains(&version));
            assert_eq!(dropped, matches!(live.place, Place::Dropped), "{entry:?} is {:?}", live.place);
            assert!(live.is_left_away || matches!(live.place, Place::Resident), "{entry:?} is {:?}", live.place);
            let away = matches!(live.place, Place::Offloading(_) | Place::Offloaded | Place::Prefetching(_));
            assert!(!away || live.copy.is_some(), "{entry:?} is {:?} without a copy", live.place);
            if let Some(version) = live.version {
                let version = self.ancestry.version(version);
                assert!(version.is_current && version.entry == entry, "{entry:?} holds what is not current");
                assert_eq!(version.is_dropped, dropped, "{entry:?}");
            }
        }
        for &version in &self.beside {
            assert!(self.ancestry.version(version).beside.is_some(), "{version:?} is not beside");
        }
    }
}
