//! A plan: an action for every window of a trace.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::file::{FileError, FileKind, read_json, write_json};
use crate::hardware::SlowTiers;
use crate::lineage::WindowId;

/// The newest plan format that this build reads and writes.
const PLAN_VERSION: u32 = 3;

/// What becomes of a storage while it is idle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// It stays on the device.
    #[default]
    Keep,
    /// Its bytes move to the slow tier and come back.
    Swap,
    /// Its bytes are dropped, and operators are rerun to restore them.
    Recompute,
}

impl Action {
    /// Every action.
    pub const ALL: [Action; 3] = [Action::Keep, Action::Swap, Action::Recompute];
    /// The evictions, in the order of a policy's logits.
    pub const EVICTIONS: [Action; 2] = [Action::Swap, Action::Recompute];
}

/// Which evictions a planner may use. Keeping is always allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ActionSet {
    /// Whether storages may be swapped.
    pub swap: bool,
    /// Whether storages may be recomputed.
    pub recompute: bool,
}

impl ActionSet {
    /// Keep, swap and recompute.
    pub const ALL: ActionSet = ActionSet { swap: true, recompute: true };
    /// Keep and swap.
    pub const SWAP: ActionSet = ActionSet { swap: true, recompute: false };
    /// Keep and recompute.
    pub const RECOMPUTE: ActionSet = ActionSet { swap: false, recompute: true };
    /// Keep alone.
    pub const NONE: ActionSet = ActionSet { swap: false, recompute: false };

    /// Whether `action` is in the set.
    pub const fn allows(self, action: Action) -> bool {
        match action {
            Action::Keep => true,
            Action::Swap => self.swap,
            Action::Recompute => self.recompute,
        }
    }

    /// The actions that are in both.
    pub const fn and(self, other: ActionSet) -> Self {
        ActionSet { swap: self.swap && other.swap, recompute: self.recompute && other.recompute }
    }
}

impl FromIterator<Action> for ActionSet {
    fn from_iter<I: IntoIterator<Item = Action>>(actions: I) -> Self {
        actions.into_iter().fold(ActionSet::NONE, |set, action| match action {
            Action::Keep => set,
            Action::Swap => ActionSet { swap: true, ..set },
            Action::Recompute => ActionSet { recompute: true, ..set },
        })
    }
}

/// An action for every window, indexed by [`WindowId`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Plan {
    actions: Vec<Action>,
}

/// How many windows a plan keeps, swaps and recomputes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ActionCounts {
    /// Windows kept.
    pub keep: usize,
    /// Windows swapped.
    pub swap: usize,
    /// Windows recomputed.
    pub recompute: usize,
}

impl Plan {
    /// The plan that evicts nothing.
    pub fn keep_all(windows: usize) -> Self {
        Plan { actions: vec![Action::Keep; windows] }
    }

    /// The action for `window`.
    pub fn action(&self, window: WindowId) -> Action {
        self.actions[window.index()]
    }

    /// Chooses `action` for `window`.
    pub fn set(&mut self, window: WindowId, action: Action) {
        self.actions[window.index()] = action;
    }

    /// The actions, one per window.
    pub fn actions(&self) -> &[Action] {
        &self.actions
    }

    /// How many windows get which action.
    pub fn counts(&self) -> ActionCounts {
        let mut counts = ActionCounts::default();
        for action in &self.actions {
            match action {
                Action::Keep => counts.keep += 1,
                Action::Swap => counts.swap += 1,
                Action::Recompute => counts.recompute += 1,
            }
        }
        counts
    }
}

/// A plan as it stands in a file, with what it was made for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanFile {
    /// [`crate::Trace::fingerprint`] of the trace that was planned.
    pub fingerprint: String,
    /// Name of the workload.
    pub workload: String,
    /// Name of the policy or baseline.
    pub policy: String,
    /// The budget in device bytes.
    pub budget_bytes: u64,
    /// The machine whose times it was made for, as the trace calls it; empty in files from before that was written down.
    #[serde(default)]
    pub device: String,
    /// What copies were reckoned to take.
    pub tiers: SlowTiers,
    /// The actions.
    pub plan: Plan,
}

impl PlanFile {
    /// Reads a plan file.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, FileError> {
        read_json(path.as_ref(), FileKind::Plan, PLAN_VERSION)
    }

    /// Writes the plan file, whole or not at all.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), FileError> {
        write_json(path.as_ref(), FileKind::Plan, PLAN_VERSION, self)
    }
}
