//! `plimsoll plan`.

use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use plimsoll_env::units::Budget;
use plimsoll_runtime::baselines::online::{Outcome, Program, Rule};
use plimsoll_runtime::trace::Class;
use plimsoll_runtime::{Action, ActionSet, Explanation, Lineage, PlanFile, Problem, Timeline, Trace};

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
    /// Run the baseline online, without a plan: dtr, dtr-eq, dtr-local, msps, lru or largest, recomputing alone
    #[arg(long, conflicts_with_all = ["out", "json", "link", "decodes", "actions"])]
    online: bool,
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
    if arguments.online {
        return run_online(&trace, &arguments.policy, arguments.budget.resolve(trace.peak_bytes));
    }
    let policy = Chosen::parse(&arguments.policy)?;
    policy.warn_of_mismatch(&trace.family, arguments.actions);
    let lineage = Lineage::of(&trace);
    let problem = Problem {
        trace: &trace,
        lineage: &lineage,
        tiers: arguments.link.resolve().into(),
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
    let mut timeline = Timeline::new(&trace, &lineage, problem.tiers);
    print_explanation(&trace, &timeline.explain(&decided.planned.plan, problem.budget_bytes, LARGEST));
    Ok(())
}

/// Storages that are named at the peak.
const LARGEST: usize = 5;

fn print_explanation(trace: &Trace, why: &Explanation) {
    let at = match (why.peak_operator, &why.peak_operator_name) {
        (Some(operator), Some(name)) => format!("operator {} ({name})", operator.0),
        _ => "the iteration's end".to_owned(),
    };
    let mut parts: Vec<String> =
        why.peak.classes.iter().map(|(class, bytes)| format!("{} {}", class_name(*class), mib(*bytes))).collect();
    let others = [
        ("copies beside", why.peak.beside_bytes),
        ("its own", why.peak.demand_bytes),
        ("unseen", why.peak.unseen_bytes),
    ];
    parts.extend(others.iter().filter(|(_, bytes)| *bytes > 0).map(|(what, bytes)| format!("{what} {}", mib(*bytes))));
    println!("peak at {at}, in MiB: {}", parts.join(", "));
    let largest = why.peak.largest.iter().map(|(storage, bytes)| {
        let class = class_name(trace.storages[storage.index()].class);
        format!("storage {} ({class}) {}", storage.0, mib(*bytes))
    });
    println!("largest there, in MiB: {}", largest.collect::<Vec<_>>().join(", "));
    let time = &why.time;
    println!(
        "time in ms: {} compute, {} gaps, {} waiting for data, {} waiting for memory, {} contention, {} recompute; \
         channels busy: offload {}, prefetch {}",
        milliseconds(time.compute_ns),
        milliseconds(time.gaps_ns),
        milliseconds(time.data_stall_ns),
        milliseconds(time.memory_stall_ns),
        milliseconds(time.contention_ns),
        milliseconds(time.recompute_ns),
        percent(why.offload_utilisation),
        percent(why.prefetch_utilisation),
    );
}

fn class_name(class: Class) -> &'static str {
    match class {
        Class::Parameter => "parameters",
        Class::Gradient => "gradients",
        Class::OptimizerState => "optimizer state",
        Class::Activation => "activations",
        Class::Input => "inputs",
        Class::Temporary => "temporaries",
    }
}

/// Runs a rule of online rematerialisation, and prints what it comes to.
fn run_online(trace: &Trace, policy: &str, budget_bytes: u64) -> anyhow::Result<()> {
    let Some(rule) = Rule::by_name(policy) else {
        bail!("--policy {policy}: online there are {}", Rule::ALL.map(Rule::name).join(", "));
    };
    let program = Program::of(trace);
    let run = program.run(rule, budget_bytes, program.compute_ns());
    match run.outcome {
        Outcome::Held => {}
        Outcome::OutOfMemory { needed_bytes } => bail!(
            "{policy} online cannot hold a budget of {budget_bytes} bytes: {needed_bytes} bytes were needed, and \
             nothing was left to evict"
        ),
        Outcome::Thrashed => bail!(
            "{policy} online cannot hold a budget of {budget_bytes} bytes: reruns took more time than the iteration \
             itself"
        ),
    }
    let keep_all_ns = run.makespan_ns - run.recompute_ns;
    println!(
        "{policy} online on {} at {} MiB: peak {} MiB, makespan {} ms ({}), {} evictions, {} ms of reruns",
        trace.workload,
        mib(budget_bytes),
        mib(run.peak_bytes),
        milliseconds(run.makespan_ns),
        percent(run.makespan_ns as f64 / keep_all_ns.max(1) as f64 - 1.0),
        run.evictions,
        milliseconds(run.recompute_ns),
    );
    Ok(())
}
