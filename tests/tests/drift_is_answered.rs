//! When iterations take longer than they did, the runtime measures anew, plans anew, and keeps budget and bits.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use plimsoll_runtime::ActionSet;
use plimsoll_runtime::hardware::Tier;
use plimsoll_runtime::torch::copy::{CopyEngine, CopyError, DeviceBytes, SlowCopy, Ticket};
use plimsoll_runtime::torch::{Budget, HostEngine, IterationReport, Runtime};
use plimsoll_tests::budget::{Untouched, assert_held, run_under};
use plimsoll_tests::perceptron::{Course, Perceptron};
use plimsoll_tests::{Stage, fast_link, one_at_a_time};

/// Iterations without a new plan after which the loop counts as settled: more than drift is judged by.
const SETTLED: usize = 40;
/// Iterations within which it must settle, and within which drift must be noticed.
const PATIENCE: usize = 400;

/// An engine whose link can become slow.
struct Slowing {
    inner: HostEngine,
    delay_ns: Arc<AtomicU64>,
}

impl CopyEngine for Slowing {
    unsafe fn offload(&mut self, pieces: &[DeviceBytes], tier: Tier) -> Result<(Vec<SlowCopy>, Ticket), CopyError> {
        // SAFETY: passed on.
        unsafe { self.inner.offload(pieces, tier) }
    }

    unsafe fn prefetch(&mut self, copies: &[(&SlowCopy, *mut u8)]) -> Result<Ticket, CopyError> {
        // SAFETY: passed on.
        unsafe { self.inner.prefetch(copies) }
    }

    fn wait(&mut self, ticket: &Ticket) -> Result<(), CopyError> {
        thread::sleep(Duration::from_nanos(self.delay_ns.load(Ordering::Relaxed)));
        self.inner.wait(ticket)
    }

    fn high_water_bytes(&self) -> u64 {
        self.inner.high_water_bytes()
    }
}

fn iterate(workload: &mut Perceptron, _: usize) -> f64 {
    workload.iterate(Course::Train(256))
}

#[test]
fn a_link_that_becomes_slow_is_noticed() {
    let _running = one_at_a_time();
    let two = Untouched::run(|| Perceptron::new(12), iterate, 2);
    let budget_bytes = two.between(0.5);
    let delay_ns = Arc::new(AtomicU64::new(0));
    let mut runtime = Runtime::builder()
        .actions(ActionSet { swap: true, recompute: false })
        .baseline("lru")
        .budget(Budget::bytes(budget_bytes))
        .link(fast_link())
        .engine(Box::new(Slowing { inner: HostEngine::new(None), delay_ns: Arc::clone(&delay_ns) }))
        .build()
        .unwrap();
    let mut workload = Perceptron::new(12);
    let mut losses = Vec::new();
    let mut next = |runtime: &mut Runtime, workload: &mut Perceptron| -> IterationReport {
        let (loss, mut reports) = run_under(runtime, workload, iterate, 1);
        losses.extend(loss);
        assert_held(&reports, budget_bytes, "the loop");
        reports.remove(0)
    };

    let (mut calm, mut fast) = (0, Vec::new());
    while calm < SETTLED {
        assert!(fast.len() < PATIENCE, "it never settles");
        let before = runtime.report().replans;
        fast.push(next(&mut runtime, &mut workload));
        let as_before = fast.last().is_some_and(|report| report.followed) && runtime.report().replans == before;
        calm = if as_before { calm + 1 } else { 0 };
    }
    let swapped = fast.last().unwrap().offloaded_bytes;
    assert!(swapped > 0, "nothing is swapped where that is fast");

    let before = runtime.report();
    // One wait takes as long as two iterations did.
    delay_ns.store(2 * fast.last().unwrap().makespan_ns.max(1_000_000), Ordering::Relaxed);
    let mut slow = Vec::new();
    while runtime.report().replans == before.replans {
        assert!(slow.len() < PATIENCE, "nobody noticed");
        slow.push(next(&mut runtime, &mut workload));
    }
    let after: Vec<IterationReport> = (0..3).map(|_| next(&mut runtime, &mut workload)).collect();
    let (slow, after) = (slow.last().unwrap(), after.last().unwrap());
    println!(
        "{} ns a fast iteration, {} ns a slow one, {} ns under the new plan; {swapped} bytes swapped, then {}",
        fast.last().unwrap().makespan_ns,
        slow.makespan_ns,
        after.makespan_ns,
        after.offloaded_bytes
    );
    assert!(runtime.report().plans > before.plans);
    assert!(after.followed, "{:?}", after.deviation);
    let iterations = losses.len();
    let untouched = Untouched::run(|| Perceptron::new(12), iterate, iterations);
    Stage::of(&losses, &workload).assert_same(&untouched.stage, "the loop");
}
