//! The largest batch that trains within the same memory: left alone, and under a budget.

use std::time::Instant;

use serde::Serialize;

use super::{BUDGET_SHARE, Bed, Findings, Request};

/// Iterations that a batch has to train for. The last ones are carried out by plan.
const ITERATIONS: usize = 6;
/// Of what the loop reserves with its own batch, it is left so much.
const SHARE_LEFT: f64 = 1.1;
/// Batches are told apart by this part of the loop's own.
const GRAIN: i64 = 4;
/// No batch of more than so many times the loop's own is tried.
const TIMES_MAX: i64 = 16;

/// A batch that was tried.
#[derive(Serialize)]
struct Attempt {
    how: &'static str,
    batch: i64,
    /// Why it does not train, where it does not.
    failure: Option<String>,
    /// In the last iteration.
    samples_per_s: Option<f64>,
}

#[derive(Serialize)]
struct Largest {
    limit_bytes: u64,
    plain: i64,
    under_a_budget: i64,
    ratio: f64,
}

/// Runs the part.
pub fn run(bed: &Bed<'_>, request: &Request, findings: &mut Findings) -> anyhow::Result<()> {
    if bed.is_cpu() {
        return findings.set("not_run", "libtorch does not bound what a program takes of the CPU's memory");
    }
    let link = bed.on.measured_link()?;
    let own = bed.member.config.batch();
    bed.on.session.empty_device_cache()?;
    bed.on.session.reset_device_peak();
    train(bed, own, |workload| workload())?;
    let limit_bytes = (SHARE_LEFT * bed.on.session.device_counts().reserved_peak_bytes as f64) as u64;
    bed.limit_memory(limit_bytes)?;
    let mut largest = |how: &'static str| -> anyhow::Result<i64> {
        let mut tried = Ok(());
        let found = largest_batch(own, |batch| {
            let trained = bed.on.session.empty_device_cache().map_err(anyhow::Error::from).and_then(|()| match how {
                "plain" => train(bed, batch, |iteration| iteration()),
                _ => {
                    let mut runtime = bed.runtime((BUDGET_SHARE * limit_bytes as f64) as u64, link)?;
                    train(bed, batch, |iteration| {
                        let _iteration = runtime.iteration();
                        iteration()
                    })
                }
            });
            let (samples_per_s, failure) = match trained {
                Ok(samples_per_s) => (Some(samples_per_s), None),
                Err(error) => (None, format!("{error:#}").lines().next().map(str::to_owned)),
            };
            let trains = samples_per_s.is_some();
            let written = findings.push("attempts", Attempt { how, batch, failure, samples_per_s });
            if tried.is_ok() {
                tried = written;
            }
            trains && !request.deadline.is_over()
        });
        tried.map(|()| found)
    };
    let (plain, under_a_budget) = (largest("plain")?, largest("under a budget")?);
    let ratio = under_a_budget as f64 / plain as f64;
    findings.set("largest", Largest { limit_bytes, plain, under_a_budget, ratio })
}

/// Trains the loop with that batch, each iteration through `around`. Samples per second of the last one.
fn train(
    bed: &Bed<'_>,
    batch: i64,
    mut around: impl FnMut(&mut dyn FnMut() -> Result<f64, tch::TchError>) -> Result<f64, tch::TchError>,
) -> anyhow::Result<f64> {
    let mut workload = bed.workload_of(&bed.member.config.with_batch(batch))?;
    let mut last_s = f64::INFINITY;
    for _ in 0..ITERATIONS {
        let started = Instant::now();
        around(&mut || workload.iteration())?;
        bed.on.engines.settle();
        last_s = started.elapsed().as_secs_f64();
    }
    Ok(batch as f64 / last_s)
}

/// The largest batch that `trains`, from `own` on: doubled until one does not, then halved in between. Zero where none does.
fn largest_batch(own: i64, mut trains: impl FnMut(i64) -> bool) -> i64 {
    let (mut most, mut too_many) = (0, own);
    while too_many <= TIMES_MAX * own && trains(too_many) {
        (most, too_many) = (too_many, 2 * too_many);
    }
    let grain = (own / GRAIN).max(1);
    while too_many - most > grain {
        let between = most + (too_many - most) / 2;
        if trains(between) {
            most = between;
        } else {
            too_many = between;
        }
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_batch_is_found_to_the_grain() {
        for (own, fits) in [(8, 8), (8, 9), (8, 23), (8, 100), (8, 1000), (4, 3), (1, 5), (16, 0)] {
            let mut tried = 0;
            let found = largest_batch(own, |batch| {
                tried += 1;
                batch <= fits
            });
            let grain = (own / GRAIN).max(1);
            assert!(found <= fits && fits.min(TIMES_MAX * own) - found <= grain, "{own}, {fits}: {found}");
            assert!(tried < 12, "{own}, {fits}: {tried} tried");
        }
    }
}
