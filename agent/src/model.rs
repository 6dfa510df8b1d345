//! The actor and the critic in burn.
//!
//! The actor is the network of `plimsoll_runtime::network`, to the letter. The critic is never exported.

use burn::module::{Module, Param};
use burn::tensor::activation::{log_softmax, relu};
use burn::tensor::module::linear;
use burn::tensor::{Device, Tensor, TensorData};
use plimsoll_runtime::network::{self, LOGITS, NetworkWeights};
use plimsoll_runtime::observation::FEATURES;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

use crate::batch::Batch;
use crate::learner::StartError;
use crate::ppo::PpoConfig;

/// The gain of weights before a ReLU, which halves what comes through.
const RELU_GAIN: f64 = std::f64::consts::SQRT_2;

/// A dense layer: `output = input · weights + bias`.
#[derive(Module, Debug)]
pub(crate) struct Dense {
    /// `[inputs, outputs]`.
    pub(crate) weights: Param<Tensor<2>>,
    /// `[outputs]`.
    pub(crate) bias: Param<Tensor<1>>,
}

impl Dense {
    fn new(inputs: usize, outputs: usize, gain: f64, rng: &mut ChaCha8Rng, device: &Device) -> Self {
        let weights = orthogonal(inputs, outputs, gain, rng);
        Dense {
            weights: Param::from_data(TensorData::new(weights, [inputs, outputs]), device),
            bias: Param::from_data(TensorData::new(vec![0.0f32; outputs], [outputs]), device),
        }
    }

    /// A layer of a policy.
    fn of(layer: &network::Dense, device: &Device) -> Self {
        let outputs = layer.outputs();
        let shape = [layer.weights.len() / outputs, outputs];
        Dense {
            weights: Param::from_data(TensorData::new(layer.weights.clone(), shape), device),
            bias: Param::from_data(TensorData::new(layer.bias.clone(), [outputs]), device),
        }
    }

    /// `[rows, inputs]` to `[rows, outputs]`.
    fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        linear(input, self.weights.val(), Some(self.bias.val()))
    }
}

/// The policy network.
#[derive(Module, Debug)]
pub struct Actor {
    pub(crate) hidden: [Dense; 2],
    pub(crate) output: Dense,
}

impl Actor {
    /// Draws the first weights: orthogonal, with the gains of Huang et al., *The 37 Implementation Details of
    /// Proximal Policy Optimization* (2022), detail 2. The small last gain makes the first policy uniform.
    pub(crate) fn new(hidden: usize, rng: &mut ChaCha8Rng, device: &Device) -> Self {
        let mut dense = |inputs, outputs, gain| Dense::new(inputs, outputs, gain, rng, device);
        Actor {
            hidden: [dense(FEATURES, hidden, RELU_GAIN), dense(hidden, hidden, RELU_GAIN)],
            output: dense(hidden, LOGITS, 0.01),
        }
    }

    /// The network of a policy, which must have so many outputs in both hidden layers.
    pub(crate) fn of(weights: &NetworkWeights, hidden: usize, device: &Device) -> Result<Self, StartError> {
        let [first, second, output] = weights.layers();
        if let Some(found) = [first, second].map(network::Dense::outputs).into_iter().find(|&width| width != hidden) {
            return Err(StartError::Width { expected: hidden, found });
        }
        let of = |layer: &network::Dense| Dense::of(layer, device);
        Ok(Actor { hidden: [of(first), of(second)], output: of(output) })
    }

    /// Normalised features `[rows, FEATURES]` to logits `[rows, LOGITS]`.
    pub(crate) fn logits(&self, features: Tensor<2>) -> Tensor<2> {
        let [first, second] = &self.hidden;
        self.output.forward(relu(second.forward(relu(first.forward(features)))))
    }

    /// Logarithms of the probabilities of all choices, `[observations, width · LOGITS]`: in each observation
    /// one softmax over all pairs of candidate and action.
    pub(crate) fn log_probabilities(&self, batch: &Batch) -> Tensor<2> {
        log_softmax(batch.mask(self.logits(batch.features.clone())), 1)
    }
}

/// The value network: embeds every candidate, pools the embeddings, and values the pool.
#[derive(Module, Debug)]
pub(crate) struct Critic {
    embedding: [Dense; 2],
    hidden: Dense,
    output: Dense,
}

impl Critic {
    /// The values of a batch, `[observations]`.
    pub(crate) fn values(&self, batch: &Batch) -> Tensor<1> {
        let [first, second] = &self.embedding;
        let embeddings = relu(second.forward(relu(first.forward(batch.features.clone()))));
        let value = self.output.forward(relu(self.hidden.forward(batch.pool(embeddings))));
        value.reshape([batch.observations()])
    }
}

/// Actor and critic, which share nothing.
#[derive(Module, Debug)]
pub(crate) struct ActorCritic {
    pub(crate) actor: Actor,
    pub(crate) critic: Critic,
}

impl ActorCritic {
    /// Draws the first weights, those of the critic by the same source as those of the [`Actor`].
    pub(crate) fn new(config: &PpoConfig, rng: &mut ChaCha8Rng, device: &Device) -> Self {
        let pooled = config.critic_hidden;
        let actor = Actor::new(config.hidden, rng, device);
        let mut dense = |inputs, outputs, gain| Dense::new(inputs, outputs, gain, rng, device);
        ActorCritic {
            actor,
            critic: Critic {
                embedding: [dense(FEATURES, pooled, RELU_GAIN), dense(pooled, pooled, RELU_GAIN)],
                hidden: dense(2 * pooled, pooled, RELU_GAIN),
                output: dense(pooled, 1, 1.0),
            },
        }
    }
}

/// A random matrix, row-major `[rows, columns]`, whose rows or columns, whichever are fewer, are orthogonal
/// and of length `gain`: Gram-Schmidt on normal draws.
fn orthogonal(rows: usize, columns: usize, gain: f64, rng: &mut ChaCha8Rng) -> Vec<f32> {
    let (vectors, length) = (rows.min(columns), rows.max(columns));
    let mut basis: Vec<Vec<f64>> = Vec::with_capacity(vectors);
    while basis.len() < vectors {
        let mut vector: Vec<f64> = StandardNormal.sample_iter(&mut *rng).take(length).collect();
        for other in &basis {
            let along = dot(&vector, other);
            vector.iter_mut().zip(other).for_each(|(value, other)| *value -= along * other);
        }
        let norm = dot(&vector, &vector).sqrt();
        vector.iter_mut().for_each(|value| *value /= norm);
        basis.push(vector);
    }
    let entry = |row: usize, column: usize| if rows <= columns { basis[row][column] } else { basis[column][row] };
    (0..rows * columns).map(|index| (gain * entry(index / columns, index % columns)) as f32).collect()
}

fn dot(left: &[f64], right: &[f64]) -> f64 {
    left.iter().zip(right).map(|(left, right)| left * right).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seeds::{Stream, generator};

    #[test]
    fn first_weights_are_orthogonal() {
        for (rows, columns) in [(20, 32), (32, 2), (8, 8)] {
            let matrix = orthogonal(rows, columns, 2.0, &mut generator(3, Stream::Weights, 0, 0));
            let at = |row: usize, column: usize| f64::from(matrix[row * columns + column]);
            let vectors: Vec<Vec<f64>> = if rows <= columns {
                (0..rows).map(|row| (0..columns).map(|column| at(row, column)).collect()).collect()
            } else {
                (0..columns).map(|column| (0..rows).map(|row| at(row, column)).collect()).collect()
            };
            for (i, left) in vectors.iter().enumerate() {
                for (j, right) in vectors.iter().enumerate() {
                    let expected = if i == j { 4.0 } else { 0.0 };
                    assert!((dot(left, right) - expected).abs() < 1e-5, "{rows}×{columns}: {i}, {j}");
                }
            }
        }
    }
}
