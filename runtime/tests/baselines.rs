//! The promise: every baseline plans lawfully and the same every time, and evicts what its paper's rule says.

mod support;

use plimsoll_runtime::baselines::{BASELINES, baseline};
use plimsoll_runtime::trace::StorageId;
use plimsoll_runtime::{Action, ActionSet, Lineage, Link, Planned, Problem, Timeline, Trace};
use support::draw::Draw;
use support::interpreter::carry_out;
use support::random_trace::random_trace;
use support::script::{BYTES, Script};

const CASES: u64 = 80;
const OPERATORS_MAX: u64 = 60;

/// Copies of whatever size take so long.
fn link(copy_ns: u64) -> Link {
    Link {
        offload_bytes_per_s: f64::INFINITY,
        prefetch_bytes_per_s: f64::INFINITY,
        latency_ns: copy_ns,
        each_ns: 0,
        contention_each_ns: 0,
        contention_ns_per_byte: 0.0,
    }
}

/// Copies that no gap of these traces hides.
const SLOW: u64 = 1_000_000_000;

fn plan_with(name: &str, trace: &Trace, link: Link, budget_bytes: u64, actions: ActionSet) -> Planned {
    let lineage = Lineage::of(trace);
    let problem = Problem { trace, lineage: &lineage, tiers: link.into(), budget_bytes, actions };
    let mut policy = baseline(name, 7).unwrap_or_else(|| panic!("{name} is no baseline"));
    plimsoll_runtime::plan(problem, policy.as_mut())
}

/// The storages that `name` evicts, in order of their ids, each once.
fn evicted(name: &str, trace: &Trace, copy_ns: u64, budget_bytes: u64, actions: ActionSet) -> Vec<(u32, Action)> {
    let planned = plan_with(name, trace, link(copy_ns), budget_bytes, actions);
    let lineage = Lineage::of(trace);
    let windows = lineage.windows().iter().zip(planned.plan.actions());
    let chosen = windows.filter(|(_, action)| **action != Action::Keep);
    let mut evicted: Vec<_> = chosen.map(|(window, &action)| (window.storage.0, action)).collect();
    evicted.sort_by_key(|&(storage, _)| storage);
    evicted.dedup();
    evicted
}

fn swapped(storages: &[u32]) -> Vec<(u32, Action)> {
    storages.iter().map(|&storage| (storage, Action::Swap)).collect()
}

fn dropped(storages: &[u32]) -> Vec<(u32, Action)> {
    storages.iter().map(|&storage| (storage, Action::Recompute)).collect()
}

#[test]
fn every_baseline_plans_lawfully_and_the_same_every_time() {
    for seed in 0..CASES {
        let draw = &mut Draw::new(seed);
        let trace = random_trace(draw, OPERATORS_MAX);
        let lineage = Lineage::of(&trace);
        let copy = link(draw.pick(&[0, 100, 2_000]));
        for percent in [80, 60, 45] {
            for (swap, recompute) in [(true, true), (true, false), (false, true), (false, false)] {
                let (actions, budget_bytes) =
                    (ActionSet { swap, recompute }, lineage.keep_all_peak_bytes() * percent / 100);
                for name in BASELINES {
                    let planned = plan_with(name, &trace, copy, budget_bytes, actions);
                    let case = format!("{name}, seed {seed}, {percent} %, {actions:?}");
                    assert!(planned.plan.actions().iter().all(|&action| actions.allows(action)), "{case}");
                    let (schedule, prediction) =
                        Timeline::new(&trace, &lineage, copy).schedule(&planned.plan, budget_bytes);
                    assert_eq!(prediction, planned.prediction, "{case}");
                    assert_eq!(
                        carry_out(&trace, lineage.edges(), &schedule).peak_bytes,
                        prediction.peak_bytes,
                        "{case}"
                    );
                    assert_eq!(plan_with(name, &trace, copy, budget_bytes, actions).plan, planned.plan, "{case}");
                }
            }
        }
    }
}

#[test]
fn where_everything_fits_only_static_offload_evicts() {
    for seed in 0..CASES {
        let trace = random_trace(&mut Draw::new(seed), OPERATORS_MAX);
        let peak_bytes = Lineage::of(&trace).keep_all_peak_bytes();
        for name in BASELINES.into_iter().filter(|name| !["vdnn-all", "vdnn-conv", "chen"].contains(name)) {
            assert_eq!(evicted(name, &trace, 100, peak_bytes, ActionSet::ALL), [], "{name}, seed {seed}");
        }
    }
}

/// Four storages that differ: 1 is the oldest, 2 is old and cheap, 3 is large and costly, 4 is young and the cheapest for
/// its bytes. `missing` bytes are missing at the operator after them.
fn four(bytes_of_2: u64, cost_of_3: u64, missing: u64) -> (Trace, u64) {
    let mut script = Script::new(1);
    script.run(9_000).reads(0).creates(1);
    script.run(4_000).reads(0).creates_bytes(2, bytes_of_2);
    script.run(cost_of_3).reads(0).creates_bytes(3, 8 * BYTES);
    script.run(3_000).reads(0).creates(4);
    script.idles(1, 1_000);
    script.run(10).reads(0).workspace(BYTES);
    for storage in 1..=4 {
        script.run(10).reads(storage).frees(storage);
    }
    let trace = script.trace();
    let peak_bytes = Lineage::of(&trace).keep_all_peak_bytes();
    (trace, peak_bytes - missing)
}

#[test]
fn scores_of_the_same_four_storages_pick_each_another() {
    let (trace, budget_bytes) = four(BYTES, 90_000, BYTES / 4);
    for (name, expected) in [("lru", 1), ("dtr", 2), ("dtr-local", 2), ("dtr-eq", 2), ("largest", 3), ("msps", 4)] {
        assert_eq!(evicted(name, &trace, SLOW, budget_bytes, ActionSet::RECOMPUTE), dropped(&[expected]), "{name}");
    }
}

#[test]
fn keep_all_evicts_nothing_whatever_is_missing() {
    let (trace, budget_bytes) = four(BYTES, 90_000, 8 * BYTES);
    assert_eq!(evicted("keep-all", &trace, 1, budget_bytes, ActionSet::ALL), []);
    assert!(!plan_with("keep-all", &trace, link(1), budget_bytes, ActionSet::ALL).fits());
}

#[test]
fn megengine_passes_over_what_is_under_its_floor() {
    let (trace, budget_bytes) = four(BYTES / 2, 90_000, BYTES / 4);
    assert_eq!(evicted("dtr", &trace, SLOW, budget_bytes, ActionSet::RECOMPUTE), dropped(&[2]));
    assert_eq!(evicted("megengine", &trace, SLOW, budget_bytes, ActionSet::RECOMPUTE), dropped(&[1]));
}

#[test]
fn the_cheapest_counts_only_the_bytes_that_are_missing() {
    let (trace, budget_bytes) = four(BYTES, 16_000, BYTES / 4);
    assert_eq!(evicted("msps", &trace, SLOW, budget_bytes, ActionSet::RECOMPUTE), dropped(&[3]));
    assert_eq!(evicted("cheapest", &trace, SLOW, budget_bytes, ActionSet::RECOMPUTE), dropped(&[4]));
}

#[test]
fn rules_that_know_of_the_channels_swap_only_where_that_is_cheaper() {
    let (trace, budget_bytes) = four(BYTES, 90_000, BYTES / 4);
    for name in ["dtr-swap", "cheapest"] {
        let slow = evicted(name, &trace, SLOW, budget_bytes, ActionSet::ALL);
        assert!(slow.iter().all(|&(_, action)| action == Action::Recompute), "{name}: {slow:?}");
        let fast = evicted(name, &trace, 1, budget_bytes, ActionSet::ALL);
        assert!(fast.iter().all(|&(_, action)| action == Action::Swap), "{name}: {fast:?}");
    }
    assert_eq!(evicted("dtr", &trace, 1, budget_bytes, ActionSet::ALL), dropped(&[2]), "dtr does not know");
}

/// Storage 2 is made from 1, and 3 from nothing but 0; the cost of 3 is between that of 1 and that of 1 and 2.
#[test]
fn dtr_counts_what_was_dropped_before_and_its_local_form_does_not() {
    let mut script = Script::new(1);
    script.run(5_000).reads(0).creates(1);
    script.run(5_000).reads(1).creates_bytes(2, 16 * BYTES);
    script.run(7_000).reads(0).creates(3);
    script.idles(1, 1_000_000);
    script.run(10).reads(0).workspace(40 * BYTES);
    for storage in [1, 2, 3] {
        script.run(10).reads(storage).frees(storage);
    }
    let trace = script.trace();
    let budget_bytes = Lineage::of(&trace).keep_all_peak_bytes() - 16 * BYTES - 1;
    assert_eq!(evicted("dtr", &trace, SLOW, budget_bytes, ActionSet::RECOMPUTE), dropped(&[2, 3]));
    assert_eq!(evicted("dtr-local", &trace, SLOW, budget_bytes, ActionSet::RECOMPUTE), dropped(&[1, 2]));
}

/// Storage 3 is made from 1 and 2. When 2 and 3 are dropped, DTR counts 3 for 1; its class holds 2 as well.
#[test]
fn dtr_eq_counts_the_whole_class_that_a_storage_touches() {
    let mut script = Script::new(1);
    script.run(5_000).reads(0).creates(1);
    script.run(5_000).reads(0).creates_bytes(2, 16 * BYTES);
    script.run(5_000).reads(1).reads(2).creates_bytes(3, 16 * BYTES);
    script.run(12_000).reads(0).creates(4);
    script.idles(1, 1_000_000);
    script.run(10).reads(0).workspace(40 * BYTES);
    for storage in [1, 2, 3, 4] {
        script.run(10).reads(storage).frees(storage);
    }
    let trace = script.trace();
    let budget_bytes = Lineage::of(&trace).keep_all_peak_bytes() - 32 * BYTES - 1;
    assert_eq!(evicted("dtr", &trace, SLOW, budget_bytes, ActionSet::RECOMPUTE), dropped(&[1, 2, 3]));
    assert_eq!(evicted("dtr-eq", &trace, SLOW, budget_bytes, ActionSet::RECOMPUTE), dropped(&[2, 3, 4]));
}

/// Storage 1 has the longest gap, 2 a slightly shorter one but many more bytes. 1 is read again and again at the end.
fn two_gaps(bytes_of_2: u64) -> (Trace, u64) {
    let mut script = Script::new(1);
    script.run(10).reads(0).creates(1);
    script.run(10).reads(0).creates_bytes(2, bytes_of_2);
    script.idles(5, 1_000);
    script.run(10).reads(0).workspace(BYTES);
    script.idles(5, 1_000);
    script.run(10).reads(2).frees(2);
    for _ in 0..4 {
        script.run(10).reads(1);
    }
    let trace = script.trace();
    let budget_bytes = Lineage::of(&trace).keep_all_peak_bytes() - BYTES / 2;
    (trace, budget_bytes)
}

#[test]
fn capuchin_takes_the_longest_free_time_and_autoswap_the_largest_area() {
    let (trace, budget_bytes) = two_gaps(4 * BYTES);
    assert_eq!(evicted("capuchin", &trace, 100, budget_bytes, ActionSet::ALL), swapped(&[1]));
    assert_eq!(evicted("autoswap", &trace, 100, budget_bytes, ActionSet::ALL), swapped(&[2]));
}

#[test]
fn capuchin_recomputes_where_no_swap_is_hidden() {
    let (trace, budget_bytes) = two_gaps(BYTES);
    let evicted = evicted("capuchin", &trace, SLOW, budget_bytes, ActionSet::ALL);
    assert!(matches!(evicted[..], [(_, Action::Recompute)]), "{evicted:?}");
}

#[test]
fn heat_keeps_what_will_be_read_often() {
    let (trace, budget_bytes) = two_gaps(BYTES);
    assert_eq!(evicted("autoswap", &trace, 100, budget_bytes, ActionSet::SWAP), swapped(&[1]));
    assert_eq!(evicted("heat", &trace, 100, budget_bytes, ActionSet::SWAP), swapped(&[2]));
}

#[test]
fn heat_counts_uses_one_after_another_too() {
    let mut script = Script::new(1);
    script.run(10).reads(0).creates(1);
    script.run(10).reads(0).creates(2);
    script.idles(5, 1_000);
    script.run(10).reads(0).workspace(BYTES);
    script.idles(5, 1_000);
    script.run(10).reads(1).reads(2);
    script.run(10).reads(1);
    script.run(10).reads(1);
    script.run(10).reads(1).reads(2);
    let trace = script.trace();
    let budget_bytes = Lineage::of(&trace).keep_all_peak_bytes() - BYTES / 2;
    assert_eq!(evicted("heat", &trace, 100, budget_bytes, ActionSet::SWAP), swapped(&[2]));
}

/// A small network: convolution, ReLU, convolution, ReLU, and their backward operators in reverse order.
///
/// 1 and 3 are made by convolutions, 2 and 4 by ReLUs; 2 is read by the second convolution.
fn network() -> (Trace, u64) {
    let mut script = Script::new(1);
    script.run(1_000).named("aten::convolution").reads(0).creates(1);
    script.run(100).named("aten::relu").reads(1).creates(2);
    script.run(1_000).named("aten::convolution").reads(2).creates(3);
    script.run(100).named("aten::relu").reads(3).creates(4);
    script.run(1_000).named("aten::sum").reads(4).creates(5);
    script.run(1_000).named("aten::expand").backward().reads(5).creates(6);
    script.run(100).named("aten::threshold_backward").backward().reads(4).reads(6).frees(4);
    script.run(1_000).named("aten::convolution_backward").backward().reads(3).reads(6).frees(3);
    script.run(100).named("aten::threshold_backward").backward().reads(2).reads(6).frees(2);
    script.run(1_000).named("aten::convolution_backward").backward().reads(1).reads(6).frees(1);
    let trace = script.trace();
    let peak_bytes = Lineage::of(&trace).keep_all_peak_bytes();
    (trace, peak_bytes)
}

#[test]
fn vdnn_offloads_all_feature_maps_or_those_of_convolutions_or_as_few_as_fit() {
    let (trace, peak_bytes) = network();
    assert_eq!(evicted("vdnn-all", &trace, 10, peak_bytes, ActionSet::ALL), swapped(&[1, 2, 3, 4]));
    assert_eq!(evicted("vdnn-conv", &trace, 10, peak_bytes, ActionSet::ALL), swapped(&[2]));
    for (missing, expected) in [(0, &[][..]), (BYTES, &[2]), (2 * BYTES, &[1, 2, 3, 4])] {
        let chosen = evicted("vdnn-dyn", &trace, 10, peak_bytes - missing, ActionSet::ALL);
        assert_eq!(chosen, swapped(expected), "{missing} bytes are missing");
    }
    for (missing, expected) in [(0, &[][..]), (BYTES, &[1]), (2 * BYTES, &[1, 2])] {
        let chosen = evicted("vdnn++", &trace, 10, peak_bytes - missing, ActionSet::ALL);
        assert_eq!(chosen, swapped(expected), "{missing} bytes are missing");
    }
}

#[test]
fn superneurons_drops_what_cheap_layers_left_and_offloads_the_rest_as_needed() {
    let (trace, peak_bytes) = network();
    assert_eq!(evicted("superneurons", &trace, 10, peak_bytes - BYTES, ActionSet::ALL), dropped(&[2, 4]));
    let tighter = evicted("superneurons", &trace, 10, peak_bytes - 3 * BYTES, ActionSet::ALL);
    assert_eq!(tighter, [(1, Action::Swap), (2, Action::Recompute), (4, Action::Recompute)]);
}

#[test]
fn chen_keeps_every_third_of_nine() {
    let mut script = Script::new(1);
    for storage in 1..=9 {
        script.run(100).reads(storage - 1).creates(storage);
    }
    script.run(100).backward().reads(9).frees(9);
    for storage in (1..9).rev() {
        script.run(100).backward().reads(storage).frees(storage);
    }
    let trace = script.trace();
    let peak_bytes = Lineage::of(&trace).keep_all_peak_bytes();
    // Nothing is idle between the making of 9 and its use, so that the chain is 1 to 8.
    assert_eq!(evicted("chen", &trace, SLOW, peak_bytes, ActionSet::ALL), dropped(&[2, 3, 5, 6, 8]));
}

/// Of what the backward pass reads, 1 is worth 3 µs, 2 is worth 4, and 3 is worth 5 but as large as both: where there is no room
/// for one of them it is 1 that is rebuilt, and where there is room for two of four megabytes 3 is.
#[test]
fn a_knapsack_saves_what_is_worth_the_most_time_in_its_bytes() {
    let mut script = Script::new(1);
    script.run(3_000).reads(0).creates(1);
    script.run(4_000).reads(0).creates(2);
    script.run(5_000).reads(0).creates_bytes(3, 2 * BYTES);
    script.run(100).reads(0).workspace(4 * BYTES);
    script.run(100).backward().workspace(4 * BYTES);
    for storage in 1..=3 {
        script.run(100).backward().reads(storage).frees(storage);
    }
    let trace = script.trace();
    let peak_bytes = Lineage::of(&trace).keep_all_peak_bytes();
    for (missing, expected) in [(0, &[][..]), (1, &[1]), (2, &[3]), (3, &[1, 3]), (4, &[1, 2, 3])] {
        let rebuilt = evicted("knapsack", &trace, 1, peak_bytes - missing * BYTES, ActionSet::ALL);
        assert_eq!(rebuilt, dropped(expected), "{missing} MiB are missing");
    }
    assert_eq!(evicted("knapsack", &trace, 1, peak_bytes - BYTES, ActionSet::SWAP), []);
}

/// At the peak 1 to 3 are idle: 1 is large but not long enough for its copies, 2 covers more bytes × time than 3. 4 is
/// larger and idle longer than any, but not at the peak.
#[test]
fn appobmem_takes_the_largest_area_that_is_hidden_and_at_the_peak() {
    let mut script = Script::new(1);
    script.run(10).reads(0).creates_bytes(1, 8 * BYTES);
    script.run(10).reads(1).creates_bytes(2, 3 * BYTES);
    script.run(10).reads(2).creates_bytes(3, 2 * BYTES);
    script.idles(4, 1_000);
    script.run(10).reads(0).reads(1);
    script.idles(1, 150);
    script.run(10).reads(0).workspace(9 * BYTES);
    script.run(10).reads(0).reads(1).frees(1);
    script.idles(4, 1_000);
    script.run(10).reads(2).reads(3).frees(2).frees(3);
    script.run(10).reads(0).creates_bytes(4, 9 * BYTES);
    script.idles(20, 1_000);
    script.run(10).reads(4).frees(4);
    let trace = script.trace();
    let budget_bytes = Lineage::of(&trace).keep_all_peak_bytes() - BYTES;
    assert_eq!(evicted("appobmem", &trace, 100, budget_bytes, ActionSet::ALL), swapped(&[2]));
    assert_eq!(evicted("appobmem", &trace, 100, budget_bytes, ActionSet::RECOMPUTE), []);
}

/// 0 is idle for 20 operators and 1 for three at a time: an interval of four operators or more migrates 0 alone.
#[test]
fn sentinel_migrates_what_a_whole_interval_does_not_access() {
    let mut script = Script::new(0);
    script.run(1_000).creates(0).creates(1);
    for _ in 0..5 {
        script.idles(3, 100);
        script.run(100).reads(1);
    }
    script.run(100).workspace(BYTES);
    script.run(100).reads(0).reads(1);
    let trace = script.trace();
    let budget_bytes = Lineage::of(&trace).keep_all_peak_bytes() - BYTES;
    assert_eq!(evicted("sentinel", &trace, 300, budget_bytes, ActionSet::ALL), swapped(&[0]));
}

#[test]
fn random_follows_its_seed() {
    let (trace, budget_bytes) = four(BYTES, 90_000, BYTES / 4);
    let lineage = Lineage::of(&trace);
    let problem =
        Problem { trace: &trace, lineage: &lineage, tiers: link(100).into(), budget_bytes, actions: ActionSet::ALL };
    let plan = |seed| plimsoll_runtime::plan(problem, baseline("random", seed).expect("it is one").as_mut()).plan;
    assert_eq!(plan(3), plan(3));
    assert!((0..20).any(|seed| plan(seed) != plan(3)));
}

#[test]
fn initial_storages_are_offered_like_any_other_where_they_can_be_swapped() {
    let (trace, budget_bytes) = four(BYTES, 90_000, BYTES / 4);
    let first = StorageId(0);
    let windows = Lineage::of(&trace).windows().iter().any(|window| window.storage == first && !window.recomputable);
    assert!(windows, "storage 0 is a root");
    for name in BASELINES {
        let dropped = evicted(name, &trace, SLOW, budget_bytes, ActionSet::RECOMPUTE);
        assert!(!dropped.contains(&(first.0, Action::Recompute)), "{name} drops a root");
    }
}
