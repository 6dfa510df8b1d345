//! A convolutional autoencoder whose loss holds a gradient, so that the backward pass runs through a backward pass.
//!
//! The penalty is that of "Improving Generalization Performance Using Double Backpropagation" (Drucker and LeCun 1992):
//! the squared gradient of the error with respect to the input. Here the error is that of reconstruction.

use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use tch::nn::{self, Path, VarStore};
use tch::{Device, Kind, Reduction, TchError, Tensor};

use super::gratings::Gratings;
use super::layers::{Convolution, Doubling};
use super::training::{Batch, Member, Task, Training};
use super::{Implausible, require, require_learning_rate, require_sizes};

/// The size of an `autoencoder` workload and how it is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AutoencoderConfig {
    /// How often the picture's side is halved; the picture's side is a multiple of two to this power.
    pub depth: i64,
    /// Channels of the first stage; they double where the side is halved again.
    pub width: i64,
    /// Pixels along a side of a picture.
    pub image_size: i64,
    /// Pictures in a batch.
    pub batch: i64,
    /// Weight of the squared gradient in the loss.
    pub penalty: f64,
    /// Learning rate of Adam.
    pub learning_rate: f64,
}

impl Member for AutoencoderConfig {
    fn validate(&self) -> Result<(), Implausible> {
        let AutoencoderConfig { depth, width, image_size, batch, penalty, learning_rate } = *self;
        require("depth", (1..=8).contains(&depth), format!("must be between 1 and 8, is {depth}"))?;
        require_sizes(&[("width", width), ("image_size", image_size), ("batch", batch)])?;
        let multiple = 1 << depth;
        let rule = format!("must be a multiple of {multiple} at depth {depth}, is {image_size}");
        require("image_size", image_size % multiple == 0, rule)?;
        let rule = format!("must be at least 0, is {penalty}");
        require("penalty", penalty >= 0.0 && penalty.is_finite(), rule)?;
        require_learning_rate(learning_rate)
    }

    /// Three passes for a gradient with respect to the input and all weights, and as many for each of two again through
    /// the first of these gradients.
    fn flops(&self) -> f64 {
        let [depth, width, size, batch] = [self.depth, self.width, self.image_size, self.batch].map(|size| size as f64);
        // Stages but the first: a kernel of 3 × 3 down and of 4 × 4, a quarter of it at each pixel, up.
        let forward =
            size * size / 4.0 * (width * 3.0 * 25.0 + (depth - 1.0) * width * width * (9.0 / 2.0 + 16.0 / 2.0));
        2.0 * batch * 9.0 * forward
    }

    fn task(&self, variables: &VarStore) -> Result<Box<dyn Task>, TchError> {
        Ok(Box::new(Autoencoder {
            batch: self.batch,
            penalty: self.penalty,
            gratings: Gratings::new(CLASSES, self.image_size),
            model: Model::new(&variables.root(), self.depth, self.width),
        }))
    }

    fn training(&self, variables: VarStore) -> Result<Training, TchError> {
        Training::new(variables, nn::Adam::default(), self.learning_rate)
    }
}

/// Directions that stripes have.
const CLASSES: i64 = 10;

/// Every picture from itself.
struct Autoencoder {
    batch: i64,
    penalty: f64,
    gratings: Gratings,
    model: Model,
}

impl Task for Autoencoder {
    fn batch(&self, draw: &mut ChaCha8Rng, device: Device) -> Result<Batch, TchError> {
        let Batch { inputs, .. } = self.gratings.batch(draw, self.batch, device)?;
        Ok(Batch::new(inputs.shallow_clone(), inputs))
    }

    fn loss(&self, Batch { inputs, .. }: Batch) -> Result<Tensor, TchError> {
        // A tensor of its own, so that no gradient gathers in a batch that is kept. It is the target as well.
        let pictures = inputs.f_detach()?.f_set_requires_grad(true)?;
        let made = self.model.forward(&pictures)?;
        let error = made.f_mse_loss(&pictures, Reduction::Sum)?;
        let gradients = Tensor::f_run_backward(&[&error], &[&pictures], true, true)?;
        let [gradient] = &gradients[..] else { unreachable!("one input has one gradient") };
        let penalty = gradient.f_square()?.f_mean(Kind::Float)?.f_mul_scalar(self.penalty)?;
        error.f_div_scalar(pictures.numel() as f64)?.f_add(&penalty)
    }
}

/// Convolutions down, and transposed convolutions up again.
struct Model {
    down: Vec<Convolution>,
    up: Vec<Doubling>,
}

impl Model {
    fn new(at: &Path, depth: i64, width: i64) -> Self {
        let channels = |stage: i64| if stage == 0 { 3 } else { width << (stage - 1) };
        let down =
            |stage: i64| Convolution::new(at / format!("down{stage}"), channels(stage), channels(stage + 1), 3, 2);
        let up = |stage: i64| Doubling::new(at / format!("up{stage}"), channels(stage + 1), channels(stage), 4);
        Model { down: (0..depth).map(down).collect(), up: (0..depth).rev().map(up).collect() }
    }

    /// `[batch, 3, size, size]` to the same shape. The activation is smooth, because its second derivative counts.
    fn forward(&self, pictures: &Tensor) -> Result<Tensor, TchError> {
        let mut hidden = pictures.shallow_clone();
        for convolution in &self.down {
            hidden = convolution.forward(&hidden)?.f_tanh()?;
        }
        for (number, doubling) in self.up.iter().enumerate() {
            hidden = doubling.forward(&hidden)?;
            if number + 1 < self.up.len() {
                hidden = hidden.f_tanh()?;
            }
        }
        Ok(hidden)
    }
}
