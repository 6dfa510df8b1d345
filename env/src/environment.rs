//! The interface between an agent and what it acts on, in Gymnasium's terms.

use plimsoll_runtime::observation::{FEATURES, Pressure};
use plimsoll_runtime::plan::Action;
use plimsoll_runtime::policy::Choice;

/// What the agent sees: the candidates of one pressure point. Where waiting may be chosen, one row more stands for that, as
/// the swap of a candidate would.
///
/// It is empty when an episode is over.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Observation {
    /// Row-major `[candidates, FEATURES]`, dimensionless.
    pub features: Vec<f32>,
    /// `[candidates, 2]`: whether the candidate may be swapped, and whether it may be recomputed.
    pub action_mask: Vec<[bool; 2]>,
}

impl Observation {
    /// Copies what a policy would see at `pressure`.
    pub fn of(pressure: &Pressure<'_>) -> Self {
        let candidates = pressure.candidates.iter().map(|candidate| [candidate.can_swap, candidate.can_recompute]);
        Observation {
            features: pressure.features.to_vec(),
            action_mask: candidates.chain(pressure.wait.map(|_| [true, false])).collect(),
        }
    }

    /// How many candidates there are, waiting included.
    pub fn candidates(&self) -> usize {
        debug_assert_eq!(self.features.len(), self.action_mask.len() * FEATURES);
        self.action_mask.len()
    }

    /// Whether `choice` is legal here.
    pub fn allows(&self, choice: Choice) -> bool {
        let Some(&[swap, recompute]) = self.action_mask.get(choice.candidate) else { return false };
        match choice.action {
            Action::Keep => false,
            Action::Swap => swap,
            Action::Recompute => recompute,
        }
    }
}

/// What became of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepResult {
    /// The next pressure point; empty when the episode is over.
    pub observation: Observation,
    /// Reward of this step. Zero until the episode ends.
    pub reward: f32,
    /// The plan is complete: nothing more can or need be decided.
    pub terminated: bool,
    /// The episode was cut short by its bound on steps.
    pub truncated: bool,
}

/// An environment: an episode is one plan, a step is one eviction.
pub trait Environment {
    /// What can go wrong: nothing in a predicted environment, the training loop in a real one.
    type Error: std::error::Error;

    /// Starts an episode. The same seed gives the same episode. The observation is never empty.
    fn reset(&mut self, seed: u64) -> Result<Observation, Self::Error>;

    /// Evicts what `choice` names.
    ///
    /// # Panics
    ///
    /// If the choice is not legal in the last observation, or the episode is over.
    fn step(&mut self, choice: Choice) -> Result<StepResult, Self::Error>;
}

/// An environment whose episode can be taken back to an earlier point, to go on from there otherwise.
pub trait Branching: Environment {
    /// A point of an episode.
    type Mark: Send;

    /// The point where the episode stands.
    fn mark(&self) -> Self::Mark;

    /// Takes the episode under way back to where it stood. It may have ended meanwhile.
    fn return_to(&mut self, mark: &Self::Mark);
}

/// An environment whose instances a teacher has planned.
pub trait Taught: Environment {
    /// `[candidates, 2]`, as in the observation: which choices at the present pressure point the teacher's plan makes too,
    /// all of them legal. It may make none of them, and does not say in which order it makes them. Waiting is right where
    /// the plan evicts nothing more.
    fn lesson(&mut self) -> Vec<[bool; 2]>;
}
