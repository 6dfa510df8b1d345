//! The planner: from a policy's decisions to the one plan that is carried out.
//!
//! A decode of a policy, some more of them, what baselines make of the problem, and a search from the best of them all; the
//! timeline judges each. What a policy sees, what a baseline's rule is, and how the search moves are not known
//! here.

use std::slice;
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use crate::baselines::{BASELINES, KeepAll, baseline};
use crate::decode::{Planned, plan, plan_until, predict};
use crate::learned::LearnedPolicy;
use crate::locks::lock;
use crate::plan::Plan;
use crate::policy::Policy;
use crate::search::{Found, Limits, search_together};
use crate::sweep::Problem;
use crate::timeline::Prediction;

/// A plan, and the name of the policy or baseline that it is by.
#[derive(Clone, Debug)]
pub struct Decided {
    /// The plan.
    pub planned: Planned,
    /// Whose it is.
    pub by: &'static str,
}

/// The name of the plan that evicts nothing, where nobody made a better one.
pub(crate) const KEEP_ALL: &str = "keep-all";
/// The name of a plan that there was before, for these sizes or others, where nobody made a better one.
const BEFORE: &str = "before";
/// The name of plans that a learned policy made.
pub const LEARNED: &str = "learned";
/// The name of plans that a search found, a learned policy's plans being among those that it could start from.
pub const LEARNED_SEARCH: &str = "learned+search";
/// The name of plans that a search found by itself, or from a baseline's plan.
pub const SEARCH: &str = "search";

/// The baselines that are asked, in this order: at three of four points of held-out members one of the first five is the best.
/// Where nothing may be swapped, `dtr-swap` decides as `dtr` does, and `capuchin` as `msps`. Keep-all and chance are not
/// among them.
pub const PORTFOLIO: [&str; 21] = [
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
    "knapsack",
];

/// What planning takes where nobody limits it.
pub(crate) const TIME: Duration = Duration::from_millis(200);
/// … for each window of the trace, where there are more than a thousand.
const TIME_PER_WINDOW: Duration = Duration::from_micros(200);

/// What planning takes where nobody limits it, of a trace with so many windows.
pub(crate) fn time_for(windows: usize) -> Duration {
    TIME.max(TIME_PER_WINDOW * windows as u32)
}

/// Shares of the budget that decodes are made for, beside the whole of it: what is left is room for prefetches, which no
/// pressure point asks for, and without which operators wait for data.
const BUDGET_SHARES: [f64; 4] = [0.97, 0.94, 0.9, 0.84];
/// The share of the time after which the first decode is given up, but not before [`TIME`] is over: of thousands of storages it takes
/// longer than anything else.
const DECODE_SHARE: f64 = 0.5;
/// The share of the time after which no other decode is begun.
const DECODES_SHARE: f64 = 0.2;
/// The share of the time after which no other baseline is asked, and further decodes that are not done are given up.
const PORTFOLIO_SHARE: f64 = 0.3;
/// The share of the time after which a baseline is given up, where some plan fits: in a long trace one of them takes more than a
/// search needs.
const BASELINE_SHARE: f64 = 0.1;

/// The most threads that plan where nobody says how many.
const THREADS_MAX: usize = 8;

/// How much is tried for a plan: decodes, baselines and search, each verified by the timeline. The best plan wins.
///
/// All of it may be cut short by [`Limits::time`], but the first decode of the policy has 200 ms, too. It is exceeded by no more
/// than that, what a baseline does before its first decision, or some moves of the search; but where no plan fits yet, every
/// baseline is asked. Without that, the same seed and the same numbers give the same plan on every machine.
#[derive(Clone, Copy, Debug)]
pub struct Planner<'p> {
    /// Decodes of a learned policy beside the greedy one: for shares of the budget, then sampled.
    pub decodes: u64,
    /// Baselines whose plans compete, in this order. Where no plan fits, all of [`BASELINES`] are asked, whatever the time:
    /// a plan that fits is owed.
    pub portfolio: &'p [&'static str],
    /// Of the search: its evaluations and its seed. `time` limits all of planning. Where neither is limited, planning takes 200 ms,
    /// or a fifth of a millisecond for each window of the trace where that is more.
    pub limits: Limits,
    /// Threads that plan where time alone is limited: as many as the machine runs at once, up to eight, where it is 0. Where
    /// evaluations are limited one does.
    pub threads: usize,
}

impl Default for Planner<'_> {
    /// Eight decodes, the portfolio and search, without a limit of one's own.
    fn default() -> Self {
        Planner { decodes: 8, portfolio: &PORTFOLIO, limits: Limits::evaluations(u64::MAX), threads: 0 }
    }
}

impl Planner<'_> {
    /// One greedy decode and `decodes` further ones, of which chance has its share by `seed`, without a limit of time and
    /// without search; baselines only where no decode fits.
    pub const fn decoding(decodes: u64, seed: u64) -> Self {
        Planner { decodes, portfolio: &[], limits: Limits { seed, ..Limits::evaluations(0) }, threads: 1 }
    }

    /// Plans `problem`. Without a policy, baselines and search do what they can: the control that says what a policy is
    /// good for; without a portfolio as well, it is the search from keep-all.
    pub fn plan(&self, problem: Problem<'_>, policy: Option<&LearnedPolicy>) -> Decided {
        self.improve(problem, policy, None)
    }

    /// The same, where there is a plan already, for another budget or other times: it competes.
    pub fn improve(&self, problem: Problem<'_>, policy: Option<&LearnedPolicy>, before: Option<&Plan>) -> Decided {
        let started = (self.limits.clock)();
        if problem.is_hopeless() {
            return Decided { planned: plan(problem, &mut KeepAll), by: KEEP_ALL };
        }
        let limits = self.limits_for(problem);
        let planning = Planning { problem, limits, started, policy, stand: Mutex::default() };
        let threads = if limits.evaluations == u64::MAX { self.threads() } else { 1 };
        let first = if policy.is_some() { Task::Decode(0) } else { Task::KeepAll };
        let decodes = (1..=self.decodes).filter(|_| policy.is_some()).map(Task::Decode);
        let baselines = self.portfolio.iter().map(|name| Task::Ask { name, is_owed: false });
        let others = before.map(Task::OfferAgain).into_iter().chain(decodes).chain(baselines);
        planning.carry_out([first].into_iter().chain(others), threads);
        if planning.stand().best.is_none() {
            // Nothing was done in time.
            planning.offer(KEEP_ALL, plan(problem, &mut KeepAll));
        }
        if self.limits.evaluations > 0 && !planning.is_over(1.0) {
            planning.search(threads);
        }
        if !planning.has_fitting() {
            planning.carry_out(BASELINES.iter().map(|name| Task::Ask { name, is_owed: true }), threads);
        }
        let mut decided = planning.stand().best.take().expect("there is one, if it keeps all");
        decided.planned.decide_ns = limits.elapsed(started).as_nanos() as u64;
        decided
    }

    /// The limits that `problem` is planned within: those given, or a time by its size.
    pub fn limits_for(&self, problem: Problem<'_>) -> Limits {
        match self.limits {
            Limits { evaluations: u64::MAX, time: None, .. } => {
                Limits { time: Some(time_for(problem.lineage.windows().len())), ..self.limits }
            }
            given => given,
        }
    }

    fn threads(&self) -> usize {
        match self.threads {
            0 => thread::available_parallelism().map_or(1, |threads| threads.get().min(THREADS_MAX)),
            threads => threads,
        }
    }
}

/// A plan to be made.
#[derive(Clone, Copy, Debug)]
enum Task<'a> {
    /// The plan that evicts nothing.
    KeepAll,
    /// The one that there was before.
    OfferAgain(&'a Plan),
    /// The decode of that number: the greedy one, greedy ones that leave room for prefetches, where anything may be swapped,
    /// then sampled ones that leave as much as was best.
    Decode(u64),
    /// A baseline's, which is owed where no plan fits.
    Ask { name: &'static str, is_owed: bool },
}

/// Planning under way, by one thread or several.
struct Planning<'a> {
    problem: Problem<'a>,
    limits: Limits,
    /// When it was, by the clock of the limits.
    started: Duration,
    /// The learned policy that has a part in it.
    policy: Option<&'a LearnedPolicy>,
    stand: Mutex<Stand>,
}

/// What planning has come to.
#[derive(Default)]
struct Stand {
    best: Option<Decided>,
    /// The plans that were offered and fit, each once.
    fitting: Vec<Plan>,
    /// Baselines whose plans were offered.
    asked: Vec<&'static str>,
    /// What the best decode is predicted to cost, and the share of the budget that it was made for.
    best_decode: Option<(Prediction, f64)>,
    /// What the last decode took.
    decode_time: Duration,
}

impl<'a> Planning<'a> {
    fn stand(&self) -> MutexGuard<'_, Stand> {
        lock(&self.stand)
    }

    /// Whether some plan holds the budget.
    fn has_fitting(&self) -> bool {
        self.stand().fits_within(u64::MAX)
    }

    /// What is left of this share of the time; without end where nothing limits it.
    fn left(&self, share: f64) -> Duration {
        self.limits
            .time
            .map_or(Duration::MAX, |time| time.mul_f64(share).saturating_sub(self.limits.elapsed(self.started)))
    }

    /// Whether this share of the time is over, or nothing is left to be gained.
    fn is_over(&self, share: f64) -> bool {
        self.left(share).is_zero() || self.stand().fits_within(self.problem.lineage.keep_all_makespan_ns())
    }

    /// Carries tasks out in order, so many at a time, or as many as there are threads to be had.
    fn carry_out<'t>(&self, tasks: impl Iterator<Item = Task<'t>> + Send, threads: usize) {
        let tasks = Mutex::new(tasks);
        let next = || lock(&tasks).next();
        let work = || {
            while let Some(task) = next() {
                match task {
                    Task::KeepAll => self.offer(KEEP_ALL, plan(self.problem, &mut KeepAll)),
                    Task::OfferAgain(plan) => self.offer_again(plan),
                    Task::Decode(decode) => self.decode(decode),
                    Task::Ask { name, is_owed } => self.ask(name, is_owed),
                }
            }
        };
        thread::scope(|scope| {
            for _ in 1..threads {
                // Where the system refuses one, there are fewer.
                let _ = thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
    }

    fn decode(&self, decode: u64) {
        let is_first = decode == 0;
        let is_late = || self.is_over(DECODES_SHARE) || self.left(PORTFOLIO_SHARE) <= self.stand().decode_time;
        if !is_first && is_late() {
            return;
        }
        let policy = self.policy.expect("a policy decodes");
        let greedy = 1 + if self.problem.actions.swap { BUDGET_SHARES.len() } else { 0 };
        let (share, mut policy) = match decode as usize {
            0 => (1.0, policy.clone()),
            roomy if roomy < greedy => (BUDGET_SHARES[roomy - 1], policy.clone()),
            sampled => {
                let share = self.stand().best_decode.map_or(1.0, |(_, share)| share);
                (share, policy.with_seed(self.limits.seed.wrapping_add((sampled - greedy) as u64)))
            }
        };
        let is_over = || match is_first {
            true => self.left(DECODE_SHARE).is_zero() && self.limits.elapsed(self.started) >= TIME,
            false => self.left(PORTFOLIO_SHARE).is_zero(),
        };
        let begun = (self.limits.clock)();
        let Some(planned) = self.plan_within(share, &mut policy, &is_over) else { return };
        let mut stand = self.stand();
        stand.decode_time = self.limits.elapsed(begun);
        if stand.best_decode.is_none_or(|(best, _)| planned.prediction.rank() < best.rank()) {
            stand.best_decode = Some((planned.prediction, share));
        }
        stand.offer(LEARNED, planned);
    }

    /// Lets `policy` plan for a share of the budget, unless it is over before; the prediction is that for the whole of it.
    fn plan_within(&self, share: f64, policy: &mut dyn Policy, is_over: &dyn Fn() -> bool) -> Option<Planned> {
        let problem = self.problem;
        let budget_bytes = (problem.budget_bytes as f64 * share) as u64;
        let planned = plan_until(Problem { budget_bytes, ..problem }, policy, is_over)?;
        if budget_bytes == problem.budget_bytes {
            return Some(planned);
        }
        Some(Planned { prediction: predict(self.problem, &planned.plan), ..planned })
    }

    fn offer(&self, by: &'static str, planned: Planned) {
        self.stand().offer(by, planned);
    }

    fn offer_again(&self, plan: &Plan) {
        let prediction = predict(self.problem, plan);
        self.offer(BEFORE, Planned { plan: plan.clone(), prediction, decisions: 0, decide_ns: 0 });
    }

    fn ask(&self, name: &'static str, is_owed: bool) {
        let is_idle = match is_owed {
            true => self.has_fitting() || self.stand().asked.contains(&name),
            false => self.is_over(PORTFOLIO_SHARE),
        };
        if is_idle {
            return;
        }
        let begun = (self.limits.clock)();
        let limit = self.limits.time.map_or(Duration::MAX, |time| time.mul_f64(BASELINE_SHARE));
        let is_over = || (is_owed || self.limits.elapsed(begun) >= limit) && self.has_fitting();
        let mut policy = baseline(name, self.limits.seed).expect("every name in a portfolio is a baseline's");
        if let Some(planned) = plan_until(self.problem, policy.as_mut(), &is_over) {
            let mut stand = self.stand();
            stand.offer(name, planned);
            stand.asked.push(name);
        }
    }

    /// Searches from the plans so far that fit, or from the best where none does, for as long as is left.
    fn search(&self, threads: usize) {
        let limits = Limits { time: self.limits.time.map(|_| self.left(1.0)), ..self.limits };
        let mut stand = self.stand();
        let best = &stand.best.as_ref().expect("there is one, if it keeps all").planned;
        let starts = if best.fits() { &stand.fitting[..] } else { slice::from_ref(&best.plan) };
        let Found { plan, prediction, .. } =
            search_together(self.problem, (starts, &best.plan), limits, self.policy, threads);
        let by = if self.policy.is_some() { LEARNED_SEARCH } else { SEARCH };
        let decisions = best.decisions;
        stand.offer(by, Planned { plan, prediction, decisions, decide_ns: 0 });
    }
}

impl Stand {
    /// Whether there is a plan that fits and takes no longer.
    fn fits_within(&self, makespan_ns: u64) -> bool {
        let best = self.best.as_ref().map(|best| &best.planned);
        best.is_some_and(|best| best.fits() && best.prediction.makespan_ns <= makespan_ns)
    }

    fn offer(&mut self, by: &'static str, planned: Planned) {
        if planned.fits() && !self.fitting.contains(&planned.plan) {
            self.fitting.push(planned.plan.clone());
        }
        if self.best.as_ref().is_none_or(|best| planned.is_better_than(&best.planned)) {
            self.best = Some(Decided { planned, by });
        }
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
