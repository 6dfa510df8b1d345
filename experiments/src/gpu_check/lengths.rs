//! Batches of any length within a budget: bits, the budget, and time beside the loop left alone.

use std::time::Duration;

use plimsoll_runtime::torch::report::Course;
use serde::Serialize;

use super::identity::Outcome;
use super::{Bed, Findings, Request};
use crate::loops::overheads;

/// Iterations of every run.
const ITERATIONS: usize = 60;
/// Budgets, as shares of the most that the loop takes left alone.
const SHARES: [f64; 2] = [0.8, 0.65];

#[derive(Serialize)]
struct UnderBudget {
    share: f64,
    budget_bytes: u64,
    peak_bytes: u64,
    held: bool,
    identical: bool,
    /// Iterations whose program was known.
    known: usize,
    /// Those of them that went by a plan.
    planned: usize,
    reactive_evictions: u64,
    plans: u64,
    planning_ns: u64,
    /// What an iteration of the last half takes beyond its like left alone, in the median, and what all take.
    overhead: f64,
    overhead_in_all: f64,
}

/// Runs the part.
pub fn run(bed: &Bed<'_>, request: &Request, findings: &mut Findings) -> anyhow::Result<()> {
    let link = bed.on.measured_link()?;
    // What a device sets up when it is first used is no part of what the loop takes.
    let first = train(bed, |iteration| iteration())?.outcome;
    bed.on.session.reset_peak();
    let alone = train(bed, |iteration| iteration())?;
    let keep_all_peak_bytes = bed.on.session.peak_bytes();
    let repeats = first == alone.outcome;
    findings.set("untouched_loop_repeats", repeats)?;
    findings.set("keep_all_peak_bytes", keep_all_peak_bytes)?;
    for share in SHARES {
        if request.deadline.is_over() {
            return findings.set("cut_short", true);
        }
        let budget_bytes = (share * keep_all_peak_bytes as f64) as u64;
        let mut runtime = bed.runtime(budget_bytes, link)?;
        let within = train(bed, |iteration| {
            let _iteration = runtime.iteration();
            iteration()
        })?;
        let report = runtime.report();
        let (overhead, overhead_in_all) = overheads(&within.makespans_ns, &alone.makespans_ns);
        let count = |is: fn(Course) -> bool| report.latest.iter().filter(|iteration| is(iteration.course)).count();
        let found = UnderBudget {
            share,
            budget_bytes,
            peak_bytes: report.peak_bytes,
            held: report.peak_bytes <= budget_bytes,
            identical: within.outcome == alone.outcome,
            known: count(|course| course != Course::Reactive),
            planned: count(|course| course == Course::Planned),
            reactive_evictions: report.reactive_evictions,
            plans: report.plans,
            planning_ns: report.planning_ns,
            overhead,
            overhead_in_all,
        };
        if !found.held {
            findings.fail(format!("within {budget_bytes} bytes: a peak of {}", found.peak_bytes))?;
        }
        // Where the loop itself does not repeat, no runtime could make it.
        if repeats && !found.identical {
            findings.fail(format!("within {budget_bytes} bytes: other bits than the untouched loop's"))?;
        }
        findings.push("under_budgets", found)?;
    }
    Ok(())
}

/// What a run came to, and what its iterations took.
struct Run {
    outcome: Outcome,
    makespans_ns: Vec<u64>,
}

/// Trains a fresh loop, whose iterations are run by `watcher`.
fn train(
    bed: &Bed<'_>,
    mut watcher: impl FnMut(&mut dyn FnMut() -> Result<f64, tch::TchError>) -> Result<f64, tch::TchError>,
) -> anyhow::Result<Run> {
    let mut workload = bed.workload()?;
    let timed = (0..ITERATIONS).map(|_| bed.timed(|| Ok(watcher(&mut || workload.iteration())?)));
    let (losses, times): (Vec<f64>, Vec<Duration>) = timed.collect::<anyhow::Result<Vec<_>>>()?.into_iter().unzip();
    let outcome = Outcome::of(&losses, workload.as_ref())?;
    Ok(Run { outcome, makespans_ns: times.iter().map(|time| time.as_nanos() as u64).collect() })
}
