//! The promise: what a plan is predicted to cost is what the definition of its actions says, to the nanosecond.

mod support;

use plimsoll_runtime::hardware::{FileTier, Tier};
use plimsoll_runtime::lineage::{Edges, WindowId};
use plimsoll_runtime::schedule::Instruction;
use plimsoll_runtime::trace::StorageId;
use plimsoll_runtime::{Action, Lineage, Link, Plan, Prediction, Schedule, SlowTiers, Timeline, Trace};
use support::interpreter::carry_out;
use support::script::{BYTES, Script};

/// One copy of a script's storage takes 1,000 ns.
const COPY_NS: u64 = 1_000;

fn link() -> Link {
    Link {
        offload_bytes_per_s: f64::INFINITY,
        prefetch_bytes_per_s: f64::INFINITY,
        latency_ns: COPY_NS,
        each_ns: 0,
        contention_each_ns: 0,
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
    assert_eq!(carry_out(trace, lineage.edges(), &schedule).peak_bytes, prediction.peak_bytes);
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
        tiers: link().into(),
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

/// Storages of 4 kB, so that a copy is latency and hardly anything else; as many as `count`, made by one operator, left
/// alone, and read by one operator.
fn small_ones(count: u32, gap: u32) -> Trace {
    let mut script = Script::new(1);
    let mut line = script.run(70).reads(0);
    for storage in 1..=count {
        line = line.creates_bytes(storage, 4096);
    }
    script.idles(gap, 10_000);
    let mut line = script.run(0);
    for storage in 1..=count {
        line = line.reads(storage);
    }
    script.trace()
}

#[test]
fn small_storages_that_leave_together_pay_the_latency_once_each_way() {
    let trace = small_ones(10, 8);
    let swaps: Vec<_> = (1..=10).map(|storage| (storage, 1, Action::Swap)).collect();
    let (schedule, prediction) = predict(&trace, &swaps, u64::MAX);
    assert_eq!((prediction.stall_ns, prediction.offloaded_bytes), (0, 40_960));
    let joined = |step: &Instruction| {
        matches!(step, Instruction::Offload { joins: true, .. } | Instruction::Prefetch { joins: true, .. })
    };
    assert!(schedule.steps().iter().filter(|(_, step)| joined(step)).count() >= 9 + 8);
    // There is no operator before which they could be prefetched: one latency is exposed and not ten.
    let (schedule, prediction) = predict(&small_ones(10, 1), &swaps, u64::MAX);
    assert_eq!(prediction.stall_ns, COPY_NS);
    assert_eq!(schedule.steps().iter().filter(|(_, step)| joined(step)).count(), 2 * 9);
}

/// Predicts a plan that swaps `storages` from operator 3 on where the host has room for `host_bytes` and a file for
/// `file_bytes`.
fn predict_tiers(storages: &[u32], host_bytes: u64, file_bytes: u64) -> (Schedule, Prediction) {
    let mut script = Script::new(1);
    for storage in 1..=3 {
        script.run(70).reads(0).creates(storage);
    }
    script.idles(8, 5_000);
    script.run(0).reads(1).reads(2).reads(3);
    let trace = script.trace();
    let lineage = Lineage::of(&trace);
    let mut plan = Plan::keep_all(lineage.windows().len());
    for (id, window) in (0..).map(WindowId).zip(lineage.windows()) {
        if storages.contains(&window.storage.0) {
            plan.set(id, Action::Swap);
        }
    }
    let file = FileTier { link: link(), limit_bytes: file_bytes };
    let tiers = SlowTiers { host: link(), host_limit_bytes: host_bytes, file: Some(file) };
    Timeline::new(&trace, &lineage, tiers).schedule(&plan, u64::MAX)
}

#[test]
fn an_offload_goes_to_the_host_while_its_limit_allows_then_to_the_file_and_then_nowhere() {
    let (schedule, prediction) = predict_tiers(&[1, 2, 3], BYTES, BYTES);
    let tiers = schedule.steps().iter().filter_map(|(_, step)| match step {
        Instruction::Offload { storage, tier, .. } => Some((storage.0, *tier)),
        _ => None,
    });
    assert_eq!(tiers.collect::<Vec<_>>(), [(1, Tier::Host), (2, Tier::File)]);
    assert_eq!((prediction.host_peak_bytes, prediction.file_peak_bytes), (BYTES, BYTES));
    assert_eq!((prediction.offloaded_bytes, prediction.refused_bytes), (2 * BYTES, BYTES));
    let (_, prediction) = predict_tiers(&[1, 2, 3], 3 * BYTES, 0);
    assert_eq!((prediction.host_peak_bytes, prediction.refused_bytes), (3 * BYTES, 0));
}

#[test]
fn pressure_gives_up_what_is_soon_made_again_rather_than_wait_for_a_slow_copy() {
    // Storage 1 is rebuilt as an input of 2 and kept for its own next use; storage 3 is being offloaded when bytes run
    // short.
    let trace = |cost_ns| {
        let mut script = Script::new(1);
        script.run(cost_ns).reads(0).creates(1);
        script.run(10).reads(1).creates(2);
        script.run(1).reads(0).creates(3);
        script.run(1).reads(2);
        script.run(1).reads(3);
        script.run(0).reads(0).creates(4).frees(4);
        script.idles(4, 50_000);
        script.run(1).reads(1).reads(3);
        script.trace()
    };
    let actions = [(1, 2, Action::Recompute), (2, 2, Action::Recompute), (3, 5, Action::Swap)];
    let (_, cheap) = predict(&trace(20), &actions, 4 * BYTES);
    assert_eq!((cheap.stall_ns, cheap.recompute_ns), (0, 20 + 10 + 20), "storage 1 is made once more");
    let (_, dear) = predict(&trace(9_000), &actions, 4 * BYTES);
    assert_eq!((dear.stall_ns, dear.recompute_ns), (COPY_NS, 9_000 + 10), "storage 1 is worth waiting for");
}

#[test]
fn a_sweep_goes_over_the_budget_where_nothing_can_be_evicted_and_decides_again_where_something_can() {
    let mut script = Script::new(1);
    script.run(1).reads(0).workspace(3 * BYTES); // nothing is idle
    script.run(1).reads(0).creates(1);
    script.run(1).workspace(BYTES); // 1 is idle
    script.run(1).reads(1);
    let trace = script.trace();
    let problem = plimsoll_runtime::Problem {
        trace: &trace,
        lineage: &Lineage::of(&trace),
        tiers: link().into(),
        budget_bytes: 2 * BYTES,
        actions: plimsoll_runtime::ActionSet::RECOMPUTE,
    };
    let mut sweep = plimsoll_runtime::Sweep::new(problem, Plan::keep_all(problem.lineage.windows().len()));
    let pressure = sweep.pressure().expect("the second pressure point can be relieved");
    assert_eq!((pressure.operator, pressure.candidates.len()), (2, 1));
    sweep.take(plimsoll_runtime::Choice { candidate: 0, action: Action::Recompute });
    assert!(sweep.pressure().is_none());
    assert_eq!(sweep.prediction().over_budget_bytes, 2 * BYTES, "only the point that nobody can help");
}

#[test]
fn copies_over_a_dead_link_take_long_and_overflow_nothing() {
    let trace = one_gap(3, 500);
    let lineage = Lineage::of(&trace);
    let mut plan = Plan::keep_all(lineage.windows().len());
    (0..).map(WindowId).zip(lineage.windows()).for_each(|(id, _)| plan.set(id, Action::Swap));
    let prediction = Timeline::new(&trace, &lineage, Link::symmetric(0.0, u64::MAX)).predict(&plan, u64::MAX);
    assert!(prediction.makespan_ns > 1 << 40);
}

/// One leaves at once; the link has no time for the others before the program reads something out.
#[test]
fn what_leaves_at_the_end_makes_way_for_what_is_read_out() {
    let mut script = Script::new(4);
    script.run(50).writes(0);
    script.run(50).writes(1).writes(2);
    script.run(50).writes(3);
    script.run(50).reads(3);
    let trace = script.trace();
    let stays = [0, 1, 2].map(StorageId);
    let lineage = Lineage::between(&trace, Edges { stays: stays.to_vec(), ..Edges::default() });
    let plan = Plan::keep_all(lineage.windows().len());
    let mut timeline = Timeline::new(&trace, &lineage, link());
    let (mut schedule, prediction) = timeline.schedule(&plan, u64::MAX);
    let [first, second, third] = stays.map(offload);
    assert_eq!(schedule.steps(), [(1, first), (2, second), (2, third)]);
    timeline.let_read_out(&mut schedule);
    assert_eq!(schedule.steps(), [(1, first), (4, second), (4, third)]);
    assert_eq!(carry_out(&trace, lineage.edges(), &schedule).peak_bytes, prediction.peak_bytes);
}

/// In the order in which they do, whatever else begins to leave then.
#[test]
fn what_is_leaving_already_leaves_first() {
    let mut script = Script::new(3);
    script.idles(1, 50);
    script.run(0).reads(0).reads(1).reads(2);
    let trace = script.trace();
    let leaving = [2, 1].map(StorageId);
    let lineage = Lineage::between(&trace, Edges { leaving: leaving.to_vec(), ..Edges::default() });
    let mut plan = Plan::keep_all(lineage.windows().len());
    (0..).map(WindowId).zip(lineage.windows()).for_each(|(id, _)| plan.set(id, Action::Swap));
    let (schedule, _) = Timeline::new(&trace, &lineage, link()).schedule(&plan, u64::MAX);
    assert_eq!(schedule.steps()[..3], [2, 1, 0].map(|storage| (0, offload(StorageId(storage)))));
}
