//! The mean and the spread of every feature, over all candidates seen so far.

use plimsoll_runtime::network::Normaliser;
use plimsoll_runtime::observation::FEATURES;
use serde::{Deserialize, Serialize};

/// A spread below this counts as this: a feature that hardly varied in training must not be blown up by
/// whatever production brings.
const SPREAD_MIN: f64 = 1e-2;

/// Running moments of the features.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FeatureSpread {
    candidates: u64,
    /// `[FEATURES]`.
    mean: Vec<f64>,
    /// `[FEATURES]`: sums of squared deviations from the mean.
    deviation: Vec<f64>,
    /// The normaliser of the policy that training started from. What is seen does not change it.
    given: Option<Normaliser>,
    /// Features that are 0 whatever they are.
    #[serde(default)]
    hidden: Vec<usize>,
}

impl FeatureSpread {
    pub(crate) fn new() -> Self {
        FeatureSpread {
            candidates: 0,
            mean: vec![0.0; FEATURES],
            deviation: vec![0.0; FEATURES],
            given: None,
            hidden: Vec::new(),
        }
    }

    /// Hides features from the network, by their columns.
    pub(crate) fn hide(&mut self, columns: &[usize]) {
        self.hidden.extend_from_slice(columns);
    }

    /// No moments, but the normaliser of a policy, which its weights go with.
    pub(crate) fn given(normaliser: Normaliser) -> Self {
        FeatureSpread { given: Some(normaliser), ..FeatureSpread::new() }
    }

    /// Whether it is what a policy came with, whatever is seen.
    pub(crate) fn is_given(&self) -> bool {
        self.given.is_some()
    }

    /// Takes the candidates of an observation in, one after another. `features` is `[candidates, FEATURES]`.
    ///
    /// Welford, *Note on a Method for Calculating Corrected Sums of Squares and Products* (1962).
    pub(crate) fn absorb(&mut self, features: &[f32]) {
        if self.is_given() {
            return;
        }
        for row in features.chunks_exact(FEATURES) {
            self.candidates += 1;
            let share = 1.0 / self.candidates as f64;
            for ((&value, mean), deviation) in row.iter().zip(&mut self.mean).zip(&mut self.deviation) {
                let before = f64::from(value) - *mean;
                *mean += before * share;
                *deviation += before * (f64::from(value) - *mean);
            }
        }
    }

    /// The normaliser that was given, or that these moments make; the identity while nothing was seen. Hidden features are
    /// multiplied by 0.
    pub(crate) fn normaliser(&self) -> Normaliser {
        let mut normaliser = self.of_all();
        self.hidden.iter().for_each(|&column| normaliser.scale[column] = 0.0);
        normaliser
    }

    fn of_all(&self) -> Normaliser {
        if let Some(given) = &self.given {
            return given.clone();
        }
        if self.candidates == 0 {
            return Normaliser::identity();
        }
        let scale = |deviation: &f64| (1.0 / (deviation / self.candidates as f64).sqrt().max(SPREAD_MIN)) as f32;
        Normaliser {
            mean: self.mean.iter().map(|&mean| mean as f32).collect(),
            scale: self.deviation.iter().map(scale).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_those_of_the_definition() {
        let mut spread = FeatureSpread::new();
        assert_eq!(spread.normaliser(), Normaliser::identity());
        for value in [1.0, 2.0, 3.0, 6.0] {
            let mut row = [5.0; FEATURES];
            row[3] = value;
            spread.absorb(&row);
        }
        let Normaliser { mean, scale } = spread.normaliser();
        assert_eq!((mean[3], mean[4]), (3.0, 5.0));
        assert_eq!((scale[3], scale[4]), ((1.0 / 3.5f64.sqrt()) as f32, 100.0));
    }

    #[test]
    fn a_hidden_feature_is_nothing_to_the_network() {
        let mut spread = FeatureSpread::new();
        spread.hide(&[2]);
        spread.absorb(&[1.0; FEATURES]);
        spread.absorb(&[2.0; FEATURES]);
        let mut seen = [f32::NAN; FEATURES];
        spread.normaliser().apply(&[7.0; FEATURES], &mut seen);
        assert_eq!((seen[1], seen[2]), (10.0, 0.0));
    }

    #[test]
    fn a_given_normaliser_stays() {
        let normaliser = Normaliser { mean: vec![0.5; FEATURES], scale: vec![3.0; FEATURES] };
        let mut spread = FeatureSpread::given(normaliser.clone());
        spread.absorb(&[9.0; FEATURES]);
        assert_eq!(spread.normaliser(), normaliser);
    }
}
