//! One walk of the search: its course, which moves it takes, what it has found.

mod moves;

use std::ops::ControlFlow;
use std::slice;
use std::sync::Mutex;
use std::time::Duration;

use super::alike::{Alike, evict_alike};
use super::cost::{Judge, useful_windows, weighty_windows};
use super::{Found, Improvement, Limits};
use crate::learned::LearnedPolicy;
use crate::lineage::WindowId;
use crate::locks::lock;
use crate::plan::{Action, Plan};
use crate::random::SplitMix64;
use crate::sweep::{Problem, Sweep};
use crate::timeline::Prediction;

/// Temperatures at the start and at the end of a descent, as shares of what the best plan so far takes over keep-all.
const HOT: f64 = 1e-2;
const COLD: f64 = 5e-4;
/// Windows from which on temperatures fall with their number: each costs a smaller share then.
const WINDOWS: f64 = 2000.0;
/// Descents within the limits, each from the best plan so far.
const DESCENTS: u64 = 4;
/// Moves between two that sweep a region anew. With a guide they are twice as many, every other one swept by it.
const REGION_INTERVAL: u64 = 150;
/// … but no fewer than this for each evaluation that a sweep takes: in a long trace one takes hundreds, and single moves gain more.
const MOVES_PER_SWEPT: u64 = 4;
/// Moves between two at which windows that are alike are moved together.
const ALIKE_INTERVAL: u64 = 149;
/// So many times before a descent moves single windows, too, as long as that takes no more than this share of it.
const ALIKE_ROUNDS: usize = 5;
const ALIKE_SHARE: f64 = 0.2;
/// The share of the limits by which the plan that evicts alike what is alike must have been found: of a model without layers, every
/// window is one of its kind, and there is more to be gained by other moves.
const EVICT_ALIKE_SHARE: f64 = 0.5;
/// The share of what is left that evicting more of them may take where a plan is over the budget.
const AGAIN_SHARE: f64 = 0.25;
/// Moves between two looks at the clock.
const WATCH_INTERVAL: u64 = 64;

const NONE: u32 = u32::MAX;

pub(super) struct Walk<'a> {
    problem: Problem<'a>,
    /// Those of the search, and which of them it begins at.
    starts: &'a [Plan],
    starts_at: &'a [Plan],
    /// Whether it is another than the first: that begins at the best of its starts.
    is_beside: bool,
    limits: Limits,
    guide: Option<LearnedPolicy>,
    /// When it was, by the clock of the limits.
    started: Duration,
    judge: Judge<'a>,
    random: SplitMix64,
    useful: Vec<WindowId>,
    alike: Alike,
    /// Per window: the previous and the next window of the same storage.
    siblings: Vec<[u32; 2]>,
    /// Per window: how many of the donors evict it.
    evicted_by: Vec<u32>,
    common: &'a Common,

    plan: Plan,
    prediction: Prediction,
    curve: Vec<Improvement>,
    /// Whether the judge's base is another plan than the one at hand.
    astray: bool,
    /// The move at hand: windows and what they were.
    changed: Vec<(WindowId, Action)>,
    /// … and what they become.
    becoming: Vec<(WindowId, Action)>,
    sweep: Sweep<'a>,
    /// Windows that one is drawn from.
    drawn: Vec<WindowId>,
    ended: bool,
}

/// What walks of one search have in common: the best plan of them all, when they last met.
#[derive(Default)]
pub(super) struct Common(Mutex<Option<(Plan, Prediction)>>);

impl Common {
    /// Tells of a plan, and goes over to the best that was told of.
    fn meet(&self, judge: &mut Judge<'_>) {
        let mut told = lock(&self.0);
        let (plan, prediction) = judge.best();
        match &mut *told {
            Some((best, best_prediction)) if best_prediction.rank() <= prediction.rank() => {
                judge.note(best, best_prediction)
            }
            told => *told = Some((plan.clone(), prediction)),
        }
    }
}

/// What walks of one search are about.
pub(super) struct Course<'a> {
    pub(super) problem: Problem<'a>,
    pub(super) starts: &'a [Plan],
    pub(super) limits: Limits,
    pub(super) guide: Option<&'a LearnedPolicy>,
    /// When it begins, by the clock of the limits.
    pub(super) started: Duration,
}

impl<'a> Walk<'a> {
    /// The walk that begins at the best of the starts and of a plan that evicts alike what is alike.
    pub(super) fn new(course: &Course<'a>, common: &'a Common) -> Self {
        let Course { problem, limits, started, .. } = *course;
        let (useful, alike) = moved(&problem);
        let is_over = |evaluations| limits.spent(evaluations, started) >= EVICT_ALIKE_SHARE;
        let nothing = Plan::keep_all(problem.lineage.windows().len());
        let (first, evaluations) = evict_alike(&problem, &alike, nothing, is_over);
        let mut walk = Walk::from(course, common, (useful, alike), Judge::new(problem, first, evaluations));
        walk.starts_at = course.starts;
        walk
    }

    /// One of those beside it: it knows the best of the starts and begins at another one.
    pub(super) fn beside(course: &Course<'a>, common: &'a Common, best: &Plan, number: usize) -> Self {
        let Course { problem, starts, limits, .. } = *course;
        let limits = Limits { seed: limits.seed.wrapping_add(number as u64), ..limits };
        let course = &Course { limits, ..*course };
        let mut walk = Walk::from(course, common, moved(&problem), Judge::new(problem, best.clone(), 0));
        walk.starts_at = slice::from_ref(&starts[(number - 1) % starts.len()]);
        walk.is_beside = true;
        walk
    }

    fn from(
        course: &Course<'a>,
        common: &'a Common,
        (useful, alike): (Vec<WindowId>, Alike),
        judge: Judge<'a>,
    ) -> Self {
        let Course { problem, starts, limits, guide, started } = *course;
        let (plan, prediction) = judge.best();
        Walk {
            problem,
            starts,
            starts_at: &[],
            is_beside: false,
            limits,
            guide: guide.map(|guide| guide.with_seed(limits.seed)),
            started,
            random: SplitMix64::new(limits.seed),
            useful,
            alike,
            siblings: siblings(&problem),
            evicted_by: vec![0; problem.lineage.windows().len()],
            common,
            plan: plan.clone(),
            prediction,
            judge,
            curve: Vec::new(),
            astray: true,
            changed: Vec::new(),
            becoming: Vec::new(),
            sweep: Sweep::new(problem, Plan::keep_all(problem.lineage.windows().len())),
            drawn: Vec::new(),
            ended: false,
        }
    }

    pub(super) fn run(mut self, watch: &mut dyn FnMut(&Improvement) -> ControlFlow<()>) -> Found {
        self.curve.push(self.progress());
        if !self.useful.is_empty() {
            for start in self.starts_at {
                self.plan.clone_from(start);
                self.stand();
                if !self.prediction.fits() && !self.limits.is_past(self.started) {
                    self.resweep_by_price(0.0);
                }
            }
            if self.starts.is_empty() && !self.prediction.fits() {
                self.resweep_by_price(0.0);
            }
            for donor in self.donors() {
                for (evicted_by, &action) in self.evicted_by.iter_mut().zip(donor.actions()) {
                    *evicted_by += u32::from(action != Action::Keep);
                }
            }
            self.descend_all(watch);
        }
        let (plan, prediction) = self.judge.best();
        Found {
            plan: plan.clone(),
            prediction,
            evaluations: self.judge.evaluations,
            elapsed: self.limits.elapsed(self.started),
            curve: self.curve,
        }
    }

    /// The plans that it starts from, where there are several: what they do in some stretch is worth a try.
    fn donors(&self) -> &'a [Plan] {
        if self.starts.len() > 1 { self.starts } else { &[] }
    }

    /// Makes the plan at hand the judge's base, and takes it down if it is the best.
    fn stand(&mut self) {
        let before = self.judge.best().1;
        self.prediction = self.judge.rebase(&self.plan);
        self.astray = false;
        self.take_down(before);
    }

    /// Goes to another plan.
    fn go_to(&mut self, plan: &Plan, prediction: Prediction) {
        self.plan.clone_from(plan);
        self.prediction = prediction;
        self.astray = true;
    }

    /// Takes down that there is a better plan than the one that `before` was predicted of.
    fn take_down(&mut self, before: Prediction) {
        if self.judge.best().1 != before {
            self.curve.push(self.progress());
        }
    }

    fn progress(&self) -> Improvement {
        let (evaluations, elapsed) = (self.judge.evaluations, self.limits.elapsed(self.started));
        Improvement { evaluations, elapsed, prediction: self.judge.best().1 }
    }

    /// The share of the limits that is used up.
    fn spent(&self) -> f64 {
        self.limits.spent(self.judge.evaluations, self.started)
    }

    fn descend_all(&mut self, watch: &mut dyn FnMut(&Improvement) -> ControlFlow<()>) {
        for descent in 0..DESCENTS {
            if descent > 0 || !self.is_beside {
                self.common.meet(&mut self.judge);
                self.return_to_best();
            }
            self.drop_needless();
            self.evict_alike_again();
            let first = self.spent();
            let last = first + (1.0 - first) / (DESCENTS - descent) as f64;
            self.descend(first, last, watch);
        }
        self.return_to_best();
        self.drop_needless();
    }

    fn return_to_best(&mut self) {
        let (best, prediction) = self.judge.best();
        self.plan.clone_from(best);
        self.prediction = prediction;
        self.astray = true;
    }

    /// Keeps every window whose eviction is not worth it, least bytes first.
    fn drop_needless(&mut self) {
        // Among them those that are too light to be looked at otherwise.
        let windows = (0..self.plan.actions().len() as u32).map(WindowId);
        let mut evicted: Vec<_> = windows.filter(|&id| self.is_evicted(id)).collect();
        evicted.sort_by_key(|&id| self.bytes(id));
        for id in evicted {
            if self.ended || self.spent() >= 1.0 {
                return;
            }
            if self.astray {
                self.stand();
            }
            self.change(id, Action::Keep);
            let after = self.predict_move();
            self.settle(after, 0.0);
        }
    }

    /// Where a plan is over the budget, for what it keeps now was worth that, evicts alike what else there is.
    fn evict_alike_again(&mut self) {
        if self.prediction.fits() {
            return;
        }
        let (limits, started, before) = (self.limits, self.started, self.judge.evaluations);
        let spent = self.spent();
        let until = spent + AGAIN_SHARE * (1.0 - spent);
        let is_over = |evaluations| limits.spent(before + evaluations, started) >= until;
        let (plan, evaluations) = evict_alike(&self.problem, &self.alike, self.plan.clone(), is_over);
        self.judge.evaluations += evaluations;
        let best = self.judge.best().1;
        let prediction = self.judge.predict(&plan);
        self.take_down(best);
        self.go_to(&plan, prediction);
    }

    fn descend(&mut self, first: f64, last: f64, watch: &mut dyn FnMut(&Improvement) -> ControlFlow<()>) {
        let keep_all_ns = self.problem.lineage.keep_all_makespan_ns();
        let delay_ns = self.judge.best().1.makespan_ns.saturating_sub(keep_all_ns);
        // Where hardly anything is lost, hardly anything is to be gained, but something has to be risked.
        let crowd = (self.useful.len() as f64 / WINDOWS).max(1.0);
        let scale = delay_ns.max(keep_all_ns / 1000).max(1) as f64 / crowd;
        let region_interval = if self.guide.is_some() { REGION_INTERVAL / 2 } else { REGION_INTERVAL };
        let (mut moves, mut next_region, mut temperature) = (0u64, region_interval, HOT * scale);
        for _ in 0..ALIKE_ROUNDS {
            if self.spent() >= first + ALIKE_SHARE * (last - first) {
                break;
            }
            self.move_alike(temperature);
        }
        while !self.ended && self.judge.evaluations < self.limits.evaluations {
            if moves.is_multiple_of(WATCH_INTERVAL) {
                let spent = self.spent();
                if spent >= last || watch(&self.progress()).is_break() {
                    self.ended |= spent < last;
                    return;
                }
                let share = (spent - first) / (last - first).max(f64::MIN_POSITIVE);
                temperature = HOT * scale * (COLD / HOT).powf(share);
            }
            moves += 1;
            if self.astray {
                self.stand();
            }
            self.judge.weigh(&self.prediction);
            if moves.is_multiple_of(ALIKE_INTERVAL) {
                self.move_alike(temperature);
            } else if moves >= next_region {
                let swept = self.move_region(temperature);
                next_region = moves + region_interval.max(MOVES_PER_SWEPT * swept);
            } else if let Some(after) = self.propose() {
                self.settle(after, temperature);
            } else {
                self.take_back();
            }
        }
    }

    /// Whether the walk goes on from a plan that costs `after`, where the one at hand costs `before`.
    fn accepts(&mut self, before: f64, after: f64, temperature: f64) -> bool {
        after <= before || (temperature > 0.0 && f64::from(self.random.unit()).ln() * temperature < before - after)
    }

    /// What the plan with the move at hand is predicted to cost.
    fn predict_move(&mut self) -> Prediction {
        let Walk { plan, changed, becoming, judge, .. } = self;
        becoming.clear();
        becoming.extend(changed.iter().map(|&(window, _)| (window, plan.action(window))));
        let before = judge.best().1;
        let after = judge.predict_changes(plan, becoming);
        self.take_down(before);
        after
    }

    /// Takes the move at hand, or takes it back. It was predicted last.
    fn settle(&mut self, after: Prediction, temperature: f64) {
        if self.accepts(self.judge.cost(&self.prediction), self.judge.cost(&after), temperature) {
            self.judge.accept_changes(&self.becoming);
            self.prediction = after;
            self.changed.clear();
        } else {
            self.take_back();
        }
    }

    fn take_back(&mut self) {
        while let Some((window, action)) = self.changed.pop() {
            self.plan.set(window, action);
        }
    }

    fn change(&mut self, window: WindowId, action: Action) {
        self.changed.push((window, self.plan.action(window)));
        self.plan.set(window, action);
    }
}

/// The windows that are moved, and which of them are alike.
fn moved(problem: &Problem<'_>) -> (Vec<WindowId>, Alike) {
    let useful = weighty_windows(problem, useful_windows(problem));
    let alike = Alike::of(problem, &useful);
    (useful, alike)
}

/// Per window: the previous and the next window of the same storage.
fn siblings(problem: &Problem<'_>) -> Vec<[u32; 2]> {
    let windows = problem.lineage.windows();
    let mut siblings = vec![[NONE; 2]; windows.len()];
    let mut last = vec![NONE; problem.trace.storages.len()];
    for (id, window) in windows.iter().enumerate() {
        let previous = std::mem::replace(&mut last[window.storage.index()], id as u32);
        siblings[id][0] = previous;
        if previous != NONE {
            siblings[previous as usize][1] = id as u32;
        }
    }
    siblings
}
