//! Where random numbers come from: every draw belongs to a named stream of the run's seed.
//!
//! Nothing carries a generator along. So what is drawn depends neither on thread scheduling nor on where a
//! training run was interrupted, and a saved training state needs no generator's position.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// What a stream of random numbers is for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stream {
    /// The first weights.
    Weights,
    /// The reset seed of instance `index` of an update.
    Instance,
    /// The choices in episode, or on instance, `index` of an update.
    Choices,
    /// The order of the transitions in pass `index` of an update; of deep Q-learning, what minibatch `index` is drawn from its memory.
    Order,
    /// The direction of perturbation pair `index` of an update.
    Perturbation,
}

/// The generator of one stream.
pub(crate) fn generator(seed: u64, stream: Stream, update: usize, index: usize) -> ChaCha8Rng {
    let mut key = [0; 32];
    let words = [seed, stream as u64, update as u64, index as u64];
    for (bytes, word) in key.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *bytes = word.to_le_bytes();
    }
    ChaCha8Rng::from_seed(key)
}

/// The seed with which an environment is reset to instance `index` of an update.
pub(crate) fn reset_seed(seed: u64, update: usize, index: usize) -> u64 {
    generator(seed, Stream::Instance, update, index).next_u64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_differ_and_repeat() {
        let first = |seed, stream, update, index| generator(seed, stream, update, index).next_u64();
        let draws = [
            first(1, Stream::Choices, 0, 0),
            first(2, Stream::Choices, 0, 0),
            first(1, Stream::Order, 0, 0),
            first(1, Stream::Choices, 1, 0),
            first(1, Stream::Choices, 0, 1),
        ];
        for (index, draw) in draws.iter().enumerate() {
            assert!(!draws[..index].contains(draw));
        }
        assert_eq!(draws[0], first(1, Stream::Choices, 0, 0));
    }
}
