//! What a search costs. Times are per plan that it tries.

#[path = "../tests/support/mod.rs"]
mod support;

use std::ops::ControlFlow;

use divan::Bencher;
use divan::counter::ItemsCount;
use plimsoll_runtime::baselines::baseline;
use plimsoll_runtime::search::{Limits, search};
use plimsoll_runtime::{ActionSet, Lineage, Link, Problem, plan};
use support::realistic::realistic_trace;

fn main() {
    divan::main();
}

/// Plans that a search tries here.
const PLANS: u64 = 2_000;

#[divan::bench(args = [1_000, 5_000], consts = [true, false], sample_count = 5)]
fn from_a_baseline<const SWAP: bool>(bencher: Bencher, operators: usize) {
    let trace = realistic_trace(1, operators);
    let lineage = Lineage::of(&trace);
    let problem = Problem {
        trace: &trace,
        lineage: &lineage,
        tiers: Link::symmetric(100e9, 10_000).into(),
        budget_bytes: lineage.keep_all_peak_bytes() * 4 / 5,
        actions: ActionSet { swap: SWAP, recompute: true },
    };
    let start = plan(problem, baseline("capuchin", 0).expect("it is in the list").as_mut());
    bencher.counter(ItemsCount::new(PLANS)).bench_local(|| {
        search(problem, std::slice::from_ref(&start.plan), Limits::evaluations(PLANS), None, &mut |_| {
            ControlFlow::Continue(())
        })
    });
}
