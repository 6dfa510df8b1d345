//! Divides iterations into parts, each of which is known and planned by itself, as an iteration would be. In between everything is
//! resident but what is left away for the next part (`absence.rs`).
//!
//! An iteration's *prelude* is what it does before autograd records its first operator: it draws a batch, say, and augments it, by
//! operators or on shapes that chance decides. Where iterations are not alike for that alone, the prelude is divided from the rest.
//! And the batches whose gradients add up may have sizes of their own, each in a *pass* that ends where something begins after its
//! backward pass: no plan for a whole iteration suits all combinations, where one for each pass does.

use std::sync::Arc;

use super::driver::{Driver, Ended, Shared};
use super::library::{Library, Next};
use super::lock::Lock;
use super::program::Follows;
use super::session::{Observer, Relay, SessionError};
use super::shim::{self, RawOperator};
use crate::trace::Phase;

/// Iterations in a row that are not known, though they train like the one before, after which their preludes are divided from them.
const PATIENCE: u32 = 4;
/// Operators that use what a pass has made and that autograd records after its backward pass, before they are taken for the next forward
/// pass.
const AFTERWORD: u32 = 32;
/// Parts in a row that are not known either, after which that is given up.
const TRIES: u32 = 32;

/// Where iterations are divided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cuts {
    /// Where autograd records the first operator.
    pub(super) after_prelude: bool,
    /// Where another forward pass begins after a backward pass.
    pub(super) between_passes: bool,
}

impl Cuts {
    /// Whether there are any.
    pub(super) fn any(self) -> bool {
        self.after_prelude || self.between_passes
    }
}

/// Decides whether iterations are divided.
#[derive(Debug, Default)]
pub(super) struct Division {
    cuts: Cuts,
    /// Those that were of no use.
    given_up: Cuts,
    doubts: u32,
    unknown: u32,
}

impl Division {
    pub(super) fn cuts(&self) -> Cuts {
        self.cuts
    }

    /// An iteration is not known. Says whether it trains like the one before.
    pub(super) fn doubt(&mut self, trains_alike: bool) {
        self.doubts = if trains_alike { self.doubts + 1 } else { 0 };
        self.cuts.after_prelude |= self.doubts == PATIENCE && !self.given_up.after_prelude;
    }

    /// The passes of an iteration have sizes of their own. Whether they are divided from now on, and were not so far.
    pub(super) fn divide_passes(&mut self) -> bool {
        let divides = !self.cuts.between_passes && !self.given_up.between_passes;
        self.cuts.between_passes |= divides;
        divides
    }

    /// An iteration, or a part of one, was known or not.
    pub(super) fn note(&mut self, known: bool) {
        if known {
            (self.doubts, self.unknown) = (0, 0);
        } else if self.cuts.any() {
            self.unknown += 1;
            if self.unknown == TRIES {
                self.given_up.after_prelude |= self.cuts.after_prelude;
                self.given_up.between_passes |= self.cuts.between_passes;
                (self.cuts, self.unknown) = (Cuts::default(), 0);
            }
        }
    }
}

/// Finds where the parts of an iteration end.
#[derive(Debug, Default)]
struct Parts {
    is_prelude: bool,
    between_passes: bool,
    /// What autograd has recorded since a backward pass, if there was one that nothing was divided after.
    since_backward: Option<u32>,
    /// What autograd had recorded of the loop's thread when its last operator began.
    recorded: u64,
}

impl Parts {
    /// An iteration begins, or another part of one.
    fn begin(&mut self, next: &Next) {
        (self.is_prelude, self.between_passes) = (next.wanted.is_prelude, next.cuts.between_passes);
        self.since_backward = None;
    }

    /// Whether autograd records the operator that is about to run, or what came since the last one. A backward pass may have a thread
    /// of its own.
    fn is_recorded(&mut self, phase: Phase) -> bool {
        phase != Phase::Backward && std::mem::replace(&mut self.recorded, shim::recorded()) != self.recorded
    }

    /// Whether a part ends before this operator, where it can be divided there. What uses something that a pass has made belongs to
    /// that, as what is done with its loss does; so does a forward pass that begins with such.
    fn end_before(&mut self, phase: Phase, recorded: bool, uses_own: impl FnOnce() -> bool) -> bool {
        if self.between_passes && phase == Phase::Backward {
            self.since_backward = Some(0);
        }
        if phase != Phase::Forward {
            return false;
        }
        if self.is_prelude {
            self.is_prelude = !recorded;
            return recorded;
        }
        let Some(since) = self.since_backward else { return false };
        let ends = !uses_own();
        let since = since + u32::from(recorded);
        self.since_backward = Some(since).filter(|&since| !ends && since <= AFTERWORD);
        ends
    }
}

/// Divides the iterations of a loop.
pub(super) struct Divider {
    pub(super) shared: Arc<Shared>,
    pub(super) library: Arc<Lock<Library>>,
    parts: Lock<Parts>,
}

impl Divider {
    /// On the thread of the loop.
    pub(super) fn new(shared: Arc<Shared>, library: Arc<Lock<Library>>) -> Self {
        Divider { shared, library, parts: Lock::new(Parts { recorded: shim::recorded(), ..Parts::default() }) }
    }

    /// An iteration begins, or another part of one.
    pub(super) fn begin(&self, next: &Next) {
        self.parts.lock().begin(next);
    }

    /// Whether autograd records the operator that is about to run in this phase, or what came since the last one.
    pub(super) fn is_recorded(&self, phase: Phase) -> bool {
        self.parts.lock().is_recorded(phase)
    }

    /// Ends the parts of an iteration that end before this operator, and begins the next, where what is to be resident in between can be.
    pub(super) fn divide(&self, operator: &RawOperator, phase: Phase, recorded: bool) -> Result<(), SessionError> {
        // A prelude may end before the operator that it begins with.
        let uses_own = || {
            let driver = self.shared.lock();
            let mut evictable = operator.accesses().iter().filter(|access| access.locked().is_none());
            evictable.any(|access| driver.residency.is_made_here(access.entry))
        };
        while self.parts.lock().end_before(phase, recorded, uses_own) {
            let is_loop = self.library.lock().is_loop;
            if !self.shared.make_resident(is_loop)? {
                break;
            }
            self.turn(Follows::Part, |library, driver, ended| library.after_part(driver, ended))?;
        }
        Ok(())
    }

    /// Ends what is under way in the middle of a loop, an iteration or a part of one, learns from it, and begins what is `next`.
    pub(super) fn turn(
        &self,
        follows: Follows,
        next: impl FnOnce(&mut Library, &mut Driver, Ended) -> Next,
    ) -> Result<(), SessionError> {
        let ended = self.end(follows)?;
        shim::find_dead();
        let next = next(&mut self.library.lock(), &mut self.shared.lock(), ended);
        self.go_on(next)
    }

    /// Begins what is next in the middle of a loop.
    pub(super) fn go_on(&self, next: Next) -> Result<(), SessionError> {
        self.begin(&next);
        self.shared.begin(next.leader, next.wanted, next.line_bytes)
    }

    /// Ends what is under way. Where that fails, further operators are refused.
    pub(super) fn end(&self, follows: Follows) -> Result<Ended, SessionError> {
        self.shared.end(follows).map_err(|fault| {
            self.shared.lock().refusal = Some(fault.to_string());
            fault.into()
        })
    }
}

/// A loop whose iterations are marked.
impl Relay for Divider {
    fn next(&self) -> &dyn Observer {
        &*self.shared
    }

    fn arrives(&self, operator: &RawOperator) -> Result<(), SessionError> {
        let phase = shim::phase();
        let recorded = self.is_recorded(phase);
        self.divide(operator, phase, recorded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn preludes_are_divided_where_iterations_train_alike_and_are_not_known() {
        let mut division = Division::default();
        let mut unknown = |trains_alike, times| {
            for _ in 0..times {
                division.doubt(trains_alike);
                division.note(false);
            }
            division.cuts.after_prelude
        };
        assert!(!unknown(false, 100) && !unknown(true, PATIENCE - 1) && !unknown(false, 1));
        assert!(!unknown(true, PATIENCE - 1) && unknown(true, 1));
        division.note(true);
        (1..TRIES).for_each(|_| division.note(false));
        assert!(division.cuts.after_prelude);
        division.note(false);
        assert!(!division.cuts.after_prelude, "of no use");
        (0..PATIENCE).for_each(|_| division.doubt(true));
        assert!(!division.cuts.after_prelude);
    }

    #[test]
    fn a_pass_ends_where_another_begins_and_not_in_the_middle_of_one() {
        let mut parts = Parts { between_passes: true, ..Parts::default() };
        let forward = |parts: &mut Parts, uses_own| parts.end_before(Phase::Forward, true, || uses_own);
        let backward = |parts: &mut Parts| assert!(!parts.end_before(Phase::Backward, false, || unreachable!()));
        assert!(!forward(&mut parts, false), "there was none before");
        backward(&mut parts);
        assert!(!forward(&mut parts, true), "of the loss that it had");
        assert!(forward(&mut parts, false) && !forward(&mut parts, false));
        backward(&mut parts);
        (0..=AFTERWORD).for_each(|_| assert!(!forward(&mut parts, true)));
        assert!(!forward(&mut parts, false), "the pass that goes on from what the one before has made is under way");
    }

    #[test]
    fn passes_are_divided_until_that_is_of_no_use() {
        let mut division = Division::default();
        assert!(division.divide_passes() && !division.divide_passes());
        (0..TRIES).for_each(|_| division.note(false));
        assert_eq!(division.cuts(), Cuts::default());
        assert!(!division.divide_passes());
    }
}
