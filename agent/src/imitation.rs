//! Imitation of searched plans: at every pressure point the network learns to take what the teacher's plan takes too.
//!
//! A plan says what is evicted and not in which order. So every candidate that the teacher's plan evicts is right, and
//! the loss is the cross-entropy against all of them together. The student decides more and more by itself, and is taught
//! wherever its own decisions lead it (Ross, Gordon and Bagnell, *A Reduction of Imitation Learning and Structured
//! Prediction to No-Regret Online Learning*, 2011, algorithm 3.1). Where the teacher decides, it takes the right choice
//! that the student likes best (Goldberg and Nivre, *A Dynamic Oracle for Arc-Eager Dependency Parsing*, 2012).
//!
//! Deviations: lessons are not kept beyond their update, for instances are drawn anew in each; the teacher does not search
//! again from where the student went, and a pressure point at which its plan evicts nothing teaches to wait, or nothing where
//! waiting cannot be chosen.

use std::time::Instant;

use burn::tensor::{Device, Tensor};
use plimsoll_env::environment::{Observation, Taught};
use plimsoll_runtime::network::{LOGITS, Normaliser};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use crate::batch::Batch;
use crate::config::{ConfigError, Hyperparameters, require_counts, require_positive, require_shares, require_width};
use crate::learner::{Episodes, Learner, LearnsFrom, TrainError, UpdateReport};
use crate::lessons::{Method, Passes, Student};
use crate::model::Actor;
use crate::rollout::{Sampler, choice, each_instance};
use crate::seeds::{Stream, generator, reset_seed};
use crate::training_state::{Header, Kind};

/// The hyperparameters of imitation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ImitationConfig {
    /// Updates in the whole training run. The learning rate falls linearly over them, to zero after the last.
    pub updates: usize,
    /// Instances (reset seeds) that are taught in one update.
    pub instances_per_update: usize,
    /// Runs of the timeline that the teacher's search takes for one instance.
    pub teacher_evaluations: u64,
    /// Share of the run over which the student is guided: from always at its beginning, falling linearly to never.
    pub guided_share: f64,
    /// Width of both hidden layers.
    pub hidden: usize,
    /// Updates over which the mean and the spread of the features are measured. After them both are frozen.
    pub normaliser_updates: usize,
    /// Adam's step size at the first update.
    pub learning_rate: f64,
    /// Passes over the lessons of an update.
    pub epochs: usize,
    /// Minibatches that one pass is divided into.
    pub minibatches: usize,
    /// The gradient, as one vector over all parameters, is scaled down to at most this norm.
    pub gradient_norm_max: f64,
}

impl Default for ImitationConfig {
    fn default() -> Self {
        ImitationConfig {
            updates: 250,
            instances_per_update: 16,
            teacher_evaluations: 2000,
            guided_share: 0.5,
            hidden: 32,
            normaliser_updates: 3,
            learning_rate: 5e-3,
            epochs: 3,
            minibatches: 8,
            gradient_norm_max: 1.0,
        }
    }
}

impl Method for ImitationConfig {
    type Lesson = Lesson;

    const KIND: Kind = Kind::Imitation;

    fn passes(&self) -> Passes {
        let &Self {
            updates, hidden, normaliser_updates, learning_rate, epochs, minibatches, gradient_norm_max, ..
        } = self;
        Passes { updates, hidden, normaliser_updates, learning_rate, epochs, minibatches, gradient_norm_max }
    }

    fn observation(lesson: &Lesson) -> &Observation {
        &lesson.observation
    }

    fn loss(actor: &Actor, lessons: &[&Lesson], normaliser: &Normaliser, device: &Device) -> Tensor<1> {
        cross_entropy(actor, lessons, normaliser, device)
    }
}

impl Hyperparameters for ImitationConfig {
    const TABLE: &'static str = "imitation";

    fn updates_mut(&mut self) -> &mut usize {
        &mut self.updates
    }

    fn validate(&self) -> Result<(), ConfigError> {
        require_counts(&[
            ("updates", self.updates),
            ("instances_per_update", self.instances_per_update),
            ("epochs", self.epochs),
            ("minibatches", self.minibatches),
        ])?;
        require_width("hidden", self.hidden)?;
        require_positive(&[("learning_rate", self.learning_rate), ("gradient_norm_max", self.gradient_norm_max)])?;
        require_shares(&[("guided_share", self.guided_share)])
    }
}

impl ImitationConfig {
    /// How likely the teacher decides at a pressure point of an update, counted from 0.
    fn guidance_at(&self, update: usize) -> f64 {
        let guided = self.guided_share * self.updates as f64;
        if guided > 0.0 { (1.0 - update as f64 / guided).max(0.0) } else { 0.0 }
    }
}

/// Learns one policy by imitation.
pub type Imitation = Student<ImitationConfig>;

/// A pressure point at which the teacher knows something.
pub struct Lesson {
    observation: Observation,
    /// Indices among the logits of the observation: the right choices, at least one and not all.
    right: Vec<usize>,
}

/// One instance, studied.
struct Studied {
    lessons: Vec<Lesson>,
    transitions: usize,
    /// Pressure points at which some choice was right and some was not, and those at which the student would have made one.
    taught: usize,
    known: usize,
    total_reward: f64,
}

/// The mean over lessons of −ln of the probability that some right choice is made, `[1]`.
fn cross_entropy(actor: &Actor, lessons: &[&Lesson], normaliser: &Normaliser, device: &Device) -> Tensor<1> {
    let observations: Vec<&Observation> = lessons.iter().map(|lesson| &lesson.observation).collect();
    let batch = Batch::new(&observations, normaliser, device);
    let logits = batch.mask(actor.logits(batch.features.clone()));
    let right: Vec<&[usize]> = lessons.iter().map(|lesson| lesson.right.as_slice()).collect();
    let wrong = batch.forbid_all_but(&right, device);
    // The share of the right choices in the softmax over all: the difference of two logarithms of sums.
    (log_sum_exp(logits.clone()) - log_sum_exp(logits + wrong)).mean()
}

/// `[rows, columns]` to `[rows]`.
fn log_sum_exp(logits: Tensor<2>) -> Tensor<1> {
    let [rows, _] = logits.dims();
    let largest = logits.clone().max_dim(1).detach();
    (largest.clone() + (logits - largest).exp().sum_dim(1).log()).reshape([rows])
}

/// Plays one instance, the teacher deciding as likely as `guidance` says.
fn study<E: Taught>(
    environment: &mut E,
    reset: u64,
    sampler: &mut Sampler,
    guidance: f64,
    rng: &mut ChaCha8Rng,
) -> Result<Studied, E::Error> {
    let mut observation = environment.reset(reset)?;
    let mut studied = Studied { lessons: Vec::new(), transitions: 0, taught: 0, known: 0, total_reward: 0.0 };
    loop {
        let lesson = environment.lesson();
        let is_right = |chosen: usize| lesson[chosen / LOGITS][chosen % LOGITS];
        let (liked, right) = sampler.best_of(&observation, is_right);
        let guided = rng.random_bool(guidance);
        let taken = right.filter(|_| guided).unwrap_or(liked);
        let result = environment.step(choice(taken))?;
        studied.transitions += 1;
        studied.total_reward += f64::from(result.reward);
        let right: Vec<usize> = (0..LOGITS * observation.candidates()).filter(|&chosen| is_right(chosen)).collect();
        if (1..sampler.legal().len()).contains(&right.len()) {
            studied.taught += 1;
            studied.known += usize::from(is_right(liked));
            studied.lessons.push(Lesson { observation, right });
        }
        if result.terminated || result.truncated {
            return Ok(studied);
        }
        observation = result.observation;
    }
}

impl<E> LearnsFrom<E> for Imitation
where
    E: Taught + Send,
    E::Error: Send,
{
    fn update(&mut self, environments: &mut [E]) -> Result<UpdateReport, TrainError<E::Error>> {
        let started = Instant::now();
        let weights = self.weights()?;
        let Header { config, seed, progress, .. } = &self.header;
        let (update, seed, guidance) = (progress.updates, *seed, config.guidance_at(progress.updates));
        let studied = each_instance(
            environments,
            config.instances_per_update,
            || Sampler::new(&weights),
            |environment, sampler, instance| {
                let mut rng = generator(seed, Stream::Choices, update, instance);
                study(environment, reset_seed(seed, update, instance), sampler, guidance, &mut rng)
            },
        )
        .map_err(TrainError::Environment)?;
        let (mut lessons, mut episodes) = (Vec::new(), Episodes::default());
        let [mut taught, mut known] = [0; 2];
        for of_instance in studied {
            episodes.add(of_instance.transitions, of_instance.total_reward);
            taught += of_instance.taught;
            known += of_instance.known;
            lessons.extend(of_instance.lessons);
        }
        let details = vec![
            ("agreement", known as f64 / taught.max(1) as f64),
            ("taught_share", taught as f64 / episodes.transitions as f64),
            ("guidance", guidance),
        ];
        self.learn::<E>(started, &lessons, &episodes, details)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rollout::greedy_return;
    use crate::toy::Toy;

    fn config() -> ImitationConfig {
        ImitationConfig { updates: 30, hidden: 16, learning_rate: 1e-2, ..ImitationConfig::default() }
    }

    fn trained(seed: u64, updates: usize, environments: usize) -> Imitation {
        let mut imitation = Imitation::new(config(), seed).unwrap();
        train(&mut imitation, updates, environments);
        imitation
    }

    fn train(imitation: &mut Imitation, updates: usize, environments: usize) {
        let mut toys: Vec<Toy> = (0..environments).map(|_| Toy::new()).collect();
        for _ in 0..updates {
            imitation.update(&mut toys).unwrap();
        }
    }

    /// The toy's teacher shows the two best choices of every pressure point. Random play earns about 0.
    #[test]
    fn it_learns_what_the_teacher_does() {
        let imitation = trained(1, 30, 2);
        let seeds: Vec<u64> = (1_000_000..1_000_200).collect();
        let weights = imitation.weights().unwrap();
        let greedy = greedy_return(&weights, &mut [Toy::new(), Toy::new()], &seeds).unwrap();
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
        let mut resumed = Imitation::resume(&path, &config(), 7).unwrap();
        assert_eq!(resumed.header, interrupted.header);
        train(&mut resumed, 3, 2);
        assert_eq!(resumed.weights().unwrap(), straight.weights().unwrap());
    }

    #[test]
    fn the_loss_is_the_share_of_the_right_choices() {
        let device = Device::flex();
        let logits: Tensor<2> = Tensor::from_data([[1.0f32, 2.0, 3.0, -1e9], [0.0, 50.0, 100.0, 100.0]], &device);
        let sums: Vec<f32> = log_sum_exp(logits).into_data().try_into_vec().unwrap();
        let expected = [(1f32.exp() + 2f32.exp() + 3f32.exp()).ln(), 100.0 + 2f32.ln()];
        assert!(sums.iter().zip(expected).all(|(sum, expected)| (sum - expected).abs() < 1e-4), "{sums:?}");
    }

    #[test]
    fn guidance_ends_where_the_configuration_says() {
        let config = ImitationConfig { updates: 8, guided_share: 0.5, ..ImitationConfig::default() };
        let guidance: Vec<f64> = (0..6).map(|update| config.guidance_at(update)).collect();
        assert_eq!(guidance, [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);
    }
}
