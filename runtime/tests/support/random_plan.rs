//! Plans drawn at random, in which all that is legal happens.

use plimsoll_runtime::lineage::WindowId;
use plimsoll_runtime::{Action, Lineage, Plan};

use super::draw::Draw;

/// A plan that evicts three windows of five, by any way that is legal.
pub fn random_plan(draw: &mut Draw, lineage: &Lineage) -> Plan {
    let mut plan = Plan::keep_all(lineage.windows().len());
    for (id, window) in (0..).map(WindowId).zip(lineage.windows()) {
        let evicted = if window.recomputable && draw.chance(60) { Action::Recompute } else { Action::Swap };
        if draw.chance(60) {
            plan.set(id, evicted);
        }
    }
    plan
}
