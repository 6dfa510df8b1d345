//! Whatever fails below, the loop goes on with the next best action, keeps its budget, and loses no bit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use plimsoll_runtime::hardware::Tier;
use plimsoll_runtime::torch::{Budget, CopyEngine, CopyError, HostEngine, IterationReport, Report, Runtime};
use plimsoll_runtime::{ActionSet, PolicyFile};
use plimsoll_tests::budget::{Untouched, assert_held, run_under};
use plimsoll_tests::faulty::{self, FaultyEngine};
use plimsoll_tests::meddled::{Meddled, Meddler};
use plimsoll_tests::perceptron::{Course, Perceptron};
use plimsoll_tests::{Stage, fast_link, one_at_a_time};

const ITERATIONS: usize = 8;

/// At most so many, under one runtime after another, where a call has yet to be met: how often it is made depends on what the operators
/// take.
const ITERATIONS_MAX: usize = 64;

/// Which call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Offload,
    Prefetch,
    WaitForOffload,
    WaitForPrefetch,
}

/// Has one kind of call fail: some times, from the n-th on.
struct Failing {
    call: Call,
    from: usize,
    times: usize,
    seen: Arc<AtomicUsize>,
    failures: Arc<AtomicUsize>,
    /// What was started last: what is waited for, as a rule.
    latest: Call,
}

impl Failing {
    fn fails(&mut self, call: Call) -> bool {
        if call != self.call {
            return false;
        }
        let before = self.seen.fetch_add(1, Ordering::Relaxed);
        let fails = before >= self.from && before < self.from.saturating_add(self.times);
        self.failures.fetch_add(usize::from(fails), Ordering::Relaxed);
        fails
    }
}

impl Meddler for Failing {
    fn offload(&mut self, tier: Tier, bytes: usize) -> Result<Tier, CopyError> {
        if tier == Tier::Host && self.fails(Call::Offload) {
            return Err(CopyError::Full { bytes });
        }
        self.latest = Call::Offload;
        Ok(tier)
    }

    fn prefetch(&mut self) -> Result<(), CopyError> {
        if self.fails(Call::Prefetch) {
            return Err(CopyError::WorkerDied);
        }
        self.latest = Call::Prefetch;
        Ok(())
    }

    fn waited(&mut self) -> Result<(), CopyError> {
        // The copy is made either way: what fails is to know that it was.
        let waits = if self.latest == Call::Offload { Call::WaitForOffload } else { Call::WaitForPrefetch };
        if self.fails(waits) { Err(CopyError::WorkerDied) } else { Ok(()) }
    }
}

fn iterate(workload: &mut Perceptron, _: usize) -> f64 {
    workload.iterate(Course::Train(384))
}

fn under(actions: ActionSet, call: Call, from: usize, times: usize) -> (Vec<IterationReport>, Report, usize) {
    let untouched = Untouched::run(|| Perceptron::new(6), iterate, ITERATIONS);
    // What recompute alone can hold.
    let budget_bytes = untouched.between(0.8);
    let (seen, failures) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let runtime = || {
        let (seen, failures) = (Arc::clone(&seen), Arc::clone(&failures));
        let failing = Failing { call, from, times, seen, failures, latest: Call::Offload };
        let engine = Meddled::new(HostEngine::new(None), failing);
        let builder = Runtime::builder().baseline("random").actions(actions).budget(Budget::bytes(budget_bytes));
        builder.link(fast_link()).engine(Box::new(engine)).build().unwrap()
    };
    let mut workload = Perceptron::new(6);
    let what = format!("{call:?} fails {times} times from call {from} on, {actions:?}");
    let (mut losses, mut reports, mut evictions) = (Vec::new(), Vec::new(), 0);
    let report = loop {
        let mut runtime = runtime();
        let (more_losses, more_reports) = run_under(&mut runtime, &mut workload, iterate, ITERATIONS);
        losses.extend(more_losses);
        reports.extend(more_reports);
        evictions += runtime.report().reactive_evictions;
        let met = failures.load(Ordering::Relaxed);
        if met == times || (times == usize::MAX && met > 0) || losses.len() >= ITERATIONS_MAX {
            break runtime.report();
        }
    };
    assert_held(&reports, budget_bytes, &what);
    let untouched = Untouched::run(|| Perceptron::new(6), iterate, losses.len());
    Stage::of(&losses, &workload).assert_same(&untouched.stage, &what);
    let failures = failures.load(Ordering::Relaxed);
    println!(
        "{what}: {failures} failures met in {} iterations, {evictions} evictions when bytes ran out",
        losses.len()
    );
    (reports, report, failures)
}

#[test]
fn a_slow_tier_that_is_full_makes_way_for_recompute() {
    let _running = one_at_a_time();
    // In the last case some iterations have been planned.
    for from in [0, 1, 5, 9] {
        let (reports, report, failures) = under(ActionSet::ALL, Call::Offload, from, usize::MAX);
        assert!(failures > 0, "no copy was made after {from}");
        assert_eq!(report.failed_copies as usize, failures);
        assert!(report.reruns > 0, "nothing was recomputed instead");
        assert!(reports.iter().all(|report| report.makespan_ns > 0));
    }
}

#[test]
fn copies_that_fail_now_and_then_are_made_again() {
    let _running = one_at_a_time();
    for from in [0, 3, 11] {
        for call in [Call::Prefetch, Call::WaitForPrefetch] {
            let (_, report, failures) = under(ActionSet::SWAP, call, from, 2);
            assert_eq!(failures, 2, "{call:?}");
            assert!(report.prefetched_bytes > 0);
        }
    }
}

#[test]
fn an_offload_that_fails_leaves_the_bytes_where_they_were() {
    let _running = one_at_a_time();
    for from in [0, 3, 11] {
        for call in [Call::Offload, Call::WaitForOffload] {
            // Where nothing but swaps makes room, they are tried again.
            for actions in [ActionSet::ALL, ActionSet::SWAP] {
                let (_, _, failures) = under(actions, call, from, 3);
                assert_eq!(failures, 3, "{call:?}");
            }
        }
    }
}

/// Has nothing read back while it is broken.
struct Switched {
    broken: Arc<AtomicBool>,
}

impl Meddler for Switched {
    fn prefetch(&mut self) -> Result<(), CopyError> {
        if self.broken.load(Ordering::Relaxed) { Err(CopyError::WorkerDied) } else { Ok(()) }
    }

    fn rescue(&mut self) -> Result<(), CopyError> {
        self.prefetch()
    }
}

/// A runtime that swaps through `engine`, least recently used storages first.
fn swapping(engine: impl CopyEngine + 'static, budget_bytes: u64) -> Runtime {
    Runtime::builder()
        .baseline("lru")
        .actions(ActionSet::SWAP)
        .budget(Budget::bytes(budget_bytes))
        .link(fast_link())
        .engine(Box::new(engine))
        .build()
        .unwrap()
}

#[test]
fn what_cannot_be_read_back_is_an_error_and_kept_until_it_can() {
    let _running = one_at_a_time();
    let untouched = Untouched::run(|| Perceptron::new(10), iterate, ITERATIONS);
    let broken = Arc::new(AtomicBool::new(false));
    let engine = Meddled::new(HostEngine::new(None), Switched { broken: Arc::clone(&broken) });
    let mut runtime = swapping(engine, untouched.between(0.4));
    let mut workload = Perceptron::new(10);
    // Nothing is planned yet: what is idle in the forward pass, momentum and gradients, goes out when bytes run out.
    let (mut losses, _) = run_under(&mut runtime, &mut workload, iterate, 2);
    broken.store(true, Ordering::Relaxed);
    {
        let _iteration = runtime.iteration();
        assert!(workload.try_iterate(Course::Fail(384)).is_err());
    }
    let refused = runtime.try_iteration().err().expect("storages are without their bytes").to_string();
    assert!(refused.contains("the slow tier, which still holds them"), "{refused}");
    broken.store(false, Ordering::Relaxed);
    workload.rewind();
    losses.extend(run_under(&mut runtime, &mut workload, iterate, ITERATIONS - 2).0);
    Stage::of(&losses, &workload).assert_same(&untouched.stage, "after the slow tier came back");
}

#[test]
fn what_dead_workers_have_left_in_the_slow_tier_comes_back_without_them() {
    let _running = one_at_a_time();
    let untouched = Untouched::run(|| Perceptron::new(11), iterate, ITERATIONS);
    let (engine, faults) = FaultyEngine::with_faults(HostEngine::new(None));
    let mut runtime = swapping(engine, untouched.between(0.4));
    let mut workload = Perceptron::new(11);
    let (mut losses, _) = run_under(&mut runtime, &mut workload, iterate, 2);
    faults.inject(faulty::Call::Prefetch, 0, faulty::Fault::WorkersDie);
    {
        let _iteration = runtime.iteration();
        assert!(workload.try_iterate(Course::Fail(384)).is_err());
    }
    assert!(faults.happened() > 0, "nothing was in the slow tier");
    assert!(runtime.report().latest.last().unwrap().failed_copies > 0);
    // Nothing can be swapped from now on.
    runtime.set_budget(Budget::bytes(untouched.peak_bytes));
    workload.rewind();
    losses.extend(run_under(&mut runtime, &mut workload, iterate, ITERATIONS - 2).0);
    Stage::of(&losses, &workload).assert_same(&untouched.stage, "after the workers died");
}

#[test]
fn a_policy_file_that_vanishes_or_is_replaced_matters_no_more() {
    let _running = one_at_a_time();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("some.policy");
    plimsoll_tests::tiny_policy(1).save(&path).unwrap();
    let untouched = Untouched::run(|| Perceptron::new(7), iterate, ITERATIONS);
    let budget_bytes = untouched.between(0.6);
    let mut runtime = Runtime::builder()
        .policy(PolicyFile::load(&path).unwrap())
        .budget(Budget::bytes(budget_bytes))
        .link(fast_link())
        .build()
        .unwrap();
    let mut workload = Perceptron::new(7);
    let removed = AtomicBool::new(false);
    let (losses, reports) = run_under(
        &mut runtime,
        &mut workload,
        |workload, iteration| {
            match iteration {
                1 => std::fs::write(&path, b"something else").unwrap(),
                2 => {
                    std::fs::remove_file(&path).unwrap();
                    removed.store(true, Ordering::Relaxed);
                }
                _ => {}
            }
            workload.iterate(Course::Train(384))
        },
        ITERATIONS,
    );
    assert!(removed.load(Ordering::Relaxed));
    assert_held(&reports, budget_bytes, "a learned policy");
    Stage::of(&losses, &workload).assert_same(&untouched.stage, "a learned policy");
    assert!(plimsoll_tests::budget::is_empty(folder.path()), "a file was left behind");
}
