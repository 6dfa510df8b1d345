//! A device that is simulated, to find whoever does not wait.
//!
//! Streams are queues. At every driver call some of their heads advance, drawn at random; a copy takes two steps, and now
//! and then one stream stands still for long. So copies finish late, out of order and in halves. The device notices what no driver would: memory freed twice or
//! while a copy is queued for it, events used after they were let go, a wait that never ends. It can be told to
//! fail at any call, and to leave out one kind of wait, which is how the tests show that they would find its absence.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use plimsoll_runtime::torch::copy::{Device, DeviceCallError, EventId, StreamId};

use crate::draw::Draw;

/// The program's stream. The engine's are made after it, the one for offloads first.
pub const COMPUTE: StreamId = StreamId(0);
pub const OUT: StreamId = StreamId(1);
pub const BACK: StreamId = StreamId(2);

/// What the device leaves undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// A stream does not wait for another's events.
    NoWait { waiting: StreamId, on: StreamId },
    /// The host does not wait for events.
    NoSynchronize,
    /// An event recorded in a stream stands before what was queued there last: who waits for it is woken too early.
    EarlyMark { on: StreamId },
}

/// Which driver calls fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failing {
    Never,
    Once { at: u64 },
    From { at: u64 },
}

/// A kernel: says what it found wrong.
type Kernel = Box<dyn FnOnce() -> Option<String> + Send>;

enum Operation {
    Kernel(Kernel),
    Copy { from: usize, to: usize, bytes: usize, page_locked: usize, is_half_done: bool },
    Wait { on: usize, until: u64 },
}

#[derive(Default)]
struct Stream {
    queue: VecDeque<Operation>,
    queued: u64,
    done: u64,
    /// The step after which each operation was done.
    done_at: Vec<u64>,
}

struct World {
    draw: Draw,
    streams: Vec<Stream>,
    /// Where each event stands: stream and how much of it is done then.
    events: HashMap<u64, Option<(usize, u64)>>,
    next_event: u64,
    /// By timed event: the step at which it was recorded last.
    timed: HashMap<u64, u64>,
    /// How much all streams have done: the device's clock.
    steps: u64,
    /// The stream that stands still, if nothing forces it on.
    stalled: Option<usize>,
    page_locked: BTreeMap<usize, usize>,
    system_bytes: usize,
    calls: u64,
    failed: Option<&'static str>,
    kept_bytes: usize,
    synchronizations: u64,
    marks: Vec<StreamId>,
    failing: Failing,
    sabotage: Option<Sabotage>,
    violations: Vec<String>,
}

/// The device.
pub struct Simulated(Mutex<World>);

impl Simulated {
    /// A device whose host has `system_bytes` to lock.
    pub fn new(seed: u64, system_bytes: usize) -> Self {
        Simulated(Mutex::new(World {
            draw: Draw::seeded(seed),
            streams: vec![Stream::default()],
            events: HashMap::new(),
            next_event: 1,
            timed: HashMap::new(),
            steps: 0,
            stalled: None,
            page_locked: BTreeMap::new(),
            system_bytes,
            calls: 0,
            failed: None,
            kept_bytes: 0,
            synchronizations: 0,
            marks: Vec::new(),
            failing: Failing::Never,
            sabotage: None,
            violations: Vec::new(),
        }))
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn sabotage(&self, sabotage: Sabotage) {
        self.world().sabotage = Some(sabotage);
    }

    /// Has calls fail, counted from now.
    pub fn fail(&self, failing: Failing) {
        let mut world = self.world();
        let now = world.calls;
        world.failing = match failing {
            Failing::Never => Failing::Never,
            Failing::Once { at } => Failing::Once { at: now + at },
            Failing::From { at } => Failing::From { at: now + at },
        };
    }

    pub fn calls(&self) -> u64 {
        self.world().calls
    }

    /// How often a call made the host wait.
    pub fn synchronizations(&self) -> u64 {
        self.world().synchronizations
    }

    /// How many marks a stream was given.
    pub fn marks(&self, stream: StreamId) -> usize {
        self.world().marks.iter().filter(|marked| **marked == stream).count()
    }

    /// The last call that failed.
    pub fn failed(&self) -> Option<&'static str> {
        self.world().failed
    }

    pub fn page_locked_bytes(&self) -> usize {
        self.world().page_locked.values().sum()
    }

    /// Queues a kernel in the compute stream.
    pub fn compute(&self, kernel: Kernel) {
        let mut world = self.world();
        world.queue(COMPUTE, Operation::Kernel(kernel));
        world.advance_some();
    }

    /// Lets all that is queued be done, and says what went wrong so far.
    pub fn finish(&self) -> Vec<String> {
        let mut world = self.world();
        while world.advance(None) {}
        assert!(world.streams.iter().all(|stream| stream.queue.is_empty()), "streams wait for each other for ever");
        world.violations.clone()
    }

    /// What has been made and not let go of: page-locked bytes, beside those that could not be freed, and events.
    pub fn left(&self) -> (usize, usize) {
        let world = self.world();
        (world.page_locked.values().sum::<usize>() - world.kept_bytes, world.events.len())
    }

    fn enter(&self, call: &'static str) -> Result<MutexGuard<'_, World>, DeviceCallError> {
        let mut world = self.world();
        world.advance_some();
        let number = world.calls;
        world.calls += 1;
        let fails = match world.failing {
            Failing::Never => false,
            Failing::Once { at } => number == at,
            Failing::From { at } => number >= at,
        };
        if fails {
            world.failed = Some(call);
            return Err(DeviceCallError { call, message: format!("call {number} fails") });
        }
        Ok(world)
    }

    fn copy(
        &self,
        call: &'static str,
        (from, to, bytes): (*const u8, *mut u8, usize),
        page_locked: usize,
        stream: StreamId,
    ) -> Result<(), DeviceCallError> {
        let mut world = self.enter(call)?;
        if !world.is_page_locked(page_locked, bytes) {
            world.violations.push(format!("{call}: the host's end is not page-locked memory"));
        }
        let (from, to) = (from as usize, to as usize);
        world.queue(stream, Operation::Copy { from, to, bytes, page_locked, is_half_done: false });
        Ok(())
    }
}

impl World {
    fn queue(&mut self, stream: StreamId, operation: Operation) {
        let stream = &mut self.streams[stream.0 as usize];
        stream.queue.push_back(operation);
        stream.queued += 1;
    }

    fn is_reached(&self, (stream, until): (usize, u64)) -> bool {
        self.streams[stream].done >= until
    }

    fn is_page_locked(&self, start: usize, bytes: usize) -> bool {
        let below = self.page_locked.range(..=start).next_back();
        below.is_some_and(|(&base, &length)| start + bytes <= base + length)
    }

    fn advance_some(&mut self) {
        if self.draw.one_in(20) {
            // As many chances to stand still as there are streams, and as many not to.
            let drawn = self.draw.below(2 * self.streams.len());
            self.stalled = (drawn < self.streams.len()).then_some(drawn);
        }
        for _ in 0..self.draw.below(4) {
            self.advance(self.stalled);
        }
    }

    /// Does a part of the head of some stream but the stalled one. Says whether there was anything to do.
    fn advance(&mut self, stalled: Option<usize>) -> bool {
        let count = self.streams.len();
        let first = self.draw.below(count);
        for index in (0..count).map(|step| (first + step) % count).filter(|&index| Some(index) != stalled) {
            let is_done = match self.streams[index].queue.front_mut() {
                None => continue,
                Some(&mut Operation::Wait { on, until }) => {
                    if !self.is_reached((on, until)) {
                        continue;
                    }
                    true
                }
                Some(Operation::Kernel(_)) => true,
                Some(Operation::Copy { from, to, bytes, page_locked, is_half_done }) => {
                    let half = *bytes / 2;
                    let (skip, count) = if *is_half_done { (half, *bytes - half) } else { (0, half) };
                    let (from, to, bytes, page_locked) = (*from + skip, *to + skip, *bytes, *page_locked);
                    let was_half_done = std::mem::replace(is_half_done, true);
                    if self.is_page_locked(page_locked, bytes) {
                        // SAFETY: the host's end is allocated, and the tests keep the device's memory. No thread but
                        // this one touches either while the world is locked.
                        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, count) };
                    } else {
                        self.violations.push("a copy runs into memory that has been freed".to_owned());
                    }
                    was_half_done
                }
            };
            self.steps += 1;
            if is_done {
                let stream = &mut self.streams[index];
                stream.done += 1;
                stream.done_at.push(self.steps);
                if let Some(Operation::Kernel(kernel)) = stream.queue.pop_front() {
                    self.violations.extend(kernel());
                }
            }
            return true;
        }
        false
    }

    fn place_of(&mut self, event: EventId) -> Option<(usize, u64)> {
        match self.events.get(&event.0) {
            Some(&place) => place,
            None => {
                self.violations.push(format!("event {} is used after it was let go of", event.0));
                None
            }
        }
    }

    /// The step at which a timed event was reached.
    fn reached_at(&mut self, event: EventId) -> u64 {
        let place = self.place_of(event);
        let reached = place.is_some_and(|place| self.is_reached(place));
        let recorded_at = self.timed.get(&event.0).copied();
        let (Some((stream, until)), true, Some(recorded_at)) = (place, reached, recorded_at) else {
            self.violations.push(format!("event {} is asked for a time that it cannot tell", event.0));
            return 0;
        };
        let behind = until.checked_sub(1).map_or(0, |last| self.streams[stream].done_at[last as usize]);
        behind.max(recorded_at)
    }

    fn reach(&mut self, place: (usize, u64)) {
        self.synchronizations += 1;
        if self.sabotage == Some(Sabotage::NoSynchronize) {
            return;
        }
        while !self.is_reached(place) {
            assert!(self.advance(None), "the host waits for ever");
        }
    }
}

impl Device for Simulated {
    fn compute_stream(&self) -> Result<StreamId, DeviceCallError> {
        self.enter("compute_stream").map(|_| COMPUTE)
    }

    fn create_stream(&self) -> Result<StreamId, DeviceCallError> {
        let mut world = self.enter("create_stream")?;
        world.streams.push(Stream::default());
        Ok(StreamId(world.streams.len() as u64 - 1))
    }

    fn destroy_stream(&self, stream: StreamId) {
        let mut world = self.world();
        if !world.streams[stream.0 as usize].queue.is_empty() {
            world.violations.push(format!("stream {} is let go of with work in it", stream.0));
        }
    }

    fn create_event(&self) -> Result<EventId, DeviceCallError> {
        let mut world = self.enter("create_event")?;
        let event = world.next_event;
        world.next_event += 1;
        world.events.insert(event, None);
        Ok(EventId(event))
    }

    fn create_timed_event(&self) -> Result<EventId, DeviceCallError> {
        let event = self.create_event()?;
        self.world().timed.insert(event.0, 0);
        Ok(event)
    }

    fn elapsed_ns(&self, from: EventId, to: EventId) -> Result<u64, DeviceCallError> {
        let mut world = self.enter("elapsed_ns")?;
        let [from, to] = [from, to].map(|event| world.reached_at(event));
        Ok(to.saturating_sub(from))
    }

    fn destroy_event(&self, event: EventId) {
        let mut world = self.world();
        world.timed.remove(&event.0);
        if world.events.remove(&event.0).is_none() {
            world.violations.push(format!("event {} is let go of twice", event.0));
        }
    }

    fn record_event(&self, event: EventId, stream: StreamId) -> Result<(), DeviceCallError> {
        let mut world = self.enter("record_event")?;
        if world.place_of(event).is_some() {
            world.violations.push(format!("event {} is moved; whoever still waits for it is lost", event.0));
        }
        world.marks.push(stream);
        let steps = world.steps;
        if let Some(recorded_at) = world.timed.get_mut(&event.0) {
            *recorded_at = steps;
        }
        let early = u64::from(world.sabotage == Some(Sabotage::EarlyMark { on: stream }));
        let until = world.streams[stream.0 as usize].queued.saturating_sub(early);
        world.events.insert(event.0, Some((stream.0 as usize, until)));
        Ok(())
    }

    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> Result<(), DeviceCallError> {
        let mut world = self.enter("stream_wait_event")?;
        // As with a real driver, an event that was never recorded is waited for by nobody.
        if let Some((on, until)) = world.place_of(event)
            && world.sabotage != Some(Sabotage::NoWait { waiting: stream, on: StreamId(on as u64) })
        {
            world.queue(stream, Operation::Wait { on, until });
        }
        Ok(())
    }

    fn rest(&self, _: StreamId) -> Result<(), DeviceCallError> {
        self.enter("rest").map(drop)
    }

    fn is_complete(&self, event: EventId) -> Result<bool, DeviceCallError> {
        let mut world = self.enter("is_complete")?;
        Ok(world.place_of(event).is_none_or(|place| world.is_reached(place)))
    }

    fn synchronize_event(&self, event: EventId) -> Result<(), DeviceCallError> {
        let mut world = self.enter("synchronize_event")?;
        if let Some(place) = world.place_of(event) {
            world.reach(place);
        }
        Ok(())
    }

    fn synchronize_stream(&self, stream: StreamId) -> Result<(), DeviceCallError> {
        let mut world = self.enter("synchronize_stream")?;
        let queued = world.streams[stream.0 as usize].queued;
        world.reach((stream.0 as usize, queued));
        Ok(())
    }

    fn allocate_page_locked(&self, bytes: usize) -> Result<Option<NonNull<u8>>, DeviceCallError> {
        let mut world = self.enter("allocate_page_locked")?;
        if world.page_locked.values().sum::<usize>() + bytes > world.system_bytes {
            return Ok(None);
        }
        // SAFETY: engines ask for whole pages, so for more than nothing.
        let start = NonNull::new(unsafe { alloc_zeroed(layout(bytes)) }).expect("memory");
        world.page_locked.insert(start.as_ptr() as usize, bytes);
        Ok(Some(start))
    }

    unsafe fn free_page_locked(&self, start: NonNull<u8>, bytes: usize) -> Result<(), DeviceCallError> {
        let mut world = self.enter("free_page_locked").inspect_err(|_| self.world().kept_bytes += bytes)?;
        let range = start.as_ptr() as usize..start.as_ptr() as usize + bytes;
        if world.page_locked.get(&range.start) != Some(&bytes) {
            world.violations.push(format!("{bytes} bytes are freed that are not allocated"));
            return Ok(());
        }
        let queued = world.streams.iter().flat_map(|stream| &stream.queue);
        let in_use = queued
            .filter(|operation| matches!(operation, Operation::Copy { page_locked, .. } if range.contains(page_locked)))
            .count();
        if in_use > 0 {
            world.violations.push(format!("memory is freed while {in_use} copies are queued for it"));
        }
        world.page_locked.remove(&range.start);
        // SAFETY: allocated with the same layout, and forgotten.
        unsafe { dealloc(start.as_ptr(), layout(bytes)) };
        Ok(())
    }

    unsafe fn copy_from_device(
        &self,
        from: *const u8,
        to: *mut u8,
        bytes: usize,
        stream: StreamId,
    ) -> Result<(), DeviceCallError> {
        self.copy("copy_from_device", (from, to, bytes), to as usize, stream)
    }

    unsafe fn copy_to_device(
        &self,
        from: *const u8,
        to: *mut u8,
        bytes: usize,
        stream: StreamId,
    ) -> Result<(), DeviceCallError> {
        self.copy("copy_to_device", (from, to, bytes), from as usize, stream)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for (&start, &bytes) in &self.page_locked {
            // SAFETY: allocated with the same layout, and nothing runs any more.
            unsafe { dealloc(start as *mut u8, layout(bytes)) };
        }
    }
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, 4096).expect("a layout")
}
