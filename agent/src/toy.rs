//! An environment small enough to know the answer: every choice has a quality that its features tell.

use std::convert::Infallible;

use plimsoll_env::environment::{Branching, Environment, Observation, StepResult, Taught};
use plimsoll_runtime::observation::FEATURES;
use plimsoll_runtime::plan::Action;
use plimsoll_runtime::policy::Choice;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Steps in an episode.
pub(crate) const STEPS: usize = 6;

/// Swapping a candidate is worth its first feature plus its second, recomputing it the first minus the
/// second; the reward, given at the end, is the mean worth of the choices. Random play earns 0.
#[derive(Clone)]
pub(crate) struct Toy {
    rng: ChaCha8Rng,
    observation: Observation,
    steps: usize,
    worth: f32,
    /// Episodes end by truncation instead of termination.
    pub(crate) truncates: bool,
    /// The one feature that is worth anything, whatever the eviction, all others being zero.
    only: Option<usize>,
}

impl Toy {
    pub(crate) fn new() -> Self {
        let rng = ChaCha8Rng::seed_from_u64(0);
        Toy { rng, observation: Observation::default(), steps: 0, worth: 0.0, truncates: false, only: None }
    }

    /// The toy in which every choice is worth the feature `column`, and all others are zero.
    pub(crate) fn of(column: usize) -> Self {
        Toy { only: Some(column), ..Toy::new() }
    }

    /// What the choice is worth.
    fn worth_of(&self, choice: Choice) -> f32 {
        let row = &self.observation.features[choice.candidate * FEATURES..];
        if let Some(column) = self.only {
            return row[column];
        }
        if choice.action == Action::Swap { row[0] + row[1] } else { row[0] - row[1] }
    }

    fn legal(&self) -> impl Iterator<Item = Choice> + '_ {
        let all = (0..self.observation.candidates())
            .flat_map(|candidate| Action::EVICTIONS.map(|action| Choice { candidate, action }));
        all.filter(|&choice| self.observation.allows(choice))
    }

    /// The return of the episode that `seed` begins, when the best choice is made at every step.
    pub(crate) fn play_perfectly(&mut self, seed: u64) -> f32 {
        let Ok(_) = self.reset(seed);
        loop {
            let best = self.legal().max_by(|&left, &right| self.worth_of(left).total_cmp(&self.worth_of(right)));
            let Ok(result) = self.step(best.expect("the first candidate is always legal"));
            if result.terminated || result.truncated {
                return result.reward;
            }
        }
    }

    fn draw(&mut self) -> Observation {
        let candidates = self.rng.random_range(3..12);
        let mut features: Vec<f32> = (0..candidates * FEATURES).map(|_| self.rng.random_range(-1.0..1.0)).collect();
        if let Some(only) = self.only {
            features
                .iter_mut()
                .enumerate()
                .filter(|(index, _)| index % FEATURES != only)
                .for_each(|(_, value)| *value = 0.0);
        }
        let mut action_mask: Vec<[bool; 2]> =
            (0..candidates).map(|_| [self.rng.random_bool(0.8), self.rng.random_bool(0.8)]).collect();
        action_mask[0] = [true, true];
        Observation { features, action_mask }
    }
}

impl Taught for Toy {
    /// The two best choices.
    fn lesson(&mut self) -> Vec<[bool; 2]> {
        let mut worth: Vec<f32> = self.legal().map(|choice| self.worth_of(choice)).collect();
        worth.sort_by(|left, right| right.total_cmp(left));
        let least = worth[1.min(worth.len() - 1)];
        let right = |choice| self.observation.allows(choice) && self.worth_of(choice) >= least;
        let candidates = 0..self.observation.candidates();
        candidates.map(|candidate| Action::EVICTIONS.map(|action| right(Choice { candidate, action }))).collect()
    }
}

impl Branching for Toy {
    type Mark = Toy;

    fn mark(&self) -> Toy {
        self.clone()
    }

    fn return_to(&mut self, mark: &Toy) {
        self.clone_from(mark);
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
