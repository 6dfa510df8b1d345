//! A loop whose parameters, gradients and optimizer's state alone exceed its budget trains all the same, where all of it is
//! listened to: what is there all the time may be away from one iteration to the next.

use plimsoll_env::workload::{Workload, named_variables};
use plimsoll_runtime::torch::report::Course;
use plimsoll_runtime::torch::{Budget, HostEngine, IterationReport, Runtime};
use plimsoll_tests::beyond_tch::Update;
use plimsoll_tests::budget::Untouched;
use plimsoll_tests::{Stage, fast_link, one_at_a_time, session, tiny_policy};
use tch::nn::{self, OptimizerConfig};
use tch::{Device, Kind, TchError, Tensor};

const WIDTH: i64 = 192;
const LAYERS: usize = 8;
const ROWS: i64 = 16;

/// What an iteration is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kinds {
    /// One batch.
    Whole,
    /// Three batches whose gradients add up.
    Accumulated,
    /// One batch that is augmented now so, now so.
    Augmented,
    /// One batch, after which one operator steps all parameters.
    Fused,
    /// One batch, after which several operators do, each of them all parameters.
    Foreach,
}

impl Kinds {
    /// After how many iterations they repeat.
    fn period(self) -> usize {
        if self == Kinds::Augmented { 7 } else { 1 }
    }

    /// How many make a loop: those that are not alike take longer until what is away as one begins is what it was planned for.
    fn iterations(self) -> usize {
        if self.period() > 1 { 48 } else { 24 }
    }
}

/// A model whose optimizer keeps far more than its batches make.
struct Wide {
    variables: nn::VarStore,
    optimizer: nn::Optimizer,
    update: Update,
    layers: Vec<nn::Linear>,
    kind: Kinds,
    iterations: i64,
}

impl Wide {
    fn new(kind: Kinds) -> Self {
        session();
        tch::manual_seed(3);
        let variables = nn::VarStore::new(Device::Cpu);
        let at = variables.root();
        let layers = (0..LAYERS).map(|layer| nn::linear(&at / layer, WIDTH, WIDTH, Default::default())).collect();
        let optimizer = nn::Adam::default().build(&variables, 1e-3).unwrap();
        let update = match kind {
            Kinds::Fused => Update::Fused(None),
            Kinds::Foreach => Update::Foreach(Vec::new()),
            _ => Update::Tch,
        };
        Wide { variables, optimizer, update, layers, kind, iterations: 0 }
    }
}

impl Workload for Wide {
    fn name(&self) -> &str {
        "wide"
    }

    fn family(&self) -> &str {
        "perceptron"
    }

    fn iteration(&mut self) -> Result<f64, TchError> {
        tch::manual_seed(100 + self.iterations);
        self.iterations += 1;
        self.optimizer.zero_grad();
        let mut sum = 0.0;
        for _ in 0..if self.kind == Kinds::Accumulated { 3 } else { 1 } {
            let mut hidden = Tensor::f_randn([ROWS, WIDTH], (Kind::Float, Device::Cpu))?;
            for turn in 0..if self.kind == Kinds::Augmented { self.iterations * self.iterations % 7 } else { 0 } {
                hidden = if turn % 2 == 0 { hidden.f_flip([0])? } else { hidden.f_roll([1], [1])? };
            }
            for layer in &self.layers {
                hidden = hidden.f_linear(&layer.ws, layer.bs.as_ref())?.f_gelu("none")?;
            }
            let loss = hidden.f_square()?.f_mean(Kind::Float)?;
            loss.f_backward()?;
            sum += loss.f_double_value(&[])?;
        }
        self.update.step(&mut self.optimizer, &self.variables.trainable_variables(), 1e-3)?;
        Ok(sum)
    }

    fn variables(&self) -> Vec<(String, Tensor)> {
        named_variables(&self.variables)
    }
}

/// How a loop says where its iterations begin.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Begun {
    Marked,
    Found,
}

/// Within a share of what it has between iterations the loop does what its untouched self does, in so many loops, one after the
/// other; all but so many iterations, and the last, as planned.
fn goes_as_planned(share: f64, kind: Kinds, begun: Begun, epochs: usize, but: usize) {
    let _running = one_at_a_time();
    let iterate = |workload: &mut Wide, _| workload.iteration().unwrap();
    let iterations = kind.iterations();
    let untouched = Untouched::run(|| Wide::new(kind), iterate, iterations);
    let budget_bytes = (share * untouched.resident_bytes as f64) as u64;
    let builder = Runtime::builder().policy(tiny_policy(1)).budget(Budget::bytes(budget_bytes));
    let mut runtime = builder.link(fast_link()).engine(Box::new(HostEngine::new(None))).build().unwrap();
    let mut workload = Wide::new(kind);
    let (mut peak_bytes, mut losses) = (0, Vec::new());
    session().reset_peak();
    for epoch in 0..epochs {
        let training = runtime.detect().unwrap();
        for iteration in epoch * iterations / epochs..(epoch + 1) * iterations / epochs {
            if begun == Begun::Marked {
                training.mark().unwrap();
            }
            losses.push(iterate(&mut workload, iteration));
            peak_bytes = peak_bytes.max(session().peak_bytes());
        }
    }
    let report = runtime.report();
    println!("{report}");
    assert!(peak_bytes <= budget_bytes, "{peak_bytes} of {budget_bytes} bytes");
    // What comes after a loop finds everything resident, so its last iteration ends above the line.
    let above = report.latest.iter().filter(|iteration| iteration.peak_bytes > budget_bytes);
    assert_eq!(above.count(), epochs, "{:?}", report.latest);
    assert!(report.latest.last().unwrap().peak_bytes >= untouched.resident_bytes);
    Stage::of(&losses, &workload).assert_same(&untouched.stage, "with less than there is between iterations");
    is_planned(&report.latest, but, kind.period());
}

/// All but the first so many iterations and the last are carried out as planned, to the predicted byte.
fn is_planned(iterations: &[IterationReport], but: usize, period: usize) {
    let planned: Vec<_> = iterations[..iterations.len() - 1]
        .iter()
        .filter(|iteration| iteration.course == Course::Planned && iteration.followed)
        .collect();
    let others: Vec<_> = iterations.iter().map(|iteration| (iteration.course, &iteration.deviation)).collect();
    assert!(planned.len() + but >= iterations.len(), "{others:?}");
    let predicted =
        planned.iter().filter_map(|iteration| Some((iteration.predicted?.peak_bytes, iteration.peak_bytes)));
    let (predicted, measured): (Vec<_>, Vec<_>) = predicted.unzip();
    assert_eq!(measured, predicted);
    // But where other storages were away at the beginning than the plan was made for: at first, and time and again where what comes
    // before is now this, now that.
    let mut latest = planned[planned.len() - period..].iter();
    let are_most = 2 * period * predicted.len() > planned.len();
    assert!(are_most && latest.any(|iteration| iteration.predicted.is_some()), "{predicted:?}");
}

#[test]
fn of_a_loop_that_is_marked() {
    goes_as_planned(0.7, Kinds::Whole, Begun::Marked, 1, 8);
}

#[test]
fn of_a_loop_whose_iterations_are_found() {
    goes_as_planned(0.7, Kinds::Whole, Begun::Found, 1, 10);
}

#[test]
fn of_a_loop_that_adds_gradients_up() {
    goes_as_planned(0.6, Kinds::Accumulated, Begun::Marked, 1, 10);
}

/// What comes before the model runs is divided from the rest.
#[test]
fn of_a_loop_whose_batches_are_augmented() {
    goes_as_planned(0.7, Kinds::Augmented, Begun::Marked, 1, 20);
}

#[test]
fn with_little_more_than_the_gradients() {
    goes_as_planned(0.4, Kinds::Whole, Begun::Marked, 1, 10);
}

/// What steps all parameters in one operator is run in pieces, which need not all be there together.
#[test]
fn of_a_loop_with_a_fused_optimizer() {
    goes_as_planned(0.4, Kinds::Fused, Begun::Marked, 1, 10);
}

#[test]
fn of_a_loop_with_an_optimizer_of_operators_on_lists() {
    goes_as_planned(0.6, Kinds::Foreach, Begun::Marked, 1, 10);
}

#[test]
fn of_loops_that_follow_each_other() {
    goes_as_planned(0.7, Kinds::Whole, Begun::Marked, 3, 10);
}
