//! Under a runtime no iteration exceeds the budget, the first ones included, and no bit of the results changes.

use plimsoll_env::workload::Workload;
use plimsoll_runtime::ActionSet;
use plimsoll_runtime::torch::report::Course;
use plimsoll_runtime::torch::{Budget, Runtime};
use plimsoll_tests::budget::{Untouched, assert_held, run_under, runtime};
use plimsoll_tests::{Awkward, Stage, build, fast_link, one_at_a_time, session, shipped_workload};
use tch::{Device, Kind, Tensor};

const ITERATIONS: usize = 8;

fn holds(name: &str, shares: &[f64]) {
    let _running = one_at_a_time();
    let make = || build(&shipped_workload(name), 3);
    let iterate = |workload: &mut Box<dyn Workload>, _: usize| workload.iteration().unwrap();
    let untouched = Untouched::run(make, iterate, ITERATIONS);
    let mut peaks = Vec::new();
    for &share in shares {
        let budget_bytes = untouched.between(share);
        let what = format!("{name} within {budget_bytes} of {} bytes", untouched.peak_bytes);
        let mut runtime = runtime(budget_bytes);
        let mut workload = make();
        let (losses, reports) = run_under(&mut runtime, &mut workload, iterate, ITERATIONS);
        assert_held(&reports, budget_bytes, &what);
        Stage::of(&losses, &workload).assert_same(&untouched.stage, &what);
        // Before there is a plan; the first iteration of Adam fits, because it has no moments yet.
        assert!(reports[..4].iter().any(|report| report.reactive_evictions > 0), "{what}: everything fits anyway");
        let last = reports.last().unwrap();
        println!("{what}:\n{}", runtime.report());
        assert_eq!(last.course, Course::Planned, "{what}: {:?}", last.deviation);
        if last.reactive_evictions == 0 {
            assert!(last.followed, "{what}: {:?}", last.deviation);
            assert_eq!(Some(last.peak_bytes), last.predicted.map(|predicted| predicted.peak_bytes), "{what}");
        }
        peaks.push(runtime.report().peak_bytes);
    }
    // A lower budget never raises the measured peak.
    assert!(peaks.windows(2).all(|pair| pair[1] <= pair[0]), "{peaks:?}");
}

#[test]
fn of_a_transformer() {
    holds("gpt-tiny", &[0.9, 0.7, 0.5, 0.35]);
}

#[test]
fn of_a_convolution_net() {
    holds("resnet-tiny", &[0.9, 0.75, 0.6, 0.4]);
}

/// What a runtime kept alive would not be added to in place: other operators would run in every iteration, and no plan fit.
#[test]
fn of_a_transformer_whose_gradients_are_added_up_in_place() {
    holds("vit-tiny", &[0.6, 0.36]);
}

#[test]
fn of_a_loop_that_accumulates_clips_and_retains_its_graph() {
    let _running = one_at_a_time();
    let iterate = |workload: &mut Awkward, _: usize| workload.iterate(None);
    let untouched = Untouched::run(|| Awkward::new(5), iterate, ITERATIONS);
    let budget_bytes = untouched.between(0.4);
    let (mut runtime, mut workload) = (runtime(budget_bytes), Awkward::new(5));
    let (losses, reports) = run_under(&mut runtime, &mut workload, iterate, ITERATIONS);
    println!("{}", runtime.report());
    assert_held(&reports, budget_bytes, "the awkward loop");
    Stage::of(&losses, &workload).assert_same(&untouched.stage, "the awkward loop");
}

#[test]
fn whoever_decides_when_bytes_run_out() {
    let _running = one_at_a_time();
    let iterate = |workload: &mut Awkward, _: usize| workload.iterate(None);
    let untouched = Untouched::run(|| Awkward::new(6), iterate, 6);
    for baseline in ["random", "lru", "dtr", "capuchin", "dtr-eq", "heat"] {
        for actions in [ActionSet::ALL, ActionSet::SWAP] {
            for share in [0.85, 0.7, 0.55, 0.4] {
                let budget_bytes = untouched.between(share);
                let what = format!("{baseline} with {actions:?} within {budget_bytes} bytes");
                let builder = Runtime::builder().budget(Budget::bytes(budget_bytes)).link(fast_link());
                let mut runtime = builder.baseline(baseline).actions(actions).build().unwrap();
                let mut workload = Awkward::new(6);
                let (losses, reports) = run_under(&mut runtime, &mut workload, iterate, 6);
                assert_held(&reports, budget_bytes, &what);
                Stage::of(&losses, &workload).assert_same(&untouched.stage, &what);
                assert!(reports.iter().any(|report| report.reactive_evictions > 0), "{what}");
            }
        }
    }
}

/// An operator that writes over what it reads leaves nothing for others to read: whatever else read that has to be made again
/// first, as the program did. In another order every step would be made anew for each of the next one's inputs.
#[test]
fn what_was_made_in_place_is_made_again_once() {
    const STEPS: i64 = 16;
    const SIDE: i64 = 128;
    let _running = one_at_a_time();
    let resident = session().live_bytes();
    let random = || Tensor::rand([SIDE, SIDE], (Kind::Float, Device::Cpu));
    let (start, turn) = (random(), random());
    let chain = || {
        let mut state = start.copy();
        for _ in 0..STEPS {
            let turned = state.mm(&turn);
            let _ = state.subtract_(&(turned * 0.01));
        }
        let kept = &state + 1.0;
        drop(state);
        let crowd = Tensor::zeros([3, SIDE, SIDE], (Kind::Float, Device::Cpu));
        drop(crowd);
        f64::try_from(kept.sum(Kind::Float)).unwrap()
    };
    let untouched = chain();
    // What one step has at once, and no more.
    let budget_bytes = resident + (2 + 3) * (4 * SIDE * SIDE) as u64 + 256;
    let builder = Runtime::builder().budget(Budget::bytes(budget_bytes)).baseline("dtr");
    let mut runtime = builder.actions(ActionSet::RECOMPUTE).build().unwrap();
    let sum = {
        let _iteration = runtime.iteration();
        chain()
    };
    assert_eq!(sum.to_bits(), untouched.to_bits());
    let report = &runtime.report().latest[0];
    assert!(report.peak_bytes <= budget_bytes && report.reactive_evictions > 0, "{report:?}");
    assert_eq!(report.reruns, 2 + 3 * STEPS as u64, "one of every operator");
}

#[test]
fn a_loop_that_fits_is_left_alone() {
    let _running = one_at_a_time();
    let make = || build(&shipped_workload("gpt-tiny"), 4);
    let iterate = |workload: &mut Box<dyn Workload>, _: usize| workload.iteration().unwrap();
    let untouched = Untouched::run(make, iterate, ITERATIONS);
    let mut runtime = runtime(untouched.peak_bytes + (1 << 20));
    let mut workload = make();
    let (losses, reports) = run_under(&mut runtime, &mut workload, iterate, ITERATIONS);
    Stage::of(&losses, &workload).assert_same(&untouched.stage, "a budget that fits");
    let last = reports.last().unwrap();
    assert_eq!(last.course, Course::Declined, "{:?}", last.deviation);
    for report in &reports {
        assert_eq!((report.offloaded_bytes, report.reruns, report.reactive_evictions), (0, 0, 0));
    }
}

/// So an optimizer makes its state, all at once. And a program may have filled it in past the dispatcher.
#[test]
fn what_was_made_from_nothing_and_not_used_so_far_may_leave() {
    let _running = one_at_a_time();
    session();
    const NUMBERS: usize = 1 << 15;
    let mut runtime = runtime(3 << 20);
    let sums: Vec<f64> = {
        let _iteration = runtime.iteration();
        let make = |place: usize| match place % 2 {
            0 => Tensor::from_slice(&vec![place as f32; NUMBERS]),
            _ => Tensor::ones([NUMBERS as i64], (Kind::Float, Device::Cpu)),
        };
        let made: Vec<Tensor> = (0..32).map(make).collect();
        made.iter().map(|tensor| tensor.sum(Kind::Float).double_value(&[])).collect()
    };
    let each = |place: usize| NUMBERS as f64 * if place.is_multiple_of(2) { place as f64 } else { 1.0 };
    assert_eq!(sums, (0..32).map(each).collect::<Vec<_>>());
    let report = runtime.report();
    assert!(report.peak_bytes <= 3 << 20 && report.offloaded_bytes >= 1 << 20 && report.reruns == 0, "{report}");
}
