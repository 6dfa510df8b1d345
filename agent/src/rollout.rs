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

use crate::ppo::Update;
use crate::seeds::{Stream, generator, reset_seed};

/// One decision and what came of it.
#[derive(Clone, Debug)]
pub(crate) struct Transition {
    pub(crate) observation: Observation,
    /// Index among the logits of the observation: twice the candidate, plus 1 for recompute.
    pub(crate) chosen: usize,
    /// Logarithm of the probability with which it was chosen.
    pub(crate) log_probability: f32,
    pub(crate) reward: f32,
}

/// How an episode ended.
#[derive(Clone, Debug)]
pub(crate) enum End {
    /// The plan was complete.
    Terminated,
    /// It was cut short here.
    Truncated(Observation),
}

/// One plan.
#[derive(Clone, Debug)]
pub(crate) struct Episode {
    pub(crate) transitions: Vec<Transition>,
    pub(crate) end: End,
    /// The undiscounted sum of the rewards, as the environment gave them.
    pub(crate) total_reward: f32,
}

/// Rolls out the episodes of one update, and subtracts each instance's mean return from the last reward of
/// its episodes that terminated.
///
/// Instance `i` runs in environment `i mod environments`. The result depends on neither the number of
/// threads nor their scheduling.
pub(crate) fn collect<E>(
    update: &Update<'_>,
    weights: &NetworkWeights,
    environments: &mut [E],
) -> Result<Vec<Episode>, E::Error>
where
    E: Environment + Send,
    E::Error: Send,
{
    let &Update { config, seed, index: update, .. } = update;
    let repeats = config.episodes_per_instance;
    let rolled_out = each_instance(
        environments,
        config.instances_per_update,
        || Sampler::new(weights),
        |environment, sampler, instance| {
            let reset = reset_seed(seed, update, instance);
            let mut episodes = Vec::with_capacity(repeats);
            for index in instance * repeats..(instance + 1) * repeats {
                let mut rng = generator(seed, Stream::Choices, update, index);
                episodes.push(roll_out(environment, reset, sampler, &mut rng)?);
            }
            subtract_mean_return(&mut episodes);
            Ok(episodes)
        },
    )?;
    Ok(rolled_out.into_iter().flatten().collect())
}

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

/// The baseline of the episodes of one instance. One episode alone would lose all its reward: it is let be.
///
/// An episode that was truncated never saw its last reward; the value that stands for it has the baseline
/// in it already.
fn subtract_mean_return(episodes: &mut [Episode]) {
    let mut terminated: Vec<&mut Episode> =
        episodes.iter_mut().filter(|episode| matches!(episode.end, End::Terminated)).collect();
    if terminated.len() < 2 {
        return;
    }
    let mean = terminated.iter().map(|episode| episode.total_reward).sum::<f32>() / terminated.len() as f32;
    for last in terminated.iter_mut().filter_map(|episode| episode.transitions.last_mut()) {
        last.reward -= mean;
    }
}

fn roll_out<E: Environment>(
    environment: &mut E,
    reset: u64,
    sampler: &mut Sampler,
    rng: &mut ChaCha8Rng,
) -> Result<Episode, E::Error> {
    let mut observation = environment.reset(reset)?;
    let mut transitions = Vec::new();
    let mut total_reward = 0.0;
    loop {
        let (chosen, log_probability) = sampler.sample(&observation, rng);
        let StepResult { observation: next, reward, terminated, truncated } = environment.step(choice(chosen))?;
        transitions.push(Transition { observation, chosen, log_probability, reward });
        total_reward += reward;
        if terminated || truncated {
            let end = if terminated { End::Terminated } else { End::Truncated(next) };
            return Ok(Episode { transitions, end, total_reward });
        }
        observation = next;
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn episode(total_reward: f32, end: End) -> Episode {
        let transition =
            |reward| Transition { observation: Observation::default(), chosen: 0, log_probability: 0.0, reward };
        Episode { transitions: vec![transition(0.0), transition(total_reward)], end, total_reward }
    }

    fn last_rewards(mut episodes: Vec<Episode>) -> Vec<f32> {
        subtract_mean_return(&mut episodes);
        assert!(episodes.iter().all(|episode| episode.transitions[0].reward == 0.0));
        episodes.iter().map(|episode| episode.transitions[1].reward).collect()
    }

    #[test]
    fn the_baseline_is_the_mean_of_the_episodes_that_terminated() {
        let truncated = || End::Truncated(Observation::default());
        let several = vec![episode(1.0, End::Terminated), episode(-9.0, truncated()), episode(2.0, End::Terminated)];
        assert_eq!(last_rewards(several), [-0.5, -9.0, 0.5]);
        assert_eq!(last_rewards(vec![episode(1.0, End::Terminated), episode(0.0, truncated())]), [1.0, 0.0]);
    }
}
