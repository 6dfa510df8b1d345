use super::lowest;
use crate::lineage::Window;
use crate::observation::{Candidate, Pressure};
use crate::plan::{Action, Plan};
use crate::policy::{Choice, Policy};
use crate::sweep::Problem;

/// Moves the coldest storage to the slow tier, its heat being H = f·w_f − r·w_r − s·w_s + l·w_l of future frequency f,
/// reuse distance r, size s and lifetime l, each scaled to 0..1 over the storages at hand (Zhou et al., *DeepTM: Efficient
/// Tensor Management in Heterogeneous Memory for DNN Training*, IEEE TPDS 2024, tensor heat).
///
/// Deviations: it decides at pressure points, one storage at a time, so that the budget itself and not an adaptation of
/// the weights settles how many bytes are hot; the weights are equal; storages move alone and not in pages; neither the
/// integer program nor the learned placement of the paper is in it.
#[derive(Default)]
pub struct Heat {
    /// Per window: operators that use its storage from the window's end on.
    uses_to_come: Vec<u32>,
    /// Per window: operators between its storage's first and last use.
    lifetime: Vec<u32>,
}

impl Heat {
    /// f, r, s and l, unscaled.
    fn quantities(&self, candidate: &Candidate) -> [f64; 4] {
        let window = candidate.window.index();
        [
            f64::from(self.uses_to_come[window]),
            candidate.to_use_ns as f64,
            candidate.bytes as f64,
            f64::from(self.lifetime[window]),
        ]
    }
}

impl Policy for Heat {
    fn open(&mut self, problem: &Problem<'_>) -> Plan {
        let windows = problem.lineage.windows();
        // By storage, in their order.
        let mut uses = vec![Vec::new(); problem.trace.storages.len()];
        for (operator, index) in problem.trace.operators.iter().zip(0u32..) {
            let accessed = operator.accesses.iter().map(|access| access.storage);
            for storage in operator.creates.iter().copied().chain(accessed) {
                uses[storage.index()].push(index);
            }
        }
        let uses_of = |window: &Window| uses[window.storage.index()].as_slice();
        let to_come = |window| {
            let uses = uses_of(window);
            (uses.len() - uses.partition_point(|&operator| operator < window.end)) as u32
        };
        let lifetime = |window| match uses_of(window) {
            [first, .., last] => last - first,
            _ => 0,
        };
        self.uses_to_come = windows.iter().map(to_come).collect();
        self.lifetime = windows.iter().map(lifetime).collect();
        Plan::keep_all(windows.len())
    }

    fn decides_unopened(&self) -> bool {
        false
    }

    fn choose(&mut self, pressure: &Pressure<'_>) -> Option<Choice> {
        let (mut least, mut most) = ([f64::INFINITY; 4], [f64::NEG_INFINITY; 4]);
        for candidate in pressure.candidates {
            for (index, value) in self.quantities(candidate).into_iter().enumerate() {
                (least[index], most[index]) = (least[index].min(value), most[index].max(value));
            }
        }
        lowest(pressure, Action::Swap, |candidate| {
            let values = self.quantities(candidate);
            let scaled = |index: usize| (values[index] - least[index]) / (most[index] - least[index]).max(1.0);
            scaled(0) - scaled(1) - scaled(2) + scaled(3)
        })
    }
}
