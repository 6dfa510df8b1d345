//! `plimsoll plan`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{anyhow, bail};
use clap::Args;
use plimsoll_runtime::planner::{Planner, SEARCH};
use plimsoll_runtime::units::Budget;
use plimsoll_runtime::{Decided, Lineage, PlanFile, Problem, Timeline};

use crate::chosen::{ActionsFlag, Chosen, PlannerFlags};
use crate::exact::{EXACT, Proof};
use crate::explanation;
use crate::highs::Highs;
use crate::link::{LinkFlag, described};
use crate::machine::HardwareFlag;
use crate::online;
use crate::outputs::{require_outputs, write_json};
use crate::patient::{decide_by_search, decide_exactly};
use crate::results::PointResult;
use crate::table::{Table, mib, milliseconds, percent};
use crate::two_level::{TWO_LEVEL, decide_at_two_levels};

/// Storages that are named at the peak.
const LARGEST: usize = 5;

/// Flags.
#[derive(Args)]
pub struct Arguments {
    /// A recorded trace
    #[arg(long, value_name = "FILE")]
    trace: PathBuf,
    /// A policy file, the name of a baseline, `exact`, or `auto-perf-maxing`
    #[arg(long, value_name = "FILE|BASELINE|exact")]
    policy: String,
    /// How long `exact` or `search` may take [default: 60s for `exact`, 20,000 evaluations for `search`]
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    time_limit: Option<Duration>,
    /// Device bytes, such as 512MiB, or a share of the keep-all peak, such as 60%
    #[arg(long, value_name = "BUDGET")]
    budget: Budget,
    #[command(flatten)]
    allowed: ActionsFlag,
    #[command(flatten)]
    hardware: HardwareFlag,
    #[command(flatten)]
    link: LinkFlag,
    #[command(flatten)]
    planner: PlannerFlags,
    /// Run the baseline online, without a plan: dtr, dtr-eq, dtr-local, msps, lru or largest, recomputing alone
    #[arg(long, conflicts_with_all = ["out", "json", "link", "actions", "time_limit", "decodes",
        "search_ms", "search_plans", "search_seed", "search_threads"])]
    online: bool,
    /// Where to write the plan
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Where to write the result as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> anyhow::Result<()> {
    require_outputs(&[("--out", arguments.out.as_ref()), ("--json", arguments.json.as_ref())])?;
    let machine = arguments.hardware.machine()?;
    let trace = machine.load(&arguments.trace)?;
    if arguments.online {
        return online::run(&trace, &arguments.policy, arguments.budget.resolve(trace.peak_bytes));
    }
    let maker = Maker::parse(&arguments.policy, arguments.time_limit)?;
    let lineage = Lineage::of(&trace);
    let problem = Problem {
        trace: &trace,
        lineage: &lineage,
        tiers: machine.link(&arguments.link, &trace)?.into(),
        budget_bytes: arguments.budget.resolve(trace.peak_bytes),
        actions: arguments.allowed.actions,
    };
    let planner = arguments.planner.planner();
    let (decided, proof) = maker.decide(problem, &planner)?;
    let name = arguments.policy.as_str();
    let mut result = PointResult::planned(name, &problem, arguments.link.is_emulated(), &decided);
    result.proof = proof;
    if let Some(path) = &arguments.json {
        write_json(path, &result)?;
    }
    if !result.feasible {
        return Err(maker.refuse(problem, &planner, proof));
    }
    if let Some(path) = &arguments.out {
        let file = PlanFile {
            fingerprint: trace.fingerprint(),
            workload: trace.workload.clone(),
            policy: name.to_owned(),
            budget_bytes: problem.budget_bytes,
            device: trace.device.clone(),
            tiers: problem.tiers,
            plan: decided.planned.plan.clone(),
        };
        file.save(path)?;
    }
    println!(
        "{} on {} at {} MiB over {}: peak {} MiB, makespan {} ms ({}), {} kept, {} swapped, {} recomputed, decided by {} in \
         {} ms",
        name,
        trace.workload,
        mib(problem.budget_bytes),
        described(&problem.tiers.host),
        mib(result.predicted.peak_bytes),
        milliseconds(result.predicted.makespan_ns),
        percent(result.predicted.overhead),
        result.actions.keep,
        result.actions.swap,
        result.actions.recompute,
        result.decided_by,
        milliseconds(result.decide_ns),
    );
    println!(
        "{} MiB of the keep-all peak of {} MiB are dead tails, held after their last use: no saving of the plan's",
        mib(result.dead_tail_bytes),
        mib(result.keep_all_peak_bytes),
    );
    if let Some(proof) = proof {
        println!("{}", proof.sentence(lineage.keep_all_makespan_ns()));
    }
    print_reserved(&result);
    let mut timeline = Timeline::new(&trace, &lineage, problem.tiers);
    explanation::print(&trace, &timeline.explain(&decided.planned.plan, problem.budget_bytes, LARGEST));
    Ok(())
}

/// What allocators reserve for the plan.
fn print_reserved(result: &PointResult) {
    let mut table = Table::new(["allocator", "reserves at most (MiB)", "fragmentation", "runs within the budget"]);
    for reserved in &result.allocators {
        table.row([
            reserved.allocator.to_owned(),
            mib(reserved.footprint.reserved_bytes),
            format!("{:.1}%", 100.0 * reserved.fragmentation),
            if reserved.within_budget { "yes" } else { "no" }.to_owned(),
        ]);
    }
    println!("\n{table}");
}

/// Who makes the plan.
enum Maker {
    /// The reference, which proves what it finds.
    Exact(Option<Duration>),
    /// torchtitan's rule, which has its programs solved.
    TwoLevels(Highs),
    /// A policy file or a baseline; search may be given how long it takes.
    Policy(Chosen, Option<Duration>),
}

impl Maker {
    fn parse(name: &str, limit: Option<Duration>) -> anyhow::Result<Self> {
        match (name, limit) {
            (EXACT, limit) => Ok(Maker::Exact(limit)),
            (name, Some(_)) if name != SEARCH => {
                bail!("--time-limit: only `{EXACT}` and `{SEARCH}` take as long as they are given")
            }
            (TWO_LEVEL, None) => Ok(Maker::TwoLevels(Highs::find()?)),
            (name, limit) => Ok(Maker::Policy(Chosen::parse(name)?, limit)),
        }
    }

    /// The plan, and what is proven of it.
    fn decide(&self, problem: Problem<'_>, planner: &Planner<'_>) -> anyhow::Result<(Decided, Option<Proof>)> {
        match self {
            Maker::Exact(limit) => decide_exactly(problem, *limit).map(|(decided, proof)| (decided, Some(proof))),
            Maker::TwoLevels(highs) => Ok((decide_at_two_levels(highs, problem)?, None)),
            Maker::Policy(_, Some(limit)) => Ok((decide_by_search(problem, *limit, planner.limits.seed)?, None)),
            Maker::Policy(policy, None) => {
                policy.warn_of_mismatch(&problem.trace.family, problem.actions);
                Ok((policy.plan(problem, planner), None))
            }
        }
    }

    /// Why there is no plan.
    fn refuse(&self, problem: Problem<'_>, planner: &Planner<'_>, proof: Option<Proof>) -> anyhow::Error {
        let budget = problem.budget_bytes;
        match self {
            Maker::Exact(_) if proof.is_some_and(|proof| proof.lower_bound_ns.is_none()) => {
                anyhow!("no plan of these actions holds a budget of {budget} bytes: proven")
            }
            Maker::Exact(_) => {
                anyhow!("{EXACT} found no plan that holds a budget of {budget} bytes, and no proof that there is none")
            }
            Maker::TwoLevels(_) => anyhow!("{TWO_LEVEL} found no plan that holds a budget of {budget} bytes"),
            Maker::Policy(policy, _) => {
                let found = policy.plan_or_refuse(problem, planner);
                found.err().unwrap_or_else(|| anyhow!("{} cannot hold a budget of {budget} bytes", policy.name()))
            }
        }
    }
}
