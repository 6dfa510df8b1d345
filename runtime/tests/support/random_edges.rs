//! How parts of iterations may stand to those before and after them.

use plimsoll_runtime::Trace;
use plimsoll_runtime::lineage::Edges;
use plimsoll_runtime::trace::StorageId;

use super::draw::Draw;

/// A whole iteration, mostly, or a part of one, which finds some of its initial storages away.
pub fn random_edges(draw: &mut Draw, trace: &Trace) -> Edges {
    if draw.chance(60) {
        return Edges::default();
    }
    let mut some = || -> Vec<StorageId> {
        let percent = draw.pick(&[0, 50, 100]);
        (0..trace.initial_storages).map(StorageId).filter(|_| draw.chance(percent)).collect()
    };
    let (all_away, stays) = (some(), some());
    let (mut leaving, away): (Vec<_>, _) = all_away.into_iter().partition(|_| draw.chance(30));
    if draw.chance(50) {
        leaving.reverse();
    }
    Edges { away, leaving, stays }
}
