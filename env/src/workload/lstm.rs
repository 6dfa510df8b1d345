//! A recurrent net that learns a text character by character.

use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use tch::nn::{self, LSTM, Linear, RNN, RNNConfig, VarStore};
use tch::{Device, TchError, Tensor};

use super::layers::{apply, cross_entropy};
use super::text::Text;
use super::training::{Batch, Member, Task, Training, caught};
use super::{Implausible, require_learning_rate, require_share, require_sizes};

/// The size of an `lstm` workload and how it is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LstmConfig {
    /// Recurrent layers.
    pub layers: i64,
    /// Features of a character, and of what a layer keeps from one character to the next.
    pub width: i64,
    /// Characters in a passage.
    pub sequence: i64,
    /// Passages in a batch.
    pub batch: i64,
    /// Share of features that are dropped between layers in training.
    pub dropout: f64,
    /// Learning rate of Adam.
    pub learning_rate: f64,
}

impl Member for LstmConfig {
    fn validate(&self) -> Result<(), Implausible> {
        let LstmConfig { layers, width, sequence, batch, dropout, learning_rate } = *self;
        require_sizes(&[("layers", layers), ("width", width), ("sequence", sequence), ("batch", batch)])?;
        require_share("dropout", dropout)?;
        require_learning_rate(learning_rate)
    }

    /// Four gates, each a matrix for the input and one for what is kept.
    fn flops(&self) -> f64 {
        let [layers, width, tokens] = [self.layers, self.width, self.sequence * self.batch].map(|size| size as f64);
        3.0 * 2.0 * tokens * layers * 8.0 * width * width
    }

    fn task(&self, variables: &VarStore) -> Result<Box<dyn Task>, TchError> {
        let (text, width, at) = (Text::de_finibus(), self.width, variables.root());
        let layers = RNNConfig { num_layers: self.layers, dropout: self.dropout, ..Default::default() };
        Ok(Box::new(Lstm {
            config: self.clone(),
            tokens: at.var("tokens", &[text.alphabet_size(), width], nn::Init::Randn { mean: 0.0, stdev: 1.0 }),
            layers: nn::lstm(&at / "layers", width, width, layers),
            head: nn::linear(&at / "head", width, text.alphabet_size(), Default::default()),
            text,
        }))
    }

    fn training(&self, variables: VarStore) -> Result<Training, TchError> {
        Training::new(variables, nn::Adam::default(), self.learning_rate)
    }
}

/// The next character of every passage, by `tch`'s own recurrent layers.
struct Lstm {
    config: LstmConfig,
    text: &'static Text,
    tokens: Tensor,
    layers: LSTM,
    head: Linear,
}

impl Task for Lstm {
    fn batch(&self, draw: &mut ChaCha8Rng, device: Device) -> Result<Batch, TchError> {
        self.text.batch(draw, self.config.batch, self.config.sequence, device)
    }

    fn loss(&self, Batch { inputs, targets, .. }: Batch) -> Result<Tensor, TchError> {
        let LstmConfig { batch, sequence, width, .. } = self.config;
        let embedded = Tensor::f_embedding(&self.tokens, &inputs, -1, false, false)?;
        let (hidden, _) = caught(|| self.layers.seq(&embedded))?;
        let logits = apply(&self.head, &hidden.f_reshape([batch * sequence, width])?)?;
        cross_entropy(&logits, &targets)
    }
}
