//! An engine that is made to fail, to test what stands above it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use plimsoll_runtime::hardware::Tier;
use plimsoll_runtime::torch::copy::{CopyEngine, CopyError};

use super::meddled::{Meddled, Meddler};

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

/// Another engine, with [`Faults`]: where it fails, no byte is lost, and [`rescue`](CopyEngine::rescue) works.
pub type FaultyEngine = Meddled<Faults>;

impl FaultyEngine {
    /// An engine that does what `inner` does until the faults say otherwise.
    pub fn with_faults(inner: impl CopyEngine + 'static) -> (Self, Faults) {
        let faults = Faults::default();
        (Meddled::new(inner, faults.clone()), faults)
    }
}

impl Meddler for Faults {
    fn offload(&mut self, tier: Tier, _: usize) -> Result<Tier, CopyError> {
        self.meet(Call::Offload).map(|()| tier)
    }

    fn prefetch(&mut self) -> Result<(), CopyError> {
        self.meet(Call::Prefetch)
    }

    fn waited(&mut self) -> Result<(), CopyError> {
        self.meet(Call::Wait)
    }

    /// Without end, though it may fail: so that what counts on it is tested.
    fn dependable_bytes(&self, _: u64) -> u64 {
        u64::MAX
    }
}
