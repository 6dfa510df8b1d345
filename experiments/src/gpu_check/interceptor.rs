//! What the interceptor costs: the loop left alone beside the loop under Plimsoll with nothing to evict.

use plimsoll_runtime::torch::Executor;
use plimsoll_runtime::{ActionSet, Lineage, Plan, Problem};
use serde::Serialize;

use super::{Bed, Findings};

/// Rounds of one iteration that counts each; the first few warm up.
const ROUNDS: usize = 12;
const WARM_UP: usize = 2;

#[derive(Serialize)]
struct Cost {
    operators: usize,
    plain_ns: u64,
    /// Every operator is checked against the trace, and a plan is carried out that keeps everything.
    keep_all_ns: u64,
    overhead: f64,
    per_operator_ns: f64,
}

/// Runs the part.
pub fn run(bed: &Bed<'_>, findings: &mut Findings) -> anyhow::Result<()> {
    let mut workload = bed.workload()?;
    let (trace, _) = bed.record(workload.as_mut(), 3)?;
    let lineage = Lineage::of(&trace);
    let tiers = bed.on.reckoned_link()?.into();
    let problem = Problem { trace: &trace, lineage: &lineage, tiers, budget_bytes: u64::MAX, actions: ActionSet::ALL };
    let keep_all = Plan::keep_all(lineage.windows().len());
    let mut executor = Executor::new(bed.on.session, &problem, &keep_all, bed.on.engines.engine(None)?);
    let (mut plain, mut watched) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let (_, left_alone) = bed.timed(|| Ok(workload.iteration()?))?;
        // After one that nobody saw, the first only finds its storages again.
        executor.iteration(|| workload.iteration())?.0?;
        let ((loss, report), followed) = bed.timed(|| Ok(executor.iteration(|| workload.iteration())?))?;
        loss?;
        if let Some(why) = report.deviation {
            findings.fail(why)?;
        }
        if round >= WARM_UP {
            plain.push(left_alone.as_nanos() as u64);
            watched.push(followed.as_nanos() as u64);
        }
    }
    let (plain_ns, keep_all_ns) = (median(plain), median(watched));
    let operators = trace.operators.len();
    let more_ns = keep_all_ns as f64 - plain_ns as f64;
    let (overhead, per_operator_ns) = (more_ns / plain_ns as f64, more_ns / operators as f64);
    findings.set("cost", Cost { operators, plain_ns, keep_all_ns, overhead, per_operator_ns })
}

fn median(mut values: Vec<u64>) -> u64 {
    values.sort_unstable();
    values[values.len() / 2]
}
