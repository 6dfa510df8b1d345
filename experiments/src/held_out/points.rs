//! The points to judge at: members, budgets and links, and which of them say something.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use plimsoll_env::Instance;
use plimsoll_env::predicted::TRIVIAL_OVERHEAD;
use plimsoll_runtime::baselines::{BASELINES, baseline};
use plimsoll_runtime::{ActionSet, Lineage, Link, Planned, Trace, least_feasible_budget};
use rayon::prelude::*;
use serde::Serialize;

use super::processor::timed;
use crate::chosen::Chosen;

/// Budgets as shares of the keep-all peak.
const RATIOS: [f64; 7] = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3];
/// Budgets of at most this many times the least feasible one are reported apart: what little room is left decides there.
const NEAR_LEAST: f64 = 1.1;
/// Baselines that fit into little.
const FRUGAL: [&str; 6] = ["dtr", "dtr-eq", "lru", "capuchin", "dtr-swap", "cheapest"];

/// One budget for one member over one link.
#[derive(Clone, Debug)]
pub struct Point {
    /// The planning problem.
    pub instance: Instance,
    /// The budget as a share of the keep-all peak.
    pub ratio: f64,
    /// Whether hardly any plan holds the budget.
    pub near_least: bool,
}

/// Why points say nothing, and how many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Skipped {
    /// Nothing has to be evicted.
    pub keep_all_fits: usize,
    /// Some baseline evicts at next to no overhead.
    pub free: usize,
    /// No baseline and no policy holds the budget.
    pub infeasible: usize,
    /// There are more than were asked for.
    pub beyond_points_max: usize,
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Skipped { keep_all_fits, free, infeasible, beyond_points_max } = self;
        write!(
            f,
            "at {keep_all_fits} nothing has to be evicted, at {free} some baseline evicts for nothing, at {infeasible} nothing \
             holds the budget, and {beyond_points_max} are more than were asked for"
        )
    }
}

/// The points of `traces`, in order, and how many more there are where nothing has to be evicted or not enough can be.
///
/// Every budget is met over each of `links`, of which there is one at least, and by recomputing alone. `learned` policies
/// help to find the least feasible budget.
pub fn grid(traces: &[Arc<Trace>], links: &[Link], recompute_only: bool, learned: &[&Chosen]) -> (Vec<Point>, Skipped) {
    let of_trace = |trace: &Arc<Trace>| {
        let lineage = Arc::new(Lineage::of(trace));
        let swapping = links.iter().map(|&link| (link, ActionSet::ALL)).filter(|_| !recompute_only).collect();
        let recomputing = vec![(links[0], ActionSet::RECOMPUTE)];
        let mut points = Vec::new();
        for settings in [swapping, recomputing].iter().filter(|settings| !settings.is_empty()) {
            let instance = |(link, actions): (Link, _), budget_bytes| Instance {
                trace: trace.clone(),
                lineage: lineage.clone(),
                tiers: link.into(),
                budget_bytes,
                actions,
            };
            let least_bytes = least_feasible(&instance(settings[0], 0), learned);
            for &setting in settings {
                points.extend(RATIOS.map(|ratio| {
                    let budget_bytes = (ratio * lineage.keep_all_peak_bytes() as f64) as u64;
                    let near_least = (budget_bytes as f64) < NEAR_LEAST * least_bytes as f64;
                    Point { instance: instance(setting, budget_bytes), ratio, near_least }
                }));
            }
        }
        points
    };
    let all: Vec<Point> = traces.par_iter().flat_map_iter(of_trace).collect();
    let (possible, hopeless): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|point| !point.instance.problem().is_hopeless());
    let (pressed, fitting): (Vec<_>, Vec<_>) =
        possible.into_iter().partition(|point| point.instance.asks_for_a_decision());
    (pressed, Skipped { keep_all_fits: fitting.len(), infeasible: hopeless.len(), ..Skipped::default() })
}

/// The least budget that a frugal baseline or a learned policy holds.
fn least_feasible(instance: &Instance, learned: &[&Chosen]) -> u64 {
    let mut policies: Vec<_> = FRUGAL.iter().filter_map(|name| baseline(name, 0)).collect();
    policies.extend(learned.iter().map(|policy| policy.policy()));
    least_feasible_budget(instance.problem(), &mut policies)
}

impl Point {
    /// Whether nothing may be swapped.
    pub fn is_recompute_only(&self) -> bool {
        !self.instance.actions.swap
    }
}

/// A point with what every baseline makes of it.
pub struct Field {
    /// The point.
    pub point: Point,
    /// The plans with the processor time that they took, by name, in the order of [`BASELINES`].
    pub plans: Vec<(&'static str, Planned, Duration)>,
}

impl Field {
    /// Lets every baseline plan; none where some baseline evicts at next to no overhead, so that nothing is to be gained.
    pub fn judge(point: Point) -> Option<Self> {
        let plan = |name: &&'static str| {
            let (planned, time) = timed(|| point.instance.plan_with(name));
            planned.map(|planned| (*name, planned, time))
        };
        let plans: Vec<_> = BASELINES.iter().filter_map(plan).collect();
        let field = Field { point, plans };
        let overhead = |(_, best, _): (_, &Planned, _)| field.point.instance.overhead(&best.prediction);
        let is_free = field.best().map(overhead).is_some_and(|overhead| overhead <= TRIVIAL_OVERHEAD);
        (!is_free).then_some(field)
    }

    /// The fastest plan that holds the budget, and whose it is; the first of equals.
    pub fn best(&self) -> Option<(&'static str, &Planned, Duration)> {
        let fitting = self.plans.iter().filter(|(_, planned, _)| planned.fits());
        let best = fitting.min_by_key(|(_, planned, _)| planned.prediction.makespan_ns);
        best.map(|(name, planned, time)| (*name, planned, *time))
    }
}

/// At most `most` of `all`, spread evenly. Points come in cycles, over budgets and links: where just every n-th were taken, which
/// might all have the same budget, it is another place of the n each time.
pub fn spread_evenly<T>(all: Vec<T>, most: usize) -> Vec<T> {
    let (found, kept) = (all.len(), most.min(all.len()));
    let place = |next: usize| next * found / kept + if found.is_multiple_of(kept) { next % (found / kept) } else { 0 };
    let mut next = 0;
    let mut take = |index: usize| {
        let wanted = next < kept && index == place(next);
        next += usize::from(wanted);
        wanted
    };
    all.into_iter().enumerate().filter(|(index, _)| take(*index)).map(|(_, item)| item).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_has_the_size_that_was_asked_for_and_reaches_over_all() {
        assert_eq!(spread_evenly((0..10).collect(), 4), [0, 2, 5, 7]);
        assert_eq!(spread_evenly((0..3).collect(), 4), [0, 1, 2]);
        assert_eq!(spread_evenly((0..12).collect(), 4), [0, 4, 8, 9], "every third of the cycle");
        assert_eq!(spread_evenly((0..5).collect(), 0), Vec::<i32>::new());
    }
}
