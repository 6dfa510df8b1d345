//! Makespan and peak of every policy at every budget, each planned iteration beside an untouched one; the trace, and a
//! plan's timetable for Perfetto.

use std::io::Write;
use std::path::Path;

use anyhow::Context;
use flate2::Compression;
use flate2::write::GzEncoder;
use plimsoll_env::Instance;
use plimsoll_runtime::baselines::Largest;
use plimsoll_runtime::decode::completed;
use plimsoll_runtime::file::write_whole;
use plimsoll_runtime::timetable::Timetable;
use plimsoll_runtime::{ActionSet, Decided, Plan, Planner, Timeline, Trace};
use serde_json::Value;

use super::bench::{Bench, MEASURED, MEASURED_WELL};
use super::overlap::Noted;
use super::{Bed, Findings, Request};
use crate::behaviour::history::{History, Kind};
use crate::chosen::Chosen;
use crate::chrome::{Subject, chrome_trace, noted_trace};

/// Budgets as shares of the keep-all peak.
const RATIOS: [f64; 4] = [0.6, 0.45, 0.8, 0.3];
/// Of what the forward pass saves for the backward pass, learned policies are asked to do without so much as well.
const CUTS: [f64; 2] = [0.6, 0.8];
/// Baselines, most telling first, and at the end the one whose plans take longest; learned policies come before them.
const BASELINES: [&str; 13] = [
    "capuchin",
    "dtr",
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
    "vdnn-all",
];

/// Everything evicted that may be, whatever it costs: last, for on a large model it costs the most.
struct Everything {
    name: &'static str,
    actions: ActionSet,
}

const EVERYTHING: [Everything; 2] = [
    Everything { name: "recompute-all", actions: ActionSet::RECOMPUTE },
    Everything { name: "swap-all", actions: ActionSet::SWAP },
];

/// Runs the part.
pub fn run(bed: &Bed<'_>, request: &Request, findings: &mut Findings) -> anyhow::Result<()> {
    let (mut bench, mut instance) = Bench::recorded(bed, findings)?;
    save_trace(&instance.trace, &request.out)?;
    let keep_all = Chosen::parse("keep-all")?.plan(instance.problem(), &Planner::default());
    bench.measure(&instance, 1.0, "keep-all", &keep_all, findings)?;
    let mut drawn = false;
    let peak_bytes = instance.trace.peak_bytes as f64;
    let saved_bytes = History::of_trace(&instance.trace).peak_bytes_of(Kind::Activation);
    let saved_share = saved_bytes as f64 / peak_bytes;
    findings.set("saved_share", saved_share)?;
    let mut policies = request.learned(&instance.trace.family)?;
    policies.extend(BASELINES.map(Chosen::Baseline));
    for policy in policies {
        let is_learned = matches!(policy, Chosen::Learned { .. });
        bench.measured = if is_learned { MEASURED_WELL } else { MEASURED };
        let cuts = CUTS.iter().filter(|_| is_learned).map(|cut| 1.0 - cut * saved_share);
        for ratio in RATIOS.into_iter().chain(cuts) {
            if request.deadline.is_over() {
                return findings.cut_short();
            }
            instance.budget_bytes = (ratio * peak_bytes) as u64;
            let decided = policy.plan(instance.problem(), &Planner::default());
            if !drawn && decided.planned.fits() {
                drawn = true;
                if let Err(error) = draw(&mut bench, &instance, &decided, policy.name(), request, findings) {
                    findings.fail(format!("drawing {}: {error:#}", policy.name()))?;
                }
            }
            bench.measure(&instance, ratio, policy.name(), &decided, findings)?;
        }
    }
    for Everything { name, actions } in EVERYTHING {
        if request.deadline.is_over() {
            return findings.cut_short();
        }
        let unlimited = Instance { budget_bytes: 0, actions, ..instance.clone() };
        let nothing = Plan::keep_all(unlimited.lineage.windows().len());
        let mut planned = completed(unlimited.problem(), nothing, &mut Largest);
        // No budget that it is held to: what such a plan needs, and may use.
        let needed = Instance { budget_bytes: planned.prediction.peak_bytes, ..unlimited };
        let mut timeline = Timeline::new(&needed.trace, &needed.lineage, needed.tiers);
        planned.prediction = timeline.predict(&planned.plan, needed.budget_bytes);
        bench.measure(&needed, 0.0, name, &Decided { planned, by: "largest" }, findings)?;
    }
    Ok(())
}

/// A plan for Perfetto: as predicted, and as a device notes it.
fn draw(
    bench: &mut Bench<'_>,
    instance: &Instance,
    decided: &Decided,
    policy: &str,
    request: &Request,
    findings: &mut Findings,
) -> anyhow::Result<()> {
    draw_timetable(instance, decided, policy, &request.out)?;
    if !bench.bed.is_cpu() {
        let noted = Noted::of(bench.bed, bench.workload.as_mut(), instance, decided)?;
        findings.set("overlap", noted.overlap())?;
        draw_noted(instance, policy, &noted, &request.out)?;
    }
    Ok(())
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
fn draw_timetable(instance: &Instance, decided: &Decided, policy: &str, out: &Path) -> anyhow::Result<()> {
    let (trace, lineage, tiers) = (&*instance.trace, &*instance.lineage, instance.tiers);
    let (schedule, _) = Timeline::new(trace, lineage, tiers).schedule(&decided.planned.plan, instance.budget_bytes);
    let timetable = Timetable::of(trace, lineage, &schedule, tiers);
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
