//! The engine for a device with streams: two copy streams beside the compute stream, and page-locked slabs.
//!
//! The host queues and goes on; who waits for whom is said to the device. The whole of it:
//!
//! | what | waits for | so that |
//! |---|---|---|
//! | an offload | compute so far | the bytes are there |
//! | an offload | the last prefetch of its slab's memory | that is not written over; offloads are in the same stream |
//! | a prefetch | compute so far | the block's earlier owner is done with it |
//! | a prefetch | the offloads of what it reads | the bytes are there |
//! | compute, at `wait` | the copy | a block is not used, or used again, before |
//! | the host, to give page-locked memory back | the last copies of it | they do not run into freed memory |
//!
//! The last is the only time that the host waits, and does not come up while slabs of the same sizes are used again
//! within the limit; [`host_waits`](StreamEngine::host_waits) counts it. A slab is used again by order of streams, without
//! waiting.
//!
//! To mark compute for every offload would hold compute up: a stream whose last work was a copy, as at the beginning of an iteration
//! that comes after the one which fetched its loss, has its marks reached by the engine that makes copies, each behind the offloads that
//! were queued before it, and what compute is given next waits for the last mark. (Measured on an H200: an operator behind 64 offloads
//! began when the last of them did.) So where compute stands still, one mark is enough for all, and a kernel that does nothing comes
//! between what the program has read out and what is due behind that.
//!
//! A block that is released after `wait` may go straight to the caching allocator: it hands blocks out in the order of
//! the compute stream, which waits for the copy. Blocks to prefetch into are allocated in the compute stream.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::device::{Device, DeviceCallError, RecordedEvent, StreamId};
use super::slabs::{LastUses, Memory, MemorySlab, Pool};
use super::ticket::{Done, Ticket};
use super::{CopyEngine, CopyError, DeviceBytes, Slab, SlowCopy, TierUse};
use crate::hardware::Tier;
use crate::timetable::Lane;

/// The slow tier is page-locked memory of the host; the device makes the copies.
pub struct StreamEngine {
    driver: Arc<Driver>,
    out: StreamId,
    back: StreamId,
    slabs: Arc<Pool>,
    timing: Option<Timing>,
    /// Whether compute stands still, and whether offloads come after all that it has been given.
    stands: bool,
    is_behind: bool,
}

/// Copies of one call, as the device made them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedCopies {
    /// Which way.
    pub lane: Lane,
    /// All their bytes.
    pub bytes: u64,
    /// When the first began, in ns from where compute was when timing began.
    pub start_ns: u64,
    /// When the last ended.
    pub end_ns: u64,
}

/// Marks around copies.
struct Timing {
    origin: Arc<RecordedEvent>,
    copies: Vec<(Lane, u64, Arc<RecordedEvent>, Arc<RecordedEvent>)>,
}

/// The device, with what must be known of it wherever a slab or a ticket ends.
struct Driver {
    device: Arc<dyn Device>,
    /// Copies may be under way of which nobody can say when they end. Memory that they may use is never touched again.
    is_lost: AtomicBool,
    host_waits: AtomicU64,
    allocations: AtomicU64,
}

impl Driver {
    fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
    }

    /// Blocks by `synchronize`. Where even that fails, the device is lost.
    fn hold_up_host(&self, synchronize: impl FnOnce() -> Result<(), DeviceCallError>) -> Result<(), DeviceCallError> {
        self.host_waits.fetch_add(1, Ordering::Relaxed);
        let waited = synchronize();
        if waited.is_err() {
            self.is_lost.store(true, Ordering::Relaxed);
        }
        waited
    }

    fn drain(&self, stream: StreamId) -> Result<(), DeviceCallError> {
        self.hold_up_host(|| self.device.synchronize_stream(stream))
    }

    /// A mark behind all that is queued in `stream`.
    fn mark(&self, stream: StreamId) -> Result<Arc<RecordedEvent>, DeviceCallError> {
        self.put(RecordedEvent::create(&self.device, stream)?)
    }

    /// The same, which tells when it was reached.
    fn timed_mark(&self, stream: StreamId) -> Result<Arc<RecordedEvent>, DeviceCallError> {
        self.put(RecordedEvent::create_timed(&self.device, stream)?)
    }

    fn put(&self, event: Arc<RecordedEvent>) -> Result<Arc<RecordedEvent>, DeviceCallError> {
        self.device.record_event(event.id, event.stream)?;
        Ok(event)
    }

    /// What is queued in `stream` from now on comes after what has been computed so far.
    fn after_compute(&self, stream: StreamId) -> Result<(), DeviceCallError> {
        let computed = self.mark(self.device.compute_stream()?)?;
        self.device.stream_wait_event(stream, computed.id)
    }

    /// What is queued in `stream` from now on comes after `copy`. One that is done needs no waiting for.
    fn after(&self, stream: StreamId, copy: Option<&Done>) -> Result<(), DeviceCallError> {
        match copy.map(event_of) {
            Some(event) if !self.is_reached(event) => self.device.stream_wait_event(stream, event.id),
            _ => Ok(()),
        }
    }

    /// Whether it is known that `event` has been reached.
    fn is_reached(&self, event: &RecordedEvent) -> bool {
        self.device.is_complete(event.id) == Ok(true)
    }

    /// Blocks until `event` has been reached, if it has not.
    fn reach(&self, event: &RecordedEvent) -> Result<(), DeviceCallError> {
        if self.is_reached(event) {
            return Ok(());
        }
        self.hold_up_host(|| self.device.synchronize_event(event.id))
    }

    /// Queues copies between what waits for them and the mark that says that they are done. Where that fails, none of
    /// them is under way, or the device is lost.
    fn queue(
        &self,
        stream: StreamId,
        copies: impl IntoIterator<Item = Result<(), DeviceCallError>>,
    ) -> Result<Arc<RecordedEvent>, CopyError> {
        let event = RecordedEvent::create(&self.device, stream)?;
        let queued = copies.into_iter().collect::<Result<(), _>>();
        if let Err(error) = queued.and_then(|()| self.device.record_event(event.id, stream)) {
            // If that fails as well the device is lost, and the first error is the one to tell.
            let _ = self.drain(stream);
            return Err(error.into());
        }
        Ok(event)
    }
}

fn event_of(done: &Done) -> &Arc<RecordedEvent> {
    match done {
        Done::Event(event) => event,
        Done::Worker(_) => panic!("a copy of another engine"),
    }
}

/// Page-locked memory.
struct PageLocked(Arc<Driver>);

impl Memory for PageLocked {
    fn allocate(&self, bytes: usize) -> Result<Option<NonNull<u8>>, CopyError> {
        self.0.allocations.fetch_add(1, Ordering::Relaxed);
        Ok(self.0.device.allocate_page_locked(bytes)?)
    }

    unsafe fn release(&self, start: NonNull<u8>, bytes: usize, last_uses: LastUses) {
        let LastUses { written, read } = last_uses;
        let over = [written, read].iter().flatten().all(|done| self.0.reach(event_of(done)).is_ok());
        if over && !self.0.is_lost() {
            // What the driver will not take back stays ours, and goes with the process.
            // SAFETY: nothing queued uses it any more; the rest is the caller's promise.
            let _ = unsafe { self.0.device.free_page_locked(start, bytes) };
        }
    }
}

impl StreamEngine {
    /// An engine with two streams of its own, which holds and keeps at most `limit_bytes` of page-locked memory.
    pub fn new(device: Arc<dyn Device>, limit_bytes: u64) -> Result<Self, CopyError> {
        let out = device.create_stream()?;
        let back = device.create_stream().inspect_err(|_| device.destroy_stream(out))?;
        let driver = Arc::new(Driver {
            device,
            is_lost: AtomicBool::new(false),
            host_waits: AtomicU64::new(0),
            allocations: AtomicU64::new(0),
        });
        let slabs = Pool::of_slow(Box::new(PageLocked(Arc::clone(&driver))), limit_bytes);
        Ok(StreamEngine { driver, out, back, slabs, timing: None, stands: false, is_behind: false })
    }

    /// From now on the device notes when it makes each copy.
    pub fn time_copies(&mut self) -> Result<(), CopyError> {
        let origin = self.driver.timed_mark(self.driver.device.compute_stream()?)?;
        self.timing = Some(Timing { origin, copies: Vec::new() });
        Ok(())
    }

    /// What it has noted, after the last of these copies: the host waits for it. Nothing is noted from now on.
    pub fn take_timed_copies(&mut self) -> Result<Vec<TimedCopies>, CopyError> {
        let Some(Timing { origin, copies }) = self.timing.take() else { return Ok(Vec::new()) };
        let told = copies.into_iter().map(|(lane, bytes, start, end)| {
            self.driver.reach(&end)?;
            let at_ns = |mark: &RecordedEvent| self.driver.device.elapsed_ns(origin.id, mark.id);
            Ok(TimedCopies { lane, bytes, start_ns: at_ns(&start)?, end_ns: at_ns(&end)? })
        });
        told.collect()
    }

    /// A mark before copies, where they are timed. One that fails is left out: the copies are made all the same.
    fn timed_start(&self, stream: StreamId) -> Option<Arc<RecordedEvent>> {
        self.timing.as_ref().and_then(|_| self.driver.timed_mark(stream).ok())
    }

    /// The mark behind them.
    fn timed_end(&mut self, lane: Lane, stream: StreamId, bytes: usize, start: Option<Arc<RecordedEvent>>) {
        if let (Some(timing), Some(start)) = (&mut self.timing, start)
            && let Ok(end) = self.driver.timed_mark(stream)
        {
            timing.copies.push((lane, bytes as u64, start, end));
        }
    }

    /// How often the caller was held up: by a device that had to catch up.
    pub fn host_waits(&self) -> u64 {
        self.driver.host_waits.load(Ordering::Relaxed)
    }

    /// How often the driver was asked for page-locked memory, which is slow. None once every size has been seen.
    pub fn page_locked_allocations(&self) -> u64 {
        self.driver.allocations.load(Ordering::Relaxed)
    }

    fn check(&self) -> Result<(), CopyError> {
        if self.driver.is_lost() {
            let message = "an earlier failure left copies under way that cannot be waited for".to_owned();
            return Err(CopyError::Device { call: "copying", message });
        }
        Ok(())
    }

    /// Makes the compute stream wait for `event` unless it has been reached, or the host if that cannot.
    fn wait_for(&mut self, event: &RecordedEvent) -> Result<(), CopyError> {
        let device = &self.driver.device;
        if self.driver.is_reached(event) {
            return Ok(());
        }
        // What is offloaded next may be what a prefetch has brought back; behind offloads it is anyway.
        self.is_behind &= event.stream == self.out;
        let waits = device.compute_stream().and_then(|compute| device.stream_wait_event(compute, event.id));
        waits.or_else(|_| self.driver.reach(event)).map_err(CopyError::from)
    }
}

impl CopyEngine for StreamEngine {
    unsafe fn offload(&mut self, pieces: &[DeviceBytes], tier: Tier) -> Result<(Vec<SlowCopy>, Ticket), CopyError> {
        if tier != Tier::Host {
            return Err(CopyError::NoTier(tier));
        }
        self.check()?;
        let (driver, out) = (&*self.driver, self.out);
        let slab = Arc::new(self.slabs.take(pieces.iter().map(|piece| piece.bytes).sum())?);
        if !self.is_behind {
            driver.after_compute(out)?;
        }
        // What was written there was written in this very stream.
        let earlier = slab.last_uses().read.clone();
        driver.after(out, earlier.as_ref())?;
        let copies = SlowCopy::parts(&Slab::Memory(Arc::clone(&slab)), pieces);
        let start = self.timed_start(out);
        let ends = pieces.iter().zip(&copies);
        // SAFETY: the caller keeps the pieces; the slab's memory is not taken again before the mark is reached.
        let queued = ends.map(|(piece, copy)| unsafe {
            driver.device.copy_from_device(piece.start, slab.at(copy.offset), piece.bytes, out)
        });
        let done = Done::Event(driver.queue(out, queued)?);
        *slab.last_uses() = LastUses { written: Some(done.clone()), read: None };
        self.is_behind = self.stands;
        self.timed_end(Lane::Offload, out, pieces.iter().map(|piece| piece.bytes).sum(), start);
        Ok((copies, Ticket::new(Tier::Host, done)))
    }

    unsafe fn prefetch(&mut self, copies: &[(&SlowCopy, *mut u8)]) -> Result<Ticket, CopyError> {
        self.check()?;
        let (driver, back) = (&*self.driver, self.back);
        driver.after_compute(back)?;
        let mut last: Option<&Arc<MemorySlab>> = None;
        for slab in copies.iter().map(|(copy, _)| copy.in_memory()) {
            if last.is_none_or(|last| !Arc::ptr_eq(last, slab)) {
                let written = slab.last_uses().written.clone();
                driver.after(back, written.as_ref())?;
                last = Some(slab);
            }
        }
        let start = self.timed_start(back);
        // SAFETY: the caller keeps the device bytes; slabs' memory is not taken again before the mark is reached.
        let queued = copies.iter().map(|&(copy, to)| unsafe {
            driver.device.copy_to_device(copy.in_memory().at(copy.offset), to, copy.bytes, back)
        });
        let done = Done::Event(driver.queue(back, queued)?);
        // One stream makes all of them in order, so the last stands for those before it.
        copies.iter().for_each(|(copy, _)| copy.in_memory().last_uses().read = Some(done.clone()));
        self.timed_end(Lane::Prefetch, back, copies.iter().map(|(copy, _)| copy.bytes).sum(), start);
        Ok(Ticket::new(Tier::Host, done))
    }

    fn has_read_out(&mut self) {
        // Where it fails, marks are reached later.
        let _ = self.driver.device.compute_stream().and_then(|compute| self.driver.device.rest(compute));
    }

    fn compute_stands(&mut self, stands: bool) {
        self.stands = stands;
        self.is_behind = false;
    }

    fn wait(&mut self, ticket: &Ticket) -> Result<(), CopyError> {
        self.check()?;
        ticket.done().try_for_each(|done| self.wait_for(event_of(done)))
    }

    fn tiers(&self) -> Vec<TierUse> {
        vec![self.slabs.usage()]
    }

    fn dependable_bytes(&self) -> u64 {
        self.slabs.usage().limit_bytes
    }
}

impl Drop for StreamEngine {
    fn drop(&mut self) {
        // Nothing may run into the memory of the device after the engine is gone.
        for stream in [self.out, self.back] {
            if self.driver.drain(stream).is_ok() {
                self.driver.device.destroy_stream(stream);
            }
        }
    }
}
