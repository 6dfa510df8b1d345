use super::fastest_that_fits;
use crate::plan::{Action, Plan};
use crate::policy::Policy;
use crate::sweep::Problem;

/// Divides the iteration into equal migration intervals; what an interval does not access is in the slow tier while it
/// lasts, and what lives for less than one never leaves the fast tier (Ren et al., *Sentinel: Efficient Tensor Migration
/// and Allocation on Heterogeneous Memory Systems for Deep Learning*, HPCA 2021, sections 4.2 and 4.4).
///
/// Deviations: an interval is a number of operators, not of layers; its length is the fastest that fits of 1, 2, 4, …
/// operators as the timeline predicts them, where the paper bounds it by a model and then tries; short-lived storages
/// have no space reserved; what is not used again is not moved; no page is shared by storages of different kinds to begin
/// with. Access counts and bytes, by which the paper says what has the fast tier where that does not take an interval's storages, decide nothing: an
/// operator of ours needs all that it accesses, so a shorter interval has to do.
pub struct Sentinel;

impl Policy for Sentinel {
    fn open(&mut self, problem: &Problem<'_>) -> Plan {
        let nothing = Plan::keep_all(problem.lineage.windows().len());
        if !problem.actions.swap {
            return nothing;
        }
        let operators = problem.trace.operators.len() as u32;
        let lengths = std::iter::successors(Some(1u32), |length| length.checked_mul(2));
        let lengths = lengths.take_while(|&length| length <= operators);
        fastest_that_fits(problem, nothing, lengths.map(|length| migrate(problem, length)))
    }
}

/// Swaps every window that lasts for at least one whole interval of `length` operators.
fn migrate(problem: &Problem<'_>, length: u32) -> Plan {
    let mut plan = Plan::keep_all(problem.lineage.windows().len());
    for (id, window) in (0..).zip(problem.lineage.windows()) {
        let next_interval = window.start.div_ceil(length) * length;
        if window.used_again && next_interval + length <= window.end {
            plan.set(crate::lineage::WindowId(id), Action::Swap);
        }
    }
    plan
}
