//! A loop that marks no iteration is recorded, planned and kept under its budget all the same; a program without
//! iterations is kept under it as well.

use plimsoll_runtime::torch::IterationReport;
use plimsoll_runtime::torch::report::Course as Driven;
use plimsoll_tests::budget::{Untouched, runtime};
use plimsoll_tests::perceptron::{Course, Perceptron};
use plimsoll_tests::{Stage, one_at_a_time, session};
use tch::{Device, Kind, Tensor};

/// The loop that does `course` is found to have a period of one. What its iterations were.
fn found(course: fn(usize) -> Course, iterations: usize) -> Vec<IterationReport> {
    let _running = one_at_a_time();
    let iterate = |workload: &mut Perceptron, iteration: usize| workload.iterate(course(iteration));
    let untouched = Untouched::run(|| Perceptron::new(11), iterate, iterations);
    let budget_bytes = untouched.between(0.6);
    let (mut runtime, mut workload) = (runtime(budget_bytes), Perceptron::new(11));
    session().reset_peak();
    let mut peak_bytes = 0;
    let losses: Vec<f64> = {
        let detection = runtime.detect().unwrap();
        let losses = (0..iterations)
            .map(|at| {
                let loss = iterate(&mut workload, at);
                peak_bytes = peak_bytes.max(session().peak_bytes());
                loss
            })
            .collect();
        assert_eq!(detection.period(), Some(1));
        losses
    };
    let report = runtime.report();
    println!("{report}");
    Stage::of(&losses, &workload).assert_same(&untouched.stage, "without marks");
    assert!(peak_bytes.max(report.peak_bytes) <= budget_bytes, "{peak_bytes} of {budget_bytes} bytes");
    report.latest
}

/// The loop that does `course` is planned in all but so many iterations.
fn is_planned(course: fn(usize) -> Course, iterations: usize, unplanned: usize) {
    let found = found(course, iterations);
    // The stretch before the first boundary, then one iteration after another, of which two make the plan.
    let planned = found.iter().filter(|iteration| iteration.course == Driven::Planned).count();
    assert!(planned >= iterations - unplanned, "only {planned} of {} were planned", found.len());
}

#[test]
fn of_a_loop_without_marks() {
    is_planned(|_| Course::Train(384), 16, 8);
}

#[test]
fn of_a_loop_whose_layers_are_measured() {
    is_planned(|_| Course::Measured(384), 16, 8);
}

/// What evaluates the model belongs to the iteration before, so that iterations are of two kinds.
#[test]
fn of_a_loop_that_is_evaluated_now_and_then() {
    let course = |iteration| if iteration % 6 == 5 { Course::Evaluated(384) } else { Course::Train(384) };
    // The first one that is found begins with its batch there, unlike all others.
    is_planned(course, 60, 11);
}

/// A batch belongs to the iteration that it is for: there are as many programs as there are sizes, not as there are pairs of them.
#[test]
fn of_a_loop_whose_batches_are_of_several_sizes() {
    let course = |iteration| Course::Train([256, 320, 384, 448][iteration * (iteration + 3) / 2 * 7 % 11 % 4]);
    let found = found(course, 60);
    // What fits needs no plan.
    let known = found.iter().filter(|iteration| iteration.course != Driven::Reactive).count();
    assert!(known >= 60 - 16, "only {known} of {} were known", found.len());
    assert!(found.iter().any(|iteration| iteration.followed && iteration.course == Driven::Planned));
}

#[test]
fn of_a_program_that_has_none() {
    let _running = one_at_a_time();
    let session = session();
    let start = session.live_bytes();
    let budget_bytes = start + (1 << 20);
    let run = || {
        let options = (Kind::Float, Device::Cpu);
        let mut kept = vec![Tensor::ones([16, 1024], options)];
        for step in 0..40 {
            kept.push(kept.last().unwrap() * 1.01 + f64::from(step));
        }
        kept.iter().map(|tensor| tensor.sum(Kind::Double).double_value(&[])).sum::<f64>()
    };
    let expected = run();
    let mut runtime = runtime(budget_bytes);
    session.reset_peak();
    let found = {
        let detection = runtime.detect().unwrap();
        let found = run();
        assert_eq!(detection.period(), None);
        found
    };
    assert_eq!(found.to_bits(), expected.to_bits());
    assert!(session.peak_bytes() <= budget_bytes, "{} bytes", session.peak_bytes() - start);
    let report = runtime.report();
    assert_eq!(report.plans, 0);
    assert!(report.reactive_evictions > 0);
}
