//! The promise: a sweep that asks whether to wait changes nothing else, and says what it is about.

mod support;

use plimsoll_runtime::baselines::baseline;
use plimsoll_runtime::lineage::WindowId;
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

/// A baseline that looks at few candidates, and at which.
struct Glancing {
    inner: Box<dyn Policy + Send>,
    seen: Vec<Vec<WindowId>>,
}

/// How many it looks at.
const FEW: usize = 3;

impl Policy for Glancing {
    fn looks_at(&self) -> usize {
        FEW
    }

    fn choose(&mut self, pressure: &Pressure<'_>) -> Option<Choice> {
        self.seen.push(pressure.candidates.iter().map(|candidate| candidate.window).collect());
        self.inner.choose(pressure)
    }
}

#[test]
fn who_looks_at_few_candidates_sees_others_each_time_and_holds_about_as_many_budgets() {
    let (mut others, mut held, mut held_by_all) = (0, 0, 0);
    for_random_problems(400, 80, |seed, problem| {
        let all = plan(*problem, baseline("largest", 0).unwrap().as_mut());
        let mut glancing = Glancing { inner: baseline("largest", 0).unwrap(), seen: Vec::new() };
        let few = plan(*problem, &mut glancing);
        assert!(glancing.seen.iter().all(|seen| (1..=FEW).contains(&seen.len())), "seed {seed}: {:?}", glancing.seen);
        let is_other = |pair: &&[Vec<WindowId>]| pair[0].iter().all(|window| !pair[1].contains(window));
        others += glancing.seen.windows(2).filter(is_other).count();
        held += usize::from(few.fits());
        held_by_all += usize::from(all.fits());
    });
    assert!(others > 100, "{others} times others were seen");
    assert!(20 * held > 19 * held_by_all, "{held} budgets held, {held_by_all} by who looks at all");
}
