//! Why a plan costs what it costs: who is on the device when most is, and where the time goes.

use super::{Prediction, Residency, Timeline};
use crate::lineage::VersionId;
use crate::plan::Plan;
use crate::trace::{Class, OperatorId, StorageId};

/// A prediction with its reasons.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// What is explained.
    pub prediction: Prediction,
    /// The operator at the peak; `None` where the peak stands at the iteration's start or end.
    pub peak_operator: Option<OperatorId>,
    /// Its name, such as `aten::mm`.
    pub peak_operator_name: Option<String>,
    /// Device bytes at the peak. They add up to the prediction's peak.
    pub peak: PeakBytes,
    /// The makespan by cause. The times add up to it.
    pub time: TimeByCause,
    /// Share of the makespan in which the offload channel copies.
    pub offload_utilisation: f64,
    /// Share of the makespan in which the prefetch channel copies.
    pub prefetch_utilisation: f64,
}

/// Device bytes at one moment, by what they are for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeakBytes {
    /// Storages that the program holds, by class.
    pub classes: Vec<(Class, u64)>,
    /// The largest of those storages, largest first.
    pub largest: Vec<(StorageId, u64)>,
    /// Versions that reruns made beside their storages.
    pub beside_bytes: u64,
    /// What the operator at the peak, or the rerun before it, allocates: outputs and workspace.
    pub demand_bytes: u64,
    /// What no operator of the iteration ever touches.
    pub unseen_bytes: u64,
}

/// Where a makespan goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimeByCause {
    /// The program's operators.
    pub compute_ns: u64,
    /// The program between its operators.
    pub gaps_ns: u64,
    /// Waiting for a storage that is used and not there yet, or whose bytes are still being read.
    pub data_stall_ns: u64,
    /// Waiting for an offload because its bytes are needed.
    pub memory_stall_ns: u64,
    /// What copies take from compute beside them.
    pub contention_ns: u64,
    /// Reruns.
    pub recompute_ns: u64,
}

/// What a run takes down while it is explained.
#[derive(Debug)]
pub(super) struct Notes {
    /// The peak of the same plan, known from an earlier run.
    peak_bytes: u64,
    peak: Option<(usize, PeakBytes)>,
    pub(super) memory_stall_ns: u64,
    pub(super) offload_busy_ns: u64,
    pub(super) prefetch_busy_ns: u64,
}

impl Timeline<'_> {
    /// Predicts `plan` under `budget_bytes` and says why: with at most `largest` storages at the peak by name. Of a plan
    /// that is given up, what is said of peak and time is said of keep-all.
    pub fn explain(&mut self, plan: &Plan, budget_bytes: u64, largest: usize) -> Explanation {
        let predicted = self.predict(plan, budget_bytes);
        if predicted.given_up {
            let keep_all = Plan::keep_all(plan.actions().len());
            return Explanation { prediction: predicted, ..self.explain(&keep_all, budget_bytes, largest) };
        }
        let peak_bytes = predicted.peak_bytes;
        let notes = Notes { peak_bytes, peak: None, memory_stall_ns: 0, offload_busy_ns: 0, prefetch_busy_ns: 0 };
        self.notes = Some(notes);
        if peak_bytes == self.start_bytes() {
            self.operator = 0;
            self.at.reset();
            self.note_residents(0, peak_bytes);
        }
        let prediction = self.predict(plan, budget_bytes);
        let notes = self.notes.take().expect("put there above");
        let (operator, mut peak) = notes.peak.expect("the same run has the same peak");
        peak.largest.truncate(largest);
        let named = (operator < self.trace.operators.len()).then_some(OperatorId(operator as u32));
        let share = |busy_ns: u64| busy_ns as f64 / prediction.makespan_ns.max(1) as f64;
        Explanation {
            prediction,
            peak_operator: named,
            peak_operator_name: named.map(|operator| self.trace.operator_name(operator).to_owned()),
            peak,
            time: self.time_by_cause(&prediction, notes.memory_stall_ns),
            offload_utilisation: share(notes.offload_busy_ns),
            prefetch_utilisation: share(notes.prefetch_busy_ns),
        }
    }

    fn time_by_cause(&self, prediction: &Prediction, memory_stall_ns: u64) -> TimeByCause {
        let compute_ns: u64 = self.trace.operators.iter().map(|operator| operator.cost_ns).sum();
        TimeByCause {
            compute_ns,
            gaps_ns: self.lineage.keep_all_makespan_ns() - compute_ns,
            data_stall_ns: prediction.stall_ns - memory_stall_ns,
            memory_stall_ns,
            contention_ns: prediction.contention_ns,
            recompute_ns: prediction.recompute_ns,
        }
    }

    /// Takes down who is on the device, if `bytes` at `operator` are the first to be the peak.
    pub(super) fn note_residents(&mut self, operator: usize, bytes: u64) {
        let wanted = |notes: &Notes| notes.peak.is_none() && notes.peak_bytes == bytes;
        if !self.notes.as_ref().is_some_and(wanted) {
            return;
        }
        let mut peak = PeakBytes { unseen_bytes: self.trace.unseen_bytes, ..PeakBytes::default() };
        for (storage, lives) in self.lives_at(operator) {
            let there = !matches!(self.at.residency[storage.index()], Residency::Offloaded | Residency::Dropped);
            if lives && there {
                peak.largest.push((storage, self.bytes(storage)));
            }
        }
        peak.largest.sort_by_key(|&(storage, bytes)| (std::cmp::Reverse(bytes), storage));
        for &(storage, bytes) in &peak.largest {
            let class = self.trace.storages[storage.index()].class;
            match peak.classes.iter_mut().find(|(other, _)| *other == class) {
                Some((_, total)) => *total += bytes,
                None => peak.classes.push((class, bytes)),
            }
        }
        peak.classes.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
        let versions = (0..self.at.beside.len() as u32).map(VersionId);
        let beside = versions.filter(|version| self.at.beside[version.index()]);
        peak.beside_bytes = beside.map(|version| self.bytes(self.lineage.version(version).storage)).sum();
        let held: u64 = peak.classes.iter().map(|&(_, bytes)| bytes).sum();
        peak.demand_bytes = bytes - held - peak.beside_bytes - peak.unseen_bytes;
        self.notes.as_mut().expect("checked above").peak = Some((operator, peak));
    }

    /// Every storage, and whether the program has it before operator `index`.
    fn lives_at(&self, index: usize) -> impl Iterator<Item = (StorageId, bool)> {
        let mut lives = vec![false; self.trace.storages.len()];
        lives[..self.trace.initial_storages as usize].fill(true);
        for operator in &self.trace.operators[..index] {
            operator.creates.iter().for_each(|storage| lives[storage.index()] = true);
            operator.frees.iter().for_each(|storage| lives[storage.index()] = false);
        }
        (0..).map(StorageId).zip(lives)
    }
}
