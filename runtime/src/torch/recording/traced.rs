//! The trace that iterations make which did the same, and the times that others of it took.

use std::collections::HashMap;

use super::{Local, Measured, RecordedIteration};
use crate::lineage::Lineage;
use crate::torch::recorder::RecordError;
use crate::torch::session::operator_name;
use crate::torch::shim::Entry;
use crate::trace::{Access, Class, Operator, Phase, Storage, StorageId, Trace};

/// Makes a trace of iterations that did the same, or of one whose program repeats, as the caller knows; storages are named as in the
/// last one.
///
/// `names` are those of workload, family and device. Iterations that were not timed say what the whole takes where nobody asks.
pub(crate) fn trace_of(
    iterations: &[&RecordedIteration],
    marks: &HashMap<Entry, Class>,
    [workload, family, device]: [&str; 3],
) -> Result<Trace, RecordError> {
    let (&last, others) = iterations.split_last().expect("at least one");
    if last.steps.is_empty() {
        return Err(RecordError::Empty);
    }
    for other in others {
        other.same_steps(last)?;
    }
    let (timed, untimed): (Vec<&RecordedIteration>, Vec<_>) =
        iterations.iter().partition(|iteration| iteration.is_timed);
    if timed.is_empty() {
        return Err(RecordError::TooFew(0));
    }
    let (names, operators) = operators_of(iterations, &timed, last);
    let storages = last.storages().map(|storage| Storage {
        bytes: storage.bytes,
        class: Class::Temporary,
        locked: storage.locked.map(str::to_owned),
    });
    // A storage that outlived the last iteration but one, and what the last one found it to be.
    let carried = last.known_as.iter().map(|(&to, &from)| (last.id(from), StorageId(to)));
    let initial_bytes: u64 = last.initial.iter().map(|storage| storage.bytes).sum();
    let median = |of: &[&RecordedIteration], measure: fn(&RecordedIteration) -> u64| {
        median_and_spread(of.iter().map(|iteration| measure(iteration)).collect()).0
    };
    let mut trace = Trace {
        workload: workload.to_owned(),
        family: family.to_owned(),
        device: device.to_owned(),
        recorded_iterations: iterations.len() as u32,
        unseen_bytes: last.start_bytes.saturating_sub(initial_bytes),
        tail_ns: median(&timed, |iteration| iteration.tail_ns),
        makespan_ns: median(&timed, |iteration| iteration.makespan_ns),
        peak_bytes: iterations.iter().map(|iteration| iteration.peak_bytes).max().expect("at least one"),
        names,
        storages: storages.collect(),
        initial_storages: last.initial.len() as u32,
        operators,
        carried: carried.filter(|(from, to)| from != to).collect(),
    };
    trace.carried.sort_unstable();
    let marked = marks.iter().filter_map(|(&entry, &class)| Some((last.id(last.local(entry)?), class)));
    classify(&mut trace, marked.collect());
    if !untimed.is_empty() {
        trace.cut_to(median(&untimed, |iteration| iteration.makespan_ns));
    }
    debug_assert_eq!(trace.check(), Ok(()));
    if iterations.iter().any(|iteration| iteration.is_pressed) {
        // What was measured is not what the untouched loop takes; what was recorded tells.
        let lineage = Lineage::of(&trace);
        trace.peak_bytes = lineage.keep_all_peak_bytes();
        trace.makespan_ns = lineage.keep_all_makespan_ns();
    }
    Ok(trace)
}

/// Puts the times that `iterations` took, in the median, into a trace of the same iteration.
pub(crate) fn retime(iterations: &[&RecordedIteration], trace: &mut Trace) {
    for iteration in iterations {
        assert_eq!(iteration.measured.len(), trace.operators.len(), "the iteration is the one of the trace");
    }
    let median = |of: &dyn Fn(&RecordedIteration) -> u64| {
        median_and_spread(iterations.iter().map(|iteration| of(iteration)).collect()).0
    };
    for (index, operator) in trace.operators.iter_mut().enumerate() {
        operator.cost_ns = median(&|iteration| iteration.measured[index].cost_ns);
        operator.gap_ns = median(&|iteration| iteration.measured[index].gap_ns);
    }
    trace.tail_ns = median(&|iteration| iteration.tail_ns);
    trace.makespan_ns = trace.times_ns();
}

/// Puts into a trace whichever is less of its times and of those that another iteration of it took. Each was measured while
/// something came between, which made some operators longer.
pub(crate) fn retime_at_most(iteration: &RecordedIteration, trace: &mut Trace) {
    assert_eq!(iteration.measured.len(), trace.operators.len(), "the iteration is the one of the trace");
    for (operator, measured) in trace.operators.iter_mut().zip(&iteration.measured) {
        operator.cost_ns = operator.cost_ns.min(measured.cost_ns);
        operator.gap_ns = operator.gap_ns.min(measured.gap_ns);
    }
    trace.tail_ns = trace.tail_ns.min(iteration.tail_ns);
    trace.makespan_ns = trace.times_ns();
}

fn operators_of(
    iterations: &[&RecordedIteration],
    timed: &[&RecordedIteration],
    last: &RecordedIteration,
) -> (Vec<String>, Vec<Operator>) {
    let (mut names, mut name_ids) = (Vec::new(), HashMap::new());
    let mut operators = Vec::with_capacity(last.steps.len());
    for (index, step) in last.steps.iter().enumerate() {
        let name = *name_ids.entry(step.name).or_insert_with(|| {
            names.push(operator_name(step.name));
            names.len() as u32 - 1
        });
        let over = |of: &[&RecordedIteration], measure: fn(&Measured) -> u64| {
            of.iter().map(|iteration| measure(&iteration.measured[index])).collect::<Vec<_>>()
        };
        let (cost_ns, spread_ns) = median_and_spread(over(timed, |measured| measured.cost_ns));
        let (gap_ns, _) = median_and_spread(over(timed, |measured| measured.gap_ns));
        let created: u64 = last.creates(step).iter().map(|created| created.bytes).sum();
        let ids = |locals: &mut dyn Iterator<Item = Local>| locals.map(|local| last.id(local)).collect();
        let accesses = last.accesses(step).iter();
        let peak = over(iterations, |measured| measured.peak_bytes).into_iter().max().expect("at least one");
        operators.push(Operator {
            name,
            phase: step.phase,
            cost_ns,
            spread_ns,
            gap_ns,
            workspace_bytes: peak.saturating_sub(created),
            accesses: accesses.map(|&(local, mode)| Access { storage: last.id(local), mode }).collect(),
            creates: ids(&mut step.creates.range().map(|index| Local::Created(index as u32))),
            frees: ids(&mut last.frees[step.frees.range()].iter().copied()),
            not_replayable: step.not_replayable.map(str::to_owned),
        });
    }
    (names, operators)
}

/// The median, of two the smaller, for what came between made the other longer; and the median distance from it.
fn median_and_spread(mut values: Vec<u64>) -> (u64, u64) {
    values.sort_unstable();
    let median = values[(values.len() - 1) / 2];
    let mut distances: Vec<u64> = values.into_iter().map(|value| value.abs_diff(median)).collect();
    distances.sort_unstable();
    (median, distances[distances.len() / 2])
}

/// Says what each storage is for: by the caller's marks, then by how the iteration uses it.
fn classify(trace: &mut Trace, marks: HashMap<StorageId, Class>) {
    /// What the iteration does with a storage.
    #[derive(Clone, Copy, Default)]
    struct Use {
        in_forward: bool,
        in_backward: bool,
        in_update: bool,
        /// Made from nothing in the forward pass.
        is_filled: bool,
        is_written: bool,
        /// Made or written by the backward pass.
        is_propagated: bool,
        is_updated: bool,
    }

    let mut uses = vec![Use::default(); trace.storages.len()];
    for operator in &trace.operators {
        for access in &operator.accesses {
            let used = &mut uses[access.storage.index()];
            let writes = access.mode.writes();
            used.is_written |= writes;
            match operator.phase {
                Phase::Forward => used.in_forward = true,
                Phase::Backward => (used.in_backward, used.is_propagated) = (true, used.is_propagated || writes),
                Phase::Update => (used.in_update, used.is_updated) = (true, used.is_updated || writes),
            }
        }
        for storage in &operator.creates {
            let made = &mut uses[storage.index()];
            made.in_forward = operator.phase == Phase::Forward;
            made.is_propagated = operator.phase == Phase::Backward;
            made.is_filled = made.in_forward && operator.accesses.is_empty();
        }
    }
    for (index, used) in uses.into_iter().enumerate() {
        let initial = index < trace.initial_storages as usize;
        trace.storages[index].class = match marks.get(&StorageId(index as u32)) {
            Some(&class) => class,
            None if used.is_propagated && used.in_update => Class::Gradient,
            None if initial && used.is_updated && used.in_forward => Class::Parameter,
            None if initial && used.is_updated => Class::OptimizerState,
            None if (initial || used.is_filled) && used.in_forward && !used.is_written => Class::Input,
            None if !initial && used.in_forward && used.in_backward => Class::Activation,
            None => Class::Temporary,
        };
    }
    // What lives on into the next iteration is there what it is here.
    for &(from, to) in &trace.carried.clone() {
        for (source, target) in [(from, to), (to, from)] {
            if let Some(&class) = marks.get(&source) {
                trace.storages[target.index()].class = class;
            }
        }
        if trace.storages[to.index()].class == Class::Temporary {
            trace.storages[to.index()].class = trace.storages[from.index()].class;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_times_taken_early_and_those_taken_again_the_smaller_count() {
        let operator = |cost_ns, gap_ns| Operator {
            name: 0,
            phase: Phase::Forward,
            cost_ns,
            spread_ns: 0,
            gap_ns,
            workspace_bytes: 0,
            accesses: Vec::new(),
            creates: Vec::new(),
            frees: Vec::new(),
            not_replayable: None,
        };
        let mut trace = Trace {
            workload: "two".to_owned(),
            family: String::new(),
            device: "cuda".to_owned(),
            recorded_iterations: 2,
            unseen_bytes: 0,
            tail_ns: 3,
            makespan_ns: 1_153,
            peak_bytes: 0,
            names: vec!["aten::mm".to_owned()],
            storages: Vec::new(),
            initial_storages: 0,
            // The first waited for an eviction; the second will wait for a copy.
            operators: vec![operator(900, 10), operator(200, 40)],
            carried: Vec::new(),
        };
        let again = [(100, 30), (700, 0)].map(|(cost_ns, gap_ns)| Measured { cost_ns, gap_ns, ..Measured::default() });
        let again = RecordedIteration { measured: again.to_vec(), tail_ns: 5, ..RecordedIteration::default() };
        retime_at_most(&again, &mut trace);
        let times: Vec<_> = trace.operators.iter().map(|operator| (operator.cost_ns, operator.gap_ns)).collect();
        assert_eq!((times, trace.tail_ns, trace.makespan_ns), (vec![(100, 10), (200, 0)], 3, 313));
    }

    #[test]
    fn of_two_measurements_the_smaller_counts() {
        assert_eq!(median_and_spread(vec![900, 100]), (100, 800));
        assert_eq!(median_and_spread(vec![3, 1, 2]), (2, 1));
        assert_eq!(median_and_spread(vec![7]), (7, 0));
    }
}
