use super::{Fastest, forward_to_backward, producer};
use crate::lineage::WindowId;
use crate::plan::{Action, Plan};
use crate::policy::Policy;
use crate::sweep::Problem;

/// Grains in which bytes are counted, of all items together: as PyTorch counts them.
const GRAINS: usize = 10_000;
/// Grains between a capacity that fits and one that does not, at which halving ends: as PyTorch's drawing of all capacities
/// does.
const APART: usize = GRAINS / 1_000;

/// Saves for the backward pass what fills a knapsack with the most time, an activation being worth that of the operator
/// which made it, and rebuilds the rest (PyTorch's `torch._functorch.config.activation_memory_budget`, with
/// `activation_memory_budget_solver = "dp"`; `torch/_functorch/partitioners.py` of 2.11).
///
/// Deviations: the capacity, which PyTorch is told as a share, is found by halving, as the largest that the timeline says
/// fits; of everything that was tried, the fastest that fits wins. Items are windows that may be recomputed, of the size and
/// time that they have, and not a compiled graph's nodes with their floating-point operations: nothing is fused, and no
/// minimum cut chooses between an activation and what it was made of.
pub struct Knapsack;

impl Policy for Knapsack {
    fn open(&mut self, problem: &Problem<'_>) -> Plan {
        let lineage = problem.lineage;
        let mut items = forward_to_backward(problem);
        items.retain(|&id| problem.allows(id, Action::Recompute));
        if items.is_empty() || lineage.keep_all_peak_bytes() <= problem.budget_bytes {
            return Plan::keep_all(lineage.windows().len());
        }
        let packings = Packings::of(problem, items);
        let plan = |capacity| packings.plan(capacity, Plan::keep_all(lineage.windows().len()));
        let mut fastest = Fastest::of(problem, plan(0));
        let (mut fits, mut exceeds) = (0, GRAINS);
        while exceeds - fits > APART {
            let capacity = fits.midpoint(exceeds);
            *if fastest.offer(plan(capacity)) { &mut fits } else { &mut exceeds } = capacity;
        }
        fastest.plan
    }
}

/// What fills knapsacks of all capacities with the most time.
struct Packings {
    items: Vec<WindowId>,
    grains: Vec<usize>,
    /// Per item a bit for each capacity up to [`GRAINS`]: whether the item is in the best packing of it and those before it.
    is_in: Vec<[u64; WORDS]>,
}

/// Words that a bit for each capacity takes.
const WORDS: usize = GRAINS / 64 + 1;

impl Packings {
    /// By dynamic programming, an item after the other.
    fn of(problem: &Problem<'_>, items: Vec<WindowId>) -> Self {
        let lineage = problem.lineage;
        let bytes = |id: &WindowId| lineage.bytes(lineage.window(*id).storage) as f64;
        let worth_ns = |id: &WindowId| producer(problem, *id).map_or(0, |producer| lineage.cost_ns(producer));
        let all_bytes: f64 = items.iter().map(bytes).sum();
        let of_all = |id| (bytes(id) / all_bytes * GRAINS as f64).round() as usize;
        let grains: Vec<usize> = items.iter().map(of_all).collect();
        let mut is_in = vec![[0; WORDS]; items.len()];
        let mut most_ns = vec![0u64; GRAINS + 1];
        for ((id, &grains), is_in) in items.iter().zip(&grains).zip(&mut is_in) {
            let worth_ns = worth_ns(id);
            for capacity in (grains..=GRAINS).rev() {
                let with_it_ns = most_ns[capacity - grains] + worth_ns;
                if with_it_ns > most_ns[capacity] {
                    most_ns[capacity] = with_it_ns;
                    is_in[capacity / 64] |= 1 << (capacity % 64);
                }
            }
        }
        Packings { items, grains, is_in }
    }

    /// `plan`, and every item recomputed that a knapsack of so many grains does not save.
    fn plan(&self, capacity: usize, mut plan: Plan) -> Plan {
        let mut left = capacity;
        for ((&id, grains), is_in) in self.items.iter().zip(&self.grains).zip(&self.is_in).rev() {
            if is_in[left / 64] >> (left % 64) & 1 == 1 {
                left -= grains;
            } else {
                plan.set(id, Action::Recompute);
            }
        }
        plan
    }
}
