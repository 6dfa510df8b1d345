//! When iterations take longer than they did, or a slow tier holds less than it says, the runtime measures anew, the link as well
//! as the operators, plans anew, and keeps budget and bits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use plimsoll_runtime::hardware::Tier;
use plimsoll_runtime::torch::copy::{
    ChannelUse, CopyEngine, CopyError, DeviceBytes, SlowCopy, Ticket, TierCopies, TierUse,
};
use plimsoll_runtime::torch::{Budget, Builder, HostEngine, IterationReport, Runtime};
use plimsoll_runtime::{ActionSet, Link};
use plimsoll_tests::budget::{Untouched, assert_held, run_under};
use plimsoll_tests::meddled::{Meddled, Meddler};
use plimsoll_tests::perceptron::{Course, Perceptron};
use plimsoll_tests::{Stage, fast_link, one_at_a_time};

/// Iterations without a new plan after which the loop counts as settled: more than drift is judged by.
const SETTLED: usize = 40;
/// Iterations within which it must settle, and within which drift must be noticed.
const PATIENCE: usize = 400;

/// Has waits become long, which no copy explains.
struct Slowing {
    delay_ns: Arc<AtomicU64>,
}

impl Meddler for Slowing {
    fn wait(&mut self) {
        thread::sleep(Duration::from_nanos(self.delay_ns.load(Ordering::Relaxed)));
    }
}

/// Has an engine say that it has room for everything.
struct Boastful;

impl Meddler for Boastful {
    fn tiers(&self, tiers: Vec<TierUse>) -> Vec<TierUse> {
        tiers.into_iter().map(|tier| TierUse { limit_bytes: u64::MAX, ..tier }).collect()
    }
}

fn iterate(workload: &mut Perceptron, _: usize) -> f64 {
    workload.iterate(Course::Train(256))
}

/// An engine of emulated links, a fast one and a slow one, that goes from the one to the other.
struct Repaced {
    fast: HostEngine,
    slow: HostEngine,
    is_slow: Arc<AtomicBool>,
}

impl Repaced {
    fn engine(&mut self) -> &mut HostEngine {
        if self.is_slow.load(Ordering::Relaxed) { &mut self.slow } else { &mut self.fast }
    }
}

impl CopyEngine for Repaced {
    unsafe fn offload(&mut self, pieces: &[DeviceBytes], tier: Tier) -> Result<(Vec<SlowCopy>, Ticket), CopyError> {
        // SAFETY: passed on.
        unsafe { self.engine().offload(pieces, tier) }
    }

    unsafe fn prefetch(&mut self, copies: &[(&SlowCopy, *mut u8)]) -> Result<Ticket, CopyError> {
        // SAFETY: passed on.
        unsafe { self.engine().prefetch(copies) }
    }

    fn wait(&mut self, ticket: &Ticket) -> Result<(), CopyError> {
        self.engine().wait(ticket)
    }

    fn tiers(&self) -> Vec<TierUse> {
        [self.fast.tiers(), self.slow.tiers()].concat()
    }

    fn copies(&self) -> Vec<TierCopies> {
        let sum = |one: ChannelUse, other: ChannelUse| ChannelUse {
            copies: one.copies + other.copies,
            bytes: one.bytes + other.bytes,
            busy_ns: one.busy_ns + other.busy_ns,
        };
        let pairs = self.fast.copies().into_iter().zip(self.slow.copies());
        let of_both = pairs.map(|(fast, slow)| TierCopies {
            tier: fast.tier,
            offload: sum(fast.offload, slow.offload),
            prefetch: sum(fast.prefetch, slow.prefetch),
        });
        of_both.collect()
    }
}

/// Runs a loop until it has settled, slows it down, and runs it until it has been planned anew and a little longer; checks
/// every budget and every bit. Returns the last iteration of each stretch.
fn drifting(mut runtime: Runtime, slow_down: impl FnOnce(&IterationReport)) -> [IterationReport; 3] {
    let budget_bytes = runtime.budget().as_bytes();
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
    let fast = fast.pop().expect("it has settled");
    assert!(fast.offloaded_bytes > 0, "nothing is swapped where that is fast");

    let before = runtime.report();
    slow_down(&fast);
    let mut slow = Vec::new();
    while runtime.report().replans == before.replans {
        assert!(slow.len() < PATIENCE, "nobody noticed");
        slow.push(next(&mut runtime, &mut workload));
    }
    let slow = slow.pop().expect("it was planned anew");
    let mut after = next(&mut runtime, &mut workload);
    (0..2).for_each(|_| after = next(&mut runtime, &mut workload));
    println!(
        "{} ns a fast iteration, {} ns a slow one, {} ns under the new plan; {} bytes swapped, then {}",
        fast.makespan_ns, slow.makespan_ns, after.makespan_ns, fast.offloaded_bytes, after.offloaded_bytes
    );
    assert!(runtime.report().plans > before.plans);
    assert!(after.followed, "{:?}", after.deviation);
    let iterations = losses.len();
    let untouched = Untouched::run(|| Perceptron::new(12), iterate, iterations);
    Stage::of(&losses, &workload).assert_same(&untouched.stage, "the loop");
    [fast, slow, after]
}

/// A runtime in the middle between what is resident anyway and the peak.
fn builder() -> Builder {
    let two = Untouched::run(|| Perceptron::new(12), iterate, 2);
    Runtime::builder().budget(Budget::bytes(two.between(0.5))).link(fast_link())
}

#[test]
fn a_loop_that_becomes_slow_is_noticed() {
    let _running = one_at_a_time();
    let delay_ns = Arc::new(AtomicU64::new(0));
    let engine = Meddled::new(HostEngine::new(None), Slowing { delay_ns: Arc::clone(&delay_ns) });
    let runtime = builder().actions(ActionSet::SWAP).baseline("lru").engine(Box::new(engine));
    drifting(runtime.build().unwrap(), |fast| {
        // One wait takes as long as two iterations did.
        delay_ns.store(2 * fast.makespan_ns.max(1_000_000), Ordering::Relaxed);
    });
}

#[test]
fn a_new_plan_knows_how_fast_the_link_has_become() {
    let _running = one_at_a_time();
    let is_slow = Arc::new(AtomicBool::new(false));
    let engine = Repaced {
        fast: HostEngine::new(Some(fast_link())),
        slow: HostEngine::new(Some(Link::symmetric(4e6, 20_000))),
        is_slow: Arc::clone(&is_slow),
    };
    let runtime = builder().baseline("dtr-swap").engine(Box::new(engine)).build().unwrap();
    let [fast, _, after] = drifting(runtime, |_| is_slow.store(true, Ordering::Relaxed));
    // At a thousandth of the bandwidth whatever was swapped is better recomputed.
    assert!(after.offloaded_bytes < fast.offloaded_bytes / 2, "{after:?}");
    assert!(after.reruns > fast.reruns, "{after:?}");
}

#[test]
fn a_slow_tier_that_holds_less_than_it_says_is_soon_asked_for_less() {
    const ITERATIONS: usize = 30;
    /// Less than is swapped while nothing is planned, in pieces of 64 KiB.
    const HELD_BYTES: u64 = 184 << 10;
    let _running = one_at_a_time();
    let untouched = Untouched::run(|| Perceptron::new(12), iterate, ITERATIONS);
    let swapping = |limit_bytes: u64| {
        let engine = Box::new(Meddled::new(HostEngine::with_limit(limit_bytes, None), Boastful));
        let mut runtime = builder().baseline("dtr-swap").engine(engine).build().unwrap();
        let mut workload = Perceptron::new(12);
        let (losses, reports) = run_under(&mut runtime, &mut workload, iterate, ITERATIONS);
        assert_held(&reports, runtime.budget().as_bytes(), "the loop");
        Stage::of(&losses, &workload).assert_same(&untouched.stage, "the loop");
        (runtime.report().slow_tier_high_water_bytes, reports)
    };
    let (wanted_bytes, reports) = swapping(u64::MAX);
    assert!(wanted_bytes > HELD_BYTES && reports.iter().all(|report| report.failed_copies == 0), "{reports:?}");
    let (held_bytes, reports) = swapping(HELD_BYTES);
    assert!(held_bytes <= HELD_BYTES, "{held_bytes} bytes");
    let (early, late) = reports.split_at(ITERATIONS / 2);
    assert!(early.iter().any(|report| report.failed_copies > 0), "nothing was refused");
    assert!(late.iter().all(|report| report.followed && report.failed_copies == 0), "{late:?}");
    assert!(late.iter().any(|report| report.offloaded_bytes > 0), "{late:?}");
}
