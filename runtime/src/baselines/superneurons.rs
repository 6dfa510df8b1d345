use super::{COMPUTE_HEAVY, forward_to_backward, lowest_among, made_by};
use crate::observation::{Candidate, Pressure};
use crate::plan::{Action, Plan};
use crate::policy::{Choice, Policy};
use crate::sweep::Problem;

/// Drops what cheap layers leave for the backward pass, and offloads what convolutions and matrix products leave, least
/// recently used first, as far as the budget needs (Wang et al., *SuperNeurons: Dynamic GPU Memory Management for Training
/// Deep Neural Networks*, PPoPP 2018, sections 3.2 to 3.4).
///
/// Deviations: a layer is known by the names of its operators; what is offloaded is what heavy layers leave, where the paper
/// offloads what convolutions read; where keep-all fits, nothing is dropped; a segment's
/// recompute is memory-centric or speed-centric as the timeline sees fit, which keeps what was rebuilt while there is
/// room, and not by the segment's bytes; where everything of both kinds is gone already, nothing else is evicted.
#[derive(Default)]
pub struct SuperNeurons {
    /// Per window: whether it was left for the backward pass.
    left: Vec<bool>,
}

impl Policy for SuperNeurons {
    fn open(&mut self, problem: &Problem<'_>) -> Plan {
        let lineage = problem.lineage;
        let mut plan = Plan::keep_all(lineage.windows().len());
        self.left.clear();
        self.left.resize(lineage.windows().len(), false);
        let fits = lineage.keep_all_peak_bytes() <= problem.budget_bytes;
        for id in forward_to_backward(problem) {
            self.left[id.index()] = true;
            let cheap = lineage.window(id).recomputable && !made_by(problem, id, &COMPUTE_HEAVY);
            if cheap && problem.actions.recompute && !fits {
                plan.set(id, Action::Recompute);
            }
        }
        plan
    }

    fn decides_unopened(&self) -> bool {
        false
    }

    fn choose(&mut self, pressure: &Pressure<'_>) -> Option<Choice> {
        let left = |candidate: &Candidate| self.left[candidate.window.index()];
        lowest_among(pressure, Action::Swap, left, |candidate| -(candidate.staleness_ns as f64))
    }
}
