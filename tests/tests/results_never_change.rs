//! Whatever a plan does, losses and parameters are those of the untouched loop, bit for bit, and the peak is the
//! predicted one.

use plimsoll_env::workload::{ResnetArch, ResnetConfig, Workload, WorkloadConfig};
use plimsoll_runtime::Action;
use plimsoll_tests::budget::runtime;
use plimsoll_tests::{Awkward, Recorded, Stage, build, one_at_a_time, plan_by, random_plan, shipped_workload};
use tch::{Device, Kind, Tensor};

/// Planned iterations, after one that only matches the loop to its trace.
const PLANNED: usize = 6;
const PLANS: usize = 4;

/// Follows one plan after another on one loop, each without a budget or under a tight one, and compares every stage
/// with that of a loop that nothing touches.
fn no_plan_changes<W: Workload>(
    seed: u64,
    make: impl Fn() -> W,
    record: impl Fn() -> Recorded<W>,
    iterate: impl Fn(&mut W) -> f64,
) {
    let mut untouched = make();
    let mut stage = |iterations: usize| {
        let losses: Vec<f64> = (0..iterations).map(|_| iterate(&mut untouched)).collect();
        Stage::of(&losses, &untouched)
    };
    let mut expected = vec![stage(Recorded::<W>::ITERATIONS)];
    expected.extend((0..PLANS).map(|_| stage(1 + PLANNED)));
    // Its bytes would count.
    drop(untouched);

    let mut recorded = record();
    Stage::of(&recorded.losses, &recorded.workload).assert_same(&expected[0], "while recording");
    let name = recorded.trace.workload.clone();
    let half = recorded.trace.peak_bytes / 2;
    let greedy = |recomputable: bool| if recomputable { Action::Recompute } else { Action::Swap };
    let plans: [_; PLANS] = [
        ("random", random_plan(&recorded.lineage, seed)),
        ("random", random_plan(&recorded.lineage, seed + 1_000)),
        ("all recomputed", plan_by(&recorded.lineage, greedy)),
        ("all swapped", plan_by(&recorded.lineage, |_| Action::Swap)),
    ];
    for (index, (kind, plan)) in plans.iter().enumerate() {
        // Over the seeds every kind of plan meets both budgets.
        let budget_bytes = if (index as u64 + seed).is_multiple_of(2) { u64::MAX } else { half };
        let what = format!("{name}, seed {seed}, {kind}, {}", if budget_bytes == half { "tight" } else { "free" });
        let (prediction, reports) = recorded.follow(plan, budget_bytes, 1 + PLANNED, |workload, _| iterate(workload));
        for report in &reports {
            assert_eq!(report.deviation, None, "{what}");
        }
        for report in &reports[1..] {
            assert!(report.followed, "{what}");
            let (predicted, measured) = (prediction.peak_bytes, report.peak_bytes);
            assert!(measured.abs_diff(predicted) <= predicted / 100, "{what}: peak {measured}, predicted {predicted}");
        }
        let exact = reports[1..].iter().filter(|report| report.peak_bytes == prediction.peak_bytes).count();
        let counts = plan.counts();
        println!(
            "{what}: {} swapped, {} recomputed, {} reruns, peak {} of {} bytes, predicted exactly in {exact}/{PLANNED}",
            counts.swap, counts.recompute, reports[1].reruns, prediction.peak_bytes, recorded.trace.peak_bytes,
        );
        let planned = &recorded.losses[recorded.losses.len() - reports.len()..];
        Stage::of(planned, &recorded.workload).assert_same(&expected[1 + index], &what);
    }
}

fn never_changes(config: &WorkloadConfig, seeds: std::ops::Range<u64>) {
    let _running = one_at_a_time();
    for seed in seeds {
        let (make, record) = (|| build(config, seed), || Recorded::of(config, seed));
        no_plan_changes(seed, make, record, |workload| workload.iteration().unwrap());
    }
}

#[test]
fn of_a_transformer_with_dropout() {
    never_changes(&shipped_workload("gpt-tiny"), 0..4);
}

#[test]
fn of_a_transformer_with_fused_attention() {
    never_changes(&shipped_workload("gpt-tiny-fused"), 0..4);
}

#[test]
fn of_a_convolution_net_with_batch_norm() {
    never_changes(&shipped_workload("resnet-tiny"), 0..4);
}

#[test]
fn of_a_model_that_nobody_here_wrote() {
    let resnet18 = ResnetConfig {
        arch: ResnetArch::Resnet18,
        depth: None,
        width: None,
        classes: 4,
        image_size: 32,
        batch: 4,
        learning_rate: 0.01,
        momentum: 0.9,
    };
    never_changes(&WorkloadConfig::Resnet(resnet18), 0..2);
}

#[test]
fn of_a_loop_that_accumulates_clips_and_retains_its_graph() {
    let _running = one_at_a_time();
    for seed in 0..4 {
        no_plan_changes(seed, || Awkward::new(seed), || Recorded::awkward(seed), |workload| workload.iterate(None));
    }
}

/// Each of two runtimes listens to iterations of its own. What dies in those of one is gone for the other, too, and its number may be
/// that of memory which is not libtorch's.
#[test]
fn runtimes_that_take_turns_know_of_what_has_died() {
    const COUNT: i64 = 1 << 18;
    let _running = one_at_a_time();
    let (_nothing_recorded, on) = (tch::no_grad_guard(), (Kind::Float, Device::Cpu));
    let unit_bytes = 4 * COUNT as u64;
    let mut one = runtime(plimsoll_tests::session().live_bytes() + 7 * unit_bytes / 2);
    let mut other = runtime(u64::MAX);
    let mut small = Tensor::zeros([16], on);
    let kept = {
        let _iteration = one.iteration();
        small += 1;
        Tensor::ones([COUNT], on) * 2
    };
    let mut owned = vec![1f32; COUNT as usize];
    let batch = {
        let _iteration = other.iteration();
        small += 1;
        drop(kept);
        small += 1;
        // SAFETY: the owner lives for longer, and is not moved.
        let batch = unsafe { Tensor::from_blob(owned.as_ptr().cast(), &[COUNT], &[1], Kind::Float, Device::Cpu) };
        assert_eq!(batch.sum(Kind::Float).double_value(&[]), COUNT as f64);
        batch
    };
    let _others = [Tensor::empty([COUNT], on), Tensor::empty([COUNT], on)];
    let _iteration = one.iteration();
    let mut made = Tensor::empty([COUNT], on);
    let made = [made.fill_(1.0), Tensor::empty([COUNT], on)];
    drop(made);
    owned.fill(7.0);
    assert_eq!(batch.sum(Kind::Float).double_value(&[]), 7.0 * COUNT as f64, "what is not libtorch's was evicted");
}

/// What a runtime was not told of does not look as if it could be evicted.
#[test]
fn a_runtime_does_not_evict_what_died_while_another_listened() {
    const COUNT: i64 = 1 << 16;
    let _running = one_at_a_time();
    let on = (Kind::Float, Device::Cpu);
    let mut weights: Vec<Tensor> =
        (0..3).map(|_| (Tensor::randn([256, 256], on) * 0.06).set_requires_grad(true)).collect();
    let (mut one, mut other) =
        (runtime(plimsoll_tests::session().live_bytes() + 5 * 4 * COUNT as u64), runtime(u64::MAX));
    let mut metrics = Vec::new();
    for iteration in 0..8 {
        {
            let _iteration = one.iteration();
            let input = Tensor::randn([256, 256], on);
            let hidden = weights.iter().fold(input, |hidden, weight| hidden.matmul(weight).tanh());
            hidden.sum(Kind::Float).backward();
            tch::no_grad(|| {
                for weight in &mut weights {
                    let step = weight.grad() * -1e-3;
                    *weight += step;
                    weight.zero_grad();
                }
            });
            metrics.extend((0..60).map(|value| Tensor::full([2048], value, on)));
        }
        let _iteration = other.iteration();
        metrics.clear();
        Tensor::zeros([4096], on).sum(Kind::Float).double_value(&[]);
        assert!(one.report().reactive_evictions < 20 * (iteration + 1), "{}", one.report());
    }
    assert!(one.report().reactive_evictions > 0, "everything had room: {}", one.report());
}
