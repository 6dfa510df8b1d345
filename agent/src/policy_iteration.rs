//! Policy iteration by rollouts: at some pressure points of every episode, other choices than the policy's own are tried
//! and played to the end, and the policy moves towards those that ended better.
//!
//! The predicted environment is exact and can be taken back to any pressure point, so what a choice is worth under the
//! present policy is not estimated but seen (Tesauro and Galperin, *On-line Policy Improvement using Monte-Carlo Search*,
//! 1996; Lagoudakis and Parr, *Reinforcement Learning as Classification*, 2003). Towards what the policy moves is the
//! closed form of a step that gains return and stays near: π(a) · exp(return(a) / temperature), normalised (Abdolmaleki et
//! al., *Maximum a Posteriori Policy Optimisation*, 2018, section 3.2.1).
//!
//! Deviations: the temperature is a hyperparameter; the new policy is kept near the old one by few passes with a small
//! step, not by a bound on their divergence; what is normalised over are the choices tried, not all.

use std::time::Instant;

use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Tensor, TensorData};
use plimsoll_env::environment::{Branching, Observation};
use plimsoll_runtime::network::Normaliser;
use rand::RngExt;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use crate::batch::Batch;
use crate::config::{ConfigError, Hyperparameters, require_counts, require_positive, require_width};
use crate::learner::{Episodes, Learner, LearnsFrom, TrainError, UpdateReport};
use crate::lessons::{Method, Passes, Student};
use crate::model::Actor;
use crate::rollout::{Sampler, choice, each_instance, play_on_greedily};
use crate::seeds::{Stream, generator, reset_seed};
use crate::training_state::{Header, Kind};

/// The hyperparameters of policy iteration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PolicyIterationConfig {
    /// Updates in the whole training run. The learning rate falls linearly over them, to zero after the last.
    pub updates: usize,
    /// Instances (reset seeds) that are played in one update.
    pub instances_per_update: usize,
    /// Pressure points of an episode at which other choices are tried.
    pub branch_points: usize,
    /// Choices that are tried there because the policy likes them best, its own among them.
    pub liked_choices: usize,
    /// Choices that are tried there by chance.
    pub chance_choices: usize,
    /// Return that makes a choice e times as likely.
    pub temperature: f64,
    /// Width of both hidden layers.
    pub hidden: usize,
    /// Updates over which the mean and the spread of the features are measured, unless training starts from a policy. After
    /// them both are frozen.
    pub normaliser_updates: usize,
    /// Adam's step size at the first update.
    pub learning_rate: f64,
    /// Passes over the branch points of an update.
    pub epochs: usize,
    /// Minibatches that one pass is divided into.
    pub minibatches: usize,
    /// The gradient, as one vector over all parameters, is scaled down to at most this norm.
    pub gradient_norm_max: f64,
}

impl Default for PolicyIterationConfig {
    fn default() -> Self {
        PolicyIterationConfig {
            updates: 250,
            instances_per_update: 32,
            branch_points: 12,
            liked_choices: 3,
            chance_choices: 2,
            temperature: 0.15,
            hidden: 32,
            normaliser_updates: 3,
            learning_rate: 3e-3,
            epochs: 2,
            minibatches: 4,
            gradient_norm_max: 1.0,
        }
    }
}

impl Hyperparameters for PolicyIterationConfig {
    const TABLE: &'static str = "policy_iteration";

    fn updates_mut(&mut self) -> &mut usize {
        &mut self.updates
    }

    fn validate(&self) -> Result<(), ConfigError> {
        require_counts(&[
            ("updates", self.updates),
            ("instances_per_update", self.instances_per_update),
            ("branch_points", self.branch_points),
            ("liked_choices", self.liked_choices),
            ("epochs", self.epochs),
            ("minibatches", self.minibatches),
        ])?;
        require_width("hidden", self.hidden)?;
        require_positive(&[
            ("temperature", self.temperature),
            ("learning_rate", self.learning_rate),
            ("gradient_norm_max", self.gradient_norm_max),
        ])
    }
}

impl Method for PolicyIterationConfig {
    type Lesson = Branched;

    const KIND: Kind = Kind::PolicyIteration;

    fn passes(&self) -> Passes {
        let &Self {
            updates, hidden, normaliser_updates, learning_rate, epochs, minibatches, gradient_norm_max, ..
        } = self;
        Passes { updates, hidden, normaliser_updates, learning_rate, epochs, minibatches, gradient_norm_max }
    }

    fn observation(lesson: &Branched) -> &Observation {
        &lesson.observation
    }

    fn loss(actor: &Actor, lessons: &[&Branched], normaliser: &Normaliser, device: &Device) -> Tensor<1> {
        cross_entropy(actor, lessons, normaliser, device)
    }
}

/// Learns one policy by policy iteration.
pub type PolicyIteration = Student<PolicyIterationConfig>;

/// A pressure point at which several choices were tried.
pub struct Branched {
    observation: Observation,
    /// Indices among the logits of the observation, each once.
    tried: Vec<usize>,
    /// How likely the improved policy makes each of them, among them.
    target: Vec<f32>,
    /// What the best of them earns beyond the policy's own.
    gain: f64,
}

/// One instance, played.
struct Played {
    branched: Vec<Branched>,
    transitions: usize,
    total_reward: f64,
}

/// The mean over branch points of −Σ target(a) · ln π(a), π normalised over the choices tried, `[1]`.
fn cross_entropy(actor: &Actor, branched: &[&Branched], normaliser: &Normaliser, device: &Device) -> Tensor<1> {
    let observations: Vec<&Observation> = branched.iter().map(|point| &point.observation).collect();
    let batch = Batch::new(&observations, normaliser, device);
    let logits = batch.mask(actor.logits(batch.features.clone()));
    let tried: Vec<&[usize]> = branched.iter().map(|point| point.tried.as_slice()).collect();
    let log_probabilities = log_softmax(logits + batch.forbid_all_but(&tried, device), 1);
    let [points, columns] = log_probabilities.dims();
    let mut target = vec![0.0f32; points * columns];
    for (row, point) in target.chunks_exact_mut(columns).zip(branched) {
        point.tried.iter().zip(&point.target).for_each(|(&chosen, &share)| row[chosen] = share);
    }
    let target: Tensor<2> = Tensor::from_data(TensorData::new(target, [points, columns]), device);
    -(target * log_probabilities).sum_dim(1).mean()
}

/// The probabilities of the improved policy: those of `logits` times exp(return / temperature), normalised.
fn improved(logits: &[f32], returns: &[f64], temperature: f64) -> Vec<f32> {
    let exponents: Vec<f64> =
        logits.iter().zip(returns).map(|(&logit, earned)| f64::from(logit) + earned / temperature).collect();
    let highest = exponents.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let shares: Vec<f64> = exponents.iter().map(|exponent| (exponent - highest).exp()).collect();
    let total: f64 = shares.iter().sum();
    shares.iter().map(|share| (share / total) as f32).collect()
}

/// Choices to try where these are legal: those of the highest logits, then others by chance. Each with its logit.
fn to_try(legal: &[(usize, f32)], config: &PolicyIterationConfig, rng: &mut ChaCha8Rng) -> Vec<(usize, f32)> {
    let mut order = legal.to_vec();
    // Stable: the first of equals stays first, as in the greedy choice.
    order.sort_by(|left, right| right.1.total_cmp(&left.1));
    let others = order.split_off(config.liked_choices.min(order.len()));
    order.extend(others.sample(rng, config.chance_choices).copied());
    order
}

/// Plays one instance greedily, and tries other choices at some of its pressure points.
fn play<E: Branching>(
    environment: &mut E,
    reset: u64,
    sampler: &mut Sampler,
    config: &PolicyIterationConfig,
    rng: &mut ChaCha8Rng,
) -> Result<Played, E::Error> {
    let mut observation = environment.reset(reset)?;
    let (mut transitions, mut open, mut points) = (0, 0, Vec::new());
    let total_reward = loop {
        transitions += 1;
        let best = sampler.best(&observation);
        // A sample of all pressure points with more than one choice, of unknown number (Vitter's algorithm R).
        if sampler.legal().len() > 1 {
            open += 1;
            let place = rng.random_range(0..open);
            if points.len() < config.branch_points {
                points.push((environment.mark(), observation));
            } else if place < config.branch_points {
                points[place] = (environment.mark(), observation);
            }
        }
        let result = environment.step(choice(best))?;
        if result.terminated || result.truncated {
            break f64::from(result.reward);
        }
        observation = result.observation;
    };
    let mut branched = Vec::with_capacity(points.len());
    for (mark, observation) in points {
        let own = sampler.best(&observation);
        let tried = to_try(sampler.legal(), config, rng);
        let mut returns = Vec::with_capacity(tried.len());
        for &(chosen, _) in &tried {
            // The policy's own choice has been played.
            let earned = if chosen == own { total_reward } else { ending(environment, &mark, chosen, sampler)? };
            returns.push(earned);
        }
        let (tried, logits): (Vec<usize>, Vec<f32>) = tried.into_iter().unzip();
        let gain = returns.iter().copied().fold(f64::NEG_INFINITY, f64::max) - total_reward;
        let target = improved(&logits, &returns, config.temperature);
        branched.push(Branched { observation, tried, target, gain });
    }
    Ok(Played { branched, transitions, total_reward })
}

/// What an episode earns that goes on from `mark` with a choice, and greedily from there.
fn ending<E: Branching>(
    environment: &mut E,
    mark: &E::Mark,
    chosen: usize,
    sampler: &mut Sampler,
) -> Result<f64, E::Error> {
    environment.return_to(mark);
    let result = environment.step(choice(chosen))?;
    play_on_greedily(environment, result, sampler, |_| {})
}

impl<E> LearnsFrom<E> for PolicyIteration
where
    E: Branching + Send,
    E::Error: Send,
{
    fn update(&mut self, environments: &mut [E]) -> Result<UpdateReport, TrainError<E::Error>> {
        let started = Instant::now();
        let weights = self.weights()?;
        let Header { config, seed, progress, .. } = &self.header;
        let (update, seed) = (progress.updates, *seed);
        let played = each_instance(
            environments,
            config.instances_per_update,
            || Sampler::new(&weights),
            |environment, sampler, instance| {
                let mut rng = generator(seed, Stream::Choices, update, instance);
                play(environment, reset_seed(seed, update, instance), sampler, config, &mut rng)
            },
        )
        .map_err(TrainError::Environment)?;
        let (mut branched, mut episodes) = (Vec::new(), Episodes::default());
        for of_instance in played {
            episodes.add(of_instance.transitions, of_instance.total_reward);
            branched.extend(of_instance.branched);
        }
        let gain = branched.iter().map(|point| point.gain).sum::<f64>() / branched.len().max(1) as f64;
        self.learn::<E>(started, &branched, &episodes, vec![("gain_of_best_choice", gain)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rollout::greedy_return;
    use crate::toy::Toy;

    fn config() -> PolicyIterationConfig {
        PolicyIterationConfig { updates: 30, hidden: 16, learning_rate: 1e-2, ..PolicyIterationConfig::default() }
    }

    fn trained(seed: u64, updates: usize, environments: usize) -> PolicyIteration {
        let mut learner = PolicyIteration::new(config(), seed).unwrap();
        train(&mut learner, updates, environments);
        learner
    }

    fn train(learner: &mut PolicyIteration, updates: usize, environments: usize) {
        let mut toys: Vec<Toy> = (0..environments).map(|_| Toy::new()).collect();
        for _ in 0..updates {
            learner.update(&mut toys).unwrap();
        }
    }

    /// Random play earns about 0.
    #[test]
    fn it_learns_what_choices_are_worth() {
        let learner = trained(1, 30, 2);
        let seeds: Vec<u64> = (1_000_000..1_000_200).collect();
        let greedy = greedy_return(&learner.weights().unwrap(), &mut [Toy::new(), Toy::new()], &seeds).unwrap();
        let perfect = seeds.iter().map(|&seed| f64::from(Toy::new().play_perfectly(seed))).sum::<f64>() / 200.0;
        assert!(greedy > 0.75 * perfect, "trained: {greedy}, perfect: {perfect}");
    }

    #[test]
    fn the_same_seed_gives_the_same_weights_on_any_number_of_threads() {
        let expected = trained(1, 3, 1).weights().unwrap();
        assert_eq!(trained(1, 3, 5).weights().unwrap(), expected);
        assert_ne!(trained(2, 3, 1).weights().unwrap(), expected);
    }

    #[test]
    fn a_resumed_run_continues_bit_for_bit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("toy.state");
        let straight = trained(7, 5, 2);
        let mut interrupted = trained(7, 2, 2);
        interrupted.offer_best(0.5).unwrap();
        interrupted.save(&path).unwrap();
        let mut resumed = PolicyIteration::resume(&path, &config(), 7).unwrap();
        assert_eq!(resumed.header, interrupted.header);
        train(&mut resumed, 3, 2);
        assert_eq!(resumed.weights().unwrap(), straight.weights().unwrap());
        assert_eq!(resumed.steady_weights().unwrap(), straight.steady_weights().unwrap());
        assert_ne!(resumed.steady_weights().unwrap(), resumed.weights().unwrap());
    }

    #[test]
    fn the_improved_policy_gains_return_and_stays_near() {
        let logits = [1.0, 1.0, 0.0];
        let unmoved = improved(&logits, &[0.3; 3], 0.1);
        assert!((unmoved[0] / unmoved[2] - 1f32.exp()).abs() < 1e-5, "what earns the same is as likely as before");
        let moved = improved(&logits, &[0.0, 0.1, 0.2], 0.1);
        assert!((moved[1] / moved[0] - 1f32.exp()).abs() < 1e-5, "a temperature's return makes e times as likely");
        assert!((moved.iter().sum::<f32>() - 1.0).abs() < 1e-6);
        let far = improved(&[0.0, -80.0], &[-3.0, 1.0], 1e-3);
        assert_eq!(far, [0.0, 1.0]);
    }

    #[test]
    fn the_liked_are_tried_and_others_by_chance() {
        let legal: Vec<(usize, f32)> = (0..20).map(|index| (index, index as f32)).collect();
        let config = PolicyIterationConfig { liked_choices: 3, chance_choices: 4, ..config() };
        let tried = to_try(&legal, &config, &mut generator(1, Stream::Choices, 0, 0));
        assert_eq!(tried.len(), 7);
        assert_eq!(tried[..3], [(19, 19.0), (18, 18.0), (17, 17.0)]);
        assert!(tried[3..].iter().all(|(chosen, _)| *chosen < 17));
        assert_eq!(to_try(&legal[..2], &config, &mut generator(1, Stream::Choices, 0, 0)).len(), 2);
    }
}
