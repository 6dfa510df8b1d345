//! Makespan and peak of every policy at every budget, each planned iteration beside an untouched one; the trace, and a
//! plan's timetable for Perfetto.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use flate2::Compression;
use flate2::write::GzEncoder;
use plimsoll_env::Instance;
use plimsoll_env::real::{Measurement, run_plan};
use plimsoll_env::workload::Workload;
use plimsoll_runtime::baselines::Largest;
use plimsoll_runtime::file::write_whole;
use plimsoll_runtime::planner::completed;
use plimsoll_runtime::timetable::Timetable;
use plimsoll_runtime::torch::Executor;
use plimsoll_runtime::{ActionSet, Decided, Lineage, Plan, Planner, Timeline, Trace};
use serde::Serialize;
use serde_json::Value;

use super::overlap::Noted;
use super::{Bed, Findings, Request};
use crate::chosen::Chosen;
use crate::chrome::{Subject, chrome_trace, noted_trace};
use crate::loops::OpenDevice;
use crate::results::PointResult;

/// Iterations that a trace is made of.
const RECORDED: usize = 5;
/// Planned iterations of every point, beside as many untouched ones.
const MEASURED: usize = 3;
/// Budgets as shares of the keep-all peak.
const RATIOS: [f64; 4] = [0.6, 0.45, 0.8, 0.3];
/// Baselines, most telling first; learned policies come before them.
const BASELINES: [&str; 13] = [
    "capuchin",
    "dtr",
    "vdnn-all",
    "chen",
    "dtr-swap",
    "superneurons",
    "cheapest",
    "lru",
    "dtr-eq",
    "dtr-local",
    "msps",
    "largest",
    "megengine",
];

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

/// Everything evicted that may be, whatever it costs: last, for on a large model it costs the most.
struct Everything {
    name: &'static str,
    actions: ActionSet,
}

const EVERYTHING: [Everything; 2] = [
    Everything { name: "recompute-all", actions: ActionSet { swap: false, recompute: true } },
    Everything { name: "swap-all", actions: ActionSet { swap: true, recompute: false } },
];

/// Runs the part.
pub fn run(bed: &Bed<'_>, request: &Request, findings: &mut Findings) -> anyhow::Result<()> {
    let mut workload = bed.workload()?;
    bed.on.session.reset_device_peak();
    let (trace, _) = bed.record(workload.as_mut(), RECORDED)?;
    findings.set("keep_all_peak_bytes", trace.peak_bytes)?;
    findings.set("keep_all_device_counts", format!("{:?}", bed.on.session.device_counts()))?;
    findings.set("recorded_makespan_ns", trace.makespan_ns)?;
    findings.set("operators", trace.operators.len())?;
    save_trace(&trace, &request.out)?;
    let link = bed.on.measured_link()?;
    findings.set("link", link)?;
    let lineage = Arc::new(Lineage::of(&trace));
    let mut instance =
        Instance { lineage, link, budget_bytes: u64::MAX, actions: ActionSet::ALL, trace: Arc::new(trace) };

    let keep_all = Chosen::parse("keep-all")?;
    let mut bench = Bench { bed, workload: workload.as_mut() };
    bench.measure(&instance, 1.0, "keep-all", &keep_all.plan(instance.problem(), &Planner::default()), findings)?;
    let mut drawn = false;
    for policy in policies(request, &instance.trace.family)? {
        for ratio in RATIOS {
            if request.deadline.is_over() {
                return findings.set("cut_short", true);
            }
            instance.budget_bytes = (ratio * instance.trace.peak_bytes as f64) as u64;
            let decided = policy.plan(instance.problem(), &Planner::default());
            if !drawn && decided.planned.fits() {
                drawn = true;
                if let Err(error) = bench.draw(&instance, &decided, policy.name(), request, findings) {
                    findings.fail(format!("drawing {}: {error:#}", policy.name()))?;
                }
            }
            bench.measure(&instance, ratio, policy.name(), &decided, findings)?;
        }
    }
    for Everything { name, actions } in EVERYTHING {
        if request.deadline.is_over() {
            return findings.set("cut_short", true);
        }
        let unlimited = Instance { budget_bytes: 0, actions, ..instance.clone() };
        let nothing = Plan::keep_all(unlimited.lineage.windows().len());
        let mut planned = completed(unlimited.problem(), nothing, &mut Largest);
        // No budget that it is held to: what such a plan needs, and may use.
        let needed = Instance { budget_bytes: planned.prediction.peak_bytes, ..unlimited };
        let mut timeline = Timeline::new(&needed.trace, &needed.lineage, link);
        planned.prediction = timeline.schedule(&planned.plan, needed.budget_bytes).1;
        bench.measure(&needed, 0.0, name, &Decided { planned, by: "largest" }, findings)?;
    }
    Ok(())
}

/// Learned policies of this loop's family, then baselines.
fn policies(request: &Request, family: &str) -> anyhow::Result<Vec<Chosen>> {
    let learned = request.policies.iter().map(|path| Chosen::parse(&path.to_string_lossy()));
    let mut policies = learned.collect::<anyhow::Result<Vec<_>>>()?;
    policies.retain(|policy| matches!(policy, Chosen::Learned { file, .. } if file.family == family));
    policies.extend(BASELINES.map(Chosen::Baseline));
    Ok(policies)
}

/// What points are measured with.
struct Bench<'a> {
    bed: &'a Bed<'a>,
    workload: &'a mut dyn Workload,
}

impl Bench<'_> {
    /// A plan for Perfetto: as predicted, and as a device notes it.
    fn draw(
        &mut self,
        instance: &Instance,
        decided: &Decided,
        policy: &str,
        request: &Request,
        findings: &mut Findings,
    ) -> anyhow::Result<()> {
        draw(instance, decided, policy, &request.out)?;
        if !self.bed.is_cpu() {
            let noted = Noted::of(self.bed, self.workload, instance, decided)?;
            findings.set("overlap", noted.overlap())?;
            draw_noted(instance, policy, &noted, &request.out)?;
        }
        Ok(())
    }

    /// Measures a point; what goes wrong on the way is a finding like any other.
    fn measure(
        &mut self,
        instance: &Instance,
        ratio: f64,
        policy: &str,
        decided: &Decided,
        findings: &mut Findings,
    ) -> anyhow::Result<()> {
        let mut result = PointResult::planned(policy, &instance.problem(), false, decided);
        let budgeted = (0.0..1.0).contains(&ratio) && ratio > 0.0;
        if budgeted && !result.feasible {
            return findings.push("infeasible", format!("{policy} at {ratio}"));
        }
        let reserved = self.reserved_peak_bytes(instance, decided);
        match reserved.and_then(|reserved| Ok((reserved, self.run(instance, decided)?))) {
            Ok((reserved_peak_bytes, (measured, host_waits_and_allocations))) => {
                result.measure(&instance.problem(), &decided.planned.plan, &measured);
                let peak_error_bytes = measured.peak_bytes as i64 - result.predicted.peak_bytes as i64;
                let followed = measured.reports.iter().all(|report| report.followed);
                if !followed {
                    findings.fail(format!("{policy} at {ratio}: an iteration departed from its plan"))?;
                }
                if result.held != Some(true) {
                    findings.fail(format!("{policy} at {ratio}: a peak of {} bytes", measured.peak_bytes))?;
                }
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
                )
            }
            Err(error) => findings.fail(format!("{policy} at {ratio}: {error:#}")),
        }
    }

    /// What the allocator has of the device at most in one iteration by plan that finds its cache empty.
    fn reserved_peak_bytes(&mut self, instance: &Instance, decided: &Decided) -> anyhow::Result<u64> {
        let OpenDevice { session, engines, .. } = &self.bed.on;
        let (trace, lineage, plan) = (&*instance.trace, &*instance.lineage, &decided.planned.plan);
        let (schedule, _) = Timeline::new(trace, lineage, instance.link).schedule(plan, instance.budget_bytes);
        let mut executor = Executor::new(*session, trace, lineage, plan, schedule, engines.engine(None)?);
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
        let measured = run_plan(*session, self.workload, &problem, plan, engines.engine(None)?, MEASURED, true)?;
        let after = engines.host_waits_and_allocations();
        let since = before.zip(after).map(|(before, after)| (after.0 - before.0, after.1 - before.1));
        Ok((measured, since))
    }
}

fn gzip(bytes: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes)?;
    Ok(encoder.finish()?)
}

/// Compressed, for training elsewhere.
fn save_trace(trace: &Trace, out: &Path) -> anyhow::Result<()> {
    let path = out.join(format!("{}.plimsoll", trace.workload));
    trace.save(&path)?;
    let bytes = std::fs::read(&path).with_context(|| path.display().to_string())?;
    write_whole(&out.join(format!("{}.plimsoll.gz", trace.workload)), &gzip(&bytes)?)?;
    std::fs::remove_file(&path).with_context(|| path.display().to_string())
}

/// The timetable of a plan, for Perfetto.
fn draw(instance: &Instance, decided: &Decided, policy: &str, out: &Path) -> anyhow::Result<()> {
    let (trace, lineage, link) = (&*instance.trace, &*instance.lineage, instance.link);
    let (schedule, _) = Timeline::new(trace, lineage, link).schedule(&decided.planned.plan, instance.budget_bytes);
    let timetable = Timetable::of(trace, lineage, &schedule, link);
    let subject = Subject { trace, policy, budget_bytes: instance.budget_bytes };
    save_drawing(&out.join(format!("{}.perfetto.json.gz", trace.workload)), &chrome_trace(&subject, &timetable))
}

/// The same plan's iteration as the device noted it.
fn draw_noted(instance: &Instance, policy: &str, noted: &Noted, out: &Path) -> anyhow::Result<()> {
    let subject = Subject { trace: &instance.trace, policy, budget_bytes: instance.budget_bytes };
    let drawing = noted_trace(&subject, &noted.operators, &noted.copies);
    save_drawing(&out.join(format!("{}.noted.perfetto.json.gz", instance.trace.workload)), &drawing)
}

fn save_drawing(path: &Path, drawing: &Value) -> anyhow::Result<()> {
    Ok(write_whole(path, &gzip(&serde_json::to_vec(drawing)?)?)?)
}
