//! `plimsoll hold`.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, bail, ensure};
use clap::Args;
use plimsoll_env::config::FamilyConfig;
use plimsoll_env::workload::Workload;
use plimsoll_runtime::baselines::BASELINES;
use plimsoll_runtime::file::require_writable;
use plimsoll_runtime::planner::SEARCH;
use plimsoll_runtime::torch::report::Course;
use plimsoll_runtime::torch::{Budget as Line, IterationReport, Report, Runtime};
use plimsoll_runtime::units::Budget;
use serde::Serialize;

use crate::chosen::{ActionsFlag, Chosen};
use crate::link::LinkFlag;
use crate::loops::{LoopFlags, OpenDevice, Untouched, build, overheads};
use crate::outputs::write_json;
use crate::progress;
use crate::provenance::command_line;
use crate::table::{Table, mib, percent};
use crate::tiers::{OpenTiers, TierFlags};

/// Flags.
#[derive(Args)]
pub struct Arguments {
    /// Training loops, each a configuration and the name of a workload in it, such as configs/gpt.toml:gpt-small
    #[arg(required = true, value_name = "FILE:WORKLOAD")]
    loops: Vec<LoopName>,
    /// Device bytes, such as 512MiB, or a share of the keep-all peak, such as 60%; may be given several times
    #[arg(long, value_name = "BUDGET", default_values = ["80%", "60%", "45%"])]
    budget: Vec<Budget>,
    /// Iterations, from the first one on
    #[arg(long, value_name = "N", default_value_t = 20)]
    iterations: usize,
    /// Batches whose gradients add up in each iteration, instead of as many as the configuration says
    #[arg(long, value_name = "N")]
    passes: Option<NonZeroU32>,
    /// Passages or pictures in each batch, instead of as many as the configuration says
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(1..))]
    batch: Option<i64>,
    /// Listens to all of a loop, and not to its iterations alone: parameters and optimizer state may be away from one iteration to the
    /// next, but for the last, so that budgets below them can be held
    #[arg(long)]
    throughout: bool,
    /// A policy file, the name of a baseline, or `search`, as a job does that names neither
    #[arg(long, value_name = "FILE|BASELINE|search", default_value = "search")]
    policy: String,
    #[command(flatten)]
    allowed: ActionsFlag,
    #[command(flatten)]
    link: LinkFlag,
    #[command(flatten)]
    tiers: TierFlags,
    #[command(flatten)]
    flags: LoopFlags,
    /// Where to write the results as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// A workload by its configuration's path and its own name.
#[derive(Clone, Debug)]
struct LoopName {
    config: PathBuf,
    workload: String,
}

impl FromStr for LoopName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (config, workload) =
            text.rsplit_once(':').ok_or("expected FILE:WORKLOAD, such as configs/gpt.toml:gpt-small")?;
        Ok(LoopName { config: Path::new(config).to_owned(), workload: workload.to_owned() })
    }
}

/// One loop under one budget.
#[derive(Clone, Debug, Serialize)]
struct Held {
    workload: String,
    /// Batches whose gradients add up in each iteration.
    passes: NonZeroU32,
    /// Whether all of the loop was listened to.
    throughout: bool,
    /// The budget that was asked for.
    asked_bytes: u64,
    /// The budget that was held: the least found to be feasible where less was asked for.
    budget_bytes: u64,
    /// Peak of the untouched loop, counted at the allocator.
    keep_all_peak_bytes: u64,
    /// Device bytes between iterations.
    resident_bytes: u64,
    /// Highest peak of all iterations; where all of the loop was listened to, but for the end of the last, which makes everything resident.
    peak_bytes: u64,
    /// Whether no iteration exceeded the budget.
    held: bool,
    losses_identical: bool,
    variables_identical: bool,
    iterations: usize,
    /// Iterations whose program was known.
    known: usize,
    /// Iterations that carried a plan out.
    planned: usize,
    /// Those of them that did so to the letter.
    followed: usize,
    /// Of those, how many took the very peak that was predicted.
    peaks_as_predicted: usize,
    /// Where and how the last iteration departed from what was expected, if it did.
    deviation: Option<String>,
    reactive_evictions: u64,
    reruns: u64,
    offloaded_bytes: u64,
    slow_tier_high_water_bytes: u64,
    /// How many plans were made, by whom, and how long that took.
    plans: u64,
    plans_by: BTreeMap<&'static str, u64>,
    planning_ns: u64,
    /// Makespan of an iteration, with what comes before it and after, over that of the same one of the untouched loop, less one:
    /// median of the last half.
    overhead: f64,
    /// That of all iterations together, from the first one on, planning included.
    overhead_in_all: f64,
    /// How often a smaller budget was refused.
    refusals: usize,
}

#[derive(Serialize)]
struct Results<'a> {
    command: String,
    policy: &'a str,
    link_emulated: bool,
    points: &'a [Held],
}

/// Where the loops run, and where their copies go.
struct Ground {
    on: OpenDevice,
    tiers: OpenTiers,
}

/// The loop with nothing in between.
struct KeepAll {
    untouched: Untouched,
    peak_bytes: u64,
    resident_bytes: u64,
    makespans_ns: Vec<u64>,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> anyhow::Result<()> {
    ensure!(arguments.iterations > 0, "--iterations 0: there is nothing to run");
    let policy = Chosen::parse(&arguments.policy)?;
    if let Chosen::Baseline(name) = policy {
        let is_quick = name == SEARCH || BASELINES.contains(&name);
        ensure!(is_quick, "--policy {name}: it takes too long for a loop under way");
    }
    arguments.json.as_deref().map_or(Ok(()), require_writable)?;
    let configs = arguments.loops.iter().map(|name| {
        let mut config = FamilyConfig::load(&name.config)?;
        let workload = config.workload(&name.workload)?;
        let workload = workload.with_batch(arguments.batch.unwrap_or(workload.batch()));
        workload.validate().with_context(|| format!("{}: a batch of {}", name.workload, workload.batch()))?;
        config.workloads.insert(name.workload.clone(), workload);
        config.manner.passes = arguments.passes.unwrap_or(config.manner.passes);
        anyhow::Ok((config, &name.workload))
    });
    let configs: Vec<_> = configs.collect::<Result<_, _>>()?;
    for (config, _) in &configs {
        policy.warn_of_mismatch(&config.family.to_string(), arguments.allowed.actions);
    }
    let emulated = arguments.link.is_emulated();
    let tiers = arguments.tiers.open_on(arguments.flags.device, || arguments.link.resolve(), emulated)?;
    let on = OpenDevice::open(arguments.flags.device)?;
    let ground = Ground { tiers: on.tiers(tiers)?, on };
    let bar = progress::bar((configs.len() * arguments.budget.len()) as u64, "holding budgets");
    let mut points = Vec::new();
    for (config, workload) in &configs {
        let keep_all = KeepAll::run(config, workload, &ground, &arguments)?;
        for budget in &arguments.budget {
            bar.set_message(format!("{workload} at {budget}"));
            points.push(hold(config, workload, *budget, &keep_all, &ground, &arguments)?);
            bar.inc(1);
            // What is known so far is worth keeping, should a later loop fail.
            if let Some(path) = &arguments.json {
                write_json(
                    path,
                    &Results {
                        command: command_line(),
                        policy: &arguments.policy,
                        link_emulated: emulated,
                        points: &points,
                    },
                )?;
            }
        }
    }
    bar.finish_and_clear();
    print(&points);
    let broken = |point: &&Held| !(point.held && point.losses_identical && point.variables_identical);
    let broken: Vec<_> = points.iter().filter(broken).map(|point| point.workload.as_str()).collect();
    if !broken.is_empty() {
        bail!("a budget was exceeded, or results differ: {}", broken.join(", "));
    }
    Ok(())
}

impl KeepAll {
    fn run(config: &FamilyConfig, name: &str, ground: &Ground, arguments: &Arguments) -> anyhow::Result<Self> {
        ground.on.ask_for(config.workload(name)?.determinism());
        let session = ground.on.session;
        let mut makespans_ns = Vec::new();
        let (mut peak_bytes, mut resident_bytes) = (0, 0);
        let untouched = Untouched::watch(config, name, &arguments.flags, arguments.iterations, |step| {
            session.reset_peak();
            let (ran, time) = ground.on.timed(step);
            makespans_ns.push(time.as_nanos() as u64);
            peak_bytes = peak_bytes.max(session.peak_bytes());
            resident_bytes = session.live_bytes();
            ran
        })?;
        Ok(KeepAll { untouched, peak_bytes, resident_bytes, makespans_ns })
    }
}

/// A loop that ran to its end, or the least budget that is feasible as far as is known.
enum Attempt {
    Ran { losses: Vec<f64>, makespans_ns: Vec<u64>, peak_bytes: u64, workload: Box<dyn Workload>, report: Box<Report> },
    Refused { least_bytes: u64 },
}

/// Runs the loop under the budget, or under the least that is found to be feasible.
fn hold(
    config: &FamilyConfig,
    name: &str,
    budget: Budget,
    keep_all: &KeepAll,
    ground: &Ground,
    arguments: &Arguments,
) -> anyhow::Result<Held> {
    let asked_bytes = budget.resolve(keep_all.peak_bytes);
    let (mut budget_bytes, mut refusals) = (asked_bytes, 0);
    let (losses, makespans_ns, peak_bytes, workload, report) = loop {
        match attempt(config, name, budget_bytes, ground, arguments)? {
            Attempt::Ran { losses, makespans_ns, peak_bytes, workload, report } => {
                break (losses, makespans_ns, peak_bytes, workload, report);
            }
            Attempt::Refused { least_bytes } => {
                refusals += 1;
                ensure!(budget_bytes < keep_all.peak_bytes, "{name}: refused within its keep-all peak");
                budget_bytes = least_bytes.max(budget_bytes + budget_bytes / 128).min(keep_all.peak_bytes);
            }
        }
    };
    let followed: Vec<&IterationReport> = report.latest.iter().filter(|iteration| iteration.followed).collect();
    let as_predicted = |iteration: &&&IterationReport| {
        iteration.predicted.is_some_and(|predicted| predicted.peak_bytes == iteration.peak_bytes)
    };
    let (overhead, overhead_in_all) = overheads(&makespans_ns, &keep_all.makespans_ns);
    Ok(Held {
        workload: name.to_owned(),
        passes: config.manner.passes,
        throughout: arguments.throughout,
        asked_bytes,
        budget_bytes,
        keep_all_peak_bytes: keep_all.peak_bytes,
        resident_bytes: keep_all.resident_bytes,
        peak_bytes,
        held: peak_bytes <= budget_bytes,
        losses_identical: keep_all.untouched.has_losses(0, &losses),
        variables_identical: keep_all.untouched.has_variables_of(workload.as_ref())?,
        iterations: losses.len(),
        known: report.latest.iter().filter(|iteration| iteration.course.is_known()).count(),
        planned: report.latest.iter().filter(|iteration| iteration.course == Course::Planned).count(),
        followed: followed.len(),
        peaks_as_predicted: followed.iter().filter(as_predicted).count(),
        deviation: report.latest.last().and_then(|iteration| iteration.deviation.clone()),
        reactive_evictions: report.reactive_evictions,
        reruns: report.reruns,
        offloaded_bytes: report.offloaded_bytes,
        slow_tier_high_water_bytes: report.slow_tier_high_water_bytes,
        plans: report.plans,
        plans_by: report.plans_by,
        planning_ns: report.planning_ns,
        overhead,
        overhead_in_all,
        refusals,
    })
}

fn attempt(
    config: &FamilyConfig,
    name: &str,
    budget_bytes: u64,
    ground: &Ground,
    arguments: &Arguments,
) -> anyhow::Result<Attempt> {
    let builder = match Chosen::parse(&arguments.policy)? {
        Chosen::Baseline(SEARCH) => Runtime::builder(),
        Chosen::Baseline(name) => Runtime::builder().baseline(name),
        Chosen::Learned { file, .. } => Runtime::builder().policy(*file),
    };
    let Ground { on, tiers } = ground;
    let builder = builder.budget(Line::bytes(budget_bytes)).actions(arguments.allowed.actions).device(on.device);
    let runtime = builder.tiers(tiers.tiers).engine(on.engine(tiers)?).build()?;
    let training = arguments.throughout.then(|| runtime.start_detecting()).transpose()?;
    let mut workload = build(config, name, on.device, arguments.flags.seed)?;
    let (mut losses, mut makespans_ns) = (Vec::new(), Vec::new());
    for _ in 0..arguments.iterations {
        let (ran, time) = on.timed(|| {
            let _iteration = match &training {
                Some(training) => training.mark().map(|()| None),
                None => runtime.start().map(Some),
            }?;
            anyhow::Ok(quietly(|| workload.iteration()))
        });
        makespans_ns.push(time.as_nanos() as u64);
        let least_bytes = runtime.report().least_feasible_budget_bytes;
        match ran? {
            Ok(Ok(loss)) => losses.push(loss),
            // `tch` panics where an operator has no fallible form.
            _ if least_bytes > budget_bytes => return Ok(Attempt::Refused { least_bytes }),
            Ok(Err(error)) => return Err(error).with_context(|| format!("{name} within {budget_bytes} bytes")),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
    // Where all of the loop was listened to, its last iteration ends with it, and with everything resident.
    let peak_bytes = runtime.report().peak_bytes.max(on.session.peak_bytes());
    drop(training);
    Ok(Attempt::Ran { losses, makespans_ns, peak_bytes, workload, report: Box::new(runtime.report()) })
}

/// Runs `body` and catches its panic without a word.
fn quietly<R>(body: impl FnOnce() -> R) -> std::thread::Result<R> {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let ran = catch_unwind(AssertUnwindSafe(body));
    std::panic::set_hook(hook);
    ran
}

fn print(points: &[Held]) {
    println!(
        "{} iterations each, from the first on; bytes in MiB",
        points.iter().map(|point| point.iterations).max().unwrap_or(0)
    );
    let mut table = Table::new([
        "workload",
        "keep-all",
        "resident",
        "asked",
        "budget",
        "peak",
        "held",
        "identical",
        "known",
        "planned",
        "followed",
        "plans by",
        "overhead",
        "in all",
    ]);
    let yes = |yes: bool| if yes { "yes" } else { "NO" }.to_owned();
    for point in points {
        table.row([
            point.workload.clone(),
            mib(point.keep_all_peak_bytes),
            mib(point.resident_bytes),
            mib(point.asked_bytes),
            mib(point.budget_bytes),
            mib(point.peak_bytes),
            yes(point.held),
            yes(point.losses_identical && point.variables_identical),
            point.known.to_string(),
            point.planned.to_string(),
            point.followed.to_string(),
            point.plans_by.iter().map(|(by, plans)| format!("{plans} {by}")).collect::<Vec<_>>().join(", "),
            percent(point.overhead),
            percent(point.overhead_in_all),
        ]);
    }
    print!("{table}");
}
