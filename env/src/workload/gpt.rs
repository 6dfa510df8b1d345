//! A decoder-only transformer that learns a text character by character.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use tch::nn::{self, Linear, Path, VarStore};
use tch::{Device, TchError, Tensor};

use super::layers::{LayerNorm, apply, cross_entropy};
use super::text::Text;
use super::training::{Batch, Member, Task, Training};
use super::transformer::{Block, BlockShape, NormAt, WEIGHTS, iteration_flops, linear};
use super::{Implausible, require, require_heads, require_learning_rate, require_share, require_sizes};

/// The size of a `gpt` workload and how it is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GptConfig {
    /// Transformer blocks.
    pub layers: i64,
    /// Features of a token between blocks.
    pub width: i64,
    /// Attention heads; they share the width.
    pub heads: i64,
    /// Characters in a passage.
    pub sequence: i64,
    /// Characters in the shortest passage, where lengths differ: those of a batch are all as long as is drawn for it, from here to
    /// `sequence`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shortest: Option<i64>,
    /// Share of blocks that are left out of an iteration, where some are: which ones is drawn for each batch. (LayerDrop: Fan et al.,
    /// arXiv 1909.11556.)
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer_drop: Option<f64>,
    /// Passages in a batch.
    pub batch: i64,
    /// Rows of the embedding and of the projection onto the alphabet, beyond those that the text uses: the size of
    /// published models, whose vocabularies are larger. As many as the text's characters unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocabulary: Option<i64>,
    /// Share of features that are dropped in training.
    pub dropout: f64,
    /// Learning rate of AdamW.
    pub learning_rate: f64,
}

impl Member for GptConfig {
    fn validate(&self) -> Result<(), Implausible> {
        let GptConfig {
            layers,
            width,
            heads,
            sequence,
            shortest,
            layer_drop,
            batch,
            vocabulary,
            dropout,
            learning_rate,
        } = *self;
        require_sizes(&[
            ("layers", layers),
            ("width", width),
            ("heads", heads),
            ("sequence", sequence),
            ("batch", batch),
        ])?;
        let shortest = shortest.unwrap_or(sequence);
        let rule = format!("must be between 1 and `sequence`, which is {sequence}, is {shortest}");
        require("shortest", (1..=sequence).contains(&shortest), rule)?;
        let (least, most) = (Text::de_finibus().alphabet_size(), VOCABULARY_MAX);
        let rule = || format!("must be between {least} and {most}, is {}", vocabulary.unwrap_or(least));
        require("vocabulary", (least..=most).contains(&vocabulary.unwrap_or(least)), rule())?;
        require_heads(heads, width)?;
        require_share("dropout", dropout)?;
        require_share("layer_drop", layer_drop.unwrap_or_default())?;
        require_learning_rate(learning_rate)
    }

    fn flops(&self) -> f64 {
        iteration_flops(self.layers, self.width, self.sequence, self.batch)
    }

    fn task(&self, variables: &VarStore) -> Result<Box<dyn Task>, TchError> {
        let text = Text::de_finibus();
        Ok(Box::new(Gpt { model: Model::new(&variables.root(), self, self.symbols(text)), config: self.clone(), text }))
    }

    fn training(&self, variables: VarStore) -> Result<Training, TchError> {
        Training::new(variables, nn::AdamW::default(), self.learning_rate)
    }
}

/// Largest vocabulary that is taken: beyond those of published models.
const VOCABULARY_MAX: i64 = 1 << 20;

impl GptConfig {
    /// Symbols that the model tells apart.
    fn symbols(&self, text: &Text) -> i64 {
        self.vocabulary.unwrap_or_else(|| text.alphabet_size())
    }
}

/// The next character of every passage, by pre-norm blocks of causal attention.
struct Gpt {
    config: GptConfig,
    text: &'static Text,
    model: Model,
}

impl Task for Gpt {
    fn batch(&self, draw: &mut ChaCha8Rng, device: Device) -> Result<Batch, TchError> {
        let GptConfig { batch, sequence, shortest, layer_drop, layers, .. } = self.config;
        let length = shortest.map_or(sequence, |shortest| draw.random_range(shortest..=sequence));
        let without =
            (0..layers as usize).filter(|_| layer_drop.is_some_and(|share| draw.random_bool(share))).collect();
        Ok(Batch { without, ..self.text.batch(draw, batch, length, device)? })
    }

    fn loss(&self, Batch { inputs, targets, without }: Batch) -> Result<Tensor, TchError> {
        let logits = self.model.forward(&inputs, &without)?.f_view([-1, self.config.symbols(self.text)])?;
        cross_entropy(&logits, &targets)
    }
}

/// Embeddings, blocks, and the projection onto the alphabet.
struct Model {
    tokens: Tensor,
    positions: Tensor,
    lengths_differ: bool,
    dropout: f64,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

impl Model {
    fn new(at: &Path, config: &GptConfig, alphabet_size: i64) -> Self {
        let GptConfig { layers, width, heads, sequence, dropout, .. } = *config;
        let shape = BlockShape { width, heads, dropout, causal: true, norm_at: NormAt::Start };
        Model {
            tokens: at.var("tokens", &[alphabet_size, width], WEIGHTS),
            positions: at.var("positions", &[sequence, width], WEIGHTS),
            lengths_differ: config.shortest.is_some(),
            dropout,
            blocks: Block::stack(at / "block", layers, shape),
            norm: LayerNorm::new(at / "norm", width),
            head: linear(at / "head", width, alphabet_size),
        }
    }

    /// Maps characters `[batch, length]` to logits `[batch, length, alphabet]`, past the blocks `without`.
    fn forward(&self, characters: &Tensor, without: &[usize]) -> Result<Tensor, TchError> {
        let embedded = Tensor::f_embedding(&self.tokens, characters, -1, false, false)?;
        let positions = match self.lengths_differ {
            true => &self.positions.f_narrow(0, 0, characters.size()[1])?,
            false => &self.positions,
        };
        let mut hidden = embedded.f_add(positions)?.f_dropout(self.dropout, true)?;
        for (_, block) in self.blocks.iter().enumerate().filter(|(index, _)| !without.contains(index)) {
            hidden = block.forward(&hidden)?;
        }
        apply(&self.head, &self.norm.forward(&hidden)?)
    }
}
