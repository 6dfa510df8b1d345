//! What is known of a program: its trace, and what to do while it runs.

use std::sync::Arc;

use crate::lineage::{Edges, Lineage, Version, VersionId};
use crate::plan::{Action, Plan};
use crate::schedule::Schedule;
use crate::timeline::Prediction;
use crate::trace::{Phase, StorageId, Trace};

/// A trace with its lineage.
#[derive(Clone)]
pub(crate) struct Known {
    pub(crate) trace: Arc<Trace>,
    pub(crate) lineage: Arc<Lineage>,
}

impl Known {
    /// A whole iteration.
    pub(crate) fn of(trace: Trace) -> Self {
        Self::between(trace, Edges::default())
    }

    /// A part of one.
    pub(crate) fn between(trace: Trace, edges: Edges) -> Self {
        Known { lineage: Arc::new(Lineage::between(&trace, edges)), trace: Arc::new(trace) }
    }

    /// The same part, between other edges.
    pub(crate) fn at(&self, edges: Edges) -> Self {
        Known { lineage: Arc::new(Lineage::between(&self.trace, edges)), trace: Arc::clone(&self.trace) }
    }

    /// Another trace of the same program.
    pub(crate) fn with(&self, trace: Trace) -> Self {
        Self::between(trace, self.lineage.edges().clone())
    }

    /// The same, where these storages stay where they are.
    pub(crate) fn without_evicting(&self, is_kept: impl Fn(StorageId) -> bool) -> Self {
        let mut trace = Trace::clone(&self.trace);
        for (_, storage) in (0..).map(StorageId).zip(&mut trace.storages).filter(|(id, _)| is_kept(*id)) {
            storage.locked = Some("not the same in every iteration".to_owned());
        }
        self.with(trace)
    }
}

/// What to do while the program runs.
pub(crate) struct Scheduled {
    pub(crate) plan: Plan,
    pub(crate) schedule: Schedule,
    pub(crate) prediction: Option<Prediction>,
    /// Per operator: whether it is run again, or would be to restore what is dropped at any time until that is needed.
    reruns: Vec<bool>,
    /// Per storage: the first step that moves it, if any does.
    first_move: Vec<Option<usize>>,
}

impl Scheduled {
    pub(crate) fn new(known: &Known, plan: Plan, schedule: Schedule, prediction: Option<Prediction>) -> Self {
        let reruns = reruns(&known.trace, &known.lineage, &plan);
        let mut first_move = vec![None; known.trace.storages.len()];
        for (step, (_, instruction)) in schedule.steps().iter().enumerate() {
            if let Some(storage) = instruction.storage() {
                first_move[storage.index()].get_or_insert(step);
            }
        }
        Scheduled { plan, schedule, prediction, reruns, first_move }
    }

    /// Whether the plan needs the recipe of an operator.
    pub(crate) fn wants_recipe(&self, operator: usize) -> bool {
        self.reruns.get(operator).is_some_and(|&it| it)
    }

    /// Whether a step before that one moves a storage.
    pub(super) fn has_moved(&self, storage: StorageId, before: usize) -> bool {
        self.first_move[storage.index()].is_some_and(|first| first < before)
    }

    /// Whether there is no plan: what is evicted is decided when bytes run out.
    pub(crate) fn is_reactive(&self) -> bool {
        self.schedule.is_idle() && self.exceeds_budget()
    }

    /// Whether the plan is predicted to exceed its budget.
    pub(crate) fn exceeds_budget(&self) -> bool {
        self.prediction.is_some_and(|prediction| !prediction.fits())
    }
}

/// Which operators may be run again under `plan`.
fn reruns(trace: &Trace, lineage: &Lineage, plan: &Plan) -> Vec<bool> {
    let mut reruns = vec![false; trace.operators.len()];
    // Until when versions may have to be made again.
    let mut seen = vec![None; lineage.versions().len()];
    let windows = lineage.windows().iter().zip(plan.actions());
    let dropped = windows.filter(|&(_, &action)| action == Action::Recompute).map(|(window, _)| window);
    let mut stack: Vec<_> = dropped.map(|window| (window.version, window.last_operator())).collect();
    while let Some((version, until)) = stack.pop() {
        let known = &mut seen[version.index()];
        if known.is_some_and(|known| known >= until) {
            continue;
        }
        *known = Some(until);
        let Some(producer) = lineage.version(version).producer else { continue };
        reruns[producer.index()] = true;
        // A gradient that stands is not held: see `Ancestry`.
        let serves = |&input: &VersionId| {
            let Version { until: stands_until, producer, .. } = *lineage.version(input);
            let is_gradient = producer.is_some_and(|maker| trace.operators[maker.index()].phase == Phase::Backward);
            stands_until as usize >= until && !is_gradient
        };
        let inputs = lineage.replay_inputs(producer).iter().copied();
        stack.extend(inputs.filter(|input| !serves(input)).map(|input| (input, until)));
    }
    reruns
}
