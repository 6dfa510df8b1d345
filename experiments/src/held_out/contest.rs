//! One point: what policies and searches make of it, and the best plan that is known.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::time::Duration;

use plimsoll_runtime::search::{Limits, search};
use plimsoll_runtime::{Plan, Planned, Policy, Problem, plan, plan_learned};
use serde::{Deserialize, Serialize};

use super::points::{Field, MakePolicy, Point};
use super::processor::timed;
use crate::chosen::Chosen;

/// Evaluations by which the pace of a search is found.
const PACE_EVALUATIONS: u64 = 1000;

/// A search for as long as the planner takes, from nothing.
pub const SEARCH: &str = "search";
/// The same from the best baseline's plan.
pub const SEEDED: &str = "best baseline + search";
/// The best of all baselines.
pub const BEST_BASELINE: &str = "best baseline";

/// A policy that is judged.
pub struct Contestant {
    /// Its name in the table.
    pub name: String,
    /// The policy.
    pub policy: Chosen,
}

impl Contestant {
    /// The name of its greedy plan.
    pub fn alone(&self) -> String {
        format!("{} alone", self.name)
    }

    /// The name of what the whole planner makes of it.
    pub fn planner(&self) -> String {
        format!("{} + search", self.name)
    }
}

impl MakePolicy for Contestant {
    fn make(&self) -> Box<dyn Policy + Send> {
        self.policy.policies().swap_remove(0)
    }
}

/// How long everything may take.
pub struct Contest<'a> {
    /// The policies; the first is the one in question.
    pub contestants: &'a [Contestant],
    /// Sampled decodes beside the greedy one.
    pub decodes: u64,
    /// Time of the whole planner, decodes included.
    pub planner_time: Duration,
    /// Time of the search for the reference.
    pub reference_time: Duration,
    /// References of earlier calls.
    pub known: Known,
    /// Seed of searches.
    pub seed: u64,
}

/// What a way of planning came to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// Makespan of the plan, where it holds the budget.
    pub makespan_ns: Option<u64>,
    /// Whose plan it is in the end.
    pub by: String,
    /// Processor time of deciding.
    pub decide_ns: u64,
}

impl Outcome {
    fn of(planned: &Planned, by: &str, time: Duration) -> Self {
        let makespan_ns = planned.fits().then_some(planned.prediction.makespan_ns);
        Outcome { makespan_ns, by: by.to_owned(), decide_ns: time.as_nanos() as u64 }
    }
}

/// The best plan that is known.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reference {
    /// Its makespan.
    pub makespan_ns: u64,
    /// What found it.
    pub by: String,
}

/// What everything came to at one point.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PointReport {
    /// The member.
    pub workload: String,
    /// Its family.
    pub family: String,
    /// The machine whose times it has.
    pub device: String,
    /// [`plimsoll_runtime::Trace::fingerprint`].
    pub fingerprint: String,
    /// Operators of the trace.
    pub operators: usize,
    /// Windows of the trace.
    pub windows: usize,
    /// Bandwidth of the link both ways, in bytes per second; none where nothing may be swapped.
    pub link_bytes_per_s: Option<f64>,
    /// The budget as a share of the keep-all peak.
    pub ratio: f64,
    /// The budget.
    pub budget_bytes: u64,
    /// Whether hardly any plan holds the budget.
    pub near_least: bool,
    /// Makespan if nothing is evicted.
    pub keep_all_makespan_ns: u64,
    /// The best plan that is known.
    pub reference: Reference,
    /// Makespan of every baseline that holds the budget, by its name.
    pub baselines: BTreeMap<String, Option<u64>>,
    /// What every way of planning came to, by its name.
    pub outcomes: BTreeMap<String, Outcome>,
}

impl PointReport {
    /// Whether nothing may be swapped.
    pub fn is_recompute_only(&self) -> bool {
        self.link_bytes_per_s.is_none()
    }

    /// The best baseline's makespan.
    pub fn best_baseline_ns(&self) -> Option<u64> {
        self.baselines.values().flatten().copied().min()
    }

    /// Overhead of a makespan.
    pub fn overhead(&self, makespan_ns: u64) -> f64 {
        makespan_ns as f64 / self.keep_all_makespan_ns as f64 - 1.0
    }

    fn key(&self) -> Key {
        Key {
            fingerprint: self.fingerprint.clone(),
            keep_all_makespan_ns: self.keep_all_makespan_ns,
            budget_bytes: self.budget_bytes,
            link_bytes_per_s: self.link_bytes_per_s.map(f64::to_bits),
        }
    }
}

/// What makes two points the same.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    fingerprint: String,
    keep_all_makespan_ns: u64,
    budget_bytes: u64,
    link_bytes_per_s: Option<u64>,
}

/// The references that earlier calls found.
#[derive(Clone, Debug, Default)]
pub struct Known(HashMap<Key, Reference>);

impl Known {
    /// Those of some points.
    pub fn of(points: &[PointReport]) -> Self {
        Known(points.iter().map(|point| (point.key(), point.reference.clone())).collect())
    }
}

impl Contest<'_> {
    /// Lets everything plan at a point; none where nothing holds its budget.
    pub fn hold(&self, field: &Field) -> Option<PointReport> {
        let problem = field.point.instance.problem();
        let evaluations_per_s = pace(problem, field);
        let searched = |starts: &[Plan], time: Duration| {
            let evaluations = (evaluations_per_s * time.as_secs_f64()).max(1.0) as u64;
            search_for(problem, starts, Limits { seed: self.seed, ..Limits::evaluations(evaluations) })
        };
        let best_baseline = field.best();
        let mut plans: Vec<(String, Planned, Duration)> = Vec::new();
        for contestant in self.contestants {
            let (alone, time) = timed(|| plan(problem, contestant.make().as_mut()));
            plans.push((contestant.alone(), alone, time));
            let ((mut best, starts), spent) = timed(|| self.decode(contestant, field));
            let (found, time) = timed(|| searched(&starts, self.planner_time.saturating_sub(spent)));
            if found.is_better_than(&best) {
                best = found;
            }
            plans.push((contestant.planner(), best, spent + time));
        }
        let (found, time) = timed(|| searched(&[], self.planner_time));
        plans.push((SEARCH.to_owned(), found, time));
        let seed: Vec<Plan> = best_baseline.iter().map(|(_, planned)| planned.plan.clone()).collect();
        let (found, time) = timed(|| searched(&seed, self.planner_time));
        plans.push((SEEDED.to_owned(), found, time));
        if let Some((name, planned)) = best_baseline {
            plans.push((name.to_owned(), planned.clone(), Duration::from_nanos(planned.decide_ns)));
        }
        let mut report = describe(field, &plans)?;
        self.refine(&mut report, &plans, searched);
        Some(report)
    }

    /// The best of a policy's decodes, and the plans that a search may start from.
    fn decode(&self, contestant: &Contestant, field: &Field) -> (Planned, Vec<Plan>) {
        let problem = field.point.instance.problem();
        let decided = match &contestant.policy {
            Chosen::Learned { file, .. } => plan_learned(problem, &file.clone().into_policy(), self.decodes).planned,
            Chosen::Baseline(_) => plan(problem, contestant.make().as_mut()),
        };
        let starts = vec![decided.plan.clone()];
        (decided, starts)
    }

    /// Looks for a better reference, unless an earlier call did.
    fn refine(
        &self,
        report: &mut PointReport,
        plans: &[(String, Planned, Duration)],
        searched: impl Fn(&[Plan], Duration) -> Planned,
    ) {
        let offer = |reference: &mut Reference, makespan_ns: u64, by: &str| {
            if makespan_ns < reference.makespan_ns {
                *reference = Reference { makespan_ns, by: by.to_owned() };
            }
        };
        if let Some(known) = self.known.0.get(&report.key()) {
            offer(&mut report.reference, known.makespan_ns, &known.by);
        } else if self.reference_time > Duration::ZERO {
            let starts: Vec<Plan> = plans.iter().map(|(_, planned, _)| planned.plan.clone()).collect();
            let found = searched(&starts, self.reference_time);
            if found.fits() {
                offer(&mut report.reference, found.prediction.makespan_ns, "long search");
            }
        }
    }
}

/// Evaluations per second of a search at this point.
fn pace(problem: Problem<'_>, field: &Field) -> f64 {
    let starts: Vec<Plan> = field.best().iter().map(|(_, planned)| planned.plan.clone()).collect();
    let limits = Limits::evaluations(PACE_EVALUATIONS);
    let (found, time) = timed(|| search(problem, &starts, limits, None, &mut |_| ControlFlow::Continue(())));
    found.evaluations as f64 / time.as_secs_f64().max(1e-9)
}

fn search_for(problem: Problem<'_>, starts: &[Plan], limits: Limits) -> Planned {
    let found = search(problem, starts, limits, None, &mut |_| ControlFlow::Continue(()));
    Planned { plan: found.plan, prediction: found.prediction, decisions: 0, decide_ns: found.elapsed.as_nanos() as u64 }
}

/// What `plans` came to; none where none holds the budget.
fn describe(field: &Field, plans: &[(String, Planned, Duration)]) -> Option<PointReport> {
    let Point { instance, ratio, near_least } = &field.point;
    let fitting = plans.iter().filter(|(_, planned, _)| planned.fits());
    let (by, best, _) = fitting.min_by_key(|(_, planned, _)| planned.prediction.makespan_ns)?;
    let reference = Reference { makespan_ns: best.prediction.makespan_ns, by: by.clone() };
    let makespan_ns = |planned: &Planned| planned.fits().then_some(planned.prediction.makespan_ns);
    let best_baseline = field.best().map(|(name, _)| name);
    let name = |by: &String| if Some(by.as_str()) == best_baseline { BEST_BASELINE.to_owned() } else { by.clone() };
    Some(PointReport {
        workload: instance.trace.workload.clone(),
        family: instance.trace.family.clone(),
        device: instance.trace.device.clone(),
        fingerprint: instance.trace.fingerprint(),
        operators: instance.trace.operators.len(),
        windows: instance.lineage.windows().len(),
        link_bytes_per_s: (!field.point.is_recompute_only()).then_some(instance.link.offload_bytes_per_s),
        ratio: *ratio,
        budget_bytes: instance.budget_bytes,
        near_least: *near_least,
        keep_all_makespan_ns: instance.lineage.keep_all_makespan_ns(),
        reference,
        baselines: field.plans.iter().map(|(name, planned)| ((*name).to_owned(), makespan_ns(planned))).collect(),
        outcomes: plans.iter().map(|(by, planned, time)| (name(by), Outcome::of(planned, by, *time))).collect(),
    })
}
