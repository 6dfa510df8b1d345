//! The training loop that all families of picture classifiers share: nets of `tch::vision`, and small ones of free
//! depth and width.

use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use tch::nn::{self, ModuleT, Path, VarStore};
use tch::{Device, TchError, Tensor, no_grad};

use super::gratings::Gratings;
use super::layers::cross_entropy;
use super::training::{Batch, Member, Task, Training, caught};
use super::{Implausible, require, require_learning_rate, require_share, require_sizes};

/// The size of a classifier of pictures and how it is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PictureConfig<A> {
    /// The architecture.
    pub arch: A,
    /// Weighted layers; of an architecture of free depth and width only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depth: Option<i64>,
    /// Channels that the other layers' channels are multiples of; of an architecture of free depth and width only.
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

/// The architectures of a family.
pub(super) trait Architecture: Copy {
    /// What this one is made of.
    fn design(self) -> Design;
}

/// What an architecture is made of.
pub(super) enum Design {
    /// A net whose depth and width are given.
    Free(Free),
    /// A net of `tch::vision`, whose depth and width are fixed.
    Fixed(Fixed),
}

/// A net whose depth and width are given.
pub(super) struct Free {
    /// The net has this many weighted layers for a whole number n of at least one: `times` × n + `plus`.
    pub times: i64,
    /// See `times`.
    pub plus: i64,
    /// Fewest pixels along a side of a picture.
    pub least_image_size: i64,
    /// Makes the net from depth, width and classes.
    pub build: fn(&Path, i64, i64, i64) -> Box<dyn Net>,
    /// Multiply-adds of the forward pass for one picture, from depth, width and pixels along a side.
    pub multiply_adds: fn(f64, f64, f64) -> f64,
}

/// A net of `tch::vision`.
pub(super) struct Fixed {
    /// Makes the net for so many classes.
    pub build: fn(&Path, i64) -> Box<dyn ModuleT>,
    /// Multiply-adds of the forward pass for one picture, in thousands of millions, and that picture's pixels along a
    /// side, as torchvision's documentation gives them.
    pub multiply_adds: (f64, i64),
    /// Fewest and most pixels along a side of a picture.
    pub image_size: (i64, i64),
}

impl Fixed {
    /// A net for pictures of `least` or more pixels along a side, with `giga_multiply_adds` at `size`.
    pub fn design(build: fn(&Path, i64) -> Box<dyn ModuleT>, giga_multiply_adds: f64, size: i64, least: i64) -> Design {
        Design::Fixed(Fixed { build, multiply_adds: (giga_multiply_adds, size), image_size: (least, super::SIZE_MAX) })
    }
}

/// A net that maps pictures `[batch, 3, size, size]` to logits `[batch, classes]`, in training mode.
pub(super) trait Net {
    /// The logits.
    fn forward(&self, pictures: &Tensor) -> Result<Tensor, TchError>;
}

/// A net of `tch::vision`.
struct Vision(Box<dyn ModuleT>);

impl Net for Vision {
    fn forward(&self, pictures: &Tensor) -> Result<Tensor, TchError> {
        caught(|| self.0.forward_t(pictures, true))
    }
}

/// `tch` draws the scale of batch normalisation between 0 and 1; the papers and everybody else start at 1, and deep
/// nets learn little otherwise. No other weight has one dimension.
fn start_norms_at_one(variables: &VarStore) -> Result<(), TchError> {
    for (name, mut weight) in variables.variables() {
        if name.ends_with("weight") && weight.dim() == 1 {
            let _same_tensor = no_grad(|| weight.f_fill_(1.0))?;
        }
    }
    Ok(())
}

impl<A: Architecture> Member for PictureConfig<A> {
    fn validate(&self) -> Result<(), Implausible> {
        let (least, most) = match self.arch.design() {
            Design::Free(free) => {
                for (key, given) in [("depth", self.depth), ("width", self.width)] {
                    require(key, given.is_some(), "must be given for an architecture of free depth and width")?;
                    require_sizes(&[(key, given.unwrap_or(1))])?;
                }
                let (times, plus, depth) = (free.times, free.plus, self.depth.unwrap_or(0));
                let holds = depth > plus && (depth - plus) % times == 0;
                let first = times + plus;
                let rule = format!("must be {first}, {}, {} and so on, is {depth}", first + times, first + 2 * times);
                require("depth", holds, rule)?;
                (free.least_image_size, super::SIZE_MAX)
            }
            Design::Fixed(fixed) => {
                for (key, given) in [("depth", self.depth), ("width", self.width)] {
                    require(key, given.is_none(), "is for an architecture of free depth and width only")?;
                }
                fixed.image_size
            }
        };
        let size = self.image_size;
        let rule = format!("must be between {least} and {most} for this architecture, is {size}");
        require("image_size", (least..=most).contains(&size), rule)?;
        require_sizes(&[("classes", self.classes), ("batch", self.batch)])?;
        // Deep stages may come down to one pixel, and one value has no variance to normalise by.
        require("batch", self.batch >= 2, format!("must be at least 2, is {}", self.batch))?;
        require_share("momentum", self.momentum)?;
        require_learning_rate(self.learning_rate)
    }

    fn flops(&self) -> f64 {
        let size = self.image_size as f64;
        let multiply_adds = match self.arch.design() {
            Design::Free(free) => {
                let [depth, width] = [self.depth, self.width].map(|size| size.unwrap_or(1) as f64);
                (free.multiply_adds)(depth, width, size)
            }
            Design::Fixed(Fixed { multiply_adds: (giga, at_size), .. }) => 1e9 * giga * (size / at_size as f64).powi(2),
        };
        // A multiplication and an addition each; the backward pass is twice the forward pass.
        3.0 * 2.0 * multiply_adds * self.batch as f64
    }

    fn task(&self, variables: &VarStore) -> Result<Box<dyn Task>, TchError> {
        let net: Box<dyn Net> = match self.arch.design() {
            Design::Free(free) => {
                let [depth, width] = [self.depth, self.width].map(|size| size.expect("validation asks for it"));
                (free.build)(&variables.root(), depth, width, self.classes)
            }
            Design::Fixed(fixed) => {
                let net = (fixed.build)(&variables.root(), self.classes);
                start_norms_at_one(variables)?;
                Box::new(Vision(net))
            }
        };
        let gratings = Gratings::new(self.classes, self.image_size);
        Ok(Box::new(Classifier { batch: self.batch, gratings, net }))
    }

    fn training(&self, variables: VarStore) -> Result<Training, TchError> {
        Training::new(variables, nn::sgd(self.momentum, 0.0, 0.0, false), self.learning_rate)
    }
}

/// The class of every picture.
struct Classifier {
    batch: i64,
    gratings: Gratings,
    net: Box<dyn Net>,
}

impl Task for Classifier {
    fn batch(&self, draw: &mut ChaCha8Rng, device: Device) -> Result<Batch, TchError> {
        self.gratings.batch(draw, self.batch, device)
    }

    fn loss(&self, Batch { inputs, targets, .. }: Batch) -> Result<Tensor, TchError> {
        cross_entropy(&self.net.forward(&inputs)?, &targets)
    }
}

#[cfg(test)]
mod tests {
    use super::super::resnet::ResnetArch;
    use super::*;

    #[test]
    fn a_failing_operator_in_a_vision_model_is_an_error() {
        let Design::Fixed(fixed) = ResnetArch::Resnet18.design() else { unreachable!("it is tch's") };
        let variables = VarStore::new(Device::Cpu);
        let net = Vision((fixed.build)(&variables.root(), 10));
        let grey = Tensor::zeros([2, 1, 32, 32], (tch::Kind::Float, Device::Cpu));
        let error = net.forward(&grey).unwrap_err().to_string();
        assert!(error.contains("channels"), "{error}");
    }
}
