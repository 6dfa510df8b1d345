//! The average of the weights that a policy has come through.

use plimsoll_runtime::network::{Dense, NetworkWeights, WeightsError};

/// How much of the average the latest weights are.
const LATEST: f32 = 0.1;

/// Takes the latest weights into an average of those before, or begins one with them: each counts for a tenth, and what came before
/// for the less the longer ago it was.
///
/// One update is a step by some dozens of episodes, whose chance the next ones have to undo; the average has far less of that
/// (Polyak and Juditsky, *Acceleration of Stochastic Approximation by Averaging*, 1992).
pub(crate) fn averaged(
    before: Option<&NetworkWeights>,
    latest: NetworkWeights,
) -> Result<NetworkWeights, WeightsError> {
    let Some(before) = before else { return Ok(latest) };
    let towards = |before: &[f32], latest: &[f32]| -> Vec<f32> {
        before.iter().zip(latest).map(|(before, latest)| before + LATEST * (latest - before)).collect()
    };
    let layer = |index: usize| {
        let (before, latest) = (&before.layers()[index], &latest.layers()[index]);
        Dense { weights: towards(&before.weights, &latest.weights), bias: towards(&before.bias, &latest.bias) }
    };
    NetworkWeights::new(latest.normaliser().clone(), [layer(0), layer(1), layer(2)])
}

#[cfg(test)]
mod tests {
    use plimsoll_runtime::network::{LOGITS, Normaliser};
    use plimsoll_runtime::observation::FEATURES;

    use super::*;

    fn all(value: f32) -> NetworkWeights {
        let layer = |inputs: usize, outputs: usize| Dense {
            weights: vec![value; inputs * outputs],
            bias: vec![value; outputs],
        };
        NetworkWeights::new(Normaliser::identity(), [layer(FEATURES, 4), layer(4, 4), layer(4, LOGITS)]).unwrap()
    }

    #[test]
    fn it_follows_and_forgets_what_came_back() {
        assert_eq!(averaged(None, all(3.0)).unwrap(), all(3.0));
        let mut average = all(0.0);
        for latest in [1.0, -1.0].into_iter().cycle().take(200) {
            average = averaged(Some(&average), all(latest)).unwrap();
        }
        assert!(average.layers().iter().flat_map(|layer| &layer.weights).all(|weight| weight.abs() < 0.06));
        for _ in 0..100 {
            average = averaged(Some(&average), all(1.0)).unwrap();
        }
        assert!(average.layers().iter().flat_map(|layer| &layer.bias).all(|bias| (bias - 1.0).abs() < 1e-4));
    }
}
