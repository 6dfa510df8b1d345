//! The promise: what an allocator is asked for is what the timeline counted, to the byte.

mod support;

use plimsoll_runtime::allocators::{Model, Requests};
use plimsoll_runtime::{Action, Lineage, Link, Timeline};
use support::draw::Draw;
use support::random_edges::random_edges;
use support::random_plan::random_plan;
use support::random_trace::random_trace;

#[test]
fn the_most_bytes_in_use_are_the_predicted_peak() {
    let mut evicted = 0;
    for seed in 0..3_000 {
        let draw = &mut Draw::new(seed);
        let trace = random_trace(draw, 40);
        let lineage = Lineage::between(&trace, random_edges(draw, &trace));
        let plan = random_plan(draw, &lineage);
        evicted += plan.actions().iter().filter(|&&action| action != Action::Keep).count();
        let link = Link::symmetric(draw.pick(&[1e9, 1e11, 1e13]), draw.pick(&[0, 2_000]));
        let budget_bytes = lineage.keep_all_peak_bytes() * draw.within(10, 110) / 100;
        let (schedule, prediction) = Timeline::new(&trace, &lineage, link).schedule(&plan, budget_bytes);
        let requests = Requests::of(&trace, &lineage, &schedule);
        assert_eq!(requests.used_bytes(), prediction.peak_bytes, "seed {seed}");
        for model in Model::ALL {
            let footprint = model.serve(&requests, None).unwrap();
            assert!(footprint.reserved_bytes >= prediction.peak_bytes, "seed {seed}: {}", model.name());
        }
    }
    assert!(evicted > 10_000);
}
