//! The trainer: rolls out, improves, and can stop and go on between any two updates.

use std::path::Path;
use std::time::Instant;

use burn::optim::{AdamConfig, ModuleOptimizer};
use burn::tensor::Device;
use plimsoll_env::environment::Environment;
use plimsoll_runtime::PolicyFile;
use plimsoll_runtime::network::{NetworkWeights, WeightsError};
use plimsoll_runtime::observation::FEATURES;
use plimsoll_runtime::plan::ActionSet;
use plimsoll_runtime::policy_file::Provenance;
use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, PpoConfig};
use crate::export::network_weights;
use crate::model::ActorCritic;
use crate::ppo::{Diverged, Losses, Update, explained_variance};
use crate::rollout::{self, Episode};
use crate::seeds::{Stream, generator};
use crate::spread::FeatureSpread;
use crate::training_state::{self, Header, SavedStateError};

/// Adam's ε, as in CleanRL.
const ADAM_EPSILON: f32 = 1e-5;

/// Trains one policy.
///
/// All of it follows from the configuration, the seed and the environments: neither threads nor
/// interruptions change a bit. Another kind of processor may, by its vector instructions.
pub struct Trainer {
    config: PpoConfig,
    seed: u64,
    updates_done: usize,
    transitions_done: u64,
    device: Device,
    model: ActorCritic,
    optimizer: ModuleOptimizer,
    spread: FeatureSpread,
    best: Option<Best>,
}

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
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct UpdateReport {
    /// Updates done, this one included.
    pub updates_done: usize,
    /// Episodes rolled out for it.
    pub episodes: usize,
    /// Transitions in them.
    pub transitions: usize,
    /// Transitions since training began.
    pub transitions_done: u64,
    /// Mean undiscounted return of the episodes, as the environment rewarded them.
    pub return_mean: f64,
    /// The highest of those returns.
    pub return_max: f64,
    /// Mean steps per episode.
    pub episode_length_mean: f64,
    /// Clipped surrogate, negative where the policy improves.
    pub policy_loss: f64,
    /// Half the mean squared error of the values.
    pub value_loss: f64,
    /// Mean entropy of the policy, in nats.
    pub entropy: f64,
    /// Mean approximate KL divergence from the policy that rolled out, in nats.
    pub approx_kl: f64,
    /// Share of the choices whose probability left the clip range.
    pub clip_fraction: f64,
    /// Share of the variance of the value targets that the critic explained before the update.
    pub explained_variance: f64,
    /// Mean norm of the gradient before it was clipped.
    pub gradient_norm: f64,
    /// Adam's step size.
    pub learning_rate: f64,
    /// Passes made over the transitions.
    pub epochs: usize,
    /// Time of the whole update.
    pub seconds: f64,
    /// Transitions rolled out and learnt from per second.
    pub transitions_per_second: f64,
}

/// An update that was not made. The trainer is as it was before it.
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

impl Trainer {
    /// Begins a training run.
    pub fn new(config: PpoConfig, seed: u64) -> Result<Self, ConfigError> {
        config.validate()?;
        let device = Device::flex().autodiff();
        let model = ActorCritic::new(&config, &mut generator(seed, Stream::Weights, 0, 0), &device);
        let optimizer = AdamConfig::new().with_epsilon(ADAM_EPSILON).init();
        let spread = FeatureSpread::new();
        Ok(Trainer { config, seed, updates_done: 0, transitions_done: 0, device, model, optimizer, spread, best: None })
    }

    /// Makes one update: rolls out, values, improves.
    ///
    /// Instance `i` of an update runs in environment `i mod environments`; environments that differ in more
    /// than what [`Environment::reset`] sets therefore make their number part of the result.
    ///
    /// # Panics
    ///
    /// If `environments` is empty, or an observation offers no legal eviction.
    pub fn train_update<E>(&mut self, environments: &mut [E]) -> Result<UpdateReport, TrainError<E::Error>>
    where
        E: Environment + Send,
        E::Error: Send,
    {
        let start = Instant::now();
        let weights = self.weights()?;
        let update = Update {
            config: &self.config,
            seed: self.seed,
            index: self.updates_done,
            normaliser: weights.normaliser(),
            device: &self.device,
        };
        let episodes = rollout::collect(&update, &weights, environments).map_err(TrainError::Environment)?;
        let samples = update.samples(&self.model.critic, &episodes);
        let mut optimizer = self.optimizer.clone();
        let (model, losses) = update
            .improve(self.model.clone(), &mut optimizer, &samples)
            .map_err(|Diverged| TrainError::Loss { update: update.index + 1 })?;

        let explained_variance = explained_variance(&samples);
        let transitions = samples.len();
        if self.updates_done < self.config.normaliser_updates {
            self.absorb(&episodes);
        }
        self.model = model;
        self.optimizer = optimizer;
        self.updates_done += 1;
        self.transitions_done += transitions as u64;
        Ok(self.report(&episodes, transitions, &losses, explained_variance, start.elapsed().as_secs_f64()))
    }

    /// Takes the features of the episodes into the normaliser. The network sees its input shift by that, so
    /// it is done for the first updates only.
    fn absorb(&mut self, episodes: &[Episode]) {
        for transition in episodes.iter().flat_map(|episode| &episode.transitions) {
            for row in transition.observation.features.chunks_exact(FEATURES) {
                self.spread.absorb(row);
            }
        }
    }

    fn report(
        &self,
        episodes: &[Episode],
        transitions: usize,
        losses: &Losses,
        explained_variance: f64,
        seconds: f64,
    ) -> UpdateReport {
        let returns = episodes.iter().map(|episode| f64::from(episode.total_reward));
        UpdateReport {
            updates_done: self.updates_done,
            episodes: episodes.len(),
            transitions,
            transitions_done: self.transitions_done,
            return_mean: returns.clone().sum::<f64>() / episodes.len() as f64,
            return_max: returns.fold(f64::NEG_INFINITY, f64::max),
            episode_length_mean: transitions as f64 / episodes.len() as f64,
            policy_loss: losses.policy,
            value_loss: losses.value,
            entropy: losses.entropy,
            approx_kl: losses.approx_kl,
            clip_fraction: losses.clip_fraction,
            explained_variance,
            gradient_norm: losses.gradient_norm,
            learning_rate: self.config.learning_rate_at(self.updates_done - 1),
            epochs: losses.epochs,
            seconds,
            transitions_per_second: transitions as f64 / seconds,
        }
    }

    /// The configuration.
    pub fn config(&self) -> &PpoConfig {
        &self.config
    }

    /// Updates done.
    pub fn updates_done(&self) -> usize {
        self.updates_done
    }

    /// Whether all updates of the configuration are done.
    pub fn is_finished(&self) -> bool {
        self.updates_done >= self.config.updates
    }

    /// The policy network as it is now.
    pub fn weights(&self) -> Result<NetworkWeights, WeightsError> {
        network_weights(&self.model.actor, self.spread.normaliser())
    }

    /// Keeps the present weights as the best ones if `validation_return` is higher than that of the best so
    /// far, and says whether it was. The caller decides what is validated, and when.
    pub fn offer_best(&mut self, validation_return: f64) -> Result<bool, WeightsError> {
        let better = self.best.as_ref().is_none_or(|best| validation_return > best.validation_return);
        if better && validation_return.is_finite() {
            self.best = Some(Best { validation_return, updates_done: self.updates_done, weights: self.weights()? });
            return Ok(true);
        }
        Ok(false)
    }

    /// The best weights so far, if any were offered.
    pub fn best(&self) -> Option<&Best> {
        self.best.as_ref()
    }

    /// The policy file of the best weights so far, or of the present ones if none were offered.
    pub fn policy_file(
        &self,
        family: &str,
        actions: ActionSet,
        provenance: Provenance,
    ) -> Result<PolicyFile, WeightsError> {
        let weights = match &self.best {
            Some(best) => best.weights.clone(),
            None => self.weights()?,
        };
        Ok(PolicyFile { family: family.to_owned(), actions, provenance, weights })
    }

    /// Saves the whole training state to one file, whole or not at all. A run resumed from it continues
    /// bit for bit.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), SavedStateError> {
        let header = Header {
            config: self.config.clone(),
            seed: self.seed,
            updates_done: self.updates_done,
            transitions_done: self.transitions_done,
            spread: self.spread.clone(),
            best: self.best.clone(),
        };
        training_state::write(path.as_ref(), &header, &self.model, &self.optimizer)
    }

    /// Continues a saved training run, which must have been begun with the same configuration and seed.
    pub fn resume(path: impl AsRef<Path>, config: &PpoConfig, seed: u64) -> Result<Self, SavedStateError> {
        let path = path.as_ref();
        let fresh = Trainer::new(config.clone(), seed).map_err(|error| SavedStateError::unusable(path, error))?;
        let (header, model, optimizer) = training_state::read(path, config, seed, fresh.model, fresh.optimizer)?;
        Ok(Trainer {
            config: header.config,
            seed: header.seed,
            updates_done: header.updates_done,
            transitions_done: header.transitions_done,
            device: fresh.device,
            model,
            optimizer,
            spread: header.spread,
            best: header.best,
        })
    }
}

#[cfg(test)]
mod tests {
    use burn::module::{Module, ModuleVisitor, Param};
    use burn::tensor::Tensor;

    use super::*;
    use crate::rollout::greedy_return;
    use crate::toy::Toy;

    fn config() -> PpoConfig {
        PpoConfig { updates: 30, hidden: 16, critic_hidden: 16, learning_rate: 3e-3, ..PpoConfig::default() }
    }

    fn toys(count: usize) -> Vec<Toy> {
        (0..count).map(|_| Toy::new()).collect()
    }

    fn trained(config: &PpoConfig, seed: u64, updates: usize, environments: usize) -> Trainer {
        let mut trainer = Trainer::new(config.clone(), seed).unwrap();
        train(&mut trainer, updates, environments);
        trainer
    }

    fn train(trainer: &mut Trainer, updates: usize, environments: usize) {
        let mut environments = toys(environments);
        for _ in 0..updates {
            trainer.train_update(&mut environments).unwrap();
        }
    }

    /// The bits of every weight of actor and critic.
    fn bits(trainer: &Trainer) -> Vec<u32> {
        struct Collect(Vec<u32>);
        impl ModuleVisitor for Collect {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                let values: Vec<f32> = param.val().into_data().try_into_vec().unwrap();
                self.0.extend(values.into_iter().map(f32::to_bits));
            }
        }
        let mut collect = Collect(Vec::new());
        trainer.model.visit(&mut collect);
        collect.0
    }

    /// Random play earns about 0; the trained policy must come within a tenth of perfect play.
    #[test]
    fn it_learns_what_a_choice_is_worth() {
        let mut environments = toys(2);
        let mut trainer = Trainer::new(config(), 1).unwrap();
        let first = trainer.train_update(&mut environments).unwrap();
        while !trainer.is_finished() {
            trainer.train_update(&mut environments).unwrap();
        }
        let seeds: Vec<u64> = (1_000_000..1_000_200).collect();
        let greedy = greedy_return(&trainer.weights().unwrap(), &mut environments, &seeds).unwrap();
        assert!(first.return_mean.abs() < 0.3, "untrained: {}", first.return_mean);
        let perfect = seeds.iter().map(|&seed| f64::from(Toy::new().play_perfectly(seed))).sum::<f64>() / 200.0;
        assert!(greedy > 0.9 * perfect, "trained: {greedy}, perfect: {perfect}");
    }

    #[test]
    fn it_learns_from_truncated_episodes_too() {
        let mut environments = toys(2);
        environments.iter_mut().for_each(|toy| toy.truncates = true);
        let mut trainer = Trainer::new(config(), 1).unwrap();
        let reports: Vec<_> = (0..30).map(|_| trainer.train_update(&mut environments).unwrap()).collect();
        let late = reports[20..].iter().map(|report| report.return_mean).sum::<f64>() / 10.0;
        assert!(late > 0.6, "trained: {late}");
    }

    #[test]
    fn the_same_seed_gives_the_same_bits_on_any_number_of_threads() {
        let bits_of = |seed, environments| bits(&trained(&config(), seed, 3, environments));
        let expected = bits_of(1, 1);
        assert_eq!(bits_of(1, 1), expected);
        assert_eq!(bits_of(1, 5), expected);
        assert_ne!(bits_of(2, 1), expected);
    }

    #[test]
    fn a_resumed_run_continues_bit_for_bit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("toy.state");
        let config = PpoConfig { normaliser_updates: 3, ..config() };
        let straight = trained(&config, 7, 4, 2);
        let mut interrupted = trained(&config, 7, 2, 2);
        interrupted.offer_best(0.5).unwrap();
        interrupted.save(&path).unwrap();
        let mut resumed = Trainer::resume(&path, &config, 7).unwrap();
        assert_eq!(resumed.best(), interrupted.best());
        assert_eq!(bits(&resumed), bits(&interrupted));
        train(&mut resumed, 2, 2);
        assert_eq!(bits(&resumed), bits(&straight));
        assert_eq!(resumed.weights().unwrap(), straight.weights().unwrap());
        assert_eq!(resumed.transitions_done, straight.transitions_done);
    }

    #[test]
    fn a_run_saved_before_its_first_update_can_be_resumed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("toy.state");
        Trainer::new(config(), 7).unwrap().save(&path).unwrap();
        let mut resumed = Trainer::resume(&path, &config(), 7).unwrap();
        train(&mut resumed, 1, 1);
        assert_eq!(bits(&resumed), bits(&trained(&config(), 7, 1, 1)));
    }

    #[test]
    fn only_better_weights_become_the_best() {
        let mut trainer = Trainer::new(config(), 7).unwrap();
        assert!(trainer.offer_best(0.5).unwrap());
        assert!(!trainer.offer_best(0.5).unwrap());
        assert!(!trainer.offer_best(f64::NAN).unwrap());
        let first = trainer.weights().unwrap();
        train(&mut trainer, 1, 1);
        let file = trainer.policy_file("toy", ActionSet::ALL, Provenance::default()).unwrap();
        assert_eq!(file.weights, first);
        assert_ne!(trainer.weights().unwrap(), first);
    }
}
