//! A loop that really runs out of its device's memory, and finishes under a budget.

use serde::Serialize;

use super::{BUDGET_SHARE, Bed, Findings};

/// Iterations of every run.
const ITERATIONS: usize = 5;
/// Of what the loop reserves untouched, it is left so much.
const SHARE_LEFT: f64 = 0.75;

#[derive(Serialize)]
struct UnderBudget {
    limit_bytes: u64,
    budget_bytes: u64,
    peak_bytes: u64,
    reserved_peak_bytes: u64,
    refused_at_first: u64,
    iterations: usize,
    losses_identical: bool,
}

/// Runs the part.
pub fn run(bed: &Bed<'_>, findings: &mut Findings) -> anyhow::Result<()> {
    if bed.is_cpu() {
        return findings.not_run("libtorch does not bound what a program takes of the CPU's memory");
    }
    let link = bed.on.reckoned_link()?;
    let untouched = losses(bed)?;
    let reserved_bytes = bed.on.session.device_counts().reserved_peak_bytes;
    findings.set("untouched_reserved_bytes", reserved_bytes)?;
    // Where the loop itself does not repeat, no runtime could make it.
    let repeats = losses(bed)? == untouched;
    findings.set("untouched_loop_repeats", repeats)?;
    bed.on.session.empty_device_cache()?;
    let limit_bytes = (SHARE_LEFT * reserved_bytes as f64) as u64;
    bed.limit_memory(limit_bytes)?;
    let plain = losses(bed);
    findings.set(
        "plain_loop_within_the_limit",
        match &plain {
            Ok(_) => "fits: the limit is too generous to show anything".to_owned(),
            Err(error) => format!("{error:#}").lines().next().unwrap_or_default().to_owned(),
        },
    )?;
    bed.on.session.empty_device_cache()?;
    bed.on.session.reset_device_peak();
    let budget_bytes = (BUDGET_SHARE * limit_bytes as f64) as u64;
    let mut runtime = bed.runtime(budget_bytes, link)?;
    let mut workload = bed.workload()?;
    let mut found = Vec::new();
    for _ in 0..ITERATIONS {
        let _iteration = runtime.iteration();
        found.push(workload.iteration()?.to_bits());
    }
    let counts = bed.on.session.device_counts();
    let peak_bytes = runtime.report().peak_bytes;
    let losses_identical = found == untouched;
    findings.set(
        "under_budget",
        UnderBudget {
            limit_bytes,
            budget_bytes,
            peak_bytes,
            reserved_peak_bytes: counts.reserved_peak_bytes,
            refused_at_first: counts.retried,
            iterations: found.len(),
            losses_identical,
        },
    )?;
    if plain.is_ok() {
        findings.fail(format!("the plain loop fits within {limit_bytes} bytes"))?;
    }
    if peak_bytes > budget_bytes {
        findings.fail(format!("under a budget of {budget_bytes} bytes: a peak of {peak_bytes}"))?;
    }
    if repeats && !losses_identical {
        findings.fail("under a budget: other losses than the untouched loop's".to_owned())?;
    }
    Ok(())
}

/// The bits of the untouched loop's losses.
fn losses(bed: &Bed<'_>) -> anyhow::Result<Vec<u64>> {
    let mut workload = bed.workload()?;
    Ok((0..ITERATIONS).map(|_| Ok(workload.iteration()?.to_bits())).collect::<Result<_, tch::TchError>>()?)
}
