use crate::plan::{Action, Plan};
use crate::policy::Policy;
use crate::sweep::Problem;

/// Keeps every √n-th activation of the forward pass and rebuilds the rest (Chen et al., *Training Deep Nets with
/// Sublinear Memory Cost*, 2016).
///
/// Deviations: the chain is the order in which the forward pass makes the storages that the backward pass reads;
/// what nothing can rebuild is kept. As there, the budget changes nothing: where that has room for everything, too, all but the
/// √n are rebuilt.
pub struct Chen;

impl Policy for Chen {
    fn open(&mut self, problem: &Problem<'_>) -> Plan {
        let lineage = problem.lineage;
        let mut plan = Plan::keep_all(lineage.windows().len());
        let mut chain = super::forward_to_backward(problem);
        chain.retain(|&id| problem.allows(id, Action::Recompute));
        chain.sort_by_key(|&id| lineage.window(id).version);
        let stride = (chain.len() as f64).sqrt().round().max(1.0) as usize;
        for (position, &id) in chain.iter().enumerate() {
            if position % stride != 0 {
                plan.set(id, Action::Recompute);
            }
        }
        plan
    }
}
