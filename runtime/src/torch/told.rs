//! Where within an iteration a program's sizes are told, and where they are told anew: batches whose gradients add up have lengths of
//! their own, and between them next to nothing is there that depends on one.

use super::ladder::varies;
use crate::trace::{StorageId, Trace};

/// The share of an iteration for which a plan may wait until it is told which one it is.
const WAIT: f64 = 0.05;
/// Share of the most bytes of any size that are there at once, below which they are next to nothing.
const NOTHING: f64 = 0.02;

/// Where iterations tell their sizes that are the same program, and differ in them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Told {
    /// The operator before which sizes are told for the first time, if that comes early.
    pub(super) early: Option<usize>,
    /// The first from which they may be told anew.
    pub(super) anew: Option<usize>,
}

impl Told {
    /// Of a program at these sizes.
    pub(super) fn by<'a>(traces: impl Iterator<Item = &'a Trace> + Clone) -> Self {
        let mut others = traces.clone();
        let (Some(trace), true) = (others.next(), others.clone().next().is_some()) else { return Told::default() };
        let is_another = |(index, storage): (usize, &_)| {
            !varies(storage) && others.clone().any(|other| other.storages[index].bytes != storage.bytes)
        };
        let differs: Vec<bool> = trace.storages.iter().enumerate().map(is_another).collect();
        // What is small in one may be large in another.
        let bytes = |trace: &&Trace| trace.storages.iter().map(|storage| storage.bytes).sum::<u64>();
        let largest = traces.max_by_key(bytes).expect("there are several");
        Told { early: told_early(trace, &differs), anew: told_anew(largest, &differs) }
    }
}

/// The first operator that uses a storage which differs, or the one after what makes it.
fn told_early(trace: &Trace, differs: &[bool]) -> Option<usize> {
    let differs = |storage: StorageId| differs[storage.index()];
    let mut waited_ns = 0;
    for (index, operator) in trace.operators.iter().enumerate() {
        let uses = operator.accesses.iter().any(|access| differs(access.storage));
        waited_ns += if index == 0 { 0 } else { operator.gap_ns };
        waited_ns += if uses { 0 } else { operator.cost_ns };
        if waited_ns as f64 > WAIT * trace.makespan_ns as f64 {
            return None;
        }
        if uses || operator.creates.iter().copied().any(differs) {
            return Some(index + usize::from(!uses));
        }
    }
    None
}

/// The first operator before which next to nothing is there that differs, between two at which there is much.
fn told_anew(trace: &Trace, differs: &[bool]) -> Option<usize> {
    let bytes = |ids: &mut dyn Iterator<Item = StorageId>| -> u64 {
        ids.filter(|id| differs[id.index()]).map(|id| trace.storages[id.index()].bytes).sum()
    };
    let mut live_bytes = bytes(&mut (0..trace.initial_storages).map(StorageId));
    let after = trace.operators.iter().map(|operator| {
        live_bytes += bytes(&mut operator.creates.iter().copied());
        live_bytes = live_bytes.saturating_sub(bytes(&mut operator.frees.iter().copied()));
        live_bytes
    });
    let after: Vec<u64> = after.collect();
    let nothing_bytes = (NOTHING * after.iter().copied().max()? as f64) as u64;
    let is_much = |&bytes: &u64| bytes > nothing_bytes;
    let first = after.iter().position(is_much)?;
    let little = first + after[first..].iter().position(|bytes| !is_much(bytes))?;
    after[little..].iter().any(is_much).then_some(little + 1)
}

#[cfg(test)]
mod tests {
    use super::super::ladder::tests::trace;
    use super::*;
    use crate::trace::{Class, Operator, Storage};

    #[test]
    fn sizes_may_be_told_anew_between_two_places_where_much_is_there() {
        // Each operator makes a storage of so many bytes, and lets go of the one before.
        let in_turn = |bytes: [u64; 7]| {
            let mut trace = trace([0, 0]);
            let operator = trace.operators[0].clone();
            trace.storages = bytes.map(|bytes| Storage { bytes, class: Class::Temporary, locked: None }).to_vec();
            let operators = (0..bytes.len() as u32).map(|index| Operator {
                creates: vec![StorageId(index)],
                frees: index.checked_sub(1).map(StorageId).into_iter().collect(),
                ..operator.clone()
            });
            trace.operators = operators.collect();
            trace
        };
        let [twice, once] = [[2, 900, 2, 1, 900, 900, 0], [2, 900, 700, 900, 2, 0, 0]].map(in_turn);
        assert_eq!(told_anew(&twice, &[true; 7]), Some(3));
        assert_eq!(told_anew(&once, &[true; 7]), None, "nothing comes after it");
        let of_one_size = [true, true, true, true, false, false, true];
        assert_eq!(told_anew(&twice, &of_one_size), None, "what comes after it is the same every time");
    }
}
