//! The trained actor on its way to production.

use burn::module::Param;
use burn::tensor::Tensor;
use plimsoll_runtime::network::{self, NetworkWeights, Normaliser, WeightsError};

use crate::model::{Actor, Dense};

/// The weights of the actor, for the runtime's network.
///
/// Fails where training has driven a weight out of the finite.
pub(crate) fn network_weights(actor: &Actor, normaliser: Normaliser) -> Result<NetworkWeights, WeightsError> {
    let [first, second] = &actor.hidden;
    NetworkWeights::new(normaliser, [first, second, &actor.output].map(exported))
}

fn exported(layer: &Dense) -> network::Dense {
    network::Dense { weights: elements(&layer.weights), bias: elements(&layer.bias) }
}

/// Row-major elements of a parameter.
fn elements<const D: usize>(param: &Param<Tensor<D>>) -> Vec<f32> {
    param.val().into_data().try_into_vec().expect("the parameters of the agent hold f32")
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};
    use plimsoll_runtime::network::{LOGITS, Network};
    use plimsoll_runtime::observation::FEATURES;
    use rand::RngExt;

    use super::*;
    use crate::model::ActorCritic;
    use crate::ppo::PpoConfig;
    use crate::seeds::{Stream, generator};

    fn argmax(logits: &[f32]) -> usize {
        (1..logits.len()).fold(0, |best, index| if logits[index] > logits[best] { index } else { best })
    }

    /// The export round trip: burn's logits and the runtime's agree to 1e-5, with the same best choice.
    #[test]
    fn the_runtime_computes_what_burn_computes() {
        let mut rng = generator(5, Stream::Choices, 0, 0);
        for hidden in [7, 32, 64] {
            let config = PpoConfig { hidden, ..PpoConfig::default() };
            let actor = ActorCritic::new(&config, &mut rng, &Device::flex()).actor;
            let mut network = Network::new(&network_weights(&actor, Normaliser::identity()).unwrap());
            for candidates in [1, 20, 300] {
                let features: Vec<f32> = (0..candidates * FEATURES).map(|_| rng.random_range(-6.0..6.0)).collect();
                let found: Vec<f32> = features.chunks_exact(FEATURES).flat_map(|row| network.logits(row)).collect();
                let data = TensorData::new(features, [candidates, FEATURES]);
                let logits = actor.logits(Tensor::from_data(data, &Device::flex()));
                let expected: Vec<f32> = logits.into_data().try_into_vec().unwrap();
                assert_eq!(found.len(), candidates * LOGITS);
                let largest = expected.iter().fold(0.0f32, |largest, logit| largest.max(logit.abs()));
                for (found, expected) in found.iter().zip(&expected) {
                    assert!((found - expected).abs() <= 1e-5 * largest, "{found}, not {expected}");
                }
                assert_eq!(argmax(&found), argmax(&expected));
            }
        }
    }
}
