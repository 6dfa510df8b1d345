//! The promise: versions, what a rerun reads, and when a storage may be dropped, follow from the trace alone.

mod support;

use plimsoll_runtime::Lineage;
use plimsoll_runtime::lineage::{EVICTION_FLOOR_BYTES, Version, Window};
use plimsoll_runtime::trace::{OperatorId, StorageId, Trace};
use support::script::Script;

/// Start, end, whether it is used again and whether it may be recomputed: of every window of a storage.
fn windows(trace: &Trace, storage: u32) -> Vec<(u32, u32, bool, bool)> {
    let lineage = Lineage::of(trace);
    let of_storage = |window: &&Window| window.storage == StorageId(storage);
    let mut found: Vec<_> = lineage
        .windows()
        .iter()
        .filter(of_storage)
        .map(|window| (window.start, window.end, window.used_again, window.recomputable))
        .collect();
    found.sort_unstable();
    found
}

fn versions(trace: &Trace, storage: u32) -> Vec<Version> {
    let lineage = Lineage::of(trace);
    lineage.versions().iter().copied().filter(|version| version.storage == StorageId(storage)).collect()
}

/// The storages whose versions a rerun of `operator` reads, and makes.
fn replay(trace: &Trace, operator: u32) -> (Vec<u32>, Vec<u32>) {
    let lineage = Lineage::of(trace);
    let storage = |version: &_| lineage.version(*version).storage.0;
    let operator = OperatorId(operator);
    (
        lineage.replay_inputs(operator).iter().map(storage).collect(),
        lineage.replay_outputs(operator).iter().map(storage).collect(),
    )
}

#[test]
fn a_window_spans_the_operators_between_two_accesses() {
    let mut script = Script::new(1);
    script.run(1).reads(0).creates(1);
    script.run(1);
    script.run(1);
    script.run(1).reads(1);
    script.run(1).reads(1);
    let trace = script.trace();
    assert_eq!(windows(&trace, 1), [(1, 3, true, true)]);
    assert_eq!(windows(&trace, 0), [(1, 5, true, false)], "a survivor is used again at the iteration's end");
}

#[test]
fn a_window_that_ends_in_a_free_reaches_past_it_and_is_not_used_again() {
    let mut script = Script::new(1);
    script.run(1).reads(0).creates(1);
    script.run(1).frees(1);
    script.run(1).reads(0).creates(2).frees(2);
    let trace = script.trace();
    assert_eq!(windows(&trace, 1), [(1, 2, false, true)]);
    assert_eq!(windows(&trace, 2), [], "freed at once: never idle");
    assert_eq!(versions(&trace, 1)[0].until, 1);
}

#[test]
fn small_and_locked_storages_have_no_windows() {
    let mut script = Script::new(2);
    script.run(1).creates_bytes(2, EVICTION_FLOOR_BYTES - 1).creates_bytes(3, EVICTION_FLOOR_BYTES);
    script.run(1);
    let mut trace = script.trace();
    trace.storages[1].locked = Some("scripted".into());
    assert_eq!(windows(&trace, 0).len(), 1);
    assert_eq!(windows(&trace, 1), []);
    assert_eq!(windows(&trace, 2), []);
    assert_eq!(windows(&trace, 3).len(), 1);
}

#[test]
fn a_root_is_swapped_only() {
    let mut script = Script::new(1);
    script.run(1).reads(0).creates(1).not_replayable();
    script.run(1);
    script.run(1).reads(1).reads(0);
    let trace = script.trace();
    assert_eq!(windows(&trace, 0), [(1, 2, true, false)]);
    assert_eq!(windows(&trace, 1), [(1, 2, true, false)]);
    assert_eq!(versions(&trace, 1)[0].producer, None);
    assert_eq!(replay(&trace, 0).1, [] as [u32; 0]);
}

#[test]
fn adding_to_the_root_that_a_storage_was_made_from_ends_both_recomputes_and_makes_no_cycle() {
    let mut script = Script::new(1);
    script.run(1).reads(0).creates(1); // y = f(x)
    script.run(1);
    script.run(1).writes(0).reads(1); // x.add_(y)
    script.run(1);
    script.run(1).reads(0).reads(1);
    let trace = script.trace();
    assert_eq!(windows(&trace, 1), [(1, 2, true, true), (3, 4, true, false)], "x is intact until it is added to");
    assert_eq!(windows(&trace, 0), [(1, 2, true, false), (3, 4, true, false)]);
    let x = versions(&trace, 0);
    assert_eq!((x[0].producer, x[0].until), (None, 2));
    assert_eq!((x[1].producer, x[1].until, x[1].rebuildable_until), (Some(OperatorId(2)), 5, Some(2)));
}

#[test]
fn a_chain_of_in_place_operators_is_rebuilt_from_its_first_version() {
    let mut script = Script::new(1);
    script.run(1).reads(0).creates(1);
    script.run(1).writes(1);
    script.run(1).writes(1).reads(0);
    script.run(1);
    script.run(1).reads(1);
    let trace = script.trace();
    assert_eq!(windows(&trace, 1), [(3, 4, true, true)]);
    let lineage = Lineage::of(&trace);
    let made = |operator| lineage.replay_outputs(OperatorId(operator))[0];
    assert_eq!(lineage.replay_inputs(OperatorId(1)), [made(0)]);
    assert_eq!(lineage.replay_inputs(OperatorId(2))[0], made(1));
    assert_eq!(lineage.consumers(made(0)), [OperatorId(1)]);
}

#[test]
fn an_overwrite_reads_nothing_of_what_it_replaces() {
    let mut script = Script::new(2);
    script.run(1).reads(0).creates(2);
    script.run(1).overwrites(2).reads(1);
    script.run(1).overwrites(0);
    script.run(1).reads(2);
    let trace = script.trace();
    assert_eq!(replay(&trace, 1), (vec![1], vec![2]));
    assert_eq!(windows(&trace, 2), [(2, 3, true, true)], "its first version's root is gone, and is not needed");
    assert_eq!(windows(&trace, 0)[1], (3, 4, true, true), "what overwrites a root can be rerun");
}

#[test]
fn a_side_effect_makes_a_root_and_is_not_repeated() {
    let mut script = Script::new(2);
    script.run(1).reads(0).touches(1).creates(2); // batch-norm: running statistics in storage 1
    script.run(1);
    script.run(1).reads(2).reads(1);
    let trace = script.trace();
    assert_eq!(replay(&trace, 0), (vec![0], vec![2]));
    assert_eq!(windows(&trace, 2), [(1, 2, true, true)]);
    assert_eq!(windows(&trace, 1), [(1, 2, true, false)]);
    assert_eq!(versions(&trace, 1).len(), 2);
}

#[test]
fn whatever_was_made_of_a_root_may_be_dropped_until_the_root_is_written_or_freed() {
    for freed in [false, true] {
        let mut script = Script::new(1);
        script.run(1).reads(0).creates(1);
        script.run(1).reads(1).creates(2);
        script.run(1);
        script.run(1).reads(1);
        let end_of_root = script.run(1);
        if freed {
            end_of_root.frees(0)
        } else {
            end_of_root.overwrites(0)
        };
        script.run(1).reads(1).frees(1);
        script.run(1).reads(2).frees(2);
        let trace = script.trace();
        assert_eq!(windows(&trace, 1), [(2, 3, true, true), (4, 5, true, false)], "freed: {freed}");
        assert_eq!(windows(&trace, 2), [(2, 6, true, false)], "freed: {freed}");
    }
}

#[test]
fn the_keep_all_profile_counts_outputs_and_workspace() {
    let mut script = Script::new(1);
    script.run(10).reads(0).creates_bytes(1, 5_000).workspace(700);
    script.run(20).reads(1).frees(1);
    let mut trace = script.trace();
    trace.operators[1].gap_ns = 5;
    trace.tail_ns = 3;
    let lineage = Lineage::of(&trace);
    let initial = trace.storages[0].bytes;
    assert_eq!(lineage.keep_all_bytes(), [initial + 5_700, initial + 5_000, initial]);
    assert_eq!([lineage.start_ns(0), lineage.start_ns(1), lineage.keep_all_makespan_ns()], [0, 15, 38]);
}

#[test]
fn a_version_whose_own_roots_are_gone_serves_as_a_root_while_its_storage_holds_it() {
    let mut script = Script::new(1);
    script.run(1).reads(0).creates(1);
    script.run(1).reads(1).creates(2);
    script.run(1).overwrites(0);
    script.idles(2, 1);
    script.run(1).reads(2);
    script.run(1).reads(1).frees(1);
    script.run(1).reads(2);
    let trace = script.trace();
    assert_eq!(windows(&trace, 1), [(2, 6, true, false)], "what it was made of is overwritten meanwhile");
    assert_eq!(windows(&trace, 2), [(2, 5, true, true), (6, 7, true, false)]);
    assert_eq!(versions(&trace, 2)[0].rebuildable_until, Some(6), "until storage 1 is freed");
}
