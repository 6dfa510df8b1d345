//! A loop and plans for it: what a plan takes, each planned iteration beside an untouched one.

use std::sync::Arc;

use plimsoll_env::Instance;
use plimsoll_env::real::{Measurement, run_plan};
use plimsoll_env::workload::Workload;
use plimsoll_runtime::torch::Executor;
use plimsoll_runtime::{ActionSet, Decided, Lineage};
use serde::Serialize;

use super::{Bed, Findings};
use crate::loops::OpenDevice;
use crate::results::{Cost, PointResult};

/// Iterations that a trace is made of.
const RECORDED: usize = 5;
/// Planned iterations of a point, beside as many untouched ones.
pub const MEASURED: usize = 4;
/// The same where more is to be told apart: of what another host does beside, an iteration may take a tenth more than the next.
pub const MEASURED_WELL: usize = 8;

/// A policy at a budget, with what only a device of its own memory has to say.
#[derive(Serialize)]
struct Point {
    ratio: f64,
    #[serde(flatten)]
    result: PointResult,
    /// Whether every planned iteration went as its schedule says.
    followed: bool,
    /// Measured less predicted.
    peak_error_bytes: i64,
    /// What the caching allocator had of the device at most, in an iteration that found its cache empty.
    reserved_peak_bytes: u64,
    /// Waits of the host for copies, and pieces of page-locked memory it had to get, once the first iteration was over.
    host_waits_and_allocations: Option<(u64, u64)>,
}

/// A loop on its device.
pub struct Bench<'a> {
    pub bed: &'a Bed<'a>,
    pub workload: Box<dyn Workload>,
    /// Planned iterations of every point from now on.
    pub measured: usize,
}

impl<'a> Bench<'a> {
    /// Records the loop, and measures the link: what is to be planned, but for a budget.
    pub fn recorded(bed: &'a Bed<'a>, findings: &mut Findings) -> anyhow::Result<(Self, Instance)> {
        let mut workload = bed.workload()?;
        bed.on.session.reset_device_peak();
        let (trace, _) = bed.record(workload.as_mut(), RECORDED)?;
        findings.set("keep_all_peak_bytes", trace.peak_bytes)?;
        findings.set("keep_all_device_counts", bed.on.session.device_counts())?;
        findings.set("recorded_makespan_ns", trace.makespan_ns)?;
        findings.set("operators", trace.operators.len())?;
        let link = bed.on.reckoned_link()?;
        findings.set("link", link)?;
        let (lineage, trace) = (Arc::new(Lineage::of(&trace)), Arc::new(trace));
        let instance = Instance { trace, lineage, tiers: link.into(), budget_bytes: u64::MAX, actions: ActionSet::ALL };
        Ok((Bench { bed, workload, measured: MEASURED_WELL }, instance))
    }

    /// Measures a point; what goes wrong on the way is a finding like any other. What it took, where it was run.
    pub fn measure(
        &mut self,
        instance: &Instance,
        ratio: f64,
        policy: &str,
        decided: &Decided,
        findings: &mut Findings,
    ) -> anyhow::Result<Option<Cost>> {
        let mut result = PointResult::planned(policy, &instance.problem(), false, decided);
        if !result.feasible {
            findings.push("infeasible", format!("{policy} at {ratio}"))?;
            return Ok(None);
        }
        let reserved = self.reserved_peak_bytes(instance, decided);
        match reserved.and_then(|reserved| Ok((reserved, self.run(instance, decided)?))) {
            Ok((reserved_peak_bytes, (measured, host_waits_and_allocations))) => {
                result.measure(&instance.problem(), &decided.planned.plan, &measured);
                let peak_error_bytes = measured.peak_bytes as i64 - result.predicted.peak_bytes as i64;
                let followed = measured.reports.iter().all(|report| report.followed);
                if !followed {
                    let why = measured.reports.iter().find_map(|report| report.deviation.as_deref());
                    let why = why.unwrap_or("not all that it moves was known at its start");
                    findings.fail(format!("{policy} at {ratio}: an iteration departed from its plan: {why}"))?;
                }
                if result.held != Some(true) {
                    findings.fail(format!("{policy} at {ratio}: a peak of {} bytes", measured.peak_bytes))?;
                }
                let cost = result.measured;
                findings.push(
                    "points",
                    Point {
                        ratio,
                        result,
                        followed,
                        peak_error_bytes,
                        reserved_peak_bytes,
                        host_waits_and_allocations,
                    },
                )?;
                Ok(cost)
            }
            Err(error) => findings.fail(format!("{policy} at {ratio}: {error:#}")).map(|()| None),
        }
    }

    /// What the allocator has of the device at most in one iteration by plan that finds its cache empty.
    fn reserved_peak_bytes(&mut self, instance: &Instance, decided: &Decided) -> anyhow::Result<u64> {
        let OpenDevice { session, engines, .. } = &self.bed.on;
        let plan = &decided.planned.plan;
        let mut executor = Executor::new(*session, &instance.problem(), plan, engines.engine(None)?);
        // This one matches storages with the trace.
        executor.iteration(|| self.workload.iteration())?.0?;
        engines.settle();
        session.empty_device_cache()?;
        session.reset_device_peak();
        executor.iteration(|| self.workload.iteration())?.0?;
        Ok(session.device_counts().reserved_peak_bytes)
    }

    /// What a plan does, and how often the host waited for a copy meanwhile, or for page-locked memory: the iteration before
    /// has got it.
    fn run(&mut self, instance: &Instance, decided: &Decided) -> anyhow::Result<(Measurement, Option<(u64, u64)>)> {
        let OpenDevice { session, engines, .. } = &self.bed.on;
        let (plan, problem) = (&decided.planned.plan, instance.problem());
        let before = engines.host_waits_and_allocations();
        let measured =
            run_plan(*session, self.workload.as_mut(), &problem, plan, engines.engine(None)?, self.measured, true)?;
        let after = engines.host_waits_and_allocations();
        let since = before.zip(after).map(|(before, after)| (after.0 - before.0, after.1 - before.1));
        Ok((measured, since))
    }
}
