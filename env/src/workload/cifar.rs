//! The residual net for small pictures, with batch normalisation and in-place ReLU.
//!
//! Follows "Deep Residual Learning for Image Recognition" (He et al. 2015), section 4.2, "CIFAR-10 and
//! Analysis": 6n + 2 weighted layers in three stages. Two deviations: where the shape changes the shortcut
//! is a 1×1 convolution (their option B) instead of padding, and the width of the first stage is free.

use tch::nn::{self, Linear, Path};
use tch::{TchError, Tensor};

use super::layers::{NormedConvolution, pool_and_apply};
use super::pictures::{Design, Free, Net};

/// The net, whose `width` is the number of channels of the first stage.
pub(super) fn design() -> Design {
    Design::Free(Free {
        times: 6,
        plus: 2,
        least_image_size: 1,
        build: |at, depth, width, classes| Box::new(CifarNet::new(at, depth, width, classes)),
        // Each stage has a quarter of the pixels and twice the channels of the one before it.
        multiply_adds: |depth, width, size| depth * 9.0 * width * width * size * size,
    })
}

/// A net of 6n + 2 layers.
struct CifarNet {
    stem: NormedConvolution,
    blocks: Vec<Block>,
    head: Linear,
}

impl CifarNet {
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
        CifarNet {
            stem: NormedConvolution::new(at / "stem", 3, width, 3, 1),
            blocks,
            head: nn::linear(at / "head", channels, classes, Default::default()),
        }
    }
}

impl Net for CifarNet {
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
