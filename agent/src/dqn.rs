//! Deep Q-learning with the state and the reward of Zhou et al., *DeepTM: Efficient Tensor Management in Heterogeneous
//! Memory for DNN Training* (IEEE TPDS 2024): what the others are compared with, not what to use.
//!
//! DeepTM's state is `[p_t, H_t, DRAM left, PM left]` of the tensor at hand, its actions are the two places, and its reward
//! is the tensor's share of all bytes less its normalised cost, with a bonus from the total at the end and a large penalty
//! for running out of memory. The network is the policy network of all learners, and sees of the feature table the
//! columns of [`STATE`] alone; learning is by Mnih et al., *Human-level Control through Deep Reinforcement Learning*
//! (2015), algorithm 1.
//!
//! Deviations: DeepTM asks of every tensor where to put it; here something has to leave at a pressure point, so an action
//! is what leaves, and how. Heat `H_t` is not one number with adapted weights: the network sees what it is made of,
//! without the frequency, which features do not tell. What is left of the slow tier is the time its channels have left.

use std::collections::VecDeque;
use std::path::Path;
use std::time::Instant;

use burn::module::Module;
use burn::optim::{AdamConfig, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor, TensorData};
use plimsoll_env::environment::{Environment, Observation};
use plimsoll_runtime::network::{LOGITS, NetworkWeights, Normaliser, WeightsError};
use plimsoll_runtime::observation::{FEATURE_TABLE, FEATURES};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::batch::Batch;
use crate::config::{
    ConfigError, Hyperparameters, annealed, require_counts, require_positive, require_shares, require_width,
};
use crate::export::network_weights;
use crate::gradients::{Diverged, SHARD_TRANSITIONS, clip_norm, of_shards};
use crate::learner::{Episodes, Learner, LearnsFrom, Progress, StartError, TrainError, UpdateReport};
use crate::model::Actor;
use crate::rollout::{Sampler, choice, each_instance};
use crate::seeds::{Stream, generator, reset_seed};
use crate::training_state::{self, Header, Kind, SavedStateError};

/// The columns of the feature table that stand for DeepTM's state: bytes (p_t); reuse distance, lifetime and age (of
/// which H_t is made); what is missing of the fast tier; what is taken of the channels to the slow tier.
pub const STATE: [&str; 7] =
    ["log_size_to_deficit", "time_to_use", "log_gap", "staleness", "severity", "offload_backlog", "prefetch_backlog"];

/// The hyperparameters of deep Q-learning.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DqnConfig {
    /// Updates in the whole training run. The learning rate falls linearly over them, to zero after the last.
    pub updates: usize,
    /// Episodes rolled out for one update, each of another instance.
    pub instances_per_update: usize,
    /// Width of both hidden layers.
    pub hidden: usize,
    /// Updates over which the mean and the spread of the features are measured. After them both are frozen.
    pub normaliser_updates: usize,
    /// Adam's step size at the first update.
    pub learning_rate: f64,
    /// Discount γ per step.
    pub discount: f32,
    /// Share of the run over which exploration falls, from always choosing at random to `exploration_min`.
    pub exploring_share: f64,
    /// Least probability of a random choice.
    pub exploration_min: f64,
    /// Transitions that are remembered; the oldest episodes go first.
    pub memory: usize,
    /// Gradient steps in an update.
    pub steps_per_update: usize,
    /// Transitions drawn for each of them.
    pub minibatch: usize,
    /// Updates after which the target network becomes the present one.
    pub target_interval: usize,
    /// The gradient, as one vector over all parameters, is scaled down to at most this norm.
    pub gradient_norm_max: f64,
}

impl Default for DqnConfig {
    fn default() -> Self {
        DqnConfig {
            updates: 150,
            instances_per_update: 8,
            hidden: 32,
            normaliser_updates: 3,
            learning_rate: 1e-3,
            discount: 0.99,
            exploring_share: 0.5,
            exploration_min: 0.05,
            memory: 4000,
            steps_per_update: 16,
            minibatch: 64,
            target_interval: 5,
            gradient_norm_max: 10.0,
        }
    }
}

impl Hyperparameters for DqnConfig {
    const TABLE: &'static str = "dqn";

    fn updates_mut(&mut self) -> &mut usize {
        &mut self.updates
    }

    fn validate(&self) -> Result<(), ConfigError> {
        require_counts(&[
            ("updates", self.updates),
            ("instances_per_update", self.instances_per_update),
            ("memory", self.memory),
            ("steps_per_update", self.steps_per_update),
            ("minibatch", self.minibatch),
            ("target_interval", self.target_interval),
        ])?;
        require_width("hidden", self.hidden)?;
        require_positive(&[("learning_rate", self.learning_rate), ("gradient_norm_max", self.gradient_norm_max)])?;
        require_shares(&[
            ("discount", self.discount.into()),
            ("exploring_share", self.exploring_share),
            ("exploration_min", self.exploration_min),
        ])
    }
}

impl DqnConfig {
    fn learning_rate_at(&self, update: usize) -> f64 {
        annealed(self.learning_rate, update, self.updates)
    }

    /// The probability of a random choice in an update, counted from 0.
    fn exploration_at(&self, update: usize) -> f64 {
        let exploring = self.exploring_share * self.updates as f64;
        let left = if exploring > 0.0 { (1.0 - update as f64 / exploring).max(0.0) } else { 0.0 };
        self.exploration_min + (1.0 - self.exploration_min) * left
    }
}

/// The columns of [`STATE`] in the feature table.
fn columns() -> [usize; STATE.len()] {
    STATE.map(column)
}

fn column(name: &str) -> usize {
    let found = FEATURE_TABLE.iter().position(|feature| feature.name == name);
    found.expect("every column that is named here is in the feature table")
}

/// One remembered step.
#[derive(Clone, Debug, PartialEq)]
struct Step {
    /// `[candidates, STATE]`.
    state: Vec<f32>,
    action_mask: Vec<[bool; 2]>,
    chosen: usize,
    reward: f32,
}

impl Step {
    fn new(observation: &Observation, chosen: usize, reward: f32) -> Self {
        let rows = observation.features.chunks_exact(FEATURES);
        let state = rows.flat_map(|row| columns().map(|column| row[column])).collect();
        Step { state, action_mask: observation.action_mask.clone(), chosen, reward }
    }

    /// What it was taken from, zeros standing in the columns that are no part of the state.
    fn observation(&self) -> Observation {
        let mut features = vec![0.0; self.action_mask.len() * FEATURES];
        for (row, state) in features.chunks_exact_mut(FEATURES).zip(self.state.chunks_exact(STATE.len())) {
            columns().into_iter().zip(state).for_each(|(column, &value)| row[column] = value);
        }
        Observation { features, action_mask: self.action_mask.clone() }
    }
}

/// DeepTM's reward of one step: the share of the candidates' bytes that leaves, less the time that it is estimated to
/// cost as a share of the makespan. Both are read off the features. Waiting, which DeepTM does not know, earns nothing.
fn step_reward(observation: &Observation, chosen: usize) -> f32 {
    let row = &observation.features[chosen / LOGITS * FEATURES..][..FEATURES];
    if row[column("is_wait")] == 1.0 {
        return 0.0;
    }
    let price = if chosen.is_multiple_of(LOGITS) { "swap_price" } else { "recompute_price" };
    let share_of_bytes = row[column("log_size_to_deficit")].exp() * row[column("severity")];
    // The price is per deficit covered, and compressed.
    let cost = row[column(price)].exp_m1() / 1000.0 * row[column("share_of_deficit")];
    share_of_bytes - cost.min(1.0)
}

/// The episodes that are remembered, oldest first.
#[derive(Clone, Debug, Default, PartialEq)]
struct Memory {
    episodes: VecDeque<Vec<Step>>,
}

impl Memory {
    fn steps(&self) -> usize {
        self.episodes.iter().map(Vec::len).sum()
    }

    /// Adds an episode, and forgets the oldest ones beyond `steps`, but never the last.
    fn add(&mut self, episode: Vec<Step>, steps: usize) {
        self.episodes.push_back(episode);
        let mut remembered = self.steps();
        while remembered > steps && self.episodes.len() > 1 {
            remembered -= self.episodes.pop_front().map_or(0, |episode| episode.len());
        }
    }

    /// A step drawn from all, each as likely as the others, with the one after it.
    fn draw(&self, rng: &mut ChaCha8Rng) -> (&Step, Option<&Step>) {
        let mut index = rng.random_range(0..self.steps());
        for episode in &self.episodes {
            if let Some(step) = episode.get(index) {
                return (step, episode.get(index + 1));
            }
            index -= episode.len();
        }
        unreachable!("the index is below the number of steps")
    }

    /// Everything as numbers of four bytes, little-endian: for each episode its steps, for each of these candidates,
    /// choice, reward, and for each candidate its mask and its state. All counts are small enough to be exact.
    fn to_bytes(&self) -> Vec<u8> {
        let mut numbers: Vec<f32> = Vec::new();
        for episode in &self.episodes {
            numbers.push(episode.len() as f32);
            for step in episode {
                numbers.extend([step.action_mask.len() as f32, step.chosen as f32, step.reward]);
                numbers.extend(step.action_mask.as_flattened().iter().map(|&legal| f32::from(u8::from(legal))));
                numbers.extend(&step.state);
            }
        }
        numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
    }

    /// The memory that [`Self::to_bytes`] wrote; none if it did not.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (numbers, []) = bytes.as_chunks::<4>() else { return None };
        let mut numbers = numbers.iter().map(|&number| f32::from_le_bytes(number));
        let mut memory = Memory::default();
        while let Some(steps) = numbers.next() {
            let mut episode = Vec::new();
            for _ in 0..steps as usize {
                let (candidates, chosen, reward) =
                    (numbers.next()? as usize, numbers.next()? as usize, numbers.next()?);
                let mut mask = || Some([numbers.next()? != 0.0, numbers.next()? != 0.0]);
                let action_mask: Vec<[bool; 2]> = (0..candidates).map(|_| mask()).collect::<Option<_>>()?;
                let state: Vec<f32> = numbers.by_ref().take(candidates * STATE.len()).collect();
                let lawful = action_mask.as_flattened().get(chosen) == Some(&true);
                if !lawful || state.len() != candidates * STATE.len() {
                    return None;
                }
                episode.push(Step { state, action_mask, chosen, reward });
            }
            memory.episodes.push_back(episode);
        }
        Some(memory)
    }
}

/// Learns values by deep Q-learning. The policy takes what has the highest value.
pub struct Dqn {
    header: Header<DqnConfig>,
    device: Device,
    actor: Actor,
    target: Actor,
    optimizer: ModuleOptimizer,
    memory: Memory,
}

impl Dqn {
    /// Begins a training run.
    pub fn new(config: DqnConfig, seed: u64) -> Result<Self, ConfigError> {
        config.validate()?;
        let device = Device::flex().autodiff();
        let actor = Actor::new(config.hidden, &mut generator(seed, Stream::Weights, 0, 0), &device);
        let (target, optimizer) = (actor.clone(), AdamConfig::new().init());
        let mut header = Header::new(config, seed);
        header.spread.hide(&(0..FEATURES).filter(|column| !columns().contains(column)).collect::<Vec<_>>());
        Ok(Dqn { header, device, actor, target, optimizer, memory: Memory::default() })
    }

    /// Continues a saved training run, which must have been begun with the same hyperparameters and seed.
    pub fn resume(path: impl AsRef<Path>, config: &DqnConfig, seed: u64) -> Result<Self, SavedStateError> {
        let path = path.as_ref();
        let unusable = |reason: String| SavedStateError::unusable(path, reason);
        let fresh = Dqn::new(config.clone(), seed).map_err(|error| unusable(error.to_string()))?;
        let [header, actor, target, moments, memory] = training_state::read_parts(path, Kind::Dqn)?;
        Ok(Dqn {
            header: training_state::read_header(path, &header, (config, seed))?,
            device: fresh.device,
            actor: training_state::unpack_model(path, actor, fresh.actor)?,
            target: training_state::unpack_model(path, target, fresh.target)?,
            optimizer: training_state::unpack_optimizer(path, moments, fresh.optimizer)?,
            memory: Memory::from_bytes(&memory)
                .ok_or_else(|| unusable("malformed training state: its memory holds no episodes".to_owned()))?,
        })
    }

    /// Makes every gradient step of an update. Returns the mean loss, and the mean norm of the gradient.
    fn improve(&mut self) -> Result<[f64; 2], Diverged> {
        let Header { config, seed, progress, .. } = &self.header;
        let update = progress.updates;
        let normaliser = self.header.spread.normaliser();
        let (mut actor, mut optimizer) = (self.actor.clone(), self.optimizer.clone());
        let mut means = [0.0; 2];
        for step in 0..config.steps_per_update {
            let mut rng = generator(*seed, Stream::Order, update, step);
            let drawn: Vec<_> = (0..config.minibatch).map(|_| self.memory.draw(&mut rng)).collect();
            let lessons = self.lessons(&drawn, &normaliser);
            let loss = |actor: &Actor, shard: &[Lesson]| (error(actor, shard, &normaliser, &self.device), ());
            let (mut gradients, loss, _) = of_shards(&actor, &self.device, &lessons, loss)?;
            let norm = clip_norm(&mut gradients, &actor, config.gradient_norm_max)?;
            actor = optimizer.step(config.learning_rate_at(update), actor, gradients);
            means = [means[0] + loss, means[1] + norm];
        }
        let steps = config.steps_per_update as f64;
        if (update + 1).is_multiple_of(config.target_interval) {
            self.target = actor.clone();
        }
        (self.actor, self.optimizer) = (actor, optimizer);
        Ok(means.map(|sum| sum / steps))
    }

    /// What the values of the drawn steps should be.
    fn lessons(&self, drawn: &[(&Step, Option<&Step>)], normaliser: &Normaliser) -> Vec<Lesson> {
        let nexts: Vec<Observation> = drawn.iter().filter_map(|(_, next)| Some((*next)?.observation())).collect();
        let (target, device) = (self.target.valid(), self.device.clone().without_autodiff());
        let highest = nexts.par_chunks(SHARD_TRANSITIONS).flat_map_iter(|shard| -> Vec<f32> {
            let batch = Batch::new(&shard.iter().collect::<Vec<_>>(), normaliser, &device);
            let values = batch.mask(target.logits(batch.features.clone())).max_dim(1);
            values.into_data().try_into_vec().expect("the tensors of the agent hold f32")
        });
        let mut highest = highest.collect::<Vec<f32>>().into_iter();
        let lesson = |(step, next): &(&Step, Option<&Step>)| {
            let after = next.map_or(0.0, |_| highest.next().expect("every next step has values"));
            let value = step.reward + self.header.config.discount * after;
            Lesson { observation: step.observation(), chosen: step.chosen, value }
        };
        drawn.iter().map(lesson).collect()
    }
}

/// A choice, and what it should be valued at.
struct Lesson {
    observation: Observation,
    chosen: usize,
    value: f32,
}

/// Huber's loss of the values, as Mnih et al. clip their errors, `[1]`.
fn error(actor: &Actor, lessons: &[Lesson], normaliser: &Normaliser, device: &Device) -> Tensor<1> {
    let count = lessons.len();
    let observations: Vec<&Observation> = lessons.iter().map(|lesson| &lesson.observation).collect();
    let batch = Batch::new(&observations, normaliser, device);
    let chosen: Vec<i64> = lessons.iter().map(|lesson| lesson.chosen as i64).collect();
    let chosen: Tensor<2, Int> = Tensor::from_data(TensorData::new(chosen, [count, 1]), device);
    let values = batch.mask(actor.logits(batch.features.clone())).gather(1, chosen).reshape([count]);
    let wanted: Vec<f32> = lessons.iter().map(|lesson| lesson.value).collect();
    let wanted: Tensor<1> = Tensor::from_data(TensorData::new(wanted, [count]), device);
    let distance = (values - wanted).abs();
    let near = distance.clone().clamp_max(1.0);
    (near.clone().square() * 0.5 + (distance - near)).mean()
}

/// Plays one episode, choosing at random as often as `exploration` says. Returns its steps, what was observed if that is kept, and its
/// return.
fn explore<E: Environment>(
    environment: &mut E,
    reset: u64,
    sampler: &mut Sampler,
    exploration: f64,
    keeps_seen: bool,
    rng: &mut ChaCha8Rng,
) -> Result<(Vec<Step>, Vec<Observation>, f64), E::Error> {
    let (mut observation, mut steps, mut seen, mut total) = (environment.reset(reset)?, Vec::new(), Vec::new(), 0.0);
    loop {
        let chosen = if rng.random_bool(exploration) {
            let legal = observation.action_mask.as_flattened();
            let legal: Vec<usize> = (0..legal.len()).filter(|&chosen| legal[chosen]).collect();
            legal[rng.random_range(0..legal.len())]
        } else {
            sampler.best(&observation)
        };
        let result = environment.step(choice(chosen))?;
        total += f64::from(result.reward);
        steps.push(Step::new(&observation, chosen, step_reward(&observation, chosen) + result.reward));
        if keeps_seen {
            seen.push(observation);
        }
        if result.terminated || result.truncated {
            return Ok((steps, seen, total));
        }
        observation = result.observation;
    }
}

impl<E> LearnsFrom<E> for Dqn
where
    E: Environment + Send,
    E::Error: Send,
{
    fn update(&mut self, environments: &mut [E]) -> Result<UpdateReport, TrainError<E::Error>> {
        let started = Instant::now();
        let weights = self.weights()?;
        let config = self.header.config.clone();
        let (update, seed) = (self.header.progress.updates, self.header.seed);
        let exploration = config.exploration_at(update);
        let absorbs = update < config.normaliser_updates;
        let played = each_instance(
            environments,
            config.instances_per_update,
            || Sampler::new(&weights),
            |environment, sampler, instance| {
                let mut rng = generator(seed, Stream::Choices, update, instance);
                explore(environment, reset_seed(seed, update, instance), sampler, exploration, absorbs, &mut rng)
            },
        )
        .map_err(TrainError::Environment)?;
        let before = (self.memory.clone(), self.header.spread.clone());
        let mut episodes = Episodes::default();
        for (steps, seen, total) in played {
            episodes.add(steps.len(), total);
            self.memory.add(steps, config.memory);
            seen.iter().for_each(|observation| self.header.spread.absorb(&observation.features));
        }
        let [loss, gradient_norm] = self.improve().map_err(|Diverged| {
            (self.memory, self.header.spread) = before;
            TrainError::Loss { update: update + 1 }
        })?;
        let details = vec![
            ("value_loss", loss),
            ("exploration", exploration),
            ("remembered", self.memory.steps() as f64),
            ("gradient_norm", gradient_norm),
            ("learning_rate", config.learning_rate_at(update)),
        ];
        Ok(self.header.progress.count(started, &episodes, details))
    }
}

impl Learner for Dqn {
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
        network_weights(&self.actor, self.header.spread.normaliser())
    }

    fn start_from(&mut self, _weights: &NetworkWeights) -> Result<(), StartError> {
        Err(StartError::NotValues)
    }

    fn hide(&mut self, columns: &[usize]) {
        self.header.spread.hide(columns);
    }

    fn save(&self, path: &Path) -> Result<(), SavedStateError> {
        let header = training_state::json(path, &self.header)?;
        let [actor, target] = [&self.actor, &self.target].map(|network| training_state::model_pack(path, network));
        let moments = training_state::optimizer_pack(path, &self.optimizer)?;
        let parts: [&[u8]; 5] = [&header, &actor?, &target?, &moments, &self.memory.to_bytes()];
        training_state::write_parts(path, Kind::Dqn, parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rollout::greedy_return;
    use crate::toy::Toy;

    fn config() -> DqnConfig {
        DqnConfig { updates: 8, hidden: 8, memory: 60, target_interval: 2, ..DqnConfig::default() }
    }

    fn trained(seed: u64, updates: usize, environments: usize) -> Dqn {
        let mut dqn = Dqn::new(config(), seed).unwrap();
        train(&mut dqn, updates, environments);
        dqn
    }

    fn train(dqn: &mut Dqn, updates: usize, environments: usize) {
        let mut toys: Vec<Toy> = (0..environments).map(|_| Toy::new()).collect();
        for _ in 0..updates {
            dqn.update(&mut toys).unwrap();
        }
    }

    /// The toy in which large storages are good, which the state shows, and nothing else matters.
    #[test]
    fn it_learns_what_its_state_shows() {
        let config = DqnConfig { updates: 60, learning_rate: 5e-3, memory: 2000, ..config() };
        let mut dqn = Dqn::new(config, 3).unwrap();
        let mut toys = [Toy::of(column("log_size_to_deficit")), Toy::of(column("log_size_to_deficit"))];
        let seeds: Vec<u64> = (1_000_000..1_000_200).collect();
        let first = greedy_return(&dqn.weights().unwrap(), &mut toys, &seeds).unwrap();
        while !dqn.is_finished() {
            dqn.update(&mut toys).unwrap();
        }
        let last = greedy_return(&dqn.weights().unwrap(), &mut toys, &seeds).unwrap();
        assert!(last > 0.5 && last > first + 0.3, "untrained {first}, trained {last}");
    }

    #[test]
    fn what_is_no_part_of_its_state_does_not_matter() {
        let weights = trained(1, 3, 1).weights().unwrap();
        let shown: Vec<usize> = (0..FEATURES).filter(|&column| weights.normaliser().scale[column] != 0.0).collect();
        let mut expected = columns();
        expected.sort_unstable();
        assert_eq!(shown, expected);
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
        let straight = trained(7, 6, 2);
        let interrupted = trained(7, 3, 2);
        interrupted.save(&path).unwrap();
        let mut resumed = Dqn::resume(&path, &config(), 7).unwrap();
        assert_eq!((&resumed.header, &resumed.memory), (&interrupted.header, &interrupted.memory));
        train(&mut resumed, 3, 2);
        assert_eq!(resumed.weights().unwrap(), straight.weights().unwrap());
        assert_eq!(resumed.memory, straight.memory);
    }

    #[test]
    fn the_oldest_episodes_are_forgotten() {
        let dqn = trained(5, 8, 1);
        assert!(dqn.memory.steps() <= 60 && dqn.memory.episodes.len() > 1, "{}", dqn.memory.steps());
        let bytes = dqn.memory.to_bytes();
        assert_eq!(Memory::from_bytes(&bytes).as_ref(), Some(&dqn.memory));
        assert_eq!(Memory::from_bytes(&bytes[..bytes.len() - 4]), None);
    }
}
