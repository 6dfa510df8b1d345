//! What decides: the interface that a learned policy and every baseline share.

use crate::observation::Pressure;
use crate::plan::{Action, Plan};
use crate::sweep::Problem;

/// An eviction chosen at a pressure point, or waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Row of [`Pressure::candidates`]; the one after the last stands for waiting, where that may be chosen.
    pub candidate: usize,
    /// [`Action::Swap`] or [`Action::Recompute`].
    pub action: Action,
}

/// Decides which windows are evicted.
///
/// Deciding cannot fail and, in [`Policy::choose`], does not allocate.
pub trait Policy {
    /// Decisions made before the sweep, from the whole problem: the plans of static baselines.
    fn open(&mut self, problem: &Problem<'_>) -> Plan {
        Plan::keep_all(problem.lineage.windows().len())
    }

    /// Whether [`Policy::choose`] looks at [`Pressure::features`]. Where it does not, they are left out: they take
    /// longer to fill in than a rule takes to decide.
    fn reads_features(&self) -> bool {
        false
    }

    /// Whether [`Policy::choose`] is asked, too, where the budget holds and something has to wait for room: there more may
    /// be evicted, or [`Pressure::waiting`] be chosen.
    fn weighs_waiting(&self) -> bool {
        false
    }

    /// Whether [`Policy::choose`] can be asked where [`Policy::open`] was not: while an iteration runs that nobody has
    /// seen before. There are no features then.
    fn decides_unopened(&self) -> bool {
        true
    }

    /// The eviction to make at a pressure point, always a legal one; or none, to give the point up.
    fn choose(&mut self, _: &Pressure<'_>) -> Option<Choice> {
        None
    }
}
