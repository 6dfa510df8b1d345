//! A decoder-only transformer that learns a text character by character.

use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use tch::nn::{self, Init, LayerNorm, Linear, LinearConfig, Path, VarStore};
use tch::{Device, Reduction, TchError, Tensor};

use super::text::Text;
use super::training::{Training, reseed_libtorch, seeded};
use super::{Implausible, Workload, require, require_positive};

/// Standard deviation of fresh weights, as in "Language Models are Unsupervised Multitask Learners"
/// (Radford et al. 2019).
const WEIGHT_DEVIATION: f64 = 0.02;
/// Added to the variance in layer normalisation.
const EPSILON: f64 = 1e-5;

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
    /// Passages in a batch.
    pub batch: i64,
    /// Share of features that are dropped in training.
    pub dropout: f64,
    /// Learning rate of AdamW.
    pub learning_rate: f64,
}

impl GptConfig {
    pub(super) fn validate(&self) -> Result<(), Implausible> {
        let GptConfig { layers, width, heads, sequence, batch, dropout, learning_rate } = *self;
        require_positive(&[
            ("layers", layers),
            ("width", width),
            ("heads", heads),
            ("sequence", sequence),
            ("batch", batch),
        ])?;
        require("heads", width % heads == 0, format!("must divide the width {width}, is {heads}"))?;
        let longest = Text::de_finibus().len() as i64 - 1;
        require("sequence", sequence <= longest, format!("must be at most {longest}, is {sequence}"))?;
        require("dropout", (0.0..1.0).contains(&dropout), format!("must be at least 0 and below 1, is {dropout}"))?;
        require("learning_rate", learning_rate > 0.0, format!("must be above 0, is {learning_rate}"))
    }
}

/// A `gpt` workload: pre-norm blocks of causal attention and a two-layer perceptron, trained by AdamW.
pub(super) struct Gpt {
    name: String,
    config: GptConfig,
    device: Device,
    text: Text,
    draw: ChaCha8Rng,
    model: Model,
    training: Training,
}

impl Gpt {
    pub fn new(config: &GptConfig, name: &str, device: Device, seed: u64) -> Result<Self, TchError> {
        let draw = seeded(seed);
        let text = Text::de_finibus();
        let variables = VarStore::new(device);
        let model = Model::new(variables.root(), config, text.alphabet_size());
        let training = Training::new(variables, nn::AdamW::default(), config.learning_rate)?;
        Ok(Gpt { name: name.to_owned(), config: config.clone(), device, text, draw, model, training })
    }
}

impl Workload for Gpt {
    fn name(&self) -> &str {
        &self.name
    }

    fn family(&self) -> &str {
        "gpt"
    }

    fn iteration(&mut self) -> Result<f64, TchError> {
        reseed_libtorch(&mut self.draw);
        let GptConfig { batch, sequence, .. } = self.config;
        let cut = self.text.cut(&mut self.draw, batch as usize, sequence as usize);
        let inputs = Tensor::f_from_slice(&cut.inputs)?.f_view([batch, sequence])?.f_to_device(self.device)?;
        let targets = Tensor::f_from_slice(&cut.targets)?.f_to_device(self.device)?;

        self.training.zero_grad()?;
        let logits = self.model.forward(&inputs)?.f_view([batch * sequence, self.text.alphabet_size()])?;
        let loss = logits.f_cross_entropy_loss(&targets, None::<&Tensor>, Reduction::Mean, -100, 0.0)?;
        self.training.backward_step(&loss)
    }

    fn variables(&self) -> Vec<(String, Tensor)> {
        self.training.variables()
    }

    fn trainable(&self) -> Vec<Tensor> {
        self.training.trainable()
    }
}

/// Embeddings, blocks, and the projection onto the alphabet.
struct Model {
    tokens: Tensor,
    positions: Tensor,
    dropout: f64,
    blocks: Vec<Block>,
    norm: Norm,
    head: Linear,
}

impl Model {
    fn new(at: Path, config: &GptConfig, alphabet_size: i64) -> Self {
        Model {
            tokens: at.var("tokens", &[alphabet_size, config.width], WEIGHTS),
            positions: at.var("positions", &[config.sequence, config.width], WEIGHTS),
            dropout: config.dropout,
            blocks: (0..config.layers).map(|layer| Block::new(&at / "block" / layer, config)).collect(),
            norm: Norm::new(&at / "norm", config.width),
            head: linear(&at / "head", config.width, alphabet_size),
        }
    }

    /// Maps characters `[batch, sequence]` to logits `[batch, sequence, alphabet]`.
    fn forward(&self, characters: &Tensor) -> Result<Tensor, TchError> {
        let embedded = Tensor::f_embedding(&self.tokens, characters, -1, false, false)?;
        let mut hidden = embedded.f_add(&self.positions)?.f_dropout(self.dropout, true)?;
        for block in &self.blocks {
            hidden = block.forward(&hidden)?;
        }
        apply(&self.head, &self.norm.forward(&hidden)?)
    }
}

/// One pre-norm transformer block.
struct Block {
    heads: i64,
    dropout: f64,
    attention_norm: Norm,
    query_key_value: Linear,
    attention_out: Linear,
    perceptron_norm: Norm,
    expand: Linear,
    contract: Linear,
}

impl Block {
    fn new(at: Path, config: &GptConfig) -> Self {
        let width = config.width;
        Block {
            heads: config.heads,
            dropout: config.dropout,
            attention_norm: Norm::new(&at / "attention_norm", width),
            query_key_value: linear(&at / "query_key_value", width, 3 * width),
            attention_out: linear(&at / "attention_out", width, width),
            perceptron_norm: Norm::new(&at / "perceptron_norm", width),
            expand: linear(&at / "expand", width, 4 * width),
            contract: linear(&at / "contract", 4 * width, width),
        }
    }

    /// `[batch, sequence, width]` to the same shape.
    fn forward(&self, hidden: &Tensor) -> Result<Tensor, TchError> {
        let attended = self.attend(&self.attention_norm.forward(hidden)?)?;
        let hidden = hidden.f_add(&attended.f_dropout(self.dropout, true)?)?;
        let expanded = apply(&self.expand, &self.perceptron_norm.forward(&hidden)?)?.f_gelu("none")?;
        let contracted = apply(&self.contract, &expanded)?.f_dropout(self.dropout, true)?;
        hidden.f_add(&contracted)
    }

    /// Causal attention, dropout on its weights included.
    fn attend(&self, hidden: &Tensor) -> Result<Tensor, TchError> {
        let (batch, sequence, width) = hidden.size3()?;
        let by_head = [batch, sequence, 3, self.heads, width / self.heads];
        let parts = apply(&self.query_key_value, hidden)?.f_view(by_head)?.f_permute([2, 0, 3, 1, 4])?.f_unbind(0)?;
        let [query, key, value] = &parts[..] else { unreachable!("unbinding a dimension of three gives three") };
        // [batch, heads, sequence, width / heads]
        let attended = Tensor::f_scaled_dot_product_attention(
            query,
            key,
            value,
            None::<&Tensor>,
            self.dropout,
            true,
            None::<f64>,
            false,
        )?;
        apply(&self.attention_out, &attended.f_transpose(1, 2)?.f_reshape([batch, sequence, width])?)
    }
}

/// Layer normalisation over the width.
struct Norm(LayerNorm);

impl Norm {
    fn new(at: Path, width: i64) -> Self {
        Norm(nn::layer_norm(at, vec![width], Default::default()))
    }

    fn forward(&self, hidden: &Tensor) -> Result<Tensor, TchError> {
        let LayerNorm { ws, bs, normalized_shape, .. } = &self.0;
        hidden.f_layer_norm(&normalized_shape[..], ws.as_ref(), bs.as_ref(), EPSILON, true)
    }
}

const WEIGHTS: Init = Init::Randn { mean: 0.0, stdev: WEIGHT_DEVIATION };

fn linear(at: Path, inputs: i64, outputs: i64) -> Linear {
    nn::linear(at, inputs, outputs, LinearConfig { ws_init: WEIGHTS, bs_init: Some(Init::Const(0.0)), bias: true })
}

/// Applies `layer` through the fallible operator, where [`nn::Module::forward`] would panic.
fn apply(layer: &Linear, inputs: &Tensor) -> Result<Tensor, TchError> {
    inputs.f_linear(&layer.ws, layer.bs.as_ref())
}
