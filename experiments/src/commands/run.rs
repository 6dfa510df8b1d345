//! `plimsoll run`.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use plimsoll_env::Instance;
use plimsoll_env::config::FamilyConfig;
use plimsoll_env::real::run_plan;
use plimsoll_runtime::Lineage;
use plimsoll_runtime::file::require_writable;
use plimsoll_runtime::units::Budget;

use crate::chosen::{ActionsFlag, Chosen, PlannerFlags};
use crate::link::LinkFlag;
use crate::loops::{LoopFlags, RECORDED_ITERATIONS, RecordedLoop, Untouched};
use crate::outputs::write_json;
use crate::results::PointResult;
use crate::table::{mib, milliseconds, percent};
use crate::tiers::TierFlags;

/// Flags.
#[derive(Args)]
pub struct Arguments {
    /// Configuration of the model family
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Name of the workload in the configuration
    #[arg(long, value_name = "NAME")]
    workload: String,
    /// A policy file, or the name of a baseline
    #[arg(long, value_name = "FILE|BASELINE")]
    policy: String,
    /// Device bytes, such as 512MiB, or a share of the keep-all peak, such as 60%
    #[arg(long, value_name = "BUDGET")]
    budget: Budget,
    /// Iterations under the budget, after those that record the loop
    #[arg(long, value_name = "N")]
    iterations: NonZeroUsize,
    #[command(flatten)]
    allowed: ActionsFlag,
    #[command(flatten)]
    planner: PlannerFlags,
    /// Put each planned iteration between two untouched ones, to compare makespans on a noisy machine
    #[arg(long)]
    interleave: bool,
    /// Run the untouched loop as well, and compare losses and final parameters bit for bit
    #[arg(long)]
    verify: bool,
    #[command(flatten)]
    link: LinkFlag,
    #[command(flatten)]
    tiers: TierFlags,
    #[command(flatten)]
    flags: LoopFlags,
    /// Where to write the result as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> anyhow::Result<()> {
    let config = FamilyConfig::load(&arguments.config)?;
    let policy = Chosen::parse(&arguments.policy)?;
    config.workload(&arguments.workload)?;
    arguments.json.as_deref().map_or(Ok(()), require_writable)?;
    let emulated = arguments.link.is_emulated();
    let tiers = arguments.tiers.clone().or(config.evaluation.host_limit, config.evaluation.spill.as_ref());
    let tiers = tiers.open_on(arguments.flags.device, || arguments.link.resolve(), emulated)?;
    policy.warn_of_mismatch(&config.family.to_string(), arguments.allowed.actions);
    let mut open = RecordedLoop::open(&config, &arguments.workload, &arguments.flags, RECORDED_ITERATIONS)?;
    let tiers = open.on.tiers(tiers)?;
    let instance = Instance {
        lineage: Arc::new(Lineage::of(&open.trace)),
        tiers: tiers.tiers,
        budget_bytes: arguments.budget.resolve(open.trace.peak_bytes),
        actions: arguments.allowed.actions,
        trace: Arc::new(open.trace.clone()),
    };
    let problem = instance.problem();
    let decided = policy.plan_or_refuse(problem, &arguments.planner.planner())?;
    let mut result = PointResult::planned(policy.name(), &problem, emulated, &decided);
    let plan = &decided.planned.plan;
    let engine = open.on.engine(&tiers)?;
    let measured = run_plan(
        open.on.session,
        open.workload.as_mut(),
        &problem,
        plan,
        engine,
        arguments.iterations.get(),
        arguments.interleave,
    )?;
    result.measure(&problem, plan, &measured);
    result.losses = [open.losses, measured.losses].concat();
    if arguments.verify {
        let untouched = Untouched::run(&config, &arguments.workload, &arguments.flags, result.losses.len())?;
        let identical =
            untouched.has_losses(0, &result.losses) && untouched.has_variables_of(open.workload.as_ref())?;
        result.identical = Some(identical);
    }
    if let Some(path) = &arguments.json {
        write_json(path, &result)?;
    }
    let (cost, predicted) = (result.measured.expect("measured above"), result.predicted);
    println!(
        "{} on {} at {} MiB{}: peak {} MiB ({}), makespan {} ms ({}){}",
        policy.name(),
        arguments.workload,
        mib(result.budget_bytes),
        if emulated { ", emulated link" } else { "" },
        mib(cost.peak_bytes),
        if result.held == Some(true) { "budget held" } else { "OVER BUDGET" },
        milliseconds(cost.makespan_ns),
        if arguments.interleave {
            format!("{} beside untouched iterations, predicted {}", percent(cost.overhead), percent(predicted.overhead))
        } else {
            let [recorded, predicted] = [open.trace.makespan_ns, predicted.makespan_ns].map(milliseconds);
            format!("{recorded} when it was recorded, predicted {predicted}")
        },
        match result.identical {
            None => "",
            Some(true) => ", bit-identical to the untouched loop",
            Some(false) => ", NOT identical to the untouched loop",
        },
    );
    anyhow::ensure!(result.held == Some(true), "the measured peak of {} bytes exceeds the budget", cost.peak_bytes);
    anyhow::ensure!(result.identical != Some(false), "losses or parameters differ from those of the untouched loop");
    Ok(())
}
