//! An engine that is made to fail, to test what stands above it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use plimsoll_runtime::hardware::Tier;
use plimsoll_runtime::torch::copy::{CopyEngine, CopyError, DeviceBytes, SlowCopy, Ticket, TierCopies, TierUse};

/// A call that can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// [`CopyEngine::offload`].
    Offload,
    /// [`CopyEngine::prefetch`].
    Prefetch,
    /// [`CopyEngine::wait`].
    Wait,
}

/// What goes wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The call takes longer.
    Delay(Duration),
    /// The call fails, and the next may succeed.
    Error(CopyError),
    /// The call fails, and with it every later one: the workers are dead.
    WorkersDie,
}

/// Faults to come, and those that came. Shared with the engine, which may long be out of reach.
#[derive(Clone, Debug, Default)]
pub struct Faults(Arc<Mutex<Book>>);

#[derive(Debug, Default)]
struct Book {
    /// Which call, how many of its kind come before it, and what goes wrong.
    due: Vec<(Call, u64, Fault)>,
    happened: u64,
    dead: bool,
}

impl Faults {
    /// Has `fault` happen at a `call`, after `skipped` more of its kind.
    pub fn inject(&self, call: Call, skipped: u64, fault: Fault) {
        self.book().due.push((call, skipped, fault));
    }

    /// How many calls went wrong.
    pub fn happened(&self) -> u64 {
        self.book().happened
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What this call meets.
    fn meet(&self, call: Call) -> Result<(), CopyError> {
        let mut delay = Duration::ZERO;
        let mut outcome = Ok(());
        {
            let mut book = self.book();
            let due = std::mem::take(&mut book.due);
            for (of, skipped, fault) in due {
                match (of == call, skipped) {
                    (false, _) => book.due.push((of, skipped, fault)),
                    (true, 1..) => book.due.push((of, skipped - 1, fault)),
                    (true, 0) => match fault {
                        Fault::Delay(by) => delay += by,
                        Fault::Error(error) => outcome = Err(error),
                        Fault::WorkersDie => book.dead = true,
                    },
                }
            }
            if book.dead {
                outcome = Err(CopyError::WorkerDied);
            }
            book.happened += u64::from(outcome.is_err() || delay > Duration::ZERO);
        }
        thread::sleep(delay);
        outcome
    }
}

/// Another engine, with [`Faults`]. It keeps the contract: where it fails, nothing is under way, no byte is lost, and
/// [`rescue`](CopyEngine::rescue) works.
pub struct FaultyEngine {
    inner: Box<dyn CopyEngine>,
    faults: Faults,
}

impl FaultyEngine {
    /// An engine that does what `inner` does until `faults` say otherwise.
    pub fn new(inner: Box<dyn CopyEngine>) -> (Self, Faults) {
        let faults = Faults::default();
        (FaultyEngine { inner, faults: faults.clone() }, faults)
    }
}

impl CopyEngine for FaultyEngine {
    unsafe fn offload(&mut self, pieces: &[DeviceBytes], tier: Tier) -> Result<(Vec<SlowCopy>, Ticket), CopyError> {
        self.faults.meet(Call::Offload)?;
        // SAFETY: passed on.
        unsafe { self.inner.offload(pieces, tier) }
    }

    unsafe fn prefetch(&mut self, copies: &[(&SlowCopy, *mut u8)]) -> Result<Ticket, CopyError> {
        self.faults.meet(Call::Prefetch)?;
        // SAFETY: passed on.
        unsafe { self.inner.prefetch(copies) }
    }

    fn has_read_out(&mut self) {
        self.inner.has_read_out();
    }

    fn compute_stands(&mut self, stands: bool) {
        self.inner.compute_stands(stands);
    }

    fn wait(&mut self, ticket: &Ticket) -> Result<(), CopyError> {
        // The copy ends first: nothing is under way after an error.
        let waited = self.inner.wait(ticket);
        self.faults.meet(Call::Wait).and(waited)
    }

    unsafe fn rescue(&mut self, copy: &SlowCopy, to: *mut u8) -> Result<(), CopyError> {
        // SAFETY: passed on.
        unsafe { self.inner.rescue(copy, to) }
    }

    fn tiers(&self) -> Vec<TierUse> {
        self.inner.tiers()
    }

    /// Without end, though it may fail: so that what counts on it is tested.
    fn dependable_bytes(&self) -> u64 {
        u64::MAX
    }

    fn copies(&self) -> Vec<TierCopies> {
        self.inner.copies()
    }
}
