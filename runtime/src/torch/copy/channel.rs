//! One direction of a link, which makes copies one after another.
//!
//! It knows neither tiers nor slabs: a job is a closure. Its pace, where it has one, is a link's.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::CopyError;
use super::measured::{ChannelUse, Meter};
use super::ticket::{Done, Promise, Ticket};
use crate::hardware::{Link, Tier};

/// What copies. It lets go of all it holds before its end is told. Where it has to wait for something before it copies, it
/// sets the moment at which it began.
pub(super) type Job = Box<dyn FnOnce(&mut Instant) -> Result<(), CopyError> + Send>;

/// Who makes an engine's copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopiedBy {
    /// A thread each way, beside whoever asks.
    Threads,
    /// A thread each way makes the large ones. Whoever asks makes those that take less than waking a thread does.
    LargeByThreads,
    /// Whoever asks, before the call returns.
    Caller,
}

/// Fewest bytes of a copy that takes longer than waking a thread for it costs who asks (`cargo bench --workspace --bench
/// contention`).
const LARGE_BYTES: usize = 256 << 10;

impl CopiedBy {
    /// Threads, where kernels leave them a core. A kernel on every core would wait for the part of it that shares its core
    /// with a copy, as long as the copy takes, and waking a thread there costs it some 70 µs more
    /// (`cargo bench --workspace --bench contention`).
    pub fn suiting_kernels() -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let kernel_threads = usize::try_from(tch::get_num_threads()).unwrap_or(1);
        if kernel_threads < cores { CopiedBy::LargeByThreads } else { CopiedBy::Caller }
    }
}

/// How fast an emulated link is in one direction.
#[derive(Clone, Copy, Debug)]
struct Pace {
    bytes_per_s: f64,
    latency_ns: u64,
}

impl Pace {
    /// Longest time that one copy can be made to take: an emulated link of no bandwidth at all must not hang.
    const LONGEST: Duration = Duration::from_secs(3600);

    fn time_of(&self, bytes: usize) -> Duration {
        let bytes_take = Duration::try_from_secs_f64(bytes as f64 / self.bytes_per_s).unwrap_or(Self::LONGEST);
        bytes_take.saturating_add(Duration::from_nanos(self.latency_ns)).min(Self::LONGEST)
    }
}

/// An emulated link in one direction. It keeps its own time: bytes are copied as soon as they may be, and the copy counts as
/// made when the link would have made it. Whoever slept until then would wake late.
struct Emulated {
    pace: Pace,
    free_at: Instant,
}

impl Emulated {
    fn of(pace: Pace) -> Self {
        Emulated { pace, free_at: Instant::now() }
    }

    /// How long it takes a copy that is asked for now, and when it has made it.
    fn copy(&mut self, bytes: usize) -> (Duration, Instant) {
        let time = self.pace.time_of(bytes);
        self.free_at = self.free_at.max(Instant::now()) + time;
        (time, self.free_at)
    }
}

struct Order {
    bytes: usize,
    job: Job,
    promise: Promise,
    meter: Meter,
    /// Where the link is emulated: how long it takes, and when it has made the copy.
    emulated: Option<(Duration, Instant)>,
}

/// The copying itself panicked: what it worked with may be broken.
struct Broken(Promise);

impl Order {
    /// Makes the copy and tells how it ended. Who made one that panicked tells by dropping what is left of it.
    fn carry_out(self) -> Result<(), Broken> {
        let Order { bytes, job, promise, meter, emulated } = self;
        let mut began = Instant::now();
        let Ok(outcome) = catch_unwind(AssertUnwindSafe(|| job(&mut began))) else { return Err(Broken(promise)) };
        if outcome.is_ok() {
            meter.add(bytes, emulated.map_or_else(|| began.elapsed(), |(time, _)| time));
        }
        promise.settle(outcome, emulated.map(|(_, due)| due));
        Ok(())
    }
}

/// One direction of a link.
pub(super) struct Channel {
    meter: Meter,
    emulated: Option<Emulated>,
    worker: Option<Worker>,
    /// Fewest bytes of a copy that the worker makes.
    large_bytes: usize,
}

impl Channel {
    /// The ways out and back of a link; `pace` emulates one.
    pub(super) fn there_and_back(copied_by: CopiedBy, pace: Option<Link>) -> (Self, Self) {
        let way = |name, bytes_per_s: fn(&Link) -> f64| {
            let pace = pace.map(|link| Pace { bytes_per_s: bytes_per_s(&link), latency_ns: link.latency_ns });
            Self::new(name, copied_by, pace)
        };
        (
            way("plimsoll-offload", |link| link.offload_bytes_per_s),
            way("plimsoll-prefetch", |link| link.prefetch_bytes_per_s),
        )
    }

    fn new(name: &str, copied_by: CopiedBy, pace: Option<Pace>) -> Self {
        let large_bytes = if copied_by == CopiedBy::LargeByThreads { LARGE_BYTES } else { 0 };
        let worker = (copied_by != CopiedBy::Caller).then(|| Worker::start(name));
        Channel { meter: Meter::default(), emulated: pace.map(Emulated::of), worker, large_bytes }
    }

    /// What its copies so far took.
    pub(super) fn copies(&self) -> ChannelUse {
        self.meter.read()
    }

    /// Has a job done that copies `bytes`; `promise` is settled when it is done.
    pub(super) fn submit(&mut self, bytes: usize, promise: Promise, job: Job) -> Result<(), CopyError> {
        let emulated = self.emulated.as_mut().map(|link| link.copy(bytes));
        let order = Order { bytes, job, promise, meter: self.meter.clone(), emulated };
        match &self.worker {
            Some(worker) if bytes >= self.large_bytes => worker.take(order),
            _ => order.carry_out().map_err(|Broken(_)| CopyError::WorkerDied),
        }
    }

    /// Has a job done and gives the ticket for it.
    pub(super) fn ticket(&mut self, tier: Tier, bytes: usize, job: Job) -> Result<Ticket, CopyError> {
        let (promise, completion) = Promise::new();
        self.submit(bytes, promise, job)?;
        Ok(Ticket::new(tier, Done::Worker(completion)))
    }

    /// Makes its thread die, as a fault to be survived, and waits until it has.
    pub(super) fn kill(&mut self) {
        let death = self.ticket(Tier::Host, 0, Box::new(|_| panic!("injected: a copy worker dies")));
        let _ = death.and_then(|ticket| ticket.wait_for_workers());
    }
}

/// The thread of a channel and its queue.
struct Worker {
    orders: Option<Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    fn start(name: &str) -> Self {
        let (orders, incoming) = channel::<Order>();
        let work = move || {
            while let Ok(order) = incoming.recv() {
                if let Err(Broken(promise)) = order.carry_out() {
                    // The worker dies. Queued orders go with the queue, and their promises tell; this one tells last, so
                    // whoever knows of the death finds no queue.
                    drop(incoming);
                    drop(promise);
                    return;
                }
            }
        };
        // Where there is no thread to be had, it has died.
        let thread = thread::Builder::new().name(name.to_owned()).spawn(work).ok();
        Worker { orders: Some(orders), thread }
    }

    fn take(&self, order: Order) -> Result<(), CopyError> {
        let orders = self.orders.as_ref().expect("taken only when dropped");
        orders.send(order).map_err(|_| CopyError::WorkerDied)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            // It ends once its queue is empty. A job that panicked was caught.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, Barrier};

    use super::*;

    /// Whether its job is done, and the link would have been.
    fn has_ended(ticket: &Ticket) -> bool {
        ticket.done().all(|done| matches!(done, Done::Worker(end) if end.outcome().is_some()))
    }

    #[test]
    fn a_worker_that_dies_fails_its_job_those_queued_and_all_later_ones() {
        let mut way = Channel::new("under-test", CopiedBy::Threads, None);
        let gate = Arc::new(Barrier::new(2));
        let opened = Arc::clone(&gate);
        let before = way.ticket(Tier::Host, 0, Box::new(|_| Ok(()))).unwrap();
        let dying = way.ticket(
            Tier::Host,
            0,
            Box::new(move |_| {
                opened.wait();
                panic!("injected: the worker dies")
            }),
        );
        let queued = way.ticket(Tier::Host, 0, Box::new(|_| Ok(())));
        gate.wait();
        assert_eq!(before.wait_for_workers(), Ok(()));
        assert_eq!(dying.unwrap().wait_for_workers(), Err(CopyError::WorkerDied));
        assert_eq!(queued.unwrap().wait_for_workers(), Err(CopyError::WorkerDied));
        let later = way.ticket(Tier::Host, 0, Box::new(|_| Ok(())));
        assert_eq!(later.map(|_| ()), Err(CopyError::WorkerDied));
    }

    #[test]
    fn a_caller_that_makes_its_copies_has_made_them_when_the_call_returns() {
        let mut way = Channel::new("under-test", CopiedBy::Caller, None);
        let made = Arc::new(AtomicBool::new(false));
        let makes = Arc::clone(&made);
        let job = move |_: &mut Instant| {
            makes.store(true, Ordering::Relaxed);
            Err(CopyError::Full { bytes: 7 })
        };
        let failed = way.ticket(Tier::Host, 5, Box::new(job)).unwrap();
        assert!(made.load(Ordering::Relaxed));
        assert_eq!(failed.wait_for_workers(), Err(CopyError::Full { bytes: 7 }));
        let (promise, completion) = Promise::new();
        let broken = way.submit(5, promise, Box::new(|_| panic!("injected: a copy panics")));
        assert_eq!((broken, completion.wait()), (Err(CopyError::WorkerDied), Err(CopyError::WorkerDied)));
        assert!(has_ended(&way.ticket(Tier::Host, 5, Box::new(|_| Ok(()))).unwrap()));
        assert_eq!((way.copies().copies, way.copies().bytes), (1, 5));
    }

    #[test]
    fn small_copies_are_made_by_whoever_asks_and_large_ones_by_a_thread() {
        let mut way = Channel::new("under-test", CopiedBy::LargeByThreads, None);
        let (made, makes) = channel();
        let mut copy = |bytes| {
            let made = made.clone();
            let job = move |_: &mut Instant| made.send(thread::current().id()).map_err(|_| CopyError::WorkerDied);
            way.ticket(Tier::Host, bytes, Box::new(job)).unwrap()
        };
        copy(LARGE_BYTES - 1);
        assert_eq!(makes.try_recv(), Ok(thread::current().id()), "before the call returns");
        copy(LARGE_BYTES).wait_for_workers().unwrap();
        assert_ne!(makes.recv(), Ok(thread::current().id()));
    }

    #[test]
    fn a_paced_channel_makes_copies_at_once_and_tells_them_one_after_another() {
        for copied_by in [CopiedBy::Threads, CopiedBy::Caller] {
            let pace = Pace { bytes_per_s: 1e6, latency_ns: 1_000_000 };
            let mut way = Channel::new("under-test", copied_by, Some(pace));
            let started = Instant::now();
            let (made, makes) = channel();
            let mut copy = |bytes| {
                let made = made.clone();
                let job = move |_: &mut Instant| made.send(()).map_err(|_| CopyError::WorkerDied);
                way.ticket(Tier::Host, bytes, Box::new(job)).unwrap()
            };
            let (first, second) = (copy(4_000), copy(0));
            // It would be an hour before a link of no bandwidth is free again, and the bytes behind are there all the same.
            let (_endless, behind) = (copy(usize::MAX), copy(1));
            (0..4).for_each(|_| makes.recv().unwrap());
            second.wait_for_workers().unwrap();
            assert!(started.elapsed() >= 2 * Duration::from_nanos(pace.latency_ns) + Duration::from_millis(4));
            assert!(has_ended(&first) && !has_ended(&behind));
        }
    }

    #[test]
    fn absurd_bandwidths_take_an_hour_at_most() {
        for bytes_per_s in [0.0, -1.0, f64::NAN, 1e-300] {
            assert_eq!(Pace { bytes_per_s, latency_ns: u64::MAX }.time_of(1 << 40), Pace::LONGEST);
        }
        assert_eq!(Pace { bytes_per_s: 1e9, latency_ns: 500 }.time_of(1_000_000), Duration::from_nanos(1_000_500));
        assert_eq!(Pace { bytes_per_s: f64::INFINITY, latency_ns: 500 }.time_of(1 << 40), Duration::from_nanos(500));
    }
}
