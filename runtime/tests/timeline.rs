//! The promise: what a plan is predicted to cost is what the definition of its actions says, to the nanosecond.

mod support;

use plimsoll_runtime::hardware::Tier;
use plimsoll_runtime::lineage::WindowId;
use plimsoll_runtime::schedule::Instruction;
use plimsoll_runtime::trace::StorageId;
use plimsoll_runtime::{Action, Lineage, Link, Plan, Prediction, Schedule, Timeline, Trace};
use support::interpreter::carry_out;
use support::script::{BYTES, Script};

/// One copy of a script's storage takes 1,000 ns.
const COPY_NS: u64 = 1_000;

fn link() -> Link {
    Link {
        offload_bytes_per_s: f64::INFINITY,
        prefetch_bytes_per_s: f64::INFINITY,
        latency_ns: COPY_NS,
        contention_ns_per_byte: 0.0,
    }
}

fn offload(storage: StorageId) -> Instruction {
    Instruction::Offload { storage, tier: Tier::Host, joins: false }
}

/// Predicts a plan that takes `actions` for the windows of `(storage, start)`, and checks it against the interpreter.
fn predict(trace: &Trace, actions: &[(u32, u32, Action)], budget_bytes: u64) -> (Schedule, Prediction) {
    let lineage = Lineage::of(trace);
    let mut plan = Plan::keep_all(lineage.windows().len());
    for &(storage, start, action) in actions {
        let at =
            |window: &plimsoll_runtime::lineage::Window| window.storage == StorageId(storage) && window.start == start;
        let position = lineage.windows().iter().position(at).expect("the window exists");
        plan.set(WindowId(position as u32), action);
    }
    let (schedule, prediction) = Timeline::new(trace, &lineage, link()).schedule(&plan, budget_bytes);
    assert_eq!(carry_out(trace, &schedule).peak_bytes, prediction.peak_bytes);
    (schedule, prediction)
}

/// Storage 1 is made, left alone for `gap` operators of `cost_ns`, and read.
fn one_gap(gap: u32, cost_ns: u64) -> Trace {
    let mut script = Script::new(1);
    script.run(70).reads(0).creates(1);
    script.idles(gap, cost_ns);
    script.run(0).reads(1);
    script.trace()
}

#[test]
fn a_swap_behind_a_long_gap_costs_no_time() {
    let trace = one_gap(8, 500);
    let (_, prediction) = predict(&trace, &[(1, 1, Action::Swap)], u64::MAX);
    assert_eq!((prediction.stall_ns, prediction.makespan_ns), (0, 70 + 8 * 500));
    assert_eq!((prediction.offloaded_bytes, prediction.prefetched_bytes), (BYTES, BYTES));
}

#[test]
fn a_swap_behind_a_short_gap_costs_the_transfer_less_the_gap() {
    let trace = one_gap(3, 500);
    let (_, prediction) = predict(&trace, &[(1, 1, Action::Swap)], u64::MAX);
    assert_eq!(prediction.stall_ns, 2 * COPY_NS - 3 * 500);
    assert_eq!(prediction.makespan_ns, 70 + 2 * COPY_NS);
}

#[test]
fn a_storage_that_is_used_before_it_has_left_is_recalled_when_its_offload_is_done() {
    let trace = one_gap(1, 300);
    let (schedule, prediction) = predict(&trace, &[(1, 1, Action::Swap)], u64::MAX);
    assert_eq!(prediction.stall_ns, COPY_NS - 300);
    assert_eq!(prediction.prefetched_bytes, 0);
    let steps = [(1, offload(StorageId(1))), (2, Instruction::Recall(StorageId(1)))];
    assert_eq!(schedule.steps(), steps);
}

#[test]
fn an_offload_frees_its_bytes_only_when_it_is_done_and_pressure_waits_for_it() {
    let mut script = Script::new(1);
    script.run(70).reads(0).creates(1);
    script.run(0).reads(0).creates(2).frees(2);
    script.idles(8, 500);
    script.run(0).reads(1);
    let trace = script.trace();
    let (_, prediction) = predict(&trace, &[(1, 1, Action::Swap)], u64::MAX);
    assert_eq!((prediction.peak_bytes, prediction.stall_ns), (3 * BYTES, 0));
    let (_, prediction) = predict(&trace, &[(1, 1, Action::Swap)], 2 * BYTES);
    assert_eq!((prediction.peak_bytes, prediction.stall_ns), (2 * BYTES, COPY_NS));
}

#[test]
fn a_recompute_costs_its_producer() {
    let trace = one_gap(3, 500);
    let (schedule, prediction) = predict(&trace, &[(1, 1, Action::Recompute)], u64::MAX);
    assert_eq!((prediction.recompute_ns, prediction.makespan_ns), (70, 70 + 3 * 500 + 70));
    assert_eq!(schedule.steps().len(), 2);
}

#[test]
fn a_storage_that_is_freed_while_it_is_offloaded_is_waited_for() {
    let mut script = Script::new(1);
    script.run(70).reads(0).creates(1);
    script.run(300).frees(1);
    script.run(10);
    let (schedule, prediction) = predict(&script.trace(), &[(1, 1, Action::Swap)], u64::MAX);
    assert_eq!(schedule.steps(), [(1, offload(StorageId(1)))]);
    assert_eq!(prediction.stall_ns, COPY_NS - 300);
}

/// Four storages, each made from the one before it, and read in reverse order.
fn chain() -> (Trace, Vec<(u32, u32, Action)>) {
    let mut script = Script::new(1);
    for storage in 1..=4 {
        script.run(100).reads(storage - 1).creates(storage);
    }
    script.run(1);
    for storage in (1..=4).rev() {
        script.run(1).reads(storage).frees(storage);
    }
    let drops = (1..=4).map(|storage| (storage, if storage == 4 { 4 } else { storage + 1 }, Action::Recompute));
    (script.trace(), drops.collect())
}

#[test]
fn a_chain_of_dropped_storages_is_rebuilt_once_where_its_bytes_may_stay() {
    let (trace, drops) = chain();
    let (_, prediction) = predict(&trace, &drops, u64::MAX);
    assert_eq!((prediction.recompute_ns, prediction.peak_bytes), (400, 5 * BYTES));
}

#[test]
fn a_chain_of_dropped_storages_is_rebuilt_more_often_where_its_bytes_may_not_stay() {
    let (trace, drops) = chain();
    let (_, prediction) = predict(&trace, &drops, 3 * BYTES);
    // 1, 2, 3 and 4; what fits with the last of them is kept: 3. Then 1 and 2, of which 1 is kept.
    assert_eq!((prediction.recompute_ns, prediction.peak_bytes), (600, 3 * BYTES));
    assert_eq!(prediction.over_budget_bytes, 0);
}

#[test]
fn a_version_that_is_kept_beside_its_storage_is_not_made_twice() {
    let mut script = Script::new(1);
    script.run(100).reads(0).creates(1).creates(2);
    script.run(10).reads(2).creates(3).frees(2);
    script.run(1);
    script.run(1).reads(1); // makes 2 again, and keeps it for 3
    script.run(1);
    script.run(1).reads(1); // makes 2 again
    script.run(1).reads(3);
    let drops = [(1, 1, Action::Recompute), (1, 4, Action::Recompute), (3, 2, Action::Recompute)];
    let (_, prediction) = predict(&script.trace(), &drops, u64::MAX);
    assert_eq!((prediction.recompute_ns, prediction.peak_bytes), (210, 4 * BYTES));
}

#[test]
fn a_rerun_gives_up_at_once_what_another_of_its_storages_still_holds() {
    for other in [Action::Keep, Action::Swap] {
        let mut script = Script::new(1);
        script.run(100).reads(0).creates(1).creates(2);
        script.run(10).reads(2).creates(3);
        script.idles(4, 1_000);
        script.run(1).reads(1);
        script.run(1).reads(3).reads(2);
        let actions = [(1, 1, Action::Recompute), (2, 2, other), (3, 2, Action::Recompute)];
        let (schedule, _) = predict(&script.trace(), &actions, u64::MAX);
        let rerun = schedule.steps().iter().position(|(_, step)| matches!(step, Instruction::Rerun(_)));
        let next = schedule.steps()[rerun.expect("storage 1 is rebuilt") + 1].1;
        assert!(matches!(next, Instruction::Release(_)), "{other:?}: {next:?}");
    }
}

#[test]
fn bytes_over_the_budget_count_from_the_first_moment_on() {
    let mut script = Script::new(2);
    script.run(5_000);
    script.run(1).frees(0);
    let (_, prediction) = predict(&script.trace(), &[(0, 0, Action::Swap)], BYTES);
    assert_eq!(prediction.over_budget_bytes, BYTES, "both storages are there when the iteration starts");
}

#[test]
fn a_rerun_locks_the_version_it_reads_and_not_a_later_one_in_the_same_storage() {
    let mut script = Script::new(1);
    script.run(100).reads(0).creates(1);
    script.run(100).reads(1).creates(2);
    script.run(1).overwrites(1).reads(0);
    script.run(5_000);
    script.run(1).reads(2);
    script.run(1).reads(1);
    let trace = script.trace();
    let problem = plimsoll_runtime::Problem {
        trace: &trace,
        lineage: &Lineage::of(&trace),
        link: link(),
        budget_bytes: 3 * BYTES,
        actions: plimsoll_runtime::ActionSet::ALL,
    };
    let lineage = problem.lineage;
    let mut plan = Plan::keep_all(lineage.windows().len());
    let drop = lineage.windows().iter().position(|window| window.storage == StorageId(2) && window.used_again);
    plan.set(WindowId(drop.expect("storage 2 is idle") as u32), Action::Recompute);
    let sweep = plimsoll_runtime::Sweep::new(problem, plan);
    let pressure = sweep.pressure().expect("rebuilding 2 takes old 1 beside new 1");
    let offered = pressure.candidates.iter().any(|facts| lineage.window(facts.window).storage == StorageId(1));
    assert!(offered, "storage 1 holds nothing that the rerun reads");
}
