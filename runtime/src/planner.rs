//! The planner: from a policy's decisions to the one plan that is carried out.
//!
//! A decode of a policy, some more of them, what baselines make of the problem, and a search from the best of them all; the
//! timeline judges each. What a policy sees, what a baseline's rule is, and how the search moves are not known
//! here.

use std::ops::ControlFlow;
use std::slice;
use std::time::{Duration, Instant};

use crate::baselines::{BASELINES, KeepAll, baseline};
use crate::learned::LearnedPolicy;
use crate::plan::Plan;
use crate::policy::Policy;
use crate::search::{Found, Limits, search};
use crate::sweep::{Problem, Sweep};
use crate::timeline::{Prediction, Timeline};

/// A complete plan and what it is predicted to cost.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The plan.
    pub plan: Plan,
    /// Its prediction under the budget it was made for.
    pub prediction: Prediction,
    /// Evictions that the policy chose at pressure points.
    pub decisions: usize,
    /// Wall-clock time that planning took.
    pub decide_ns: u64,
}

impl Planned {
    /// Whether the budget is held.
    pub fn fits(&self) -> bool {
        self.prediction.over_budget_bytes == 0
    }

    /// Whether it exceeds the budget by less, or by as much and takes less time.
    pub fn is_better_than(&self, other: &Planned) -> bool {
        let rank = |planned: &Planned| (planned.prediction.over_budget_bytes, planned.prediction.makespan_ns);
        rank(self) < rank(other)
    }
}

/// Lets `policy` plan `problem`. Where more than the budget can never be evicted nobody is asked, and nothing is evicted: to
/// miss it by less takes longer than any plan that holds one.
pub fn plan(problem: Problem<'_>, policy: &mut dyn Policy) -> Planned {
    let started = Instant::now();
    let mut nobody = KeepAll;
    let policy: &mut dyn Policy = if problem.is_hopeless() { &mut nobody } else { policy };
    let opened = policy.open(&problem);
    let planned = completed(problem, opened, policy);
    Planned { decide_ns: started.elapsed().as_nanos() as u64, ..planned }
}

/// Lets `policy` decide what `plan` leaves open at pressure points.
pub fn completed(problem: Problem<'_>, plan: Plan, policy: &mut dyn Policy) -> Planned {
    let started = Instant::now();
    let start = if policy.weighs_waiting() { Sweep::weighing_waits } else { Sweep::new };
    let mut sweep = start(problem, plan);
    sweep.decide(policy);
    Planned {
        plan: sweep.plan().clone(),
        prediction: sweep.prediction(),
        decisions: sweep.decisions(),
        decide_ns: started.elapsed().as_nanos() as u64,
    }
}

/// A plan, and the name of the policy or baseline that it is by.
#[derive(Clone, Debug)]
pub struct Decided {
    /// The plan.
    pub planned: Planned,
    /// Whose it is.
    pub by: &'static str,
}

/// The name of the plan that evicts nothing, where nobody made a better one.
pub const KEEP_ALL: &str = "keep-all";
/// The name of a plan that there was before, for these sizes or others, where nobody made a better one.
pub const BEFORE: &str = "before";
/// The name of plans that a learned policy made.
pub const LEARNED: &str = "learned";
/// The name of plans that a search found, a learned policy's plans being among those that it could start from.
pub const LEARNED_SEARCH: &str = "learned+search";
/// The name of plans that a search found by itself, or from a baseline's plan.
pub const SEARCH: &str = "search";

/// The baselines that are asked, in this order: those that were the best most often on held-out members come first. Where
/// nothing may be swapped, `dtr-swap` decides as `dtr` does, and `capuchin` as `msps`. Keep-all and chance are not among
/// them.
pub const PORTFOLIO: [&str; 20] = [
    "dtr-swap",
    "capuchin",
    "cheapest",
    "dtr",
    "msps",
    "autoswap",
    "appobmem",
    "superneurons",
    "vdnn++",
    "chen",
    "dtr-eq",
    "lru",
    "dtr-local",
    "largest",
    "megengine",
    "vdnn-dyn",
    "vdnn-all",
    "vdnn-conv",
    "sentinel",
    "heat",
];

/// What planning takes where nobody limits it.
pub const TIME: Duration = Duration::from_millis(200);
/// … for each window of the trace, where there are more than a thousand.
pub const TIME_PER_WINDOW: Duration = Duration::from_micros(200);

/// Shares of the budget that decodes are made for, beside the whole of it: what is left is room for prefetches, which no
/// pressure point asks for, and without which operators wait for data.
const BUDGET_SHARES: [f64; 4] = [0.97, 0.94, 0.9, 0.84];
/// The share of the time after which no other decode is begun.
pub const DECODES_SHARE: f64 = 0.2;

/// The share of the time after which no other baseline is asked.
pub const PORTFOLIO_SHARE: f64 = 0.3;

/// How much is tried for a plan: decodes, baselines and search, each verified by the timeline. The best plan wins.
///
/// One decode of the policy is always made. What comes after it may be cut short by [`Limits::wall`], which is exceeded by
/// no more than one decode, one baseline's plan or one sweep of the search; but where no plan fits yet, every baseline is
/// asked. Without that, the same seed and the same numbers give the same plan on every machine.
#[derive(Clone, Copy, Debug)]
pub struct Planner {
    /// Decodes of a learned policy beside the greedy one: for shares of the budget, then sampled.
    pub decodes: u64,
    /// Baselines whose plans compete, in this order. Where no plan fits, all of [`BASELINES`] are asked, whatever the time:
    /// a plan that fits is owed.
    pub portfolio: &'static [&'static str],
    /// Of the search: its evaluations and its seed. `wall` limits all of planning. Where neither is limited, planning takes
    /// [`TIME`], or [`TIME_PER_WINDOW`] for each window of the trace where that is more.
    pub limits: Limits,
}

impl Default for Planner {
    /// Eight decodes, the portfolio and search, without a limit of one's own.
    fn default() -> Self {
        Planner { decodes: 8, portfolio: &PORTFOLIO, limits: Limits::evaluations(u64::MAX) }
    }
}

impl Planner {
    /// One greedy decode and `decodes` further ones, of which chance has its share by `seed`, without a limit of time and
    /// without search; baselines only where no decode fits.
    pub const fn decoding(decodes: u64, seed: u64) -> Self {
        Planner { decodes, portfolio: &[], limits: Limits { seed, ..Limits::evaluations(0) } }
    }

    /// Plans `problem`. Without a policy, baselines and search do what they can: the control that says what a policy is
    /// good for; without a portfolio as well, it is the search from keep-all.
    pub fn plan(&self, problem: Problem<'_>, policy: Option<&LearnedPolicy>) -> Decided {
        self.improve(problem, policy, None)
    }

    /// The same, where there is a plan already, for another budget or other times: it competes.
    pub fn improve(&self, problem: Problem<'_>, policy: Option<&LearnedPolicy>, before: Option<&Plan>) -> Decided {
        let started = Instant::now();
        if problem.is_hopeless() {
            return Decided { planned: plan(problem, &mut KeepAll), by: KEEP_ALL };
        }
        let limits = match self.limits {
            Limits { evaluations: u64::MAX, wall: None, seed } => {
                let windows = problem.lineage.windows().len() as u32;
                Limits { seed, ..Limits::wall(TIME.max(TIME_PER_WINDOW * windows)) }
            }
            given => given,
        };
        let mut planning = Planning::new(problem, limits, policy, started);
        if let Some(before) = before {
            planning.offer_again(before);
        }
        if let Some(policy) = policy {
            planning.decode(policy, self.decodes);
        }
        for name in self.portfolio {
            if planning.is_over(PORTFOLIO_SHARE) {
                break;
            }
            planning.ask(name);
        }
        if self.limits.evaluations > 0 && !planning.is_over(1.0) {
            planning.search();
        }
        for name in BASELINES.iter().filter(|name| !planning.asked.contains(name)).collect::<Vec<_>>() {
            if planning.best.planned.fits() {
                break;
            }
            planning.ask(name);
        }
        planning.best.planned.decide_ns = started.elapsed().as_nanos() as u64;
        planning.best
    }
}

/// A plan in the making.
struct Planning<'a> {
    problem: Problem<'a>,
    limits: Limits,
    started: Instant,
    best: Decided,
    /// The plans that were offered and fit, each once.
    fitting: Vec<Plan>,
    /// Baselines whose plans were offered.
    asked: Vec<&'static str>,
    /// The learned policy that has a part in it.
    policy: Option<&'a LearnedPolicy>,
}

impl<'a> Planning<'a> {
    /// Begins with the greedy decode, or without a policy with plain keep-all.
    fn new(problem: Problem<'a>, limits: Limits, policy: Option<&'a LearnedPolicy>, started: Instant) -> Self {
        let best = match policy {
            Some(policy) => Decided { planned: plan(problem, &mut policy.clone()), by: LEARNED },
            None => Decided { planned: plan(problem, &mut KeepAll), by: KEEP_ALL },
        };
        let fitting = best.planned.fits().then(|| best.planned.plan.clone()).into_iter().collect();
        Planning { problem, limits, started, best, fitting, asked: Vec::new(), policy }
    }

    /// Whether this share of the time is over, or nothing is left to be gained.
    fn is_over(&self, share: f64) -> bool {
        let late = self.limits.wall.is_some_and(|wall| self.started.elapsed() >= wall.mul_f64(share));
        let best = &self.best.planned;
        late || best.fits() && best.prediction.makespan_ns <= self.problem.lineage.keep_all_makespan_ns()
    }

    /// Makes further decodes: greedy ones that leave room for prefetches, where anything may be swapped, then sampled ones
    /// that leave as much as was best.
    fn decode(&mut self, policy: &LearnedPolicy, decodes: u64) {
        let roomy: &[f64] = if self.problem.actions.swap { &BUDGET_SHARES } else { &[] };
        let mut best = (1.0, self.best.planned.clone());
        let first = self.limits.seed;
        let seeds = (0..).map(|decode| first.wrapping_add(decode));
        let mut sampled = seeds.map(|seed| policy.with_seed(seed));
        let mut greedy = roomy.iter().map(|&share| (share, policy.clone()));
        for _ in 0..decodes {
            if self.is_over(DECODES_SHARE) {
                return;
            }
            let (share, mut policy) =
                greedy.next().unwrap_or_else(|| (best.0, sampled.next().expect("without an end")));
            let planned = self.plan_within(share, &mut policy);
            if planned.is_better_than(&best.1) {
                best = (share, planned.clone());
            }
            self.offer(LEARNED, planned);
        }
    }

    /// Lets `policy` plan for a share of the budget; the prediction is that for the whole of it.
    fn plan_within(&self, share: f64, policy: &mut dyn Policy) -> Planned {
        let problem = self.problem;
        let budget_bytes = (problem.budget_bytes as f64 * share) as u64;
        let planned = plan(Problem { budget_bytes, ..problem }, policy);
        if budget_bytes == problem.budget_bytes {
            return planned;
        }
        Planned { prediction: self.predict(&planned.plan), ..planned }
    }

    fn offer(&mut self, by: &'static str, planned: Planned) {
        if planned.fits() && !self.fitting.contains(&planned.plan) {
            self.fitting.push(planned.plan.clone());
        }
        if planned.is_better_than(&self.best.planned) {
            self.best = Decided { planned, by };
        }
    }

    /// Offers a plan that there was before.
    fn offer_again(&mut self, plan: &Plan) {
        let prediction = self.predict(plan);
        self.offer(BEFORE, Planned { plan: plan.clone(), prediction, decisions: 0, decide_ns: 0 });
    }

    fn predict(&self, plan: &Plan) -> Prediction {
        let Problem { trace, lineage, tiers, budget_bytes, .. } = self.problem;
        Timeline::new(trace, lineage, tiers).predict(plan, budget_bytes)
    }

    fn ask(&mut self, name: &'static str) {
        let mut policy = baseline(name, self.limits.seed).expect("every name in a portfolio is a baseline's");
        self.offer(name, plan(self.problem, policy.as_mut()));
        self.asked.push(name);
    }

    /// Searches from the plans so far that fit, or from the best where none does, for as long as is left.
    fn search(&mut self) {
        let wall = self.limits.wall.map(|wall| wall.saturating_sub(self.started.elapsed()));
        let limits = Limits { wall, ..self.limits };
        let start = &self.best.planned;
        let starts = if start.fits() { &self.fitting[..] } else { slice::from_ref(&start.plan) };
        let found = search(self.problem, starts, limits, self.policy, &mut |_| ControlFlow::Continue(()));
        let by = if self.policy.is_some() { LEARNED_SEARCH } else { SEARCH };
        let Found { plan, prediction, .. } = found;
        self.offer(by, Planned { plan, prediction, decisions: start.decisions, decide_ns: 0 });
    }
}

/// The least budget, in bytes, for which some policy of `policies` finds a plan that fits, to within 1/1024 of the
/// keep-all peak.
///
/// Whether a policy fits is not strictly monotone in the budget, so this is the least that bisection finds.
pub fn least_feasible_budget(problem: Problem<'_>, policies: &mut [Box<dyn Policy + Send>]) -> u64 {
    let mut fits = |budget_bytes: u64| {
        let problem = Problem { budget_bytes, ..problem };
        policies.iter_mut().any(|policy| plan(problem, policy.as_mut()).fits())
    };
    let peak = problem.lineage.keep_all_peak_bytes();
    let (mut too_little, mut enough) = (problem.unavoidable_bytes().saturating_sub(1), peak);
    while enough - too_little > (peak / 1024).max(1) {
        let middle = too_little + (enough - too_little) / 2;
        if fits(middle) { enough = middle } else { too_little = middle }
    }
    enough
}
