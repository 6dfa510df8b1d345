//! `plimsoll evaluate --held-out`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::Args;
use plimsoll_env::config::{FamilyConfig, Split};
use plimsoll_runtime::file::require_writable;
use plimsoll_runtime::units::Bandwidth;
use plimsoll_runtime::{Link, Trace};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::chosen::{Chosen, PlannerFlags};
use crate::held_out::{
    ALONE, Contest, Contestant, Field, Known, PLANNER, PointReport, Skipped, Summary, called, grid, print,
    spread_evenly, way_of,
};
use crate::highs::Highs;
use crate::link::bandwidth;
use crate::loops::{LoopFlags, RECORDED_ITERATIONS};
use crate::machine::Machine;
use crate::members::{self, Recorded};
use crate::outputs::{read_json, write_json};
use crate::progress;
use crate::provenance::{command_line, commit};

/// How the names of held-out figures begin in a policy's file.
const SIGNED: &str = "held_out.";

/// Flags of a comparison on held-out members.
#[derive(Args, Clone, Debug)]
pub struct HeldOutFlags {
    /// Compare on held-out members of the family, at seven budgets, over some links and by recomputing alone, with every
    /// baseline and with searches of the same time
    #[arg(long, conflicts_with_all = ["real", "budget", "baseline", "iterations", "scatter", "logdir", "link",
        "host_limit", "spill", "spill_limit"])]
    pub held_out: bool,
    /// With --held-out: compare on the traces in this folder, in place of recording members; logs of simrd count
    #[arg(long, value_name = "DIR", requires = "held_out", conflicts_with = "workload")]
    traces: Option<PathBuf>,
    /// With --traces: compare on this trace alone; may be given several times
    #[arg(long, value_name = "NAME", requires = "traces")]
    only: Vec<String>,
    /// With --held-out: how many members to draw and record
    #[arg(long, default_value_t = 6, value_name = "N", requires = "held_out", conflicts_with = "traces")]
    count: u16,
    /// With --held-out: the machine whose times the traces shall have: its profile, the profile's name, or `as-recorded`
    #[arg(long, value_name = "FILE|NAME", default_value = "titan-v", requires = "held_out")]
    hardware: String,
    /// With --held-out: the links, in GB/s unless told: PCI Express 3 and 4 as programs find them
    #[arg(long, value_name = "GBPS", value_delimiter = ',', default_values = ["12", "25"], value_parser = bandwidth,
        requires = "held_out")]
    links: Vec<Bandwidth>,
    /// With --held-out: allow no swaps at all
    #[arg(long, requires = "held_out")]
    recompute_only: bool,
    /// With --held-out: seconds of the search for the best plan of each point
    #[arg(long, value_name = "S", default_value_t = 60.0, requires = "held_out")]
    reference_seconds: f64,
    /// With --held-out: take the best plans' makespans from this report of an earlier call, where it has them
    #[arg(long, value_name = "FILE", requires = "held_out")]
    known: Vec<PathBuf>,
    /// With --held-out: compare on at most so many points, spread evenly
    #[arg(long, value_name = "N", requires = "held_out")]
    points_max: Option<usize>,
    /// With --held-out: another policy to compare, such as one of another family; may be given several times
    #[arg(long, value_name = "FILE|BASELINE", requires = "held_out")]
    beside: Vec<String>,
    /// With --held-out: let torchtitan's `auto_perf_maxing` plan, too, whose programs HiGHS solves
    #[arg(long, requires = "held_out")]
    auto_perf_maxing: bool,
    /// With --held-out: write the figures of the policy into its file, too
    #[arg(long, requires = "held_out")]
    sign: bool,
    /// With --held-out: points that are worked on at the same time [default: as many as there are cores]
    #[arg(long, value_name = "N", requires = "held_out")]
    threads: Option<usize>,
}

/// What a comparison needs beside its own flags.
pub struct Request<'a> {
    /// The family.
    pub config: FamilyConfig,
    /// Its members that have a name and are judged on, beside those that are drawn.
    pub named: &'a [String],
    /// The policy in question.
    pub policy: &'a str,
    /// How much the planner tries, and the searches beside it.
    pub planner: &'a PlannerFlags,
    /// Where to write the report.
    pub json: Option<&'a PathBuf>,
    /// How members are recorded.
    pub loops: &'a LoopFlags,
}

/// All that one call found out, and how.
#[derive(Serialize)]
struct Report<'a> {
    command: String,
    commit: String,
    seed: u64,
    machine: ThisMachine,
    elapsed_seconds: f64,
    policies: Vec<PolicyLine>,
    hardware: &'a str,
    /// What its copies cost, over a link of 1 GB/s.
    copies: Link,
    planner: PlannerLine,
    reference_seconds: f64,
    /// Reports of which the best plans were known beforehand.
    known: &'a [PathBuf],
    skipped: Skipped,
    summary: &'a [Summary],
    points: &'a [PointReport],
}

/// How much the planner and the searches beside it tried.
#[derive(Serialize)]
struct PlannerLine {
    decodes: u64,
    /// None where it has the time by the size of each trace.
    search_ms: Option<u64>,
    search_plans: Option<u64>,
    seed: u64,
}

impl PlannerLine {
    fn of(flags: &PlannerFlags) -> Self {
        let &PlannerFlags { decodes, search_ms, search_plans, search_seed: seed, .. } = flags;
        PlannerLine { decodes, search_ms, search_plans, seed }
    }
}

/// A policy as it stands in a report.
#[derive(Serialize)]
struct PolicyLine {
    name: String,
    family: Option<String>,
    seed: Option<u64>,
    command: Option<String>,
}

/// The machine that the comparison ran on.
#[derive(Serialize)]
struct ThisMachine {
    processor: String,
    cores: usize,
}

/// What is read of an earlier report.
#[derive(Deserialize)]
struct Earlier {
    hardware: String,
    copies: Option<Link>,
    points: Vec<PointReport>,
}

/// Runs the command.
pub fn run(mut request: Request<'_>, flags: &HeldOutFlags) -> anyhow::Result<()> {
    let started = Instant::now();
    request.json.map_or(Ok(()), |path| require_writable(path))?;
    let contestants = contestants(request.policy, &flags.beside)?;
    if flags.sign {
        let Chosen::Learned { .. } = contestants[0].policy else { bail!("--sign: {} is no file", request.policy) };
        require_writable(Path::new(request.policy))?;
    }
    let machine = Machine::find(&flags.hardware, Some(&request.config.path))?;
    let copies = machine.link_of(1e9);
    let contest = Contest {
        contestants: &contestants,
        planner: request.planner.planner(),
        highs: flags.auto_perf_maxing.then(Highs::find).transpose()?,
        reference_time: Duration::try_from_secs_f64(flags.reference_seconds).context("--reference-seconds")?,
        known: known(&flags.known, &flags.hardware, copies)?,
    };
    let recorded = recorded(&mut request, flags)?;
    let as_recorded = recorded.traces.iter().filter(|trace| machine.leaves_times(trace)).count();
    let project = |trace: &Arc<Trace>| Ok(Arc::new(machine.project(trace, &recorded.recorded_on)?));
    let traces = recorded.traces.iter().map(project).collect::<anyhow::Result<Vec<_>>>()?;
    let threads = rayon::ThreadPoolBuilder::new().num_threads(flags.threads.unwrap_or(0)).build()?;
    let (points, skipped) = threads.install(|| compare(&contest, &traces, &machine, flags))?;
    if points.is_empty() {
        bail!("no point says anything: {skipped}");
    }
    let summary = Summary::of(&points);
    if let Some(path) = request.json {
        let report = Report {
            command: command_line(),
            commit: commit(),
            seed: request.loops.seed,
            machine: ThisMachine::look()?,
            elapsed_seconds: started.elapsed().as_secs_f64(),
            policies: contestants.iter().map(PolicyLine::of).collect(),
            hardware: &flags.hardware,
            copies,
            planner: PlannerLine::of(request.planner),
            reference_seconds: flags.reference_seconds,
            known: &flags.known,
            skipped,
            summary: &summary,
            points: &points,
        };
        write_json(path, &report)?;
    }
    if flags.sign {
        sign(request.policy, &contestants[0], &summary)?;
    }
    println!(
        "{} traces ({as_recorded} of them with the times that were recorded) on {}, {} points; {skipped}",
        traces.len(),
        flags.hardware,
        points.len()
    );
    print(&summary, &points);
    Ok(())
}

/// The policy in question, and those beside it.
fn contestants(policy: &str, beside: &[String]) -> anyhow::Result<Vec<Contestant>> {
    let mut contestants: Vec<Contestant> = Vec::new();
    for (index, path) in std::iter::once(policy).chain(beside.iter().map(String::as_str)).enumerate() {
        let name = called(path, index);
        if contestants.iter().any(|known| known.name == name) {
            bail!("--beside {path}: another policy of this call is called {name} in its report");
        }
        contestants.push(Contestant { name, policy: Chosen::parse(path)? });
    }
    Ok(contestants)
}

/// Writes what the policy came to into the provenance of its file.
fn sign(path: &str, contestant: &Contestant, summary: &[Summary]) -> anyhow::Result<()> {
    let Chosen::Learned { file, .. } = &contestant.policy else { bail!("--sign: {path} is no file") };
    let mut file = file.clone();
    file.provenance.quality.retain(|name, _| !name.starts_with(SIGNED));
    for (key, way) in [("alone", ALONE), ("planned", PLANNER)] {
        for row in summary.iter().filter(|row| row.name == way_of(&contestant.name, way)) {
            let figures = [
                ("points", Some(row.points as f64)),
                ("over_reference", row.excess_mean),
                ("over_reference_max", row.excess_max),
                ("below_best_baseline", row.below_best_baseline),
                ("baseline_is_better", Some(row.baseline_is_better)),
            ];
            let of_row = |(figure, value): (&str, Option<f64>)| {
                Some((format!("{SIGNED}{}.{key}.{figure}", row.group.key()), value?))
            };
            file.provenance.quality.extend(figures.into_iter().filter_map(of_row));
        }
    }
    file.save(path)?;
    Ok(())
}

fn known(reports: &[PathBuf], hardware: &str, copies: Link) -> anyhow::Result<Known> {
    let mut points = Vec::new();
    for path in reports {
        let report: Earlier = read_json(path)?;
        let theirs = report.hardware;
        ensure!(theirs == hardware, "--known {}: its times are those of {theirs}, not of {hardware}", path.display());
        let theirs = report.copies;
        let theirs =
            theirs.with_context(|| format!("--known {}: it does not say what copies cost there", path.display()))?;
        ensure!(theirs == copies, "--known {}: copies cost something else there than by {hardware}", path.display());
        points.extend(report.points);
    }
    Ok(Known::of(&points))
}

/// The traces to compare on.
fn recorded(request: &mut Request<'_>, flags: &HeldOutFlags) -> anyhow::Result<Recorded> {
    let mut recorded = match &flags.traces {
        Some(folder) => members::load_all(folder)?,
        None => {
            let folder = tempfile::tempdir()?;
            let mut names = request.named.to_vec();
            names.iter().try_for_each(|name| request.config.workload(name).map(drop))?;
            names.extend(members::draw(&mut request.config, Split::HeldOut, flags.count.into(), request.loops.seed)?);
            members::record(&request.config, &names, folder.path(), request.loops, RECORDED_ITERATIONS)?
        }
    };
    if let Some(unknown) = flags.only.iter().find(|name| recorded.traces.iter().all(|trace| trace.workload != **name)) {
        let names: Vec<_> = recorded.traces.iter().map(|trace| trace.workload.as_str()).collect();
        bail!("--only {unknown}: no trace of a workload of that name; there are {}", names.join(", "));
    }
    if !flags.only.is_empty() {
        recorded.traces.retain(|trace| flags.only.contains(&trace.workload));
    }
    Ok(recorded)
}

/// Lets everything plan at every point that says something.
fn compare(
    contest: &Contest<'_>,
    traces: &[Arc<Trace>],
    machine: &Machine,
    flags: &HeldOutFlags,
) -> anyhow::Result<(Vec<PointReport>, Skipped)> {
    let learned: Vec<&Chosen> = contest.contestants.iter().map(|contestant| &contestant.policy).collect();
    let spinner = progress::spinner("choosing points");
    let links: Vec<Link> = flags.links.iter().map(|link| machine.link_of(link.bytes_per_second())).collect();
    let (points, mut skipped) = grid(traces, &links, flags.recompute_only, &learned);
    spinner.finish_and_clear();
    let bar = progress::bar(points.len() as u64, "baselines");
    let all = points.len();
    let judged: Vec<Option<Field>> = points.into_par_iter().map(Field::judge).inspect(|_| bar.inc(1)).collect();
    let fields: Vec<Field> = judged.into_iter().flatten().collect();
    bar.finish_and_clear();
    skipped.free = all - fields.len();
    let open = fields.len();
    let fields = spread_evenly(fields, flags.points_max.unwrap_or(usize::MAX));
    skipped.beyond_points_max = open - fields.len();
    let bar = progress::bar(fields.len() as u64, "points");
    let reports: anyhow::Result<Vec<Option<PointReport>>> =
        fields.par_iter().map(|field| hold(contest, field, &bar)).collect();
    bar.finish_and_clear();
    let reports = reports?;
    skipped.infeasible += reports.iter().filter(|report| report.is_none()).count();
    Ok((reports.into_iter().flatten().collect(), skipped))
}

fn hold(contest: &Contest<'_>, field: &Field, bar: &indicatif::ProgressBar) -> anyhow::Result<Option<PointReport>> {
    let report = contest.hold(field)?;
    if let Some(report) = &report {
        bar.set_message(format!(
            "{} at {:.0}%: reference by {}",
            report.workload,
            100.0 * report.ratio,
            report.reference.by
        ));
    }
    bar.inc(1);
    Ok(report)
}

impl PolicyLine {
    fn of(contestant: &Contestant) -> Self {
        let file = match &contestant.policy {
            Chosen::Learned { file, .. } => Some(file),
            Chosen::Baseline(_) => None,
        };
        PolicyLine {
            name: contestant.policy.name().to_owned(),
            family: file.map(|file| file.family.clone()),
            seed: file.map(|file| file.provenance.seed),
            command: file.map(|file| file.provenance.command.clone()),
        }
    }
}

impl ThisMachine {
    fn look() -> anyhow::Result<Self> {
        let processors = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let line = processors.lines().find(|line| line.starts_with("model name"));
        let processor = line.and_then(|line| line.split(": ").nth(1)).unwrap_or("unknown").to_owned();
        Ok(ThisMachine { processor, cores: std::thread::available_parallelism()?.get() })
    }
}
