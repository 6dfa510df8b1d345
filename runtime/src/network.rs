//! The policy network: one small perceptron, applied to every candidate by itself.
//!
//! ```text
//! features [FEATURES] ─normalise─► Dense ─ReLU─► Dense ─ReLU─► Dense ─► logits [2]: swap, recompute
//! ```
//!
//! Inference only, in plain Rust, without allocation. It knows nothing of training, of files, or of which
//! evictions are legal.

mod layer;

use serde::{Deserialize, Serialize};

use self::layer::{CANDIDATES, Layer};
use crate::observation::FEATURES;

/// Logits per candidate: swap, then recompute.
pub const LOGITS: usize = 2;
/// The widest hidden layer that is accepted.
pub const HIDDEN_MAX: usize = 1024;
/// Normalised features are held within ±this, so that one feature far from its training range cannot
/// drown all others.
const NORMALISED_MAX: f32 = 10.0;

/// Brings every feature to a mean of zero and a spread of one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Normaliser {
    /// `[FEATURES]`: subtracted.
    pub mean: Vec<f32>,
    /// `[FEATURES]`: multiplied after that; the reciprocal of the spread.
    pub scale: Vec<f32>,
}

impl Normaliser {
    /// The normaliser that only clamps.
    pub fn identity() -> Self {
        Normaliser { mean: vec![0.0; FEATURES], scale: vec![1.0; FEATURES] }
    }

    /// Writes the normalised `row` to `out`. Both are `[FEATURES]`.
    pub fn apply(&self, row: &[f32], out: &mut [f32]) {
        for (((out, value), mean), scale) in out.iter_mut().zip(row).zip(&self.mean).zip(&self.scale) {
            *out = ((value - mean) * scale).clamp(-NORMALISED_MAX, NORMALISED_MAX);
        }
    }
}

/// The weights of a dense layer: `output = input · weights + bias`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dense {
    /// Row-major `[inputs, outputs]`.
    pub weights: Vec<f32>,
    /// `[outputs]`.
    pub bias: Vec<f32>,
}

impl Dense {
    /// How many outputs it has.
    pub fn outputs(&self) -> usize {
        self.bias.len()
    }
}

/// Weights that do not make a policy network.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WeightsError {
    /// A layer is empty or too wide.
    #[error("hidden layer {layer} has {found} outputs; 1 to {HIDDEN_MAX} are possible")]
    Width {
        /// Index of the layer.
        layer: usize,
        /// Its outputs.
        found: usize,
    },
    /// An array has the wrong number of elements.
    #[error("{array} has {found} elements, expected {expected}")]
    Elements {
        /// The array, such as `layer 1 weights`.
        array: String,
        /// What the other layers demand.
        expected: usize,
        /// What it holds.
        found: usize,
    },
    /// An array holds an infinity or a NaN.
    #[error("{array} holds a value that is not finite at index {index}")]
    NotFinite {
        /// The array, such as `layer 1 weights`.
        array: String,
        /// Index of the first such value.
        index: usize,
    },
}

/// A complete policy network, known to be consistent and finite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "UncheckedWeights", into = "UncheckedWeights")]
pub struct NetworkWeights {
    normaliser: Normaliser,
    layers: [Dense; 3],
}

impl NetworkWeights {
    /// Checks every shape and every value.
    pub fn new(normaliser: Normaliser, layers: [Dense; 3]) -> Result<Self, WeightsError> {
        check_array("mean", &normaliser.mean, FEATURES)?;
        check_array("scale", &normaliser.scale, FEATURES)?;
        let mut inputs = FEATURES;
        for (index, layer) in layers.iter().enumerate() {
            let outputs = if index == 2 { LOGITS } else { layer.outputs() };
            if !(1..=HIDDEN_MAX).contains(&outputs) {
                return Err(WeightsError::Width { layer: index, found: outputs });
            }
            check_array(&format!("layer {index} weights"), &layer.weights, inputs * outputs)?;
            check_array(&format!("layer {index} bias"), &layer.bias, outputs)?;
            inputs = outputs;
        }
        Ok(NetworkWeights { normaliser, layers })
    }

    /// What is done to the features.
    pub fn normaliser(&self) -> &Normaliser {
        &self.normaliser
    }

    /// Hidden, hidden, output.
    pub fn layers(&self) -> &[Dense; 3] {
        &self.layers
    }

    /// How many weights and biases there are.
    pub fn parameters(&self) -> usize {
        self.layers.iter().map(|layer| layer.weights.len() + layer.bias.len()).sum()
    }
}

fn check_array(array: &str, values: &[f32], expected: usize) -> Result<(), WeightsError> {
    if values.len() != expected {
        return Err(WeightsError::Elements { array: array.to_owned(), expected, found: values.len() });
    }
    match values.iter().position(|value| !value.is_finite()) {
        Some(index) => Err(WeightsError::NotFinite { array: array.to_owned(), index }),
        None => Ok(()),
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct UncheckedWeights {
    normaliser: Normaliser,
    layers: [Dense; 3],
}

impl TryFrom<UncheckedWeights> for NetworkWeights {
    type Error = WeightsError;

    fn try_from(unchecked: UncheckedWeights) -> Result<Self, WeightsError> {
        NetworkWeights::new(unchecked.normaliser, unchecked.layers)
    }
}

impl From<NetworkWeights> for UncheckedWeights {
    fn from(weights: NetworkWeights) -> Self {
        UncheckedWeights { normaliser: weights.normaliser, layers: weights.layers }
    }
}

/// The network, laid out for inference.
///
/// A clone is independent: give each thread its own.
#[derive(Clone, Debug)]
pub struct Network {
    normaliser: Normaliser,
    layers: [Layer; 3],
    /// Normalised, a column for each candidate of those that are computed together.
    features: [[f32; CANDIDATES]; FEATURES],
    /// Per layer, likewise; the last has the logits.
    outputs: [Vec<[f32; CANDIDATES]>; 3],
}

impl Network {
    /// Lays the weights out.
    pub fn new(weights: &NetworkWeights) -> Self {
        let [first, second, output] = weights.layers();
        let layers = [Layer::new(first, true), Layer::new(second, true), Layer::new(output, false)];
        Network {
            normaliser: weights.normaliser.clone(),
            features: [[0.0; CANDIDATES]; FEATURES],
            outputs: [0, 1, 2].map(|layer| vec![[0.0; CANDIDATES]; layers[layer].width()]),
            layers,
        }
    }

    /// The logits of one candidate: swap, recompute.
    ///
    /// # Panics
    ///
    /// If `features` is not `[FEATURES]`.
    pub fn logits(&mut self, features: &[f32]) -> [f32; LOGITS] {
        assert_eq!(features.len(), FEATURES, "a row holds one value per feature");
        let mut logits = [0.0; LOGITS];
        self.for_each_logits(features, |_, found| logits = found);
        logits
    }

    /// Calls `each` with the row and the logits of every candidate, whose features are row-major `[candidates, FEATURES]`.
    /// They are what [`Network::logits`] says of each, to the bit, at a fraction of the cost.
    ///
    /// # Panics
    ///
    /// If the last row is not whole.
    pub fn for_each_logits(&mut self, features: &[f32], mut each: impl FnMut(usize, [f32; LOGITS])) {
        let (rows, rest) = features.as_chunks::<FEATURES>();
        assert!(rest.is_empty(), "a row holds one value per feature");
        for (block, rows) in rows.chunks(CANDIDATES).enumerate() {
            self.evaluate(rows);
            let [swap, recompute] = self.outputs[2][..LOGITS] else { unreachable!("the last layer has two outputs") };
            for (column, (&swap, &recompute)) in swap.iter().zip(&recompute).enumerate().take(rows.len()) {
                each(block * CANDIDATES + column, [swap, recompute]);
            }
        }
    }

    /// Fills `outputs` for up to [`CANDIDATES`] rows. The other columns are computed beside them, for that takes no longer.
    fn evaluate(&mut self, rows: &[[f32; FEATURES]]) {
        for (column, row) in rows.iter().enumerate() {
            let mut normalised = [0.0; FEATURES];
            self.normaliser.apply(row, &mut normalised);
            for (features, value) in self.features.iter_mut().zip(normalised) {
                features[column] = value;
            }
        }
        let [first, second, logits] = &mut self.outputs;
        self.layers[0].forward(&self.features, first);
        self.layers[1].forward(first, second);
        self.layers[2].forward(second, logits);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::random::SplitMix64;

    /// A network of two hidden layers of the given widths, all of it drawn from `seed`.
    pub(crate) fn drawn(seed: u64, first: usize, second: usize) -> NetworkWeights {
        let mut random = SplitMix64::new(seed);
        let mut draw = |elements: usize| (0..elements).map(|_| random.unit() * 2.0 - 1.0).collect::<Vec<f32>>();
        let normaliser = Normaliser { mean: draw(FEATURES), scale: draw(FEATURES) };
        let mut dense = |inputs: usize, outputs: usize| Dense { weights: draw(inputs * outputs), bias: draw(outputs) };
        let layers = [dense(FEATURES, first), dense(first, second), dense(second, LOGITS)];
        NetworkWeights::new(normaliser, layers).unwrap()
    }

    /// The definition, in double precision.
    fn reference(weights: &NetworkWeights, features: &[f32]) -> Vec<f64> {
        let Normaliser { mean, scale } = weights.normaliser();
        let mut values: Vec<f64> = (0..FEATURES)
            .map(|i| ((f64::from(features[i]) - f64::from(mean[i])) * f64::from(scale[i])).clamp(-10.0, 10.0))
            .collect();
        for (index, layer) in weights.layers().iter().enumerate() {
            values = (0..layer.outputs())
                .map(|output| {
                    let products = values.iter().enumerate();
                    let sum: f64 =
                        products.map(|(i, v)| v * f64::from(layer.weights[i * layer.outputs() + output])).sum();
                    let sum = sum + f64::from(layer.bias[output]);
                    if index == 2 { sum } else { sum.max(0.0) }
                })
                .collect();
        }
        values
    }

    #[test]
    fn logits_are_those_of_the_definition_at_every_width() {
        let mut random = SplitMix64::new(7);
        for (first, second) in [(1, 1), (5, 33), (32, 32), (64, 48), (100, 7)] {
            let weights = drawn(3, first, second);
            let mut network = Network::new(&weights);
            for _ in 0..20 {
                let features: Vec<f32> = (0..FEATURES).map(|_| random.unit() * 12.0 - 6.0).collect();
                let expected = reference(&weights, &features);
                for (found, expected) in network.logits(&features).iter().zip(&expected) {
                    let error = (f64::from(*found) - expected).abs();
                    assert!(error <= 1e-4 * (1.0 + expected.abs()), "{first}×{second}: {found}, not {expected}");
                }
            }
        }
    }

    #[test]
    fn weights_that_do_not_fit_together_are_refused() {
        let good = drawn(1, 8, 8);
        let refusal = |change: &dyn Fn(&mut Normaliser, &mut [Dense; 3])| {
            let (mut normaliser, mut layers) = (good.normaliser.clone(), good.layers.clone());
            change(&mut normaliser, &mut layers);
            NetworkWeights::new(normaliser, layers).unwrap_err().to_string()
        };
        assert!(refusal(&|normaliser, _| normaliser.mean.truncate(3)).contains("mean has 3 elements, expected"));
        assert!(refusal(&|_, layers| layers[0].bias.clear()).contains("hidden layer 0 has 0 outputs"));
        assert!(
            refusal(&|_, layers| layers[1].weights.truncate(63))
                .contains("layer 1 weights has 63 elements, expected 64")
        );
        assert!(refusal(&|_, layers| layers[2].bias.push(0.0)).contains("layer 2 bias has 3 elements, expected 2"));
        assert!(
            refusal(&|_, layers| layers[2].weights[5] = f32::NAN)
                .contains("layer 2 weights holds a value that is not finite at index 5")
        );
    }

    #[test]
    fn a_feature_out_of_range_is_clamped() {
        let mut network = Network::new(&NetworkWeights { normaliser: Normaliser::identity(), ..drawn(2, 16, 16) });
        assert_eq!(network.logits(&[1e30; FEATURES]), network.logits(&[NORMALISED_MAX; FEATURES]));
    }
}
