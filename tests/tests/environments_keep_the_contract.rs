//! Both environments keep one contract: seeded, masked, rewarded at the end, terminated apart from truncated.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use plimsoll_env::real::Rewards;
use plimsoll_env::reward::plan_reward;
use plimsoll_env::{
    Branching, Domain, Environment, Observation, PredictedEnvironment, StepResult, Taught, TaughtEnvironment,
    TorchEnvironment,
};
use plimsoll_runtime::observation::FEATURES;
use plimsoll_runtime::{Action, Choice};
use plimsoll_tests::{Recorded, build, domain, one_at_a_time, session, shipped_workload};

const STEPS_MAX: usize = 4096;
const SEEDS: std::ops::Range<u64> = 0..3;

fn choices(observation: &Observation) -> impl Iterator<Item = Choice> + '_ {
    let actions = Action::EVICTIONS;
    (0..observation.candidates())
        .flat_map(move |candidate| actions.map(|action| Choice { candidate, action }))
        .filter(|&choice| observation.allows(choice))
}

fn assert_well_formed(observation: &Observation) {
    assert!(observation.candidates() > 0, "an observation that asks for a choice is never empty");
    assert_eq!(observation.features.len(), observation.candidates() * FEATURES);
    assert!(observation.features.iter().all(|feature| feature.is_finite()));
    assert!(observation.action_mask.iter().all(|mask| mask.contains(&true)), "every candidate may be evicted somehow");
    assert!(!observation.allows(Choice { candidate: 0, action: Action::Keep }));
    assert!(!observation.allows(Choice { candidate: observation.candidates(), action: Action::Swap }));
}

/// Plays an episode, checking every step. `pick` chooses among as many lawful choices.
fn play<E: Environment>(environment: &mut E, seed: u64, pick: impl Fn(usize) -> usize) -> StepResult {
    let mut observation = reset(environment, seed);
    loop {
        assert_well_formed(&observation);
        let lawful: Vec<Choice> = choices(&observation).collect();
        let result = step(environment, lawful[pick(lawful.len())]);
        if result.terminated || result.truncated {
            return result;
        }
        assert_eq!(result.reward, 0.0, "rewards come at the end");
        observation = result.observation;
    }
}

fn reset<E: Environment>(environment: &mut E, seed: u64) -> Observation {
    environment.reset(seed).unwrap_or_else(|error| panic!("{error}"))
}

/// What every environment promises. `make` is told after how many steps an episode is truncated.
fn keeps_the_contract<E: Environment>(make: impl Fn(usize) -> E) {
    let mut environment = make(STEPS_MAX);
    for seed in SEEDS {
        let first = reset(&mut environment, seed);
        assert_eq!(first, reset(&mut environment, seed), "the same seed gives the same episode");

        for result in [play(&mut environment, seed, |_| 0), play(&mut environment, seed, |lawful| lawful - 1)] {
            assert!(result.terminated && !result.truncated);
            assert!(result.reward.is_finite() && result.reward != 0.0, "{}", result.reward);
            assert_eq!(result.observation.candidates(), 0, "nothing is left to choose");
        }
        let over = Choice { candidate: 0, action: Action::Swap };
        assert!(panics(|| environment.step(over)), "a step after the end");
    }
    let firsts: Vec<Observation> = SEEDS.map(|seed| reset(&mut environment, seed)).collect();
    assert!(firsts.iter().any(|first| *first != firsts[0]), "another seed gives another episode");

    let first = reset(&mut environment, 0);
    let masked = (0..first.candidates())
        .flat_map(|candidate| Action::EVICTIONS.map(|action| Choice { candidate, action }))
        .find(|&choice| !first.allows(choice));
    let unlawful = [
        masked,
        Some(Choice { candidate: 0, action: Action::Keep }),
        Some(Choice { candidate: first.candidates(), action: Action::Swap }),
    ];
    for choice in unlawful.into_iter().flatten() {
        reset(&mut environment, 0);
        assert!(panics(|| environment.step(choice)), "{choice:?} is not lawful");
    }
    // And it can be used again after that.
    assert!(play(&mut environment, 0, |_| 0).terminated);

    let mut short = make(1);
    let result = play(&mut short, 0, |_| 0);
    assert!(result.truncated && !result.terminated, "one step does not make a plan here");
    assert_eq!(result.reward, 0.0, "what is cut short is not rewarded");
    assert!(panics(|| short.step(Choice { candidate: 0, action: Action::Swap })), "a step after the truncation");
}

fn panics<T>(body: impl FnOnce() -> T) -> bool {
    catch_unwind(AssertUnwindSafe(|| drop(body()))).is_err()
}

#[test]
fn the_predicted_environment() {
    let _running = one_at_a_time();
    let traces: Vec<_> =
        ["gpt-tiny", "resnet-tiny"].map(|name| Arc::new(Recorded::of(&shipped_workload(name), 1).trace)).into();
    let make = |steps_max| PredictedEnvironment::new([domain(traces.clone(), steps_max)].into());
    keeps_the_contract(make);
    for seed in SEEDS {
        let rewards =
            [make(STEPS_MAX), make(STEPS_MAX)].map(|mut environment| play(&mut environment, seed, |_| 0).reward);
        assert_eq!(rewards[0].to_bits(), rewards[1].to_bits(), "the same choices give the same return");
    }
    for seed in SEEDS {
        goes_back_to_any_point(&mut make(STEPS_MAX), seed);
    }
}

/// Plays the last choice everywhere, waiting among them, then again from every point, after another way to the end.
fn goes_back_to_any_point<E: Branching>(environment: &mut E, seed: u64) {
    let first = |observation: &Observation| choices(observation).next().expect("some choice is lawful");
    let last = |observation: &Observation| choices(observation).last().expect("some choice is lawful");
    let mut observation = reset(environment, seed);
    let mut points = Vec::new();
    let reward = loop {
        points.push((environment.mark(), observation.clone()));
        let result = step(environment, last(&observation));
        if result.terminated {
            break result.reward;
        }
        observation = result.observation;
    };
    for (mark, seen) in &points {
        play_on(environment, mark, seen, first);
        let result = play_on(environment, mark, seen, last);
        assert_eq!(result.reward.to_bits(), reward.to_bits(), "the same choices from there give the same return");
    }
}

/// Plays from a point, at which the observation was `seen`, to the end.
fn play_on<E: Branching>(
    environment: &mut E,
    mark: &E::Mark,
    seen: &Observation,
    pick: impl Fn(&Observation) -> Choice,
) -> StepResult {
    environment.return_to(mark);
    let mut result = step(environment, pick(seen));
    while !result.terminated {
        result = step(environment, pick(&result.observation));
    }
    result
}

fn step<E: Environment>(environment: &mut E, choice: Choice) -> StepResult {
    environment.step(choice).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn the_taught_environment() {
    let _running = one_at_a_time();
    let traces: Vec<_> =
        ["gpt-tiny", "resnet-tiny"].map(|name| Arc::new(Recorded::of(&shipped_workload(name), 1).trace)).into();
    let make = |steps_max| TaughtEnvironment::new(Arc::new([domain(traces.clone(), steps_max)]), 300);
    keeps_the_contract(make);
    let mut environment = make(STEPS_MAX);
    let (mut guided, mut unguided, mut lessons) = (0.0, 0.0, 0);
    for seed in 0..8 {
        unguided += play(&mut environment, seed, |_| 0).reward;
        let mut observation = reset(&mut environment, seed);
        guided += loop {
            let lesson = environment.lesson();
            assert_eq!(lesson.len(), observation.candidates());
            let right = choices(&observation).find(|choice| lesson[choice.candidate][slot(choice.action)]);
            let told = lesson.as_flattened().iter().filter(|right| **right).count();
            let lawful = choices(&observation).filter(|choice| lesson[choice.candidate][slot(choice.action)]).count();
            assert_eq!(told, lawful, "what a teacher does is lawful");
            lessons += usize::from(right.is_some());
            let choice = right.unwrap_or_else(|| choices(&observation).next().unwrap());
            let Ok(result) = environment.step(choice);
            if result.terminated {
                break result.reward;
            }
            observation = result.observation;
        };
    }
    assert!(lessons > 8, "{lessons} pressure points were taught");
    assert!(guided > unguided + 4.0, "guided {guided}, unguided {unguided}");
}

fn slot(action: Action) -> usize {
    usize::from(action == Action::Recompute)
}

#[test]
fn the_real_environment() {
    let _running = one_at_a_time();
    let make = |steps_max| {
        let workload = build(&shipped_workload("resnet-tiny"), 1);
        TorchEnvironment::new(session(), workload, domain(Vec::new(), steps_max), 1).unwrap()
    };
    keeps_the_contract(make);
    let mut environment = make(STEPS_MAX);
    assert!(environment.last_measurement().is_none());
    // The last choice is to wait, where that may be chosen.
    let earned = play(&mut environment, 0, |choices| choices - 1).reward;
    let measured = environment.last_measurement().expect("the episode has ended");
    assert_eq!(measured.reports.len(), 1);
    assert!(measured.reports[0].followed && measured.makespan_ns > 0);
    assert!(measured.losses.iter().all(|loss| loss.is_finite()));
    assert!(measured.peak_bytes < environment.trace().peak_bytes, "the plan saves bytes");
    let untouched = measured.untouched.as_ref().expect("it ran between untouched iterations");
    let overhead = measured.makespan_ns as f64 / untouched.makespan_ns as f64 - 1.0;
    let peak_bytes = measured.peak_bytes;

    let known = Domain { cost_noise: 0.0, ..domain(vec![Arc::new(environment.trace().clone())], STEPS_MAX) };
    let (instance, reference_overhead) = known.draw(0);
    let over_budget_bytes = peak_bytes.saturating_sub(instance.budget_bytes);
    let measured = plan_reward(overhead, reference_overhead, over_budget_bytes, instance.budget_bytes);
    assert_eq!(earned, measured, "what is earned is what was measured");
    let predicted = play(&mut PredictedEnvironment::new([known].into()), 0, |choices| choices - 1).reward;
    let rewards = Rewards { predicted: predicted.into(), measured: measured.into() };
    assert_eq!(environment.take_rewards(), [rewards], "both are told");
    assert_eq!(environment.take_rewards(), []);
}
