//! Where nothing is left to evict the loop gets an error that says what would do, every tensor stays readable, and
//! training goes on within a larger budget.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::thread;

use plimsoll_env::workload::bits;
use plimsoll_runtime::ActionSet;
use plimsoll_runtime::torch::{Budget, Runtime};
use plimsoll_tests::budget::{Untouched, assert_held, run_under, runtime};
use plimsoll_tests::perceptron::{Course, Perceptron};
use plimsoll_tests::{Stage, fast_link, one_at_a_time};
use tch::{Device, Kind, TchError, Tensor};

const ROWS: i64 = 512;

fn iterate(workload: &mut Perceptron, _: usize) -> f64 {
    workload.iterate(Course::Train(ROWS))
}

#[test]
fn an_operator_that_needs_more_than_the_budget() {
    let _running = one_at_a_time();
    let untouched = Untouched::run(|| Perceptron::new(1), iterate, 4);
    let mut workload = Perceptron::new(1);
    // Less than one operator's inputs and output on top of what is always there, gradients aside.
    let resident = plimsoll_tests::session().live_bytes();
    let budget_bytes = resident + 100_000;
    let mut runtime = runtime(budget_bytes);
    let before = bits(&workload).unwrap();
    let error = {
        let _iteration = runtime.iteration();
        workload.try_iterate(Course::Train(ROWS)).expect_err("the batch alone is larger")
    };
    let message = error.to_string();
    println!("{}", message.lines().next().unwrap());
    assert!(message.contains(&format!("the budget of {budget_bytes} bytes")), "{message}");
    assert!(message.contains("nothing is left to evict"), "{message}");
    let least = runtime.report().least_feasible_budget_bytes;
    assert!(least > budget_bytes, "{least}");
    assert!(message.contains(&format!("{least} bytes")), "{message}");
    assert!(runtime.report().peak_bytes <= budget_bytes);
    assert_eq!(bits(&workload).unwrap(), before, "a tensor changed");

    runtime.set_budget(Budget::bytes(untouched.peak_bytes));
    let mut workload = Perceptron::new(1);
    let (losses, reports) = run_under(&mut runtime, &mut workload, iterate, 4);
    assert_held(&reports, untouched.peak_bytes, "the larger budget");
    Stage::of(&losses, &workload).assert_same(&untouched.stage, "the larger budget");
}

#[test]
fn a_budget_below_what_stays_between_iterations() {
    let _running = one_at_a_time();
    let mut workload = Perceptron::new(1);
    let resident = plimsoll_tests::session().live_bytes();
    let mut runtime = runtime(resident / 2);
    let error = {
        let _iteration = runtime.iteration();
        workload.try_iterate(Course::Train(8)).expect_err("the parameters alone are more")
    };
    assert!(error.to_string().contains("resident between iterations"), "{error}");
    let report = runtime.report();
    assert_eq!(report.least_feasible_budget_bytes, resident);
    assert_eq!(report.over_budget_bytes, report.peak_bytes - resident / 2);
    assert!(bits(&workload).unwrap().iter().all(|(_, bytes)| !bytes.is_empty()));
}

/// Autograd's own thread lets go of the last of a graph when the backward pass has returned.
#[test]
fn what_another_thread_is_about_to_let_go_of_is_no_reason_to_refuse() {
    let _running = one_at_a_time();
    let mut workload = Perceptron::new(1);
    let untouched = Untouched::run(|| Perceptron::new(1), iterate, 1);
    let mut runtime = runtime(untouched.peak_bytes);
    let too_much = Tensor::zeros([untouched.peak_bytes as i64], (Kind::Uint8, Device::Cpu));
    let (ask, asked) = channel::<()>();
    let other = thread::spawn(move || {
        let _ = asked.recv();
        drop(too_much);
    });
    drop(ask);
    {
        let _iteration = runtime.iteration();
        workload.try_iterate(Course::Train(ROWS)).expect("it is gone by then");
    }
    other.join().unwrap();
    assert_eq!(runtime.report().least_feasible_budget_bytes, 0);
}

/// Of a backward pass that was refused libtorch keeps what it had yet to do, with all that this needs.
#[test]
fn nothing_is_left_of_a_backward_pass_that_was_refused() {
    const BYTES: u64 = 1 << 18;
    let _running = one_at_a_time();
    let input = Tensor::ones([BYTES as i64 / 4], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let branch = || (0..4).fold(input.shallow_clone(), |value, _| value.sin()).sum(Kind::Float);
    let resident = plimsoll_tests::session().live_bytes();
    // Two branches of three saved values each. Going back takes two more, forward there is one.
    let builder = Runtime::builder().budget(Budget::bytes(resident + 7 * BYTES + BYTES / 2)).link(fast_link());
    let mut runtime = builder.actions(ActionSet::NONE).build().unwrap();
    {
        let _iteration = runtime.iteration();
        (branch() + branch()).f_backward().expect_err("there is no room for two more");
    }
    assert_eq!(plimsoll_tests::session().live_bytes(), resident);
    drop(runtime);
    (branch() + branch()).backward();
    assert_eq!(input.grad().size(), input.size());
}

#[test]
fn every_budget_is_held_or_refused_and_none_raises_the_peak_of_a_larger_one() {
    let _running = one_at_a_time();
    let untouched = Untouched::run(|| Perceptron::new(3), iterate, 6);
    let mut held = Vec::new();
    let mut refused_bytes = 0;
    for share in (1..=25).rev().map(|step| f64::from(step) * 0.04) {
        let budget_bytes = untouched.between(share);
        let (mut runtime, mut workload) = (runtime(budget_bytes), Perceptron::new(3));
        // Where there is no fallible variant of an operator, tch panics.
        let iterate = |workload: &mut Perceptron, at: usize| {
            catch_unwind(AssertUnwindSafe(|| iterate(workload, at))).unwrap_or(f64::NAN)
        };
        let (losses, reports) = run_under(&mut runtime, &mut workload, iterate, 6);
        let report = runtime.report();
        println!("{budget_bytes}: peak {}, least feasible {}", report.peak_bytes, report.least_feasible_budget_bytes);
        // Where everything had to be restored, for the program was refused, that may take more than the budget; the
        // report says so, and it never takes more than the untouched loop.
        let over = reports.iter().map(|report| report.over_budget_bytes).max().unwrap();
        assert!(report.peak_bytes <= budget_bytes + over && report.peak_bytes <= untouched.peak_bytes);
        if losses.iter().all(|loss| loss.is_finite()) {
            assert_held(&reports, budget_bytes, "a loop that was not refused");
            Stage::of(&losses, &workload).assert_same(&untouched.stage, &format!("within {budget_bytes} bytes"));
            assert_eq!(refused_bytes, 0, "{budget_bytes} bytes are held and more were refused");
            held.push(report.peak_bytes);
        } else {
            refused_bytes = budget_bytes;
            assert!(report.least_feasible_budget_bytes > budget_bytes);
        }
    }
    assert!(held.len() >= 4, "only {} budgets were held", held.len());
    assert!(held.windows(2).all(|pair| pair[1] <= pair[0]), "{held:?}");
}

#[test]
fn an_iteration_that_fails_or_panics_leaves_every_tensor_readable() {
    let _running = one_at_a_time();
    let courses =
        [Course::Train(ROWS), Course::Train(ROWS), Course::Train(ROWS), Course::Train(ROWS), Course::Train(ROWS)];
    let untouched = Untouched::run(|| Perceptron::new(4), |workload, at| workload.iterate(courses[at]), 5);
    let budget_bytes = untouched.between(0.5);
    for stop in [Course::Fail(ROWS), Course::Panic(ROWS)] {
        let (mut runtime, mut workload) = (runtime(budget_bytes), Perceptron::new(4));
        let (mut losses, _) = run_under(&mut runtime, &mut workload, iterate, 4);
        let before = bits(&workload).unwrap();
        let stopped = catch_unwind(AssertUnwindSafe(|| {
            let _iteration = runtime.iteration();
            workload.iterate(stop)
        }));
        assert!(stopped.is_err() == matches!(stop, Course::Panic(_)));
        assert_eq!(bits(&workload).unwrap(), before, "{stop:?} changed a tensor");
        workload.rewind();
        losses.extend(run_under(&mut runtime, &mut workload, iterate, 1).0);
        Stage::of(&losses, &workload).assert_same(&untouched.stage, &format!("after {stop:?}"));
        assert!(runtime.report().peak_bytes <= budget_bytes);
    }
}

#[test]
fn a_second_loop_of_the_process_is_refused() {
    let _running = one_at_a_time();
    let mut one = runtime(1 << 30);
    let mut other = Runtime::builder().budget(Budget::mebibytes(64)).link(fast_link()).build().unwrap();
    let _iteration = one.iteration();
    assert!(other.try_iteration().is_err());
}

/// What attention has seen, longer with each step, and what is pressed for room with in the end.
fn generate(weights: &[Tensor], steps: i64) -> Result<Tensor, TchError> {
    let on_cpu = (Kind::Float, Device::Cpu);
    let mut seen: [Option<[Tensor; 2]>; 3] = Default::default();
    let mut hidden = Tensor::f_randn([16, 64], on_cpu)?;
    let mut said = hidden.f_slice(1, 0, 1, 1)?;
    for _ in 0..steps {
        for (weight, seen) in weights.iter().zip(&mut seen) {
            let all = hidden.f_matmul(weight)?.f_view([16, 1, 3, 4, 16])?.f_permute([2, 0, 3, 1, 4])?;
            let [query, mut key, mut value] = <[Tensor; 3]>::try_from(all.f_unbind(0)?).expect("three");
            if let Some([keys, values]) = seen.take() {
                key = Tensor::f_cat(&[&keys, &key], 2)?;
                value = Tensor::f_cat(&[&values, &value], 2)?;
            }
            let mask = None::<Tensor>;
            let attended = Tensor::f_scaled_dot_product_attention(&query, &key, &value, mask, 0.0, false, None, false)?;
            hidden = hidden.f_add(&attended.f_reshape([16, 64])?)?;
            *seen = Some([key, value]);
        }
        hidden = hidden.f_layer_norm([64], None::<Tensor>, None::<Tensor>, 1e-5, false)?;
        said = Tensor::f_cat(&[&said, &hidden.f_slice(1, 0, 1, 1)?], 1)?;
    }
    let more = (0..4).map(|_| Tensor::f_randn([256, 64], on_cpu)).collect::<Result<Vec<_>, _>>()?;
    let mut all = more.iter().chain(seen.iter().flatten().flatten()).chain([&said]);
    all.try_fold(hidden.f_sum(Kind::Float)?, |sum, other| sum.f_add(&other.f_sum(Kind::Float)?))
}

/// To remake the last of a chain its reruns would give up, one for another, what they had just remade: twice and more for each step.
#[test]
fn a_chain_that_every_step_reads_is_refused_before_long() {
    let _running = one_at_a_time();
    let _without_gradients = tch::no_grad_guard();
    let session = plimsoll_tests::session();
    let weights = [0; 3].map(|_| Tensor::randn([64, 192], (Kind::Float, Device::Cpu)) * 0.1);
    let resident_bytes = session.live_bytes();
    for room_bytes in [190_000, 230_000, 270_000, 310_000] {
        let actions = ActionSet::RECOMPUTE;
        let budget = Budget::bytes(resident_bytes + room_bytes);
        let mut runtime = Runtime::builder().actions(actions).budget(budget).build().unwrap();
        for _ in 0..2 {
            let _iteration = runtime.iteration();
            // It may be refused.
            let _ = generate(&weights, 8);
        }
        let report = runtime.report();
        println!("within {room_bytes} bytes: {} reruns, {} evictions", report.reruns, report.reactive_evictions);
        assert!(report.reactive_evictions > 0, "everything fits");
        assert!(report.reruns < 100_000, "{} reruns within {room_bytes} bytes", report.reruns);
    }
}
