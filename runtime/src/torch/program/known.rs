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

/// What an operator's recipe is needed for, the least first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Need {
    /// What is dropped goes back to it. It is run again only if the program departs from the plan, and what was made by it is
    /// dropped, too.
    Spare,
    /// It is run again, or would be to restore what is dropped at any time until that is needed.
    Rerun,
}

/// What to do while the program runs.
pub(crate) struct Scheduled {
    pub(crate) plan: Plan,
    pub(crate) schedule: Schedule,
    pub(crate) prediction: Option<Prediction>,
    /// Per operator: what its recipe is needed for, if for anything.
    recipes: Vec<Option<Need>>,
    /// Per storage: the first step that moves it, if any does.
    first_move: Vec<Option<usize>>,
}

impl Scheduled {
    pub(crate) fn new(known: &Known, plan: Plan, schedule: Schedule, prediction: Option<Prediction>) -> Self {
        let recipes = recipes(&known.trace, &known.lineage, &plan);
        let mut first_move = vec![None; known.trace.storages.len()];
        for (step, (_, instruction)) in schedule.steps().iter().enumerate() {
            if let Some(storage) = instruction.storage() {
                first_move[storage.index()].get_or_insert(step);
            }
        }
        Scheduled { plan, schedule, prediction, recipes, first_move }
    }

    /// Whether the recipe of an operator is needed for that `least`.
    pub(crate) fn wants_recipe(&self, operator: usize, least: Need) -> bool {
        self.recipes.get(operator).copied().flatten() >= Some(least)
    }

    /// Whether a step before that one moves a storage.
    pub(super) fn has_moved(&self, storage: StorageId, before: usize) -> bool {
        self.first_move[storage.index()].is_some_and(|first| first < before)
    }

    /// Whether the plan is predicted to exceed its budget.
    pub(crate) fn exceeds_budget(&self) -> bool {
        self.prediction.is_some_and(|prediction| prediction.over_budget_bytes > 0)
    }
}

/// Which operators' recipes are of use under `plan`, and for what.
fn recipes(trace: &Trace, lineage: &Lineage, plan: &Plan) -> Vec<Option<Need>> {
    let mut recipes = vec![None; trace.operators.len()];
    let windows = lineage.windows().iter().zip(plan.actions());
    let dropped = windows.filter(|&(_, &action)| action == Action::Recompute).map(|(window, _)| window);
    for need in [Need::Spare, Need::Rerun] {
        // Until when versions may have to be made again.
        let mut seen = vec![None; lineage.versions().len()];
        let mut stack: Vec<_> = dropped.clone().map(|window| (window.version, window.last_operator())).collect();
        while let Some((version, until)) = stack.pop() {
            let known = &mut seen[version.index()];
            if known.is_some_and(|known| need == Need::Spare || known >= until) {
                continue;
            }
            *known = Some(until);
            let Some(producer) = lineage.version(version).producer else { continue };
            recipes[producer.index()] = Some(need);
            // A gradient that stands is not held: see `Ancestry`.
            let serves = |&input: &VersionId| {
                let Version { until: stands_until, producer, .. } = *lineage.version(input);
                let is_gradient = producer.is_some_and(|maker| trace.operators[maker.index()].phase == Phase::Backward);
                stands_until as usize >= until && !is_gradient
            };
            let inputs = lineage.replay_inputs(producer).iter().copied();
            stack.extend(inputs.filter(|input| need == Need::Spare || !serves(input)).map(|input| (input, until)));
        }
    }
    recipes
}
