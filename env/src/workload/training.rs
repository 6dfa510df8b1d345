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
    /// A fresh batch, which `draw` says.
    fn batch(&self, draw: &mut ChaCha8Rng, device: Device) -> Result<Batch, TchError>;

    /// The loss on a batch.
    fn loss(&self, batch: Batch) -> Result<Tensor, TchError>;
}

/// What an iteration learns.
pub(super) struct Batch {
    pub inputs: Tensor,
    pub targets: Tensor,
    /// Blocks of the model that it goes past, in order.
    pub without: Vec<usize>,
}

impl Batch {
    /// One that goes through all of the model.
    pub(super) fn new(inputs: Tensor, targets: Tensor) -> Self {
        Batch { inputs, targets, without: Vec::new() }
    }

    /// The same tensors.
    fn shallow_clone(&self) -> Self {
        let [inputs, targets] = [&self.inputs, &self.targets].map(Tensor::shallow_clone);
        Batch { inputs, targets, without: self.without.clone() }
    }
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
    /// The batch that every pass learns, where it is one.
    kept: Option<Batch>,
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
        let task = member.task(&variables)?;
        let training = member.training(variables)?;
        Ok(Loop { name: name.to_owned(), family, device, manner, draw, task, training, kept: None })
    }

    /// Adds a share of the gradients of the next batch's loss to those that there are. Returns the loss.
    fn pass(&mut self, share: f64) -> Result<Tensor, TchError> {
        let mixed = self.manner.bf16.then(|| Autocast::bf16(self.device));
        let batch = self.batch()?;
        let loss = self.task.loss(batch)?;
        drop(mixed);
        match share {
            1.0 => loss.f_backward()?,
            _ => loss.f_mul_scalar(share)?.f_backward()?,
        }
        Ok(loss)
    }

    /// What the next pass learns.
    fn batch(&mut self) -> Result<Batch, TchError> {
        if let Some(kept) = &self.kept {
            return Ok(kept.shallow_clone());
        }
        let batch = self.task.batch(&mut self.draw, self.device)?;
        self.kept = self.manner.one_batch.then(|| batch.shallow_clone());
        Ok(batch)
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
        let passes = self.manner.passes.get();
        let losses = (0..passes).map(|_| self.pass(1.0 / f64::from(passes))).collect::<Result<Vec<_>, _>>()?;
        self.training.optimizer.step()?;
        let sum = losses.iter().map(|loss| loss.f_double_value(&[])).sum::<Result<f64, _>>()?;
        Ok(sum / f64::from(passes))
    }

    fn variables(&self) -> Vec<(String, Tensor)> {
        named_variables(&self.training.variables)
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

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use rand::RngExt;
    use tch::nn::{self, Init};

    use super::super::tests::one_at_a_time;
    use super::*;

    /// Its loss is what was drawn for the batch, and it learns nothing.
    struct Echo(Tensor);

    struct EchoConfig;

    impl Member for EchoConfig {
        fn validate(&self) -> Result<(), Implausible> {
            Ok(())
        }

        fn flops(&self) -> f64 {
            0.0
        }

        fn task(&self, variables: &VarStore) -> Result<Box<dyn Task>, TchError> {
            Ok(Box::new(Echo(variables.root().var("one", &[], Init::Const(1.0)))))
        }

        fn training(&self, variables: VarStore) -> Result<Training, TchError> {
            Training::new(variables, nn::sgd(0.0, 0.0, 0.0, false), 0.0)
        }
    }

    impl Task for Echo {
        fn batch(&self, draw: &mut ChaCha8Rng, _: Device) -> Result<Batch, TchError> {
            let drawn = Tensor::from(draw.random::<f32>());
            Ok(Batch::new(drawn.shallow_clone(), drawn))
        }

        fn loss(&self, batch: Batch) -> Result<Tensor, TchError> {
            self.0.f_mul(&batch.inputs)
        }
    }

    #[test]
    fn gradients_of_several_passes_are_those_of_their_mean() {
        let _running = one_at_a_time();
        let iterate = |passes| {
            let manner = Manner { passes: NonZeroU32::new(passes).unwrap(), ..Manner::default() };
            let mut echo = Loop::new(&EchoConfig, "echo", "an-echo", Device::Cpu, 1, manner).unwrap();
            let loss = echo.iteration().unwrap();
            (loss, echo.trainable()[0].grad().double_value(&[]))
        };
        let ((one, one_gradient), (three, three_gradient)) = (iterate(1), iterate(3));
        assert_ne!(one, three, "other batches have a part in it");
        // The loss is what was drawn, times the parameter, which is one.
        assert_eq!(one, one_gradient);
        assert!((three - three_gradient).abs() < 1e-6, "{three}, {three_gradient}");
    }

    #[test]
    fn one_batch_is_learned_again_and_again() {
        let _running = one_at_a_time();
        let losses = |one_batch| {
            let manner = Manner { one_batch, ..Manner::default() };
            let mut echo = Loop::new(&EchoConfig, "echo", "an-echo", Device::Cpu, 1, manner).unwrap();
            [(); 3].map(|()| echo.iteration().unwrap())
        };
        let ([first, second, third], kept) = (losses(false), losses(true));
        assert!(first != second && second != third, "{first}, {second}, {third}");
        assert_eq!(kept, [first; 3]);
    }
}
