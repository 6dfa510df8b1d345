//! Locks that outlive a panic of whoever held them: it is told elsewhere, and others have to go on, or to end in order.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// What `mutex` guards.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The same, unless somebody holds it.
#[cfg(feature = "torch")]
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}
