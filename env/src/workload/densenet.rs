//! Densely connected convolution nets: those of `tch::vision`, and a small one.
//!
//! The small one is DenseNet-BC of "Densely Connected Convolutional Networks" (Huang et al. 2017), section 3, as the
//! paragraph "Implementation Details" makes it for CIFAR: three blocks, of 6n + 4 weighted layers in all.

use serde::{Deserialize, Serialize};
use tch::nn::{self, Linear, Path};
use tch::vision::densenet;
use tch::{TchError, Tensor};

use super::layers::{BatchNorm, Convolution, pool_and_apply};
use super::pictures::{Architecture, Design, Fixed, Free, Net, PictureConfig};

/// The architectures of the family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DensenetArch {
    /// The net for small pictures, of free depth, 6n + 4, and width: the growth rate.
    Small,
    /// `tch::vision`'s DenseNet-121.
    Densenet121,
    /// `tch::vision`'s DenseNet-161.
    Densenet161,
    /// `tch::vision`'s DenseNet-169.
    Densenet169,
    /// `tch::vision`'s DenseNet-201.
    Densenet201,
}

/// The size of a `densenet` workload and how it is trained.
pub type DensenetConfig = PictureConfig<DensenetArch>;

/// Pictures of `tch::vision`'s nets come down to 7 pixels along a side.
const IMAGE_SIZE: (i64, i64) = (224, 252);

impl Architecture for DensenetArch {
    fn design(self) -> Design {
        let fixed = |build, giga| Design::Fixed(Fixed { build, multiply_adds: (giga, 224), image_size: IMAGE_SIZE });
        match self {
            DensenetArch::Small => Design::Free(Free {
                times: 6,
                plus: 4,
                least_image_size: 4,
                build: |at, depth, width, classes| Box::new(SmallDensenet::new(at, depth, width, classes)),
                multiply_adds: small_multiply_adds,
            }),
            DensenetArch::Densenet121 => fixed(|at, classes| Box::new(densenet::densenet121(at, classes)), 2.83),
            DensenetArch::Densenet161 => fixed(|at, classes| Box::new(densenet::densenet161(at, classes)), 7.73),
            DensenetArch::Densenet169 => fixed(|at, classes| Box::new(densenet::densenet169(at, classes)), 3.36),
            DensenetArch::Densenet201 => fixed(|at, classes| Box::new(densenet::densenet201(at, classes)), 4.29),
        }
    }
}

/// A dense layer's narrow convolution has this many times the growth rate's channels.
const BOTTLENECK: i64 = 4;

/// Three dense blocks, with transitions between them.
struct SmallDensenet {
    stem: Convolution,
    blocks: Vec<Vec<DenseLayer>>,
    /// Halve channels and pixels along a side.
    transitions: Vec<NormedInput>,
    norm: BatchNorm,
    head: Linear,
}

impl SmallDensenet {
    fn new(at: &Path, depth: i64, growth: i64, classes: i64) -> Self {
        let layers = (depth - 4) / 6;
        let mut channels = 2 * growth;
        let stem = Convolution::new(at / "stem", 3, channels, 3, 1);
        let (mut blocks, mut transitions) = (Vec::new(), Vec::new());
        for block in 0..3 {
            if block > 0 {
                transitions.push(NormedInput::new(at / format!("transition{block}"), channels, channels / 2, 1));
                channels /= 2;
            }
            let at = at / format!("block{block}");
            blocks.push(
                (0..layers).map(|layer| DenseLayer::new(&at / layer, channels + layer * growth, growth)).collect(),
            );
            channels += layers * growth;
        }
        let head = nn::linear(at / "head", channels, classes, Default::default());
        SmallDensenet { stem, blocks, transitions, norm: BatchNorm::new(at / "norm", channels), head }
    }
}

impl Net for SmallDensenet {
    fn forward(&self, pictures: &Tensor) -> Result<Tensor, TchError> {
        let mut hidden = self.stem.forward(pictures)?;
        for (number, block) in self.blocks.iter().enumerate() {
            if number > 0 {
                let narrow = self.transitions[number - 1].forward(&hidden)?;
                hidden = narrow.f_avg_pool2d([2, 2], [2, 2], [0, 0], false, true, None)?;
            }
            for layer in block {
                hidden = Tensor::f_cat(&[&hidden, &layer.forward(&hidden)?], 1)?;
            }
        }
        pool_and_apply(&self.head, &self.norm.forward(&hidden)?.f_relu_()?)
    }
}

/// A narrow convolution and one that adds to the channels.
struct DenseLayer {
    narrow: NormedInput,
    grow: NormedInput,
}

impl DenseLayer {
    fn new(at: Path, channels: i64, growth: i64) -> Self {
        DenseLayer {
            narrow: NormedInput::new(&at / "narrow", channels, BOTTLENECK * growth, 1),
            grow: NormedInput::new(&at / "grow", BOTTLENECK * growth, growth, 3),
        }
    }

    /// The new channels.
    fn forward(&self, hidden: &Tensor) -> Result<Tensor, TchError> {
        self.grow.forward(&self.narrow.forward(hidden)?)
    }
}

/// A convolution of what batch normalisation and ReLU make of its input.
struct NormedInput {
    norm: BatchNorm,
    convolution: Convolution,
}

impl NormedInput {
    fn new(at: Path, inputs: i64, outputs: i64, kernel: i64) -> Self {
        NormedInput {
            norm: BatchNorm::new(&at / "norm", inputs),
            convolution: Convolution::new(&at / "convolution", inputs, outputs, kernel, 1),
        }
    }

    fn forward(&self, inputs: &Tensor) -> Result<Tensor, TchError> {
        self.convolution.forward(&self.norm.forward(inputs)?.f_relu_()?)
    }
}

/// Dense layers alone, with the channels that each block starts from.
fn small_multiply_adds(depth: f64, growth: f64, size: f64) -> f64 {
    let (layers, narrow) = ((depth - 4.0) / 6.0, BOTTLENECK as f64 * growth);
    let mut channels = 2.0 * growth;
    let mut sum = 0.0;
    for block in 0..3 {
        let pixels = size * size / f64::from(1 << (2 * block));
        let mean_inputs = channels + growth * (layers - 1.0) / 2.0;
        sum += pixels * layers * narrow * (mean_inputs + 9.0 * growth);
        channels = (channels + layers * growth) / 2.0;
    }
    sum
}
