//! What every training loop here shares: the loop itself, its variables, its optimizer and its source of randomness.
//!
//! Nothing here knows what is learned: a family gives its [`Member`], which makes a [`Task`].

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use plimsoll_runtime::torch::settings::Autocast;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::nn::{OptimizerConfig, VarStore};
use tch::{COptimizer, Device, TchError, Tensor};

use super::{Implausible, Manner, Workload};

/// What a family's configuration says of one of its members.
pub(super) trait Member {
    /// Says which key holds a value that no workload can have.
    fn validate(&self) -> Result<(), Implausible>;

    /// Floating-point operations of one iteration: an estimate from the structure, which counts matrix products and
    /// convolutions alone.
    fn flops(&self) -> f64;

    /// Makes the model, whose parameters become the first of `variables`, and what feeds it.
    fn task(&self, variables: &VarStore) -> Result<Box<dyn Task>, TchError>;

    /// The optimizer for all of `variables`.
    fn training(&self, variables: VarStore) -> Result<Training, TchError>;
}

/// A model, the data that it learns, and how it is judged.
pub(super) trait Task {
    /// The loss on a fresh batch, which `draw` says.
    fn loss(&self, draw: &mut ChaCha8Rng, device: Device) -> Result<Tensor, TchError>;

    /// Learns the next batch again and again. For tasks whose batches take as long to make as to learn.
    fn keep_batch(&mut self) {}
}

/// The training loop of every family.
pub(super) struct Loop {
    name: String,
    family: &'static str,
    device: Device,
    manner: Manner,
    draw: ChaCha8Rng,
    task: Box<dyn Task>,
    training: Training,
}

impl Loop {
    /// A loop for `member`, all of whose randomness comes from `seed`.
    pub fn new(
        member: &dyn Member,
        family: &'static str,
        name: &str,
        device: Device,
        seed: u64,
        manner: Manner,
    ) -> Result<Self, TchError> {
        let mut draw = ChaCha8Rng::seed_from_u64(seed);
        reseed_libtorch(&mut draw);
        let variables = VarStore::new(device);
        let mut task = member.task(&variables)?;
        if manner.one_batch {
            task.keep_batch();
        }
        let training = member.training(variables)?;
        Ok(Loop { name: name.to_owned(), family, device, manner, draw, task, training })
    }
}

impl Workload for Loop {
    fn name(&self) -> &str {
        &self.name
    }

    fn family(&self) -> &str {
        self.family
    }

    fn iteration(&mut self) -> Result<f64, TchError> {
        reseed_libtorch(&mut self.draw);
        self.training.optimizer.zero_grad()?;
        let mixed = self.manner.bf16.then(|| Autocast::bf16(self.device));
        let loss = self.task.loss(&mut self.draw, self.device)?;
        drop(mixed);
        loss.f_backward()?;
        self.training.optimizer.step()?;
        loss.f_double_value(&[])
    }

    fn variables(&self) -> Vec<(String, Tensor)> {
        named_variables(&self.training.variables)
    }

    fn trainable(&self) -> Vec<Tensor> {
        self.training.variables.trainable_variables()
    }
}

/// The variables, in the order of their names: a store hands them out in any.
pub fn named_variables(variables: &VarStore) -> Vec<(String, Tensor)> {
    let mut variables: Vec<_> = variables.variables().into_iter().collect();
    variables.sort_by(|a, b| a.0.cmp(&b.0));
    variables
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
}

/// Seeds libtorch's process-wide generator, which parameters and dropout are drawn from.
fn reseed_libtorch(draw: &mut ChaCha8Rng) {
    tch::manual_seed(draw.next_u64() as i64);
}

/// Runs a module of `tch`, which panics where an operator fails, and returns that as an error.
///
/// Nothing of ours is left half-changed by such a panic.
pub(super) fn caught<T>(module: impl FnOnce() -> T) -> Result<T, TchError> {
    catch_unwind(AssertUnwindSafe(module)).map_err(|panic| TchError::Torch(panic_message(&*panic)))
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("the model panicked").to_owned()
}
