//! What every training loop here shares: its variables, its optimizer and its source of randomness.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::nn::{OptimizerConfig, VarStore};
use tch::{COptimizer, TchError, Tensor};

/// Seeds everything random in a workload: libtorch's generator now, and the generator that it returns.
///
/// Call it before the parameters are made.
pub(super) fn seeded(seed: u64) -> ChaCha8Rng {
    let mut draw = ChaCha8Rng::seed_from_u64(seed);
    reseed_libtorch(&mut draw);
    draw
}

/// Seeds libtorch's process-wide generator, which dropout draws from.
pub(super) fn reseed_libtorch(draw: &mut ChaCha8Rng) {
    tch::manual_seed(draw.next_u64() as i64);
}

/// Variables and the optimizer that trains them.
///
/// It stands in for [`tch::nn::Optimizer`], whose step panics where an operator fails.
pub(super) struct Training {
    variables: VarStore,
    optimizer: COptimizer,
}

impl Training {
    /// Trains all `variables` made so far.
    pub fn new(variables: VarStore, optimizer: impl OptimizerConfig, learning_rate: f64) -> Result<Self, TchError> {
        let mut optimizer = optimizer.build_copt(learning_rate)?;
        for parameter in variables.trainable_variables() {
            optimizer.add_parameters(&parameter, 0)?;
        }
        Ok(Training { variables, optimizer })
    }

    /// Lets go of the gradients of the iteration before.
    pub fn zero_grad(&self) -> Result<(), TchError> {
        self.optimizer.zero_grad()
    }

    /// Runs the backward pass and the optimizer step, and returns the value of the loss.
    pub fn backward_step(&self, loss: &Tensor) -> Result<f64, TchError> {
        loss.f_backward()?;
        self.optimizer.step()?;
        loss.f_double_value(&[])
    }

    /// Parameters and buffers, sorted by name.
    pub fn variables(&self) -> Vec<(String, Tensor)> {
        let mut variables: Vec<_> = self.variables.variables().into_iter().collect();
        variables.sort_by(|a, b| a.0.cmp(&b.0));
        variables
    }

    /// The parameters.
    pub fn trainable(&self) -> Vec<Tensor> {
        self.variables.trainable_variables()
    }
}
