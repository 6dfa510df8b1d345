//! Learns a placement policy for a model family: by imitation of searched plans, by policy iteration, by proximal policy
//! optimisation, by evolution strategies, or by deep Q-learning.
//!
//! ```text
//! rollout ──episodes──► imitation, policy iteration, ppo, dqn ──weights──► export ──► rollout, policy file
//!    └────────returns─► evolution ─────────────────────────────weights──────┘
//! ```
//!
//! The agent knows observations, choices and rewards. It knows nothing of traces, budgets or links, which
//! are the environment's business, nor of files other than its own saved training state. A learner is begun by its
//! hyperparameters, and is a [`Learner`] and [`LearnsFrom`] environments from then on; it prints nothing and holds no clock but
//! the one that measures its rate.

mod average;
mod batch;
mod config;
mod dqn;
mod evolution;
mod export;
mod gradients;
mod imitation;
mod learner;
mod lessons;
mod model;
mod policy_iteration;
mod ppo;
mod rollout;
mod seeds;
mod spread;
#[cfg(test)]
mod toy;
mod training_state;

pub use config::{ConfigError, Hyperparameters};
pub use dqn::{Dqn, DqnConfig};
pub use evolution::{Evolution, EvolutionConfig};
pub use imitation::{Imitation, ImitationConfig};
pub use learner::{Best, Learner, LearnsFrom, OtherWorld, Progress, StartError, TrainError, UpdateReport};
pub use lessons::Student;
pub use policy_iteration::{PolicyIteration, PolicyIterationConfig};
pub use ppo::{Ppo, PpoConfig};
pub use rollout::greedy_return;
pub use training_state::SavedStateError;
