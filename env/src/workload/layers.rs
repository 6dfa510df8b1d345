//! Layers that go through fallible operators, where those of `tch` panic.

use tch::nn::init::DEFAULT_KAIMING_NORMAL;
use tch::nn::{self, BatchNormConfig, Init, Linear, Path};
use tch::{Reduction, TchError, Tensor};

/// Share of a new batch's statistics in the running ones.
const MOMENTUM: f64 = 0.1;
/// Added to the variance in normalisation.
const EPSILON: f64 = 1e-5;

/// Applies `layer`, as [`nn::Module::forward`] does.
pub(super) fn apply(layer: &Linear, inputs: &Tensor) -> Result<Tensor, TchError> {
    inputs.f_linear(&layer.ws, layer.bs.as_ref())
}

/// Mean cross-entropy of `logits` `[batch, classes, …]` against `targets` `[batch, …]`; [`UNJUDGED`] is not judged.
pub(super) fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor, TchError> {
    logits.f_cross_entropy_loss(targets, None::<&Tensor>, Reduction::Mean, UNJUDGED, 0.0)
}

/// The target of what is not judged: libtorch's own default.
pub(super) const UNJUDGED: i64 = -100;

/// Layer normalisation over the last dimension.
pub(super) struct LayerNorm(nn::LayerNorm);

impl LayerNorm {
    pub fn new(at: Path, width: i64) -> Self {
        LayerNorm(nn::layer_norm(at, vec![width], Default::default()))
    }

    pub fn forward(&self, hidden: &Tensor) -> Result<Tensor, TchError> {
        let nn::LayerNorm { ws, bs, normalized_shape, .. } = &self.0;
        hidden.f_layer_norm(&normalized_shape[..], ws.as_ref(), bs.as_ref(), EPSILON, true)
    }
}

/// Batch normalisation of pictures, in training mode.
pub(super) struct BatchNorm(nn::BatchNorm);

impl BatchNorm {
    pub fn new(at: Path, channels: i64) -> Self {
        // tch would draw the scale between 0 and 1; papers and everybody else start at 1.
        BatchNorm(nn::batch_norm2d(at, channels, BatchNormConfig { ws_init: Init::Const(1.0), ..Default::default() }))
    }

    pub fn forward(&self, hidden: &Tensor) -> Result<Tensor, TchError> {
        let nn::BatchNorm { ws, bs, running_mean, running_var, .. } = &self.0;
        let running = (Some(running_mean), Some(running_var));
        hidden.f_batch_norm(ws.as_ref(), bs.as_ref(), running.0, running.1, true, MOMENTUM, EPSILON, true)
    }
}

/// A convolution without bias that keeps the size of its pictures, or divides it by its stride.
pub(super) struct Convolution {
    weight: Tensor,
    stride: i64,
    padding: i64,
}

impl Convolution {
    pub fn new(at: Path, inputs: i64, outputs: i64, kernel: i64, stride: i64) -> Self {
        let weight = at.var("weight", &[outputs, inputs, kernel, kernel], DEFAULT_KAIMING_NORMAL);
        Convolution { weight, stride, padding: kernel / 2 }
    }

    pub fn forward(&self, inputs: &Tensor) -> Result<Tensor, TchError> {
        inputs.f_conv2d(&self.weight, None::<&Tensor>, [self.stride; 2], [self.padding; 2], [1, 1], 1)
    }
}

/// A convolution and the batch normalisation after it.
pub(super) struct NormedConvolution {
    convolution: Convolution,
    norm: BatchNorm,
}

impl NormedConvolution {
    pub fn new(at: Path, inputs: i64, outputs: i64, kernel: i64, stride: i64) -> Self {
        NormedConvolution {
            convolution: Convolution::new(&at / "convolution", inputs, outputs, kernel, stride),
            norm: BatchNorm::new(&at / "norm", outputs),
        }
    }

    pub fn forward(&self, inputs: &Tensor) -> Result<Tensor, TchError> {
        self.norm.forward(&self.convolution.forward(inputs)?)
    }
}

/// A transposed convolution that doubles the size of its pictures.
pub(super) struct Doubling {
    weight: Tensor,
    bias: Tensor,
    /// 2, or 4 with overlap.
    kernel: i64,
}

impl Doubling {
    pub fn new(at: Path, inputs: i64, outputs: i64, kernel: i64) -> Self {
        Doubling {
            weight: at.var("weight", &[inputs, outputs, kernel, kernel], DEFAULT_KAIMING_NORMAL),
            bias: at.var("bias", &[outputs], Init::Const(0.0)),
            kernel,
        }
    }

    pub fn forward(&self, inputs: &Tensor) -> Result<Tensor, TchError> {
        let padding = [self.kernel / 2 - 1; 2];
        inputs.f_conv_transpose2d(&self.weight, Some(&self.bias), [2, 2], padding, [0, 0], 1, [1, 1])
    }
}

/// Halves the size of pictures by the greatest of each two by two pixels.
pub(super) fn halve(pictures: &Tensor) -> Result<Tensor, TchError> {
    pictures.f_max_pool2d([2, 2], [2, 2], [0, 0], [1, 1], false)
}

/// Averages pictures `[batch, channels, size, size]` to `[batch, channels]` and applies `head`.
pub(super) fn pool_and_apply(head: &Linear, pictures: &Tensor) -> Result<Tensor, TchError> {
    apply(head, &pictures.f_adaptive_avg_pool2d([1, 1])?.f_flatten(1, -1)?)
}
