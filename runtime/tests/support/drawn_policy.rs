//! A learned policy without learning.

use plimsoll_runtime::LearnedPolicy;
use plimsoll_runtime::network::{Dense, LOGITS, Network, NetworkWeights, Normaliser};
use plimsoll_runtime::observation::FEATURES;

use super::draw::Draw;

/// A policy that nobody trained.
pub fn drawn_policy(seed: u64) -> LearnedPolicy {
    let draw = &mut Draw::new(seed);
    let mut dense = |inputs: usize, outputs: usize| Dense {
        weights: (0..inputs * outputs).map(|_| draw.below(2_001) as f32 / 1_000.0 - 1.0).collect(),
        bias: vec![0.0; outputs],
    };
    let layers = [dense(FEATURES, 8), dense(8, 8), dense(8, LOGITS)];
    LearnedPolicy::greedy(Network::new(&NetworkWeights::new(Normaliser::identity(), layers).unwrap()))
}
