//! Evolution strategies: the same network as the actor's, improved without a gradient of its own.
//!
//! Every update draws antithetic perturbations of the parameters, lets each of them plan the same instances greedily,
//! and steps towards those that planned better (Salimans et al., *Evolution Strategies as a Scalable Alternative to
//! Reinforcement Learning*, 2017, algorithm 1, with section 2.1's mirrored sampling and rank shaping). What is judged is
//! the greedy plan, which is what production runs; there is no exploration to be sampled and no credit to be assigned.
//!
//! Deviations: returns are standardised per instance before they are ranked, since instances differ in difficulty; the
//! step is Adam's.

use std::path::Path;
use std::time::Instant;

use burn::tensor::Device;
use plimsoll_env::environment::Environment;
use plimsoll_runtime::network::{Dense, LOGITS, NetworkWeights, WeightsError};
use plimsoll_runtime::observation::FEATURES;
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::config::{
    ConfigError, Hyperparameters, annealed, require_counts, require_not_negative, require_positive, require_width,
};
use crate::export::network_weights;
use crate::learner::{Episodes, Learner, LearnsFrom, Progress, StartError, TrainError, UpdateReport};
use crate::model::Actor;
use crate::rollout::{Sampler, each_instance, play_greedily};
use crate::seeds::{Stream, generator, reset_seed};
use crate::spread::FeatureSpread;
use crate::training_state::{self, Kind, SavedStateError};

/// Decay of Adam's first and second moments, and what keeps it from dividing by zero (Kingma and Ba, 2015).
const ADAM: (f64, f64, f64) = (0.9, 0.999, 1e-8);

/// Evolution strategies, in the names of the paper.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EvolutionConfig {
    /// Updates in the whole training run. The learning rate is annealed over them.
    pub updates: usize,
    /// Pairs of mirrored perturbations per update.
    pub pairs: usize,
    /// Instances (reset seeds) that every perturbation plans.
    pub instances_per_update: usize,
    /// Width of both hidden layers.
    pub hidden: usize,
    /// Updates over which the mean and the spread of the features are measured. After them both are frozen.
    pub normaliser_updates: usize,
    /// Standard deviation of a perturbation.
    pub deviation: f64,
    /// Adam's step size at the first update; it falls linearly, to zero after the last.
    pub learning_rate: f64,
    /// An update takes this times its learning rate of every parameter away.
    pub weight_decay: f64,
}

impl Default for EvolutionConfig {
    fn default() -> Self {
        EvolutionConfig {
            updates: 150,
            pairs: 12,
            instances_per_update: 8,
            hidden: 32,
            normaliser_updates: 3,
            deviation: 0.1,
            learning_rate: 0.1,
            weight_decay: 0.01,
        }
    }
}

impl Hyperparameters for EvolutionConfig {
    const TABLE: &'static str = "evolution";

    fn updates_mut(&mut self) -> &mut usize {
        &mut self.updates
    }

    fn validate(&self) -> Result<(), ConfigError> {
        require_counts(&[
            ("updates", self.updates),
            ("pairs", self.pairs),
            ("instances_per_update", self.instances_per_update),
        ])?;
        require_width("hidden", self.hidden)?;
        require_positive(&[("deviation", self.deviation), ("learning_rate", self.learning_rate)])?;
        require_not_negative(&[("weight_decay", self.weight_decay)])
    }
}

impl EvolutionConfig {
    fn learning_rate_at(&self, update: usize) -> f64 {
        annealed(self.learning_rate, update, self.updates)
    }
}

/// Learns one policy by evolution strategies.
pub struct Evolution {
    config: EvolutionConfig,
    seed: u64,
    course: Course,
}

/// All that changes while it learns.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Course {
    progress: Progress,
    /// Weights and biases of all layers, one after another.
    parameters: Vec<f32>,
    first_moment: Vec<f64>,
    second_moment: Vec<f64>,
    spread: FeatureSpread,
}

/// A saved run, with what it was begun with.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Saved {
    config: EvolutionConfig,
    seed: u64,
    course: Course,
}

/// One instance, planned by one perturbed network.
#[derive(Clone, Copy, Debug, Default)]
struct Played {
    total_reward: f64,
    transitions: usize,
}

/// What was played: `[instance][member]`.
type Games = Vec<Vec<Played>>;

impl Evolution {
    /// Begins a training run, with the first weights that proximal policy optimisation of the same seed would have.
    pub fn new(config: EvolutionConfig, seed: u64) -> Result<Self, ConfigError> {
        config.validate()?;
        let actor = Actor::new(config.hidden, &mut generator(seed, Stream::Weights, 0, 0), &Device::flex());
        let spread = FeatureSpread::new();
        let weights = network_weights(&actor, spread.normaliser()).expect("drawn weights are finite");
        let parameters = parameters(&weights);
        let (first_moment, second_moment) = (vec![0.0; parameters.len()], vec![0.0; parameters.len()]);
        let course = Course { progress: Progress::default(), parameters, first_moment, second_moment, spread };
        Ok(Evolution { config, seed, course })
    }

    /// Continues a saved training run, which must have been begun with the same hyperparameters and seed.
    pub fn resume(path: impl AsRef<Path>, config: &EvolutionConfig, seed: u64) -> Result<Self, SavedStateError> {
        let path = path.as_ref();
        let [body] = training_state::read_parts(path, Kind::Evolution)?;
        let saved: Saved = serde_json::from_slice(&body)
            .map_err(|error| SavedStateError::unusable(path, format!("malformed training state: {error}")))?;
        training_state::require_same(path, (&saved.config, saved.seed), (config, seed))?;
        Ok(Evolution { config: saved.config, seed, course: saved.course })
    }

    /// The network that `parameters` make.
    fn network(&self, parameters: &[f32]) -> Result<NetworkWeights, WeightsError> {
        let (hidden, mut rest) = (self.config.hidden, parameters);
        let mut take = |count: usize| {
            let taken;
            (taken, rest) = rest.split_at(count);
            taken.to_vec()
        };
        let sizes = [(FEATURES, hidden), (hidden, hidden), (hidden, LOGITS)];
        let layers = sizes.map(|(inputs, outputs)| Dense { weights: take(inputs * outputs), bias: take(outputs) });
        NetworkWeights::new(self.course.spread.normaliser(), layers)
    }

    /// The direction of perturbation pair `index` of the coming update.
    fn direction(&self, index: usize) -> Vec<f32> {
        let mut random = generator(self.seed, Stream::Perturbation, self.course.progress.updates, index);
        StandardNormal.sample_iter(&mut random).take(self.course.parameters.len()).collect()
    }

    /// Lets every member of the population plan every instance.
    fn play<E>(&self, members: &[NetworkWeights], environments: &mut [E]) -> Result<Games, E::Error>
    where
        E: Environment + Send,
        E::Error: Send,
    {
        each_instance(
            environments,
            self.config.instances_per_update,
            || members.iter().map(Sampler::new).collect::<Vec<_>>(),
            |environment, samplers, instance| {
                let reset = reset_seed(self.seed, self.course.progress.updates, instance);
                let played = samplers.iter_mut().map(|sampler| {
                    let mut played = Played::default();
                    played.total_reward = play_greedily(environment, reset, sampler, |_| played.transitions += 1)?;
                    Ok(played)
                });
                played.collect()
            },
        )
    }

    /// Takes the features that the present network meets into the normaliser.
    fn absorb<E: Environment>(&mut self, environments: &mut [E]) -> Result<(), TrainError<E::Error>> {
        let mut sampler = Sampler::new(&self.network(&self.course.parameters)?);
        for instance in 0..self.config.instances_per_update {
            let environment = &mut environments[instance % environments.len()];
            let reset = reset_seed(self.seed, self.course.progress.updates, instance);
            let spread = &mut self.course.spread;
            play_greedily(environment, reset, &mut sampler, |observation| spread.absorb(&observation.features))
                .map_err(TrainError::Environment)?;
        }
        Ok(())
    }

    /// Draws a population, lets it play, and steps. Returns what was played and the norm of the gradient's estimate.
    fn improve<E>(&mut self, environments: &mut [E]) -> Result<(Games, f64), TrainError<E::Error>>
    where
        E: Environment + Send,
        E::Error: Send,
    {
        if self.course.progress.updates < self.config.normaliser_updates && !self.course.spread.is_given() {
            self.absorb(environments)?;
        }
        let directions: Vec<Vec<f32>> =
            (0..self.config.pairs).into_par_iter().map(|index| self.direction(index)).collect();
        let perturbed = |direction: &Vec<f32>, side: f64| {
            let by = (side * self.config.deviation) as f32;
            let parameters = self.course.parameters.iter().zip(direction).map(|(at, along)| at + by * along);
            self.network(&parameters.collect::<Vec<f32>>())
        };
        let mirrored = directions.iter().flat_map(|direction| [perturbed(direction, 1.0), perturbed(direction, -1.0)]);
        let members = mirrored.collect::<Result<Vec<_>, WeightsError>>()?;
        let played = self.play(&members, environments).map_err(TrainError::Environment)?;

        let mut ascent = vec![0.0; self.course.parameters.len()];
        for (direction, sides) in directions.iter().zip(utilities(&played).as_chunks::<2>().0) {
            let better = (sides[0] - sides[1]) / (members.len() as f64 * self.config.deviation);
            ascent.iter_mut().zip(direction).for_each(|(slope, &along)| *slope += better * f64::from(along));
        }
        let gradient_norm = self.step(&ascent);
        self.network(&self.course.parameters)?;
        Ok((played, gradient_norm))
    }

    /// One step of Adam along `ascent`. Returns the norm of `ascent`.
    fn step(&mut self, ascent: &[f64]) -> f64 {
        let (decay_first, decay_second, tiny) = ADAM;
        let rate = self.config.learning_rate_at(self.course.progress.updates);
        let shrink = 1.0 - rate * self.config.weight_decay;
        let steps = (self.course.progress.updates + 1) as i32;
        let (correct_first, correct_second) = (1.0 - decay_first.powi(steps), 1.0 - decay_second.powi(steps));
        let Course { parameters, first_moment, second_moment, .. } = &mut self.course;
        for (((parameter, first), second), &slope) in
            parameters.iter_mut().zip(first_moment).zip(second_moment).zip(ascent)
        {
            *first = decay_first * *first + (1.0 - decay_first) * slope;
            *second = decay_second * *second + (1.0 - decay_second) * slope * slope;
            let step = rate * (*first / correct_first) / ((*second / correct_second).sqrt() + tiny);
            *parameter = (f64::from(*parameter) * shrink + step) as f32;
        }
        ascent.iter().map(|slope| slope * slope).sum::<f64>().sqrt()
    }
}

impl<E> LearnsFrom<E> for Evolution
where
    E: Environment + Send,
    E::Error: Send,
{
    fn update(&mut self, environments: &mut [E]) -> Result<UpdateReport, TrainError<E::Error>> {
        let started = Instant::now();
        let before = self.course.clone();
        let (played, gradient_norm) = self.improve(environments).inspect_err(|_| self.course = before)?;
        let mut episodes = Episodes::default();
        played.iter().flatten().for_each(|played| episodes.add(played.transitions, played.total_reward));
        let learning_rate = self.config.learning_rate_at(self.course.progress.updates);
        let details = vec![("gradient_norm", gradient_norm), ("learning_rate", learning_rate)];
        Ok(self.course.progress.count(started, &episodes, details))
    }
}

impl Learner for Evolution {
    fn hyperparameters(&self) -> serde_json::Value {
        serde_json::to_value(&self.config).expect("a flat table of numbers")
    }

    fn updates(&self) -> usize {
        self.config.updates
    }

    fn progress(&self) -> &Progress {
        &self.course.progress
    }

    fn progress_mut(&mut self) -> &mut Progress {
        &mut self.course.progress
    }

    fn weights(&self) -> Result<NetworkWeights, WeightsError> {
        self.network(&self.course.parameters)
    }

    fn start_from(&mut self, weights: &NetworkWeights) -> Result<(), StartError> {
        Actor::of(weights, self.config.hidden, &Device::flex())?;
        self.course.parameters = parameters(weights);
        self.course.spread = FeatureSpread::given(weights.normaliser().clone());
        Ok(())
    }

    fn hide(&mut self, columns: &[usize]) {
        self.course.spread.hide(columns);
    }

    fn save(&self, path: &Path) -> Result<(), SavedStateError> {
        let saved = serde_json::json!({ "config": self.config, "seed": self.seed, "course": self.course });
        let body = serde_json::to_vec(&saved).map_err(|error| SavedStateError::unusable(path, error))?;
        training_state::write_parts(path, Kind::Evolution, [&body])
    }
}

/// Weights and biases of all layers, one after another.
fn parameters(weights: &NetworkWeights) -> Vec<f32> {
    weights.layers().iter().flat_map(|layer| layer.weights.iter().chain(&layer.bias)).copied().collect()
}

/// What each member's plans are worth: its mean standardised return over the instances, as a rank in −0.5 to 0.5.
fn utilities(played: &[Vec<Played>]) -> Vec<f64> {
    let members = played[0].len();
    let mut fitness = vec![0.0; members];
    for instance in played {
        let returns = instance.iter().map(|played| played.total_reward);
        let mean = returns.clone().sum::<f64>() / members as f64;
        let deviation = (returns.clone().map(|value| (value - mean).powi(2)).sum::<f64>() / members as f64).sqrt();
        if deviation > 1e-9 {
            fitness.iter_mut().zip(returns).for_each(|(fitness, value)| *fitness += (value - mean) / deviation);
        }
    }
    let mut order: Vec<usize> = (0..members).collect();
    order.sort_by(|&left, &right| fitness[left].total_cmp(&fitness[right]));
    let mut utilities = vec![0.0; members];
    let mut rank = 0;
    // Equals share the mean of their ranks.
    for equals in order.chunk_by(|&left, &right| fitness[left] == fitness[right]) {
        let shared = rank as f64 + (equals.len() - 1) as f64 / 2.0;
        equals.iter().for_each(|&member| utilities[member] = shared / (members - 1) as f64 - 0.5);
        rank += equals.len();
    }
    utilities
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rollout::greedy_return;
    use crate::toy::Toy;

    fn config() -> EvolutionConfig {
        EvolutionConfig { updates: 100, hidden: 8, ..EvolutionConfig::default() }
    }

    fn trained(seed: u64, updates: usize, environments: usize) -> Evolution {
        let mut evolution = Evolution::new(config(), seed).unwrap();
        train(&mut evolution, updates, environments);
        evolution
    }

    fn train(evolution: &mut Evolution, updates: usize, environments: usize) {
        let mut toys: Vec<Toy> = (0..environments).map(|_| Toy::new()).collect();
        for _ in 0..updates {
            evolution.update(&mut toys).unwrap();
        }
    }

    /// Random play earns about 0; the trained policy must come within a quarter of perfect play.
    #[test]
    fn it_learns_what_a_choice_is_worth() {
        let evolution = trained(1, 100, 2);
        let seeds: Vec<u64> = (1_000_000..1_000_200).collect();
        let weights = evolution.network(&evolution.course.parameters).unwrap();
        let greedy = greedy_return(&weights, &mut [Toy::new(), Toy::new()], &seeds).unwrap();
        let perfect = seeds.iter().map(|&seed| f64::from(Toy::new().play_perfectly(seed))).sum::<f64>() / 200.0;
        assert!(greedy > 0.75 * perfect, "trained: {greedy}, perfect: {perfect}");
    }

    #[test]
    fn the_same_seed_gives_the_same_bits_on_any_number_of_threads() {
        let expected = trained(1, 3, 1).course;
        assert_eq!(trained(1, 3, 5).course, expected);
        assert_ne!(trained(2, 3, 1).course, expected);
    }

    #[test]
    fn a_resumed_run_continues_bit_for_bit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("toy.state");
        let straight = trained(7, 5, 2);
        let mut interrupted = trained(7, 2, 2);
        interrupted.offer_best(0.5).unwrap();
        interrupted.save(&path).unwrap();
        let mut resumed = Evolution::resume(&path, &config(), 7).unwrap();
        assert_eq!(resumed.course, interrupted.course);
        train(&mut resumed, 3, 2);
        resumed.course.progress.best = None;
        assert_eq!(resumed.course, straight.course);

        let refusal =
            |config: &EvolutionConfig, seed| Evolution::resume(&path, config, seed).err().unwrap().to_string();
        assert!(refusal(&config(), 8).ends_with("toy.state: was begun with seed 7, not 8"));
        let other = EvolutionConfig { pairs: 3, ..config() };
        assert!(refusal(&other, 7).ends_with("was begun with pairs = 12, not 3"));
        let error = crate::Ppo::resume(&path, &crate::PpoConfig::default(), 7).err().unwrap().to_string();
        assert!(error.contains("evolution"), "{error}");
    }

    #[test]
    fn utilities_rank_standardised_returns() {
        let played = |returns: &[f64]| -> Vec<Played> {
            returns.iter().map(|&total_reward| Played { total_reward, transitions: 1 }).collect()
        };
        assert_eq!(utilities(&[played(&[3.0, 1.0, 2.0])]), [0.5, -0.5, 0.0]);
        // The second instance's returns differ by more, and count no more for it.
        let both = [played(&[1.0, 0.0, -1.0]), played(&[0.0, 64.0, -64.0])];
        assert_eq!(utilities(&both), [0.25, 0.25, -0.5]);
    }
}
