//! The largest batch that trains within the same memory: left alone, and under a budget.

use anyhow::ensure;
use plimsoll_runtime::Link;
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
    /// Of the two; none while that cannot be told.
    ratio: Option<f64>,
}

/// Runs the part.
pub fn run(bed: &Bed<'_>, request: &Request, findings: &mut Findings) -> anyhow::Result<()> {
    if bed.is_cpu() {
        return findings.not_run("libtorch does not bound what a program takes of the CPU's memory");
    }
    let link = bed.on.reckoned_link()?;
    let own = bed.member.config.batch();
    bed.on.session.empty_device_cache()?;
    bed.on.session.reset_device_peak();
    train(bed, own, |workload| workload())?;
    let limit_bytes = (SHARE_LEFT * bed.on.session.device_counts().reserved_peak_bytes as f64) as u64;
    bed.limit_memory(limit_bytes)?;
    let budget = (BUDGET_SHARE * limit_bytes as f64) as u64;
    let mut largest = Largest { limit_bytes, plain: 0, under_a_budget: 0, ratio: None };
    let mut all_tried = true;
    for (how, budget) in [("plain", None), ("under a budget", Some((budget, link)))] {
        all_tried &= search(own, |batch| {
            if request.deadline.is_over() {
                return Ok(None);
            }
            let (samples_per_s, failure) = match attempt(bed, batch, budget) {
                Ok(samples_per_s) => (Some(samples_per_s), None),
                Err(error) => (None, format!("{error:#}").lines().next().map(str::to_owned)),
            };
            findings.push("attempts", Attempt { how, batch, failure, samples_per_s })?;
            if samples_per_s.is_some() {
                largest.trains(batch, budget.is_some());
                // As it goes: a step may be ended by force.
                findings.set("largest", &largest)?;
            }
            Ok(Some(samples_per_s.is_some()))
        })?;
    }
    findings.set("largest", largest)?;
    if all_tried { Ok(()) } else { findings.cut_short() }
}

impl Largest {
    /// Notes a batch that trains.
    fn trains(&mut self, batch: i64, under_a_budget: bool) {
        let most = if under_a_budget { &mut self.under_a_budget } else { &mut self.plain };
        *most = batch.max(*most);
        self.ratio = (self.plain > 0).then(|| self.under_a_budget as f64 / self.plain as f64);
    }
}

/// Trains the loop with that batch, left alone or within a budget.
fn attempt(bed: &Bed<'_>, batch: i64, budget: Option<(u64, Link)>) -> anyhow::Result<f64> {
    bed.on.session.empty_device_cache()?;
    let Some((bytes, link)) = budget else { return train(bed, batch, |iteration| iteration()) };
    let mut runtime = bed.runtime(bytes, link)?;
    let samples_per_s = train(bed, batch, |iteration| {
        let _iteration = runtime.iteration();
        iteration()
    })?;
    let peak_bytes = runtime.report().peak_bytes;
    ensure!(peak_bytes <= bytes, "a peak of {peak_bytes} bytes under a budget of {bytes}");
    Ok(samples_per_s)
}

/// Trains the loop with that batch, each iteration through `around`. Samples per second of the last one.
fn train(
    bed: &Bed<'_>,
    batch: i64,
    mut around: impl FnMut(&mut dyn FnMut() -> Result<f64, tch::TchError>) -> Result<f64, tch::TchError>,
) -> anyhow::Result<f64> {
    let mut workload = bed.workload_as(&bed.member.config.with_batch(batch), bed.member.manner)?;
    let mut last_s = f64::INFINITY;
    for _ in 0..ITERATIONS {
        last_s = bed.timed(|| Ok(around(&mut || workload.iteration())?))?.1.as_secs_f64();
    }
    Ok(batch as f64 / last_s)
}

/// Tries batches on the way to the largest that trains, from `own` on: doubled until one does not, then halved in between.
/// Whether the largest is among them: not where `trains` does not say, which ends the search.
fn search(own: i64, mut trains: impl FnMut(i64) -> anyhow::Result<Option<bool>>) -> anyhow::Result<bool> {
    let (mut most, mut too_many) = (0, own);
    loop {
        match trains(too_many)? {
            Some(true) if 2 * too_many > TIMES_MAX * own => return Ok(true),
            Some(true) => (most, too_many) = (too_many, 2 * too_many),
            Some(false) => break,
            None => return Ok(false),
        }
    }
    let grain = (own / GRAIN).max(1);
    while too_many - most > grain {
        let between = most + (too_many - most) / 2;
        match trains(between)? {
            Some(true) => most = between,
            Some(false) => too_many = between,
            None => return Ok(false),
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The largest batch found where so many fit, how many were tried, and whether all were that it takes. Time ends after
    /// `tries`.
    fn found(own: i64, fits: i64, tries: usize) -> (i64, usize, bool) {
        let (mut most, mut tried) = (0, 0);
        let all_tried = search(own, |batch| {
            assert!(batch <= TIMES_MAX * own, "{batch} is tried");
            if tried == tries {
                return Ok(None);
            }
            tried += 1;
            let trains = batch <= fits;
            if trains {
                most = most.max(batch);
            }
            Ok(Some(trains))
        });
        (most, tried, all_tried.unwrap())
    }

    #[test]
    fn the_largest_batch_is_found_to_the_grain() {
        for (own, fits) in [(8, 8), (8, 9), (8, 23), (8, 100), (8, 1000), (4, 3), (1, 5), (16, 0)] {
            let (most, tried, all_tried) = found(own, fits, usize::MAX);
            let grain = (own / GRAIN).max(1);
            let there = fits.min(TIMES_MAX * own);
            assert!(most <= there && there - most <= grain, "{own}, {fits}: {most}");
            assert!(tried < 12 && all_tried, "{own}, {fits}: {tried} tried");
        }
        assert_eq!(found(8, 20, 3), (16, 3, false), "8 and 16 train, 32 does not, and no time is left");
    }
}
