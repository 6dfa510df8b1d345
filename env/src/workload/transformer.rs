//! The transformer block that several families stack.

use tch::nn::{self, Init, Linear, LinearConfig, Path};
use tch::{TchError, Tensor};

use super::layers::{LayerNorm, apply};

/// Fresh weights, as in "Language Models are Unsupervised Multitask Learners" (Radford et al. 2019) and "BERT"
/// (Devlin et al. 2019).
pub(super) const WEIGHTS: Init = Init::Randn { mean: 0.0, stdev: 0.02 };

/// A linear layer with such weights and no bias at first.
pub(super) fn linear(at: Path, inputs: i64, outputs: i64) -> Linear {
    nn::linear(at, inputs, outputs, LinearConfig { ws_init: WEIGHTS, bs_init: Some(Init::Const(0.0)), bias: true })
}

/// Where a block normalises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NormAt {
    /// What each half of the block reads.
    Start,
    /// What each half of the block returns, the residual included.
    End,
}

/// The shape of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockShape {
    /// Features of a token between blocks.
    pub width: i64,
    /// Attention heads; they share the width.
    pub heads: i64,
    /// Share of features, and of attention weights, that are dropped in training.
    pub dropout: f64,
    /// Whether a token attends only to itself and to those before it.
    pub causal: bool,
    /// Where it normalises.
    pub norm_at: NormAt,
}

/// Attention, then a two-layer perceptron, each with a residual around it.
pub(super) struct Block {
    shape: BlockShape,
    attention_norm: LayerNorm,
    query_key_value: Linear,
    attention_out: Linear,
    perceptron_norm: LayerNorm,
    expand: Linear,
    contract: Linear,
}

impl Block {
    pub fn new(at: Path, shape: BlockShape) -> Self {
        let width = shape.width;
        Block {
            shape,
            attention_norm: LayerNorm::new(&at / "attention_norm", width),
            query_key_value: linear(&at / "query_key_value", width, 3 * width),
            attention_out: linear(&at / "attention_out", width, width),
            perceptron_norm: LayerNorm::new(&at / "perceptron_norm", width),
            expand: linear(&at / "expand", width, 4 * width),
            contract: linear(&at / "contract", 4 * width, width),
        }
    }

    /// `layers` of them, named by their number.
    pub fn stack(at: Path, layers: i64, shape: BlockShape) -> Vec<Self> {
        (0..layers).map(|layer| Block::new(&at / layer, shape)).collect()
    }

    /// `[batch, sequence, width]` to the same shape.
    pub fn forward(&self, hidden: &Tensor) -> Result<Tensor, TchError> {
        let hidden = self.residual(&self.attention_norm, hidden, |hidden| self.attend(hidden))?;
        self.residual(&self.perceptron_norm, &hidden, |hidden| {
            apply(&self.contract, &apply(&self.expand, hidden)?.f_gelu("none")?)
        })
    }

    /// `hidden` and what `half` makes of it, normalised where the block says.
    fn residual(
        &self,
        norm: &LayerNorm,
        hidden: &Tensor,
        half: impl FnOnce(&Tensor) -> Result<Tensor, TchError>,
    ) -> Result<Tensor, TchError> {
        let dropped = |made: Tensor| made.f_dropout(self.shape.dropout, true);
        match self.shape.norm_at {
            NormAt::Start => hidden.f_add(&dropped(half(&norm.forward(hidden)?)?)?),
            NormAt::End => norm.forward(&hidden.f_add(&dropped(half(hidden)?)?)?),
        }
    }

    /// Attention, dropout on its weights included.
    fn attend(&self, hidden: &Tensor) -> Result<Tensor, TchError> {
        let (batch, sequence, width) = hidden.size3()?;
        let by_head = [batch, sequence, 3, self.shape.heads, width / self.shape.heads];
        let parts = apply(&self.query_key_value, hidden)?.f_view(by_head)?.f_permute([2, 0, 3, 1, 4])?.f_unbind(0)?;
        let [query, key, value] = &parts[..] else { unreachable!("unbinding a dimension of three gives three") };
        // [batch, heads, sequence, width / heads]
        let attended = Tensor::f_scaled_dot_product_attention(
            query,
            key,
            value,
            None::<&Tensor>,
            self.shape.dropout,
            self.shape.causal,
            None::<f64>,
            false,
        )?;
        apply(&self.attention_out, &attended.f_transpose(1, 2)?.f_reshape([batch, sequence, width])?)
    }
}

/// Floating-point operations of one training iteration of so many blocks: the forward pass and, for the backward pass,
/// twice as many. Per token and layer, weights are 12 × width², and scores and sums over values 2 × sequence × width.
pub(super) fn iteration_flops(layers: i64, width: i64, sequence: i64, batch: i64) -> f64 {
    let [layers, width, sequence, batch] = [layers, width, sequence, batch].map(|size| size as f64);
    3.0 * 2.0 * batch * sequence * layers * (12.0 * width * width + 2.0 * sequence * width)
}
