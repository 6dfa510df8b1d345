//! Episodes, rolled out with the runtime's own network.
//!
//! What production will run is what explores here: the weights are exported after every update. A batch of
//! one is also much faster there than in burn.

use plimsoll_env::environment::{Environment, Observation, StepResult};
use plimsoll_runtime::network::{Network, NetworkWeights};
use plimsoll_runtime::plan::Action;
use plimsoll_runtime::policy::Choice;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

/// Lets `play` play every instance, instance `i` in environment `i mod environments`, and returns what came of each, in
/// order. Every environment has its own scratch.
pub(crate) fn each_instance<E, S, T>(
    environments: &mut [E],
    instances: usize,
    scratch: impl Fn() -> S + Sync,
    play: impl Fn(&mut E, &mut S, usize) -> Result<T, E::Error> + Sync,
) -> Result<Vec<T>, E::Error>
where
    E: Environment + Send,
    E::Error: Send,
    T: Send,
{
    assert!(!environments.is_empty(), "there is no environment to roll out in");
    let stride = environments.len();
    let per_environment = environments.par_iter_mut().enumerate().map(|(first, environment)| {
        let mut scratch = scratch();
        let played = (first..instances).step_by(stride);
        played.map(|instance| Ok((instance, play(environment, &mut scratch, instance)?))).collect()
    });
    let mut played: Vec<(usize, T)> =
        per_environment.collect::<Result<Vec<Vec<_>>, E::Error>>()?.into_iter().flatten().collect();
    played.sort_by_key(|(instance, _)| *instance);
    Ok(played.into_iter().map(|(_, outcome)| outcome).collect())
}

/// The mean undiscounted return of the greedy policy over the episodes that `reset_seeds` begin.
///
/// Seed `i` runs in environment `i mod environments`.
pub fn greedy_return<E>(weights: &NetworkWeights, environments: &mut [E], reset_seeds: &[u64]) -> Result<f64, E::Error>
where
    E: Environment + Send,
    E::Error: Send,
{
    let totals = each_instance(
        environments,
        reset_seeds.len(),
        || Sampler::new(weights),
        |environment, sampler, index| play_greedily(environment, reset_seeds[index], sampler, |_| {}),
    )?;
    Ok(totals.iter().sum::<f64>() / reset_seeds.len() as f64)
}

/// The undiscounted return of the greedy policy in the episode that `reset` begins. `see` is shown every observation.
pub(crate) fn play_greedily<E: Environment>(
    environment: &mut E,
    reset: u64,
    sampler: &mut Sampler,
    see: impl FnMut(&Observation),
) -> Result<f64, E::Error> {
    let observation = environment.reset(reset)?;
    let begun = StepResult { observation, reward: 0.0, terminated: false, truncated: false };
    play_on_greedily(environment, begun, sampler, see)
}

/// What an episode earns by `result`, its last step, and by the greedy policy from there. `see` is shown every observation.
pub(crate) fn play_on_greedily<E: Environment>(
    environment: &mut E,
    mut result: StepResult,
    sampler: &mut Sampler,
    mut see: impl FnMut(&Observation),
) -> Result<f64, E::Error> {
    let mut total = f64::from(result.reward);
    while !(result.terminated || result.truncated) {
        see(&result.observation);
        result = environment.step(choice(sampler.best(&result.observation)))?;
        total += f64::from(result.reward);
    }
    Ok(total)
}

/// What a logit stands for.
pub(crate) fn choice(chosen: usize) -> Choice {
    Choice { candidate: chosen / 2, action: Action::EVICTIONS[chosen % 2] }
}

/// The policy during rollouts.
pub(crate) struct Sampler {
    network: Network,
    /// The legal choices of an observation with their logits.
    legal: Vec<(usize, f32)>,
}

impl Sampler {
    pub(crate) fn new(weights: &NetworkWeights) -> Self {
        Sampler { network: Network::new(weights), legal: Vec::new() }
    }

    fn score(&mut self, observation: &Observation) {
        let Sampler { network, legal } = self;
        legal.clear();
        network.for_each_logits(&observation.features, |candidate, logits| {
            let lawful = (0..2).filter(|&action| observation.action_mask[candidate][action]);
            legal.extend(lawful.map(|action| (2 * candidate + action, logits[action])));
        });
        assert!(!self.legal.is_empty(), "an observation offers at least one legal eviction");
    }

    /// The legal choices of the observation that was scored last, with their logits.
    pub(crate) fn legal(&self) -> &[(usize, f32)] {
        &self.legal
    }

    /// The choice with the highest logit, the first of equals.
    pub(crate) fn best(&mut self, observation: &Observation) -> usize {
        self.best_of(observation, |_| false).0
    }

    /// The choice with the highest logit, and the one among those that are `wanted`, if any is.
    pub(crate) fn best_of(
        &mut self,
        observation: &Observation,
        wanted: impl Fn(usize) -> bool,
    ) -> (usize, Option<usize>) {
        self.score(observation);
        let higher = |best: (usize, f32), other: (usize, f32)| if other.1 > best.1 { other } else { best };
        let of_wanted = self.legal.iter().copied().filter(|&(chosen, _)| wanted(chosen)).reduce(higher);
        let (best, _) = self.legal.iter().copied().reduce(higher).expect("some choice is legal");
        (best, of_wanted.map(|(chosen, _)| chosen))
    }

    /// A draw from the softmax over all legal choices, with the logarithm of its probability.
    pub(crate) fn sample(&mut self, observation: &Observation, rng: &mut ChaCha8Rng) -> (usize, f32) {
        self.score(observation);
        let highest = self.legal.iter().map(|&(_, logit)| logit).fold(f32::NEG_INFINITY, f32::max);
        let total: f32 = self.legal.iter().map(|(_, logit)| (logit - highest).exp()).sum();
        let mut left = rng.random::<f32>() * total;
        let drawn = self.legal.iter().find(|(_, logit)| {
            left -= (logit - highest).exp();
            left < 0.0
        });
        // Rounding may leave a last crumb; it belongs to the last choice.
        let &(chosen, logit) = drawn.unwrap_or(&self.legal[self.legal.len() - 1]);
        (chosen, logit - highest - total.ln())
    }
}
