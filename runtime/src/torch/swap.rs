//! Moves the bytes of storages to the slow tiers and back.
//!
//! A copy goes only once its bytes are back, and bytes leave the device only once their copy is made: a slow tier that fails
//! loses nothing.

use std::time::Instant;

use super::copy::{CopyError, DeviceBytes, Ticket};
use super::events::Channel;
use super::residency::{Fault, Live, Place, Residency, Swaps};
use super::shim::{self, Entry, RawAccess, ShimError};
use crate::hardware::{Refusal, Tier};

/// Reads of the slow tier that may fail one after another before the storage is given up for now.
const FETCH_ATTEMPTS: usize = 3;

impl Residency {
    /// Starts copying storages to the slow tier, as one slab: those that are alive. Whether that `was_planned` tells whether a refusal is
    /// news.
    pub(crate) fn offload(&mut self, entries: &[Entry], tier: Tier, was_planned: bool) -> Result<(), Fault> {
        shim::join_streams()?;
        let (entries, pieces) = self.park(entries)?;
        let Some(&first) = entries.first() else { return Ok(()) };
        // SAFETY: the entries keep the bytes until the ticket has been waited for; nothing else can reach them.
        let mut started = unsafe { self.engine.offload(&pieces, tier) };
        if let Err(error) = &started {
            self.note_refusal(tier, error, was_planned);
            if tier == Tier::Host {
                // SAFETY: as above.
                started = unsafe { self.engine.offload(&pieces, Tier::File) }.or(started);
            }
        }
        let (copies, ticket) = match started {
            Ok(started) => started,
            Err(error) => {
                unpark(&entries);
                self.refuse_swaps();
                return Err(error.into());
            }
        };
        let mut total = 0;
        for (entry, copy) in entries.into_iter().zip(copies) {
            self.free_copy(entry);
            self.put(entry, Place::Offloading(ticket.clone()))?;
            let live = self.live_mut(entry)?;
            live.copy = Some(copy);
            total += live.bytes;
            self.offloading.push_back(entry);
        }
        self.report.offloaded_bytes += total;
        self.events.copy_started(Channel::Offload, first, total);
        Ok(())
    }

    /// Takes the bytes of those storages that are alive, where the program cannot reach them: of all, or of none.
    fn park(&mut self, entries: &[Entry]) -> Result<(Vec<Entry>, Vec<DeviceBytes>), Fault> {
        let (mut parked, mut pieces) = (Vec::with_capacity(entries.len()), Vec::with_capacity(entries.len()));
        for &entry in entries {
            match self.park_one(entry) {
                Ok(piece) => {
                    parked.push(entry);
                    pieces.push(piece);
                }
                // It is booked later: until all of them are on their way, that would free the bytes of those that died meanwhile.
                Err(_) if shim::has_died(entry) => {}
                Err(fault) => {
                    unpark(&parked);
                    return Err(fault);
                }
            }
        }
        Ok((parked, pieces))
    }

    fn park_one(&mut self, entry: Entry) -> Result<DeviceBytes, Fault> {
        let bytes = self.true_bytes(entry)? as usize;
        // Should its copy be lost.
        if let Some(&Live { filled_at: Some(_), version: Some(version), .. }) = self.get(entry) {
            self.look_whether_filled(entry, version)?;
        }
        Ok(DeviceBytes { start: shim::park(entry)?, bytes })
    }

    /// Notes that a tier takes no more, where a plan counted on it, or where the tier says that it has the room: the system may have
    /// none to give it.
    fn note_refusal(&mut self, tier: Tier, error: &CopyError, was_planned: bool) {
        let CopyError::Full { bytes } = error else { return };
        let wanted_bytes = self.engine.held_bytes(tier) + *bytes as u64;
        let is_news = was_planned || wanted_bytes <= self.engine.limit_bytes(tier);
        let refusal = Refusal { tier, wanted_bytes, was_planned };
        if is_news && self.refusals[tier as usize].is_none_or(|noted| refusal.says_more_than(noted)) {
            self.refusals[tier as usize] = Some(refusal);
        }
    }

    /// What each tier refused that was news, since this was asked last.
    pub(crate) fn take_refusals(&mut self) -> [Option<Refusal>; 2] {
        std::mem::take(&mut self.refusals)
    }

    /// A copy to the slow tier failed: nothing else goes there in this iteration, unless nothing else can be done.
    fn refuse_swaps(&mut self) {
        self.report.failed_copies += 1;
        self.swaps.are_refused = true;
        self.swaps.have_failed = true;
    }

    /// Its offload is not under way any more. Mostly it is the oldest.
    pub(super) fn has_left(&mut self, entry: Entry) {
        if let Some(place) = self.offloading.iter().position(|&other| other == entry) {
            self.offloading.remove(place);
        }
    }

    /// Waits for an offload and releases the device bytes. Where the copy failed they are put back in place.
    pub(crate) fn finish_offload(&mut self, entry: Entry) -> Result<(), Fault> {
        self.has_left(entry);
        // The program may have let go of it meanwhile; then its bytes are free already.
        if let Some(Live { place: Place::Offloading(ticket), .. }) = self.get(entry) {
            let ticket = ticket.clone();
            if let Err(error) = self.wait(&ticket) {
                self.refuse_swaps();
                if let Err(gone) = shim::unpark(entry) {
                    // Another thread has let go of it just now.
                    return if self.has_died(entry)? { Ok(()) } else { Err(gone.into()) };
                }
                self.put(entry, Place::Resident)?;
                self.free_copy(entry);
                return Err(error.into());
            }
            self.events.copy_ended(Channel::Offload, entry);
            shim::release(entry)?;
            self.put(entry, Place::Offloaded)?;
        }
        Ok(())
    }

    /// Releases what a plan takes for released, until so many bytes more fit: first what left first, for whose copies compute waits least.
    pub(crate) fn release_for(&mut self, bytes: u64) -> Result<(), Fault> {
        while !self.has_room(bytes)
            && !shim::is_capturing()
            && let Some(entry) = self.unreleased.pop_front()
        {
            self.settle_offload(entry)?;
        }
        Ok(())
    }

    /// Waits for an offload and releases the device bytes. Where the copy failed they are back in place, and swaps are refused.
    pub(super) fn settle_offload(&mut self, entry: Entry) -> Result<(), Fault> {
        match self.finish_offload(entry) {
            Err(Fault::Copy(_)) | Ok(()) => Ok(()),
            Err(fault) => Err(fault),
        }
    }

    /// Waits for an offload and puts the bytes back in place: the program wants them already.
    pub(crate) fn recall(&mut self, entry: Entry) -> Result<(), Fault> {
        self.has_left(entry);
        if let Some(Live { place: Place::Offloading(ticket), .. }) = self.get(entry) {
            let ticket = ticket.clone();
            let waited = self.wait(&ticket);
            self.events.copy_ended(Channel::Offload, entry);
            shim::unpark(entry)?;
            self.put(entry, Place::Resident)?;
            if waited.is_err() {
                // The copy is worth nothing; the bytes never left.
                self.free_copy(entry);
                self.refuse_swaps();
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
                        self.put(entry, Place::Prefetching(ticket.clone()))?;
                        total += self.live(entry)?.bytes;
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
        shim::join_streams()?;
        // SAFETY: the entries keep the device bytes, and the table the copies, until the ticket has been waited for.
        Ok(unsafe { self.engine.prefetch(&copies) }?)
    }

    /// Waits until the prefetched bytes have arrived. Where they do not, they stay in the slow tier.
    pub(crate) fn finish_prefetch(&mut self, entry: Entry) -> Result<(), Fault> {
        if let Some(Live { place: Place::Prefetching(ticket), .. }) = self.get(entry) {
            let ticket = ticket.clone();
            if let Err(error) = self.wait(&ticket) {
                shim::release(entry)?;
                self.put(entry, Place::Offloaded)?;
                return Err(error.into());
            }
            self.events.copy_ended(Channel::Prefetch, entry);
            shim::unpark(entry)?;
            self.put(entry, Place::Resident)?;
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
        // As of what is dropped.
        shim::join_streams()?;
        if let Err(error) = shim::park(entry) {
            return if self.has_died(entry)? { Ok(()) } else { Err(error.into()) };
        }
        shim::release(entry)?;
        self.put(entry, Place::Offloaded)?;
        Ok(())
    }

    /// Brings all of them back from the slow tier, none at the expense of another, but for those that die. Where the slow tier fails they
    /// may count as dropped afterwards.
    pub(crate) fn fetch_together(&mut self, entries: &[Entry]) -> Result<(), Fault> {
        self.begin_use(entries)?;
        let fetched = entries.iter().try_for_each(|&entry| self.fetch(entry));
        for &entry in entries {
            self.live_mut(entry)?.users -= 1;
        }
        self.absorb_freed()?;
        fetched
    }

    /// Brings back a storage that the slow tier holds, or that is on its way there or back, unless it dies.
    ///
    /// Where the slow tier does not give it back, it counts as dropped if reruns can restore it.
    pub(crate) fn fetch(&mut self, entry: Entry) -> Result<(), Fault> {
        let mut last = None;
        for _ in 0..FETCH_ATTEMPTS {
            let Some(live) = self.get(entry) else { return Ok(()) };
            let fetched = match live.place {
                Place::Resident | Place::Dropped => return Ok(()),
                _ if shim::is_capturing() => return Err(Fault::Captured),
                Place::Offloading(_) => self.recall(entry),
                Place::Prefetching(_) => self.finish_prefetch(entry),
                Place::Offloaded => self.fetch_now(entry),
            };
            match fetched {
                Err(_) if self.has_died(entry)? => return Ok(()),
                Err(Fault::NoRoom(message)) => return Err(Fault::NoRoom(message)),
                Err(fault) => {
                    self.report.failed_copies += u64::from(matches!(fault, Fault::Copy(_)));
                    last = Some(fault);
                }
                Ok(()) => {}
            }
        }
        if matches!(self.live(entry)?.place, Place::Resident) {
            return Ok(());
        }
        let rescued = self.rescue(entry);
        if (rescued.is_err() && self.has_died(entry)?) || rescued? {
            return Ok(());
        }
        match (last, self.live(entry)?.version) {
            (Some(Fault::Copy(_)), Some(version)) if self.ancestry.can_drop(version) => {
                // What goes there does not come back.
                self.swaps = Swaps { are_refused: true, more_tries: 0, have_failed: true, ..self.swaps };
                self.give_up(entry, version)?;
                self.count_as_dropped(entry, version)?;
                self.free_copy(entry);
                Ok(())
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
        shim::join_streams()?;
        // SAFETY: the entry has just allocated as many bytes, and nobody else knows them.
        if unsafe { self.engine.rescue(copy, to) }.is_err() {
            shim::release(entry)?;
            return Ok(false);
        }
        shim::join_streams()?;
        shim::unpark(entry)?;
        self.put(entry, Place::Resident)?;
        self.report.prefetched_bytes += self.live(entry)?.bytes;
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

    pub(super) fn wait(&mut self, ticket: &Ticket) -> Result<(), CopyError> {
        let started = Instant::now();
        // Only the stream that is current has been made to wait.
        let join = || {
            shim::join_streams().map_err(|ShimError(message)| CopyError::Device { call: "joining streams", message })
        };
        let waited = self.engine.wait(ticket).and_then(|()| join());
        let stall_ns = started.elapsed().as_nanos() as u64;
        self.report.stall_ns += stall_ns;
        self.events.stalled(started, stall_ns);
        waited
    }

    pub(super) fn free_copy(&mut self, entry: Entry) {
        if let Some(live) = self.live.get_mut(entry.index()).and_then(Option::as_mut) {
            live.copy = None;
        }
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
}

/// Gives storages their bytes back. One that has died meanwhile, in another thread, has nobody to give them to.
fn unpark(entries: &[Entry]) {
    for &entry in entries {
        let _ = shim::unpark(entry);
    }
}
