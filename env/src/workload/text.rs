//! A text to learn character by character.

use std::sync::LazyLock;

use rand::{Rng, RngExt};
use tch::{Device, TchError, Tensor};

use super::training::Batch;

/// Cicero, *De finibus bonorum et malorum*, book 1 (see `env/data/README.md`).
const DE_FINIBUS: &str = include_str!("../../data/de-finibus-1.txt");

/// A text as indices into its own alphabet.
pub(super) struct Text {
    alphabet: Vec<char>,
    tokens: Vec<i64>,
}

/// Inputs and, one character further on, what is to be predicted.
pub(super) struct TextBatch {
    /// Row-major `[batch, sequence]`.
    pub inputs: Vec<i64>,
    /// Row-major `[batch, sequence]`.
    pub targets: Vec<i64>,
}

impl Text {
    /// The text that families of language models learn.
    pub fn de_finibus() -> &'static Self {
        static TEXT: LazyLock<Text> = LazyLock::new(|| Text::of(DE_FINIBUS));
        &TEXT
    }

    fn of(text: &str) -> Self {
        let mut alphabet: Vec<char> = text.chars().collect();
        alphabet.sort_unstable();
        alphabet.dedup();
        let token = |character| alphabet.partition_point(|&other| other < character) as i64;
        let tokens = text.chars().map(token).collect();
        Text { alphabet, tokens }
    }

    /// How many different characters occur.
    pub fn alphabet_size(&self) -> i64 {
        self.alphabet.len() as i64
    }

    /// Cuts passages `[batch, sequence]`, and the character after each of theirs, `[batch × sequence]`.
    pub fn batch(&self, draw: &mut impl Rng, batch: i64, sequence: i64, device: Device) -> Result<Batch, TchError> {
        let cut = self.cut(draw, batch as usize, sequence as usize);
        let inputs = Tensor::f_from_slice(&cut.inputs)?.f_view([batch, sequence])?.f_to_device(device)?;
        Ok(Batch::new(inputs, Tensor::f_from_slice(&cut.targets)?.f_to_device(device)?))
    }

    /// Cuts `batch` passages of `sequence` characters, each from where `draw` says.
    pub fn cut(&self, draw: &mut impl Rng, batch: usize, sequence: usize) -> TextBatch {
        let mut cut = TextBatch { inputs: Vec::new(), targets: Vec::new() };
        for _ in 0..batch {
            let start = draw.random_range(0..self.tokens.len() - sequence);
            cut.inputs.extend_from_slice(&self.tokens[start..start + sequence]);
            cut.targets.extend_from_slice(&self.tokens[start + 1..start + sequence + 1]);
        }
        cut
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    use super::*;

    #[test]
    fn tokens_spell_the_text() {
        let text = Text::de_finibus();
        let spelled: String = text.tokens.iter().map(|&token| text.alphabet[token as usize]).collect();
        assert_eq!(spelled, DE_FINIBUS);
    }

    #[test]
    fn targets_are_the_next_characters() {
        let text = Text::de_finibus();
        let batch = text.cut(&mut ChaCha8Rng::seed_from_u64(1), 3, 8);
        assert_eq!(batch.inputs.len(), 24);
        for (inputs, targets) in batch.inputs.chunks(8).zip(batch.targets.chunks(8)) {
            assert_eq!(inputs[1..], targets[..7]);
        }
    }

    #[test]
    fn the_longest_passage_fits() {
        let text = Text::de_finibus();
        let batch = text.cut(&mut ChaCha8Rng::seed_from_u64(1), 1, text.tokens.len() - 1);
        assert_eq!(batch.targets.last(), text.tokens.last());
    }
}
