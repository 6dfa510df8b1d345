//! The promise: an explanation adds up to what it explains, and names who is there.

mod support;

use plimsoll_runtime::lineage::WindowId;
use plimsoll_runtime::trace::{OperatorId, StorageId};
use plimsoll_runtime::{Action, Lineage, Link, Plan, Timeline};
use support::draw::Draw;
use support::random_trace::random_trace;
use support::script::{BYTES, Script};

#[test]
fn times_add_up_to_the_makespan_and_bytes_to_the_peak() {
    let mut memory_stalls = 0;
    for seed in 0..1_500 {
        let draw = &mut Draw::new(seed);
        let trace = random_trace(draw, 60);
        let lineage = Lineage::of(&trace);
        let mut plan = Plan::keep_all(lineage.windows().len());
        for (id, window) in (0..).map(WindowId).zip(lineage.windows()) {
            let evicted = if window.recomputable && draw.chance(50) { Action::Recompute } else { Action::Swap };
            plan.set(id, if draw.chance(40) { evicted } else { Action::Keep });
        }
        let budget_bytes = lineage.keep_all_peak_bytes() * draw.within(30, 110) / 100;
        let mut timeline = Timeline::new(&trace, &lineage, Link::symmetric(1e10, 500));
        let why = timeline.explain(&plan, budget_bytes, 3);
        assert_eq!(why.prediction, timeline.predict(&plan, budget_bytes), "seed {seed}");
        let time = &why.time;
        let stalls_ns = time.data_stall_ns + time.memory_stall_ns;
        let total_ns = time.compute_ns + time.gaps_ns + stalls_ns + time.contention_ns + time.recompute_ns;
        assert_eq!((total_ns, stalls_ns), (why.prediction.makespan_ns, why.prediction.stall_ns), "seed {seed}");
        memory_stalls += u64::from(time.memory_stall_ns > 0);
        let peak = &why.peak;
        let held: u64 = peak.classes.iter().map(|&(_, bytes)| bytes).sum();
        let total_bytes = held + peak.beside_bytes + peak.demand_bytes + peak.unseen_bytes;
        assert_eq!(total_bytes, why.prediction.peak_bytes, "seed {seed}");
        assert!(peak.largest.len() <= 3 && peak.largest.is_sorted_by_key(|&(_, bytes)| std::cmp::Reverse(bytes)));
        assert!((0.0..=1.0).contains(&why.offload_utilisation) && (0.0..=1.0).contains(&why.prefetch_utilisation));
    }
    assert!(memory_stalls > 100, "{memory_stalls}");
}

#[test]
fn an_explanation_names_the_operator_at_the_peak_and_the_storages_that_make_it() {
    let mut script = Script::new(1);
    script.run(70).reads(0).creates_bytes(1, 3 * BYTES);
    script.run(70).reads(0).creates_bytes(2, 2 * BYTES);
    script.run(5_000);
    script.run(5).reads(0).workspace(4 * BYTES);
    script.idles(4, 5_000);
    script.run(5).reads(1).reads(2);
    let trace = script.trace();
    let lineage = Lineage::of(&trace);
    let mut plan = Plan::keep_all(lineage.windows().len());
    let of_first = |window: &plimsoll_runtime::lineage::Window| window.storage == StorageId(1) && window.start == 1;
    let swapped = lineage.windows().iter().position(of_first).expect("storage 1 is idle");
    plan.set(WindowId(swapped as u32), Action::Swap);
    let link = Link { latency_ns: 1_000, ..Link::symmetric(f64::INFINITY, 0) };
    let why = Timeline::new(&trace, &lineage, link).explain(&plan, u64::MAX, 1);
    assert_eq!(why.peak_operator, Some(OperatorId(3)));
    assert_eq!(why.peak_operator_name.as_deref(), Some("operator"));
    assert_eq!(why.peak.largest, [(StorageId(2), 2 * BYTES)], "storage 1 has left");
    assert_eq!((why.peak.classes.len(), why.peak.classes[0].1), (1, 3 * BYTES), "storages 0 and 2");
    assert_eq!(why.peak.demand_bytes, 4 * BYTES);
    let busy = 1_000.0 / why.prediction.makespan_ns as f64;
    assert_eq!((why.offload_utilisation, why.prefetch_utilisation), (busy, busy));
}
