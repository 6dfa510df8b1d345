//! `plimsoll advise`.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, ensure};
use clap::Args;
use plimsoll_env::Instance;
use plimsoll_env::config::FamilyConfig;
use plimsoll_env::real::run_plan;
use plimsoll_runtime::Lineage;
use plimsoll_runtime::torch::HostEngine;
use plimsoll_runtime::units::Budget;

use crate::advice::method::{Figures, Made, Method, methods};
use crate::advice::quantisation::Form;
use crate::advice::report::{Advice, MethodAdvice, Point, Recommendation};
use crate::chosen::Chosen;
use crate::link::LinkFlag;
use crate::loops::{LoopFlags, RECORDED_ITERATIONS, RecordedLoop};
use crate::outputs::{require_outputs, write_json};
use crate::progress;

/// Flags.
#[derive(Args)]
pub struct Arguments {
    /// Configuration of the model family
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Name of the workload in the configuration
    #[arg(long, value_name = "NAME")]
    workload: String,
    /// Device bytes, such as 512MiB, or a share of the keep-all peak at the configured batch size, such as 60%
    #[arg(long, value_name = "BUDGET")]
    budget: Budget,
    /// Batch sizes to record and fit, beside the configured one [default: a quarter, a half and one and a half of it]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    batches: Vec<i64>,
    /// Batch sizes to record, run and compare with the fits [default: three quarters and twice the configured one]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    held_out: Vec<i64>,
    /// What decides for the method `policy`: a policy file, or the name of a baseline
    #[arg(long, value_name = "FILE|BASELINE", default_value = "capuchin")]
    policy: String,
    /// Iterations of each real run
    #[arg(long, default_value = "5", value_name = "N")]
    iterations: NonZeroUsize,
    #[command(flatten)]
    link: LinkFlag,
    #[command(flatten)]
    flags: LoopFlags,
    /// Where to write the advice as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Batch sizes, ascending: size, and whether it is held out.
fn batches(arguments: &Arguments, configured: i64) -> anyhow::Result<Vec<(i64, bool)>> {
    let given = |list: &[i64], default: Vec<i64>| if list.is_empty() { default } else { list.to_vec() };
    let fitted = given(&arguments.batches, vec![configured / 4, configured / 2, 3 * configured / 2]);
    let held_out = given(&arguments.held_out, vec![3 * configured / 4, 2 * configured]);
    let mut batches = vec![(configured, false)];
    for (batch, held_out) in
        fitted.iter().map(|&batch| (batch, false)).chain(held_out.iter().map(|&batch| (batch, true)))
    {
        if batch >= 1 && batches.iter().all(|&(known, _)| known != batch) {
            batches.push((batch, held_out));
        }
    }
    batches.sort_unstable();
    let fitted = batches.iter().filter(|(_, held_out)| !held_out).count();
    ensure!(fitted >= 2, "--batches: two different batch sizes are the least that a line can be fitted to");
    ensure!(fitted < batches.len(), "--held-out: none is left that is not fitted as well");
    Ok(batches)
}

/// Runs the command.
pub fn run(arguments: Arguments) -> anyhow::Result<()> {
    arguments.flags.require_cpu("advise")?;
    require_outputs(&[("--json", arguments.json.as_ref())])?;
    let config = FamilyConfig::load(&arguments.config)?;
    let configured = config.workload(&arguments.workload)?.batch();
    let batches = batches(&arguments, configured)?;
    for &(batch, _) in &batches {
        let workload = config.workload(&arguments.workload)?.with_batch(batch);
        workload.validate().with_context(|| format!("a batch of {batch}"))?;
    }
    let policy = Chosen::parse(&arguments.policy)?;
    policy.warn_of_family(&config.family.to_string());
    let link = arguments.link.resolve()?;
    let (half, int8) = (Form::Half.probe()?, Form::Int8.probe()?);
    let methods = methods(link, half, int8, &policy);
    let bar = progress::bar(batches.len() as u64, "batch sizes");
    let mut budget_bytes = None;
    let mut points: Vec<Vec<Point>> = vec![Vec::new(); methods.len()];
    // The configured batch size comes first: the budget may be a share of its peak.
    let mut order = batches.clone();
    order.sort_by_key(|&(batch, _)| batch != configured);
    for (batch, held_out) in order {
        bar.set_message(format!("{batch}"));
        let mut config = config.clone();
        let workload = config.workload(&arguments.workload)?.with_batch(batch);
        config.workloads.insert(arguments.workload.clone(), workload);
        let mut open = RecordedLoop::open(&config, &arguments.workload, &arguments.flags, RECORDED_ITERATIONS)
            .with_context(|| format!("a batch of {batch}"))?;
        let trace = Arc::new(open.trace.clone());
        let lineage = Arc::new(Lineage::of(&trace));
        let budget_bytes = *budget_bytes.get_or_insert_with(|| arguments.budget.resolve(trace.peak_bytes));
        for (method, points) in methods.iter().zip(&mut points) {
            let made = method.make(&trace, &lineage, budget_bytes);
            let measured = if held_out && method.exact {
                let problem = method.problem(&trace, &lineage, made.least_budget_bytes);
                let instance = Instance {
                    trace: trace.clone(),
                    lineage: lineage.clone(),
                    tiers: problem.tiers,
                    budget_bytes: problem.budget_bytes,
                    actions: problem.actions,
                };
                Some(measure(&mut open, &instance, &made, &arguments)?)
            } else {
                None
            };
            points.push(Point::of(batch, held_out, lineage.keep_all_makespan_ns(), &made, measured));
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    let budget_bytes = budget_bytes.expect("the configured batch size is among them");
    let advice = advise(&methods, points, budget_bytes)?;
    let recommendation = Recommendation::of(&advice, configured, budget_bytes);
    let advice = Advice {
        workload: arguments.workload.clone(),
        batch: configured,
        budget_bytes,
        link_bytes_per_s: link.offload_bytes_per_s,
        half,
        int8,
        methods: advice,
        recommendation,
    };
    if let Some(path) = &arguments.json {
        write_json(path, &advice)?;
    }
    print!("{advice}");
    Ok(())
}

fn advise(methods: &[Method<'_>], points: Vec<Vec<Point>>, budget_bytes: u64) -> anyhow::Result<Vec<MethodAdvice>> {
    let fit = |(method, mut points): (&Method<'_>, Vec<Point>)| {
        points.sort_by_key(|point| point.batch);
        MethodAdvice::of(method.name, method.exact, points, budget_bytes)
            .with_context(|| format!("{}: two batch sizes are the least that a line can be fitted to", method.name))
    };
    methods.iter().zip(points).map(fit).collect()
}

/// Runs the loop under the method's plan at full strength.
fn measure(
    open: &mut RecordedLoop,
    instance: &Instance,
    made: &Made,
    arguments: &Arguments,
) -> anyhow::Result<Figures> {
    let measured = run_plan(
        open.on.session,
        open.workload.as_mut(),
        &instance.problem(),
        &made.at_full_strength.plan,
        Box::new(HostEngine::new(arguments.link.is_emulated().then_some(instance.tiers.host))),
        arguments.iterations.get(),
        false,
    )?;
    Ok(Figures { latency_ns: measured.makespan_ns, peak_bytes: measured.peak_bytes })
}
