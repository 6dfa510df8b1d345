//! A segmentation net that learns which pixels of a noisy picture are in a disc.
//!
//! Follows "U-Net: Convolutional Networks for Biomedical Image Segmentation" (Ronneberger et al. 2015), section 2,
//! "Network Architecture". Deviations: convolutions keep the size of their pictures, so that nothing is cropped, and
//! are followed by batch normalisation; depth and width are free.

use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use tch::nn::{self, Path, VarStore};
use tch::{Device, TchError, Tensor};

use super::discs::discs;
use super::layers::{Convolution, Doubling, NormedConvolution, cross_entropy, halve};
use super::training::{Batch, Member, Task, Training};
use super::{Implausible, require, require_learning_rate, require_sizes};

/// The size of a `unet` workload and how it is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnetConfig {
    /// How often the picture's side is halved; the picture's side is a multiple of two to this power.
    pub depth: i64,
    /// Channels at full size; they double where the side is halved.
    pub width: i64,
    /// Pixels along a side of a picture.
    pub image_size: i64,
    /// Pictures in a batch.
    pub batch: i64,
    /// Learning rate of Adam.
    pub learning_rate: f64,
}

impl Member for UnetConfig {
    fn validate(&self) -> Result<(), Implausible> {
        let UnetConfig { depth, width, image_size, batch, learning_rate } = *self;
        require("depth", (1..=8).contains(&depth), format!("must be between 1 and 8, is {depth}"))?;
        require_sizes(&[("width", width), ("image_size", image_size), ("batch", batch)])?;
        let multiple = 1 << depth;
        let rule = format!("must be a multiple of {multiple} at depth {depth}, is {image_size}");
        require("image_size", image_size % multiple == 0, rule)?;
        // The deepest stage may come down to one pixel, and one value has no variance to normalise by.
        require("batch", batch >= 2, format!("must be at least 2, is {batch}"))?;
        require_learning_rate(learning_rate)
    }

    /// Convolutions of every stage: with w channels, 3 × w²/2 × 9 on the way down, 3 × w² × 9 and the doubling on the
    /// way up. Each stage has a quarter of the pixels and four times the products of channels, so all cost the same.
    fn flops(&self) -> f64 {
        let [depth, width, size, batch] = [self.depth, self.width, self.image_size, self.batch].map(|size| size as f64);
        let stage = size * size * width * width * (13.5 + 27.0 + 2.0);
        3.0 * 2.0 * batch * (depth + 0.3) * stage
    }

    fn task(&self, variables: &VarStore) -> Result<Box<dyn Task>, TchError> {
        Ok(Box::new(Unet { config: self.clone(), model: Model::new(&variables.root(), self.depth, self.width) }))
    }

    fn training(&self, variables: VarStore) -> Result<Training, TchError> {
        Training::new(variables, nn::Adam::default(), self.learning_rate)
    }
}

/// The mask of every picture.
struct Unet {
    config: UnetConfig,
    model: Model,
}

impl Task for Unet {
    fn batch(&self, draw: &mut ChaCha8Rng, device: Device) -> Result<Batch, TchError> {
        discs(draw, self.config.batch, self.config.image_size, device)
    }

    fn loss(&self, Batch { inputs, targets, .. }: Batch) -> Result<Tensor, TchError> {
        cross_entropy(&self.model.forward(&inputs)?, &targets)
    }
}

/// The way down, the bottom, the way up.
struct Model {
    down: Vec<Pair>,
    bottom: Pair,
    /// From the bottom up.
    up: Vec<(Doubling, Pair)>,
    head: Convolution,
}

impl Model {
    fn new(at: &Path, depth: i64, width: i64) -> Self {
        let inputs = |stage: i64| if stage == 0 { 1 } else { width << (stage - 1) };
        let down = |stage: i64| Pair::new(at / format!("down{stage}"), inputs(stage), width << stage);
        let up = |stage: i64| {
            let (at, channels) = (at / format!("up{stage}"), width << stage);
            (
                Doubling::new(&at / "doubling", 2 * channels, channels, 2),
                Pair::new(&at / "pair", 2 * channels, channels),
            )
        };
        Model {
            down: (0..depth).map(down).collect(),
            bottom: Pair::new(at / "bottom", inputs(depth), width << depth),
            up: (0..depth).rev().map(up).collect(),
            head: Convolution::new(at / "head", width, 2, 1, 1),
        }
    }

    /// Maps pictures `[batch, 1, size, size]` to logits `[batch, 2, size, size]`.
    fn forward(&self, pictures: &Tensor) -> Result<Tensor, TchError> {
        let mut across = Vec::new();
        let mut hidden = pictures.shallow_clone();
        for pair in &self.down {
            let made = pair.forward(&hidden)?;
            hidden = halve(&made)?;
            across.push(made);
        }
        hidden = self.bottom.forward(&hidden)?;
        for ((doubling, pair), across) in self.up.iter().zip(across.into_iter().rev()) {
            hidden = pair.forward(&Tensor::f_cat(&[across, doubling.forward(&hidden)?], 1)?)?;
        }
        self.head.forward(&hidden)
    }
}

/// Two convolutions.
struct Pair([NormedConvolution; 2]);

impl Pair {
    fn new(at: Path, inputs: i64, outputs: i64) -> Self {
        Pair([
            NormedConvolution::new(&at / "first", inputs, outputs, 3, 1),
            NormedConvolution::new(&at / "second", outputs, outputs, 3, 1),
        ])
    }

    fn forward(&self, pictures: &Tensor) -> Result<Tensor, TchError> {
        let [first, second] = &self.0;
        second.forward(&first.forward(pictures)?.f_relu_()?)?.f_relu_()
    }
}
