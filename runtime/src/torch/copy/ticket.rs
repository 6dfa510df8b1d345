//! What a copy under way is known by, and how its end is told.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::CopyError;
use super::device::RecordedEvent;
use crate::hardware::Tier;

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

    /// Blocks until workers have settled all of it. Says whether that took any waiting.
    pub(super) fn wait_for_workers(&self) -> Result<bool, CopyError> {
        let mut blocked = false;
        let mut outcome = Ok(());
        for done in self.done() {
            let Done::Worker(completion) = done else { panic!("a ticket of another engine") };
            blocked |= completion.outcome().is_none();
            // All of it is waited for, so that nothing is under way after an error.
            outcome = outcome.and(completion.wait());
        }
        outcome.map(|()| blocked)
    }
}

/// How a worker's copy ended, once it has.
#[derive(Debug, Default)]
pub(super) struct Completion {
    outcome: Mutex<Option<Result<(), CopyError>>>,
    settled: Condvar,
}

impl Completion {
    /// How it ended; none while it is under way.
    pub(super) fn outcome(&self) -> Option<Result<(), CopyError>> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Blocks until it has ended.
    pub(super) fn wait(&self) -> Result<(), CopyError> {
        let outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        let under_way = |outcome: &mut Option<_>| outcome.is_none();
        let outcome = self.settled.wait_while(outcome, under_way).unwrap_or_else(PoisonError::into_inner);
        outcome.clone().expect("settled")
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

    pub(super) fn settle(self, outcome: Result<(), CopyError>) {
        self.settle_first(outcome);
    }

    fn settle_first(&self, outcome: Result<(), CopyError>) {
        self.0.outcome.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(outcome);
        self.0.settled.notify_all();
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.settle_first(Err(CopyError::WorkerDied));
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
            promise.settle(expected.clone());
            for waiter in waiters {
                assert_eq!(waiter.join().unwrap(), (expected.clone(), expected.clone()));
            }
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
