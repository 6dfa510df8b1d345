//! Proximal policy optimisation, update by update.

mod config;
mod episodes;
mod update;

use std::path::Path;
use std::time::Instant;

use burn::optim::{AdamConfig, ModuleOptimizer};
use burn::tensor::Device;
use plimsoll_env::environment::Environment;
use plimsoll_runtime::network::{NetworkWeights, WeightsError};

pub use self::config::PpoConfig;
use self::episodes::{Episode, collect};
use self::update::{Update, explained_variance};
use crate::config::{ConfigError, Hyperparameters};
use crate::export::network_weights;
use crate::gradients::Diverged;
use crate::learner::{Episodes, Learner, LearnsFrom, Progress, StartError, TrainError, UpdateReport};
use crate::model::{Actor, ActorCritic};
use crate::seeds::{Stream, generator};
use crate::spread::FeatureSpread;
use crate::training_state::{self, Header, Kind, SavedStateError};

/// Adam's ε, as in CleanRL.
const ADAM_EPSILON: f32 = 1e-5;

/// Learns one policy by proximal policy optimisation.
pub struct Ppo {
    header: Header<PpoConfig>,
    device: Device,
    model: ActorCritic,
    optimizer: ModuleOptimizer,
}

impl Ppo {
    /// Begins a training run.
    pub fn new(config: PpoConfig, seed: u64) -> Result<Self, ConfigError> {
        config.validate()?;
        let device = Device::flex().autodiff();
        let model = ActorCritic::new(&config, &mut generator(seed, Stream::Weights, 0, 0), &device);
        let optimizer = AdamConfig::new().with_epsilon(ADAM_EPSILON).init();
        Ok(Ppo { header: Header::new(config, seed), device, model, optimizer })
    }

    /// Continues a saved training run, which must have been begun with the same configuration and seed.
    pub fn resume(path: impl AsRef<Path>, config: &PpoConfig, seed: u64) -> Result<Self, SavedStateError> {
        let path = path.as_ref();
        let fresh = Ppo::new(config.clone(), seed).map_err(|error| SavedStateError::unusable(path, error))?;
        let (header, model, optimizer) =
            training_state::read(path, Kind::Ppo, (config, seed), fresh.model, fresh.optimizer)?;
        Ok(Ppo { header, device: fresh.device, model, optimizer })
    }

    /// Takes the features of the episodes into the normaliser. The network sees its input shift by that, so
    /// it is done for the first updates only.
    fn absorb(&mut self, episodes: &[Episode]) {
        for transition in episodes.iter().flat_map(|episode| &episode.transitions) {
            self.header.spread.absorb(&transition.observation.features);
        }
    }
}

impl<E> LearnsFrom<E> for Ppo
where
    E: Environment + Send,
    E::Error: Send,
{
    fn update(&mut self, environments: &mut [E]) -> Result<UpdateReport, TrainError<E::Error>> {
        let started = Instant::now();
        let weights = self.weights()?;
        let update = Update {
            config: &self.header.config,
            seed: self.header.seed,
            index: self.header.progress.updates,
            normaliser: weights.normaliser(),
            device: &self.device,
        };
        let episodes = collect(&update, &weights, environments).map_err(TrainError::Environment)?;
        let samples = update.samples(&self.model.critic, &episodes);
        let mut optimizer = self.optimizer.clone();
        let (model, losses) = update
            .improve(self.model.clone(), &mut optimizer, &samples)
            .map_err(|Diverged| TrainError::Loss { update: update.index + 1 })?;

        let mut details = losses.named().to_vec();
        details.push(("explained_variance", explained_variance(&samples)));
        details.push(("learning_rate", self.header.config.learning_rate_at(update.index)));
        if update.index < self.header.config.normaliser_updates {
            self.absorb(&episodes);
        }
        self.model = model;
        self.optimizer = optimizer;
        let mut rolled_out = Episodes::default();
        episodes.iter().for_each(|of| rolled_out.add(of.transitions.len(), f64::from(of.total_reward)));
        Ok(self.header.progress.count(started, &rolled_out, details))
    }
}

impl Learner for Ppo {
    fn hyperparameters(&self) -> serde_json::Value {
        serde_json::to_value(&self.header.config).expect("a flat table of numbers")
    }

    fn updates(&self) -> usize {
        self.header.config.updates
    }

    fn progress(&self) -> &Progress {
        &self.header.progress
    }

    fn progress_mut(&mut self) -> &mut Progress {
        &mut self.header.progress
    }

    fn weights(&self) -> Result<NetworkWeights, WeightsError> {
        network_weights(&self.model.actor, self.header.spread.normaliser())
    }

    fn start_from(&mut self, weights: &NetworkWeights) -> Result<(), StartError> {
        self.model.actor = Actor::of(weights, self.header.config.hidden, &self.device)?;
        self.header.spread = FeatureSpread::given(weights.normaliser().clone());
        Ok(())
    }

    fn hide(&mut self, columns: &[usize]) {
        self.header.spread.hide(columns);
    }

    fn save(&self, path: &Path) -> Result<(), SavedStateError> {
        training_state::write(path, Kind::Ppo, &self.header, &self.model, &self.optimizer)
    }
}

#[cfg(test)]
mod tests {
    use burn::module::{Module, ModuleVisitor, Param};
    use burn::tensor::Tensor;
    use plimsoll_runtime::plan::ActionSet;
    use plimsoll_runtime::policy_file::Provenance;

    use super::*;
    use crate::rollout::greedy_return;
    use crate::toy::Toy;

    fn config() -> PpoConfig {
        PpoConfig {
            updates: 30,
            hidden: 16,
            critic_hidden: 16,
            instances_per_update: 8,
            entropy_coefficient: 0.003,
            ..PpoConfig::default()
        }
    }

    fn toys(count: usize) -> Vec<Toy> {
        (0..count).map(|_| Toy::new()).collect()
    }

    fn trained(config: &PpoConfig, seed: u64, updates: usize, environments: usize) -> Ppo {
        let mut ppo = Ppo::new(config.clone(), seed).unwrap();
        train(&mut ppo, updates, environments);
        ppo
    }

    fn train(ppo: &mut Ppo, updates: usize, environments: usize) {
        let mut environments = toys(environments);
        for _ in 0..updates {
            ppo.update(&mut environments).unwrap();
        }
    }

    /// The bits of every weight of actor and critic.
    fn bits(ppo: &Ppo) -> Vec<u32> {
        struct Collect(Vec<u32>);
        impl ModuleVisitor for Collect {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                let values: Vec<f32> = param.val().into_data().try_into_vec().unwrap();
                self.0.extend(values.into_iter().map(f32::to_bits));
            }
        }
        let mut collect = Collect(Vec::new());
        ppo.model.visit(&mut collect);
        collect.0
    }

    /// Random play earns about 0; the trained policy must come within a tenth of perfect play.
    #[test]
    fn it_learns_what_a_choice_is_worth() {
        let mut environments = toys(2);
        let mut ppo = Ppo::new(PpoConfig { updates: 60, ..config() }, 1).unwrap();
        let first = ppo.update(&mut environments).unwrap();
        while !ppo.is_finished() {
            ppo.update(&mut environments).unwrap();
        }
        let seeds: Vec<u64> = (1_000_000..1_000_200).collect();
        let greedy = greedy_return(&ppo.weights().unwrap(), &mut environments, &seeds).unwrap();
        assert!(first.return_mean.abs() < 0.3, "untrained: {}", first.return_mean);
        let perfect = seeds.iter().map(|&seed| f64::from(Toy::new().play_perfectly(seed))).sum::<f64>() / 200.0;
        assert!(greedy > 0.9 * perfect, "trained: {greedy}, perfect: {perfect}");
    }

    #[test]
    fn it_learns_from_truncated_episodes_too() {
        let mut environments = toys(2);
        environments.iter_mut().for_each(|toy| toy.truncates = true);
        let mut ppo = Ppo::new(config(), 1).unwrap();
        let reports: Vec<_> = (0..30).map(|_| ppo.update(&mut environments).unwrap()).collect();
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
        let mut resumed = Ppo::resume(&path, &config, 7).unwrap();
        assert_eq!(resumed.best(), interrupted.best());
        assert_eq!(bits(&resumed), bits(&interrupted));
        train(&mut resumed, 2, 2);
        assert_eq!(bits(&resumed), bits(&straight));
        assert_eq!(resumed.weights().unwrap(), straight.weights().unwrap());
        assert_eq!(resumed.updates_done(), straight.updates_done());
    }

    #[test]
    fn a_run_saved_before_its_first_update_can_be_resumed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("toy.state");
        Ppo::new(config(), 7).unwrap().save(&path).unwrap();
        let mut resumed = Ppo::resume(&path, &config(), 7).unwrap();
        train(&mut resumed, 1, 1);
        assert_eq!(bits(&resumed), bits(&trained(&config(), 7, 1, 1)));
    }

    #[test]
    fn only_better_weights_become_the_best() {
        let mut ppo = Ppo::new(config(), 7).unwrap();
        assert!(ppo.offer_best(0.5).unwrap());
        assert!(!ppo.offer_best(0.5).unwrap());
        assert!(!ppo.offer_best(f64::NAN).unwrap());
        let first = ppo.weights().unwrap();
        train(&mut ppo, 1, 1);
        let file = ppo.policy_file("toy", ActionSet::ALL, Provenance::default()).unwrap();
        assert_eq!(file.weights, first);
        assert_ne!(ppo.weights().unwrap(), first);
    }
}
