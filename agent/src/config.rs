//! The hyperparameters of training.

use plimsoll_runtime::network::HIDDEN_MAX;
use serde::de::DeserializeOwned;

/// What a way of learning can be told, as a table of a configuration.
pub trait Hyperparameters: DeserializeOwned + Default {
    /// Name of the table.
    const TABLE: &'static str;

    /// Updates in the whole training run.
    fn updates_mut(&mut self) -> &mut usize;

    /// Checks the range of every hyperparameter.
    fn validate(&self) -> Result<(), ConfigError>;
}

/// A hyperparameter outside its range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{key} is {found}, expected {expected}")]
pub struct ConfigError {
    /// The hyperparameter's name.
    pub key: &'static str,
    /// What it may be.
    pub expected: &'static str,
    /// What it is.
    pub found: f64,
}

/// Refuses the hyperparameter `key` unless it `holds`.
pub(crate) fn require(key: &'static str, holds: bool, expected: &'static str, found: f64) -> Result<(), ConfigError> {
    if holds { Ok(()) } else { Err(ConfigError { key, expected, found }) }
}

/// The most of anything that is counted: far beyond any training.
const COUNT_MAX: usize = 1_000_000;

/// Refuses the first of `counts` that is none, or more than any training has.
pub(crate) fn require_counts(counts: &[(&'static str, usize)]) -> Result<(), ConfigError> {
    let holds = |count| (1..=COUNT_MAX).contains(&count);
    counts.iter().try_for_each(|&(key, count)| require(key, holds(count), "between 1 and a million", count as f64))
}

/// Refuses the first of `values` that is not finite and above 0.
pub(crate) fn require_positive(values: &[(&'static str, f64)]) -> Result<(), ConfigError> {
    let holds = |value: f64| value > 0.0 && value.is_finite();
    values.iter().try_for_each(|&(key, value)| require(key, holds(value), "a finite number above 0", value))
}

/// Refuses the first of `values` that is not finite, or below 0.
pub(crate) fn require_not_negative(values: &[(&'static str, f64)]) -> Result<(), ConfigError> {
    let holds = |value: f64| value >= 0.0 && value.is_finite();
    values.iter().try_for_each(|&(key, value)| require(key, holds(value), "a finite number of at least 0", value))
}

/// Refuses the first of `shares` that is none of a whole.
pub(crate) fn require_shares(shares: &[(&'static str, f64)]) -> Result<(), ConfigError> {
    shares.iter().try_for_each(|&(key, share)| require(key, (0.0..=1.0).contains(&share), "0 to 1", share))
}

/// A learning rate that falls linearly, to zero after the last of `updates`, at an update counted from 0.
pub(crate) fn annealed(learning_rate: f64, update: usize, updates: usize) -> f64 {
    learning_rate * updates.saturating_sub(update) as f64 / updates as f64
}

/// Refuses a width that no hidden layer has.
pub(crate) fn require_width(key: &'static str, width: usize) -> Result<(), ConfigError> {
    require(key, (1..=HIDDEN_MAX).contains(&width), "1 to 1024", width as f64)
}
