//! Other threads may allocate while a loop runs under a budget: nobody waits for ever, the budget counts their bytes as
//! well, and no bit of the loop changes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use plimsoll_tests::budget::{Untouched, assert_held, run_under, runtime};
use plimsoll_tests::perceptron::{Course, Perceptron};
use plimsoll_tests::{Stage, one_at_a_time};
use tch::{Device, Kind, Tensor};

const ITERATIONS: usize = 30;
/// Bytes that the other threads hold at most, all together.
const THEIRS: u64 = 2 * 160 * 1024;

#[test]
fn that_allocate_without_a_pause() {
    let _running = one_at_a_time();
    let iterate = |workload: &mut Perceptron, _: usize| workload.iterate(Course::Train(384));
    let untouched = Untouched::run(|| Perceptron::new(8), iterate, ITERATIONS);
    let budget_bytes = untouched.between(0.6) + THEIRS;
    let (mut runtime, mut workload) = (runtime(budget_bytes), Perceptron::new(8));
    let (stop, made, refused) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let (losses, reports) = thread::scope(|scope| {
        for number in 0..2 {
            let (stop, made, refused) = (&stop, &made, &refused);
            scope.spawn(move || {
                let mut rows = 1 + number;
                while !stop.load(Ordering::Relaxed) {
                    rows = (rows * 7 + 3) % 40 + 1;
                    match Tensor::f_empty([rows * 1024], (Kind::Float, Device::Cpu)) {
                        Ok(tensor) => made.fetch_add(tensor.numel() as u64, Ordering::Relaxed),
                        Err(_) => refused.fetch_add(1, Ordering::Relaxed),
                    };
                    thread::yield_now();
                }
            });
        }
        let ran = run_under(&mut runtime, &mut workload, iterate, ITERATIONS);
        stop.store(true, Ordering::Relaxed);
        ran
    });
    println!(
        "{}\nthe others made {} bytes and were refused {} times",
        runtime.report(),
        4 * made.into_inner(),
        refused.into_inner()
    );
    assert_held(&reports, budget_bytes, "with other threads");
    Stage::of(&losses, &workload).assert_same(&untouched.stage, "with other threads");
}

#[test]
fn that_work_inside_an_operator() {
    let _running = one_at_a_time();
    // Kernels share their work among threads, and allocate in each.
    let before = tch::get_num_threads();
    tch::set_num_threads(4);
    let iterate = |workload: &mut Perceptron, _: usize| workload.iterate(Course::Train(2048));
    let untouched = Untouched::run(|| Perceptron::new(9), iterate, 6);
    let budget_bytes = untouched.between(0.6);
    let (mut runtime, mut workload) = (runtime(budget_bytes), Perceptron::new(9));
    let (losses, reports) = run_under(&mut runtime, &mut workload, iterate, 6);
    tch::set_num_threads(before);
    assert_held(&reports, budget_bytes, "with four threads");
    Stage::of(&losses, &workload).assert_same(&untouched.stage, "with four threads");
    assert!(reports.iter().any(|report| report.reactive_evictions > 0));
}
