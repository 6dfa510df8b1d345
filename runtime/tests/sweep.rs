//! The promise: a sweep that asks whether to wait changes nothing else, and says what it is about.

mod support;

use plimsoll_runtime::baselines::baseline;
use plimsoll_runtime::observation::{FEATURE_TABLE, Pressure};
use plimsoll_runtime::{Choice, Plan, Policy, Problem, Sweep, plan};
use support::problems::for_random_problems;

/// A baseline that is asked where something would have to wait for room, and waits.
struct Asked {
    inner: Box<dyn Policy + Send>,
    waits: usize,
}

impl Asked {
    fn new(name: &str) -> Self {
        Asked { inner: baseline(name, 0).unwrap(), waits: 0 }
    }
}

impl Policy for Asked {
    fn open(&mut self, problem: &Problem<'_>) -> Plan {
        self.inner.open(problem)
    }

    fn weighs_waiting(&self) -> bool {
        true
    }

    fn choose(&mut self, pressure: &Pressure<'_>) -> Option<Choice> {
        let Some(waiting) = pressure.waiting() else { return self.inner.choose(pressure) };
        self.waits += 1;
        Some(waiting)
    }
}

#[test]
fn who_always_waits_makes_the_plan_of_a_sweep_that_does_not_ask() {
    let mut waits = 0;
    for_random_problems(400, 80, |seed, problem| {
        for name in ["cheapest", "dtr-swap", "largest"] {
            let mut asked = Asked::new(name);
            let with = plan(*problem, &mut asked);
            let without = plan(*problem, baseline(name, 0).unwrap().as_mut());
            assert_eq!((with.plan, with.prediction), (without.plan, without.prediction), "seed {seed}: {name}");
            assert_eq!(with.decisions, without.decisions, "seed {seed}: {name}: waiting is no eviction");
            waits += asked.waits;
        }
    });
    assert!(waits > 150, "{waits} times something had to wait");
}

#[test]
fn a_row_for_waiting_stands_behind_the_candidates_and_says_what_it_costs() {
    let column = |name: &str| FEATURE_TABLE.iter().position(|feature| feature.name == name).unwrap();
    let [is_wait, may_wait, stall] = ["is_wait", "may_wait", "wait_stall"].map(column);
    let (mut soft, mut hard, mut stalled) = (0, 0, 0);
    for_random_problems(400, 80, |seed, problem| {
        let mut policy = Asked::new("cheapest");
        let mut sweep = Sweep::weighing_waits(*problem, Plan::keep_all(problem.lineage.windows().len()));
        while let Some(pressure) = sweep.pressure() {
            let candidates = pressure.candidates.len();
            let may = f32::from(u8::from(pressure.wait.is_some()));
            for row in 0..candidates {
                assert_eq!((pressure.row(row)[is_wait], pressure.row(row)[may_wait]), (0.0, may), "seed {seed}");
            }
            match (pressure.wait, pressure.waiting()) {
                (Some(wait), Some(waiting)) => {
                    let row = pressure.row(waiting.candidate);
                    assert_eq!((waiting.candidate, row[is_wait], row[may_wait]), (candidates, 1.0, 1.0), "seed {seed}");
                    assert_eq!(row[stall] > 0.0, wait.stall_ns > 0, "seed {seed}");
                    soft += 1;
                    stalled += usize::from(wait.stall_ns > 0);
                }
                (None, None) => hard += 1,
                other => panic!("seed {seed}: {other:?}"),
            }
            match policy.choose(&pressure) {
                Some(choice) => sweep.take(choice),
                None => sweep.give_up(),
            }
        }
    });
    assert!(
        soft > 50 && hard > 200 && stalled > 20,
        "{soft} points where it may wait, {hard} others, {stalled} stalls"
    );
}
