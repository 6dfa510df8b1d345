//! One point: what policies and searches make of it, and the best plan that is known.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;

use plimsoll_runtime::observation::Pressure;
use plimsoll_runtime::planner::{self, LEARNED};
use plimsoll_runtime::search::{Limits, search};
use plimsoll_runtime::{Choice, Decided, Plan, Planned, Planner, Policy, Problem, plan};
use serde::{Deserialize, Serialize};

use super::points::{Field, Point};
use super::processor::{thread_time, timed};
use crate::chosen::Chosen;
use crate::highs::Highs;
use crate::two_level::{TWO_LEVEL, decide_at_two_levels};

/// The search for the best plan.
const LONG_SEARCH: &str = "long search";
/// A search for as long as the planner takes, from nothing.
pub const SEARCH: &str = "search";
/// The same from the best baseline's plan.
pub const SEEDED: &str = "best baseline + search";
/// The best of all baselines.
pub const BEST_BASELINE: &str = "best baseline";

/// A policy's greedy plan.
pub const ALONE: &str = "alone";
/// The same where nobody asks it whether to wait.
const UNASKED: &str = "alone, unasked";
/// The best of a policy's decodes.
pub const DECODES: &str = "decodes";
/// What the whole planner makes of a policy.
pub const PLANNER: &str = "+ search";

/// The name of one of a policy's own ways of planning.
pub fn way_of(policy: &str, way: &str) -> String {
    format!("{policy} {way}")
}

/// What the policy at `index` of a call is called in its report: the one in question "policy", those beside it by the names
/// of their files, baselines by their own.
pub fn called(name: &str, index: usize) -> String {
    let stem = Path::new(name).file_stem().map(|stem| stem.to_string_lossy().into_owned());
    if index == 0 { "policy".to_owned() } else { stem.unwrap_or_else(|| name.to_owned()) }
}

/// A policy that is judged.
pub struct Contestant {
    /// Its name in the table.
    pub name: String,
    /// The policy.
    pub policy: Chosen,
}

impl Contestant {
    /// What `planner` makes of the policy. A baseline has no prior: its plan stands beside the planner's own.
    fn plan_with(&self, problem: Problem<'_>, planner: &Planner<'_>) -> Decided {
        match &self.policy {
            Chosen::Learned { .. } => self.policy.plan(problem, planner),
            Chosen::Baseline(_) => {
                let (own, searched) = (self.policy.plan(problem, planner), planner.plan(problem, None));
                if searched.planned.is_better_than(&own.planned) { searched } else { own }
            }
        }
    }
}

/// A policy that is asked only where the budget would be exceeded.
struct Unasked(Box<dyn Policy + Send>);

impl Policy for Unasked {
    fn reads_features(&self) -> bool {
        self.0.reads_features()
    }

    fn choose(&mut self, pressure: &Pressure<'_>) -> Option<Choice> {
        self.0.choose(pressure)
    }
}

/// How long everything may take.
pub struct Contest<'a> {
    /// The policies; the first is the one in question.
    pub contestants: &'a [Contestant],
    /// The planner. It has one thread here, and the time of that one's processor.
    pub planner: Planner<'static>,
    /// What solves the programs of torchtitan's planner, where that is asked, too.
    pub highs: Option<Highs>,
    /// Time of the search for the reference.
    pub reference_time: Duration,
    /// References of earlier calls.
    pub known: Known,
}

/// What a way of planning came to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// Makespan of the plan, where it holds the budget.
    pub makespan_ns: Option<u64>,
    /// Whose plan it is in the end: the best baseline's name, for instance.
    pub by: String,
    /// Processor time of deciding.
    pub decide_ns: u64,
}

/// A way of planning, and the plan that it made.
struct Made {
    /// The name of the way.
    way: String,
    /// Whose plan it is in the end.
    by: &'static str,
    planned: Planned,
    /// Processor time of deciding.
    time: Duration,
}

impl Made {
    fn of(way: impl Into<String>, (Decided { planned, by }, time): (Decided, Duration)) -> Self {
        Made { way: way.into(), by, planned, time }
    }

    fn outcome(&self) -> Outcome {
        let makespan_ns = self.planned.fits().then_some(self.planned.prediction.makespan_ns);
        Outcome { makespan_ns, by: self.by.to_owned(), decide_ns: self.time.as_nanos() as u64 }
    }
}

/// The best plan that is known.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reference {
    /// Its makespan.
    pub makespan_ns: u64,
    /// The way of planning that found it.
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

    /// How much longer a makespan is than that of the best plan that anything found.
    pub fn excess(&self, makespan_ns: u64) -> f64 {
        makespan_ns as f64 / self.reference.makespan_ns as f64 - 1.0
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
    pub fn hold(&self, field: &Field) -> anyhow::Result<Option<PointReport>> {
        let problem = field.point.instance.problem();
        let best_baseline = field.best();
        let seed: Vec<Plan> = best_baseline.iter().map(|(_, planned, _)| planned.plan.clone()).collect();
        let planner = self.planner();
        let searched = |starts: &[Plan]| search_for(problem, starts, planner.limits_for(problem));
        let decoding = Planner::decoding(planner.decodes, planner.limits.seed);
        let mut plans: Vec<Made> = Vec::new();
        for contestant in self.contestants {
            let by = contestant.policy.decides();
            let decoded_by = |policy: &mut dyn Policy| Decided { planned: plan(problem, policy), by };
            let alone = || decoded_by(contestant.policy.policy().as_mut());
            plans.push(Made::of(way_of(&contestant.name, ALONE), timed(alone)));
            if let Chosen::Learned { .. } = contestant.policy {
                let unasked = || decoded_by(&mut Unasked(contestant.policy.policy()));
                plans.push(Made::of(way_of(&contestant.name, UNASKED), timed(unasked)));
                let decodes = timed(|| contestant.plan_with(problem, &decoding));
                // Where no decode holds the budget, baselines stand in.
                plans.extend((decodes.0.by == LEARNED).then(|| Made::of(way_of(&contestant.name, DECODES), decodes)));
            }
            plans.push(Made::of(way_of(&contestant.name, PLANNER), timed(|| contestant.plan_with(problem, &planner))));
        }
        plans.push(Made::of(SEARCH, timed(|| searched(&[]))));
        plans.push(Made::of(SEEDED, timed(|| searched(&seed))));
        if let Some(highs) = &self.highs {
            let (decided, time) = timed(|| decide_at_two_levels(highs, problem));
            plans.push(Made::of(TWO_LEVEL, (decided?, time)));
        }
        if let Some((by, planned, time)) = best_baseline {
            plans.push(Made { way: BEST_BASELINE.to_owned(), by, planned: planned.clone(), time });
        }
        let Some(mut report) = describe(field, &plans) else { return Ok(None) };
        let starts: Vec<Plan> = plans.into_iter().map(|made| made.planned.plan).collect();
        let limits = Limits { evaluations: u64::MAX, time: Some(self.reference_time), ..planner.limits };
        self.refine(&mut report, || search_for(problem, &starts, limits).planned);
        Ok(Some(report))
    }

    fn planner(&self) -> Planner<'static> {
        Planner { limits: Limits { clock: thread_time, ..self.planner.limits }, threads: 1, ..self.planner }
    }

    /// Looks for a better reference, unless an earlier call did.
    fn refine(&self, report: &mut PointReport, search: impl FnOnce() -> Planned) {
        let better = if let Some(known) = self.known.0.get(&report.key()) {
            known.clone()
        } else if self.reference_time > Duration::ZERO {
            let found = search();
            assert!(found.fits(), "a search that starts from a plan that fits finds one");
            Reference { makespan_ns: found.prediction.makespan_ns, by: LONG_SEARCH.to_owned() }
        } else {
            return;
        };
        if better.makespan_ns < report.reference.makespan_ns {
            report.reference = better;
        }
    }
}

fn search_for(problem: Problem<'_>, starts: &[Plan], limits: Limits) -> Decided {
    let found = search(problem, starts, limits, None, &mut |_| ControlFlow::Continue(()));
    Decided { planned: found.into(), by: planner::SEARCH }
}

/// What `plans` came to; none where none holds the budget.
fn describe(field: &Field, plans: &[Made]) -> Option<PointReport> {
    let Point { instance, ratio, near_least } = &field.point;
    let fitting = plans.iter().filter(|made| made.planned.fits());
    let best = fitting.min_by_key(|made| made.planned.prediction.makespan_ns)?;
    let reference = Reference { makespan_ns: best.planned.prediction.makespan_ns, by: best.way.clone() };
    let makespan_ns = |planned: &Planned| planned.fits().then_some(planned.prediction.makespan_ns);
    Some(PointReport {
        workload: instance.trace.workload.clone(),
        family: instance.trace.family.clone(),
        device: instance.trace.device.clone(),
        fingerprint: instance.trace.fingerprint(),
        operators: instance.trace.operators.len(),
        windows: instance.lineage.windows().len(),
        link_bytes_per_s: (!field.point.is_recompute_only()).then_some(instance.tiers.host.offload_bytes_per_s),
        ratio: *ratio,
        budget_bytes: instance.budget_bytes,
        near_least: *near_least,
        keep_all_makespan_ns: instance.lineage.keep_all_makespan_ns(),
        reference,
        baselines: field.plans.iter().map(|(name, planned, _)| ((*name).to_owned(), makespan_ns(planned))).collect(),
        outcomes: plans.iter().map(|made| (made.way.clone(), made.outcome())).collect(),
    })
}
