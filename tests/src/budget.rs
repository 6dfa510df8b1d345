//! Loops under a budget, as a production job runs them.

use std::path::Path;

use plimsoll_env::workload::Workload;
use plimsoll_runtime::torch::{Budget, IterationReport, Runtime, Session};

use crate::{Stage, fast_link, session};

/// A runtime of DTR's rule on a fast link.
pub fn runtime(budget_bytes: u64) -> Runtime {
    let builder = Runtime::builder().baseline("dtr").budget(Budget::bytes(budget_bytes));
    builder.link(fast_link()).build().unwrap()
}

/// What an untouched loop takes, and what it comes to.
pub struct Untouched {
    /// Highest peak of all iterations, counted at the allocator.
    pub peak_bytes: u64,
    /// Bytes that are there between iterations.
    pub resident_bytes: u64,
    /// Losses and variables after all of them.
    pub stage: Stage,
}

impl Untouched {
    /// Runs `iterations` of the loop with nothing in between.
    pub fn run<W: Workload>(make: impl Fn() -> W, iterate: impl Fn(&mut W, usize) -> f64, iterations: usize) -> Self {
        let session: Session = session();
        let mut workload = make();
        let (mut peak_bytes, mut losses) = (0, Vec::new());
        for iteration in 0..iterations {
            session.reset_peak();
            losses.push(iterate(&mut workload, iteration));
            peak_bytes = peak_bytes.max(session.peak_bytes());
        }
        Untouched { peak_bytes, resident_bytes: session.live_bytes(), stage: Stage::of(&losses, &workload) }
    }

    /// A budget between what has to be resident anyway and the peak.
    pub fn between(&self, share: f64) -> u64 {
        self.resident_bytes + (share * (self.peak_bytes - self.resident_bytes) as f64) as u64
    }
}

/// Runs `iterations` of the loop under `runtime`. Every peak is measured here, at the allocator, and not only reported.
pub fn run_under<W: Workload>(
    runtime: &mut Runtime,
    workload: &mut W,
    iterate: impl Fn(&mut W, usize) -> f64,
    iterations: usize,
) -> (Vec<f64>, Vec<IterationReport>) {
    let session = session();
    let (mut losses, mut reports) = (Vec::new(), Vec::new());
    for iteration in 0..iterations {
        {
            let _iteration = runtime.iteration();
            losses.push(iterate(workload, iteration));
        }
        let report = runtime.report().latest.last().expect("an iteration has just ended").clone();
        assert!(session.peak_bytes() <= report.peak_bytes.max(runtime.budget().as_bytes()), "iteration {iteration}");
        reports.push(report);
    }
    (losses, reports)
}

/// Asserts that no iteration exceeded the budget.
pub fn assert_held(reports: &[IterationReport], budget_bytes: u64, what: &str) {
    for (iteration, report) in reports.iter().enumerate() {
        assert!(
            report.peak_bytes <= budget_bytes,
            "{what}: iteration {iteration} took {} of {budget_bytes} bytes ({:?})",
            report.peak_bytes,
            report.course
        );
    }
}

/// Whether a folder holds nothing.
pub fn is_empty(folder: &Path) -> bool {
    std::fs::read_dir(folder).is_ok_and(|mut files| files.next().is_none())
}
