//! Reports of several calls side by side: a row for each policy of each report, and one for all of them, in Markdown.

use std::fmt::{Display, Formatter, Result, Write};

use plimsoll_env::reward::plan_reward;

use super::contest::{ALONE, BEST_BASELINE, DECODES, PLANNER, PointReport, SEARCH, SEEDED, way_of};
use super::summary::Group;
use crate::two_level::TWO_LEVEL;

/// What one call found out.
pub struct Digested {
    /// What to call its points.
    pub name: String,
    /// The names of its policies in the outcomes, in the order of the call.
    pub policies: Vec<String>,
    /// Its points.
    pub points: Vec<PointReport>,
}

/// Ways of planning beside each other: the columns of overheads.
#[derive(Clone, Copy)]
enum Way {
    Baseline,
    Decode,
    Decodes,
    FromNothing,
    FromBest,
    Planner,
}

impl Way {
    const ALL: [Way; 6] = [Way::Baseline, Way::Decode, Way::Decodes, Way::FromNothing, Way::FromBest, Way::Planner];

    /// Its name in the outcomes.
    fn name(self, policy: &str) -> String {
        match self {
            Way::Baseline => BEST_BASELINE.to_owned(),
            Way::Decode => way_of(policy, ALONE),
            Way::Decodes => way_of(policy, DECODES),
            Way::FromNothing => SEARCH.to_owned(),
            Way::FromBest => SEEDED.to_owned(),
            Way::Planner => way_of(policy, PLANNER),
        }
    }
}

const HEADER: &str = "\
| points of | number | best baseline | policy alone | decodes | search | search from the best baseline | planner | excess of \
the policy alone | planner's excess (at most) | baseline beats policy alone | return of the policy alone |
|---|---|---|---|---|---|---|---|---|---|---|---|";

/// Sums over the points that the best baseline and one decode hold.
#[derive(Clone, Default)]
struct Sums {
    points: usize,
    /// Other points; nothing else here knows of them.
    unheld: usize,
    /// Points that each of [`Way::ALL`] holds, its overhead there, and how far it is over the reference.
    held: [usize; 6],
    overhead: [f64; 6],
    excess: [f64; 6],
    /// Overhead of the best plan that is known.
    reference: f64,
    planner_excess_max: f64,
    decode_beaten: usize,
    planner_beaten: usize,
    returns: f64,
    decide_ns: f64,
    decide_ns_per_window_max: f64,
    windows: usize,
    two_level: Beside,
}

/// What torchtitan's planner comes to where it was asked and holds the budget, beside ours.
#[derive(Clone, Copy, Default)]
struct Beside {
    asked: usize,
    held: usize,
    overhead: f64,
    planner: f64,
    better: usize,
}

impl Sums {
    fn of(policy: &str, points: &[&PointReport]) -> Self {
        let mut sums = Sums::default();
        points.iter().for_each(|point| sums.add(policy, point));
        sums
    }

    fn add(&mut self, policy: &str, point: &PointReport) {
        let makespans = Way::ALL.map(|way| point.outcomes.get(&way.name(policy))?.makespan_ns);
        let of = |way: Way| makespans[way as usize];
        let (Some(baseline), Some(decode)) = (of(Way::Baseline), of(Way::Decode)) else {
            self.unheld += 1;
            return;
        };
        self.points += 1;
        self.reference += point.overhead(point.reference.makespan_ns);
        for (way, makespan_ns) in makespans.into_iter().enumerate() {
            let Some(makespan_ns) = makespan_ns else { continue };
            self.held[way] += 1;
            self.overhead[way] += point.overhead(makespan_ns);
            self.excess[way] += point.excess(makespan_ns);
        }
        if let Some(planner) = of(Way::Planner) {
            self.planner_excess_max = self.planner_excess_max.max(point.excess(planner));
            self.planner_beaten += usize::from(baseline < planner);
            if let Some(outcome) = point.outcomes.get(TWO_LEVEL) {
                self.two_level.add(point, outcome.makespan_ns, planner);
            }
        }
        self.decode_beaten += usize::from(baseline < decode);
        let reward = plan_reward(point.overhead(decode), point.overhead(baseline), 0, point.budget_bytes);
        self.returns += f64::from(reward);
        let decide_ns = point.outcomes[&Way::Decode.name(policy)].decide_ns as f64;
        self.decide_ns += decide_ns;
        self.windows += point.windows;
        self.decide_ns_per_window_max = self.decide_ns_per_window_max.max(decide_ns / point.windows.max(1) as f64);
    }

    fn merge(&mut self, other: &Sums) {
        self.points += other.points;
        self.unheld += other.unheld;
        for way in 0..Way::ALL.len() {
            self.held[way] += other.held[way];
            self.overhead[way] += other.overhead[way];
            self.excess[way] += other.excess[way];
        }
        self.reference += other.reference;
        self.planner_excess_max = self.planner_excess_max.max(other.planner_excess_max);
        self.decode_beaten += other.decode_beaten;
        self.planner_beaten += other.planner_beaten;
        self.returns += other.returns;
        self.decide_ns += other.decide_ns;
        self.windows += other.windows;
        self.decide_ns_per_window_max = self.decide_ns_per_window_max.max(other.decide_ns_per_window_max);
        self.two_level.merge(other.two_level);
    }

    /// The mean of a sum over what `way` holds, in percent; none where it does not hold every point.
    fn mean(&self, way: Way, sums: &[f64; 6]) -> Option<f64> {
        (self.held[way as usize] == self.points).then(|| 100.0 * sums[way as usize] / self.points as f64)
    }

    /// The row of a table; percent, but for the first and the last figure.
    fn row(&self, name: &str) -> String {
        let or_dash = |mean: Option<f64>| mean.map_or_else(|| "–".to_owned(), |mean| format!("{mean:.2}"));
        let overheads = Way::ALL.map(|way| or_dash(self.mean(way, &self.overhead)));
        let excess = |way: Way| or_dash(self.mean(way, &self.excess));
        let at_most = or_dash(self.mean(Way::Planner, &self.excess).map(|_| 100.0 * self.planner_excess_max));
        format!(
            "| {name} | {} | {} | {} | {} ({at_most}) | {:.0} % | {:+.2} |",
            self.points,
            overheads.join(" | "),
            excess(Way::Decode),
            excess(Way::Planner),
            100.0 * self.decode_beaten as f64 / self.points as f64,
            self.returns / self.points as f64,
        )
    }

    /// What the row of all points comes to.
    fn verdict(&self) -> String {
        let overhead = |way: Way| self.mean(way, &self.overhead);
        let reference = Some(100.0 * self.reference / self.points as f64);
        let less = |by: Option<f64>, than: Way| match by.zip(overhead(than)) {
            // Adding nothing makes minus zero zero.
            Some((by, than)) => format!("{:.0} %", (100.0 * (1.0 - by / than)).round() + 0.0),
            None => "–".to_owned(),
        };
        let planner = overhead(Way::Planner);
        format!(
            "Less overhead than the best baselines: policy alone {}, planner {}. Than search from nothing: planner {}, the \
             reference {}; than search from the best baseline: planner {}, the reference {}. A baseline is better than the \
             planner at {} points. A decode takes {:.1} µs a window, at most {:.1}. {} points more are left out: no \
             baseline or not the policy alone holds their budgets.{}",
            less(overhead(Way::Decode), Way::Baseline),
            less(planner, Way::Baseline),
            less(planner, Way::FromNothing),
            less(reference, Way::FromNothing),
            less(planner, Way::FromBest),
            less(reference, Way::FromBest),
            self.planner_beaten,
            1e-3 * self.decide_ns / self.windows.max(1) as f64,
            1e-3 * self.decide_ns_per_window_max,
            self.unheld,
            self.two_level,
        )
    }
}

impl Beside {
    fn add(&mut self, point: &PointReport, makespan_ns: Option<u64>, planner_ns: u64) {
        self.asked += 1;
        let Some(makespan_ns) = makespan_ns else { return };
        self.held += 1;
        self.overhead += point.overhead(makespan_ns);
        self.planner += point.overhead(planner_ns);
        self.better += usize::from(makespan_ns < planner_ns);
    }

    fn merge(&mut self, other: Beside) {
        self.asked += other.asked;
        self.held += other.held;
        self.overhead += other.overhead;
        self.planner += other.planner;
        self.better += other.better;
    }
}

impl Display for Beside {
    /// A sentence, or nothing where it was never asked.
    fn fmt(&self, out: &mut Formatter<'_>) -> Result {
        let Beside { asked, held, overhead, planner, better } = *self;
        if asked == 0 {
            return Ok(());
        }
        let mean = |sum: f64| 100.0 * sum / held.max(1) as f64;
        write!(
            out,
            " {TWO_LEVEL} holds {held} of {asked} budgets, at {:.2} % where the planner takes {:.2}; it is better at {better}.",
            mean(overhead),
            mean(planner),
        )
    }
}

/// Reports side by side.
pub struct Digest<'a>(pub &'a [Digested]);

impl Digest<'_> {
    fn group(&self, group: Group, out: &mut Formatter<'_>) -> Result {
        let mut totals: Vec<Sums> = Vec::new();
        let mut rows = String::new();
        let several = self.0.iter().any(|report| report.policies.len() > 1);
        let named = |name: &str, index: usize| {
            if several { format!("{name}, policy {}", index + 1) } else { name.to_owned() }
        };
        for Digested { name, policies, points } in self.0 {
            let points: Vec<&PointReport> = points.iter().filter(|point| group.holds(point)).collect();
            totals.resize(totals.len().max(policies.len()), Sums::default());
            for (index, (policy, total)) in policies.iter().zip(&mut totals).enumerate() {
                let sums = Sums::of(policy, &points);
                total.merge(&sums);
                if sums.points > 0 {
                    writeln!(rows, "{}", sums.row(&named(&format!("`{name}`"), index)))?;
                }
            }
        }
        if totals.iter().all(|total| total.points == 0) {
            return Ok(());
        }
        writeln!(out, "**{}**\n\n{HEADER}\n{}", group.name(), rows.trim_end())?;
        // A policy whose decode holds none of the budgets has no mean.
        let totals = || totals.iter().enumerate().filter(|(_, total)| total.points > 0);
        for (index, total) in totals() {
            writeln!(out, "{}", total.row(&named("all", index)))?;
        }
        writeln!(out)?;
        for (index, total) in totals() {
            let whose = if several { format!("Policy {}. ", index + 1) } else { String::new() };
            writeln!(out, "{whose}{}\n", total.verdict())?;
        }
        Ok(())
    }
}

impl Display for Digest<'_> {
    fn fmt(&self, out: &mut Formatter<'_>) -> Result {
        Group::ORDER.into_iter().try_for_each(|group| self.group(group, out))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::contest::{Outcome, Reference};
    use super::*;

    /// A point of makespan 100 where nothing is evicted.
    fn point(link: bool, decode: Option<u64>) -> PointReport {
        let makespans = [
            (BEST_BASELINE, Some(120)),
            ("policy alone", decode),
            ("policy decodes", Some(116)),
            (SEARCH, Some(112)),
            (SEEDED, Some(110)),
            ("policy + search", Some(108)),
            (TWO_LEVEL, link.then_some(114)),
        ];
        let outcome = |makespan_ns| Outcome { makespan_ns, by: "learned".into(), decide_ns: 8_000 };
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
            near_least: false,
            keep_all_makespan_ns: 100,
            reference: Reference { makespan_ns: 105, by: "long search".into() },
            baselines: BTreeMap::from([("dtr".to_owned(), Some(120))]),
            outcomes: makespans.map(|(name, makespan)| (name.to_owned(), outcome(makespan))).into(),
        }
    }

    #[test]
    fn rows_are_means_over_the_points_that_baseline_and_decode_hold() {
        let points = vec![point(true, Some(110)), point(true, Some(130)), point(true, None), point(false, Some(120))];
        let digested = Digested { name: "vgg".into(), policies: vec!["policy".into()], points };
        let text = Digest(&[digested]).to_string();
        let (links, rest) = text.split_once("**recompute only**").unwrap();
        // 10/105 and 15/105 over the reference; ln(.21/.11) and ln(.21/.31).
        let row = "| 2 | 20.00 | 20.00 | 16.00 | 12.00 | 10.00 | 8.00 | 14.29 | 2.86 (2.86) | 50 % | +0.13 |";
        assert!(links.contains(&format!("| `vgg` {row}\n| all {row}\n")), "{links}");
        assert!(
            links
                .contains("policy alone 0 %, planner 60 %. Than search from nothing: planner 33 %, the reference 58 %")
        );
        assert!(links.contains("2.0 µs a window, at most 2.0. 1 points more are left out"));
        assert!(links.contains("holds 2 of 2 budgets, at 14.00 % where the planner takes 8.00; it is better at 0."));
        assert!(rest.contains("| all | 1 | 20.00 | 20.00 |"), "{rest}");
        assert!(rest.contains("holds 0 of 1 budgets"), "{rest}");
    }

    #[test]
    fn a_policy_whose_decode_holds_no_budget_has_no_means() {
        let points = vec![point(true, Some(110))];
        let policies = vec!["policy".into(), "other".into()];
        let text = Digest(&[Digested { name: "vgg".into(), policies, points }]).to_string();
        assert!(text.contains("| all, policy 1 | 1 | 20.00 |") && text.contains("Policy 1. "), "{text}");
        assert!(!text.contains("policy 2") && !text.contains("Policy 2") && !text.contains("NaN"), "{text}");
    }
}
