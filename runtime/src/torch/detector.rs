//! Listens to a loop that marks no iterations, and ends and begins them where they are found.

use std::sync::Arc;

use super::driver::Shared;
use super::library::Library;
use super::lock::Lock;
use super::parts::Divider;
use super::period::{PeriodDetector, Step};
use super::program::{Follows, put};
use super::session::{Observer, Relay, SessionError, operator_name};
use super::shim::{self, Entry, RawOperator};
use crate::trace::Phase;

/// What autocast makes of parameters is recorded even where a model is evaluated and nothing else is.
const CAST: &str = "aten::_to_copy";

/// What finds iterations in the operators that it passes on.
pub(super) struct Detector {
    divider: Divider,
    stream: Lock<Stream>,
}

/// The operators so far.
#[derive(Default)]
struct Stream {
    /// Whether the loop says where iterations begin.
    is_marked: bool,
    period: PeriodDetector,
    /// By entry: how many backward passes had begun when its storage was made. Zero for what was there before.
    made_in: Vec<u32>,
    /// … and when a forward pass read it last.
    read_in: Vec<u32>,
}

impl Stream {
    /// What the operator is to the period; `recorded` as autograd says.
    fn step(&mut self, operator: &RawOperator, phase: Phase, recorded: bool) -> Step {
        let recorded = recorded && !(self.period.is_updated() && operator_name(operator.name) == CAST);
        let passes = self.period.backward_passes();
        let in_table = |table: &[u32], entry: Entry| table.get(entry.index()).copied().unwrap_or_default();
        let made_in = |entry| in_table(&self.made_in, entry);
        let mut written = operator.accesses().iter().filter(|access| access.is_written()).map(|access| access.entry);
        let updates = match phase {
            Phase::Forward => false,
            Phase::Update => written.any(|entry| made_in(entry) < passes),
            // Parameters may be updated as soon as their gradients are there. Gradients, which others are added to, are not what
            // the forward pass before read, and what that has made is none of the loop's.
            Phase::Backward => {
                written.any(|entry| made_in(entry) + 1 < passes && in_table(&self.read_in, entry) + 1 == passes)
            }
        };
        if phase == Phase::Forward {
            for access in operator.accesses() {
                put(&mut self.read_in, access.entry.index(), passes);
            }
        }
        Step { name: operator.name, phase, recorded, updates }
    }

    fn made(&mut self, operator: &RawOperator) {
        for created in operator.created() {
            put(&mut self.made_in, created.entry.index(), self.period.backward_passes());
        }
    }
}

impl Detector {
    pub(super) fn new(shared: Arc<Shared>, library: Arc<Lock<Library>>) -> Self {
        Detector { divider: Divider::new(shared, library), stream: Lock::new(Stream::default()) }
    }

    /// Stretches between two updates that an iteration takes, once that is known.
    pub(super) fn period(&self) -> Option<usize> {
        self.stream.lock().period.period()
    }

    /// Ends the iteration under way.
    pub(super) fn end(&self) -> Result<(), SessionError> {
        let Divider { shared, library, .. } = &self.divider;
        let ended = self.divider.end(Follows::Unheard)?;
        library.lock().after(&mut shared.lock(), ended);
        Ok(())
    }

    /// Ends the iteration under way, and begins the next.
    fn turn(&self) -> Result<(), SessionError> {
        self.divider.turn(Follows::Iteration, |library, driver, ended| {
            library.after(driver, ended);
            library.next(driver)
        })
    }

    /// An iteration begins here, and none is looked for from now on.
    pub(super) fn mark(&self) -> Result<(), SessionError> {
        self.stream.lock().is_marked = true;
        let Divider { shared, library, .. } = &self.divider;
        if shared.lock().has_started() {
            return self.turn();
        }
        let next = library.lock().next(&mut shared.lock());
        self.divider.go_on(next)
    }

    /// What the operator is, and whether an iteration begins with it.
    fn look_at(&self, operator: &RawOperator) -> (Step, bool) {
        let Divider { shared, library, .. } = &self.divider;
        let phase = shim::phase();
        let recorded = self.divider.is_recorded(phase);
        let mut stream = self.stream.lock();
        let step = stream.step(operator, phase, recorded);
        if stream.is_marked {
            return (step, false);
        }
        // What is divided from an iteration is what comes before it: all since the last update.
        let early = stream.period.is_updated() && library.lock().cuts().after_prelude;
        let begins = stream.period.push(step, early, shim::live_bytes(), || shared.lock().bytes_if_resident());
        // Where what has to be resident there exceeds the budget is none.
        let fits = begins.is_some_and(|bytes| library.lock().may_pause(bytes));
        if begins.is_some() && !fits {
            stream.period.reject();
        }
        (step, fits)
    }
}

impl Relay for Detector {
    fn next(&self) -> &dyn Observer {
        &*self.divider.shared
    }

    fn arrives(&self, operator: &RawOperator) -> Result<(), SessionError> {
        let (step, begins) = self.look_at(operator);
        if begins {
            self.turn()?;
        }
        self.divider.divide(operator, step.phase, step.recorded)
    }

    fn ran(&self, operator: &RawOperator) {
        self.stream.lock().made(operator);
    }
}
