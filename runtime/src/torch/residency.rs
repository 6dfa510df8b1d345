//! Where the bytes of every live storage are, and the only ways to move them.
//!
//! What a plan says is carried out by it (`driver/instructions.rs`), and so is what has to be evicted when bytes run out
//! (`reactive.rs`). An operator finds its inputs resident either way, so a program that leaves its plan loses nothing. Nothing
//! here decides what to evict. How bytes leave and come back is in `swap.rs` and `recompute.rs`.

mod custody;
mod uses;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

pub(crate) use self::uses::Written;
use super::ancestry::{Ancestry, MakerId, VersionId};
use super::copy::{CopyEngine, CopyError, SlowCopy, Ticket};
use super::deaths::Deaths;
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

impl Place {
    /// Whether they are on their way, to a slow tier or back.
    fn is_copied(&self) -> bool {
        matches!(self, Place::Offloading(_) | Place::Prefetching(_))
    }
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

    /// Its bytes, where it has none on the device.
    fn away_bytes(&self) -> u64 {
        if matches!(self.place, Place::Offloaded | Place::Dropped) { self.bytes } else { 0 }
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
    #[error("nothing may leave or come back while a CUDA graph is captured")]
    Captured,
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

fn gone(entry: Entry) -> Fault {
    Fault::Broken(format!("{entry:?} is gone"))
}

/// What is being brought back, at an iteration's end or for an operator that writes: then only what does not undo that may be
/// evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Restoring {
    /// Nothing in particular: anything may be evicted.
    #[default]
    Nothing,
    /// What is dropped: others may be swapped.
    Dropped,
    /// What is swapped: nothing may be evicted.
    Swapped,
}

/// How long a thread may take from its last hold of a storage to the report of its death, which waits for the lock of its allocator.
const DYING: Duration = Duration::from_secs(1);

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
    pub(crate) restoring: Restoring,
    /// Whether the line does not count: restoring everything takes more than the budget.
    pub(crate) exempt: bool,
    prune_at: usize,
    pub(super) reactive: Reactive,
    pub(crate) report: IterationReport,
    pub(crate) events: Events,
    started: Instant,
    /// How many storages there have been.
    storages: u64,
    /// The number of the iteration under way, or of the part of one; another one once what it knew is forgotten.
    part: u32,
    deaths: Deaths,
    freed: Vec<Entry>,
    died: Vec<(Entry, u64)>,
    /// Bytes of all storages that have none on the device.
    away_bytes: u64,
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
            restoring: Restoring::Nothing,
            exempt: false,
            prune_at: MAKERS_MIN,
            reactive,
            report: IterationReport::default(),
            events: Events::default(),
            started: Instant::now(),
            storages: 0,
            part: 0,
            deaths: Deaths::new(),
            freed: Vec::new(),
            died: Vec::new(),
            away_bytes: 0,
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
        self.get(entry).ok_or_else(|| gone(entry))
    }

    pub(super) fn live_mut(&mut self, entry: Entry) -> Result<&mut Live, Fault> {
        let live = self.live.get_mut(entry.index()).and_then(Option::as_mut);
        live.ok_or_else(|| gone(entry))
    }

    /// Every live storage.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Entry, &Live)> {
        self.live.iter().enumerate().filter_map(|(index, live)| Some((Entry::at(index), live.as_ref()?)))
    }

    /// Bytes that would be allocated if every storage had its own.
    pub(crate) fn bytes_if_resident(&self) -> u64 {
        shim::live_bytes() + self.away_bytes
    }

    /// Books where the bytes of a storage are from now on. Returns where they were.
    pub(super) fn put(&mut self, entry: Entry, place: Place) -> Result<Place, Fault> {
        self.change(entry, |live| std::mem::replace(&mut live.place, place)).ok_or_else(|| gone(entry))
    }

    /// Another size is known of a storage, which is locked from then on.
    pub(super) fn resize(&mut self, entry: Entry, bytes: u64) {
        self.change(entry, |live| (live.bytes, live.locked) = (bytes, Some(RESIZED)));
    }

    /// Changes what is booked of a storage, and with it the sum of what is away.
    fn change<R>(&mut self, entry: Entry, change: impl FnOnce(&mut Live) -> R) -> Option<R> {
        let live = self.live.get_mut(entry.index())?.as_mut()?;
        let before = live.away_bytes();
        let changed = change(live);
        self.away_bytes = self.away_bytes - before + live.away_bytes();
        Some(changed)
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
        self.reactive.begin();
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
    /// until it has run, and those that are being copied while a CUDA graph is captured until that is over.
    pub(crate) fn absorb_freed(&mut self) -> Result<(), Fault> {
        let must_wait = |live: &Live| live.users > 0 || live.place.is_copied() && shim::is_capturing();
        // What is let go of for the sake of what died may die in turn.
        let mut more = true;
        if let Some(missed) = self.deaths.take_missed() {
            missed.into_iter().try_for_each(|entry| self.book_death(entry).map(drop))?;
        }
        while std::mem::take(&mut more) {
            if !shim::take_freed(&mut self.freed) {
                return Ok(());
            }
            let (mut freed, mut used) = (std::mem::take(&mut self.freed), Vec::new());
            for entry in freed.drain(..) {
                if self.get(entry).is_some_and(must_wait) {
                    used.push(entry);
                    continue;
                }
                more |= self.book_death(entry)?;
                self.deaths.forget(entry);
            }
            freed.append(&mut used);
            self.freed = freed;
        }
        Ok(())
    }

    /// Books that a storage has died, where it is known. Whether others were let go of for that.
    fn book_death(&mut self, entry: Entry) -> Result<bool, Fault> {
        let Some(live) = self.get(entry) else { return Ok(false) };
        let (version, bytes, away_bytes) = (live.version, live.bytes, live.away_bytes());
        if live.place.is_copied() {
            self.dies_on_its_way(entry);
        }
        self.away_bytes -= away_bytes;
        self.live[entry.index()] = None;
        let mut lets_go = false;
        if let Some(version) = version {
            if self.ancestry.version(version).is_dropped {
                self.dropped.remove(&version);
            }
            self.ancestry.lose(version);
            lets_go = self.ancestry.has_custody();
            self.take_custody()?;
        }
        self.held.remove(&entry);
        self.died.push((entry, bytes));
        Ok(lets_go)
    }

    /// A storage has died whose bytes are being copied.
    #[cold]
    fn dies_on_its_way(&mut self, entry: Entry) {
        let dead = self.live[entry.index()].take();
        if let Some(Live { place: Place::Offloading(ticket) | Place::Prefetching(ticket), .. }) = &dead {
            // The copy reads or writes bytes that `forget` frees. A dead worker touches them no more.
            let _ = self.wait(ticket);
            self.has_left(entry);
        }
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
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// Whether a storage of that number has died since the last call of [`Residency::drain_died`].
    pub(crate) fn has_died_untold(&self, entry: Entry) -> bool {
        self.died.iter().any(|&(died, _)| died == entry)
    }

    /// Whether any has.
    pub(crate) fn have_died(&self) -> bool {
        !self.died.is_empty()
    }

    /// The storages that have died since the last call, in order, and their bytes.
    pub(crate) fn drain_died(&mut self) -> impl Iterator<Item = (Entry, u64)> {
        self.died.drain(..)
    }

    /// The version that a storage holds.
    pub(super) fn version_of(&mut self, entry: Entry) -> Result<VersionId, Fault> {
        let live = self.live(entry)?;
        match live.version {
            Some(version) => Ok(version),
            None => {
                let version = self.ancestry.add_version(entry, live.is_gradient);
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

    /// Books what an operator made and wrote.
    pub(crate) fn record(&mut self, operator: &RawOperator, written: &[Written]) {
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
    }

    /// Keeps the recipe of an operator that has been booked. Returns the maker of its results.
    #[inline(never)]
    pub(crate) fn keep(
        &mut self,
        recipe: Recipe,
        operator: &RawOperator,
        written: &[Written],
        cost_ns: u64,
    ) -> Result<MakerId, Fault> {
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
        Ok(maker)
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

    /// Forgets all recipes, and which copies have failed. Everything must be resident, or left away.
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
        if self.live(entry)?.bytes != bytes {
            self.resize(entry, bytes);
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

    /// Checks, where an iteration ends, that the table agrees with itself; in debug builds alone.
    pub(crate) fn check_at_end(&self) {
        if !cfg!(debug_assertions) {
            return;
        }
        let away_bytes: u64 = self.iter().map(|(_, live)| live.away_bytes()).sum();
        assert_eq!(self.away_bytes, away_bytes);
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
