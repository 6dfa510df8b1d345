//! Dead tails: what a recorded program holds after its last use.
//!
//! A plan may give such bytes up for nothing, so what they make of a peak is no saving of the plan's. This module counts
//! them, from a trace alone; it knows nothing of plans or budgets.

use crate::trace::{StorageId, Trace};

/// The peak of the iteration if every storage that it lets go of went right after its last use, or before the first
/// operator where nothing uses it. Nothing is evicted, and what lives on into the next iteration stays.
pub fn peak_without_dead_tails_bytes(trace: &Trace) -> u64 {
    let bytes_of = |storage: StorageId| trace.storages[storage.index()].bytes;
    let mut dies = vec![false; trace.storages.len()];
    for storage in trace.operators.iter().flat_map(|operator| &operator.frees) {
        dies[storage.index()] = true;
    }
    // Per storage: one past the last operator that makes or uses it.
    let mut used_until = vec![0; trace.storages.len()];
    for (index, operator) in trace.operators.iter().enumerate() {
        let used = operator.accesses.iter().map(|access| access.storage);
        used.chain(operator.creates.iter().copied()).for_each(|storage| used_until[storage.index()] = index + 1);
    }
    let mut freed_bytes = vec![0; trace.operators.len() + 1];
    for (index, until) in used_until.into_iter().enumerate().filter(|&(index, _)| dies[index]) {
        freed_bytes[until] += bytes_of(StorageId(index as u32));
    }
    let mut resident_bytes = trace.start_bytes() - freed_bytes[0];
    let mut peak_bytes = resident_bytes;
    for (operator, freed_bytes) in trace.operators.iter().zip(&freed_bytes[1..]) {
        resident_bytes += operator.creates.iter().map(|&storage| bytes_of(storage)).sum::<u64>();
        peak_bytes = peak_bytes.max(resident_bytes + operator.workspace_bytes);
        resident_bytes -= freed_bytes;
    }
    peak_bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lineage::Lineage;
    use crate::trace::{Access, AccessMode, Class, Operator, Phase, Storage};

    /// Operators by what they use, make and are followed by letting go of; every one has a workspace of 3 bytes.
    fn trace(bytes: &[u64], initial_storages: u32, operators: &[[&[u32]; 3]]) -> Trace {
        let ids = |ids: &[u32]| ids.iter().map(|&id| StorageId(id)).collect::<Vec<_>>();
        let operator = |[uses, creates, frees]: &[&[u32]; 3]| Operator {
            name: 0,
            phase: Phase::Forward,
            cost_ns: 1,
            spread_ns: 0,
            gap_ns: 0,
            workspace_bytes: 3,
            accesses: ids(uses).into_iter().map(|storage| Access { storage, mode: AccessMode::Read }).collect(),
            creates: ids(creates),
            frees: ids(frees),
            not_replayable: None,
        };
        let trace = Trace {
            workload: String::new(),
            family: String::new(),
            device: String::new(),
            recorded_iterations: 1,
            unseen_bytes: 1_000,
            tail_ns: 0,
            makespan_ns: 0,
            peak_bytes: 0,
            names: vec!["aten::relu".into()],
            storages: bytes.iter().map(|&bytes| Storage { bytes, class: Class::Temporary, locked: None }).collect(),
            initial_storages,
            operators: operators.iter().map(operator).collect(),
            carried: Vec::new(),
        };
        assert_eq!(trace.check(), Ok(()));
        trace
    }

    #[test]
    fn what_is_held_after_its_last_use_is_not_counted() {
        // Storage 1 is last used by operator 1 and held until operator 2 has run.
        let held = trace(&[10, 200, 40, 70], 1, &[[&[0], &[1], &[]], [&[1], &[2], &[]], [&[2], &[3], &[1, 2]]]);
        assert_eq!(Lineage::of(&held).keep_all_peak_bytes(), 1_000 + 10 + 200 + 40 + 70 + 3);
        assert_eq!(peak_without_dead_tails_bytes(&held), 1_000 + 10 + 200 + 40 + 3);
    }

    #[test]
    fn what_nothing_uses_is_not_counted_and_what_lives_on_is() {
        // Storage 0 is let go of without any use; storage 1 is never used and lives on.
        let trace = trace(&[500, 60, 7], 2, &[[&[], &[2], &[]], [&[2], &[], &[0, 2]]]);
        assert_eq!(peak_without_dead_tails_bytes(&trace), 1_000 + 60 + 7 + 3);
    }

    #[test]
    fn a_program_that_frees_at_the_last_use_has_none() {
        let trace = trace(&[10, 200, 40, 70], 1, &[[&[0], &[1], &[]], [&[1], &[2], &[1]], [&[2], &[3], &[2]]]);
        assert_eq!(peak_without_dead_tails_bytes(&trace), Lineage::of(&trace).keep_all_peak_bytes());
    }
}
