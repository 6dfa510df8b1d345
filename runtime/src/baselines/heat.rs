use super::lowest;
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
    /// Per window: accesses of its storage from the window's end on.
    accesses_to_come: Vec<u32>,
    /// Per window: operators between its storage's first and last access.
    lifetime: Vec<u32>,
}

impl Heat {
    /// f, r, s and l, unscaled.
    fn quantities(&self, candidate: &Candidate) -> [f64; 4] {
        let window = candidate.window.index();
        [
            f64::from(self.accesses_to_come[window]),
            candidate.to_use_ns as f64,
            candidate.bytes as f64,
            f64::from(self.lifetime[window]),
        ]
    }
}

impl Policy for Heat {
    fn name(&self) -> &str {
        "heat"
    }

    fn open(&mut self, problem: &Problem<'_>) -> Plan {
        let (lineage, storages) = (problem.lineage, problem.trace.storages.len());
        let windows = lineage.windows();
        let (mut first, mut last) = (vec![u32::MAX; storages], vec![0; storages]);
        for window in windows {
            let storage = window.storage.index();
            first[storage] = first[storage].min(window.start);
            last[storage] = last[storage].max(window.end);
        }
        self.lifetime.clear();
        self.lifetime.extend(windows.iter().map(|window| last[window.storage.index()] - first[window.storage.index()]));
        self.accesses_to_come.clear();
        self.accesses_to_come.resize(windows.len(), 0);
        let mut accesses = vec![0; storages];
        // Windows are ordered by their ends.
        for (index, window) in windows.iter().enumerate().rev() {
            let accessed = window.used_again && (window.end as usize) < problem.trace.operators.len();
            accesses[window.storage.index()] += u32::from(accessed);
            self.accesses_to_come[index] = accesses[window.storage.index()];
        }
        Plan::keep_all(windows.len())
    }

    fn reads_features(&self) -> bool {
        false
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
