//! The lock of what operators wait for.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use super::shim;
use crate::locks::lock;

/// Whoever waits for it lets Python's threads go on: who holds it may have to wait for Python.
pub(crate) struct Lock<T>(Mutex<T>);

impl<T> Lock<T> {
    pub(crate) fn new(value: T) -> Self {
        Lock(Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.try_lock().unwrap_or_else(|| shim::without_python(|| lock(&self.0)))
    }

    /// What it guards, unless somebody holds it.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(PoisonError::into_inner(poisoned)),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}
