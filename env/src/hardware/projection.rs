//! The times that a recorded iteration would take on another machine.
//!
//! An operator's time is modelled as max(flops / flops per second, bytes / bytes per second) + launch overhead.
//!
//! **Deviation.** A trace has each operator's storages and its measured time, not its shapes, and storages alone do not
//! give the operations of a matrix product or a convolution. So the roofline of the machine that measured is read
//! backwards: the time that moving the bytes does not explain was computing. It follows that an operator which reached
//! half of what that machine does at best is taken to reach half of what the other does at best. Bytes are those of
//! whole storages, but no more than the machine could have moved in the measured time, because an operator may touch
//! only part of a storage. An operator whose bytes came from beyond the caches looks as if it had computed, too; on a
//! machine with more operations per byte than the one that measured, as accelerators are, its bytes still decide.
//!
//! **Gaps.** Where the other machine runs behind the program that issues its operators, the program's own time between
//! them (its batches, its optimizer's bookkeeping) hides behind them and is left out, and launch overhead stands for
//! the time of issuing. Elsewhere gaps stay as they were measured.

use plimsoll_runtime::Trace;
use plimsoll_runtime::trace::{AccessMode, Operator, StorageId};

use super::Roofline;

const NS_PER_S: f64 = 1e9;

/// `trace`, which was measured on a machine of the roofline `from`, with the times of one of the roofline `to`.
///
/// Structure and bytes stay as they are. On a machine that is in no respect slower, no operator takes longer.
pub fn project(trace: &Trace, from: &Roofline, to: &Roofline) -> Trace {
    let mut projected = trace.clone();
    let gap_ns = |measured_ns: u64| if to.runs_ahead { 0 } else { measured_ns };
    for operator in &mut projected.operators {
        let work = Work::of(operator, trace, from);
        let cost_ns = work.time_ns(to);
        // Times that are known to a share of themselves stay known to that share.
        let share = operator.spread_ns as f64 / operator.cost_ns.max(1) as f64;
        operator.spread_ns = (share * cost_ns as f64).round() as u64;
        operator.cost_ns = cost_ns;
        operator.gap_ns = gap_ns(operator.gap_ns);
    }
    projected.tail_ns = gap_ns(trace.tail_ns);
    let operators = projected.operators.iter().map(|operator| operator.cost_ns + operator.gap_ns);
    projected.makespan_ns = operators.sum::<u64>() + projected.tail_ns;
    projected
}

/// What an operator does, whichever machine does it.
struct Work {
    flops: f64,
    bytes: f64,
}

impl Work {
    /// What `operator` did in its time on a machine of the roofline `from`.
    fn of(operator: &Operator, trace: &Trace, from: &Roofline) -> Self {
        let working_s = (operator.cost_ns as f64 - from.launch_overhead_ns).max(0.0) / NS_PER_S;
        let touched = touched_bytes(operator, trace);
        let moved = working_s * from.memory_bytes_per_s;
        Work { flops: if moved > touched { working_s * from.flops_per_s } else { 0.0 }, bytes: touched.min(moved) }
    }

    fn time_ns(&self, to: &Roofline) -> u64 {
        let working_s = (self.flops / to.flops_per_s).max(self.bytes / to.memory_bytes_per_s);
        (working_s * NS_PER_S + to.launch_overhead_ns).round() as u64
    }
}

/// Bytes that `operator` reads and writes if it touches all of every storage that it uses.
fn touched_bytes(operator: &Operator, trace: &Trace) -> f64 {
    let bytes = |storage: StorageId| trace.storages[storage.index()].bytes as f64;
    let accessed = operator.accesses.iter().map(|access| match access.mode {
        AccessMode::Read | AccessMode::Overwrite => bytes(access.storage),
        AccessMode::Write | AccessMode::SideEffect => 2.0 * bytes(access.storage),
    });
    accessed.chain(operator.creates.iter().map(|&storage| bytes(storage))).sum()
}

#[cfg(test)]
mod tests {
    use plimsoll_runtime::trace::{Access, Class, Phase, Storage};

    use super::*;

    const HOST: Roofline =
        Roofline { flops_per_s: 1e11, memory_bytes_per_s: 1e10, launch_overhead_ns: 1e3, runs_ahead: false };
    const DEVICE: Roofline =
        Roofline { flops_per_s: 1e13, memory_bytes_per_s: 5e11, launch_overhead_ns: 5e3, runs_ahead: true };

    /// A matrix product, an addition in place, and an operator that does next to nothing; of storages of 1 MB.
    fn trace() -> Trace {
        let operator = |cost_ns, access: Option<AccessMode>, creates: Vec<StorageId>| Operator {
            name: 0,
            phase: Phase::Forward,
            cost_ns,
            spread_ns: cost_ns / 10,
            gap_ns: 700,
            workspace_bytes: 0,
            accesses: access.map(|mode| Access { storage: StorageId(0), mode }).into_iter().collect(),
            creates,
            frees: Vec::new(),
            not_replayable: None,
        };
        let trace = Trace {
            workload: "a".into(),
            family: "a".into(),
            device: "cpu".into(),
            recorded_iterations: 1,
            unseen_bytes: 0,
            tail_ns: 50,
            makespan_ns: 10_501_000 + 3 * 700 + 50,
            peak_bytes: 2_000_000,
            names: vec!["aten::mm".into()],
            storages: vec![Storage { bytes: 1_000_000, class: Class::Temporary, locked: None }; 2],
            initial_storages: 1,
            operators: vec![
                operator(10_001_000, Some(AccessMode::Read), vec![StorageId(1)]),
                operator(201_000, Some(AccessMode::Write), Vec::new()),
                operator(300, None, Vec::new()),
            ],
            carried: Vec::new(),
        };
        assert_eq!(trace.check(), Ok(()));
        trace
    }

    fn costs(trace: &Trace) -> Vec<u64> {
        trace.operators.iter().map(|operator| operator.cost_ns).collect()
    }

    #[test]
    fn times_follow_the_roofline() {
        let projected = project(&trace(), &HOST, &DEVICE);
        // 10 ms at 100 GFLOP/s are 0.1 ms at 10 TFLOP/s. An addition in place moves 2 MB, in 4 µs.
        assert_eq!(costs(&projected), [105_000, 9_000, 5_000]);
        assert_eq!(projected.operators[0].spread_ns, 10_500);
        assert_eq!(projected.makespan_ns, 119_000, "the program's own time hides");
    }

    #[test]
    fn nothing_but_times_changes() {
        let (trace, mut projected) = (trace(), project(&trace(), &HOST, &DEVICE));
        assert_eq!(projected.fingerprint(), trace.fingerprint());
        assert_eq!(projected.check(), Ok(()));
        for (projected, measured) in projected.operators.iter_mut().zip(&trace.operators) {
            let Operator { cost_ns, spread_ns, gap_ns, .. } = *measured;
            *projected = Operator { cost_ns, spread_ns, gap_ns, ..projected.clone() };
        }
        assert_eq!(Trace { makespan_ns: trace.makespan_ns, tail_ns: trace.tail_ns, ..projected }, trace);
    }

    #[test]
    fn a_faster_machine_takes_no_longer() {
        let slow = costs(&project(&trace(), &HOST, &DEVICE));
        for faster in [
            Roofline { flops_per_s: 2e13, ..DEVICE },
            Roofline { memory_bytes_per_s: 1e12, ..DEVICE },
            Roofline { launch_overhead_ns: 1e3, ..DEVICE },
        ] {
            let fast = costs(&project(&trace(), &HOST, &faster));
            assert!(fast.iter().zip(&slow).all(|(fast, slow)| fast <= slow), "{fast:?} and {slow:?}");
            assert!(fast.iter().sum::<u64>() < slow.iter().sum(), "{faster:?} speeds something up");
        }
    }

    #[test]
    fn the_machine_that_measured_gives_its_times_back() {
        let (trace, projected) = (trace(), project(&trace(), &HOST, &HOST));
        for (projected, measured) in projected.operators.iter().zip(&trace.operators) {
            let error_ns = projected.cost_ns.abs_diff(measured.cost_ns);
            // Only an operator that took less than the launch overhead is off, and by less than that.
            assert!(error_ns <= 1 || measured.cost_ns < 1_000 && error_ns <= 1_000, "{error_ns} ns");
            assert_eq!(projected.gap_ns, measured.gap_ns);
        }
        assert_eq!(projected.tail_ns, trace.tail_ns);
    }
}
