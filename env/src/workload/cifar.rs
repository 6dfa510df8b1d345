//! The residual net for small pictures, with batch normalisation and in-place ReLU.
//!
//! Follows "Deep Residual Learning for Image Recognition" (He et al. 2015), section 4.2, "CIFAR-10 and
//! Analysis": 6n + 2 weighted layers in three stages. Two deviations: where the shape changes the shortcut
//! is a 1×1 convolution (their option B) instead of padding, and the width of the first stage is free.

use tch::nn::init::DEFAULT_KAIMING_NORMAL;
use tch::nn::{self, BatchNorm, BatchNormConfig, Init, Linear, Path};
use tch::{TchError, Tensor};

/// Share of a new batch's statistics in the running ones.
const MOMENTUM: f64 = 0.1;
/// Added to the variance in batch normalisation.
const EPSILON: f64 = 1e-5;

/// A net of 6n + 2 layers.
pub(super) struct CifarNet {
    stem: Convolution,
    blocks: Vec<Block>,
    head: Linear,
}

impl CifarNet {
    /// `depth` is 6n + 2; `width` is the number of channels of the first stage.
    pub fn new(at: Path, depth: i64, width: i64, classes: i64) -> Self {
        let mut channels = width;
        let mut blocks = Vec::new();
        for stage in 0..3 {
            for block in 0..(depth - 2) / 6 {
                let outputs = width << stage;
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                blocks.push(Block::new(&at / format!("stage{stage}") / block, channels, outputs, stride));
                channels = outputs;
            }
        }
        CifarNet {
            stem: Convolution::new(&at / "stem", 3, width, 3, 1),
            blocks,
            head: nn::linear(&at / "head", channels, classes, Default::default()),
        }
    }

    /// Maps pictures `[batch, 3, size, size]` to logits `[batch, classes]`, in training mode.
    pub fn forward(&self, pictures: &Tensor) -> Result<Tensor, TchError> {
        let mut hidden = self.stem.forward(pictures)?.f_relu_()?;
        for block in &self.blocks {
            hidden = block.forward(&hidden)?;
        }
        let pooled = hidden.f_adaptive_avg_pool2d([1, 1])?.f_flatten(1, -1)?;
        pooled.f_linear(&self.head.ws, self.head.bs.as_ref())
    }
}

/// Two convolutions and a shortcut around them.
struct Block {
    first: Convolution,
    second: Convolution,
    shortcut: Option<Convolution>,
}

impl Block {
    fn new(at: Path, inputs: i64, outputs: i64, stride: i64) -> Self {
        let changes_shape = inputs != outputs || stride != 1;
        Block {
            first: Convolution::new(&at / "first", inputs, outputs, 3, stride),
            second: Convolution::new(&at / "second", outputs, outputs, 3, 1),
            shortcut: changes_shape.then(|| Convolution::new(&at / "shortcut", inputs, outputs, 1, stride)),
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

/// A convolution without bias and the batch normalisation after it.
struct Convolution {
    weight: Tensor,
    stride: i64,
    padding: i64,
    norm: BatchNorm,
}

impl Convolution {
    fn new(at: Path, inputs: i64, outputs: i64, kernel: i64, stride: i64) -> Self {
        // tch would draw the scale between 0 and 1; the paper and everybody else start at 1.
        let norm = BatchNormConfig { ws_init: Init::Const(1.0), ..Default::default() };
        Convolution {
            weight: (&at / "convolution").var("weight", &[outputs, inputs, kernel, kernel], DEFAULT_KAIMING_NORMAL),
            stride,
            padding: kernel / 2,
            norm: nn::batch_norm2d(&at / "norm", outputs, norm),
        }
    }

    /// Goes through the fallible operators, where [`nn::ModuleT::forward_t`] would panic.
    fn forward(&self, inputs: &Tensor) -> Result<Tensor, TchError> {
        let (stride, padding) = ([self.stride; 2], [self.padding; 2]);
        let convolved = inputs.f_conv2d(&self.weight, None::<&Tensor>, stride, padding, [1, 1], 1)?;
        let BatchNorm { ws, bs, running_mean, running_var, .. } = &self.norm;
        let running = (Some(running_mean), Some(running_var));
        convolved.f_batch_norm(ws.as_ref(), bs.as_ref(), running.0, running.1, true, MOMENTUM, EPSILON, true)
    }
}
