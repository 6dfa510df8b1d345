//! Whether a loop gives the bits of the untouched one, under forced plans and under a budget that is held from the first
//! iteration on.

use std::sync::Arc;

use anyhow::Context;
use plimsoll_env::Instance;
use plimsoll_env::real::run_plan;
use plimsoll_env::workload::{Workload, bits};
use plimsoll_runtime::baselines::baseline;
use plimsoll_runtime::torch::settings::{Determinism, set_deterministic};
use plimsoll_runtime::torch::{Audit, Recorder};
use plimsoll_runtime::{ActionSet, Lineage, Link, plan};
use serde::Serialize;

use super::{Bed, Findings};

/// Iterations that a trace is made of.
const RECORDED: usize = 3;
/// Planned iterations of every plan.
const PLANNED: usize = 2;
/// Shares of the keep-all peak that are tried until a plan fits.
const RATIOS: [f64; 4] = [0.45, 0.6, 0.7, 0.85];
/// Iterations under a budget.
const UNDER_BUDGET: usize = 6;

/// What a loop came to.
#[derive(Clone, PartialEq)]
pub(super) struct Outcome {
    losses: Vec<u64>,
    parameters: Vec<u8>,
}

impl Outcome {
    pub fn of(losses: &[f64], workload: &dyn Workload) -> anyhow::Result<Self> {
        let parameters = bits(workload)?.into_iter().map(|(_, bytes)| bytes).collect::<Vec<_>>().concat();
        Ok(Outcome { losses: losses.iter().map(|loss| loss.to_bits()).collect(), parameters })
    }

    /// The untouched loop.
    fn untouched(bed: &Bed<'_>, iterations: usize) -> anyhow::Result<Self> {
        let mut workload = bed.workload()?;
        let losses = (0..iterations).map(|_| workload.iteration()).collect::<Result<Vec<_>, _>>()?;
        Outcome::of(&losses, workload.as_ref())
    }

    /// The first iteration whose loss differs.
    fn differs_at(&self, other: &Self) -> Option<usize> {
        self.losses.iter().zip(&other.losses).position(|(a, b)| a != b)
    }
}

/// One way to run the loop, against the untouched one.
#[derive(Serialize)]
struct Verdict {
    how: String,
    actions: Option<ActionSet>,
    budget_bytes: u64,
    keep_all_peak_bytes: u64,
    predicted_peak_bytes: Option<u64>,
    peak_bytes: u64,
    held: bool,
    identical: bool,
    first_loss_that_differs: Option<usize>,
    reruns: u64,
    offloaded_bytes: u64,
    deviation: Option<String>,
}

/// Runs the part.
pub fn run(bed: &Bed<'_>, findings: &mut Findings) -> anyhow::Result<()> {
    let link = bed.on.reckoned_link()?;
    findings.set("link", link)?;
    let untouched = Outcome::untouched(bed, 2)?;
    let again = Outcome::untouched(bed, 2)?;
    // Where the loop itself does not repeat, no runtime could make it.
    let repeats = untouched == again;
    findings.set("untouched_loop_repeats", repeats)?;
    let mut judge = |how: &str, ran: anyhow::Result<Verdict>| {
        let verdict = match ran {
            Ok(verdict) => verdict,
            Err(error) => return findings.fail(format!("{how}: {error:#}")),
        };
        if !verdict.held {
            findings.fail(format!("{how}: a peak of {} bytes", verdict.peak_bytes))?;
        }
        if repeats && !verdict.identical {
            findings.fail(format!("{how}: other bits than the untouched loop's"))?;
        }
        findings.push("verdicts", verdict)
    };
    for (how, actions) in [("swap", ActionSet::SWAP), ("recompute", ActionSet::RECOMPUTE), ("both", ActionSet::ALL)] {
        judge(how, planned(bed, link, how, actions))?;
    }
    judge("under a budget", under_budget(bed, link))?;
    name_unrepeated(bed, "do_not_repeat", findings)?;
    findings.set("engine", bed.on.engines.host_waits_and_allocations())?;
    if bed.is_cpu() {
        return Ok(());
    }
    // With the kernels of whatever is timed: nobody asks those for the same bits twice, so what they give fails nothing.
    set_deterministic(Determinism::NotAsked);
    let repeats = Outcome::untouched(bed, 2)? == Outcome::untouched(bed, 2)?;
    findings.set("untouched_loop_repeats_as_timed", repeats)?;
    match planned(bed, link, "as timed", ActionSet::ALL) {
        Ok(verdict) => findings.set("verdict_as_timed", verdict)?,
        Err(error) => findings.fail(format!("as timed: {error:#}"))?,
    }
    name_unrepeated(bed, "do_not_repeat_as_timed", findings)
}

/// Sets the operators that give other bits from the same inputs, in the first iteration of two loops.
fn name_unrepeated(bed: &Bed<'_>, key: &str, findings: &mut Findings) -> anyhow::Result<()> {
    let session = bed.on.session;
    let run = |audit| -> anyhow::Result<()> {
        let mut workload = bed.workload()?;
        session.audit(Some(audit));
        Recorder::new(session).iteration(|| workload.iteration())??;
        Ok(())
    };
    let ran = run(Audit::FirstRun).and_then(|()| run(Audit::SecondRun));
    session.audit(None);
    match ran {
        Ok(()) => findings.set(key, session.audit_findings()),
        Err(error) => findings.fail(format!("looking for operators that do not repeat: {error:#}")),
    }
}

/// A plan that evicts as much as fits.
fn planned(bed: &Bed<'_>, link: Link, how: &str, actions: ActionSet) -> anyhow::Result<Verdict> {
    let mut workload = bed.workload()?;
    let (trace, mut losses) = bed.record(workload.as_mut(), RECORDED)?;
    let lineage = Arc::new(Lineage::of(&trace));
    let mut instance = Instance { lineage, tiers: link.into(), budget_bytes: 0, actions, trace: Arc::new(trace) };
    let peak_bytes = instance.trace.peak_bytes;
    let names = if actions.swap && !actions.recompute { ["vdnn-dyn", "capuchin"] } else { ["dtr", "capuchin"] };
    let found = RATIOS.iter().flat_map(|ratio| names.map(|name| (ratio, name))).find_map(|(ratio, name)| {
        instance.budget_bytes = (ratio * peak_bytes as f64) as u64;
        let planned = plan(instance.problem(), baseline(name, 0)?.as_mut());
        planned.fits().then_some((name, planned))
    });
    let (name, planned) = found.context("no plan fits any of the budgets tried")?;
    let engine = bed.on.engines.engine(None)?;
    let measured =
        run_plan(bed.on.session, workload.as_mut(), &instance.problem(), &planned.plan, engine, PLANNED, false)?;
    losses.extend(&measured.losses);
    let found = Outcome::of(&losses, workload.as_ref())?;
    drop(workload);
    let expected = Outcome::untouched(bed, losses.len())?;
    let last = measured.reports.last().context("iterations were run")?;
    Ok(Verdict {
        how: format!("{how}, planned by {name}"),
        actions: Some(actions),
        budget_bytes: instance.budget_bytes,
        keep_all_peak_bytes: peak_bytes,
        predicted_peak_bytes: Some(planned.prediction.peak_bytes),
        peak_bytes: measured.peak_bytes,
        held: measured.peak_bytes <= instance.budget_bytes,
        identical: found == expected,
        first_loss_that_differs: found.differs_at(&expected),
        reruns: last.reruns,
        offloaded_bytes: last.offloaded_bytes,
        deviation: last.deviation.clone(),
    })
}

/// A budget from the first iteration on: evictions when bytes run out, then plans.
fn under_budget(bed: &Bed<'_>, link: Link) -> anyhow::Result<Verdict> {
    let expected = Outcome::untouched(bed, UNDER_BUDGET)?;
    bed.on.session.reset_peak();
    drop(Outcome::untouched(bed, 2)?);
    let keep_all_peak_bytes = bed.on.session.peak_bytes();
    let budget_bytes = (0.75 * keep_all_peak_bytes as f64) as u64;
    let mut runtime = bed.runtime(budget_bytes, link)?;
    let mut workload = bed.workload()?;
    let mut losses = Vec::new();
    for _ in 0..UNDER_BUDGET {
        let _iteration = runtime.iteration();
        losses.push(workload.iteration()?);
    }
    let found = Outcome::of(&losses, workload.as_ref())?;
    let report = runtime.report();
    let last = report.latest.last().cloned().context("iterations were run")?;
    Ok(Verdict {
        how: "under a budget from the first iteration on".to_owned(),
        actions: None,
        budget_bytes,
        keep_all_peak_bytes,
        predicted_peak_bytes: last.predicted.map(|predicted| predicted.peak_bytes),
        peak_bytes: report.peak_bytes,
        held: report.peak_bytes <= budget_bytes,
        identical: found == expected,
        first_loss_that_differs: found.differs_at(&expected),
        reruns: last.reruns,
        offloaded_bytes: last.offloaded_bytes,
        deviation: last.deviation,
    })
}
