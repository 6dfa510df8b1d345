//! Model families as real training loops on `tch`, written as a user would write them.
//!
//! A workload knows nothing of budgets, plans or recording: those act below it. Every operator that an
//! iteration runs is called through its fallible form, or with its panic caught, so an allocation that the
//! budget refuses comes back as an error.
//!
//! Everything random is drawn from the seed: parameters, batches and dropout. libtorch's own generator is
//! shared by the whole process, so each iteration seeds it anew, and losses do not depend on what else ran
//! before; but two workloads must not run at the same time.
//!
//! A family is one file, which says what its configuration holds and what model it makes, and one line in
//! `family.rs`.

mod autoencoder;
mod bert;
mod densenet;
mod discs;
mod family;
mod gpt;
mod gratings;
mod inception;
mod layers;
mod lstm;
mod mobilenet;
mod pictures;
mod resnet;
mod text;
mod training;
mod transformer;
mod unet;
mod vgg;
mod vit;

pub use autoencoder::AutoencoderConfig;
pub use bert::BertConfig;
pub use densenet::{DensenetArch, DensenetConfig};
pub(crate) use family::ReadFamily;
pub use family::{Family, WorkloadConfig};
pub use gpt::GptConfig;
pub use inception::{InceptionArch, InceptionConfig};
pub use lstm::LstmConfig;
pub use mobilenet::{MobilenetArch, MobilenetConfig};
pub use pictures::PictureConfig;
pub use resnet::{ResnetArch, ResnetConfig};
pub use training::named_variables;
pub use unet::UnetConfig;
pub use vgg::{VggArch, VggConfig};
pub use vit::VitConfig;

use std::num::NonZeroU32;

use serde::Deserialize;
use tch::{Device, TchError, Tensor};

/// How loops are run, whatever their models: the table `[manner]` of a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Manner {
    /// Whether the forward pass is mixed precision in bfloat16.
    pub bf16: bool,
    /// Whether every iteration learns the first batch again, so that making batches takes no part of the time.
    pub one_batch: bool,
    /// Batches whose gradients an iteration adds up before it applies them.
    pub passes: NonZeroU32,
}

impl Default for Manner {
    fn default() -> Self {
        Manner { bf16: false, one_batch: false, passes: NonZeroU32::MIN }
    }
}

/// A training loop to be placed.
pub trait Workload {
    /// Its name in the configuration.
    fn name(&self) -> &str;

    /// The model family it belongs to.
    fn family(&self) -> &str;

    /// Runs one iteration (one optimizer step on fresh batches) and returns the loss, their mean.
    ///
    /// After an error the parameters may be partly updated.
    fn iteration(&mut self) -> Result<f64, TchError>;

    /// Everything that training changes in the model, parameters and buffers, sorted by name.
    ///
    /// The tensors share their storages with the model.
    fn variables(&self) -> Vec<(String, Tensor)>;

    /// The parameters.
    fn trainable(&self) -> Vec<Tensor> {
        self.variables().into_iter().map(|(_, tensor)| tensor).filter(Tensor::requires_grad).collect()
    }
}

impl<W: Workload + ?Sized> Workload for Box<W> {
    fn name(&self) -> &str {
        (**self).name()
    }

    fn family(&self) -> &str {
        (**self).family()
    }

    fn iteration(&mut self) -> Result<f64, TchError> {
        (**self).iteration()
    }

    fn variables(&self) -> Vec<(String, Tensor)> {
        (**self).variables()
    }

    fn trainable(&self) -> Vec<Tensor> {
        (**self).trainable()
    }
}

/// The bytes of every parameter and buffer, by name.
pub fn bits(workload: &dyn Workload) -> Result<Vec<(String, Vec<u8>)>, TchError> {
    let copy = |tensor: Tensor| -> Result<Vec<u8>, TchError> {
        let tensor = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous()?;
        let mut bytes = vec![0; tensor.numel() * tensor.kind().elt_size_in_bytes()];
        tensor.f_copy_data_u8(&mut bytes, tensor.numel())?;
        Ok(bytes)
    };
    workload.variables().into_iter().map(|(name, tensor)| Ok((name, copy(tensor)?))).collect()
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

/// Largest size that is taken. It is far beyond any machine, and products of a few sizes stay within 64 bits.
const SIZE_MAX: i64 = 1 << 14;

/// Refuses the first of `sizes` that no dimension of a model has.
fn require_sizes(sizes: &[(&'static str, i64)]) -> Result<(), Implausible> {
    sizes.iter().try_for_each(|&(key, size)| {
        require(key, (1..=SIZE_MAX).contains(&size), format!("must be between 1 and {SIZE_MAX}, is {size}"))
    })
}

/// Refuses a number of attention heads that features cannot be shared among.
fn require_heads(heads: i64, width: i64) -> Result<(), Implausible> {
    require("heads", width % heads == 0, format!("must divide the width {width}, is {heads}"))
}

/// Refuses a learning rate that teaches nothing.
fn require_learning_rate(learning_rate: f64) -> Result<(), Implausible> {
    let holds = learning_rate > 0.0 && learning_rate.is_finite();
    require("learning_rate", holds, format!("must be above 0, is {learning_rate}"))
}

/// Refuses a share (of dropped features, say) that leaves nothing.
fn require_share(key: &'static str, share: f64) -> Result<(), Implausible> {
    require(key, (0.0..1.0).contains(&share), format!("must be at least 0 and below 1, is {share}"))
}

#[cfg(test)]
pub(crate) mod tests;
