//! A training loop with what makes placement hard: batch-norm, in-place activations, dropout, gradients accumulated
//! over two micro-batches, a graph that is walked twice, clipped gradients, Adam, data on loan. It can depart from what it
//! does.

use plimsoll_env::workload::{Workload, named_variables};
use tch::nn::{self, Module, ModuleT, OptimizerConfig};
use tch::{Device, Kind, Reduction, TchError, Tensor};

const BATCH: i64 = 16;
const HIDDEN: i64 = 128;

/// How one iteration departs from all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Departure {
    /// A micro-batch of another size.
    OtherBatch,
    /// One more operator, which reads an early activation, between forward and backward pass.
    ExtraOperator,
    /// An operator that fails, after which the iteration returns its error.
    FailingOperator,
    /// The iteration returns an error before the backward pass.
    EarlyReturn,
    /// A constant of zeros is filled with other bytes past the dispatcher, and used at once.
    FilledAtOnce,
    /// The same, but the constant is used long after it was made.
    FilledEarly,
}

/// The loop.
pub struct Awkward {
    variables: nn::VarStore,
    optimizer: nn::Optimizer,
    convolution: nn::Conv2D,
    normalise: nn::BatchNorm,
    second: nn::Conv2D,
    inner: nn::Linear,
    outer: nn::Linear,
    seed: u64,
    iterations: u64,
}

impl Awkward {
    /// The loop, whose parameters and batches are drawn from `seed`.
    pub fn new(seed: u64) -> Self {
        tch::manual_seed(seed as i64);
        let variables = nn::VarStore::new(Device::Cpu);
        let at = variables.root();
        let padded = nn::ConvConfig { padding: 1, ..Default::default() };
        let convolution = nn::conv2d(&at / "convolution", 3, 8, 3, padded);
        let normalise = nn::batch_norm2d(&at / "normalise", 8, Default::default());
        let second = nn::conv2d(&at / "second", 8, 8, 3, padded);
        let inner = nn::linear(&at / "inner", 8 * 4 * 4, HIDDEN, Default::default());
        let outer = nn::linear(&at / "outer", HIDDEN, 4, Default::default());
        let optimizer = nn::Adam::default().build(&variables, 1e-3).unwrap();
        Awkward { variables, optimizer, convolution, normalise, second, inner, outer, seed, iterations: 0 }
    }

    /// Runs one iteration, departing as told. Where it ends early the loss is NaN.
    pub fn iterate(&mut self, departure: Option<Departure>) -> f64 {
        self.try_iterate(departure).unwrap_or(f64::NAN)
    }

    fn try_iterate(&mut self, departure: Option<Departure>) -> Result<f64, TchError> {
        tch::manual_seed((1_000 * self.seed + self.iterations) as i64);
        self.iterations += 1;
        self.optimizer.zero_grad();
        let first = self.micro_batch(None)?;
        let second = self.micro_batch(departure)?;
        self.clip()?;
        self.optimizer.step();
        (first + second).f_double_value(&[])
    }

    /// Adds the gradients of half a batch, and returns its loss.
    fn micro_batch(&self, departure: Option<Departure>) -> Result<Tensor, TchError> {
        let departs = |wanted| departure == Some(wanted);
        let batch = if departs(Departure::OtherBatch) { 5 } else { BATCH };
        let pictures = Tensor::f_randn([batch, 3, 8, 8], (Kind::Float, Device::Cpu))?.set_requires_grad(true);
        let labels = Tensor::f_randint(4, [batch], (Kind::Int64, Device::Cpu))?;
        // `from_slice` makes zeros as `zeros` does, and then copies the slice past the dispatcher.
        let constant = |filled: bool| match filled {
            false => Tensor::f_zeros([batch * HIDDEN], (Kind::Float, Device::Cpu)),
            true => Tensor::f_from_slice(&[0.5f32; (BATCH * HIDDEN) as usize]),
        };
        let early = constant(departs(Departure::FilledEarly))?;
        let doubled = doubled_loan(batch * HIDDEN)?;

        let hidden = self.convolution.forward(&pictures);
        let mut hidden = self.normalise.forward_t(&hidden, true);
        let hidden = hidden.f_relu_()?;
        let hidden = self.second.forward(&hidden).f_gelu("none")?;
        let pooled = hidden.f_dropout(0.3, true)?.f_max_pool2d([2, 2], [2, 2], [0, 0], [1, 1], false)?;
        let features = self.inner.forward(&pooled.f_flatten(1, -1)?).f_relu_()?;
        let late = constant(departs(Departure::FilledAtOnce))?;
        let features = features.f_addcmul(&features, &late.f_view([batch, HIDDEN])?)?;
        let features = features.f_addcmul(&features, &early.f_view([batch, HIDDEN])?)?;
        let features = features.f_addcmul(&features, &doubled.f_view([batch, HIDDEN])?)?;
        let logits = self.outer.forward(&features);
        let loss = logits.f_cross_entropy_loss(&labels, None::<&Tensor>, Reduction::Mean, -100, 0.0)?;
        match departure {
            Some(Departure::ExtraOperator) => drop(hidden.f_square()?),
            Some(Departure::FailingOperator) => drop(logits.f_matmul(&pictures)?),
            Some(Departure::EarlyReturn) => return Err(TchError::Torch("the iteration was given up".to_owned())),
            _ => {}
        }
        // Walks the graph once for the slope alone, and keeps it for the walk that trains.
        let slope = Tensor::f_run_backward(&[&loss], &[&pictures], true, false)?.remove(0);
        let steepness = slope.f_norm()?.f_detach()?;
        let loss = loss.f_mul(&steepness.f_add_scalar(1.0)?)?.f_mul_scalar(0.5)?;
        loss.f_backward()?;
        loss.f_detach()
    }

    /// Scales all gradients down to a norm of at most one half, without reading a value.
    fn clip(&self) -> Result<(), TchError> {
        let mut gradients: Vec<Tensor> = self.trainable().iter().map(Tensor::grad).collect();
        let norms = gradients.iter().map(Tensor::f_norm).collect::<Result<Vec<_>, _>>()?;
        let total = Tensor::f_stack(&norms, 0)?.f_norm()?;
        let scale = total.f_reciprocal()?.f_mul_scalar(0.5)?.f_clamp_max(1.0)?;
        gradients.iter_mut().try_for_each(|gradient| gradient.f_mul_(&scale).map(drop))
    }
}

/// Twice the numbers that lay in memory which libtorch did not give out, and which holds others by now.
fn doubled_loan(numbers: i64) -> Result<Tensor, TchError> {
    let mut lent: Vec<f32> = (0..numbers).map(|index| (index % 7) as f32 / 7.0).collect();
    // SAFETY: the numbers stay where they are for as long as the tensor lives.
    let loan = unsafe { Tensor::f_from_blob(lent.as_ptr().cast(), &[numbers], &[1], Kind::Float, Device::Cpu)? };
    let doubled = loan.f_mul_scalar(2.0)?;
    drop(loan);
    lent.fill(f32::NAN);
    Ok(doubled)
}

impl Workload for Awkward {
    fn name(&self) -> &str {
        "awkward"
    }

    fn family(&self) -> &str {
        "awkward"
    }

    fn iteration(&mut self) -> Result<f64, TchError> {
        self.try_iterate(None)
    }

    fn variables(&self) -> Vec<(String, Tensor)> {
        named_variables(&self.variables)
    }
}
