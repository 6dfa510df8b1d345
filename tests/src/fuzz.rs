//! Random programs of libtorch operators, run untouched and under random lawful plans or random budgets, and compared
//! bit for bit.
//!
//! A [`Program`] knows nothing of how plans are carried out: another way to run a loop is one more [`Mode`]. One that fails is
//! minimised by leaving instructions out.

mod elsewhere;
mod machine;
mod program;

use std::ops::AddAssign;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use clap::ValueEnum;
use plimsoll_runtime::baselines::BASELINES;
use plimsoll_runtime::lineage::EVICTION_FLOOR_BYTES;
use plimsoll_runtime::planner::Planner;
use plimsoll_runtime::search::Limits;
use plimsoll_runtime::torch::{Budget, CopiedBy, CopyError, Executor, HostEngine, RecordError, Recorder, Runtime};
use plimsoll_runtime::trace::{Storage, StorageId};
use plimsoll_runtime::{ActionSet, Lineage, Link, Problem, Trace};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use tch::TchError;

use self::elsewhere::Elsewhere;
use self::machine::{ELEMENTS_MAX, Machine, digests, digests_within};
use self::program::Operation;
pub use self::program::{Instruction, Program};
use crate::beyond_tch::forget_origins;
use crate::faulty::{Call, Fault, Faults, FaultyEngine};
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
        let needs = self.needs(mode)?.filter(|_| actions.swap);
        let enough_bytes = needs.map_or(expected.peak_bytes, |needs| needs.any_operator_bytes);
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
            // threads made, which stays. What is rerun has beside it what is too small to be evicted, and was made since.
            let peak_bytes = latest.peak_bytes;
            let has_failed = faults.happened() > failed_before;
            let can_give_way = actions.swap && mode != Mode::Beside;
            let rerun_bytes = needs.filter(|_| latest.reruns > 0).map_or(0, Needs::to_rerun_any_operator);
            if can_give_way && !has_failed && peak_bytes > budget_bytes.max(resident_bytes).max(rerun_bytes) {
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
        let needs = self.needs(mode)?.filter(|_| actions.swap);
        let enough_bytes = needs.map_or(expected.peak_bytes, |needs| needs.any_operator_bytes);
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
        // What bystanders use is in no plan: some budgets have room for it, so that plans are followed.
        let most = if mode == Mode::Beside { 1.5 } else { 1.0 };
        let budget_bytes = least_bytes + (span_bytes * random.random_range(0.1..most)) as u64;
        let actions = match random.random_range(0..4) {
            0 => ActionSet::SWAP,
            1 => ActionSet::RECOMPUTE,
            _ => ActionSet::ALL,
        };
        let engine = self.engine(random.random_bool(0.1).then_some(link));
        let (engine, faults) = FaultyEngine::with_faults(engine);
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
                _ => Fault::Error(CopyError::File { call: "writing", message: "there is no file".to_owned() }),
            };
            (0..random.random_range(1..6)).for_each(|more| faults.inject(call, skipped + more, fault.clone()));
        }
    }

    /// Every other program copies beside what it computes.
    fn engine(&self, pace: Option<Link>) -> HostEngine {
        let copied_by = if self.seed.is_multiple_of(2) { CopiedBy::Threads } else { CopiedBy::Caller };
        HostEngine::copied_by(copied_by, u64::MAX, pace)
    }

    /// What its operators need where everything idle can be swapped; nothing that is known where iterations are not alike.
    fn needs(&self, mode: Mode) -> Result<Option<Needs>, String> {
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
        Ok(recorder.finish(WARM_UP, "program", "fuzz", "cpu").ok().map(|trace| Needs::of(&trace)))
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

/// What the operators of a program need where everything idle can be swapped.
#[derive(Clone, Copy)]
struct Needs {
    /// The most that one needs beside what cannot be evicted: with as much none needs to be refused. To what cannot belongs all that the
    /// iteration starts with, for what no operator has touched yet is unknown.
    any_operator_bytes: u64,
    /// What is too small to be evicted.
    small_bytes: u64,
}

impl Needs {
    fn of(trace: &Trace) -> Self {
        let storage = |id: &StorageId| &trace.storages[id.index()];
        let is_initial = |id: &StorageId| id.0 < trace.initial_storages;
        let is_small = |storage: &Storage| storage.bytes < EVICTION_FLOOR_BYTES;
        let is_locked = |id: &StorageId| storage(id).locked.is_some() || is_small(storage(id));
        let (initial, made) = trace.storages.split_at(trace.initial_storages as usize);
        let always_bytes = trace.unseen_bytes + initial.iter().map(|storage| storage.bytes).sum::<u64>();
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
        let small_bytes = made.iter().filter(|storage| is_small(storage)).map(|storage| storage.bytes).sum();
        Needs { any_operator_bytes: always_bytes + most_bytes, small_bytes }
    }

    /// An operator is run again beside what was made since it first ran.
    fn to_rerun_any_operator(self) -> u64 {
        self.any_operator_bytes + self.small_bytes
    }
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
