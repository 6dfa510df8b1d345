//! Batches of any length within a budget: bits, the budget, and time beside the loop left alone.

use std::num::NonZeroU32;
use std::time::Duration;

use plimsoll_env::workload::Manner;
use plimsoll_runtime::Link;
use plimsoll_runtime::torch::report::Course;
use serde::Serialize;
use tch::TchError;

use super::identity::Outcome;
use super::{Bed, Findings, Request};
use crate::loops::overheads;

/// Batches of an iteration, whose gradients add up; how many iterations every run has; and budgets, as shares of the most that the loop
/// takes left alone.
const LOOPS: [(NonZeroU32, usize, &[f64]); 2] =
    [(NonZeroU32::MIN, 60, &[0.8, 0.65]), (NonZeroU32::new(4).unwrap(), 30, &[0.65])];

#[derive(Serialize)]
struct UnderBudget {
    passes: NonZeroU32,
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

/// What the loop is left alone.
#[derive(Serialize)]
struct LeftAlone {
    passes: NonZeroU32,
    repeats: bool,
    peak_bytes: u64,
}

/// Runs the part.
pub fn run(bed: &Bed<'_>, request: &Request, findings: &mut Findings) -> anyhow::Result<()> {
    let link = bed.on.reckoned_link()?;
    LOOPS.into_iter().try_for_each(|one| run_one(one, bed, link, request, findings))
}

/// The same, of one of the loops.
fn run_one(
    (passes, iterations, shares): (NonZeroU32, usize, &[f64]),
    bed: &Bed<'_>,
    link: Link,
    request: &Request,
    findings: &mut Findings,
) -> anyhow::Result<()> {
    let manner = Manner { passes, ..bed.member.manner };
    let train = |watcher: &mut Watcher<'_>| train(bed, manner, iterations, watcher);
    // What a device sets up when it is first used is no part of what the loop takes.
    let first = train(&mut |iteration| iteration())?.outcome;
    bed.on.session.reset_peak();
    let alone = train(&mut |iteration| iteration())?;
    let keep_all_peak_bytes = bed.on.session.peak_bytes();
    let repeats = first == alone.outcome;
    findings.push("left_alone", LeftAlone { passes, repeats, peak_bytes: keep_all_peak_bytes })?;
    for &share in shares {
        if request.deadline.is_over() {
            return findings.cut_short();
        }
        let budget_bytes = (share * keep_all_peak_bytes as f64) as u64;
        let mut runtime = bed.runtime(budget_bytes, link)?;
        let within = train(&mut |iteration| {
            let _iteration = runtime.iteration();
            iteration()
        })?;
        let report = runtime.report();
        let (overhead, overhead_in_all) = overheads(&within.makespans_ns, &alone.makespans_ns);
        let count = |is: fn(Course) -> bool| report.latest.iter().filter(|iteration| is(iteration.course)).count();
        let found = UnderBudget {
            passes,
            share,
            budget_bytes,
            peak_bytes: report.peak_bytes,
            held: report.peak_bytes <= budget_bytes,
            identical: within.outcome == alone.outcome,
            known: count(Course::is_known),
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

/// What runs an iteration, and returns its loss.
type Watcher<'a> = dyn FnMut(&mut dyn FnMut() -> Result<f64, TchError>) -> Result<f64, TchError> + 'a;

/// Trains a fresh loop in that manner, whose iterations are run by `watcher`.
fn train(bed: &Bed<'_>, manner: Manner, iterations: usize, watcher: &mut Watcher<'_>) -> anyhow::Result<Run> {
    let mut workload = bed.workload_as(&bed.member.config, manner)?;
    let timed = (0..iterations).map(|_| bed.timed(|| Ok(watcher(&mut || workload.iteration())?)));
    let (losses, times): (Vec<f64>, Vec<Duration>) = timed.collect::<anyhow::Result<Vec<_>>>()?.into_iter().unzip();
    let outcome = Outcome::of(&losses, workload.as_ref())?;
    Ok(Run { outcome, makespans_ns: times.iter().map(|time| time.as_nanos() as u64).collect() })
}
