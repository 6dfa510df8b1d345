//! Locks that outlive a panic of whoever held them: it is told elsewhere, and others have to go on, or to end in order.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// What `mutex` guards.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
