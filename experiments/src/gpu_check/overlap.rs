//! How much of a plan's copies hides behind its operators, as the device noted it.

use std::ops::Range;

use anyhow::ensure;
use plimsoll_env::Instance;
use plimsoll_env::workload::Workload;
use plimsoll_runtime::Decided;
use plimsoll_runtime::torch::copy::TimedCopies;
use plimsoll_runtime::torch::{Executor, TimedIteration};
use serde::Serialize;

use super::Bed;

/// One iteration by plan, by the device's clock.
#[derive(Default)]
pub struct Noted {
    /// When each operator of the trace began and ended, in ns.
    pub operators: Vec<Range<u64>>,
    /// Every copy.
    pub copies: Vec<TimedCopies>,
}

/// What it comes to.
#[derive(Serialize)]
pub struct Overlap {
    copies: usize,
    copied_bytes: u64,
    copy_ns: u64,
    /// Of that, while an operator ran.
    hidden_ns: u64,
    operator_ns: u64,
    /// From the iteration's start to the end of its last operator.
    elapsed_ns: u64,
}

impl Noted {
    /// Runs a plan, and notes its third iteration.
    pub fn of(
        bed: &Bed<'_>,
        workload: &mut dyn Workload,
        instance: &Instance,
        decided: &Decided,
    ) -> anyhow::Result<Self> {
        let (engines, plan) = (&bed.on.engines, &decided.planned.plan);
        let mut executor = Executor::new(bed.on.session, &instance.problem(), plan, engines.engine(None)?);
        for _ in 0..2 {
            executor.iteration(|| workload.iteration())?.0?;
        }
        engines.settle();
        engines.time_copies()?;
        let TimedIteration { result, report, operators } = executor.timed_iteration(|| workload.iteration())?;
        result?;
        let copies = engines.take_timed_copies()?;
        ensure!(report.followed, "the iteration went otherwise: {:?}", report.deviation);
        let mut now_ns = 0;
        let operators = operators.into_iter().map(|(pause_ns, cost_ns)| {
            let start_ns = now_ns + pause_ns;
            now_ns = start_ns + cost_ns;
            start_ns..now_ns
        });
        Ok(Noted { operators: operators.collect(), copies })
    }

    /// What it comes to.
    pub fn overlap(&self) -> Overlap {
        let Noted { operators, copies } = self;
        Overlap {
            copies: copies.len(),
            copied_bytes: copies.iter().map(|copy| copy.bytes).sum(),
            copy_ns: copies.iter().map(|copy| copy.end_ns.saturating_sub(copy.start_ns)).sum(),
            hidden_ns: copies.iter().map(|copy| self.operator_ns_within(copy.start_ns..copy.end_ns)).sum(),
            operator_ns: operators.iter().map(|time| time.end - time.start).sum(),
            elapsed_ns: operators.last().map_or(0, |time| time.end),
        }
    }

    /// How long operators ran meanwhile.
    fn operator_ns_within(&self, time: Range<u64>) -> u64 {
        let first = self.operators.partition_point(|operator| operator.end <= time.start);
        let meanwhile = self.operators[first..].iter().take_while(|operator| operator.start < time.end);
        meanwhile.map(|operator| operator.end.min(time.end).saturating_sub(operator.start.max(time.start))).sum()
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_runtime::timetable::Lane;

    use super::*;

    #[test]
    fn what_hides_is_what_runs_beside_an_operator() {
        let copy = |start_ns, end_ns| TimedCopies { lane: Lane::Offload, bytes: 10, start_ns, end_ns };
        let noted = Noted {
            operators: vec![10..20, 20..25, 40..60],
            // Behind nothing, in an operator, over a pause, over everything, after the last.
            copies: vec![copy(0, 10), copy(12, 15), copy(22, 45), copy(0, 100), copy(70, 80)],
        };
        let overlap = noted.overlap();
        assert_eq!((overlap.copy_ns, overlap.hidden_ns), (10 + 3 + 23 + 100 + 10, 3 + (3 + 5) + 35));
        assert_eq!((overlap.copies, overlap.copied_bytes), (5, 50));
        assert_eq!((overlap.operator_ns, overlap.elapsed_ns), (35, 60));
    }
}
