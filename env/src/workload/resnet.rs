//! Residual convolution nets: those of `tch::vision`, and a small one.

use serde::{Deserialize, Serialize};
use tch::nn::{self, Linear, Path};
use tch::vision::resnet;
use tch::{TchError, Tensor};

use super::layers::{NormedConvolution, pool_and_apply};
use super::pictures::{Architecture, Design, Fixed, Free, Net, PictureConfig};

/// The architectures of the family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ResnetArch {
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
pub type ResnetConfig = PictureConfig<ResnetArch>;

impl Architecture for ResnetArch {
    fn design(self) -> Design {
        match self {
            ResnetArch::Cifar => cifar(),
            ResnetArch::Resnet18 => Fixed::design(|at, classes| Box::new(resnet::resnet18(at, classes)), 1.81, 224, 1),
            ResnetArch::Resnet34 => Fixed::design(|at, classes| Box::new(resnet::resnet34(at, classes)), 3.66, 224, 1),
            ResnetArch::Resnet50 => Fixed::design(|at, classes| Box::new(resnet::resnet50(at, classes)), 4.09, 224, 1),
            ResnetArch::Resnet101 => {
                Fixed::design(|at, classes| Box::new(resnet::resnet101(at, classes)), 7.80, 224, 1)
            }
            ResnetArch::Resnet152 => {
                Fixed::design(|at, classes| Box::new(resnet::resnet152(at, classes)), 11.51, 224, 1)
            }
        }
    }
}

/// The small net, whose `width` is the number of channels of the first stage.
fn cifar() -> Design {
    Design::Free(Free {
        times: 6,
        plus: 2,
        least_image_size: 1,
        build: |at, depth, width, classes| Box::new(SmallResnet::new(at, depth, width, classes)),
        // Each stage has a quarter of the pixels and twice the channels of the one before it.
        multiply_adds: |depth, width, size| depth * 9.0 * width * width * size * size,
    })
}

/// The residual net for small pictures, with batch normalisation and in-place ReLU.
///
/// Follows "Deep Residual Learning for Image Recognition" (He et al. 2015), section 4.2, "CIFAR-10 and
/// Analysis": 6n + 2 weighted layers in three stages. Two deviations: where the shape changes the shortcut
/// is a 1×1 convolution (their option B) instead of padding, and the width of the first stage is free.
struct SmallResnet {
    stem: NormedConvolution,
    blocks: Vec<Block>,
    head: Linear,
}

impl SmallResnet {
    fn new(at: &Path, depth: i64, width: i64, classes: i64) -> Self {
        let mut channels = width;
        let mut blocks = Vec::new();
        for stage in 0..3 {
            for block in 0..(depth - 2) / 6 {
                let outputs = width << stage;
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                blocks.push(Block::new(at / format!("stage{stage}") / block, channels, outputs, stride));
                channels = outputs;
            }
        }
        SmallResnet {
            stem: NormedConvolution::new(at / "stem", 3, width, 3, 1),
            blocks,
            head: nn::linear(at / "head", channels, classes, Default::default()),
        }
    }
}

impl Net for SmallResnet {
    fn forward(&self, pictures: &Tensor) -> Result<Tensor, TchError> {
        let mut hidden = self.stem.forward(pictures)?.f_relu_()?;
        for block in &self.blocks {
            hidden = block.forward(&hidden)?;
        }
        pool_and_apply(&self.head, &hidden)
    }
}

/// Two convolutions and a shortcut around them.
struct Block {
    first: NormedConvolution,
    second: NormedConvolution,
    shortcut: Option<NormedConvolution>,
}

impl Block {
    fn new(at: Path, inputs: i64, outputs: i64, stride: i64) -> Self {
        let changes_shape = inputs != outputs || stride != 1;
        Block {
            first: NormedConvolution::new(&at / "first", inputs, outputs, 3, stride),
            second: NormedConvolution::new(&at / "second", outputs, outputs, 3, 1),
            shortcut: changes_shape.then(|| NormedConvolution::new(&at / "shortcut", inputs, outputs, 1, stride)),
        }
    }

    fn forward(&self, inputs: &Tensor) -> Result<Tensor, TchError> {
        let hidden = self.first.forward(inputs)?.f_relu_()?;
        let mut hidden = self.second.forward(&hidden)?;
        let mut sum = match &self.shortcut {
            Some(shortcut) => hidden.f_add_(&shortcut.forward(inputs)?)?,
            None => hidden.f_add_(inputs)?,
        };
        sum.f_relu_()
    }
}
