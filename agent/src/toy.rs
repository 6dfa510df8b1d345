//! An environment small enough to know the answer: every choice has a quality that its features tell.

use std::convert::Infallible;

use plimsoll_env::environment::{Environment, Observation, StepResult};
use plimsoll_runtime::observation::FEATURES;
use plimsoll_runtime::plan::Action;
use plimsoll_runtime::policy::Choice;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Steps in an episode.
pub(crate) const STEPS: usize = 6;

/// Swapping a candidate is worth its first feature plus its second, recomputing it the first minus the
/// second; the reward, given at the end, is the mean worth of the choices. Random play earns 0.
pub(crate) struct Toy {
    rng: ChaCha8Rng,
    observation: Observation,
    steps: usize,
    worth: f32,
    /// Episodes end by truncation instead of termination.
    pub(crate) truncates: bool,
}

impl Toy {
    pub(crate) fn new() -> Self {
        let rng = ChaCha8Rng::seed_from_u64(0);
        Toy { rng, observation: Observation::default(), steps: 0, worth: 0.0, truncates: false }
    }

    /// What the choice is worth.
    fn worth_of(&self, choice: Choice) -> f32 {
        let row = &self.observation.features[choice.candidate * FEATURES..];
        if choice.action == Action::Swap { row[0] + row[1] } else { row[0] - row[1] }
    }

    /// The return of the episode that `seed` begins, when the best choice is made at every step.
    pub(crate) fn play_perfectly(&mut self, seed: u64) -> f32 {
        let Ok(_) = self.reset(seed);
        loop {
            let all = (0..self.observation.candidates())
                .flat_map(|candidate| [Action::Swap, Action::Recompute].map(|action| Choice { candidate, action }));
            let legal = all.filter(|&choice| self.observation.allows(choice));
            let best = legal.max_by(|&left, &right| self.worth_of(left).total_cmp(&self.worth_of(right)));
            let Ok(result) = self.step(best.expect("the first candidate is always legal"));
            if result.terminated || result.truncated {
                return result.reward;
            }
        }
    }

    fn draw(&mut self) -> Observation {
        let candidates = self.rng.random_range(3..12);
        let features = (0..candidates * FEATURES).map(|_| self.rng.random_range(-1.0..1.0)).collect();
        let mut action_mask: Vec<[bool; 2]> =
            (0..candidates).map(|_| [self.rng.random_bool(0.8), self.rng.random_bool(0.8)]).collect();
        action_mask[0] = [true, true];
        Observation { features, action_mask }
    }
}

impl Environment for Toy {
    type Error = Infallible;

    fn reset(&mut self, seed: u64) -> Result<Observation, Infallible> {
        self.rng = ChaCha8Rng::seed_from_u64(seed);
        (self.steps, self.worth) = (0, 0.0);
        self.observation = self.draw();
        Ok(self.observation.clone())
    }

    fn step(&mut self, choice: Choice) -> Result<StepResult, Infallible> {
        assert!(self.observation.allows(choice), "{choice:?} is not legal");
        self.worth += self.worth_of(choice);
        self.steps += 1;
        let over = self.steps == STEPS;
        self.observation = if over && !self.truncates { Observation::default() } else { self.draw() };
        Ok(StepResult {
            observation: self.observation.clone(),
            reward: if over { self.worth / STEPS as f32 } else { 0.0 },
            terminated: over && !self.truncates,
            truncated: over && self.truncates,
        })
    }
}
