//! The table: what each way of planning came to over all points of a group.

use serde::Serialize;

use super::contest::{BEST_BASELINE, Outcome, PointReport};
use crate::table::Table;

/// Points that are summed up together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Group {
    /// Points with a link.
    Links,
    /// Points where nothing may be swapped.
    RecomputeOnly,
    /// All of these.
    All,
    /// Points where hardly any plan holds the budget. No other group has them.
    NearLeast,
}

impl Group {
    /// In the order of the table.
    pub(super) const ORDER: [Group; 4] = [Group::Links, Group::RecomputeOnly, Group::All, Group::NearLeast];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Group::Links => "links",
            Group::RecomputeOnly => "recompute only",
            Group::All => "all",
            Group::NearLeast => "near the least budget",
        }
    }

    /// The name in a policy's file.
    pub const fn key(self) -> &'static str {
        match self {
            Group::Links => "links",
            Group::RecomputeOnly => "recompute_only",
            Group::All => "all",
            Group::NearLeast => "near_least",
        }
    }

    pub(super) fn holds(self, point: &PointReport) -> bool {
        match self {
            Group::NearLeast => point.near_least,
            _ if point.near_least => false,
            Group::Links => !point.is_recompute_only(),
            Group::RecomputeOnly => point.is_recompute_only(),
            Group::All => true,
        }
    }
}

/// What one way of planning came to over a group.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// The group.
    pub group: Group,
    /// The way of planning.
    pub name: String,
    /// Points.
    pub points: usize,
    /// Points whose budget it holds. Means of makespans and overheads are over these.
    pub held: usize,
    /// Mean of makespan ÷ reference − 1.
    pub excess_mean: Option<f64>,
    /// The largest of them.
    pub excess_max: Option<f64>,
    /// Mean overhead.
    pub overhead_mean: Option<f64>,
    /// 1 − mean overhead ÷ mean overhead of the best baseline of each point, where both hold the budget.
    pub below_best_baseline: Option<f64>,
    /// Points where some baseline is better, as a share.
    pub baseline_is_better: f64,
    /// Mean processor time of deciding.
    pub decide_ns_mean: f64,
    /// The same per window.
    pub decide_ns_per_window: f64,
}

impl Summary {
    /// Sums up every way of planning over every group that has points.
    pub fn of(points: &[PointReport]) -> Vec<Self> {
        let mut names: Vec<&String> = points.iter().flat_map(|point| point.outcomes.keys()).collect();
        names.sort_unstable();
        names.dedup();
        let over = |group: Group| {
            let members: Vec<&PointReport> = points.iter().filter(|point| group.holds(point)).collect();
            let some = !members.is_empty();
            names
                .iter()
                .filter(move |_| some)
                .map(move |name| Self::of_group(group, name, &members))
                .collect::<Vec<_>>()
        };
        Group::ORDER.into_iter().flat_map(over).collect()
    }

    fn of_group(group: Group, name: &str, points: &[&PointReport]) -> Self {
        let outcomes: Vec<(&PointReport, &Outcome)> =
            points.iter().filter_map(|point| Some((*point, point.outcomes.get(name)?))).collect();
        let held: Vec<(&PointReport, u64)> =
            outcomes.iter().filter_map(|(point, outcome)| Some((*point, outcome.makespan_ns?))).collect();
        let excess = |&(point, makespan_ns): &(&PointReport, u64)| point.excess(makespan_ns);
        let beside: Vec<(f64, f64)> = held
            .iter()
            .filter_map(|&(point, ns)| Some((point.overhead(ns), point.overhead(point.best_baseline_ns()?))))
            .collect();
        let [own, baseline] =
            [mean(beside.iter().map(|&(own, _)| own)), mean(beside.iter().map(|&(_, baseline)| baseline))];
        let decide_ns: f64 = outcomes.iter().map(|(_, outcome)| outcome.decide_ns as f64).sum();
        let windows: usize = outcomes.iter().map(|(point, _)| point.windows).sum();
        Summary {
            group,
            name: name.to_owned(),
            points: points.len(),
            held: held.len(),
            excess_mean: mean(held.iter().map(excess)),
            excess_max: held.iter().map(excess).max_by(f64::total_cmp),
            overhead_mean: mean(held.iter().map(|&(point, makespan_ns)| point.overhead(makespan_ns))),
            below_best_baseline: own.zip(baseline).map(|(own, baseline)| 1.0 - own / baseline),
            baseline_is_better: share_with_better_baseline(points, name),
            decide_ns_mean: decide_ns / outcomes.len().max(1) as f64,
            decide_ns_per_window: decide_ns / windows.max(1) as f64,
        }
    }
}

/// The share of points where some baseline holds the budget and `name` does not, or takes longer.
fn share_with_better_baseline(points: &[&PointReport], name: &str) -> f64 {
    let worse = |point: &&&PointReport| {
        let own_ns = point.outcomes.get(name).and_then(|outcome| outcome.makespan_ns);
        point.best_baseline_ns().is_some_and(|baseline_ns| own_ns.is_none_or(|own_ns| baseline_ns < own_ns))
    };
    points.iter().filter(worse).count() as f64 / points.len().max(1) as f64
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (mut sum, mut count) = (0.0, 0usize);
    for value in values {
        sum += value;
        count += 1;
    }
    (count > 0).then(|| sum / count as f64)
}

/// Prints the table, and how often each baseline is the best.
pub fn print(summaries: &[Summary], points: &[PointReport]) {
    for group in Group::ORDER {
        let rows: Vec<&Summary> = summaries.iter().filter(|row| row.group == group).collect();
        let Some(first) = rows.first() else { continue };
        println!("\n{}: {} points", group.name(), first.points);
        print!("{}", table(&rows));
    }
    println!("\nbest baselines: {}", best_baselines(points));
}

fn table(rows: &[&Summary]) -> Table {
    let mut table = Table::new([
        "by",
        "held",
        "over reference",
        "at most",
        "overhead",
        "below best baseline",
        "baseline better",
        "decided in (ms)",
        "per window (µs)",
    ]);
    let share = |share: Option<f64>| share.map_or_else(|| "–".to_owned(), |share| format!("{:.2}%", 100.0 * share));
    for row in rows {
        table.row([
            row.name.clone(),
            row.held.to_string(),
            share(row.excess_mean),
            share(row.excess_max),
            share(row.overhead_mean),
            share(row.below_best_baseline),
            share(Some(row.baseline_is_better)),
            format!("{:.1}", row.decide_ns_mean / 1e6),
            format!("{:.2}", row.decide_ns_per_window / 1e3),
        ]);
    }
    table
}

/// How many points each baseline is the best at, the most first.
fn best_baselines(points: &[PointReport]) -> String {
    let mut wins = std::collections::BTreeMap::<&str, usize>::new();
    for best in points.iter().filter_map(|point| point.outcomes.get(BEST_BASELINE)) {
        *wins.entry(&best.by).or_default() += 1;
    }
    let mut wins: Vec<_> = wins.into_iter().collect();
    wins.sort_by_key(|&(_, wins)| std::cmp::Reverse(wins));
    wins.into_iter().map(|(name, wins)| format!("{name} {wins}")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::contest::Reference;
    use super::*;

    /// A point with keep-all makespan 100, reference 110, a baseline at 120, and ways `a` and `b`.
    fn point(near_least: bool, link: bool, a: Option<u64>, baseline: Option<u64>) -> PointReport {
        let outcome = |makespan_ns| Outcome { makespan_ns, by: "a".into(), decide_ns: 4_000 };
        PointReport {
            workload: "w".into(),
            family: "f".into(),
            device: "d".into(),
            fingerprint: "0".into(),
            operators: 1,
            windows: 4,
            link_bytes_per_s: link.then_some(1.0),
            ratio: 0.5,
            budget_bytes: 1,
            near_least,
            keep_all_makespan_ns: 100,
            reference: Reference { makespan_ns: 110, by: "long search".into() },
            baselines: [("dtr".to_owned(), baseline), ("lru".to_owned(), None)].into(),
            outcomes: BTreeMap::from([("a".to_owned(), outcome(a))]),
        }
    }

    #[test]
    fn a_group_is_summed_up_over_the_points_that_are_held() {
        let points = [
            point(false, true, Some(110), Some(120)),
            point(false, true, Some(132), Some(120)),
            point(false, true, None, Some(120)),
            point(false, true, Some(110), None),
            point(true, true, Some(1100), Some(120)),
            point(false, false, Some(110), Some(120)),
        ];
        let summaries = Summary::of(&points);
        let find = |group| summaries.iter().find(|row| row.group == group && row.name == "a").unwrap();
        let links = find(Group::Links);
        assert_eq!((links.points, links.held), (4, 3));
        assert!((links.excess_mean.unwrap() - 0.2 / 3.0).abs() < 1e-12);
        assert!((links.excess_max.unwrap() - 0.2).abs() < 1e-12);
        // Overheads .1 and .32 beside .2 and .2.
        assert!((links.below_best_baseline.unwrap() - (1.0 - 0.21 / 0.2)).abs() < 1e-12);
        assert_eq!(links.baseline_is_better, 0.5);
        assert_eq!(links.decide_ns_per_window, 1_000.0);
        assert_eq!(find(Group::All).points, 5);
        assert_eq!(find(Group::NearLeast).points, 1);
        assert_eq!(find(Group::RecomputeOnly).baseline_is_better, 0.0);
    }
}
