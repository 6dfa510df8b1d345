//! The promise: whatever the plan and the budget, the schedule restores the right bytes of every storage before they
//! are used, and the predicted peak is the peak.

mod support;

use plimsoll_runtime::baselines::{BASELINES, baseline};
use plimsoll_runtime::hardware::{FileTier, Tier};
use plimsoll_runtime::schedule::Instruction;
use plimsoll_runtime::{
    Action, ActionSet, Choice, Lineage, Link, Plan, Policy, Prediction, Problem, SlowTiers, Sweep, Timeline, Trace,
};
use support::draw::Draw;
use support::interpreter::{Carried, carry_out};
use support::oracle;
use support::random_edges::random_edges;
use support::random_trace::random_trace;

const CASES: u64 = 6_000;
const OPERATORS_MAX: u64 = 40;

fn random_link(draw: &mut Draw) -> Link {
    let bytes_per_s = draw.pick(&[1e9, 1e10, 1e11, 1e13]);
    Link {
        offload_bytes_per_s: bytes_per_s,
        prefetch_bytes_per_s: bytes_per_s * draw.pick(&[0.5, 1.0, 3.0]),
        latency_ns: draw.pick(&[0, 10, 2_000]),
        each_ns: draw.pick(&[0, 0, 500]),
        contention_each_ns: draw.pick(&[0, 0, 300]),
        contention_ns_per_byte: draw.pick(&[0.0, 0.2]),
    }
}

/// Tiers of every kind: the host alone, a host that is soon full, a file behind it, nothing at all.
fn random_tiers(draw: &mut Draw, lineage: &Lineage) -> SlowTiers {
    let host = random_link(draw);
    let limit_bytes =
        |draw: &mut Draw| lineage.keep_all_peak_bytes() * draw.pick(&[20, 60, 250]) * draw.below(100) / 10_000;
    match draw.below(4) {
        0 => SlowTiers { host, host_limit_bytes: limit_bytes(draw), file: None },
        1 => {
            let limits = [u64::MAX, limit_bytes(draw)];
            let file = FileTier { link: random_link(draw), limit_bytes: draw.pick(&limits) };
            SlowTiers { host, host_limit_bytes: limit_bytes(draw), file: Some(file) }
        }
        _ => host.into(),
    }
}

/// Any legal action for every window.
fn random_plan(draw: &mut Draw, lineage: &Lineage) -> Plan {
    let mut plan = Plan::keep_all(lineage.windows().len());
    let kept_percent = draw.pick(&[0, 30, 70]);
    for (index, window) in (0..).zip(lineage.windows()) {
        let evicted = if window.recomputable && draw.chance(60) { Action::Recompute } else { Action::Swap };
        let action = if draw.chance(kept_percent) { Action::Keep } else { evicted };
        plan.set(plimsoll_runtime::lineage::WindowId(index), action);
    }
    plan
}

/// Budgets from far too little to more than enough.
fn random_budget(draw: &mut Draw, lineage: &Lineage) -> u64 {
    match draw.below(4) {
        0 => u64::MAX,
        _ => lineage.keep_all_peak_bytes() * draw.within(10, 110) / 100,
    }
}

/// Everything that holds for any plan under any budget.
fn check_plan(trace: &Trace, lineage: &Lineage, tiers: SlowTiers, plan: &Plan, budget_bytes: u64) -> Prediction {
    let mut timeline = Timeline::new(trace, lineage, tiers);
    let (schedule, prediction) = timeline.schedule(plan, budget_bytes);
    let (expected, steps) = oracle::predict(trace, lineage, tiers, plan, budget_bytes);
    assert_eq!(prediction, expected, "the simple timeline");
    let differs = schedule.steps().iter().zip(&steps).position(|(step, expected)| step != expected);
    assert_eq!((differs, schedule.steps().len()), (None, steps.len()), "the simple timeline");
    let carried = carry_out(trace, lineage.edges(), &schedule);
    let mut read_out = schedule.clone();
    timeline.let_read_out(&mut read_out);
    let later = carry_out(trace, lineage.edges(), &read_out);
    // What goes to a slow tier later is there for less.
    assert_eq!(
        Carried { slow_peak_bytes: carried.slow_peak_bytes, held_peak_bytes: carried.held_peak_bytes, ..later },
        carried,
        "what makes way for what is read out"
    );
    assert!(later.slow_peak_bytes <= carried.slow_peak_bytes, "{later:?} {carried:?}");
    assert!(later.held_peak_bytes <= carried.held_peak_bytes, "{later:?} {carried:?}");
    assert_eq!(carried.peak_bytes, prediction.peak_bytes, "peak");
    assert_eq!(carried.rerun_ns, prediction.recompute_ns, "time of reruns");
    assert_eq!(carried.offloaded_bytes, prediction.offloaded_bytes, "offloaded");
    assert_eq!(carried.prefetched_bytes, prediction.prefetched_bytes, "prefetched");
    assert_eq!(carried.slow_peak_bytes, [prediction.host_peak_bytes, prediction.file_peak_bytes], "slow tiers");
    for tier in [Tier::Host, Tier::File] {
        assert!(carried.held_peak_bytes[tier as usize] <= tiers.limit_bytes(tier), "{tier:?} limit");
    }
    assert_eq!(prediction.over_budget_bytes, prediction.peak_bytes.saturating_sub(budget_bytes), "over budget");
    let without_evictions = lineage.keep_all_makespan_ns();
    assert_eq!(
        prediction.makespan_ns,
        without_evictions + prediction.stall_ns + prediction.contention_ns + prediction.recompute_ns,
        "makespan"
    );
    assert_eq!(timeline.predict(plan, budget_bytes), prediction, "predicting again");
    prediction
}

#[test]
fn any_plan_under_any_budget_is_lawful_and_its_peak_exact() {
    for seed in 0..CASES {
        let draw = &mut Draw::new(seed);
        let trace = random_trace(draw, OPERATORS_MAX);
        let lineage = Lineage::between(&trace, random_edges(draw, &trace));
        let (tiers, budget_bytes) = (random_tiers(draw, &lineage), random_budget(draw, &lineage));
        let plan = random_plan(draw, &lineage);
        noting(seed, || check_plan(&trace, &lineage, tiers, &plan, budget_bytes));
    }
}

#[test]
fn the_drawn_cases_need_every_instruction_often() {
    let mut seen = [0u64; 12];
    for seed in 0..CASES / 10 {
        let draw = &mut Draw::new(seed);
        let trace = random_trace(draw, OPERATORS_MAX);
        let lineage = Lineage::between(&trace, random_edges(draw, &trace));
        let (tiers, budget_bytes) = (random_tiers(draw, &lineage), random_budget(draw, &lineage));
        let plan = random_plan(draw, &lineage);
        let (schedule, _) = Timeline::new(&trace, &lineage, tiers).schedule(&plan, budget_bytes);
        for (_, instruction) in schedule.steps() {
            let kind = match instruction {
                Instruction::LeaveAway { .. } => 11,
                Instruction::Offload { .. } => 0,
                Instruction::FinishOffload(_) => 1,
                Instruction::Recall(_) => 2,
                Instruction::Prefetch { .. } => 3,
                Instruction::FinishPrefetch(_) => 4,
                Instruction::Discard(_) => 5,
                Instruction::Drop(_) => 6,
                Instruction::Rerun(_) => 7,
                Instruction::Release(_) => 8,
            };
            seen[kind] += 1;
            seen[9] += u64::from(matches!(instruction, Instruction::Offload { joins: true, .. }));
            seen[10] += u64::from(matches!(instruction, Instruction::Prefetch { joins: true, .. }));
        }
    }
    assert!(seen.iter().all(|&count| count > 100), "{seen:?}");
}

#[test]
fn keeping_everything_costs_what_the_lineage_says() {
    for seed in 0..CASES / 10 {
        let draw = &mut Draw::new(seed);
        let trace = random_trace(draw, OPERATORS_MAX);
        let lineage = Lineage::of(&trace);
        let plan = Plan::keep_all(lineage.windows().len());
        let prediction = Timeline::new(&trace, &lineage, random_tiers(draw, &lineage)).predict(&plan, u64::MAX);
        assert_eq!(prediction.peak_bytes, lineage.keep_all_peak_bytes(), "seed {seed}");
        assert_eq!(prediction.makespan_ns, lineage.keep_all_makespan_ns(), "seed {seed}");
    }
}

/// Checks every observation that the policy inside is shown, and every choice that it makes.
struct Watched<'a> {
    policy: Box<dyn Policy + Send>,
    problem: Problem<'a>,
    chosen: Vec<Action>,
}

impl Policy for Watched<'_> {
    fn reads_features(&self) -> bool {
        true
    }

    fn open(&mut self, problem: &Problem<'_>) -> Plan {
        let plan = self.policy.open(problem);
        self.chosen = plan.actions().to_vec();
        plan
    }

    fn choose(&mut self, pressure: &plimsoll_runtime::observation::Pressure<'_>) -> Option<Choice> {
        let Problem { lineage, actions, .. } = self.problem;
        assert!(pressure.deficit_bytes > 0 && !pressure.candidates.is_empty());
        assert!(pressure.features.iter().all(|feature| feature.is_finite()));
        for candidate in pressure.candidates {
            let window = lineage.window(candidate.window);
            assert!(window.start as usize <= pressure.operator && pressure.operator < window.end as usize);
            // A swap for which there was no room is offered again, to be recomputed.
            match self.chosen[candidate.window.index()] {
                Action::Keep => {}
                Action::Swap => assert!(!candidate.can_swap && candidate.can_recompute, "swapped twice"),
                Action::Recompute => panic!("offered again"),
            }
            assert!(candidate.can_swap || candidate.can_recompute);
            assert!(!candidate.can_swap || actions.swap);
            assert!(!candidate.can_recompute || actions.recompute && window.recomputable);
        }
        let choice = self.policy.choose(pressure)?;
        self.chosen[pressure.candidates[choice.candidate].window.index()] = choice.action;
        Some(choice)
    }
}

#[test]
fn every_baseline_plans_lawfully_at_any_budget() {
    for seed in 0..CASES / 4 {
        let draw = &mut Draw::new(seed);
        let trace = random_trace(draw, OPERATORS_MAX);
        let lineage = Lineage::of(&trace);
        let (swap, recompute) = draw.pick(&[(true, true), (true, true), (true, false), (false, true)]);
        let actions = ActionSet { swap, recompute };
        let (tiers, budget_bytes) = (random_tiers(draw, &lineage), random_budget(draw, &lineage));
        let problem = Problem { trace: &trace, lineage: &lineage, tiers, budget_bytes, actions };
        for name in BASELINES {
            let policy = baseline(name, seed).expect("every name in the list is known");
            let mut policy = Watched { policy, problem, chosen: Vec::new() };
            noting(seed, || {
                let planned = plimsoll_runtime::plan(problem, &mut policy);
                let prediction = check_plan(&trace, &lineage, tiers, &planned.plan, budget_bytes);
                assert_eq!(prediction, planned.prediction, "{name}");
                assert_eq!(planned.fits(), prediction.peak_bytes <= budget_bytes, "{name}");
                assert!(planned.plan.actions().iter().all(|&action| actions.allows(action)), "{name}");
            });
        }
    }
}

#[test]
fn a_sweep_that_is_given_up_at_any_point_still_ends_in_a_lawful_plan() {
    for seed in 0..CASES / 4 {
        let draw = &mut Draw::new(seed);
        let trace = random_trace(draw, OPERATORS_MAX);
        let lineage = Lineage::between(&trace, random_edges(draw, &trace));
        let (tiers, budget_bytes) = (random_tiers(draw, &lineage), random_budget(draw, &lineage));
        let problem = Problem { trace: &trace, lineage: &lineage, tiers, budget_bytes, actions: ActionSet::ALL };
        let mut sweep = Sweep::new(problem, random_plan(draw, &lineage));
        let patience = draw.below(8);
        while let Some(pressure) = sweep.pressure() {
            let choices: Vec<Choice> = pressure.choices().collect();
            if (sweep.decisions() as u64) < patience { sweep.take(draw.pick(&choices)) } else { sweep.give_up() }
        }
        let prediction = noting(seed, || check_plan(&trace, &lineage, tiers, sweep.plan(), budget_bytes));
        assert_eq!(prediction, sweep.prediction(), "seed {seed}");
    }
}

#[test]
fn every_pressure_point_of_a_long_sweep_is_that_of_a_sweep_that_starts_with_the_same_plan() {
    for seed in 0..CASES / 60 {
        let draw = &mut Draw::new(seed);
        let trace = random_trace(draw, 12 * OPERATORS_MAX);
        let lineage = Lineage::of(&trace);
        let budget_bytes = lineage.keep_all_peak_bytes() * draw.within(40, 90) / 100;
        let tiers = random_tiers(draw, &lineage);
        let problem = Problem { trace: &trace, lineage: &lineage, tiers, budget_bytes, actions: ActionSet::ALL };
        let mut sweep = Sweep::new(problem, Plan::keep_all(lineage.windows().len()));
        while let Some(pressure) = sweep.pressure() {
            if draw.chance(10) {
                let afresh = Sweep::new(problem, sweep.plan().clone());
                let expected = afresh.pressure().expect("the same plan is pressed at the same point");
                assert_eq!(pressure.operator, expected.operator, "seed {seed}");
                assert_eq!(pressure.deficit_bytes, expected.deficit_bytes, "seed {seed}");
                assert_eq!(pressure.candidates, expected.candidates, "seed {seed}");
                assert_eq!(pressure.features, expected.features, "seed {seed}");
            }
            let choices: Vec<Choice> = pressure.choices().collect();
            sweep.take(draw.pick(&choices));
        }
        let prediction = noting(seed, || check_plan(&trace, &lineage, tiers, sweep.plan(), budget_bytes));
        assert_eq!(prediction, sweep.prediction(), "seed {seed}");
    }
}

/// Names the seed of a case that fails.
fn noting<R>(seed: u64, case: impl FnOnce() -> R) -> R {
    struct Seed(u64);
    impl Drop for Seed {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("seed {}", self.0);
            }
        }
    }
    let _seed = Seed(seed);
    case()
}
