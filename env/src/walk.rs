//! An episode under way: a sweep beside the instance that it walks.

use plimsoll_runtime::observation::Pressure;
use plimsoll_runtime::{Choice, Plan, Prediction, Sweep, sweep};

use crate::environment::Observation;
use crate::instance::Instance;

self_cell::self_cell! {
    struct Pair {
        owner: Instance,
        #[covariant]
        dependent: Sweep,
    }
}

/// A point of an episode.
#[derive(Clone, Debug)]
pub struct Mark {
    sweep: sweep::Mark,
    steps_left: usize,
}

/// One episode: what was chosen so far, and what has to be chosen next.
pub(crate) struct Walk {
    pair: Pair,
    steps_left: usize,
}

impl Walk {
    /// Starts at the first pressure point of `instance`. The episode is truncated after `steps_max` choices.
    pub(crate) fn start(instance: Instance, steps_max: usize) -> Self {
        let pair = Pair::new(instance, |instance| {
            Sweep::weighing_waits(instance.problem(), Plan::keep_all(instance.lineage.windows().len()))
        });
        Walk { pair, steps_left: steps_max }
    }

    /// The pressure point; none when the plan is complete.
    pub(crate) fn pressure(&self) -> Option<Pressure<'_>> {
        self.pair.borrow_dependent().pressure()
    }

    /// What the agent sees; empty when the plan is complete.
    pub(crate) fn observe(&self) -> Observation {
        self.pressure().map_or_else(Observation::default, |pressure| Observation::of(&pressure))
    }

    /// Makes a choice.
    ///
    /// # Panics
    ///
    /// If it is not legal, or the episode is over.
    pub(crate) fn take(&mut self, choice: Choice) {
        assert!(self.steps_left > 0, "a step was made after the episode was truncated");
        self.steps_left -= 1;
        self.pair.with_dependent_mut(|_, sweep| sweep.take(choice));
    }

    /// The present point.
    pub(crate) fn mark(&self) -> Mark {
        Mark { sweep: self.pair.borrow_dependent().mark(), steps_left: self.steps_left }
    }

    /// Goes back to an earlier point.
    pub(crate) fn return_to(&mut self, mark: &Mark) {
        self.steps_left = mark.steps_left;
        self.pair.with_dependent_mut(|_, sweep| sweep.return_to(&mark.sweep));
    }

    /// Whether the plan is complete.
    pub(crate) fn is_complete(&self) -> bool {
        self.pressure().is_none()
    }

    /// Whether the bound on steps cut the episode short.
    pub(crate) fn is_truncated(&self) -> bool {
        self.steps_left == 0 && !self.is_complete()
    }

    /// What is being planned.
    pub(crate) fn instance(&self) -> &Instance {
        self.pair.borrow_owner()
    }

    /// The choices so far.
    pub(crate) fn plan(&self) -> &Plan {
        self.pair.borrow_dependent().plan()
    }

    /// What the complete plan is predicted to cost.
    pub(crate) fn prediction(&self) -> Prediction {
        self.pair.borrow_dependent().prediction()
    }
}
