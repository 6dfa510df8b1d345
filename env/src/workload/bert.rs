//! An encoder-only transformer that learns to fill in masked characters of a text.
//!
//! Follows "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding" (Devlin et al. 2019),
//! section 3.1, "Task #1: Masked LM". Deviations: tokens are characters, and there is no second sentence to predict.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use tch::nn::{self, Linear, Path, VarStore};
use tch::{Device, TchError, Tensor};

use super::layers::{LayerNorm, UNJUDGED, apply, cross_entropy};
use super::text::Text;
use super::training::{Batch, Member, Task, Training};
use super::transformer::{Block, BlockShape, NormAt, WEIGHTS, iteration_flops, linear};
use super::{Implausible, require, require_heads, require_learning_rate, require_share, require_sizes};

/// Share of the characters that are to be predicted.
const PREDICTED: f64 = 0.15;
/// Of those, the share that is masked, and the share that becomes any character; the rest stays.
const MASKED: f64 = 0.8;
const REPLACED: f64 = 0.1;

/// The size of a `bert` workload and how it is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BertConfig {
    /// Transformer blocks.
    pub layers: i64,
    /// Features of a token between blocks.
    pub width: i64,
    /// Attention heads; they share the width.
    pub heads: i64,
    /// Characters in a passage.
    pub sequence: i64,
    /// Passages in a batch.
    pub batch: i64,
    /// Share of features that are dropped in training.
    pub dropout: f64,
    /// Learning rate of AdamW.
    pub learning_rate: f64,
}

impl Member for BertConfig {
    fn validate(&self) -> Result<(), Implausible> {
        let BertConfig { layers, width, heads, sequence, batch, dropout, learning_rate } = *self;
        require_sizes(&[
            ("layers", layers),
            ("width", width),
            ("heads", heads),
            ("sequence", sequence),
            ("batch", batch),
        ])?;
        require_heads(heads, width)?;
        // Of fewer hardly any is hidden, and to be predicted.
        let characters = sequence * batch;
        require("batch", characters >= 32, format!("must give 32 characters or more, gives {characters}"))?;
        require_share("dropout", dropout)?;
        require_learning_rate(learning_rate)
    }

    fn flops(&self) -> f64 {
        iteration_flops(self.layers, self.width, self.sequence, self.batch)
    }

    fn task(&self, variables: &VarStore) -> Result<Box<dyn Task>, TchError> {
        let text = Text::de_finibus();
        Ok(Box::new(Bert {
            model: Model::new(&variables.root(), self, text.alphabet_size()),
            config: self.clone(),
            text,
        }))
    }

    fn training(&self, variables: VarStore) -> Result<Training, TchError> {
        Training::new(variables, nn::AdamW::default(), self.learning_rate)
    }
}

/// The masked characters of every passage, by post-norm blocks of attention both ways.
struct Bert {
    config: BertConfig,
    text: &'static Text,
    model: Model,
}

impl Task for Bert {
    fn batch(&self, draw: &mut ChaCha8Rng, device: Device) -> Result<Batch, TchError> {
        let BertConfig { batch, sequence, .. } = self.config;
        let mut inputs = self.text.cut(draw, batch as usize, sequence as usize).inputs;
        let targets = mask(draw, &mut inputs, self.text.alphabet_size());
        let inputs = Tensor::f_from_slice(&inputs)?.f_view([batch, sequence])?.f_to_device(device)?;
        Ok(Batch::new(inputs, Tensor::f_from_slice(&targets)?.f_to_device(device)?))
    }

    fn loss(&self, Batch { inputs, targets, .. }: Batch) -> Result<Tensor, TchError> {
        let BertConfig { batch, sequence, .. } = self.config;
        let logits = self.model.forward(&inputs)?.f_view([batch * sequence, self.text.alphabet_size()])?;
        cross_entropy(&logits, &targets)
    }
}

/// Hides some of `characters`, and returns what stood there, with [`UNJUDGED`] everywhere else. The first is always
/// among the hidden, so that there is a loss. The mask is the token after the alphabet's last.
fn mask(draw: &mut ChaCha8Rng, characters: &mut [i64], alphabet_size: i64) -> Vec<i64> {
    let hide = |(index, character): (usize, &mut i64)| {
        if index > 0 && draw.random::<f64>() >= PREDICTED {
            return UNJUDGED;
        }
        let stood_there = *character;
        let chance: f64 = draw.random();
        if chance < MASKED {
            *character = alphabet_size;
        } else if chance < MASKED + REPLACED {
            *character = draw.random_range(0..alphabet_size);
        }
        stood_there
    };
    characters.iter_mut().enumerate().map(hide).collect()
}

/// Embeddings, blocks, and the layers that predict.
struct Model {
    tokens: Tensor,
    positions: Tensor,
    norm: LayerNorm,
    dropout: f64,
    blocks: Vec<Block>,
    transform: Linear,
    transform_norm: LayerNorm,
    head: Linear,
}

impl Model {
    fn new(at: &Path, config: &BertConfig, alphabet_size: i64) -> Self {
        let BertConfig { layers, width, heads, sequence, dropout, .. } = *config;
        let shape = BlockShape { width, heads, dropout, causal: false, norm_at: NormAt::End };
        Model {
            tokens: at.var("tokens", &[alphabet_size + 1, width], WEIGHTS),
            positions: at.var("positions", &[sequence, width], WEIGHTS),
            norm: LayerNorm::new(at / "norm", width),
            dropout,
            blocks: Block::stack(at / "block", layers, shape),
            transform: linear(at / "transform", width, width),
            transform_norm: LayerNorm::new(at / "transform_norm", width),
            head: linear(at / "head", width, alphabet_size),
        }
    }

    /// Maps characters `[batch, sequence]` to logits `[batch, sequence, alphabet]`.
    fn forward(&self, characters: &Tensor) -> Result<Tensor, TchError> {
        let embedded = Tensor::f_embedding(&self.tokens, characters, -1, false, false)?.f_add(&self.positions)?;
        let mut hidden = self.norm.forward(&embedded)?.f_dropout(self.dropout, true)?;
        for block in &self.blocks {
            hidden = block.forward(&hidden)?;
        }
        let transformed = apply(&self.transform, &hidden)?.f_gelu("none")?;
        apply(&self.head, &self.transform_norm.forward(&transformed)?)
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    #[test]
    fn what_is_hidden_is_what_is_asked_for() {
        let passage: Vec<i64> = (0..20_000).map(|index| index % 50).collect();
        let mut hidden = passage.clone();
        let targets = mask(&mut ChaCha8Rng::seed_from_u64(1), &mut hidden, 50);
        let mut counts = [0; 3];
        for ((&stood_there, &shown), &target) in passage.iter().zip(&hidden).zip(&targets) {
            if target == UNJUDGED {
                assert_eq!(shown, stood_there);
                continue;
            }
            assert_eq!(target, stood_there);
            counts[if shown == 50 { 0 } else { 1 + usize::from(shown == stood_there) }] += 1;
        }
        // 3,000 of 20,000 are predicted: 2,400 masked, 300 replaced (one in fifty of them by itself), 300 left.
        for (count, wanted) in counts.into_iter().zip([2400_i32, 294, 306]) {
            assert!((count - wanted).abs() < wanted / 5, "{counts:?}");
        }
    }
}
