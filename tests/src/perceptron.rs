//! A training loop whose batches may change from iteration to iteration, and which can branch, fail and panic.

use plimsoll_env::workload::{Workload, named_variables};
use plimsoll_runtime::torch::settings::Autocast;
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, TchError, Tensor};

const WIDTH: i64 = 64;
const LAYERS: usize = 6;
const CLASSES: i64 = 8;

/// What an iteration does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Course {
    /// It trains on a batch of so many rows.
    Train(i64),
    /// The same; the rows stand in memory of the loop's own, as data from elsewhere does.
    Given(i64),
    /// The same as `Train`, with another activation in the middle.
    Branch(i64),
    /// The same as `Train`, and what each layer gives is measured with gradient recording off.
    Measured(i64),
    /// The same as `Train`, and then the model is evaluated, in mixed precision.
    Evaluated(i64),
    /// It adds to the gradients that there are, and leaves them.
    Accumulate(i64),
    /// It adds to them, applies them, and lets go of them.
    Apply(i64),
    /// It returns an error after the forward pass.
    Fail(i64),
    /// It panics after the forward pass.
    Panic(i64),
}

/// The loop.
pub struct Perceptron {
    variables: nn::VarStore,
    optimizer: nn::Optimizer,
    layers: Vec<nn::Linear>,
    head: nn::Linear,
    seed: u64,
    iterations: u64,
    batch: Vec<f32>,
}

impl Perceptron {
    /// The loop, whose parameters and batches are drawn from `seed`. The session comes first, so that every byte of the
    /// model is counted.
    pub fn new(seed: u64) -> Self {
        crate::session();
        tch::manual_seed(seed as i64);
        let variables = nn::VarStore::new(Device::Cpu);
        let at = variables.root();
        let layers = (0..LAYERS).map(|layer| nn::linear(&at / layer, WIDTH, WIDTH, Default::default())).collect();
        let head = nn::linear(&at / "head", WIDTH, CLASSES, Default::default());
        let optimizer = nn::Sgd { momentum: 0.9, ..nn::Sgd::default() }.build(&variables, 1e-2).unwrap();
        Perceptron { variables, optimizer, layers, head, seed, iterations: 0, batch: Vec::new() }
    }

    /// Draws the batch of the last iteration again in the next.
    pub fn rewind(&mut self) {
        self.iterations -= 1;
    }

    /// A batch in memory that libtorch did not allocate.
    fn given(&mut self, rows: i64) -> Tensor {
        let number = |index: i64| ((index * 37 + self.iterations as i64 * 101) % 199) as f32 / 99.5 - 1.0;
        self.batch = (0..rows * WIDTH).map(number).collect();
        let (data, sizes, strides) = (self.batch.as_ptr().cast(), [rows, WIDTH], [WIDTH, 1]);
        // SAFETY: the numbers stay where they are until the next batch is made, when this one has been used.
        unsafe { Tensor::from_blob(data, &sizes, &strides, Kind::Float, Device::Cpu) }
    }

    /// What the model makes of other rows.
    fn evaluate(&self) -> Result<(), TchError> {
        let mut hidden = Tensor::f_randn([8, WIDTH], (Kind::Float, Device::Cpu))?;
        for layer in &self.layers {
            hidden = hidden.f_linear(&layer.ws, layer.bs.as_ref())?.f_gelu("none")?;
        }
        self.head.forward(&hidden).f_mean(Kind::Float)?.f_double_value(&[]).map(drop)
    }

    /// Runs one iteration. Where it fails the loss is NaN, and the output says why.
    pub fn iterate(&mut self, course: Course) -> f64 {
        self.try_iterate(course).unwrap_or_else(|error| {
            eprintln!("{error}");
            f64::NAN
        })
    }

    /// Runs one iteration.
    pub fn try_iterate(&mut self, course: Course) -> Result<f64, TchError> {
        tch::manual_seed((1_000 * self.seed + self.iterations) as i64);
        self.iterations += 1;
        let (Course::Train(rows)
        | Course::Given(rows)
        | Course::Branch(rows)
        | Course::Measured(rows)
        | Course::Evaluated(rows)
        | Course::Accumulate(rows)
        | Course::Apply(rows)
        | Course::Fail(rows)
        | Course::Panic(rows)) = course;
        let inputs = match course {
            Course::Given(rows) => self.given(rows),
            _ => Tensor::f_randn([rows, WIDTH], (Kind::Float, Device::Cpu))?,
        };
        let labels = Tensor::f_randint(CLASSES, [rows], (Kind::Int64, Device::Cpu))?;
        let mut hidden = inputs;
        for (index, layer) in self.layers.iter().enumerate() {
            // Layers change in place under the optimizer: what fails here leaves them as they were.
            hidden = hidden.f_linear(&layer.ws, layer.bs.as_ref())?;
            let branches = index == LAYERS / 2 && matches!(course, Course::Branch(_));
            hidden = if branches { hidden.f_tanh()? } else { hidden.f_gelu("none")? };
            hidden = hidden.f_dropout(0.1, true)?;
            if matches!(course, Course::Measured(_)) {
                drop(tch::no_grad(|| hidden.f_abs()?.f_square_()?.f_mean(Kind::Float))?);
            }
        }
        match course {
            Course::Fail(_) => return Err(TchError::Torch("the iteration was given up".to_owned())),
            Course::Panic(_) => panic!("the iteration panics"),
            _ => {}
        }
        let loss = self.head.forward(&hidden).f_cross_entropy_loss(
            &labels,
            None::<&Tensor>,
            tch::Reduction::Mean,
            -100,
            0.0,
        )?;
        if !matches!(course, Course::Accumulate(_) | Course::Apply(_)) {
            self.optimizer.zero_grad();
        }
        loss.f_backward()?;
        if !matches!(course, Course::Accumulate(_)) {
            self.optimizer.step();
        }
        if matches!(course, Course::Apply(_)) {
            self.optimizer.zero_grad();
        }
        if matches!(course, Course::Evaluated(_)) {
            let _mixed = Autocast::bf16(Device::Cpu);
            tch::no_grad(|| self.evaluate())?;
        }
        loss.f_double_value(&[])
    }
}

impl Workload for Perceptron {
    fn name(&self) -> &str {
        "perceptron"
    }

    fn family(&self) -> &str {
        "perceptron"
    }

    fn iteration(&mut self) -> Result<f64, TchError> {
        self.try_iterate(Course::Train(256))
    }

    fn variables(&self) -> Vec<(String, Tensor)> {
        named_variables(&self.variables)
    }
}
