//! `plimsoll plan`.

use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use plimsoll_env::units::Budget;
use plimsoll_runtime::{Action, ActionSet, Lineage, PlanFile, Problem, Trace};

use crate::chosen::{Chosen, DECODES};
use crate::loops::LinkFlag;
use crate::results::{PointResult, write_json};
use crate::table::{Table, mib, milliseconds, percent};

/// Flags.
#[derive(Args)]
pub struct Arguments {
    /// A recorded trace
    #[arg(long, value_name = "FILE")]
    trace: PathBuf,
    /// A policy file, or the name of a baseline
    #[arg(long, value_name = "FILE|BASELINE")]
    policy: String,
    /// Device bytes, such as 512MiB, or a share of the keep-all peak, such as 60%
    #[arg(long, value_name = "BUDGET")]
    budget: Budget,
    /// Actions that the plan may take
    #[arg(long, value_name = "LIST", default_value = "keep,swap,recompute", value_parser = parse_actions)]
    actions: ActionSet,
    #[command(flatten)]
    link: LinkFlag,
    /// Sampled decodes of a learned policy beside the greedy one
    #[arg(long, default_value_t = DECODES, value_name = "N")]
    decodes: u64,
    /// Where to write the plan
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Where to write the result as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Reads a list such as `keep,swap`.
pub fn parse_actions(text: &str) -> Result<ActionSet, String> {
    let mut actions = ActionSet { swap: false, recompute: false };
    for word in text.split(',') {
        match word.trim() {
            "keep" => {}
            "swap" => actions.swap = true,
            "recompute" => actions.recompute = true,
            other => return Err(format!("unknown action `{other}`: expected keep, swap or recompute")),
        }
    }
    debug_assert!(actions.allows(Action::Keep));
    Ok(actions)
}

/// Runs the command.
pub fn run(arguments: Arguments) -> anyhow::Result<()> {
    let trace = Trace::load(&arguments.trace)?;
    let policy = Chosen::parse(&arguments.policy)?;
    policy.warn_of_mismatch(&trace.family, arguments.actions);
    let lineage = Lineage::of(&trace);
    let problem = Problem {
        trace: &trace,
        lineage: &lineage,
        link: arguments.link.resolve(),
        budget_bytes: arguments.budget.resolve(trace.peak_bytes),
        actions: arguments.actions,
    };
    let decided = policy.plan(problem, arguments.decodes);
    let result = PointResult::planned(policy.name(), &problem, arguments.link.is_emulated(), &decided);
    if let Some(path) = &arguments.json {
        write_json(path, &result)?;
    }
    if !result.feasible {
        policy.plan_or_refuse(problem, arguments.decodes)?;
        bail!("{} cannot hold a budget of {} bytes", policy.name(), problem.budget_bytes);
    }
    if let Some(path) = &arguments.out {
        let file = PlanFile {
            fingerprint: trace.fingerprint(),
            workload: trace.workload.clone(),
            policy: policy.name().to_owned(),
            budget_bytes: problem.budget_bytes,
            plan: decided.planned.plan.clone(),
        };
        file.save(path)?;
    }
    println!(
        "{} on {} at {} MiB: peak {} MiB, makespan {} ms ({}), {} kept, {} swapped, {} recomputed, decided by {} in {} ms",
        policy.name(),
        trace.workload,
        mib(problem.budget_bytes),
        mib(result.predicted.peak_bytes),
        milliseconds(result.predicted.makespan_ns),
        percent(result.predicted.overhead),
        result.actions.keep,
        result.actions.swap,
        result.actions.recompute,
        result.decided_by,
        milliseconds(result.decide_ns),
    );
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
    Ok(())
}
