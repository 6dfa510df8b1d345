//! Random planning problems.

use plimsoll_runtime::{ActionSet, Lineage, Link, Problem};

use super::draw::Draw;
use super::random_edges::random_edges;
use super::random_trace::random_trace;

const SETS: [ActionSet; 3] = [ActionSet::RECOMPUTE, ActionSet::SWAP, ActionSet::ALL];

/// Calls `check` with `count` problems on random traces of up to `operators_max` operators that keep-all does not fit.
pub fn for_random_problems(count: u64, operators_max: u64, mut check: impl FnMut(u64, &Problem<'_>)) {
    let mut found = 0;
    for seed in 0.. {
        let mut draw = Draw::new(seed);
        let trace = random_trace(&mut draw, operators_max);
        let lineage = Lineage::between(&trace, random_edges(&mut draw, &trace));
        let (least, peak) = (*lineage.keep_all_bytes().last().unwrap(), lineage.keep_all_peak_bytes());
        let mut link = Link::symmetric(draw.pick(&[1e9, 1e10, 1e11]), draw.pick(&[0, 300]));
        link.contention_ns_per_byte = draw.pick(&[0.0, 0.01]);
        link.contention_each_ns = draw.pick(&[0, 0, 30]);
        let budget_bytes = least + draw.below((peak - least).max(1));
        let actions = draw.pick(&SETS);
        if budget_bytes < peak {
            check(seed, &Problem { trace: &trace, lineage: &lineage, tiers: link.into(), budget_bytes, actions });
            found += 1;
        }
        if found == count {
            return;
        }
    }
}
