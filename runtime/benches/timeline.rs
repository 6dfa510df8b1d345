//! What predictions and decisions cost. Times are per item: an operator of the trace, a changed action, a decision.

#[path = "../tests/support/mod.rs"]
mod support;

use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use plimsoll_runtime::baselines::baseline;
use plimsoll_runtime::lineage::WindowId;
use plimsoll_runtime::network::{Dense, LOGITS, Network, NetworkWeights, Normaliser};
use plimsoll_runtime::observation::{FEATURES, Pressure};
use plimsoll_runtime::{
    Action, ActionSet, Choice, LearnedPolicy, Lineage, Link, Plan, Policy, Problem, Timeline, Trace, plan,
};
use support::draw::Draw;
use support::oracle;
use support::realistic::realistic_trace;

fn main() {
    divan::main();
}

/// A trace, its lineage, and the plans that are measured on it.
struct Case {
    trace: Trace,
    lineage: Lineage,
}

fn link() -> Link {
    Link { contention_ns_per_byte: 0.01, ..Link::symmetric(100e9, 10_000) }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    KeepAll,
    Swap,
    Recompute,
    Both,
}

const KINDS: [Kind; 4] = [Kind::KeepAll, Kind::Swap, Kind::Recompute, Kind::Both];

impl Case {
    fn new(operators: usize) -> Self {
        let trace = realistic_trace(1, operators);
        let lineage = Lineage::of(&trace);
        Case { trace, lineage }
    }

    fn problem(&self, budget_percent: u64, actions: ActionSet) -> Problem<'_> {
        Problem {
            trace: &self.trace,
            lineage: &self.lineage,
            tiers: link().into(),
            budget_bytes: self.lineage.keep_all_peak_bytes() * budget_percent / 100,
            actions,
        }
    }

    /// A plan of the kind that decodes make, of 100 to 200 evictions.
    fn plan(&self, kind: Kind) -> (Plan, u64) {
        let actions = match kind {
            Kind::KeepAll => return (Plan::keep_all(self.lineage.windows().len()), u64::MAX),
            Kind::Swap => ActionSet::SWAP,
            Kind::Recompute => ActionSet::RECOMPUTE,
            Kind::Both => ActionSet::ALL,
        };
        let problem = self.problem(if let Kind::Recompute = kind { 80 } else { 87 }, actions);
        let policy = if let Kind::Recompute = kind { "dtr" } else { "capuchin" };
        let planned = plan(problem, baseline(policy, 0).expect("it is in the list").as_mut());
        (planned.plan, problem.budget_bytes)
    }
}

/// A whole plan, per operator of the trace.
#[divan::bench(args = KINDS)]
fn whole(bencher: Bencher, kind: Kind) {
    let case = Case::new(5_000);
    let (plan, budget_bytes) = case.plan(kind);
    eprintln!(
        "{kind:?}: {:?} of {} windows on {} operators",
        plan.counts(),
        case.lineage.windows().len(),
        case.trace.operators.len()
    );
    let mut timeline = Timeline::new(&case.trace, &case.lineage, link());
    bencher
        .counter(ItemsCount::new(case.trace.operators.len()))
        .bench_local(|| timeline.predict(black_box(&plan), budget_bytes));
}

/// The same by the tests' simple timeline, which visits every operator.
#[divan::bench(args = KINDS, sample_count = 20)]
fn whole_simply(bencher: Bencher, kind: Kind) {
    let case = Case::new(5_000);
    let (plan, budget_bytes) = case.plan(kind);
    bencher
        .counter(ItemsCount::new(case.trace.operators.len()))
        .bench_local(|| oracle::predict(&case.trace, &case.lineage, link(), black_box(&plan), budget_bytes).0);
}

/// A whole decode with its prediction: about two hundred decisions.
#[divan::bench(args = [2_000, 5_000], sample_count = 10)]
fn decode(bencher: Bencher, operators: usize) {
    let case = Case::new(operators);
    let problem = case.problem(80, ActionSet::ALL);
    let planned = plan(problem, baseline("capuchin", 0).expect("it is in the list").as_mut());
    eprintln!("{operators} operators: {} decisions", planned.decisions);
    bencher
        .counter(ItemsCount::new(planned.decisions))
        .bench_local(|| plan(problem, baseline("capuchin", 0).expect("it is in the list").as_mut()));
}

/// Takes what covers most of the deficit for its price, as the features have it.
struct Covering;

impl Policy for Covering {
    fn reads_features(&self) -> bool {
        true
    }

    fn choose(&mut self, pressure: &Pressure<'_>) -> Option<Choice> {
        let score = |choice: &Choice| {
            let row = pressure.row(choice.candidate);
            row[0] - 0.1 * row[if choice.action == Action::Swap { 7 } else { 8 }]
        };
        pressure.choices().max_by(|a, b| score(a).total_cmp(&score(b)))
    }
}

/// The same with every candidate described, as a learned policy needs it, and swaps and reruns mixed.
#[divan::bench(args = [2_000, 5_000], sample_count = 10)]
fn decode_described(bencher: Bencher, operators: usize) {
    let case = Case::new(operators);
    let problem = case.problem(80, ActionSet::ALL);
    let planned = plan(problem, &mut Covering);
    eprintln!("{operators} operators: {} decisions, {:?}", planned.decisions, planned.plan.counts());
    bencher.counter(ItemsCount::new(planned.decisions)).bench_local(|| plan(problem, &mut Covering));
}

/// A policy of two hidden layers of 48, its weights drawn.
fn drawn_policy() -> LearnedPolicy {
    let draw = &mut Draw::new(3);
    let mut dense = |inputs: usize, outputs: usize| Dense {
        weights: (0..inputs * outputs).map(|_| draw.below(2_001) as f32 / 1_000.0 - 1.0).collect(),
        bias: vec![0.0; outputs],
    };
    let layers = [dense(FEATURES, 48), dense(48, 48), dense(48, LOGITS)];
    LearnedPolicy::greedy(Network::new(&NetworkWeights::new(Normaliser::identity(), layers).expect("it is consistent")))
}

/// The same by a network, which scores every candidate at every decision.
#[divan::bench(args = [2_000, 5_000], sample_count = 10)]
fn decode_learned(bencher: Bencher, operators: usize) {
    let case = Case::new(operators);
    let (problem, mut policy) = (case.problem(80, ActionSet::ALL), drawn_policy());
    let planned = plan(problem, &mut policy);
    eprintln!("{operators} operators: {} decisions, {:?}", planned.decisions, planned.plan.counts());
    bencher.counter(ItemsCount::new(planned.decisions)).bench_local(|| plan(problem, &mut policy));
}

/// A change of one random window's action, against the plan it changes.
#[divan::bench(args = [Kind::Swap, Kind::Recompute])]
fn change(bencher: Bencher, kind: Kind) {
    let case = Case::new(5_000);
    let (plan, budget_bytes) = case.plan(kind);
    let mut timeline = Timeline::new(&case.trace, &case.lineage, link());
    timeline.rebase(&plan, budget_bytes);
    let draw = &mut Draw::new(5);
    let changes: Vec<(WindowId, Action)> = (0..200)
        .map(|_| {
            let id = WindowId(draw.below(case.lineage.windows().len() as u64) as u32);
            let other =
                if case.lineage.window(id).recomputable && draw.chance(50) { Action::Recompute } else { Action::Swap };
            (id, if plan.action(id) == Action::Keep { other } else { Action::Keep })
        })
        .collect();
    bencher.counter(ItemsCount::new(changes.len())).bench_local(|| {
        changes.iter().map(|&(id, action)| timeline.predict_changes(&[(id, action)]).makespan_ns).sum::<u64>()
    });
}
