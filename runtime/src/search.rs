//! An anytime search over whole plans, on the exact timeline: what remains to be had when no rule and no program has
//! proved that nothing does.
//!
//! Simulated annealing (Kirkpatrick, Gelatt and Vecchi, *Optimization by Simulated Annealing*, Science 1983) from the
//! best of several starts, with large-neighbourhood moves that free a region and sweep it anew (Shaw, *Using Constraint
//! Programming and Local Search Methods to Solve Vehicle Routing Problems*, CP 1998), with chains that keep one window
//! and evict others until the budget is held again (Glover, *Ejection Chains, Reference Structures and Alternating Path
//! Methods for Traveling Salesman Problems*, 1996), and with grafts, which take over what one of the starts does in a short
//! stretch (as crossover does in genetic algorithms; a policy's decodes are worth more to the search as such donors than
//! as starts). Now and then it moves windows together that are alike in every layer (`search/alike.rs`).
//!
//! Several walks may search at once, each on a thread of its own; between descents they go over to the best plan of them all.
//!
//! Deviations: bytes over the budget have a price, so that a walk can cross plans that do not fit; the walk returns to the
//! best plan at fixed shares of its limits. The search knows no bound, so it never knows that it is done.

mod alike;
pub(crate) mod cost;
mod walk;

use std::ops::ControlFlow;
use std::panic::resume_unwind;
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use crate::decode::Planned;
use crate::learned::LearnedPolicy;
use crate::plan::Plan;
use crate::sweep::Problem;
use crate::timeline::Prediction;
use walk::{Common, Course, Walk};

/// Says how much time has passed since some moment, the same one whenever one thread asks.
pub type Clock = fn() -> Duration;

/// The clock on the wall, which all threads read alike.
pub fn wall_clock() -> Duration {
    static FIRST_READ: LazyLock<Instant> = LazyLock::new(Instant::now);
    FIRST_READ.elapsed()
}

/// When a search ends, and which of its random courses it takes. Where no time is limited, the same seed and the same number of
/// evaluations give the same plan on every machine.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Runs of the timeline.
    pub evaluations: u64,
    /// Time, where that is limited.
    pub time: Option<Duration>,
    /// What tells the time. Where several threads plan, one that they read alike.
    pub clock: Clock,
    /// Seed of the random moves.
    pub seed: u64,
}

impl Limits {
    /// So many evaluations, however long they take.
    pub const fn evaluations(evaluations: u64) -> Self {
        Limits { evaluations, time: None, clock: wall_clock, seed: 0 }
    }

    /// As many evaluations as fit into `time`, by the clock on the wall.
    pub const fn wall(time: Duration) -> Self {
        Limits { time: Some(time), ..Limits::evaluations(u64::MAX) }
    }

    /// What has passed of the time since the clock said that it was `started`.
    pub(crate) fn elapsed(&self, started: Duration) -> Duration {
        (self.clock)().saturating_sub(started)
    }

    /// Whether the time limit has passed since then.
    fn is_past(&self, started: Duration) -> bool {
        self.time.is_some_and(|time| self.elapsed(started) >= time)
    }

    /// The share that is used up by so many evaluations since then.
    fn spent(&self, evaluations: u64, started: Duration) -> f64 {
        let of_time =
            |time: Duration| self.elapsed(started).as_secs_f64() / time.max(Duration::from_nanos(1)).as_secs_f64();
        (evaluations as f64 / self.evaluations.max(1) as f64).max(self.time.map_or(0.0, of_time))
    }
}

/// A better plan, and when it was found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Improvement {
    /// Evaluations until then.
    pub evaluations: u64,
    /// Time until then.
    pub elapsed: Duration,
    /// What the plan is predicted to cost.
    pub prediction: Prediction,
}

/// What a search found.
#[derive(Clone, Debug)]
pub struct Found {
    /// The best plan: the least bytes over the budget, then the least makespan.
    pub plan: Plan,
    /// Its prediction.
    pub prediction: Prediction,
    /// Runs of the timeline.
    pub evaluations: u64,
    /// How long it took.
    pub elapsed: Duration,
    /// Every improvement, the best start first; of several walks, what the best of them found itself.
    pub curve: Vec<Improvement>,
}

impl From<Found> for Planned {
    fn from(Found { plan, prediction, elapsed, .. }: Found) -> Self {
        Planned { plan, prediction, decisions: 0, decide_ns: elapsed.as_nanos() as u64 }
    }
}

/// Searches from the best of `starts` and of a plan that evicts alike what is alike for the best plan of `problem`; where
/// there are several starts it takes stretches over from all of them. A `guide` sweeps regions anew, by chance, in turn with
/// prices. `watch` hears of the best so far now and then, with the evaluations and the time spent, and may end the search.
pub fn search(
    problem: Problem<'_>,
    starts: &[Plan],
    limits: Limits,
    guide: Option<&LearnedPolicy>,
    watch: &mut dyn FnMut(&Improvement) -> ControlFlow<()>,
) -> Found {
    let course = Course { problem, starts, limits, guide, started: (limits.clock)() };
    Walk::new(&course, &Common::default()).run(watch)
}

/// The same by several walks at once, each on a thread of its own and with other random moves. At times each goes on from the best
/// plan of them all. Of the starts one is the best.
pub(crate) fn search_together(
    problem: Problem<'_>,
    (starts, best): (&[Plan], &Plan),
    limits: Limits,
    guide: Option<&LearnedPolicy>,
    walks: usize,
) -> Found {
    let common = &Common::default();
    let course = &Course { problem, starts, limits, guide, started: (limits.clock)() };
    let quietly = &|_: &Improvement| ControlFlow::Continue(());
    thread::scope(|scope| {
        let others = (1..walks).map(|number| {
            let walk = move || Walk::beside(course, common, best, number).run(&mut { quietly });
            thread::Builder::new().spawn_scoped(scope, walk)
        });
        // Where the system refuses a thread, there are fewer.
        let others: Vec<_> = others.filter_map(Result::ok).collect();
        let first = Walk::new(course, common).run(&mut { quietly });
        let others = others.into_iter().map(|other| other.join().unwrap_or_else(|panic| resume_unwind(panic)));
        others.fold(first, Found::and)
    })
}

impl Found {
    /// What another walk found beside it.
    fn and(self, other: Found) -> Found {
        let evaluations = self.evaluations + other.evaluations;
        let elapsed = self.elapsed.max(other.elapsed);
        let best = if other.prediction.rank() < self.prediction.rank() { other } else { self };
        Found { evaluations, elapsed, ..best }
    }
}
