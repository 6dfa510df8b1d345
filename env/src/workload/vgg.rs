//! Plain convolution nets, without branches or connections across: those of `tch::vision`, and a small one.
//!
//! The small one follows "Very Deep Convolutional Networks for Large-Scale Image Recognition" (Simonyan and Zisserman
//! 2015), section 2.1, "Architecture". Deviations: three stages instead of five, batch normalisation, and one linear
//! layer instead of three, because those hold nine tenths of all parameters.

use serde::{Deserialize, Serialize};
use tch::nn::{self, Linear, Path};
use tch::vision::{alexnet, vgg};
use tch::{TchError, Tensor};

use super::layers::{NormedConvolution, halve, pool_and_apply};
use super::pictures::{Architecture, Design, Fixed, Free, Net, PictureConfig};

/// The architectures of the family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VggArch {
    /// The net for small pictures, of free depth, 3n + 1, and width.
    Small,
    /// `tch::vision`'s AlexNet.
    Alexnet,
    /// `tch::vision`'s VGG-11.
    Vgg11,
    /// `tch::vision`'s VGG-13.
    Vgg13,
    /// `tch::vision`'s VGG-16.
    Vgg16,
    /// `tch::vision`'s VGG-19.
    Vgg19,
}

/// The size of a `vgg` workload and how it is trained.
pub type VggConfig = PictureConfig<VggArch>;

/// Pictures of `tch::vision`'s VGG come down to 7 pixels along a side.
const IMAGE_SIZE: (i64, i64) = (224, 255);

impl Architecture for VggArch {
    fn design(self) -> Design {
        let fixed = |build, giga| Design::Fixed(Fixed { build, multiply_adds: (giga, 224), image_size: IMAGE_SIZE });
        match self {
            VggArch::Small => Design::Free(Free {
                times: 3,
                plus: 1,
                least_image_size: 8,
                build: |at, depth, width, classes| Box::new(SmallVgg::new(at, depth, width, classes)),
                multiply_adds: |depth, width, size| depth * 9.0 * width * width * size * size,
            }),
            VggArch::Alexnet => Fixed::design(|at, classes| Box::new(alexnet::alexnet(at, classes)), 0.71, 224, 127),
            VggArch::Vgg11 => fixed(|at, classes| Box::new(vgg::vgg11(at, classes)), 7.61),
            VggArch::Vgg13 => fixed(|at, classes| Box::new(vgg::vgg13(at, classes)), 11.31),
            VggArch::Vgg16 => fixed(|at, classes| Box::new(vgg::vgg16(at, classes)), 15.47),
            VggArch::Vgg19 => fixed(|at, classes| Box::new(vgg::vgg19(at, classes)), 19.63),
        }
    }
}

/// Three stages of convolutions, each with twice the channels of the one before, and half the pixels along a side.
struct SmallVgg {
    stages: Vec<Vec<NormedConvolution>>,
    head: Linear,
}

impl SmallVgg {
    fn new(at: &Path, depth: i64, width: i64, classes: i64) -> Self {
        let mut channels = 3;
        let mut convolution = |stage: i64, layer: i64| {
            let inputs = std::mem::replace(&mut channels, width << stage);
            NormedConvolution::new(at / format!("stage{stage}") / layer, inputs, width << stage, 3, 1)
        };
        let stages =
            (0..3).map(|stage| (0..(depth - 1) / 3).map(|layer| convolution(stage, layer)).collect()).collect();
        SmallVgg { stages, head: nn::linear(at / "head", 4 * width, classes, Default::default()) }
    }
}

impl Net for SmallVgg {
    fn forward(&self, pictures: &Tensor) -> Result<Tensor, TchError> {
        let mut hidden = pictures.shallow_clone();
        for stage in &self.stages {
            for convolution in stage {
                hidden = convolution.forward(&hidden)?.f_relu_()?;
            }
            hidden = halve(&hidden)?;
        }
        pool_and_apply(&self.head, &hidden)
    }
}
