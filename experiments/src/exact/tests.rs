//! Against brute force: on small random traces every plan there is, and on chains what theory says of them.

use std::time::Duration;

use plimsoll_runtime::lineage::WindowId;
use plimsoll_runtime::trace::{Access, AccessMode, Class, Operator, Phase, Storage, StorageId};
use plimsoll_runtime::{Action, ActionSet, Lineage, Link, Plan, Problem, Timeline, Trace};

use super::program::{Program, choose_cuts};
use super::{Solved, solve};
use crate::highs::{Answer, Highs, Solver};
use crate::support::draw::Draw;
use crate::support::random_trace::random_trace;

const SETS: [ActionSet; 3] = [ActionSet::RECOMPUTE, ActionSet::SWAP, ActionSet::ALL];

fn highs() -> Highs {
    Highs::find().unwrap_or_else(|error| panic!("{error}"))
}

fn solved(highs: &Highs, problem: Problem<'_>) -> Solved {
    solve(highs, problem, Duration::from_secs(300), &|_| true).unwrap()
}

/// The actions that each window may take, the windows that may take but one being left out.
fn choices(problem: &Problem<'_>) -> Vec<(WindowId, Vec<Action>)> {
    let windows = (0..).map(WindowId).zip(problem.lineage.windows());
    let choices = windows.map(|(id, window)| {
        let mut actions = vec![Action::Keep];
        actions.extend(problem.actions.swap.then_some(Action::Swap));
        actions.extend((problem.actions.recompute && window.recomputable).then_some(Action::Recompute));
        (id, actions)
    });
    choices.filter(|(_, actions)| actions.len() > 1).collect()
}

/// The least makespan of any plan that fits, by trying them all; none where none fits.
fn brute_force(problem: &Problem<'_>) -> Option<u64> {
    let choices = choices(problem);
    let mut timeline = Timeline::new(problem.trace, problem.lineage, problem.tiers);
    let mut plan = Plan::keep_all(problem.lineage.windows().len());
    let count: usize = choices.iter().map(|(_, actions)| actions.len()).product();
    let makespans = (0..count).filter_map(|mut number| {
        for (id, actions) in &choices {
            plan.set(*id, actions[number % actions.len()]);
            number /= actions.len();
        }
        let prediction = timeline.predict(&plan, problem.budget_bytes);
        prediction.fits().then_some(prediction.makespan_ns)
    });
    makespans.min()
}

/// Calls `check` with `count` problems on random traces that brute force can solve and where keep-all does not fit.
fn for_random_problems(count: usize, mut check: impl FnMut(u64, &Problem<'_>)) {
    let mut found = 0;
    for seed in 0.. {
        let mut draw = Draw::new(seed);
        let operators_max = draw.within(4, 14);
        let trace = random_trace(&mut draw, operators_max);
        let lineage = Lineage::of(&trace);
        let peak = lineage.keep_all_peak_bytes();
        let least = *lineage.keep_all_bytes().last().expect("there is the iteration's end");
        let mut link = Link::symmetric(draw.pick(&[1e8, 1e9, 2e10, 2e11]), draw.pick(&[0, 300]));
        link.contention_ns_per_byte = draw.pick(&[0.0, 0.0, 0.01]);
        link.contention_each_ns = draw.pick(&[0, 0, 30]);
        let problem = Problem {
            trace: &trace,
            lineage: &lineage,
            tiers: link.into(),
            budget_bytes: least + draw.below((peak - least).max(1)),
            actions: draw.pick(&SETS),
        };
        let plans: f64 = choices(&problem).iter().map(|(_, actions)| actions.len() as f64).product();
        if problem.budget_bytes < peak && (4.0..=2_000.0).contains(&plans) {
            check(seed, &problem);
            found += 1;
            if found == count {
                return;
            }
        }
    }
}

#[test]
fn the_best_plan_is_that_of_brute_force() {
    let highs = highs();
    let (mut fitting, mut costly) = (0, 0);
    for_random_problems(400, |seed, problem| {
        let best = brute_force(problem);
        let solved = solved(&highs, *problem);
        match best {
            Some(best_ns) => {
                let found = solved.planned.prediction;
                assert!(solved.planned.fits(), "seed {seed}: a plan fits, and none was found");
                assert_eq!(found.makespan_ns, best_ns, "seed {seed}: {:?}", solved.proof);
                assert_eq!(solved.proof.lower_bound_ns, Some(best_ns), "seed {seed}");
                assert_eq!(solved.proof.gap, Some(0.0), "seed {seed}");
                fitting += 1;
                costly += usize::from(best_ns > problem.lineage.keep_all_makespan_ns());
            }
            None => {
                assert!(!solved.planned.fits(), "seed {seed}: brute force finds no such plan");
                assert_eq!(solved.proof.lower_bound_ns, None, "seed {seed}: no plan fits, and it is not proven");
            }
        }
    });
    assert!(fitting >= 150 && costly >= 100, "the traces test little: {fitting} fit, {costly} at a cost");
}

#[test]
fn no_plan_undercuts_the_program_however_few_its_cuts() {
    let highs = highs();
    // Per action set: problems, bounds that are the optimum, bounds that see nine tenths of the optimum's delay.
    let mut tight = SETS.map(|_| [0; 3]);
    for_random_problems(300, |seed, problem| {
        let best = brute_force(problem);
        for (cuts_max, whole) in [(1, true), (3, true), (usize::MAX, false), (usize::MAX, true)] {
            let program = Program::new(problem, &choose_cuts(problem, cuts_max));
            let answer = Solver::new(&highs, &program.model, whole).unwrap().solve(Duration::MAX, &|_| true).unwrap();
            match (answer, best) {
                (Answer::Infeasible, best) => assert_eq!(best, None, "seed {seed}, {cuts_max} cuts"),
                (Answer::Bounded { bound, .. }, Some(best_ns)) => {
                    let bound_ns = program.makespan_ns(bound);
                    assert!(bound_ns <= best_ns, "seed {seed}, {cuts_max} cuts: {bound_ns} > {best_ns}");
                    if whole && cuts_max == usize::MAX {
                        let set = SETS.iter().position(|set| *set == problem.actions).expect("one of the sets");
                        let keep_all_ns = problem.lineage.keep_all_makespan_ns();
                        let close = 10 * (bound_ns - keep_all_ns) >= 9 * (best_ns - keep_all_ns);
                        tight[set][0] += 1;
                        tight[set][1] += usize::from(bound_ns == best_ns);
                        tight[set][2] += usize::from(close);
                    }
                }
                (Answer::Bounded { .. }, None) => {}
            }
        }
    });
    eprintln!("bounds, those that are the optimum, and those that are close, by action set: {tight:?}");
    // Keep/recompute leaves out reruns' own bytes and little else; copies wait for more than channels.
    for ((set, [bounds, optimal, close]), least) in SETS.iter().zip(tight).zip([75, 10, 10]) {
        assert!(bounds >= 30 && 100 * optimal >= least * bounds, "{set:?}: {optimal} of {bounds} are the optimum");
        assert!(2 * close >= bounds, "{set:?}: {close} of {bounds} bounds are close");
    }
}

/// Bytes and cost of every node of a chain.
const UNIT_BYTES: u64 = 1 << 16;
const UNIT_NS: u64 = 1_000;

/// Checkmate's linear graph: `length` forward nodes, each reading the one before, and a backward node for each, reading
/// the gradient after it and the activation before it. All are of unit cost and unit memory.
fn chain(length: usize) -> Trace {
    let unit = |locked: bool| Storage {
        bytes: UNIT_BYTES,
        class: Class::Activation,
        locked: locked.then(|| "the chain's input".to_owned()),
    };
    let operator = |phase, reads: Vec<usize>, creates: usize, frees: Vec<usize>| Operator {
        name: 0,
        phase,
        cost_ns: UNIT_NS,
        spread_ns: 0,
        gap_ns: 0,
        workspace_bytes: 0,
        accesses: reads
            .into_iter()
            .map(|storage| Access { storage: StorageId(storage as u32), mode: AccessMode::Read })
            .collect(),
        creates: vec![StorageId(creates as u32)],
        frees: frees.into_iter().map(|storage| StorageId(storage as u32)).collect(),
        not_replayable: None,
    };
    // Storage 0 is the input, 1..=length are activations, and the gradients follow.
    let mut operators: Vec<Operator> =
        (1..=length).map(|node| operator(Phase::Forward, vec![node - 1], node, vec![])).collect();
    for back in 0..length {
        let (node, gradient) = (length - back, length + 1 + back);
        let after = if back == 0 { node } else { gradient - 1 };
        operators.push(operator(
            Phase::Backward,
            vec![after, node - 1],
            gradient,
            if back == 0 { vec![node] } else { vec![gradient - 1, node] },
        ));
    }
    let trace = Trace {
        workload: "chain".into(),
        family: "chain".into(),
        device: "none".into(),
        recorded_iterations: 1,
        unseen_bytes: 0,
        tail_ns: 0,
        makespan_ns: 0,
        peak_bytes: 0,
        names: vec!["node".into()],
        storages: (0..=2 * length).map(|storage| unit(storage == 0)).collect(),
        initial_storages: 1,
        operators,
        carried: Vec::new(),
    };
    trace.check().expect("chains are lawful");
    trace
}

/// Reruns in the best plan for a chain under a budget of so many units; none where no plan fits.
fn chain_reruns(highs: &Highs, length: usize, budget_units: u64) -> Option<u64> {
    let trace = chain(length);
    let lineage = Lineage::of(&trace);
    let problem = Problem {
        trace: &trace,
        lineage: &lineage,
        tiers: Link::symmetric(1e9, 0).into(),
        budget_bytes: budget_units * UNIT_BYTES,
        actions: ActionSet::RECOMPUTE,
    };
    let solved = solved(highs, problem);
    assert_eq!(brute_force(&problem), solved.proof.lower_bound_ns, "chain of {length} in {budget_units}");
    let delay_ns = solved.proof.lower_bound_ns? - lineage.keep_all_makespan_ns();
    Some(delay_ns / UNIT_NS)
}

/// The least number of forward steps that reverse a chain of `steps` nodes with room for `slots` of its values besides
/// the input and the one at work, the first forward pass included (Griewank and Walther, *Algorithm 799: Revolve*, ACM
/// TOMS 2000): keep the value at a split, reverse what lies behind it, then what lies before it.
fn steps_to_reverse(steps: u64, slots: u64) -> u64 {
    match (steps, slots) {
        (0 | 1, _) => 0,
        (_, 0) => steps * (steps - 1) / 2,
        _ => {
            let split_at = |split| split + steps_to_reverse(steps - split, slots - 1) + steps_to_reverse(split, slots);
            (1..steps).map(split_at).min().expect("there is a split")
        }
    }
}

#[test]
fn chains_are_reversed_in_as_few_reruns_as_theory_says() {
    let highs = highs();
    // From 10 nodes on, retaining what is used soonest costs a rerun that a free choice would save.
    for length in 3..=9 {
        assert_eq!(chain_reruns(&highs, length as usize, 3), None, "chain of {length} in 3 units");
        for slots in 0..length - 1 {
            // Besides: the input, the gradient, and what a rerun reads and makes.
            let reruns = chain_reruns(&highs, length as usize, 4 + slots);
            let expected = steps_to_reverse(length, slots) - (length - 1);
            assert_eq!(reruns, Some(expected), "chain of {length} with {slots} slots");
        }
    }
}
