//! A network that knows nothing learns to plan: after seconds of training it beats chance, and evicting everything, on
//! instances that it has not seen.

use std::sync::Arc;

use plimsoll_agent::{Learner, LearnsFrom, PolicyIteration, PolicyIterationConfig, greedy_return};
use plimsoll_env::reward::plan_reward;
use plimsoll_env::{Domain, Instance, PredictedEnvironment};
use plimsoll_runtime::baselines::Random;
use plimsoll_runtime::{Action, Plan, Policy, Problem, plan};
use plimsoll_tests::{Recorded, domain, one_at_a_time, plan_by, shipped_workload};

/// How much more of reward a learned policy has to earn than either: some 55 % less overhead.
const MARGIN: f64 = 0.8;
/// Instances to judge by, none of which training draws.
const UNSEEN: std::ops::Range<u64> = 0x5eed_0000_0000..0x5eed_0000_0020;
const STEPS_MAX: usize = 4096;

/// Evicts whatever is idle: by swapping where that is allowed.
struct KeepNothing;

impl Policy for KeepNothing {
    fn open(&mut self, problem: &Problem<'_>) -> Plan {
        let swap = problem.actions.swap;
        plan_by(problem.lineage, |recomputable| match (swap, recomputable) {
            (true, _) => Action::Swap,
            (false, true) => Action::Recompute,
            (false, false) => Action::Keep,
        })
    }
}

/// The mean reward of a policy on the unseen instances.
fn mean_reward(domain: &Domain, mut make: impl FnMut(u64) -> Box<dyn Policy>) -> f64 {
    let reward = |seed: u64| {
        let (instance, reference_overhead): (Instance, f64) = domain.draw(seed);
        let prediction = plan(instance.problem(), make(seed).as_mut()).prediction;
        let overhead = instance.overhead(&prediction);
        f64::from(plan_reward(overhead, reference_overhead, prediction.over_budget_bytes, instance.budget_bytes))
    };
    UNSEEN.map(reward).sum::<f64>() / UNSEEN.count() as f64
}

#[test]
fn a_tiny_policy_beats_chance_and_keeping_nothing() {
    let _running = one_at_a_time();
    let traces = ["gpt-tiny", "gpt-tiny-fused"].map(|name| Arc::new(Recorded::of(&shipped_workload(name), 1).trace));
    let domain = domain(traces.into(), STEPS_MAX);
    let config = PolicyIterationConfig { updates: 25, hidden: 16, learning_rate: 1e-2, ..Default::default() };
    let mut learner = PolicyIteration::new(config, 3).unwrap();
    let environment = || PredictedEnvironment::new([domain.clone()].into());
    let mut environments = [environment(), environment()];
    let seeds: Vec<u64> = UNSEEN.collect();
    let judge =
        |learner: &PolicyIteration| greedy_return(&learner.weights().unwrap(), &mut [environment()], &seeds).unwrap();
    let untrained = judge(&learner);
    while !learner.is_finished() {
        learner.update(&mut environments).unwrap();
    }
    let learned = judge(&learner);
    let random = mean_reward(&domain, |seed| Box::new(Random::new(seed)));
    let keep_nothing = mean_reward(&domain, |_| Box::new(KeepNothing));
    println!("learned {learned:.3}, untrained {untrained:.3}, random {random:.3}, keep-nothing {keep_nothing:.3}");
    assert!(learned > random + MARGIN, "{learned} is hardly better than chance, {random}");
    assert!(learned > keep_nothing + MARGIN, "{learned} is hardly better than keeping nothing, {keep_nothing}");
}
