//! Where the bytes of every live storage are, and the only ways to move them.
//!
//! Two drivers use it: the scheduled one carries out what a plan says, the reactive one evicts when bytes run out. An
//! operator finds its inputs resident under either, so a program that leaves its plan merely changes drivers. Nothing
//! here decides what to evict, and nothing here runs a kernel: a rerun is handed out as a [`Job`], to be run with no
//! lock held, because the kernel's own allocations may come back here for room.

use std::collections::{BTreeSet, VecDeque};
use std::time::Instant;

use super::ancestry::{Ancestry, Custody, MakerId, VersionId};
use super::copy::{CopyEngine, CopyError, DeviceBytes, SlowCopy, Ticket};
use super::events::{Channel, Events};
use super::reactive::Reactive;
use super::report::IterationReport;
use super::shim::{self, AllocateError, Entry, RawAccess, RawOperator, Recipe, ShimError};
use crate::hardware::Tier;
use crate::trace::{AccessMode, Phase};

/// Reads of the slow tier that may fail one after another before the storage is given up for now.
const FETCH_ATTEMPTS: usize = 3;
/// Makers kept before the first pruning.
const MAKERS_MIN: usize = 4096;
/// Operators between two looks at the clock, where nothing needs to know when each of them ended: a look takes as long as
/// all else that an operator costs which finds everything in its place.
const CLOCK_EVERY: u32 = 8;

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
    copy: Option<SlowCopy>,
    /// What it holds; none while nobody has asked.
    pub(crate) version: Option<VersionId>,
    /// Operators and reruns under way that use its bytes: it must stay.
    pub(crate) users: u32,
    /// Operators and reruns that will use its bytes once their other inputs are there: it should stay, and it is not
    /// dropped.
    pub(crate) awaited: u32,
    /// Made from nothing and not used since: the program may be filling it in past the dispatcher.
    pub(crate) is_fresh: bool,
    /// Made by the backward pass, and not known to be a root.
    pub(crate) is_gradient: bool,
    pub(crate) last_use_ns: u64,
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

/// A rerun, to be run with no lock held.
pub(crate) struct Job {
    maker: MakerId,
    recipe: Recipe,
    inputs: Vec<Entry>,
    outputs: usize,
    /// Inputs that stand in their storages.
    locked: Vec<Entry>,
    /// Whether what nobody waits for is released at once, as opposed to when a schedule says so.
    is_tidy: bool,
}

/// What a rerun gave.
pub(crate) struct Done {
    job: Job,
    results: Result<Vec<Entry>, AllocateError>,
    started: Instant,
    elapsed_ns: u64,
}

impl Job {
    pub(crate) fn run(self) -> Done {
        let started = Instant::now();
        let mut results = vec![Entry::NONE; self.outputs];
        let ran = shim::rerun(&self.recipe, &self.inputs, &mut results);
        Done { job: self, results: ran.map(|()| results), started, elapsed_ns: started.elapsed().as_nanos() as u64 }
    }
}

/// A version being made again, and what waits for that.
struct Frame {
    version: VersionId,
    maker: Option<MakerId>,
    /// Storages that its maker reads.
    awaited: Vec<Entry>,
    /// What was made for its maker, and is kept until that has run. What else stands beside the program may go when bytes
    /// run out, and is then made for it.
    made: Vec<VersionId>,
    /// What is to be made for its maker, and by which, the next one last. All of it in the order in which the program did:
    /// what an operator wrote over is read before, and no more of it is there at once than there was then.
    agenda: Vec<(VersionId, MakerId)>,
}

impl Frame {
    fn of(version: VersionId) -> Self {
        Frame { version, maker: None, awaited: Vec::new(), made: Vec::new(), agenda: Vec::new() }
    }
}

/// Reruns on the way to one version. An explicit stack, not recursion: chains can be as long as the iteration.
pub(crate) struct Rebuild {
    frames: Vec<Frame>,
}

impl Rebuild {
    pub(crate) fn of(version: VersionId) -> Self {
        Rebuild { frames: vec![Frame::of(version)] }
    }
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

/// The table of live storages.
pub(crate) struct Residency {
    live: Vec<Option<Live>>,
    pub(crate) ancestry: Ancestry<Recipe>,
    pub(super) engine: Box<dyn CopyEngine>,
    /// Offloads under way, oldest first. Some may have been recalled since.
    pub(super) offloading: VecDeque<Entry>,
    /// Versions that stand beside the program, oldest first.
    pub(super) beside: Vec<VersionId>,
    pub(super) dropped: BTreeSet<VersionId>,
    held: Vec<Entry>,
    /// Why nothing is swapped any more in this iteration.
    pub(super) swap_refused: Option<CopyError>,
    pub(super) rebuilds: u32,
    pub(crate) ending: Ending,
    /// Whether the line does not count: restoring everything takes more than the budget.
    pub(crate) exempt: bool,
    prune_at: usize,
    pub(super) reactive: Reactive,
    pub(crate) report: IterationReport,
    pub(crate) events: Events,
    pub(super) started: Instant,
    freed: Vec<Entry>,
    died: Vec<Entry>,
    /// When an operator ended, the last one or one not long before it.
    clock_ns: u64,
    ticks: u32,
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
            held: Vec::new(),
            swap_refused: None,
            rebuilds: 0,
            ending: Ending::No,
            exempt: false,
            prune_at: MAKERS_MIN,
            reactive,
            report: IterationReport::default(),
            events: Events::default(),
            started: Instant::now(),
            freed: Vec::new(),
            died: Vec::new(),
            clock_ns: 0,
            ticks: 0,
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

    /// Storages held for the sake of dropped ones.
    pub(crate) fn held(&self) -> &[Entry] {
        &self.held
    }

    /// Adds a storage, or looks up one that is known.
    fn known(&mut self, entry: Entry, bytes: u64, locked: Option<&'static str>) -> &mut Live {
        let index = entry.index();
        if self.live.len() <= index {
            self.live.resize_with(index + 1, || None);
        }
        let last_use_ns = self.clock_ns;
        self.live[index].get_or_insert_with(|| Live {
            bytes,
            locked,
            place: Place::Resident,
            copy: None,
            version: None,
            users: 0,
            awaited: 0,
            is_fresh: false,
            is_gradient: false,
            last_use_ns,
        })
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
            let (mut freed, mut used) = (std::mem::take(&mut self.freed), Vec::new());
            shim::take_freed(&mut freed);
            for entry in freed.drain(..) {
                if self.get(entry).is_some_and(|live| live.users > 0) {
                    used.push(entry);
                    continue;
                }
                if let Some(mut live) = self.live.get_mut(entry.index()).and_then(Option::take) {
                    if let Place::Offloading(ticket) | Place::Prefetching(ticket) = &live.place {
                        // The copy reads or writes bytes that `forget` frees. A dead worker touches them no more.
                        let _ = self.wait(ticket);
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
                    self.died.push(entry);
                }
                shim::forget(entry);
            }
            freed.append(&mut used);
            self.freed = freed;
        }
        Ok(())
    }

    /// The storages that have died since the last call, in order.
    pub(crate) fn drain_died(&mut self) -> impl Iterator<Item = Entry> {
        self.died.drain(..)
    }

    fn take_custody(&mut self) -> Result<(), Fault> {
        if !self.ancestry.has_custody() {
            return Ok(());
        }
        for custody in self.ancestry.take_custody() {
            match custody {
                Custody::Hold(entry) => {
                    shim::hold(entry)?;
                    self.held.push(entry);
                }
                Custody::Unhold(entry) => {
                    self.held.retain(|held| *held != entry);
                    shim::unhold(entry)?;
                }
            }
        }
        Ok(())
    }

    /// The program has let go of a storage that is held for dropped ones: it goes, where they can do without it.
    pub(crate) fn relinquish(&mut self, entry: Entry) -> Result<(), Fault> {
        let live = self.live(entry)?;
        if live.users + live.awaited == 0
            && let Some(version) = live.version
            && self.ancestry.relinquish(version)
        {
            self.take_custody()?;
        }
        Ok(())
    }

    fn wait(&mut self, ticket: &Ticket) -> Result<(), CopyError> {
        let started = Instant::now();
        let waited = self.engine.wait(ticket);
        let stall_ns = started.elapsed().as_nanos() as u64;
        self.report.stall_ns += stall_ns;
        self.events.stalled(started, stall_ns);
        waited
    }

    fn free_copy(&mut self, entry: Entry) {
        if let Some(copy) = self.live.get_mut(entry.index()).and_then(Option::as_mut).and_then(|live| live.copy.take())
        {
            self.engine.free(copy);
        }
    }

    /// An operator waits for these storages to be made ready.
    pub(crate) fn begin_wait(&mut self, operator: &RawOperator) {
        for access in operator.accesses() {
            let live = self.known(access.entry, access.bytes, access.locked());
            live.awaited += 1;
            live.locked = live.locked.or(access.locked());
            if live.bytes != access.bytes {
                live.bytes = access.bytes;
                live.locked = Some("changes its size");
            }
            // The shim could not look at what was away: that is done once it is back.
            if !access.was_away()
                && std::mem::take(&mut live.is_fresh)
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
            let (was_fresh, version) = (std::mem::take(&mut live.is_fresh), live.version);
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
                    && !(live.is_fresh && access.is_filled())
                    && (live.locked.is_some() || !access.is_locked())
            })
        };
        if !accesses.iter().all(is_ready) || self.written_root(accesses).is_some() {
            return false;
        }
        for access in accesses {
            let live = self.live[access.entry.index()].as_mut().expect("looked at above");
            live.users += 1;
            live.is_fresh = false;
        }
        true
    }

    /// None of these storages may be evicted until their use ends.
    pub(crate) fn begin_use(&mut self, entries: &[Entry]) -> Result<(), Fault> {
        entries.iter().try_for_each(|&entry| self.live(entry).map(drop))?;
        for &entry in entries {
            self.live_mut(entry)?.users += 1;
        }
        Ok(())
    }

    /// Brings all of them back from the slow tier, none at the expense of another. Where the slow tier fails they may
    /// count as dropped afterwards.
    pub(crate) fn fetch_together(&mut self, entries: &[Entry]) -> Result<(), Fault> {
        self.begin_use(entries)?;
        let fetched = entries.iter().try_for_each(|&entry| self.fetch(entry));
        for &entry in entries {
            self.live_mut(entry)?.users -= 1;
        }
        fetched
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
            if !self.ancestry.relinquish(root) {
                return Ok(self.ancestry.dependents(root, self.dropped.iter().copied()).into_iter().next());
            }
            self.take_custody()?;
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
    fn version_of(&mut self, entry: Entry) -> Result<VersionId, Fault> {
        let live = self.live(entry)?;
        match live.version {
            Some(version) => Ok(version),
            None => {
                let version = self.ancestry.add_version(entry, live.bytes);
                self.live_mut(entry)?.version = Some(version);
                Ok(version)
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
        // What it made may hold what it used, where no operator says so.
        for access in operator.accesses().iter().filter(|access| access.is_locked()) {
            if let Ok(live) = self.live_mut(access.entry) {
                live.locked = live.locked.or(access.locked());
            }
        }
        let is_fresh = operator.accesses().is_empty();
        for created in operator.created() {
            self.known(created.entry, created.bytes, created.locked()).is_fresh = is_fresh;
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
        self.live.iter_mut().flatten().for_each(|live| live.is_fresh = false);
    }

    /// Forgets all recipes. Everything must be resident.
    pub(crate) fn forget_makers(&mut self) {
        self.live.iter_mut().flatten().for_each(|live| live.version = None);
        self.ancestry.clear();
        self.prune_at = MAKERS_MIN;
        self.swap_refused = None;
    }

    /// Starts copying storages to the slow tier, as one slab.
    pub(crate) fn offload(&mut self, entries: &[Entry], tier: Tier) -> Result<(), Fault> {
        let mut pieces = Vec::with_capacity(entries.len());
        for &entry in entries {
            let bytes = self.true_bytes(entry)? as usize;
            pieces.push(DeviceBytes { start: shim::park(entry)?, bytes });
        }
        // SAFETY: the entries keep the bytes until the ticket has been waited for; nothing else can reach them.
        let mut started = unsafe { self.engine.offload(&pieces, tier) };
        if started.is_err() && tier == Tier::Host {
            // SAFETY: as above.
            started = unsafe { self.engine.offload(&pieces, Tier::File) }.or(started);
        }
        let (copies, ticket) = match started {
            Ok(started) => started,
            Err(error) => {
                for &entry in entries {
                    shim::unpark(entry)?;
                }
                self.refuse_swap(error.clone());
                return Err(error.into());
            }
        };
        let mut total = 0;
        for (&entry, copy) in entries.iter().zip(copies) {
            self.free_copy(entry);
            let live = self.live_mut(entry)?;
            live.copy = Some(copy);
            live.place = Place::Offloading(ticket.clone());
            total += live.bytes;
            self.offloading.push_back(entry);
        }
        self.report.offloaded_bytes += total;
        self.events.copy_started(Channel::Offload, entries[0], total);
        Ok(())
    }

    /// A copy to the slow tier failed: nothing else goes there in this iteration.
    fn refuse_swap(&mut self, error: CopyError) {
        self.report.failed_copies += 1;
        self.swap_refused = Some(error);
    }

    /// The size of a storage now; one that changed its size past an operator's notice is locked from then on.
    fn true_bytes(&mut self, entry: Entry) -> Result<u64, Fault> {
        let bytes = shim::bytes_of(entry)?;
        let live = self.live_mut(entry)?;
        if live.bytes != bytes {
            live.bytes = bytes;
            live.locked = Some("changes its size");
            return Err(Fault::Broken(format!("{entry:?} has changed its size")));
        }
        Ok(bytes)
    }

    /// Waits for an offload and releases the device bytes. Where the copy failed they are put back in place.
    pub(crate) fn finish_offload(&mut self, entry: Entry) -> Result<(), Fault> {
        self.offloading.retain(|other| *other != entry);
        // The program may have let go of it meanwhile; then its bytes are free already.
        if let Some(Live { place: Place::Offloading(ticket), .. }) = self.get(entry) {
            let ticket = ticket.clone();
            if let Err(error) = self.wait(&ticket) {
                shim::unpark(entry)?;
                self.live_mut(entry)?.place = Place::Resident;
                self.free_copy(entry);
                self.refuse_swap(error.clone());
                return Err(error.into());
            }
            self.events.copy_ended(Channel::Offload, entry);
            shim::release(entry)?;
            self.live_mut(entry)?.place = Place::Offloaded;
        }
        Ok(())
    }

    /// Waits for an offload and puts the bytes back in place: the program wants them already.
    pub(crate) fn recall(&mut self, entry: Entry) -> Result<(), Fault> {
        self.offloading.retain(|other| *other != entry);
        if let Some(Live { place: Place::Offloading(ticket), .. }) = self.get(entry) {
            let ticket = ticket.clone();
            let waited = self.wait(&ticket);
            self.events.copy_ended(Channel::Offload, entry);
            shim::unpark(entry)?;
            self.live_mut(entry)?.place = Place::Resident;
            if let Err(error) = waited {
                // The copy is worth nothing; the bytes never left.
                self.free_copy(entry);
                self.refuse_swap(error);
            }
        }
        Ok(())
    }

    /// Allocates device bytes and starts copying storages back. Where that fails they stay in the slow tier.
    pub(crate) fn prefetch(&mut self, entries: &[Entry]) -> Result<(), Fault> {
        let mut ends = Vec::with_capacity(entries.len());
        let mut allocated = 0;
        let mut failure: Option<Fault> = None;
        for &entry in entries {
            match shim::allocate(entry) {
                Ok(device) => {
                    allocated += 1;
                    ends.push(device);
                }
                Err(error) => {
                    failure = Some(error.into());
                    break;
                }
            }
        }
        if failure.is_none() {
            match self.start_prefetch(entries, &ends) {
                Ok(ticket) => {
                    let mut total = 0;
                    for &entry in entries {
                        let live = self.live_mut(entry)?;
                        live.place = Place::Prefetching(ticket.clone());
                        total += live.bytes;
                    }
                    self.report.prefetched_bytes += total;
                    self.events.copy_started(Channel::Prefetch, entries[0], total);
                    return Ok(());
                }
                Err(fault) => failure = Some(fault),
            }
        }
        for &entry in &entries[..allocated] {
            shim::release(entry)?;
        }
        Err(failure.expect("every way here sets it"))
    }

    fn start_prefetch(&mut self, entries: &[Entry], ends: &[*mut u8]) -> Result<Ticket, Fault> {
        let mut copies = Vec::with_capacity(entries.len());
        for (entry, &end) in entries.iter().zip(ends) {
            let copy = self.live.get(entry.index()).and_then(Option::as_ref).and_then(|live| live.copy.as_ref());
            copies.push((copy.ok_or_else(|| Fault::Broken(format!("{entry:?} has no copy")))?, end));
        }
        // SAFETY: the entries keep the device bytes, and the table the copies, until the ticket has been waited for.
        Ok(unsafe { self.engine.prefetch(&copies) }?)
    }

    /// Waits until the prefetched bytes have arrived. Where they do not, they stay in the slow tier.
    pub(crate) fn finish_prefetch(&mut self, entry: Entry) -> Result<(), Fault> {
        if let Some(Live { place: Place::Prefetching(ticket), .. }) = self.get(entry) {
            let ticket = ticket.clone();
            if let Err(error) = self.wait(&ticket) {
                shim::release(entry)?;
                self.live_mut(entry)?.place = Place::Offloaded;
                return Err(error.into());
            }
            self.events.copy_ended(Channel::Prefetch, entry);
            shim::unpark(entry)?;
            self.live_mut(entry)?.place = Place::Resident;
        }
        Ok(())
    }

    /// Whether the slow tier holds an equal copy of a resident storage.
    pub(crate) fn has_copy(&self, entry: Entry) -> bool {
        self.get(entry).is_some_and(|live| live.copy.is_some() && matches!(live.place, Place::Resident))
    }

    /// Releases device bytes of which the slow tier still holds an equal copy.
    pub(crate) fn discard(&mut self, entry: Entry) -> Result<(), Fault> {
        debug_assert!(self.has_copy(entry));
        shim::park(entry)?;
        shim::release(entry)?;
        self.live_mut(entry)?.place = Place::Offloaded;
        Ok(())
    }

    /// Whether a resident storage may be dropped.
    pub(crate) fn can_drop(&mut self, entry: Entry) -> bool {
        let version = match self.get(entry) {
            Some(live) if matches!(live.place, Place::Resident) && live.users + live.awaited == 0 => live.version,
            _ => None,
        };
        version.is_some_and(|version| self.ancestry.is_rebuildable(version))
    }

    /// Releases device bytes that a rerun can restore.
    pub(crate) fn drop_bytes(&mut self, entry: Entry) -> Result<(), Fault> {
        self.true_bytes(entry)?;
        let version = self.version_of(entry)?;
        // A rerun would bring back what the operator made, not what the program has put there since.
        if shim::is_filled(entry, false)? {
            self.ancestry.becomes_root(version);
            return Err(Fault::Broken(format!("{entry:?} was filled in outside the dispatcher")));
        }
        shim::park(entry)?;
        self.free_copy(entry);
        self.live_mut(entry)?.place = Place::Dropped;
        self.ancestry.drop_bytes(version);
        self.dropped.insert(version);
        // Its own roots are alive: the ancestry says so.
        self.take_custody()?;
        shim::release(entry)?;
        Ok(())
    }

    /// The entry whose bytes are `version` now.
    pub(crate) fn at_hand(&self, version: VersionId) -> Option<Entry> {
        let seen = self.ancestry.version(version);
        let in_place =
            || seen.is_current && self.get(seen.entry).is_some_and(|live| matches!(live.place, Place::Resident));
        seen.beside.or_else(|| in_place().then_some(seen.entry))
    }

    /// Releases a version that stands beside the program.
    pub(crate) fn release(&mut self, version: VersionId) -> Result<(), Fault> {
        self.take_beside(version).map_or(Ok(()), |twin| shim::discard(twin).map_err(Fault::from))
    }

    /// Brings back a storage that the slow tier holds, or that is on its way there or back.
    ///
    /// Where the slow tier does not give it back, it counts as dropped if reruns can restore it.
    pub(crate) fn fetch(&mut self, entry: Entry) -> Result<(), Fault> {
        let mut last = None;
        for _ in 0..FETCH_ATTEMPTS {
            let fetched = match self.live(entry)?.place {
                Place::Resident | Place::Dropped => return Ok(()),
                Place::Offloading(_) => self.recall(entry),
                Place::Prefetching(_) => self.finish_prefetch(entry),
                Place::Offloaded => self.fetch_now(entry),
            };
            match fetched {
                Err(Fault::NoRoom(message)) => return Err(Fault::NoRoom(message)),
                Err(fault) => {
                    self.report.failed_copies += u64::from(matches!(fault, Fault::Copy(_)));
                    last = Some(fault);
                }
                Ok(()) => {}
            }
        }
        if matches!(self.live(entry)?.place, Place::Resident) || self.rescue(entry)? {
            return Ok(());
        }
        match (last, self.live(entry)?.version) {
            (Some(Fault::Copy(error)), Some(version)) if self.ancestry.is_rebuildable(version) => {
                // What goes there does not come back.
                self.swap_refused.get_or_insert(error);
                self.free_copy(entry);
                self.live_mut(entry)?.place = Place::Dropped;
                self.ancestry.drop_bytes(version);
                self.dropped.insert(version);
                self.take_custody()
            }
            (Some(fault), _) => Err(Fault::Broken(format!(
                "{} bytes cannot be read back from the slow tier, which still holds them: {fault}",
                self.live(entry)?.bytes
            ))),
            (None, _) => Err(Fault::Broken(format!("{entry:?} does not come back"))),
        }
    }

    /// Brings a storage back past the workers that have failed to: whether that worked.
    fn rescue(&mut self, entry: Entry) -> Result<bool, Fault> {
        let to = self.with_room(self.live(entry)?.bytes, |_| Ok(shim::allocate(entry)?))?;
        let copy = self.live.get(entry.index()).and_then(Option::as_ref).and_then(|live| live.copy.as_ref());
        let copy = copy.ok_or_else(|| Fault::Broken(format!("{entry:?} has no copy")))?;
        // SAFETY: the entry has just allocated as many bytes, and nobody else knows them.
        if unsafe { self.engine.rescue(copy, to) }.is_err() {
            shim::release(entry)?;
            return Ok(false);
        }
        shim::unpark(entry)?;
        let live = self.live_mut(entry)?;
        live.place = Place::Resident;
        self.report.prefetched_bytes += live.bytes;
        Ok(true)
    }

    fn fetch_now(&mut self, entry: Entry) -> Result<(), Fault> {
        self.with_room(self.live(entry)?.bytes, |residency| residency.prefetch(&[entry]))?;
        self.finish_prefetch(entry)
    }

    /// Makes room for so many bytes until `allocate` gets them, or nothing is left to evict.
    fn with_room<T>(
        &mut self,
        bytes: u64,
        mut allocate: impl FnMut(&mut Self) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let mut more = bytes;
        loop {
            self.relieve(bytes)?;
            match allocate(self) {
                // Another thread took the room that was just made, or the device refuses what the line has room for.
                Err(Fault::NoRoom(message)) if self.has_room(bytes) => {
                    if !self.relieve_device(more)? {
                        return Err(Fault::NoRoom(message));
                    }
                    more = more.saturating_mul(2);
                }
                Err(Fault::NoRoom(_)) => {}
                allocated => return allocated,
            }
        }
    }

    /// The next rerun on the way to what `rebuild` makes; none once it is there.
    pub(crate) fn next_job(&mut self, rebuild: &mut Rebuild) -> Result<Option<Job>, Fault> {
        loop {
            let is_goal = rebuild.frames.len() == 1;
            let Some(top) = rebuild.frames.last_mut() else { return Ok(None) };
            let version = top.version;
            let is_there = if is_goal { self.is_reached(version)? } else { self.at_hand(version).is_some() };
            if is_there {
                let frame = rebuild.frames.pop().expect("looked at above");
                self.close(frame)?;
                continue;
            }
            let seen = self.ancestry.version(version);
            let entry = seen.entry;
            if seen.is_current && !matches!(self.live(entry)?.place, Place::Dropped) {
                self.fetch(entry)?;
                continue;
            }
            let maker = match top.maker {
                Some(maker) => maker,
                None => self.open(top)?,
            };
            let next = match top.agenda.last() {
                Some(&(version, _)) if !self.ancestry.is_missing(version) => {
                    self.settle(top)?;
                    continue;
                }
                // Bytes ran out, and something that was made for it went.
                Some(&(version, next)) if !self.ancestry.is_ready(next) => {
                    rebuild.frames.push(Frame::of(version));
                    continue;
                }
                Some(&(_, next)) => next,
                None if !self.ancestry.is_ready(maker) => {
                    self.fill_agenda(top, maker)?;
                    continue;
                }
                None => maker,
            };
            // What was made meanwhile may have been swapped to make room for the rest, which takes room itself.
            let inputs = self.current_inputs(next);
            self.fetch_together(&inputs)?;
            if self.are_resident(&inputs) && self.ancestry.is_ready(next) {
                return self.job(next, true).map(Some);
            }
        }
    }

    /// Whether the goal of a rebuild is in its storage. What stands beside the program since it was made for a rerun, the
    /// storage having been dropped only later, is put there, unless another thread's rerun reads it.
    fn is_reached(&mut self, goal: VersionId) -> Result<bool, Fault> {
        let seen = self.ancestry.version(goal);
        if seen.is_dropped
            && seen.wanted == 0
            && let Some(twin) = self.take_beside(goal)
        {
            self.restore(goal, twin)?;
            self.take_custody()?;
        }
        Ok(!self.ancestry.version(goal).is_dropped && self.at_hand(goal).is_some())
    }

    /// The storages that still hold what `maker` reads, where it does not stand beside the program.
    fn current_inputs(&self, maker: MakerId) -> Vec<Entry> {
        let inputs = self.ancestry.inputs(maker).iter().flatten().map(|&input| self.ancestry.version(input));
        inputs.filter(|input| input.is_current && input.beside.is_none()).map(|input| input.entry).collect()
    }

    /// Marks what a rerun will read.
    fn open(&mut self, frame: &mut Frame) -> Result<MakerId, Fault> {
        let maker = self.ancestry.version(frame.version).maker;
        let maker = maker.ok_or_else(|| Fault::Broken(format!("{:?} is a lost root", frame.version)))?;
        frame.maker = Some(maker);
        self.rebuilds += 1;
        let inputs: Vec<VersionId> = self.ancestry.inputs(maker).iter().flatten().copied().collect();
        for input in inputs {
            let seen = self.ancestry.version(input);
            let (entry, is_current) = (seen.entry, seen.is_current);
            if is_current {
                self.live_mut(entry)?.awaited += 1;
                frame.awaited.push(entry);
            }
        }
        Ok(maker)
    }

    /// Writes down what must be made before a frame's maker can run.
    fn fill_agenda(&mut self, frame: &mut Frame, maker: MakerId) -> Result<(), Fault> {
        frame.agenda = self.ancestry.missing(maker);
        frame.agenda.iter().for_each(|&(_, maker)| self.ancestry.expect(maker, true));
        match frame.agenda[..] {
            [] => Err(Fault::Broken(format!("what {:?} is made from is lost", frame.version))),
            _ => Ok(()),
        }
    }

    /// What comes next on a frame's agenda is there.
    fn settle(&mut self, frame: &mut Frame) -> Result<(), Fault> {
        let Some((version, maker)) = frame.agenda.pop() else { return Ok(()) };
        self.ancestry.expect(maker, false);
        if frame.maker.is_some_and(|reader| self.ancestry.inputs(reader).contains(&Some(version))) {
            frame.made.push(version);
            self.ancestry.version_mut(version).wanted += 1;
        }
        self.tidy_inputs(maker)
    }

    /// Unmarks what a rerun read, and releases what nothing will read again.
    fn close(&mut self, frame: Frame) -> Result<(), Fault> {
        let Some(maker) = frame.maker else { return Ok(()) };
        self.rebuilds -= 1;
        self.end_wait(&frame.awaited);
        for &made in &frame.made {
            self.ancestry.version_mut(made).wanted -= 1;
        }
        for &(_, maker) in &frame.agenda {
            self.ancestry.expect(maker, false);
        }
        let given_up = frame.agenda.into_iter().map(|(_, maker)| maker);
        given_up.chain([maker]).try_for_each(|maker| self.tidy_inputs(maker))
    }

    /// Unmarks everything: the rebuild cannot go on.
    pub(crate) fn abandon(&mut self, rebuild: Rebuild) {
        for frame in rebuild.frames.into_iter().rev() {
            // What cannot be released now is released with the iteration.
            let _ = self.close(frame);
        }
    }

    /// Releases what a maker read and nothing will read again.
    fn tidy_inputs(&mut self, maker: MakerId) -> Result<(), Fault> {
        let inputs: Vec<VersionId> = self.ancestry.inputs(maker).iter().flatten().copied().collect();
        inputs.into_iter().try_for_each(|input| self.tidy(input))
    }

    /// Releases a version beside the program that no rerun wants and no dropped storage will be rebuilt from.
    fn tidy(&mut self, version: VersionId) -> Result<(), Fault> {
        let seen = self.ancestry.version(version);
        let has_use = seen.wanted + seen.expected > 0 || (self.ancestry.is_anchored(version) && !seen.is_current);
        if seen.beside.is_some() && !has_use { self.release(version) } else { Ok(()) }
    }

    /// A rerun of `maker`, all of whose inputs must be at hand. They are locked until it is booked.
    pub(crate) fn job(&mut self, maker: MakerId, is_tidy: bool) -> Result<Job, Fault> {
        let recipe = self.ancestry.maker(maker).recipe.clone();
        let (outputs, read) = (self.ancestry.outputs(maker).len(), self.ancestry.inputs(maker).to_vec());
        let mut inputs = Vec::with_capacity(read.len());
        let mut locked = Vec::new();
        for version in &read {
            inputs.push(match *version {
                None => Entry::NONE,
                Some(version) => {
                    let entry = self.at_hand(version);
                    let entry = entry.ok_or_else(|| Fault::Broken(format!("{version:?} is not there")))?;
                    if self.ancestry.version(version).beside.is_none() {
                        locked.push(entry);
                    }
                    entry
                }
            });
        }
        for &version in read.iter().flatten() {
            self.ancestry.version_mut(version).wanted += 1;
        }
        for &entry in &locked {
            self.live_mut(entry)?.users += 1;
        }
        self.rebuilds += 1;
        Ok(Job { maker, recipe, inputs, outputs, locked, is_tidy })
    }

    /// Books a rerun: its results are put into the storages that are dropped at them, the others stand beside.
    pub(crate) fn book(&mut self, done: Done) -> Result<(), Fault> {
        let Done { job, results, started, elapsed_ns } = done;
        self.rebuilds -= 1;
        self.tick(false);
        self.end_use(job.locked.iter().copied());
        let read: Vec<VersionId> = self.ancestry.inputs(job.maker).iter().flatten().copied().collect();
        let outputs = self.ancestry.outputs(job.maker).to_vec();
        for &version in &read {
            self.ancestry.version_mut(version).wanted -= 1;
        }
        let results = results?;
        self.report.reruns += 1;
        self.report.rerun_ns += elapsed_ns;
        self.events.reran(started, elapsed_ns);
        for (&version, &result) in outputs.iter().zip(&results) {
            // Written in place: the version that it was is no more.
            if let Some(&consumed) = read.iter().find(|&&input| self.ancestry.version(input).beside == Some(result)) {
                self.take_beside(consumed);
            }
            if self.ancestry.version(version).beside.is_some_and(|twin| twin != result) {
                // Another output of this operator was wanted, and this one had been made before.
                self.release(version)?;
            }
            let seen = self.ancestry.version_mut(version);
            if seen.is_dropped {
                self.restore(version, result)?;
            } else {
                seen.beside = Some(result);
                self.beside.push(version);
            }
        }
        self.take_custody()?;
        if job.is_tidy {
            for &version in outputs.iter().chain(&read) {
                self.tidy(version)?;
            }
        }
        Ok(())
    }

    /// Puts the bytes of `made` into the storage that was dropped when it held `version`.
    fn restore(&mut self, version: VersionId, made: Entry) -> Result<(), Fault> {
        let entry = self.ancestry.version(version).entry;
        shim::adopt(made, entry)?;
        self.live_mut(entry)?.place = Place::Resident;
        self.dropped.remove(&version);
        self.ancestry.restored(version);
        Ok(())
    }

    /// Books that a version does not stand beside the program any more, and says what held it there.
    fn take_beside(&mut self, version: VersionId) -> Option<Entry> {
        let twin = self.ancestry.version_mut(version).beside.take();
        if twin.is_some() {
            self.beside.retain(|other| *other != version);
        }
        twin
    }

    /// The program is about to use these storages: what the slow tier holds of them is let go.
    pub(crate) fn free_copies(&mut self, accesses: &[RawAccess]) {
        for access in accesses {
            debug_assert!(
                self.get(access.entry).is_some_and(|live| matches!(live.place, Place::Resident)),
                "{:?} is {:?} where it is used",
                access.entry,
                self.get(access.entry).map(|live| &live.place)
            );
            self.free_copy(access.entry);
        }
    }

    /// Lets go of every copy and of everything beside the program. Everything must be resident.
    pub(crate) fn tidy_up(&mut self) -> Result<(), Fault> {
        for index in 0..self.live.len() {
            self.free_copy(Entry::at(index));
        }
        for version in std::mem::take(&mut self.beside) {
            if let Some(entry) = self.ancestry.version_mut(version).beside.take() {
                shim::discard(entry)?;
            }
        }
        self.offloading.clear();
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
