//! Schulman et al., *Proximal Policy Optimization Algorithms* (2017), section 3, as CleanRL's `ppo.py` has it.
//!
//! Deviations from `ppo.py`: the value loss is not clipped; whole episodes are rolled out; at the end of an
//! episode that was truncated the value is bootstrapped, at one that terminated it is zero; the mean return of an
//! instance's episodes is taken from each of them, for instances differ more than choices do; the update ends early by the
//! mean divergence of a pass, not of its last minibatch.

use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor, TensorData};
use plimsoll_env::environment::Observation;
use plimsoll_runtime::network::Normaliser;
use rand::seq::SliceRandom;
use rayon::prelude::*;

use super::config::PpoConfig;
use super::episodes::{End, Episode, Transition};
use crate::batch::Batch;
use crate::gradients::{Diverged, SHARD_TRANSITIONS, clip_norm, of_shards};
use crate::model::{ActorCritic, Critic};
use crate::seeds::{Stream, generator};

/// A transition with what is to be learnt from it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample<'a> {
    transition: &'a Transition,
    value: f32,
    advantage: f32,
}

impl Sample<'_> {
    /// What the critic should have said.
    fn target(&self) -> f32 {
        self.value + self.advantage
    }
}

/// Means over the minibatches of an update.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Losses {
    pub(crate) policy: f64,
    pub(crate) value: f64,
    pub(crate) entropy: f64,
    pub(crate) approx_kl: f64,
    pub(crate) clip_fraction: f64,
    pub(crate) gradient_norm: f64,
    /// Passes that were made.
    pub(crate) epochs: usize,
}

impl Losses {
    /// Every mean, by its name in a report.
    pub(crate) fn named(&self) -> [(&'static str, f64); 7] {
        [
            ("policy_loss", self.policy),
            ("value_loss", self.value),
            ("entropy", self.entropy),
            ("approx_kl", self.approx_kl),
            ("clip_fraction", self.clip_fraction),
            ("gradient_norm", self.gradient_norm),
            ("epochs", self.epochs as f64),
        ]
    }

    /// Adds `share` of `other`. The passes are not added.
    fn add(&mut self, other: &Losses, share: f64) {
        self.policy += other.policy * share;
        self.value += other.value * share;
        self.entropy += other.entropy * share;
        self.approx_kl += other.approx_kl * share;
        self.clip_fraction += other.clip_fraction * share;
        self.gradient_norm += other.gradient_norm * share;
    }
}

/// One update: what all of its parts need.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Update<'a> {
    pub(crate) config: &'a PpoConfig,
    pub(crate) seed: u64,
    /// Updates done before it.
    pub(crate) index: usize,
    /// The normaliser that the episodes were rolled out with.
    pub(crate) normaliser: &'a Normaliser,
    /// A device with gradients.
    pub(crate) device: &'a Device,
}

impl Update<'_> {
    /// Values every transition and estimates its advantage: Schulman et al., *High-Dimensional Continuous
    /// Control Using Generalized Advantage Estimation* (2016), section 3.
    pub(crate) fn samples<'e>(&self, critic: &Critic, episodes: &'e [Episode]) -> Vec<Sample<'e>> {
        let mut observations: Vec<&Observation> = Vec::new();
        for Episode { transitions, end, .. } in episodes {
            observations.extend(transitions.iter().map(|transition| &transition.observation));
            observations.extend(bootstrapped(end));
        }
        let mut values = self.values(critic, &observations).into_iter();
        let mut samples = Vec::with_capacity(observations.len());
        for Episode { transitions, end, .. } in episodes {
            let start = samples.len();
            samples.extend(transitions.iter().map(|transition| Sample {
                transition,
                value: values.next().expect("every observation has a value"),
                advantage: 0.0,
            }));
            let after = bootstrapped(end).and_then(|_| values.next()).unwrap_or(0.0);
            estimate_advantages(self.config, &mut samples[start..], after);
        }
        samples
    }

    /// The values of observations, without gradients.
    fn values(&self, critic: &Critic, observations: &[&Observation]) -> Vec<f32> {
        let (critic, device) = (critic.valid(), self.device.clone().without_autodiff());
        let shards = observations.par_chunks(SHARD_TRANSITIONS);
        shards.flat_map_iter(|shard| host(critic.values(&Batch::new(shard, self.normaliser, &device)))).collect()
    }

    /// Improves the model by several passes over the samples.
    pub(crate) fn improve(
        &self,
        mut model: ActorCritic,
        optimizer: &mut ModuleOptimizer,
        samples: &[Sample<'_>],
    ) -> Result<(ActorCritic, Losses), Diverged> {
        let learning_rate = self.config.learning_rate_at(self.index);
        let size = samples.len().div_ceil(self.config.minibatches);
        let mut order = samples.to_vec();
        let mut passes: Vec<Losses> = Vec::with_capacity(self.config.epochs);
        for epoch in 0..self.config.epochs {
            order.shuffle(&mut generator(self.seed, Stream::Order, self.index, epoch));
            let minibatches = order.chunks(size);
            let share = 1.0 / minibatches.len() as f64;
            let mut pass = Losses::default();
            for minibatch in minibatches {
                let (mut gradients, mut losses) = self.gradients(&model, minibatch)?;
                losses.gradient_norm = clip_norm(&mut gradients, &model, self.config.gradient_norm_max)?;
                model = optimizer.step(learning_rate, model, gradients);
                pass.add(&losses, share);
            }
            passes.push(pass);
            if self.config.target_kl > 0.0 && pass.approx_kl > self.config.target_kl {
                break;
            }
        }
        let mut means = Losses { epochs: passes.len(), ..Losses::default() };
        passes.iter().for_each(|pass| means.add(pass, 1.0 / passes.len() as f64));
        Ok((model, means))
    }

    /// The gradient of a minibatch's loss, and the parts of the loss.
    fn gradients(&self, model: &ActorCritic, minibatch: &[Sample<'_>]) -> Result<(GradientsParams, Losses), Diverged> {
        let advantages = advantages(self.config, minibatch);
        let items: Vec<(Sample<'_>, f32)> = minibatch.iter().copied().zip(advantages).collect();
        let (gradients, _, told) = of_shards(model, self.device, &items, |model, shard| self.loss(model, shard))?;
        let mut losses = Losses::default();
        told.iter().for_each(|(of_shard, share)| losses.add(of_shard, *share));
        Ok((gradients, losses))
    }

    /// The mean loss of a shard with its normalised advantages, `[1]`, and its parts. Gradient norm and
    /// passes are the caller's to fill in.
    fn loss(&self, model: &ActorCritic, shard: &[(Sample<'_>, f32)]) -> (Tensor<1>, Losses) {
        let PpoConfig { clip, value_coefficient, entropy_coefficient, .. } = *self.config;
        let samples = shard.len();
        let column =
            |values: Vec<f32>| -> Tensor<1> { Tensor::from_data(TensorData::new(values, [samples]), self.device) };
        let each = |of: fn(&Sample<'_>) -> f32| column(shard.iter().map(|(sample, _)| of(sample)).collect());
        let observations: Vec<&Observation> = shard.iter().map(|(sample, _)| &sample.transition.observation).collect();
        let batch = Batch::new(&observations, self.normaliser, self.device);

        let chosen: Vec<i64> = shard.iter().map(|(sample, _)| sample.transition.chosen as i64).collect();
        let chosen: Tensor<2, Int> = Tensor::from_data(TensorData::new(chosen, [samples, 1]), self.device);
        let log_probabilities = model.actor.log_probabilities(&batch);
        let of_chosen = log_probabilities.clone().gather(1, chosen).reshape([samples]);
        let log_ratio = of_chosen - each(|sample| sample.transition.log_probability);
        let ratio = log_ratio.clone().exp();

        let advantages = column(shard.iter().map(|&(_, advantage)| advantage).collect());
        let clipped = ratio.clone().clamp(1.0 - clip, 1.0 + clip);
        let policy_loss = (advantages.clone() * ratio.clone()).min_pair(advantages * clipped).mean().neg();
        let value_loss = (model.critic.values(&batch) - each(|sample| sample.target())).square().mean() * 0.5;
        let entropy = (log_probabilities.clone().exp() * log_probabilities).sum_dim(1).mean().neg();
        let loss = policy_loss.clone() + value_loss.clone() * value_coefficient - entropy.clone() * entropy_coefficient;

        let approx_kl = (ratio.clone() - 1.0 - log_ratio).mean();
        let outside = host(ratio).into_iter().filter(|&ratio| (f64::from(ratio) - 1.0).abs() > clip).count();
        let scalar = |tensor: Tensor<1>| f64::from(tensor.into_scalar::<f32>());
        let losses = Losses {
            policy: scalar(policy_loss),
            value: scalar(value_loss),
            entropy: scalar(entropy),
            approx_kl: scalar(approx_kl),
            clip_fraction: outside as f64 / samples as f64,
            ..Losses::default()
        };
        (loss, losses)
    }
}

/// The observation whose value stands for all that a truncated episode did not get to.
fn bootstrapped(end: &End) -> Option<&Observation> {
    match end {
        End::Truncated(observation) if observation.candidates() > 0 => Some(observation),
        End::Terminated | End::Truncated(_) => None,
    }
}

/// `after` is the value of what follows the last transition.
fn estimate_advantages(config: &PpoConfig, samples: &mut [Sample<'_>], after: f32) {
    let (mut next_value, mut next_advantage) = (after, 0.0);
    for sample in samples.iter_mut().rev() {
        let surprise = sample.transition.reward + config.discount * next_value - sample.value;
        sample.advantage = surprise + config.discount * config.gae_lambda * next_advantage;
        (next_value, next_advantage) = (sample.value, sample.advantage);
    }
}

/// The share of the variance of the targets that the values explain: 1 at best, 0 for a constant.
pub(crate) fn explained_variance(samples: &[Sample<'_>]) -> f64 {
    let variance = |of: &dyn Fn(&Sample<'_>) -> f32| {
        let mean = samples.iter().map(|sample| f64::from(of(sample))).sum::<f64>() / samples.len() as f64;
        samples.iter().map(|sample| (f64::from(of(sample)) - mean).powi(2)).sum::<f64>()
    };
    let of_targets = variance(&|sample| sample.target());
    if of_targets == 0.0 { 0.0 } else { 1.0 - variance(&|sample| sample.advantage) / of_targets }
}

/// The advantages of a minibatch, normalised if the configuration says so.
fn advantages(config: &PpoConfig, minibatch: &[Sample<'_>]) -> Vec<f32> {
    let raw = minibatch.iter().map(|sample| sample.advantage);
    if !config.normalise_advantages || minibatch.len() < 2 {
        return raw.collect();
    }
    let mean = raw.clone().sum::<f32>() / minibatch.len() as f32;
    let variance = raw.clone().map(|advantage| (advantage - mean).powi(2)).sum::<f32>() / minibatch.len() as f32;
    let spread = variance.sqrt() + 1e-8;
    raw.map(|advantage| (advantage - mean) / spread).collect()
}

/// The elements of a tensor.
fn host<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_into_vec().expect("the tensors of the agent hold f32")
}

#[cfg(test)]
mod tests {
    use plimsoll_runtime::observation::FEATURES;

    use super::*;

    fn transition(reward: f32) -> Transition {
        Transition { observation: Observation::default(), chosen: 0, log_probability: 0.0, reward }
    }

    #[test]
    fn advantages_are_those_of_the_definition() {
        let config = PpoConfig { discount: 0.9, gae_lambda: 0.5, ..PpoConfig::default() };
        let transitions = [transition(1.0), transition(2.0)];
        let mut samples: Vec<Sample<'_>> = transitions
            .iter()
            .zip([10.0, 20.0])
            .map(|(transition, value)| Sample { transition, value, advantage: 0.0 })
            .collect();
        estimate_advantages(&config, &mut samples, 30.0);
        let last = 2.0 + 0.9 * 30.0 - 20.0;
        let first = 1.0 + 0.9 * 20.0 - 10.0 + 0.9 * 0.5 * last;
        assert_eq!(samples.iter().map(|sample| sample.advantage).collect::<Vec<f32>>(), [first, last]);
    }

    #[test]
    fn only_a_truncated_episode_is_bootstrapped() {
        let observation = Observation { features: vec![0.0; FEATURES], action_mask: vec![[true; 2]] };
        assert!(bootstrapped(&End::Truncated(observation)).is_some());
        assert!(bootstrapped(&End::Truncated(Observation::default())).is_none());
        assert!(bootstrapped(&End::Terminated).is_none());
    }
}
