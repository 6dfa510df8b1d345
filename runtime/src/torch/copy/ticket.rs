//! What a copy under way is known by, and how its end is told.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::CopyError;
use super::device::RecordedEvent;
use crate::hardware::Tier;
use crate::locks::lock;

/// A copy under way.
#[derive(Clone, Debug)]
pub struct Ticket(Vec<Part>);

/// What one engine has to do for a ticket.
#[derive(Clone, Debug)]
struct Part {
    tier: Tier,
    done: Done,
}

/// What says that a copy has been made.
#[derive(Clone, Debug)]
pub(super) enum Done {
    /// A worker settles it.
    Worker(Arc<Completion>),
    /// A stream reaches it.
    Event(Arc<RecordedEvent>),
}

impl Ticket {
    pub(super) fn new(tier: Tier, done: Done) -> Self {
        Ticket(vec![Part { tier, done }])
    }

    /// A ticket for all that `tickets` are for.
    pub(super) fn all(tickets: impl IntoIterator<Item = Ticket>) -> Self {
        Ticket(tickets.into_iter().flat_map(|ticket| ticket.0).collect())
    }

    pub(super) fn done(&self) -> impl Iterator<Item = &Done> {
        self.0.iter().map(|part| &part.done)
    }

    /// What of this ticket concerns `tier`.
    pub(super) fn of(&self, tier: Tier) -> Option<Ticket> {
        let parts: Vec<Part> = self.0.iter().filter(|part| part.tier == tier).cloned().collect();
        (!parts.is_empty()).then_some(Ticket(parts))
    }

    /// Blocks until workers have settled all of it.
    pub(super) fn wait_for_workers(&self) -> Result<(), CopyError> {
        let mut outcome = Ok(());
        for done in self.done() {
            let Done::Worker(completion) = done else { panic!("a ticket of another engine") };
            // All of it is waited for, so that nothing is under way after an error.
            outcome = outcome.and(completion.wait());
        }
        outcome
    }
}

/// How a worker's copy ended, once it has.
#[derive(Debug, Default)]
pub(super) struct Completion {
    settled: Mutex<Option<Settled>>,
    told: Condvar,
}

/// The end of a copy, as its worker tells it.
#[derive(Clone, Debug)]
struct Settled {
    outcome: Result<(), CopyError>,
    /// When the copy counts as made, where a link is emulated: until then it is under way.
    due: Option<Instant>,
}

impl Completion {
    /// How it ended; none while it is under way.
    #[cfg(test)]
    pub(super) fn outcome(&self) -> Option<Result<(), CopyError>> {
        let settled = lock(&self.settled).clone();
        settled.filter(|settled| settled.due.is_none_or(|due| due <= Instant::now())).map(|settled| settled.outcome)
    }

    /// Blocks until it has ended.
    pub(super) fn wait(&self) -> Result<(), CopyError> {
        let settled = lock(&self.settled);
        let under_way = |settled: &mut Option<_>| settled.is_none();
        let settled = self.told.wait_while(settled, under_way).unwrap_or_else(PoisonError::into_inner);
        let Settled { outcome, due } = settled.clone().expect("settled");
        drop(settled);
        due.into_iter().for_each(sleep_until);
        outcome
    }
}

/// How late a sleeper may wake: the system's slack and the way of a sleeping processor. The rest of a wait is awake.
const WAKES_LATE: Duration = Duration::from_micros(300);

/// Blocks until `moment`, and hardly longer: the thread that computes waits here, and its lateness would be the link's.
fn sleep_until(moment: Instant) {
    let left = moment.saturating_duration_since(Instant::now());
    thread::sleep(left.saturating_sub(WAKES_LATE));
    while Instant::now() < moment {
        thread::yield_now();
    }
}

/// The duty to settle a completion. Whoever drops it unsettled, by dying above all, settles it as [`CopyError::WorkerDied`],
/// so nobody waits for ever.
pub(super) struct Promise(Arc<Completion>);

impl Promise {
    pub(super) fn new() -> (Self, Arc<Completion>) {
        let completion = Arc::new(Completion::default());
        (Promise(Arc::clone(&completion)), completion)
    }

    /// Tells how the copy ended. One that was made counts as made at `due`, where that is given.
    pub(super) fn settle(self, outcome: Result<(), CopyError>, due: Option<Instant>) {
        let due = due.filter(|_| outcome.is_ok());
        self.settle_first(Settled { outcome, due });
    }

    fn settle_first(&self, settled: Settled) {
        lock(&self.0.settled).get_or_insert(settled);
        self.0.told.notify_all();
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.settle_first(Settled { outcome: Err(CopyError::WorkerDied), due: None });
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn every_waiter_learns_how_it_ended_and_learns_it_again() {
        for expected in [Ok(()), Err(CopyError::Full { bytes: 7 })] {
            let (promise, completion) = Promise::new();
            let waiters: Vec<_> = (0..16)
                .map(|_| {
                    let completion = Arc::clone(&completion);
                    thread::spawn(move || (completion.wait(), completion.wait()))
                })
                .collect();
            assert_eq!(completion.outcome(), None);
            promise.settle(expected.clone(), None);
            for waiter in waiters {
                assert_eq!(waiter.join().unwrap(), (expected.clone(), expected.clone()));
            }
        }
    }

    #[test]
    fn a_copy_that_is_due_later_is_under_way_until_then_and_one_that_failed_is_not() {
        let (promise, completion) = Promise::new();
        let due = Instant::now() + Duration::from_secs(3600);
        promise.settle(Ok(()), Some(due));
        assert_eq!(completion.outcome(), None);
        let (promise, completion) = Promise::new();
        promise.settle(Err(CopyError::Full { bytes: 7 }), Some(due));
        assert_eq!(completion.outcome(), Some(Err(CopyError::Full { bytes: 7 })));
        for wait in [Duration::ZERO, WAKES_LATE / 2, 2 * WAKES_LATE] {
            let (promise, completion) = Promise::new();
            let due = Instant::now() + wait;
            promise.settle(Ok(()), Some(due));
            assert_eq!(completion.wait(), Ok(()));
            assert!(Instant::now() >= due, "it took less than {wait:?}");
            assert_eq!(completion.outcome(), Some(Ok(())));
        }
    }

    #[test]
    fn a_promise_that_is_dropped_wakes_its_waiters() {
        let (promise, completion) = Promise::new();
        let waiter = {
            let completion = Arc::clone(&completion);
            thread::spawn(move || completion.wait())
        };
        drop(promise);
        assert_eq!(waiter.join().unwrap(), Err(CopyError::WorkerDied));
    }
}
