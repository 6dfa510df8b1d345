//! Residual convolution nets that learn the direction of stripes: those of `tch::vision`, and a small one.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use tch::nn::{self, ModuleT, Path, VarStore};
use tch::vision::resnet;
use tch::{Device, Reduction, TchError, Tensor};

use super::cifar::CifarNet;
use super::gratings::Gratings;
use super::training::{Training, reseed_libtorch, seeded};
use super::{Implausible, Workload, require, require_positive};

/// The architectures of the family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Arch {
    /// The net for small pictures, of free depth and width.
    Cifar,
    /// `tch::vision`'s ResNet-18.
    Resnet18,
    /// `tch::vision`'s ResNet-34.
    Resnet34,
    /// `tch::vision`'s ResNet-50.
    Resnet50,
    /// `tch::vision`'s ResNet-101.
    Resnet101,
    /// `tch::vision`'s ResNet-152.
    Resnet152,
}

/// The size of a `resnet` workload and how it is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResnetConfig {
    /// The architecture.
    pub arch: Arch,
    /// Weighted layers, 6n + 2; of `cifar` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depth: Option<i64>,
    /// Channels of the first stage; of `cifar` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub width: Option<i64>,
    /// Classes to tell apart.
    pub classes: i64,
    /// Pixels along a side of a picture.
    pub image_size: i64,
    /// Pictures in a batch.
    pub batch: i64,
    /// Learning rate of stochastic gradient descent.
    pub learning_rate: f64,
    /// Its momentum.
    pub momentum: f64,
}

impl ResnetConfig {
    pub(super) fn validate(&self) -> Result<(), Implausible> {
        let is_cifar = self.arch == Arch::Cifar;
        for (key, given) in [("depth", self.depth), ("width", self.width)] {
            require(key, given.is_some() || !is_cifar, "must be given for arch \"cifar\"")?;
            require(key, given.is_none() || is_cifar, "is for arch \"cifar\" only")?;
            require_positive(&[(key, given.unwrap_or(1))])?;
        }
        if let Some(depth) = self.depth {
            require("depth", depth >= 8 && depth % 6 == 2, format!("must be 8, 14, 20, 26 and so on, is {depth}"))?;
        }
        require_positive(&[("classes", self.classes), ("image_size", self.image_size)])?;
        // Deep stages may come down to one pixel, and one value has no variance to normalise by.
        require("batch", self.batch >= 2, format!("must be at least 2, is {}", self.batch))?;
        require("learning_rate", self.learning_rate > 0.0, format!("must be above 0, is {}", self.learning_rate))?;
        let momentum = self.momentum;
        require("momentum", (0.0..1.0).contains(&momentum), format!("must be at least 0 and below 1, is {momentum}"))
    }
}

/// A `resnet` workload, trained by stochastic gradient descent with momentum.
pub(super) struct Resnet {
    name: String,
    config: ResnetConfig,
    device: Device,
    gratings: Gratings,
    draw: ChaCha8Rng,
    model: Model,
    training: Training,
}

impl Resnet {
    pub fn new(config: &ResnetConfig, name: &str, device: Device, seed: u64) -> Result<Self, TchError> {
        let draw = seeded(seed);
        let variables = VarStore::new(device);
        let model = Model::new(variables.root(), config);
        let training = Training::new(variables, nn::sgd(config.momentum, 0.0, 0.0, false), config.learning_rate)?;
        let gratings = Gratings::new(config.classes, config.image_size);
        Ok(Resnet { name: name.to_owned(), config: config.clone(), device, gratings, draw, model, training })
    }
}

impl Workload for Resnet {
    fn name(&self) -> &str {
        &self.name
    }

    fn family(&self) -> &str {
        "resnet"
    }

    fn iteration(&mut self) -> Result<f64, TchError> {
        reseed_libtorch(&mut self.draw);
        let ResnetConfig { batch, image_size, .. } = self.config;
        let cut = self.gratings.cut(&mut self.draw, batch as usize);
        let shape = [batch, 3, image_size, image_size];
        let pictures = Tensor::f_from_slice(&cut.pixels)?.f_view(shape)?.f_to_device(self.device)?;
        let labels = Tensor::f_from_slice(&cut.labels)?.f_to_device(self.device)?;

        self.training.zero_grad()?;
        let logits = self.model.forward(&pictures)?;
        let loss = logits.f_cross_entropy_loss(&labels, None::<&Tensor>, Reduction::Mean, -100, 0.0)?;
        self.training.backward_step(&loss)
    }

    fn variables(&self) -> Vec<(String, Tensor)> {
        self.training.variables()
    }

    fn trainable(&self) -> Vec<Tensor> {
        self.training.trainable()
    }
}

/// The net of either origin.
enum Model {
    Cifar(CifarNet),
    Vision(Box<dyn ModuleT>),
}

impl Model {
    fn new(at: Path, config: &ResnetConfig) -> Self {
        let classes = config.classes;
        Model::Vision(match config.arch {
            Arch::Cifar => {
                let (depth, width) = (config.depth.unwrap_or(20), config.width.unwrap_or(16));
                return Model::Cifar(CifarNet::new(at, depth, width, classes));
            }
            Arch::Resnet18 => Box::new(resnet::resnet18(&at, classes)),
            Arch::Resnet34 => Box::new(resnet::resnet34(&at, classes)),
            Arch::Resnet50 => Box::new(resnet::resnet50(&at, classes)),
            Arch::Resnet101 => Box::new(resnet::resnet101(&at, classes)),
            Arch::Resnet152 => Box::new(resnet::resnet152(&at, classes)),
        })
    }

    /// Maps pictures `[batch, 3, size, size]` to logits `[batch, classes]`.
    fn forward(&self, pictures: &Tensor) -> Result<Tensor, TchError> {
        match self {
            Model::Cifar(net) => net.forward(pictures),
            // Modules of tch panic where an operator fails. Nothing of ours is left half-changed by that.
            Model::Vision(net) => catch_unwind(AssertUnwindSafe(|| net.forward_t(pictures, true)))
                .map_err(|panic| TchError::Torch(panic_message(&*panic))),
        }
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("the model panicked").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_operator_in_a_vision_model_is_an_error() {
        let config = ResnetConfig {
            arch: Arch::Resnet18,
            depth: None,
            width: None,
            classes: 10,
            image_size: 32,
            batch: 2,
            learning_rate: 0.1,
            momentum: 0.9,
        };
        let variables = VarStore::new(Device::Cpu);
        let model = Model::new(variables.root(), &config);
        let grey = Tensor::zeros([2, 1, 32, 32], (tch::Kind::Float, Device::Cpu));
        let error = model.forward(&grey).unwrap_err().to_string();
        assert!(error.contains("channels"), "{error}");
    }
}
