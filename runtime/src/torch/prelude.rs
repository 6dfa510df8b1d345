//! Divides iterations where autograd records their first operator.
//!
//! What a loop does before that is the prelude: it draws a batch, say, and augments it, by operators or on shapes that chance
//! decides. Where iterations are not alike for that alone, what comes after the prelude is known and planned by itself, as an
//! iteration would be. In between everything is resident.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::driver::Shared;
use super::runtime::{Keeper, Next, lock};
use super::session::{Observer, Relay, SessionError};
use super::shim::{self, RawOperator};
use crate::trace::Phase;

/// Iterations in a row that are not known, though they train like the one before, after which they are divided.
const PATIENCE: u32 = 4;
/// Divided ones in a row that are not known either, after which that is given up.
const TRIES: u32 = 32;

/// Whether iterations are divided.
#[derive(Debug, Default)]
pub(super) struct Division {
    pub(super) is_on: bool,
    is_of_no_use: bool,
    doubts: u32,
    unknown: u32,
}

impl Division {
    /// An iteration is not known. Says whether it trains like the one before.
    pub(super) fn doubt(&mut self, trains_alike: bool) {
        self.doubts = if trains_alike { self.doubts + 1 } else { 0 };
        self.is_on |= self.doubts == PATIENCE && !self.is_of_no_use;
    }

    /// An iteration, or what came after its prelude, was known or not.
    pub(super) fn note(&mut self, known: bool) {
        if known {
            (self.doubts, self.unknown) = (0, 0);
        } else if self.is_on {
            self.unknown += 1;
            if self.unknown == TRIES {
                (self.is_on, self.is_of_no_use) = (false, true);
            }
        }
    }
}

/// Ends the prelude that is under way, and begins the rest of its iteration, where everything can be resident in between.
pub(super) fn divide(shared: &Shared, keeper: &Mutex<Keeper>) -> Result<(), SessionError> {
    let bytes = shared.lock().residency.bytes_if_resident();
    if bytes > lock(keeper).budget.as_bytes() {
        return Ok(());
    }
    let ended = shared.end().map_err(|fault| SessionError::NotRestored(fault.to_string()))?;
    shim::find_dead();
    let Next { leader, wanted, line_bytes } = lock(keeper).after_prelude(&mut shared.lock(), ended);
    shared.begin(leader, wanted, line_bytes)
}

/// Listens to an iteration that is marked, and divides it.
pub(super) struct Divider {
    shared: Arc<Shared>,
    keeper: Arc<Mutex<Keeper>>,
    /// What autograd had recorded of the loop's thread when the iteration began.
    recorded: u64,
    is_prelude: AtomicBool,
}

impl Divider {
    /// On the thread of the iteration, which is about to begin.
    pub(super) fn new(shared: Arc<Shared>, keeper: Arc<Mutex<Keeper>>) -> Self {
        Divider { shared, keeper, recorded: shim::recorded(), is_prelude: AtomicBool::new(true) }
    }

    fn ends_prelude(&self) -> bool {
        self.is_prelude.load(Ordering::Relaxed) && shim::phase() == Phase::Forward && shim::recorded() != self.recorded
    }
}

impl Relay for Divider {
    fn next(&self) -> &dyn Observer {
        &*self.shared
    }

    fn arrives(&self, _operator: &RawOperator) -> Result<(), SessionError> {
        if !self.ends_prelude() {
            return Ok(());
        }
        self.is_prelude.store(false, Ordering::Relaxed);
        divide(&self.shared, &self.keeper)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iterations_are_divided_where_they_train_alike_and_are_not_known() {
        let mut division = Division::default();
        let mut unknown = |trains_alike, times| {
            for _ in 0..times {
                division.doubt(trains_alike);
                division.note(false);
            }
            division.is_on
        };
        assert!(!unknown(false, 100) && !unknown(true, PATIENCE - 1) && !unknown(false, 1));
        assert!(!unknown(true, PATIENCE - 1) && unknown(true, 1));
        division.note(true);
        (1..TRIES).for_each(|_| division.note(false));
        assert!(division.is_on);
        division.note(false);
        assert!(!division.is_on, "of no use");
        (0..PATIENCE).for_each(|_| division.doubt(true));
        assert!(!division.is_on);
    }
}
