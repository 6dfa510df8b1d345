//! What a whole plan costs a search: its makespan, and the bytes that it has over the budget at a price.

use crate::lineage::WindowId;
use crate::observation::Pressure;
use crate::plan::{Action, Plan};
use crate::policy::{Choice, Policy};
use crate::random::SplitMix64;
use crate::sweep::{Problem, Sweep};
use crate::timeline::{Prediction, Timeline};

/// A byte over the budget costs this many times what it costs a plain sweep to evict it.
const OVER_BUDGET_PRICE: f64 = 3.0;
/// … where that plan does not fit or costs next to nothing: this share of the keep-all makespan for the whole deficit.
const LEAST_PRICE: f64 = 0.1;
/// What the price grows by at each move from a plan that is over the budget, and falls by at each from one that is not. Near the
/// least budget the last bytes cost many times what the others do, and a walk would never come back to plans that fit.
const PRICE_STEP: f64 = 0.005;
/// The price ends here, in nanoseconds a byte: long before it is no number any more.
const PRICE_MAX: f64 = 1e9;

/// Windows are light that together hold no more than this part of what has to be evicted.
const LIGHT_SHARE: u64 = 100;

/// Prices whole plans, counts how many, and remembers the best.
pub(crate) struct Judge<'a> {
    problem: Problem<'a>,
    timeline: Timeline<'a>,
    /// Nanoseconds per byte over the budget.
    price: f64,
    /// The least that it ever is.
    least_price: f64,
    /// Runs of the timeline.
    pub(crate) evaluations: u64,
    best: Plan,
    best_prediction: Prediction,
}

impl<'a> Judge<'a> {
    /// Begins with the better of plain keep-all and `first`, which took so many runs of the timeline.
    pub(crate) fn new(problem: Problem<'a>, first: Plan, evaluations: u64) -> Self {
        let (mut judge, prediction) = Judge::priced_by(problem, &first, evaluations);
        judge.note(&first, &prediction);
        judge
    }

    /// Begins with plain keep-all; a byte has its price from `first`, of which the prediction is returned.
    fn priced_by(problem: Problem<'a>, first: &Plan, evaluations: u64) -> (Self, Prediction) {
        let mut timeline = Timeline::new(problem.trace, problem.lineage, problem.tiers);
        let best = Plan::keep_all(problem.lineage.windows().len());
        let kept = timeline.predict(&best, problem.budget_bytes);
        let evicted = timeline.predict(first, problem.budget_bytes);
        let keep_all_ns = problem.lineage.keep_all_makespan_ns();
        let delay_ns = evicted.makespan_ns.saturating_sub(keep_all_ns) as f64;
        let deficit = kept.over_budget_bytes.saturating_sub(evicted.over_budget_bytes).max(1) as f64;
        let price = OVER_BUDGET_PRICE * delay_ns.max(LEAST_PRICE * keep_all_ns as f64) / deficit;
        let judge = Judge {
            problem,
            timeline,
            price,
            least_price: price,
            evaluations: 2 + evaluations,
            best,
            best_prediction: kept,
        };
        (judge, evicted)
    }

    /// Begins with plain keep-all; a byte has its price from a sweep, whose plan is not looked at otherwise.
    pub(crate) fn priced_by_a_sweep(problem: Problem<'a>) -> Self {
        let mut sweep = Sweep::new(problem, Plan::keep_all(problem.lineage.windows().len()));
        sweep.decide(&mut NoisyPrice::quiet());
        Judge::priced_by(problem, sweep.plan(), sweep.decisions() as u64).0
    }

    pub(crate) fn predict(&mut self, plan: &Plan) -> Prediction {
        self.evaluations += 1;
        let prediction = self.timeline.predict(plan, self.problem.budget_bytes);
        self.note(plan, &prediction);
        prediction
    }

    /// Predicts `plan` and makes it the base of changes.
    pub(crate) fn rebase(&mut self, plan: &Plan) -> Prediction {
        self.evaluations += 1;
        let prediction = self.timeline.rebase(plan, self.problem.budget_bytes);
        self.note(plan, &prediction);
        prediction
    }

    /// Predicts `plan`, which is the base with `changes`.
    pub(crate) fn predict_changes(&mut self, plan: &Plan, changes: &[(WindowId, Action)]) -> Prediction {
        self.evaluations += 1;
        let prediction = self.timeline.predict_changes(changes);
        self.note(plan, &prediction);
        prediction
    }

    /// Makes the base with `changes` the base.
    pub(crate) fn accept_changes(&mut self, changes: &[(WindowId, Action)]) {
        self.timeline.accept_changes(changes);
    }

    /// Remembers `plan` if it is the best so far.
    pub(crate) fn note(&mut self, plan: &Plan, prediction: &Prediction) {
        if prediction.rank() < self.best_prediction.rank() {
            self.best.clone_from(plan);
            self.best_prediction = *prediction;
        }
    }

    pub(crate) fn best(&self) -> (&Plan, Prediction) {
        (&self.best, self.best_prediction)
    }

    /// Makes bytes over the budget dearer where a walk stands on a plan that has some, and cheaper again where it does not.
    pub(crate) fn weigh(&mut self, at_hand: &Prediction) {
        let factor = 1.0 + PRICE_STEP;
        self.price = if at_hand.fits() {
            (self.price / factor).max(self.least_price)
        } else {
            (self.price * factor).min(PRICE_MAX)
        };
    }

    /// Makespan in nanoseconds, and bytes over the budget at their price.
    pub(crate) fn cost(&self, prediction: &Prediction) -> f64 {
        prediction.makespan_ns as f64 + self.price * prediction.over_budget_bytes as f64
    }
}

/// The cheapest eviction per byte still needed, as far as noise lets it see.
pub(crate) struct NoisyPrice {
    random: SplitMix64,
    /// Standard deviation, roughly, of the logarithm of the factor on prices.
    noise: f32,
}

impl NoisyPrice {
    pub(crate) const fn new(random: SplitMix64, noise: f32) -> Self {
        NoisyPrice { random, noise }
    }

    pub(crate) const fn quiet() -> Self {
        Self::new(SplitMix64::new(0), 0.0)
    }
}

impl Policy for NoisyPrice {
    fn choose(&mut self, pressure: &Pressure<'_>) -> Option<Choice> {
        let mut best: Option<(f64, Choice)> = None;
        for choice in pressure.choices() {
            let candidate = &pressure.candidates[choice.candidate];
            let ns = if choice.action == Action::Swap { candidate.swap_ns() } else { candidate.recompute_ns };
            let price = (ns + 1) as f64 / candidate.bytes.min(pressure.deficit_bytes) as f64;
            let price = price * f64::from(self.noise * self.random.gumbel()).exp();
            if best.is_none_or(|(least, _)| price < least) {
                best = Some((price, choice));
            }
        }
        best.map(|(_, choice)| choice)
    }
}

/// `windows` without the smallest, which hold together less than a hundredth of the bytes that have to be evicted. Of a model
/// of billions of bytes most windows are such: biases, masks, statistics.
pub(crate) fn weighty_windows(problem: &Problem<'_>, mut windows: Vec<WindowId>) -> Vec<WindowId> {
    let lineage = problem.lineage;
    let bytes = |id: WindowId| lineage.bytes(lineage.window(id).storage);
    let mut sizes: Vec<u64> = windows.iter().map(|&id| bytes(id)).collect();
    sizes.sort_unstable();
    let mut spared_bytes = lineage.keep_all_peak_bytes().saturating_sub(problem.budget_bytes) / LIGHT_SHARE;
    let least_bytes = sizes.into_iter().find(|&bytes| {
        let is_light = bytes <= spared_bytes;
        spared_bytes -= bytes.min(spared_bytes);
        !is_light
    });
    let least_bytes = least_bytes.unwrap_or(0);
    windows.retain(|&id| bytes(id) >= least_bytes);
    windows
}

/// Windows whose eviction can matter: those that span an operator where keep-all would exceed the budget, and that some
/// action may evict.
pub(crate) fn useful_windows(problem: &Problem<'_>) -> Vec<WindowId> {
    let lineage = problem.lineage;
    let mut over_before = vec![0u32];
    for &bytes in lineage.keep_all_bytes() {
        over_before.push(over_before[over_before.len() - 1] + u32::from(bytes > problem.budget_bytes));
    }
    let useful = |id: &WindowId| {
        let window = lineage.window(*id);
        let spans = over_before[window.end as usize] > over_before[window.start as usize];
        spans && problem.may_evict(*id)
    };
    (0..lineage.windows().len() as u32).map(WindowId).filter(useful).collect()
}
