//! The episodes that an update learns from.

use plimsoll_env::environment::{Environment, Observation, StepResult};
use plimsoll_runtime::network::NetworkWeights;
use rand_chacha::ChaCha8Rng;

use super::update::Update;
use crate::rollout::{Sampler, choice, each_instance};
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
