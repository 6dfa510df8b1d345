//! Observations as tensors.
//!
//! The candidates of all observations stand in one matrix, row under row, so that no network is evaluated
//! on padding. Only what is taken over an observation as a whole is padded to the largest of the batch.

use burn::tensor::{Device, Int, Tensor, TensorData};
use plimsoll_env::environment::Observation;
use plimsoll_runtime::network::{LOGITS, Normaliser};
use plimsoll_runtime::observation::FEATURES;

/// Added to the logit of a choice that is not legal: its probability becomes exactly zero.
const FORBIDDEN: f32 = -1e9;

/// A batch of observations. `rows` counts all candidates, `width` those of the largest observation.
#[derive(Clone, Debug)]
pub(crate) struct Batch {
    /// `[rows, FEATURES]`, normalised.
    pub(crate) features: Tensor<2>,
    /// `[observations · width]`: the row of each observation's each candidate; some row for padding.
    slots: Tensor<1, Int>,
    /// `[observations, width, 1]`: 1 for a candidate, 0 for padding.
    present: Tensor<3>,
    /// `[observations, 1]`: one over the number of candidates.
    share: Tensor<2>,
    /// `[observations, width · LOGITS]`: 0 for a legal choice, else [`FORBIDDEN`].
    forbidden: Tensor<2>,
}

impl Batch {
    /// Lays the observations out. None of them may be empty.
    pub(crate) fn new(observations: &[&Observation], normaliser: &Normaliser, device: &Device) -> Self {
        let count = observations.len();
        let width = observations.iter().map(|observation| observation.candidates()).max().unwrap_or(0);
        let rows = observations.iter().map(|observation| observation.candidates()).sum();
        let mut features = vec![0.0; rows * FEATURES];
        let mut slots = vec![0i64; count * width];
        let mut present = vec![0.0f32; count * width];
        let mut share = Vec::with_capacity(count);
        let mut forbidden = vec![FORBIDDEN; count * width * LOGITS];

        let mut row = 0;
        for (index, observation) in observations.iter().enumerate() {
            share.push(1.0 / observation.candidates() as f32);
            let candidates = observation.features.chunks_exact(FEATURES).zip(&observation.action_mask);
            for (slot, (values, mask)) in (index * width..).zip(candidates) {
                normaliser.apply(values, &mut features[row * FEATURES..(row + 1) * FEATURES]);
                slots[slot] = row as i64;
                present[slot] = 1.0;
                for (action, _) in mask.iter().enumerate().filter(|(_, legal)| **legal) {
                    forbidden[slot * LOGITS + action] = 0.0;
                }
                row += 1;
            }
        }
        Batch {
            features: Tensor::from_data(TensorData::new(features, [rows, FEATURES]), device),
            slots: Tensor::from_data(TensorData::new(slots, [count * width]), device),
            present: Tensor::from_data(TensorData::new(present, [count, width, 1]), device),
            share: Tensor::from_data(TensorData::new(share, [count, 1]), device),
            forbidden: Tensor::from_data(TensorData::new(forbidden, [count, width * LOGITS]), device),
        }
    }

    /// How many observations there are.
    pub(crate) fn observations(&self) -> usize {
        self.share.dims()[0]
    }

    /// Logits `[rows, LOGITS]` to logits `[observations, width · LOGITS]`, those of no legal choice far down.
    pub(crate) fn mask(&self, logits: Tensor<2>) -> Tensor<2> {
        logits.select(0, self.slots.clone()).reshape(self.forbidden.dims()) + self.forbidden.clone()
    }

    /// `[observations, width · LOGITS]`: 0 for the choices of each observation that `allowed` lists, else [`FORBIDDEN`].
    pub(crate) fn forbid_all_but(&self, allowed: &[&[usize]], device: &Device) -> Tensor<2> {
        let [observations, columns] = self.forbidden.dims();
        let mut forbidden = vec![FORBIDDEN; observations * columns];
        for (row, allowed) in forbidden.chunks_exact_mut(columns).zip(allowed) {
            allowed.iter().for_each(|&chosen| row[chosen] = 0.0);
        }
        Tensor::from_data(TensorData::new(forbidden, [observations, columns]), device)
    }

    /// Embeddings `[rows, channels]`, none negative, to their mean and maximum over the candidates of each
    /// observation, `[observations, 2 · channels]`.
    pub(crate) fn pool(&self, embeddings: Tensor<2>) -> Tensor<2> {
        let [_, channels] = embeddings.dims();
        let [observations, width, _] = self.present.dims();
        let padded = embeddings.select(0, self.slots.clone()).reshape([observations, width, channels]);
        let candidates = padded * self.present.clone();
        let sum = candidates.clone().sum_dim(1).reshape([observations, channels]);
        // The zeros of the padding do not show in a maximum of what is never negative.
        let max = candidates.max_dim(1).reshape([observations, channels]);
        Tensor::cat(vec![sum * self.share.clone(), max], 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_is_forbidden_and_pools_to_nothing() {
        let observation = |values: &[f32], mask: &[[bool; 2]]| Observation {
            features: values.iter().flat_map(|&value| [value; FEATURES]).collect(),
            action_mask: mask.to_vec(),
        };
        let short = observation(&[4.0], &[[true, false]]);
        let long = observation(&[1.0, 3.0], &[[true, true], [false, true]]);
        let batch = Batch::new(&[&short, &long], &Normaliser::identity(), &Device::flex());
        let column = batch.features.clone().narrow(1, 0, 1);
        let pooled: Vec<f32> = batch.pool(column.clone()).into_data().try_into_vec().unwrap();
        assert_eq!(pooled, [4.0, 4.0, 2.0, 3.0]);
        let masked: Vec<f32> = batch.mask(column.repeat_dim(1, LOGITS)).into_data().try_into_vec().unwrap();
        let legal: Vec<f32> = masked.iter().map(|&logit| if logit > -1e8 { logit } else { 0.0 }).collect();
        assert_eq!(legal, [4.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 3.0]);
    }
}
