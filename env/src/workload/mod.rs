//! Model families as real training loops on `tch`, written as a user would write them.
//!
//! A workload knows nothing of budgets, plans or recording: those act below it. Every operator that an
//! iteration runs is called through its fallible form, so an allocation that the budget refuses comes back
//! as an error.
//!
//! Everything random is drawn from the seed: parameters, batches and dropout. libtorch's own generator is
//! shared by the whole process, so each iteration seeds it anew, and losses do not depend on what else ran
//! before; but two workloads must not run at the same time.

mod cifar;
mod gpt;
mod gratings;
mod resnet;
mod text;
mod training;

pub use gpt::GptConfig;
pub use resnet::{Arch, ResnetConfig};

use serde::{Deserialize, Serialize};
use tch::{Device, TchError, Tensor};

/// A training loop to be placed.
pub trait Workload {
    /// Its name in the configuration.
    fn name(&self) -> &str;

    /// The model family it belongs to.
    fn family(&self) -> &str;

    /// Runs one iteration (one optimizer step on a fresh batch) and returns the loss.
    ///
    /// After an error the parameters may be partly updated.
    fn iteration(&mut self) -> Result<f64, TchError>;

    /// Everything that training changes in the model, parameters and buffers, sorted by name.
    ///
    /// The tensors share their storages with the model.
    fn variables(&self) -> Vec<(String, Tensor)>;

    /// The parameters, in the order in which the optimizer has them.
    fn trainable(&self) -> Vec<Tensor>;
}

/// What a workload is made from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "family", rename_all = "lowercase")]
pub enum WorkloadConfig {
    /// A decoder-only transformer.
    Gpt(GptConfig),
    /// A residual convolution net.
    Resnet(ResnetConfig),
}

impl WorkloadConfig {
    /// Builds the workload `name` on `device`.
    ///
    /// The same seed gives the same bits in every run on the same machine. Parameters are made by `tch`'s
    /// layers, which panic where the device has no room for them.
    pub fn build(&self, name: &str, device: Device, seed: u64) -> Result<Box<dyn Workload>, TchError> {
        Ok(match self {
            WorkloadConfig::Gpt(config) => Box::new(gpt::Gpt::new(config, name, device, seed)?),
            WorkloadConfig::Resnet(config) => Box::new(resnet::Resnet::new(config, name, device, seed)?),
        })
    }

    /// Samples in a batch.
    pub fn batch(&self) -> i64 {
        match self {
            WorkloadConfig::Gpt(config) => config.batch,
            WorkloadConfig::Resnet(config) => config.batch,
        }
    }

    /// The same workload with another batch size.
    pub fn with_batch(&self, batch: i64) -> Self {
        match self.clone() {
            WorkloadConfig::Gpt(config) => WorkloadConfig::Gpt(GptConfig { batch, ..config }),
            WorkloadConfig::Resnet(config) => WorkloadConfig::Resnet(ResnetConfig { batch, ..config }),
        }
    }

    /// Says which key holds a value that no workload can have.
    pub fn validate(&self) -> Result<(), Implausible> {
        match self {
            WorkloadConfig::Gpt(config) => config.validate(),
            WorkloadConfig::Resnet(config) => config.validate(),
        }
    }
}

/// A key with a value that no workload can have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {rule}")]
pub struct Implausible {
    /// The key in the workload's table.
    pub key: &'static str,
    /// What its value must be.
    pub rule: String,
}

/// Refuses the value of `key` unless it `holds`.
fn require(key: &'static str, holds: bool, rule: impl Into<String>) -> Result<(), Implausible> {
    if holds { Ok(()) } else { Err(Implausible { key, rule: rule.into() }) }
}

/// Refuses the first of `sizes` that is not at least one.
fn require_positive(sizes: &[(&'static str, i64)]) -> Result<(), Implausible> {
    sizes.iter().try_for_each(|&(key, size)| require(key, size >= 1, format!("must be at least 1, is {size}")))
}

#[cfg(test)]
mod tests;
