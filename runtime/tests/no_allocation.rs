//! The promise: deciding does not allocate, and predicting does not once its buffers have grown.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use plimsoll_runtime::baselines::{BASELINES, baseline};
use plimsoll_runtime::lineage::WindowId;
use plimsoll_runtime::network::{Dense, LOGITS, Network, NetworkWeights, Normaliser};
use plimsoll_runtime::observation::{Candidate, FEATURES, Pressure};
use plimsoll_runtime::policy::Policy;
use plimsoll_runtime::{Action, ActionSet, LearnedPolicy, Lineage, Link, Problem, Sweep, Timeline, plan};
use support::realistic::realistic_trace;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counting what each thread asks of it.
struct Counting;

// SAFETY: every call is passed on to the system's allocator unchanged; counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promises about `layout` are the ones that are needed here.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller promises that `pointer` came from `alloc` with this `layout`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn network(hidden: usize) -> Network {
    let dense = |inputs: usize, outputs: usize| Dense {
        weights: (0..inputs * outputs).map(|index| (index as f32).sin()).collect(),
        bias: vec![0.1; outputs],
    };
    let layers = [dense(FEATURES, hidden), dense(hidden, hidden), dense(hidden, LOGITS)];
    Network::new(&NetworkWeights::new(Normaliser::identity(), layers).unwrap())
}

fn candidate(index: u32) -> Candidate {
    Candidate {
        window: WindowId(index),
        bytes: 1 << 20,
        staleness_ns: 1,
        gap_ns: 1,
        to_use_ns: 1,
        transfer_ns: 1,
        swap_exposed_ns: 0,
        contention_ns: 0,
        own_recompute_ns: 1,
        recompute_ns: 1,
        dropped_children_bytes: 0,
        dropped_children_ns: 0,
        used_again: true,
        can_swap: true,
        can_recompute: index.is_multiple_of(2),
    }
}

#[test]
fn no_decision_allocates_greedy_or_sampled_few_candidates_or_many() {
    let candidates: Vec<Candidate> = (0..300).map(candidate).collect();
    let features: Vec<f32> = (0..300 * FEATURES).map(|index| (index as f32).cos()).collect();
    for mut policy in [LearnedPolicy::greedy(network(64)), LearnedPolicy::sampled(network(48), 7)] {
        let before = ALLOCATIONS.get();
        for count in [1, 300, 20] {
            let (candidates, features) = (&candidates[..count], &features[..count * FEATURES]);
            let pressure = Pressure { operator: 0, deficit_bytes: 1, wait: None, candidates, features };
            assert!(policy.choose(&pressure).is_some());
        }
        assert_eq!(ALLOCATIONS.get() - before, 0);
    }
}

#[test]
fn no_prediction_allocates_of_a_plan_or_of_a_change() {
    let trace = realistic_trace(3, 800);
    let lineage = Lineage::of(&trace);
    let link = Link::symmetric(2e10, 10_000);
    let budget_bytes = lineage.keep_all_peak_bytes() * 7 / 10;
    let problem =
        Problem { trace: &trace, lineage: &lineage, tiers: link.into(), budget_bytes, actions: ActionSet::ALL };
    for policy in ["capuchin", "dtr"] {
        let planned = plan(problem, baseline(policy, 0).expect("it is in the list").as_mut());
        let mut timeline = Timeline::new(&trace, &lineage, link);
        let changes = |timeline: &mut Timeline<'_>| {
            for (id, window) in (0..).map(WindowId).zip(lineage.windows()).step_by(7) {
                let evicted = if window.recomputable { Action::Recompute } else { Action::Swap };
                let action = if planned.plan.action(id) == Action::Keep { evicted } else { Action::Keep };
                timeline.predict_changes(&[(id, action)]);
            }
        };
        timeline.rebase(&planned.plan, budget_bytes);
        changes(&mut timeline);
        let before = ALLOCATIONS.get();
        assert_eq!(timeline.predict(&planned.plan, budget_bytes), planned.prediction);
        timeline.rebase(&planned.plan, budget_bytes);
        changes(&mut timeline);
        assert_eq!(ALLOCATIONS.get() - before, 0, "{policy}");
    }
}

#[test]
fn no_decision_of_a_baseline_allocates() {
    let mut decisions = 0;
    for seed in 0..40 {
        let trace = support::random_trace::random_trace(&mut support::draw::Draw::new(seed), 100);
        let lineage = Lineage::of(&trace);
        let budget_bytes = lineage.keep_all_peak_bytes() / 2;
        let (tiers, actions) = (Link::symmetric(1e10, 100).into(), ActionSet::ALL);
        let problem = Problem { trace: &trace, lineage: &lineage, tiers, budget_bytes, actions };
        for name in BASELINES {
            let mut policy = baseline(name, seed).expect("every name in the list is known");
            let mut sweep = Sweep::new(problem, policy.open(&problem));
            while let Some(pressure) = sweep.pressure() {
                let before = ALLOCATIONS.get();
                let choice = policy.choose(&pressure);
                assert_eq!(ALLOCATIONS.get() - before, 0, "{name}");
                decisions += 1;
                match choice {
                    Some(choice) => sweep.take(choice),
                    None => sweep.give_up(),
                }
            }
        }
    }
    assert!(decisions > 1_000, "{decisions} decisions");
}
