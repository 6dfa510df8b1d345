//! The hyperparameters of proximal policy optimisation.

use serde::{Deserialize, Serialize};

use crate::config::{
    ConfigError, Hyperparameters, annealed, require_counts, require_not_negative, require_positive, require_shares,
    require_width,
};

/// Proximal policy optimisation, in the names and the order in which the algorithm uses them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PpoConfig {
    /// Updates in the whole training run. The learning rate is annealed over them.
    pub updates: usize,
    /// Instances (reset seeds) that are rolled out for one update.
    pub instances_per_update: usize,
    /// Episodes rolled out of each instance. The mean return of those that terminate is subtracted from the
    /// last reward of each of them: a baseline that takes out how hard the instance is. With 1 there is no
    /// such baseline.
    pub episodes_per_instance: usize,
    /// Width of both hidden layers of the policy network.
    pub hidden: usize,
    /// Width of the hidden layers of the value network.
    pub critic_hidden: usize,
    /// Updates over which the mean and the spread of the features are measured. After them both are frozen.
    pub normaliser_updates: usize,
    /// Adam's step size at the first update.
    pub learning_rate: f64,
    /// Whether the learning rate falls linearly, to zero after the last update.
    pub anneal_learning_rate: bool,
    /// Discount γ per step. An episode is one plan with one reward at its end, so 1 is natural.
    pub discount: f32,
    /// λ of generalised advantage estimation.
    pub gae_lambda: f32,
    /// Passes over the transitions of an update.
    pub epochs: usize,
    /// Minibatches that one pass is divided into.
    pub minibatches: usize,
    /// Whether advantages are brought to mean 0 and spread 1 in each minibatch.
    pub normalise_advantages: bool,
    /// ε of the clipped surrogate: how far the probability of a choice may move within an update.
    pub clip: f64,
    /// Weight of the value loss.
    pub value_coefficient: f64,
    /// Weight of the entropy bonus.
    pub entropy_coefficient: f64,
    /// The gradient, as one vector over all parameters, is scaled down to at most this norm.
    pub gradient_norm_max: f64,
    /// After a pass over which the mean approximate KL divergence exceeds this, the update ends. Zero never
    /// ends it.
    pub target_kl: f64,
}

impl Default for PpoConfig {
    fn default() -> Self {
        PpoConfig {
            updates: 100,
            instances_per_update: 16,
            episodes_per_instance: 4,
            hidden: 32,
            critic_hidden: 32,
            normaliser_updates: 5,
            learning_rate: 3e-3,
            anneal_learning_rate: true,
            discount: 1.0,
            gae_lambda: 0.95,
            epochs: 4,
            minibatches: 4,
            normalise_advantages: true,
            clip: 0.2,
            value_coefficient: 0.5,
            entropy_coefficient: 0.001,
            gradient_norm_max: 0.5,
            target_kl: 0.03,
        }
    }
}

impl Hyperparameters for PpoConfig {
    const TABLE: &'static str = "ppo";

    fn updates_mut(&mut self) -> &mut usize {
        &mut self.updates
    }

    fn validate(&self) -> Result<(), ConfigError> {
        require_counts(&[
            ("updates", self.updates),
            ("instances_per_update", self.instances_per_update),
            ("episodes_per_instance", self.episodes_per_instance),
            ("epochs", self.epochs),
            ("minibatches", self.minibatches),
        ])?;
        for (key, width) in [("hidden", self.hidden), ("critic_hidden", self.critic_hidden)] {
            require_width(key, width)?;
        }
        require_shares(&[("discount", self.discount.into()), ("gae_lambda", self.gae_lambda.into())])?;
        require_positive(&[
            ("learning_rate", self.learning_rate),
            ("clip", self.clip),
            ("gradient_norm_max", self.gradient_norm_max),
        ])?;
        require_not_negative(&[
            ("value_coefficient", self.value_coefficient),
            ("entropy_coefficient", self.entropy_coefficient),
            ("target_kl", self.target_kl),
        ])
    }
}

impl PpoConfig {
    /// The learning rate of an update, counted from 0.
    pub(crate) fn learning_rate_at(&self, update: usize) -> f64 {
        let Self { learning_rate, updates, .. } = *self;
        if self.anneal_learning_rate { annealed(learning_rate, update, updates) } else { learning_rate }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_and_what_is_not_is_named() {
        PpoConfig::default().validate().unwrap();
        let error = PpoConfig { minibatches: 0, ..PpoConfig::default() }.validate().unwrap_err();
        assert_eq!(error.to_string(), "minibatches is 0, expected between 1 and a million");
        let error = PpoConfig { discount: 1.5, ..PpoConfig::default() }.validate().unwrap_err();
        assert_eq!(error.to_string(), "discount is 1.5, expected 0 to 1");
        let error = PpoConfig { clip: f64::NAN, ..PpoConfig::default() }.validate().unwrap_err();
        assert_eq!(error.to_string(), "clip is NaN, expected a finite number above 0");
    }

    #[test]
    fn an_unknown_hyperparameter_is_refused() {
        let error = serde_json::from_str::<PpoConfig>(r#"{"epoch": 3}"#).unwrap_err();
        assert!(error.to_string().contains("unknown field `epoch`"));
    }

    #[test]
    fn the_learning_rate_falls_to_zero() {
        let config = PpoConfig { updates: 4, learning_rate: 1.0, ..PpoConfig::default() };
        let rates: Vec<f64> = (0..5).map(|update| config.learning_rate_at(update)).collect();
        assert_eq!(rates, [1.0, 0.75, 0.5, 0.25, 0.0]);
    }
}
