//! Rules that evict when bytes run out, on a recorded trace: what they come to, in the terminal.

use anyhow::bail;
use plimsoll_runtime::Trace;
use plimsoll_runtime::baselines::online::{Outcome, Program, Rule};

use crate::table::{mib, milliseconds, percent};

/// Runs a rule of online rematerialisation, and prints what it comes to.
pub fn run(trace: &Trace, policy: &str, budget_bytes: u64) -> anyhow::Result<()> {
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
