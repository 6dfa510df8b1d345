use super::lowest;
use crate::observation::{Candidate, Pressure};
use crate::plan::{Action, Plan};
use crate::policy::{Choice, Policy};
use crate::sweep::Problem;

/// Swaps by a weighted sum of three scores (Zhang et al., *Efficient Memory Management for GPU-based Deep Learning
/// Systems*, 2019, AutoSwap): duration of absence, DOA = gap − δ_out − δ_in; area of absence, AOA = bytes · DOA, or DOA /
/// bytes where DOA is negative; and DOA weighted by the load over the budget while it lasts, WDOA.
///
/// Deviations: it decides at pressure points; the weights are equal, each score being divided by the largest of the
/// candidates', where the paper tunes weights by Bayesian optimisation; the load is that of keep-all, so that WDOA does
/// not follow earlier choices (the paper's SWDOA).
#[derive(Default)]
pub struct AutoSwap {
    /// Per window: bytes over the budget while it lasts, times nanoseconds.
    weighted_absence: Vec<f64>,
}

impl AutoSwap {
    fn scores(&self, candidate: &Candidate) -> [f64; 3] {
        let absence_ns = candidate.gap_ns as f64 - candidate.transfer_ns as f64;
        let bytes = candidate.bytes as f64;
        let area = if absence_ns >= 0.0 { absence_ns * bytes } else { absence_ns / bytes };
        [absence_ns, area, self.weighted_absence[candidate.window.index()]]
    }
}

impl Policy for AutoSwap {
    fn open(&mut self, problem: &Problem<'_>) -> Plan {
        let lineage = problem.lineage;
        let operators = problem.trace.operators.len();
        let mut sum = 0.0;
        // Load over the budget before each operator index, running total.
        let before: Vec<f64> = std::iter::once(0.0)
            .chain((0..operators).map(|index| {
                let over_bytes = lineage.keep_all_bytes()[index].saturating_sub(problem.budget_bytes);
                sum += over_bytes as f64 * (lineage.start_ns(index + 1) - lineage.start_ns(index)) as f64;
                sum
            }))
            .collect();
        self.weighted_absence.clear();
        let windows = lineage.windows().iter();
        self.weighted_absence.extend(windows.map(|window| before[window.end as usize] - before[window.start as usize]));
        Plan::keep_all(lineage.windows().len())
    }

    fn decides_unopened(&self) -> bool {
        false
    }

    fn choose(&mut self, pressure: &Pressure<'_>) -> Option<Choice> {
        let mut largest = [f64::MIN_POSITIVE; 3];
        for candidate in pressure.candidates {
            for (largest, score) in largest.iter_mut().zip(self.scores(candidate)) {
                *largest = largest.max(score.abs());
            }
        }
        lowest(pressure, Action::Swap, |candidate| {
            -self.scores(candidate).iter().zip(largest).map(|(score, largest)| score / largest).sum::<f64>()
        })
    }
}
