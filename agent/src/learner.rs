//! What every way of learning a policy has in common.

use std::path::Path;
use std::time::Instant;

use plimsoll_env::environment::Environment;
use plimsoll_runtime::PolicyFile;
use plimsoll_runtime::network::{NetworkWeights, WeightsError};
use plimsoll_runtime::plan::ActionSet;
use plimsoll_runtime::policy_file::Provenance;
use serde::{Deserialize, Serialize};

use crate::training_state::SavedStateError;

/// The best weights so far.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Best {
    /// What they achieved.
    pub validation_return: f64,
    /// Updates after which they did.
    pub updates_done: usize,
    /// The weights.
    pub weights: NetworkWeights,
}

/// What an update was like.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct UpdateReport {
    /// Updates done, this one included.
    pub updates_done: usize,
    /// Episodes rolled out for it.
    pub episodes: usize,
    /// Transitions in them.
    pub transitions: usize,
    /// Mean undiscounted return of the episodes, as the environment rewarded them.
    pub return_mean: f64,
    /// The highest of those returns.
    pub return_max: f64,
    /// Time of the whole update.
    pub seconds: f64,
    /// What only this way of learning has to tell, by name.
    pub details: Vec<(&'static str, f64)>,
}

impl UpdateReport {
    /// Mean steps per episode.
    pub fn episode_length_mean(&self) -> f64 {
        self.transitions as f64 / self.episodes as f64
    }

    /// Transitions rolled out and learnt from per second.
    pub fn transitions_per_second(&self) -> f64 {
        self.transitions as f64 / self.seconds
    }
}

/// The episodes of an update.
#[derive(Default)]
pub(crate) struct Episodes {
    returns: Vec<f64>,
    pub(crate) transitions: usize,
}

impl Episodes {
    pub(crate) fn add(&mut self, transitions: usize, total_reward: f64) {
        self.transitions += transitions;
        self.returns.push(total_reward);
    }
}

/// How far a training run has come.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Progress {
    pub(crate) updates: usize,
    pub(crate) best: Option<Best>,
    /// The average of the weights so far, where the learner keeps one.
    pub(crate) average: Option<NetworkWeights>,
    /// What episodes are drawn from, by what tells it from others; none before that is known.
    world: Option<String>,
}

impl Progress {
    /// Counts an update that `started` then, and says what it was like.
    pub(crate) fn count(
        &mut self,
        started: Instant,
        episodes: &Episodes,
        details: Vec<(&'static str, f64)>,
    ) -> UpdateReport {
        let Episodes { returns, transitions } = episodes;
        self.updates += 1;
        UpdateReport {
            updates_done: self.updates,
            episodes: returns.len(),
            transitions: *transitions,
            return_mean: returns.iter().sum::<f64>() / returns.len() as f64,
            return_max: returns.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            seconds: started.elapsed().as_secs_f64(),
            details,
        }
    }
}

/// An update that was not made. The learner is as it was before it.
#[derive(Debug, thiserror::Error)]
pub enum TrainError<E: std::error::Error> {
    /// An environment failed.
    #[error(transparent)]
    Environment(E),
    /// The weights are no longer finite.
    #[error("training diverged: {0}")]
    Weights(#[from] WeightsError),
    /// The loss is no longer finite.
    #[error("training diverged: the loss of update {update} is not finite; a lower learning_rate may help")]
    Loss {
        /// The update, counted from 1.
        update: usize,
    },
}

/// A policy that training cannot start from.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// Its network is not of the size that is trained.
    #[error("hidden is {expected}, the hidden layers of the policy to start from have {found} outputs")]
    Width {
        /// The hyperparameter.
        expected: usize,
        /// Outputs of the policy's layer.
        found: usize,
    },
    /// What is learned is not comparable with a policy's scores.
    #[error("deep Q-learning learns what choices are worth, which the scores of a policy do not say")]
    NotValues,
}

/// A run that learned from other episodes before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("was begun with other traces, machines, links or ranges: its updates say nothing of these")]
pub struct OtherWorld;

/// Learns one policy, update by update, and can stop and go on between any two of them.
///
/// All of it follows from the hyperparameters, the seed and the environments: neither threads nor interruptions
/// change a bit. Another kind of processor may, by its vector instructions.
pub trait Learner {
    /// The hyperparameters, a flat table.
    fn hyperparameters(&self) -> serde_json::Value;

    /// Updates in the whole training run.
    fn updates(&self) -> usize;

    /// How far it has come.
    fn progress(&self) -> &Progress;

    /// The same, to go further.
    fn progress_mut(&mut self) -> &mut Progress;

    /// The policy network as it is now, which the next update goes on from.
    fn weights(&self) -> Result<NetworkWeights, WeightsError>;

    /// The policy network that it would be worth to keep now: the average of the latest, where the learner keeps one.
    fn steady_weights(&self) -> Result<NetworkWeights, WeightsError> {
        self.progress().average.clone().map_or_else(|| self.weights(), Ok)
    }

    /// Takes over the network of a policy and its normaliser, which stays as it is from then on. Before the first update.
    ///
    /// Fails where its hidden layers have another width than the hyperparameters say, or scores are not what is learned.
    fn start_from(&mut self, weights: &NetworkWeights) -> Result<(), StartError>;

    /// Hides columns of the observation from the network, in this run and in the policies that it makes. Before the first
    /// update.
    fn hide(&mut self, columns: &[usize]);

    /// Saves the whole training state to one file, whole or not at all. A run resumed from it continues bit for bit.
    fn save(&self, path: &Path) -> Result<(), SavedStateError>;

    /// Updates done.
    fn updates_done(&self) -> usize {
        self.progress().updates
    }

    /// The best weights so far, if any were offered.
    fn best(&self) -> Option<&Best> {
        self.progress().best.as_ref()
    }

    /// Says what episodes are drawn from, in any words that tell it from others. Fails where that was another before.
    fn enter(&mut self, world: &str) -> Result<(), OtherWorld> {
        match &mut self.progress_mut().world {
            Some(entered) if entered != world => return Err(OtherWorld),
            entered => *entered = Some(world.to_owned()),
        }
        Ok(())
    }

    /// Whether all updates are done.
    fn is_finished(&self) -> bool {
        self.updates_done() >= self.updates()
    }

    /// Keeps the steady weights as the best ones if `validation_return` is higher than that of the best so far, and
    /// says whether it was. The caller decides what is validated, and when.
    fn offer_best(&mut self, validation_return: f64) -> Result<bool, WeightsError> {
        let better = self.best().is_none_or(|best| validation_return > best.validation_return);
        if better && validation_return.is_finite() {
            let (updates_done, weights) = (self.updates_done(), self.steady_weights()?);
            self.progress_mut().best = Some(Best { validation_return, updates_done, weights });
            return Ok(true);
        }
        Ok(false)
    }

    /// The policy file of the best weights so far, or of the steady ones if none were offered.
    fn policy_file(
        &self,
        family: &str,
        actions: ActionSet,
        provenance: Provenance,
    ) -> Result<PolicyFile, WeightsError> {
        let weights = match self.best() {
            Some(best) => best.weights.clone(),
            None => self.steady_weights()?,
        };
        Ok(PolicyFile { family: family.to_owned(), actions, provenance, weights })
    }
}

/// A learner that can learn from environments of type `E`.
pub trait LearnsFrom<E: Environment>: Learner {
    /// Makes one update: rolls out and improves.
    ///
    /// Instance `i` of an update runs in environment `i mod environments`; environments that differ in more than what
    /// [`Environment::reset`] sets therefore make their number part of the result.
    ///
    /// # Panics
    ///
    /// If `environments` is empty, or an observation offers no legal eviction.
    fn update(&mut self, environments: &mut [E]) -> Result<UpdateReport, TrainError<E::Error>>;
}
