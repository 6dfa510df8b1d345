//! Gym-like environments for placement, and what they are made of: training loops, recordings, instances, rewards.
//!
//! ```text
//! configuration ──► workload ──► recording ──► instance ──► walk ──► predicted or real environment
//! ```
//!
//! Nothing here knows how a policy is learned.

pub mod bootstrap;
pub mod config;
pub mod environment;
pub mod hardware;
pub mod instance;
pub mod predicted;
pub mod real;
pub mod recording;
pub mod reward;
pub mod taught;
mod walk;
pub mod workload;

pub use environment::{Branching, Environment, Observation, StepResult, Taught};
pub use instance::Instance;
pub use predicted::{Domain, PredictedEnvironment};
pub use real::TorchEnvironment;
pub use taught::TaughtEnvironment;
pub use walk::Mark;
