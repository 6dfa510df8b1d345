//! A thread that makes copies one after another: one direction of a link.
//!
//! It knows neither tiers nor slabs: a job is a closure. Its pace, where it has one, is a link's.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::CopyError;
use super::measured::{ChannelUse, Meter};
use super::ticket::{Done, Promise, Ticket};
use crate::hardware::Tier;

/// What a worker does. It lets go of all it holds before its end is told. Where it has to wait for something before it
/// copies, it sets the moment at which it began.
pub(super) type Job = Box<dyn FnOnce(&mut Instant) -> Result<(), CopyError> + Send>;

/// How fast an emulated link is in one direction.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    pub(super) bytes_per_s: f64,
    pub(super) latency_ns: u64,
}

impl Pace {
    /// Longest time that one copy can be made to take: an emulated link of no bandwidth at all must not hang.
    const LONGEST: Duration = Duration::from_secs(3600);

    fn time_of(&self, bytes: usize) -> Duration {
        let bytes_take = Duration::try_from_secs_f64(bytes as f64 / self.bytes_per_s).unwrap_or(Self::LONGEST);
        bytes_take.saturating_add(Duration::from_nanos(self.latency_ns)).min(Self::LONGEST)
    }
}

struct Order {
    asked_for: Instant,
    bytes: usize,
    job: Job,
    promise: Promise,
}

/// The thread and its queue.
pub(super) struct Worker {
    orders: Option<Sender<Order>>,
    meter: Meter,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    pub(super) fn start(name: &str, pace: Option<Pace>) -> Self {
        let (orders, incoming) = channel::<Order>();
        let meter = Meter::default();
        let counted = meter.clone();
        let work = move || {
            // When the emulated link is free again. It keeps its own time: bytes are copied as soon as they may be, and the
            // copy counts as made when the link would have made it. A worker that slept until then would wake late.
            let mut free_at = Instant::now();
            while let Ok(Order { asked_for, bytes, job, promise }) = incoming.recv() {
                let mut began = Instant::now();
                let Ok(outcome) = catch_unwind(AssertUnwindSafe(|| job(&mut began))) else {
                    // Its work may be broken: the worker dies. Queued orders go with the queue, and their promises
                    // tell; this one tells last, so whoever knows of the death finds no queue.
                    drop(incoming);
                    drop(promise);
                    return;
                };
                let due = pace.map(|pace| {
                    free_at = asked_for.max(free_at) + pace.time_of(bytes);
                    free_at
                });
                if outcome.is_ok() {
                    counted.add(bytes, pace.map_or_else(|| began.elapsed(), |pace| pace.time_of(bytes)));
                }
                promise.settle(outcome, due);
            }
        };
        let thread = thread::Builder::new().name(name.to_owned()).spawn(work).expect("a thread for copies");
        Worker { orders: Some(orders), meter, thread: Some(thread) }
    }

    /// What its copies so far took.
    pub(super) fn copies(&self) -> ChannelUse {
        self.meter.read()
    }

    /// Queues a job that copies `bytes`; `promise` is settled when it is done.
    pub(super) fn submit(&self, bytes: usize, promise: Promise, job: Job) -> Result<(), CopyError> {
        let order = Order { asked_for: Instant::now(), bytes, job, promise };
        let orders = self.orders.as_ref().expect("taken only when dropped");
        orders.send(order).map_err(|_| CopyError::WorkerDied)
    }

    /// Queues a job and gives the ticket for it.
    pub(super) fn ticket(&self, tier: Tier, bytes: usize, job: Job) -> Result<Ticket, CopyError> {
        let (promise, completion) = Promise::new();
        self.submit(bytes, promise, job)?;
        Ok(Ticket::new(tier, Done::Worker(completion)))
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
    use std::sync::Arc;
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn a_worker_that_dies_fails_its_job_those_queued_and_all_later_ones() {
        let worker = Worker::start("under-test", None);
        let gate = Arc::new(Barrier::new(2));
        let opened = Arc::clone(&gate);
        let before = worker.ticket(Tier::Host, 0, Box::new(|_| Ok(()))).unwrap();
        let dying = worker.ticket(
            Tier::Host,
            0,
            Box::new(move |_| {
                opened.wait();
                panic!("injected: the worker dies")
            }),
        );
        let queued = worker.ticket(Tier::Host, 0, Box::new(|_| Ok(())));
        gate.wait();
        assert_eq!(before.wait_for_workers().map(|_| ()), Ok(()));
        assert_eq!(dying.unwrap().wait_for_workers(), Err(CopyError::WorkerDied));
        assert_eq!(queued.unwrap().wait_for_workers(), Err(CopyError::WorkerDied));
        let later = worker.ticket(Tier::Host, 0, Box::new(|_| Ok(())));
        assert_eq!(later.map(|_| ()), Err(CopyError::WorkerDied));
    }

    #[test]
    fn a_paced_worker_makes_copies_at_once_and_tells_them_one_after_another() {
        let pace = Pace { bytes_per_s: 1e6, latency_ns: 1_000_000 };
        let worker = Worker::start("under-test", Some(pace));
        let started = Instant::now();
        let (made, makes) = channel();
        let copy = |bytes| {
            let made = made.clone();
            let job = move |_: &mut Instant| made.send(()).map_err(|_| CopyError::WorkerDied);
            worker.ticket(Tier::Host, bytes, Box::new(job)).unwrap()
        };
        let (first, second) = (copy(4_000), copy(0));
        // It would be an hour before a link of no bandwidth is free again, and the bytes behind are there all the same.
        let (_endless, behind) = (copy(usize::MAX), copy(1));
        (0..4).for_each(|_| makes.recv().unwrap());
        second.wait_for_workers().unwrap();
        assert!(started.elapsed() >= 2 * Duration::from_nanos(pace.latency_ns) + Duration::from_millis(4));
        assert_eq!(first.wait_for_workers(), Ok(false));
        assert!(behind.done().all(|done| matches!(done, Done::Worker(end) if end.outcome().is_none())));
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
