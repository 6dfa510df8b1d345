//! The promise: the hours that a timetable shows are those that the timeline counted.

mod support;

use plimsoll_runtime::hardware::{FileTier, SlowTiers};
use plimsoll_runtime::timetable::{Activity, Lane, Timetable};
use plimsoll_runtime::{Lineage, Link, Timeline};
use support::draw::Draw;
use support::random_edges::random_edges;
use support::random_plan::random_plan;
use support::random_trace::random_trace;

#[test]
fn a_timetable_adds_up_to_the_prediction() {
    let (mut stalled, mut reran) = (0, 0);
    for seed in 0..3_000 {
        let draw = &mut Draw::new(seed);
        let trace = random_trace(draw, 40);
        let lineage = Lineage::between(&trace, random_edges(draw, &trace));
        let plan = random_plan(draw, &lineage);
        let link = |draw: &mut Draw| Link {
            contention_each_ns: draw.pick(&[0, 0, 30]),
            contention_ns_per_byte: draw.pick(&[0.0, 0.2]),
            each_ns: draw.pick(&[0, 0, 100]),
            ..Link::symmetric(draw.pick(&[1e9, 1e10, 1e11, 1e13]), draw.pick(&[0, 10, 2_000]))
        };
        let (host, peak_bytes) = (link(draw), lineage.keep_all_peak_bytes());
        let mut tiers = SlowTiers::from(host);
        if draw.within(0, 2) == 0 {
            tiers.host_limit_bytes = peak_bytes * draw.within(0, 50) / 100;
            tiers.file = Some(FileTier { link: link(draw), limit_bytes: u64::MAX });
        }
        let budget_bytes = peak_bytes * draw.within(10, 110) / 100;
        let (schedule, prediction) = Timeline::new(&trace, &lineage, tiers).schedule(&plan, budget_bytes);
        let table = Timetable::of(&trace, &lineage, &schedule, tiers);
        assert_eq!(table.makespan_ns, prediction.makespan_ns, "seed {seed}");
        let stall_ns = table.time_ns(|activity| matches!(activity, Activity::Stall(..)));
        assert_eq!(stall_ns, prediction.stall_ns, "seed {seed}");
        let contention_ns = table.time_ns(|activity| *activity == Activity::Contention);
        assert_eq!(contention_ns, prediction.contention_ns, "seed {seed}");
        let rerun_ns = table.time_ns(|activity| matches!(activity, Activity::Rerun(_)));
        assert_eq!(rerun_ns, prediction.recompute_ns, "seed {seed}");
        let peak_bytes = table.device_bytes.iter().map(|&(_, bytes)| bytes).max();
        assert_eq!(peak_bytes.unwrap_or(0), prediction.peak_bytes, "seed {seed}");
        for lane in [Lane::Compute, Lane::Offload, Lane::Prefetch] {
            let spans: Vec<_> = table.spans.iter().filter(|span| span.lane == lane).collect();
            assert!(spans.windows(2).all(|pair| pair[0].end_ns <= pair[1].start_ns), "seed {seed}: {lane:?}");
        }
        assert!(table.device_bytes.is_sorted_by_key(|&(ns, _)| ns), "seed {seed}");
        (stalled, reran) = (stalled + stall_ns, reran + rerun_ns);
    }
    assert!(stalled > 0 && reran > 0);
}
