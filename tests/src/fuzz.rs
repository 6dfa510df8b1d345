//! Random programs of libtorch operators, run untouched and under random lawful plans or random budgets, and compared
//! bit for bit.
//!
//! A program is a list of instructions over registers. An operand is a number taken modulo the registers there are, so
//! every list of instructions is a program, and a failing one is minimised by leaving instructions out. It knows nothing
//! of how plans are carried out: another way to run a loop is one more [`Mode`].

use std::ops::AddAssign;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Once};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use plimsoll_runtime::baselines::BASELINES;
use plimsoll_runtime::lineage::EVICTION_FLOOR_BYTES;
use plimsoll_runtime::planner::Planner;
use plimsoll_runtime::search::Limits;
use plimsoll_runtime::torch::copy::{Call, Fault, Faults, FaultyEngine};
use plimsoll_runtime::torch::{
    Budget, CopiedBy, CopyError, Executor, HostEngine, RecordError, Recorder, Runtime, stand_by,
};
use plimsoll_runtime::trace::StorageId;
use plimsoll_runtime::{ActionSet, Lineage, Link, Problem, Trace};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, TchError, Tensor};

use crate::beyond_tch::{blend, forget_origins};
use crate::{random_plan, session};

/// Iterations before the loop repeats itself, and those that a trace is made of.
const WARM_UP: usize = 2;
const RECORDED: usize = 2;
/// Iterations under each plan; the first matches the loop to its trace.
const PLANNED: usize = 4;
const PLANS: usize = 2;
const TOTAL: usize = WARM_UP + RECORDED + PLANS * PLANNED;
/// Plans that a runtime under a budget evaluates where its baseline's own does not hold it.
const EVALUATIONS: u64 = 64;
/// Registers are cut down to this many elements.
const ELEMENTS_MAX: i64 = 1 << 14;
const OPERATIONS: &[Operation] = &[
    Operation::Add,
    Operation::Multiply,
    Operation::MultiplyNumber,
    Operation::MatMul,
    Operation::Linear,
    Operation::Transpose,
    Operation::Slice,
    Operation::Reshape,
    Operation::Expand,
    Operation::Concatenate,
    Operation::Chunk,
    Operation::Clone,
    Operation::AddInPlace,
    Operation::ScaleInPlace,
    Operation::ReluInPlace,
    Operation::WriteSlice,
    Operation::FillInPlace,
    Operation::ZeroInPlace,
    Operation::CopyInto,
    Operation::Relu,
    Operation::Gelu,
    Operation::Tanh,
    Operation::Softmax,
    Operation::LogSumExp,
    Operation::LayerNorm,
    Operation::BatchNorm,
    Operation::Dropout,
    Operation::Bernoulli,
    Operation::NoiseLike,
    Operation::NormalInPlace,
    Operation::Randomized,
    Operation::CumulativeSum,
    Operation::Sort,
    Operation::TopK,
    Operation::Where,
    Operation::MaskedFill,
    Operation::IndexSelect,
    Operation::ScatterAdd,
    Operation::IndexPut,
    Operation::MaxPool,
    Operation::Convolution,
    Operation::Attention,
    Operation::HalfPrecision,
    Operation::Complex,
    Operation::Lists,
    Operation::FromNothing,
    Operation::FilledIn,
    Operation::Detach,
    Operation::Free,
    Operation::Read,
    Operation::Backward,
    Operation::Slope,
    Operation::Update,
    Operation::Rarely,
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Add,
    Multiply,
    MultiplyNumber,
    MatMul,
    Linear,
    Transpose,
    Slice,
    Reshape,
    Expand,
    Concatenate,
    Chunk,
    Clone,
    AddInPlace,
    ScaleInPlace,
    ReluInPlace,
    WriteSlice,
    FillInPlace,
    ZeroInPlace,
    CopyInto,
    Relu,
    Gelu,
    Tanh,
    Softmax,
    LogSumExp,
    LayerNorm,
    BatchNorm,
    Dropout,
    Bernoulli,
    NoiseLike,
    NormalInPlace,
    Randomized,
    CumulativeSum,
    Sort,
    TopK,
    Where,
    MaskedFill,
    IndexSelect,
    ScatterAdd,
    IndexPut,
    MaxPool,
    Convolution,
    Attention,
    HalfPrecision,
    Complex,
    /// Operators on lists of registers.
    Lists,
    FromNothing,
    FilledIn,
    Detach,
    Free,
    Read,
    /// Adds the gradients of a register to the parameters.
    Backward,
    /// A gradient that has a gradient.
    Slope,
    /// Moves a parameter against its gradient.
    Update,
    /// In some iterations after the recorded ones, one more operator.
    Rarely,
}

impl Operation {
    /// Whether it writes nothing that was there before.
    fn only_reads(self) -> bool {
        matches!(
            self,
            Operation::Add
                | Operation::Multiply
                | Operation::MultiplyNumber
                | Operation::MatMul
                | Operation::Linear
                | Operation::Slice
                | Operation::Concatenate
                | Operation::Clone
                | Operation::ZeroInPlace
                | Operation::Relu
                | Operation::Gelu
                | Operation::Tanh
                | Operation::Softmax
                | Operation::LogSumExp
                | Operation::LayerNorm
                | Operation::Dropout
                | Operation::CumulativeSum
                | Operation::Where
                | Operation::Attention
        )
    }
}

/// One step of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instruction {
    operation: Operation,
    a: u32,
    b: u32,
    c: u32,
}

/// A program, and the seed of its values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    seed: u64,
    instructions: Vec<Instruction>,
}

/// What a run of a program came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The same bits.
    Same(Tally),
    /// Not a program that trains: it fails or leaks untouched, or its iterations are not alike.
    Unlawful,
    /// What differs.
    Different(String),
}

/// What happened to a program while its bits stayed the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    /// Iterations whose plan was carried out to the end.
    pub followed: usize,
    /// Operators that were rerun.
    pub reruns: u64,
    /// Storages that went to the slow tier and back, in bytes.
    pub swapped_bytes: u64,
    /// Storages evicted because bytes ran out.
    pub evictions: u64,
    /// Iterations that got an error because their budget was too small, or the engine failed, and were run again within a larger one.
    pub refusals: u64,
    /// Calls of the engine that went wrong.
    pub failures: u64,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.followed += other.followed;
        self.reruns += other.reruns;
        self.swapped_bytes += other.swapped_bytes;
        self.evictions += other.evictions;
        self.refusals += other.refusals;
        self.failures += other.failures;
    }
}

/// How a program is run beside its untouched self.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Recorded, then under random plans, budgets and copy speeds.
    Planned,
    /// Under a runtime with a random budget, decided for by a random baseline.
    Budgeted,
    /// So, too, with an engine of which some calls fail, or from some call on all.
    Faulty,
    /// So, too, with batches that are of another length in most iterations.
    Resized,
    /// So, too, in three passes, with batches of their own in each, of which only the last uses what the optimizer keeps. Of every other
    /// program the planner decides, and no baseline.
    Accumulated,
    /// As [`Mode::Budgeted`], with some instructions left out of every iteration, by chance, once the program is known.
    LeftOut,
    /// Within less than there is between iterations, mostly, in a loop that is listened to throughout. Now and then it is looked at
    /// what is alive.
    LeftAway,
    /// As [`Mode::Budgeted`], with another thread that lets go of what instructions have used, some time later.
    LetGo,
    /// As [`Mode::Budgeted`], with other threads that stand by: one looks at what instructions make while the program goes on, and some
    /// instructions are run by others.
    Beside,
}

impl Mode {
    /// Its name on the command line.
    pub fn name(self) -> String {
        self.to_possible_value().expect("no mode is hidden").get_name().to_owned()
    }

    /// How often a program runs. Of other lengths it is known when it has run three times, and has a plan for one of them.
    fn iterations(self) -> usize {
        match self {
            Mode::Planned | Mode::Budgeted | Mode::Faulty | Mode::LetGo | Mode::Beside => TOTAL,
            Mode::Resized | Mode::Accumulated | Mode::LeftOut | Mode::LeftAway => 2 * TOTAL,
        }
    }

    fn passes(self) -> u64 {
        match self {
            Mode::Accumulated => 3,
            _ => 1,
        }
    }

    /// Whether the program has what only an optimizer uses.
    fn has_states(self) -> bool {
        matches!(self, Mode::Accumulated | Mode::LeftAway)
    }

    /// Whether batches are of another length in most iterations.
    fn is_resized(self) -> bool {
        matches!(self, Mode::Resized | Mode::Accumulated)
    }

    /// Whether other threads use what the program does.
    fn has_others(self) -> bool {
        matches!(self, Mode::LetGo | Mode::Beside)
    }
}

impl Program {
    /// The program of a seed.
    pub fn random(seed: u64) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let length = random.random_range(5..40);
        let mut instructions: Vec<Instruction> = (0..length)
            .map(|_| Instruction {
                operation: OPERATIONS[random.random_range(0..OPERATIONS.len())],
                a: random.random(),
                b: random.random(),
                c: random.random(),
            })
            .collect();
        // A program without these trains nothing.
        let (a, b, c) = (u32::MAX, 0, 0);
        instructions.push(Instruction { operation: Operation::Backward, a, b, c });
        instructions.push(Instruction { operation: Operation::Update, a, b, c });
        Program { seed, instructions }
    }

    /// Runs the program untouched and under `mode`, and compares everything that is alive after every iteration.
    pub fn check(&self, mode: Mode) -> Verdict {
        let before_bytes = session().live_bytes();
        // `tch` panics after an operator with a number among its arguments has failed.
        let untouched = catch_unwind(AssertUnwindSafe(|| self.untouched(mode)));
        let Ok(Ok(expected)) = untouched else { return Verdict::Unlawful };
        // Autograd graphs can hold themselves alive: then no two runs start from the same bytes.
        if session().live_bytes() > before_bytes {
            return Verdict::Unlawful;
        }
        let checked = catch_unwind(AssertUnwindSafe(|| match mode {
            Mode::Planned => self.planned(&expected),
            Mode::LeftAway => self.left_away(&expected),
            _ => self.budgeted(&expected, mode),
        }));
        match checked {
            Ok(Ok(verdict)) => verdict,
            Ok(Err(difference)) => Verdict::Different(difference),
            Err(panic) => Verdict::Different(format!("a panic: {}", text_of(&*panic))),
        }
    }

    fn untouched(&self, mode: Mode) -> Result<Untouched, TchError> {
        let session = session();
        let mut machine = Machine::new(self, mode);
        let mut untouched = Untouched { digests: Vec::new(), resident_bytes: session.live_bytes(), peak_bytes: 0 };
        for _ in 0..mode.iterations() {
            session.reset_peak();
            let alive = machine.iteration()?;
            untouched.peak_bytes = untouched.peak_bytes.max(session.peak_bytes());
            untouched.digests.push(digests(&alive));
        }
        Ok(untouched)
    }

    fn planned(&self, expected: &Untouched) -> Result<Verdict, String> {
        let mut machine = Machine::new(self, Mode::Planned);
        let mut recorder = Recorder::new(session());
        for iteration in 0..WARM_UP + RECORDED {
            let alive = recorder.iteration(|| machine.iteration()).map_err(|error| error.to_string())?;
            let alive = alive.map_err(|error| first_line(&error))?;
            expected.compare(iteration, &digests(&alive), "while recording")?;
        }
        let trace = match recorder.finish(WARM_UP, "program", "fuzz", "cpu") {
            Ok(trace) => trace,
            Err(RecordError::NotRepeating(_)) => return Ok(Verdict::Unlawful),
            Err(error) => return Err(error.to_string()),
        };
        let lineage = Lineage::of(&trace);
        let mut tally = Tally::default();
        for plan in 0..PLANS {
            let what = format!("plan {plan}");
            let mut executor = self.executor(&trace, &lineage, plan as u64);
            for planned in 0..PLANNED {
                let (alive, report) = executor.iteration(|| machine.iteration()).map_err(|error| error.to_string())?;
                let iteration = WARM_UP + RECORDED + plan * PLANNED + planned;
                let deviation = report.deviation.as_deref().unwrap_or("no deviation");
                let alive = alive.map_err(|error| format!("{what}: {}", first_line(&error)))?;
                expected.compare(iteration, &digests(&alive), &format!("{what} ({deviation})"))?;
                tally.followed += usize::from(report.followed);
                tally.reruns += report.reruns;
                tally.swapped_bytes += report.prefetched_bytes;
            }
        }
        Ok(Verdict::Same(tally))
    }

    /// Under a runtime. Where an iteration is refused, or a copy failed that it cannot do without, the program goes on from what it was
    /// before it, within a larger budget.
    fn budgeted(&self, expected: &Untouched, mode: Mode) -> Result<Verdict, String> {
        let mut machine = Machine::new(self, mode);
        let (mut runtime, actions, faults) = self.runtime(expected, mode);
        let enough_bytes = self.enough_bytes(mode)?.filter(|_| actions.swap).unwrap_or(expected.peak_bytes);
        let mut tally = Tally::default();
        let mut iteration = 0;
        while iteration < mode.iterations() {
            let budget_bytes = runtime.budget().as_bytes();
            let what = format!("{actions:?} within {budget_bytes} of {} bytes", expected.peak_bytes);
            let failed_before = faults.happened();
            let (ran, before_end_bytes) = {
                let _iteration = runtime.try_iteration().map_err(|error| format!("{what}: {error}"))?;
                let ran = catch_unwind(AssertUnwindSafe(|| machine.iteration()));
                machine.elsewhere.iter().for_each(Elsewhere::catch_up);
                (ran, session().peak_bytes())
            };
            let resident_bytes = session().live_bytes();
            let report = runtime.report();
            let latest =
                report.latest.last().ok_or_else(|| format!("{what}: iteration {iteration} was not finished"))?;
            if before_end_bytes > budget_bytes {
                return Err(format!("{what}: {before_end_bytes} in iteration {iteration}"));
            }
            // Everything is restored at the end. By reruns alone that takes their own bytes too, and so it may where there is what other
            // threads made, which stays.
            let peak_bytes = latest.peak_bytes;
            let has_failed = faults.happened() > failed_before;
            let can_give_way = actions.swap && mode != Mode::Beside;
            if can_give_way && !has_failed && peak_bytes > budget_bytes.max(resident_bytes) {
                return Err(format!("{what}: {peak_bytes} after iteration {iteration}, then {resident_bytes}"));
            }
            tally.followed += usize::from(latest.followed);
            tally.reruns += latest.reruns;
            tally.swapped_bytes += latest.prefetched_bytes;
            tally.evictions += latest.reactive_evictions;
            let refused = match ran {
                Ok(Ok(alive)) => {
                    expected.compare(iteration, &digests(&alive), &what)?;
                    iteration += 1;
                    continue;
                }
                Ok(Err(error)) => first_line(&error),
                Err(panic) => text_of(&*panic),
            };
            let least_bytes = report.least_feasible_budget_bytes;
            let is_enough = least_bytes <= budget_bytes || budget_bytes >= enough_bytes.min(expected.peak_bytes);
            // Nobody knows how much there is that other threads have still to let go of.
            if is_enough && !has_failed && !mode.has_others() {
                return Err(format!("{what}: {enough_bytes} suffice: iteration {iteration}: {refused}"));
            }
            tally.refusals += 1;
            // Every tensor is there to be read.
            digests(&machine.kept());
            machine = Machine::after(self, mode, iteration).map_err(|error| format!("untouched: {error}"))?;
            runtime.set_budget(Budget::bytes(least_bytes.max(budget_bytes + budget_bytes / 64)));
        }
        tally.failures = faults.happened();
        Ok(Verdict::Same(tally))
    }

    /// In one loop under a runtime, in which its values are made, too; where anything is refused, in another one, from the beginning,
    /// within a larger budget.
    fn left_away(&self, expected: &Untouched) -> Result<Verdict, String> {
        let mode = Mode::LeftAway;
        let (mut runtime, actions, _) = self.runtime(expected, mode);
        let enough_bytes = self.enough_bytes(mode)?.filter(|_| actions.swap).unwrap_or(expected.peak_bytes);
        // What is looked at is copied.
        let enough_bytes = enough_bytes.min(expected.peak_bytes) + 8 * ELEMENTS_MAX as u64;
        let mut random = ChaCha8Rng::seed_from_u64(self.seed ^ 1 << 54);
        let mut refusals = 0;
        loop {
            let budget_bytes = runtime.budget().as_bytes();
            let what = format!("{actions:?} within {budget_bytes} of {} bytes", expected.peak_bytes);
            let (mut machine, mut iteration) = (None, 0);
            let refused = {
                let training = runtime.detect().map_err(|error| format!("{what}: {error}"))?;
                loop {
                    if iteration == mode.iterations() {
                        break None;
                    }
                    training.mark().map_err(|error| format!("{what}: {error}"))?;
                    let looks = random.random_range(0..4) == 0;
                    let ran = catch_unwind(AssertUnwindSafe(|| {
                        let alive = machine.get_or_insert_with(|| Machine::new(self, mode)).iteration()?;
                        if looks { digests_within(&alive).map(Some) } else { Ok(None) }
                    }));
                    // Reruns alone have to make room for what they remake.
                    let peak_bytes = session().peak_bytes();
                    if actions.swap && peak_bytes > budget_bytes {
                        return Err(format!("{what}: {peak_bytes} in iteration {iteration}"));
                    }
                    match ran {
                        Ok(Ok(found)) => found.map_or(Ok(()), |found| expected.compare(iteration, &found, &what))?,
                        Ok(Err(error)) => break Some(first_line(&error)),
                        Err(panic) => break Some(text_of(&*panic)),
                    }
                    iteration += 1;
                }
            };
            let report = runtime.report();
            // But for its last iteration, which ends with everything resident.
            let mut others = report.latest.iter().rev().take(iteration + usize::from(refused.is_some())).skip(1);
            if let Some(over) = others.find(|iteration| actions.swap && iteration.peak_bytes > budget_bytes) {
                return Err(format!("{what}: {} at an iteration's end", over.peak_bytes));
            }
            let Some(refused) = refused else {
                let followed = report.latest.iter().filter(|iteration| iteration.followed).count();
                return Ok(Verdict::Same(Tally {
                    followed,
                    reruns: report.reruns,
                    swapped_bytes: report.prefetched_bytes,
                    evictions: report.reactive_evictions,
                    refusals,
                    failures: 0,
                }));
            };
            let least_bytes = report.least_feasible_budget_bytes;
            if least_bytes <= budget_bytes || budget_bytes >= enough_bytes {
                return Err(format!("{what}: {enough_bytes} suffice: iteration {iteration}: {refused}"));
            }
            refusals += 1;
            // Every tensor is there to be read.
            machine.iter().for_each(|machine| drop(digests(&machine.kept())));
            runtime.set_budget(Budget::bytes(least_bytes.max(budget_bytes + budget_bytes / 64)));
        }
    }

    /// A runtime with a random budget, and what its engine meets.
    fn runtime(&self, untouched: &Untouched, mode: Mode) -> (Runtime, ActionSet, Faults) {
        let mut random = ChaCha8Rng::seed_from_u64(self.seed ^ 1 << 55);
        let link = Link::symmetric(10f64.powf(random.random_range(7.0..10.0)), random.random_range(0..100_000));
        let least_bytes = match mode {
            // The program has not begun.
            Mode::LeftAway => (2 * session().live_bytes() + untouched.resident_bytes) / 3,
            _ => untouched.resident_bytes,
        };
        let span_bytes = (untouched.peak_bytes - least_bytes) as f64;
        let budget_bytes = least_bytes + (span_bytes * random.random_range(0.1..1.0)) as u64;
        let actions = match random.random_range(0..4) {
            0 => ActionSet { swap: true, recompute: false },
            1 => ActionSet { swap: false, recompute: true },
            _ => ActionSet::ALL,
        };
        let engine = self.engine(random.random_bool(0.1).then_some(link));
        let (engine, faults) = FaultyEngine::new(Box::new(engine));
        if mode == Mode::Faulty {
            self.inject(&faults);
        }
        // By evaluations, not by the clock: the same program is planned alike every time.
        let planner = Planner { limits: Limits::evaluations(EVALUATIONS), ..Planner::default() };
        let mut builder = Runtime::builder();
        let baseline = BASELINES[random.random_range(0..BASELINES.len())];
        if !mode.has_states() || self.seed % 4 < 2 {
            builder = builder.baseline(baseline);
        }
        let builder = builder
            .planner(planner)
            .actions(actions)
            .budget(Budget::bytes(budget_bytes))
            .link(link)
            .engine(Box::new(engine));
        (builder.build().expect("a budget and a baseline that is known"), actions, faults)
    }

    /// Has some calls fail in a row, of one kind or several, or all from one on.
    fn inject(&self, faults: &Faults) {
        let mut random = ChaCha8Rng::seed_from_u64(self.seed ^ 1 << 53);
        for _ in 0..random.random_range(1..5) {
            let call = [Call::Offload, Call::Prefetch, Call::Wait][random.random_range(0..3)];
            let skipped = 2f64.powf(random.random_range(0.0..7.0)) as u64 - 1;
            let fault = match random.random_range(0..10) {
                0 => Fault::WorkersDie,
                1..6 => Fault::Error(CopyError::WorkerDied),
                _ => Fault::Error(CopyError::Full { bytes: 1 }),
            };
            (0..random.random_range(1..6)).for_each(|more| faults.inject(call, skipped + more, fault.clone()));
        }
    }

    /// Every other program copies beside what it computes.
    fn engine(&self, pace: Option<Link>) -> HostEngine {
        let copied_by = if self.seed.is_multiple_of(2) { CopiedBy::Threads } else { CopiedBy::Caller };
        HostEngine::copied_by(copied_by, u64::MAX, pace)
    }

    /// Bytes with which no operator needs to be refused where everything idle can be swapped; none where iterations are
    /// not alike.
    fn enough_bytes(&self, mode: Mode) -> Result<Option<u64>, String> {
        if mode.is_resized()
            || mode == Mode::LeftOut
            || self.instructions.iter().any(|step| step.operation == Operation::Rarely)
        {
            return Ok(None);
        }
        let mut machine = Machine::new(self, mode);
        let mut recorder = Recorder::new(session());
        for _ in 0..WARM_UP + RECORDED {
            let alive = recorder.iteration(|| machine.iteration()).map_err(|error| error.to_string())?;
            alive.map_err(|error| first_line(&error))?;
        }
        Ok(recorder.finish(WARM_UP, "program", "fuzz", "cpu").ok().map(|trace| enough_for_any_operator(&trace)))
    }

    /// An executor of a random plan under a random budget, with copies of a random speed.
    fn executor(&self, trace: &Trace, lineage: &Lineage, plan: u64) -> Executor {
        let mut random = ChaCha8Rng::seed_from_u64(self.seed ^ (plan + 1) << 56);
        let link = Link::symmetric(10f64.powf(random.random_range(7.0..10.0)), random.random_range(0..100_000));
        let budget_bytes = match random.random_range(0..3) {
            0 => u64::MAX,
            _ => (trace.peak_bytes as f64 * random.random_range(0.2..1.0)) as u64,
        };
        let plan = random_plan(lineage, random.random());
        let engine = self.engine(random.random_bool(0.2).then_some(link));
        let problem = Problem { trace, lineage, tiers: link.into(), budget_bytes, actions: ActionSet::ALL };
        Executor::new(session(), &problem, &plan, Box::new(engine))
    }

    /// The shortest program found that differs too.
    pub fn minimised(&self, mode: Mode) -> Program {
        let mut least = self.clone();
        let mut index = least.instructions.len();
        while index > 0 {
            index -= 1;
            let mut shorter = least.clone();
            shorter.instructions.remove(index);
            if matches!(shorter.check(mode), Verdict::Different(_)) {
                least = shorter;
                index = index.min(least.instructions.len());
            }
        }
        least
    }
}

impl std::fmt::Display for Program {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(to, "seed {}", self.seed)?;
        self.instructions
            .iter()
            .try_for_each(|step| writeln!(to, "    {:?}({}, {}, {})", step.operation, step.a, step.b, step.c))
    }
}

fn first_line(error: &TchError) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

fn text_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or_default().to_owned()
}

/// What the program comes to with nothing in between.
struct Untouched {
    /// After every iteration.
    digests: Vec<Vec<u64>>,
    /// Device bytes before the first one.
    resident_bytes: u64,
    /// The highest peak.
    peak_bytes: u64,
}

impl Untouched {
    fn compare(&self, iteration: usize, found: &[u64], what: &str) -> Result<(), String> {
        let expected = &self.digests[iteration];
        if found.len() != expected.len() {
            return Err(format!("{what}: {} tensors are alive, not {}", found.len(), expected.len()));
        }
        match found.iter().zip(expected).position(|(found, expected)| found != expected) {
            Some(index) => Err(format!("{what}, iteration {iteration}: tensor {index} of {}", found.len())),
            None => Ok(()),
        }
    }
}

/// The most that an operator needs beside what cannot be evicted. To that belongs all that the iteration starts with, for
/// what no operator has touched yet is unknown.
fn enough_for_any_operator(trace: &Trace) -> u64 {
    let storage = |id: &StorageId| &trace.storages[id.index()];
    let is_initial = |id: &StorageId| id.0 < trace.initial_storages;
    let is_locked = |id: &StorageId| storage(id).locked.is_some() || storage(id).bytes < EVICTION_FLOOR_BYTES;
    let initial = trace.storages[..trace.initial_storages as usize].iter();
    let always_bytes = trace.unseen_bytes + initial.map(|storage| storage.bytes).sum::<u64>();
    // Alive and not to be evicted: what is locked, and what was made from nothing and not used since, for a while.
    let mut staying: Vec<StorageId> = Vec::new();
    let mut most_bytes = 0;
    for operator in &trace.operators {
        let accessed: Vec<StorageId> = operator.accesses.iter().map(|access| access.storage).collect();
        staying.retain(|id| is_locked(id) || !accessed.contains(id));
        let used = accessed.iter().filter(|&id| !is_initial(id) && !staying.contains(id)).chain(&operator.creates);
        let bytes = |ids: &mut dyn Iterator<Item = &StorageId>| ids.map(|id| storage(id).bytes).sum::<u64>();
        let used_bytes = bytes(&mut used.into_iter());
        most_bytes = most_bytes.max(used_bytes + bytes(&mut staying.iter()) + operator.workspace_bytes);
        staying.extend(operator.creates.iter().filter(|id| accessed.is_empty() || is_locked(id)));
        staying.retain(|id| !operator.frees.contains(id));
    }
    always_bytes + most_bytes
}

/// Before this thread checks programs: operators run in it alone, and what [`Program::check`] catches is not talked about. Errors of
/// libtorch and panics of `tch` are expected, and would take longer to say where they come from than programs run.
pub fn prepare() {
    static PREPARED: Once = Once::new();
    tch::set_num_threads(1);
    PREPARED.call_once(|| {
        forget_origins();
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !panic.location().is_some_and(|location| location.file().contains("/tch-")) {
                others(panic);
            }
        }));
    });
}

/// The same where tensors may be away: of copies, which operators make.
fn digests_within(alive: &[Tensor]) -> Result<Vec<u64>, TchError> {
    let next = Tensor::f_rand([4], (Kind::Double, Device::Cpu))?;
    let copied = |tensor: &Tensor| tch::no_grad(|| tensor.f_detach_copy());
    alive.iter().chain([&next]).map(|tensor| Ok(digest(&copied(tensor)?))).collect()
}

/// What every tensor holds, and what the generator would draw next.
fn digests(alive: &[Tensor]) -> Vec<u64> {
    let next = Tensor::rand([4], (Kind::Double, Device::Cpu));
    alive.iter().chain([&next]).map(digest).collect()
}

fn digest(tensor: &Tensor) -> u64 {
    let tensor = tensor.detach().resolve_conj().contiguous();
    let mut bytes = vec![0u8; tensor.numel() * tensor.kind().elt_size_in_bytes()];
    tensor.copy_data_u8(&mut bytes, tensor.numel());
    let start = tensor.size().iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, &size| hash.rotate_left(7) ^ size as u64);
    let (words, rest) = bytes.as_chunks();
    let words = words.iter().map(|&word| u64::from_le_bytes(word)).chain(rest.iter().map(|&byte| u64::from(byte)));
    words.fold(start, |hash, word| (hash ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(23))
}

/// A program with its values.
struct Machine<'a> {
    program: &'a Program,
    mode: Mode,
    parameters: Vec<Tensor>,
    /// What the optimizer keeps.
    states: Vec<Tensor>,
    running: [Tensor; 2],
    iteration: usize,
    elsewhere: Option<Elsewhere>,
}

/// Another thread.
struct Elsewhere {
    jobs: Option<Sender<Job>>,
    /// How many it has still to do.
    left: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
    seen: (Sender<Seen>, Receiver<Seen>),
}

type Job = Box<dyn FnOnce(&mut ChaCha8Rng) + Send>;
type Seen = Result<Tensor, TchError>;

impl Elsewhere {
    fn start(seed: u64) -> Self {
        let (jobs, incoming) = channel::<Job>();
        let left = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&left);
        let thread = thread::spawn(move || {
            stand_by();
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            for job in incoming {
                job(&mut random);
                count.fetch_sub(1, Ordering::Release);
            }
        });
        Elsewhere { jobs: Some(jobs), left, thread: Some(thread), seen: channel() }
    }

    fn does(&self, job: impl FnOnce(&mut ChaCha8Rng) + Send + 'static) {
        self.left.fetch_add(1, Ordering::Relaxed);
        self.jobs.as_ref().expect("taken only when dropped").send(Box::new(job)).expect("the thread ends with this");
    }

    /// Some time later.
    fn let_go(&self, tensor: Tensor) {
        self.does(move |random| {
            let until = Instant::now() + Duration::from_micros(random.random_range(0..100));
            while Instant::now() < until {
                std::hint::spin_loop();
            }
            drop(tensor);
        });
    }

    fn look_at(&self, tensor: Tensor) {
        let seen = self.seen.0.clone();
        self.does(move |_| {
            let made = tensor.f_detach().and_then(|tensor| tensor.f_neg());
            drop(tensor);
            seen.send(made).expect("it is alive");
        });
    }

    /// Waits until nothing is left.
    fn catch_up(&self) {
        while self.left.load(Ordering::Acquire) > 0 {
            thread::yield_now();
        }
    }

    /// What was made of all that it has looked at.
    fn has_seen(&self) -> Result<Vec<Tensor>, TchError> {
        self.catch_up();
        self.seen.1.try_iter().collect()
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        self.jobs = None;
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

const WIDTH: i64 = 64;
const HEIGHT: i64 = 32;

impl<'a> Machine<'a> {
    fn new(program: &'a Program, mode: Mode) -> Self {
        tch::manual_seed(program.seed as i64);
        let on_cpu = (Kind::Float, Device::Cpu);
        let parameters =
            (0..3).map(|_| (Tensor::randn([WIDTH, WIDTH], on_cpu) * 0.1).set_requires_grad(true)).collect();
        let states = if mode.has_states() { 3 } else { 0 };
        let states = (0..states).map(|_| Tensor::ones([WIDTH, WIDTH], on_cpu)).collect();
        Machine {
            program,
            mode,
            parameters,
            states,
            running: [Tensor::zeros([WIDTH], on_cpu), Tensor::ones([WIDTH], on_cpu)],
            iteration: 0,
            elsewhere: mode.has_others().then(|| Elsewhere::start(program.seed)),
        }
    }

    /// The program as it is after so many untouched iterations.
    fn after(program: &'a Program, mode: Mode, iterations: usize) -> Result<Self, TchError> {
        let mut machine = Machine::new(program, mode);
        (0..iterations).try_for_each(|_| machine.iteration().map(drop))?;
        machine.elsewhere.iter().for_each(Elsewhere::catch_up);
        Ok(machine)
    }

    /// What outlives an iteration.
    fn kept(&self) -> Vec<Tensor> {
        let mut kept: Vec<Tensor> = self.parameters.iter().map(Tensor::shallow_clone).collect();
        kept.extend(self.parameters.iter().map(Tensor::grad).filter(Tensor::defined));
        kept.extend(self.states.iter().chain(&self.running).map(Tensor::shallow_clone));
        kept
    }

    /// Runs the program once. Returns everything that is alive after it.
    fn iteration(&mut self) -> Result<Vec<Tensor>, TchError> {
        tch::manual_seed((self.program.seed ^ (self.iteration as u64) << 40) as i64);
        for mut gradient in self.parameters.iter().map(Tensor::grad).filter(Tensor::defined) {
            let _ = gradient.f_detach_()?.f_zero_()?;
        }
        let on_cpu = (Kind::Float, Device::Cpu);
        let mut registers = Vec::new();
        for pass in 0..self.mode.passes() {
            registers.clear();
            for height in self.heights(pass) {
                registers.push(Tensor::f_randn([height, WIDTH], on_cpu)?);
            }
            for (step, is_left_out) in self.program.instructions.iter().zip(self.left_out()) {
                match is_left_out {
                    true => registers.push(registers[step.a as usize % registers.len()].shallow_clone()),
                    false if self.mode == Mode::Beside => self.step_beside(*step, &mut registers)?,
                    false => self.step(*step, &mut registers)?,
                }
            }
        }
        // Also where an operator is refused and `tch` panics, gradients are recorded again.
        let without_gradients = tch::no_grad_guard();
        for (state, parameter) in self.states.iter_mut().zip(&mut self.parameters) {
            let _ = state.f_mul_scalar_(0.9)?.f_add_(&parameter.f_abs()?)?;
            let _ = parameter.f_sub_(&state.f_mul_scalar(0.01)?)?;
        }
        drop(without_gradients);
        self.iteration += 1;
        if let Some(elsewhere) = &self.elsewhere {
            registers.extend(elsewhere.has_seen()?);
        }
        registers.extend(self.kept());
        Ok(registers)
    }

    /// Rows of the batches of a pass of this iteration: of every other program both have the same.
    fn heights(&self, pass: u64) -> [i64; 2] {
        if !self.mode.is_resized() {
            return [HEIGHT; 2];
        }
        let mut random = ChaCha8Rng::seed_from_u64(self.program.seed ^ (self.iteration as u64) << 32 ^ pass << 48);
        let mut height = || HEIGHT / 8 * random.random_range(2..=24);
        let first = height();
        [first, if self.program.seed.is_multiple_of(2) { first } else { height() }]
    }

    /// Whether each instruction is left out of this iteration: what it would make is what it would make it of.
    fn left_out(&self) -> Vec<bool> {
        let instructions = self.program.instructions.len();
        if self.mode != Mode::LeftOut || self.iteration < WARM_UP + RECORDED {
            return vec![false; instructions];
        }
        let mut random = ChaCha8Rng::seed_from_u64(self.program.seed ^ (self.iteration as u64) << 32);
        (0..instructions).map(|_| random.random_bool(0.1)).collect()
    }

    /// A step while another thread looks at what those before it have made, which it may wait for; some are other threads' own.
    fn step_beside(&mut self, step: Instruction, registers: &mut Vec<Tensor>) -> Result<(), TchError> {
        if !step.operation.only_reads() {
            self.elsewhere.iter().for_each(Elsewhere::catch_up);
        }
        let known = registers.len();
        if step.c.is_multiple_of(5) {
            let ran = thread::scope(|scope| {
                let thread = scope.spawn(|| {
                    stand_by();
                    self.step(step, registers)
                });
                thread.join()
            });
            ran.unwrap_or_else(|panic| resume_unwind(panic))?;
        } else {
            self.step(step, registers)?;
        }
        for (elsewhere, made) in self.elsewhere.iter().zip(registers.get(known)) {
            elsewhere.look_at(made.shallow_clone());
        }
        Ok(())
    }

    fn step(&mut self, step: Instruction, registers: &mut Vec<Tensor>) -> Result<(), TchError> {
        let a = registers[step.a as usize % registers.len()].shallow_clone();
        let b = registers[step.b as usize % registers.len()].shallow_clone();
        if let Some(elsewhere) = self.elsewhere.as_ref().filter(|_| self.mode == Mode::LetGo) {
            elsewhere.let_go(a.shallow_clone());
        }
        let number = f64::from(step.c % 7) * 0.3 - 0.9;
        let parameter = &self.parameters[step.c as usize % self.parameters.len()];
        let (rows, columns) = (a.size()[0], a.size()[1]);
        let alike = |b: Tensor| if b.size() == a.size() { Ok(b) } else { b.f_mean(Kind::Float) };
        let made = match step.operation {
            Operation::Add => a.f_add(&alike(b)?)?,
            Operation::Multiply => a.f_mul(&alike(b)?)?,
            Operation::MultiplyNumber => a.f_mul_scalar(number)?,
            Operation::MatMul => a.f_matmul(&a.f_transpose(0, 1)?)?.f_mul_scalar(0.05)?,
            Operation::Linear if columns == WIDTH => a.f_matmul(parameter)?,
            Operation::Linear => a.f_mul(&parameter.f_mean(Kind::Float)?)?,
            Operation::Transpose => a.f_transpose(0, 1)?,
            Operation::Slice => {
                let rows_kept = (rows / 2).max(1);
                a.f_slice(0, rows - rows_kept, rows, 1)?
            }
            Operation::Reshape if rows % 2 == 0 => a.f_reshape([rows / 2, columns * 2])?,
            Operation::Reshape => a.f_reshape([columns, rows])?,
            Operation::Expand => a.f_slice(0, 0, 1, 1)?.f_expand([rows, columns], false)?,
            Operation::Concatenate if step.c.is_multiple_of(2) => Tensor::f_cat(&[&a, &a.f_add(&alike(b)?)?], 0)?,
            // As caches of keys and values begin.
            Operation::Concatenate => Tensor::f_cat(&[&Tensor::f_empty([0], (Kind::Float, Device::Cpu))?, &a], 0)?,
            Operation::Chunk => {
                let mut parts = a.f_chunk(2, 1)?;
                parts.swap_remove(0)
            }
            Operation::Clone => a.f_add_scalar(0.0)?,
            Operation::AddInPlace => a.shallow_clone().f_add_(&alike(b)?)?,
            Operation::ScaleInPlace => a.shallow_clone().f_mul_scalar_(0.9)?,
            Operation::ReluInPlace => a.shallow_clone().f_relu_()?,
            Operation::WriteSlice => {
                let _ = a.f_slice(0, 0, (rows / 2).max(1), 1)?.f_mul_scalar_(number)?;
                return Ok(());
            }
            Operation::FillInPlace => a.shallow_clone().f_fill_(number)?,
            Operation::ZeroInPlace => {
                let mut fresh = a.f_detach()?.f_add_scalar(1.0)?;
                fresh.f_zero_()?.f_add(&a)?
            }
            Operation::CopyInto => {
                let mut fresh = Tensor::f_empty(a.size(), (Kind::Float, Device::Cpu))?;
                fresh.f_copy_(&a)?;
                fresh
            }
            Operation::Relu => a.f_relu()?,
            Operation::Gelu => a.f_gelu("none")?,
            Operation::Tanh => a.f_tanh()?,
            Operation::Softmax => a.f_softmax(1, Kind::Float)?,
            Operation::LogSumExp => a.f_logsumexp([1i64].as_slice(), true)?.f_add(&a)?,
            Operation::LayerNorm => a.f_layer_norm([columns], None::<&Tensor>, None::<&Tensor>, 1e-5, false)?,
            Operation::BatchNorm if columns == WIDTH && rows > 1 => {
                let [mean, variance] = &self.running;
                let (none, momentum) = (None::<&Tensor>, 0.1);
                a.f_batch_norm(none, none, Some(mean), Some(variance), true, momentum, 1e-5, false)?
            }
            Operation::BatchNorm => a.f_sub(&a.f_mean_dim([0i64].as_slice(), true, Kind::Float)?)?,
            Operation::Dropout => a.f_dropout(0.3, true)?,
            Operation::Bernoulli => a.f_sigmoid()?.f_bernoulli()?.f_mul(&a)?,
            Operation::NoiseLike => a.f_add(&a.f_randn_like()?.f_mul_scalar(0.1)?)?,
            Operation::NormalInPlace => {
                let mut fresh = a.f_detach()?.f_mul_scalar(1.0)?;
                fresh.f_normal_(0.0, 1.0)?.f_mul(&a)?
            }
            Operation::Randomized => a.f_alpha_dropout(0.2, true)?,
            Operation::CumulativeSum => a.f_cumsum(1, Kind::Float)?.f_mul_scalar(0.1)?,
            Operation::Sort => a.f_sort(1, step.c.is_multiple_of(2))?.0,
            Operation::TopK => a.f_topk((columns / 2).max(1), 1, true, true)?.0,
            Operation::Where => a.f_where_self(&a.f_gt(0.0)?, &a.f_neg()?)?,
            Operation::MaskedFill => a.f_masked_fill(&a.f_lt(number)?, 0.5)?,
            Operation::IndexSelect => {
                let index = Tensor::f_randint(rows, [rows], (Kind::Int64, Device::Cpu))?;
                a.f_index_select(0, &index)?
            }
            Operation::ScatterAdd => {
                let index = Tensor::f_randint(rows, [rows, columns], (Kind::Int64, Device::Cpu))?;
                a.f_mul_scalar(0.5)?.f_scatter_add(0, &index, &a)?
            }
            Operation::IndexPut => {
                let index = Tensor::f_randint(rows, [(rows / 2).max(1)], (Kind::Int64, Device::Cpu))?;
                let values = a.f_slice(0, 0, (rows / 2).max(1), 1)?.f_mul_scalar(2.0)?;
                a.f_mul_scalar(1.0)?.f_index_put_(&[Some(&index)], &values, true)?
            }
            Operation::MaxPool if columns % 2 == 0 => {
                a.f_unsqueeze(0)?.f_max_pool1d([2], [2], [0], [1], false)?.f_squeeze_dim(0)?
            }
            Operation::MaxPool => a.f_max_dim(1, true)?.0.f_add(&a)?,
            Operation::Convolution => {
                let kernel = parameter.f_slice(0, 0, 3, 1)?.f_slice(1, 0, 3, 1)?.f_reshape([1, 1, 3, 3])?;
                let image = a.f_reshape([1, 1, rows, columns])?;
                let none = None::<&Tensor>;
                image.f_conv2d(&kernel, none, [1, 1], [1, 1], [1, 1], 1)?.f_reshape([rows, columns])?
            }
            Operation::Attention if columns % 4 == 0 => {
                let heads = a.f_reshape([1, rows, 4, columns / 4])?.f_transpose(1, 2)?;
                let (none, dropout) = (None::<&Tensor>, if step.c.is_multiple_of(2) { 0.0 } else { 0.2 });
                let mixed =
                    Tensor::f_scaled_dot_product_attention(&heads, &heads, &heads, none, dropout, true, None, false)?;
                mixed.f_transpose(1, 2)?.f_reshape([rows, columns])?
            }
            Operation::Attention => a.f_softmax(0, Kind::Float)?,
            Operation::HalfPrecision => {
                let half = a.f_to_kind(Kind::BFloat16)?;
                half.f_mul(&half)?.f_to_kind(Kind::Float)?
            }
            Operation::Complex if columns % 2 == 0 => {
                let complex = a.f_reshape([rows, columns / 2, 2])?.f_contiguous()?.f_view_as_complex()?;
                complex.f_mul(&complex.f_conj()?)?.f_view_as_real()?.f_reshape([rows, columns])?
            }
            Operation::Complex => a.f_abs()?,
            Operation::Lists => {
                let others = registers.iter().filter(|other| other.kind() == Kind::Float).take(1 + step.c as usize % 6);
                let lists: Vec<Tensor> = [&a, &b].into_iter().chain(others).map(Tensor::shallow_clone).collect();
                blend(&lists, number)?
            }
            Operation::FromNothing => {
                let made = [Tensor::f_zeros, Tensor::f_ones, Tensor::f_rand][step.c as usize % 3];
                a.f_add(&made(&a.size(), (Kind::Float, Device::Cpu))?)?
            }
            Operation::FilledIn => {
                let values = vec![number as f32; a.numel()];
                a.f_mul(&Tensor::f_from_slice(&values)?.f_reshape(a.size())?)?
            }
            Operation::Detach => a.f_detach()?,
            Operation::Free => {
                if registers.len() > 1 {
                    let _ = registers.swap_remove(step.a as usize % registers.len());
                }
                return Ok(());
            }
            Operation::Read => a.f_mul_scalar(a.f_mean(Kind::Float)?.f_double_value(&[])?.clamp(-2.0, 2.0))?,
            Operation::Backward => return backward(&a),
            Operation::Slope => self.slope(&a)?,
            Operation::Update => return self.update(step.c as usize),
            // After the recorded iterations, one of each plan.
            Operation::Rarely
                if self.iteration > WARM_UP + RECORDED && self.iteration % PLANNED == step.c as usize % 5 =>
            {
                a.f_exp()?.f_clamp(-2.0, 2.0)?
            }
            Operation::Rarely => return Ok(()),
        };
        registers.push(cut_down(made)?);
        Ok(())
    }

    /// The gradient of a register by a parameter, as a value that has a gradient itself.
    fn slope(&self, a: &Tensor) -> Result<Tensor, TchError> {
        let parameter = &self.parameters[0];
        let loss = a.f_mul(&parameter.f_mean(Kind::Float)?)?.f_square()?.f_mean(Kind::Float)?;
        let slope = Tensor::f_run_backward(&[&loss], &[parameter], true, true)?.remove(0);
        a.f_mul(&slope.f_mean(Kind::Float)?)
    }

    fn update(&mut self, which: usize) -> Result<(), TchError> {
        let count = self.parameters.len();
        let parameter = &mut self.parameters[which % count];
        let gradient = parameter.grad();
        if !gradient.defined() {
            return Ok(());
        }
        let _without_gradients = tch::no_grad_guard();
        let gradient = gradient.f_clamp(-1.0, 1.0)?;
        parameter.f_sub_(&gradient.f_mul_scalar(0.01)?).map(drop)
    }
}

fn backward(a: &Tensor) -> Result<(), TchError> {
    if !a.requires_grad() {
        return Ok(());
    }
    let loss = a.f_square()?.f_mean(Kind::Float)?;
    Tensor::f_run_backward(&[&loss], &[] as &[&Tensor], true, false).map(drop)
}

/// At most so many elements, and never none.
fn cut_down(made: Tensor) -> Result<Tensor, TchError> {
    let [rows, columns] = made.size()[..] else {
        return made.f_reshape([1, -1]);
    };
    if rows * columns <= ELEMENTS_MAX { Ok(made) } else { made.f_slice(0, 0, (ELEMENTS_MAX / columns).max(1), 1) }
}
