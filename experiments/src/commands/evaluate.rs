//! `plimsoll evaluate`.

mod held_out;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{bail, ensure};
use clap::Args;
use plimsoll_env::config::FamilyConfig;
use plimsoll_runtime::baselines::{BASELINES, SEARCHES};
use plimsoll_runtime::file::write_whole;
use plimsoll_runtime::torch::device::DeviceName;
use plimsoll_runtime::units::Budget;
use serde::Serialize;

use self::held_out::{HeldOutFlags, Request};
use crate::agreement::{Agreement, Point, scatter};
use crate::chosen::{Chosen, PlannerFlags};
use crate::evaluation::{Comparison, broken_promises};
use crate::link::{LinkFlag, emulated};
use crate::loops::LoopFlags;
use crate::margin::{Estimate, Margin};
use crate::outputs::{require_logdir, require_outputs, write_json};
use crate::progress;
use crate::provenance::{command_line, commit};
use crate::results::PointResult;
use crate::table::{Table, mib, percent};
use crate::tensorboard::RunLog;
use crate::tiers::TierFlags;

/// Flags.
#[derive(Args)]
pub struct Arguments {
    /// Configuration of the model family; its table [evaluation] says what to compare on
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// The policy to compare with the baselines of the configuration: a file, or another baseline
    #[arg(long, value_name = "FILE|BASELINE")]
    policy: String,
    /// Run every plan on the real training loop, interleaved with untouched iterations
    #[arg(long)]
    real: bool,
    #[command(flatten)]
    planner: PlannerFlags,
    /// Compare on this workload, in place of the configuration's, with --held-out beside members that are drawn; may be given
    /// several times
    #[arg(long, value_name = "NAME")]
    workload: Vec<String>,
    /// Compare at this budget, in place of the configuration's; may be given several times
    #[arg(long, value_name = "BUDGET")]
    budget: Vec<Budget>,
    /// Compare with this baseline, in place of the configuration's; may be given several times
    #[arg(long, value_name = "BASELINE")]
    baseline: Vec<String>,
    /// Planned iterations measured for each point, in place of the configuration's
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    iterations: Option<u64>,
    /// Where to write what was predicted of each plan beside what was measured, as JSON
    #[arg(long, value_name = "FILE", requires = "real")]
    agreement: Option<PathBuf>,
    /// Where to draw predicted against measured slowdowns, as SVG
    #[arg(long, value_name = "FILE", requires = "real")]
    scatter: Option<PathBuf>,
    /// Where to write one TensorBoard run per policy
    #[arg(long, value_name = "DIR")]
    logdir: Option<PathBuf>,
    /// Where to write the results as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    held_out: HeldOutFlags,
    #[command(flatten)]
    link: LinkFlag,
    #[command(flatten)]
    tiers: TierFlags,
    #[command(flatten)]
    flags: LoopFlags,
}

/// All that one call found out, with the command that did.
#[derive(Serialize)]
struct Report<'a> {
    command: String,
    commit: String,
    agreement: Option<Agreement>,
    margin: Option<Margin>,
    results: &'a [PointResult],
}

/// How well the timeline predicted, with the command that measured it.
#[derive(Serialize)]
struct AgreementReport<'a> {
    command: String,
    commit: String,
    agreement: Option<Agreement>,
    margin: Option<Margin>,
    points: Vec<Point<'a>>,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> anyhow::Result<()> {
    let mut config = FamilyConfig::load(&arguments.config)?;
    if arguments.held_out.held_out {
        let Arguments { policy, planner, workload: named, json, held_out, flags, .. } = &arguments;
        let request = Request { config, named, policy, planner, json: json.as_ref(), loops: flags };
        return held_out::run(request, held_out);
    }
    narrow(&mut config, &arguments)?;
    ensure!(
        !config.evaluation.workloads.is_empty(),
        "{} names no workloads to compare on; --held-out --traces compares on traces",
        arguments.config.display()
    );
    let policies = policies(&config, &arguments.policy)?;
    require_outputs(&[
        ("--json", arguments.json.as_ref()),
        ("--scatter", arguments.scatter.as_ref()),
        ("--agreement", arguments.agreement.as_ref()),
    ])?;
    if let Some(logdir) = &arguments.logdir {
        require_logdir(logdir)?;
        require_runs(&policies)?;
    }
    for policy in &policies {
        policy.warn_of_mismatch(&config.family.to_string(), config.evaluation.actions);
    }
    let tiers = arguments.tiers.clone().or(config.evaluation.host_limit, config.evaluation.spill.as_ref());
    // On the CPU a link is always emulated: the configuration's, unless another is named.
    let paces = arguments.flags.device == DeviceName::Cpu || arguments.link.is_emulated();
    let link = || emulated(arguments.link.link.unwrap_or(config.evaluation.link));
    let comparison = Comparison {
        config: &config,
        policies: &policies,
        tiers: tiers.open_on(arguments.flags.device, link, paces)?,
        planner: arguments.planner.planner(),
        real: arguments.real,
        flags: &arguments.flags,
    };
    let points = config.evaluation.workloads.len() * config.evaluation.budgets.len() * policies.len();
    let bar = progress::bar(points as u64, &format!("evaluating {}", config.family));
    let mut results = Vec::with_capacity(points);
    for workload in &config.evaluation.workloads {
        results.extend(comparison.on(workload, |point| {
            bar.set_message(format!("{} at {} MiB", point.policy, mib(point.budget_bytes)));
            bar.inc(1);
        })?);
    }
    bar.finish_and_clear();
    let agreement = Agreement::of(&results);
    let margin = Margin::of(policies[0].name(), &results);
    if let Some(path) = &arguments.json {
        write_json(path, &Report { command: command_line(), commit: commit(), agreement, margin, results: &results })?;
    }
    if let Some(path) = &arguments.agreement {
        let points = Point::of_all(&results).collect();
        write_json(path, &AgreementReport { command: command_line(), commit: commit(), agreement, margin, points })?;
    }
    if let Some(path) = &arguments.scatter {
        let title = format!("{}: slowdown, predicted and measured", config.family);
        write_whole(path, scatter(&title, &results).as_bytes())?;
    }
    if let Some(logdir) = &arguments.logdir {
        write_events(logdir, &policies, &results)?;
    }
    print(&comparison, &results);
    if let Some(agreement) = agreement {
        println!("{agreement}");
    }
    if let Some(margin) = margin {
        println!("{margin}");
    }
    let broken = broken_promises(&policies, &results);
    if !broken.is_empty() {
        bail!("{}", broken.join("; "));
    }
    Ok(())
}

/// Puts what the flags name in place of what the configuration says.
fn narrow(config: &mut FamilyConfig, arguments: &Arguments) -> anyhow::Result<()> {
    arguments.workload.iter().try_for_each(|name| config.workload(name).map(drop))?;
    let evaluation = &mut config.evaluation;
    if !arguments.workload.is_empty() {
        evaluation.workloads.clone_from(&arguments.workload);
    }
    if !arguments.budget.is_empty() {
        evaluation.budgets.clone_from(&arguments.budget);
    }
    if !arguments.baseline.is_empty() {
        evaluation.baselines.clone_from(&arguments.baseline);
    }
    evaluation.iterations = arguments.iterations.map_or(evaluation.iterations, |iterations| iterations as usize);
    Ok(())
}

/// The policy first, then the baselines of the configuration.
fn policies(config: &FamilyConfig, policy: &str) -> anyhow::Result<Vec<Chosen>> {
    let baselines = config.evaluation.baselines.iter().map(String::as_str).filter(|name| *name != policy);
    let mut names: Vec<&str> = vec![policy];
    for name in baselines {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names.into_iter().map(Chosen::parse).collect()
}

/// Fails where TensorBoard could not tell the runs of two policies apart.
fn require_runs(policies: &[Chosen]) -> anyhow::Result<()> {
    let mut runs = HashMap::new();
    for policy in policies {
        if let Some(other) = runs.insert(run_name(policy.name()), policy.name()) {
            bail!("--logdir: nothing would tell the runs of {other} and {} apart", policy.name());
        }
    }
    Ok(())
}

/// The part of a policy's name that can name a directory: of a file's its last part, without the ending unless that leaves the name
/// of a baseline or a search.
fn run_name(policy: &str) -> String {
    let path = Path::new(policy);
    let is_rule = |stem: &str| BASELINES.contains(&stem) || SEARCHES.contains(&stem);
    let stem = path.file_stem().filter(|stem| stem.to_str().is_none_or(|stem| !is_rule(stem)));
    stem.or(path.file_name()).map_or_else(|| policy.to_owned(), |name| name.to_string_lossy().into_owned())
}

/// One run per policy; the step is the budget in percent of the keep-all peak.
fn write_events(logdir: &Path, policies: &[Chosen], results: &[PointResult]) -> anyhow::Result<()> {
    for policy in policies {
        let mut log = RunLog::create(logdir.join(run_name(policy.name())))?;
        for result in results.iter().filter(|result| result.policy == policy.name()) {
            let step = (100.0 * result.budget_bytes as f64 / result.keep_all_peak_bytes as f64).round() as u64;
            let mut scalar = |name: &str, value: f64| log.scalar(&format!("{}/{name}", result.workload), step, value);
            let share = |bytes: u64| bytes as f64 / result.keep_all_peak_bytes as f64;
            scalar("feasible", f64::from(u8::from(result.feasible)))?;
            scalar("decide_ms", result.decide_ns as f64 / 1e6)?;
            if result.feasible {
                scalar("predicted_overhead", result.predicted.overhead)?;
                scalar("predicted_peak_share", share(result.predicted.peak_bytes))?;
            }
            if let Some(measured) = result.measured {
                scalar("measured_overhead", measured.overhead)?;
                scalar("measured_peak_share", share(measured.peak_bytes))?;
            }
            if !result.ratios.is_empty() {
                let Estimate { value, interval: [low, high] } = Estimate::of_overhead(&result.ratios);
                scalar("median_overhead", value)?;
                scalar("median_overhead_low", low)?;
                scalar("median_overhead_high", high)?;
            }
            for (name, promise) in [("held", result.held), ("identical", result.identical)] {
                promise.map_or(Ok(()), |kept| scalar(name, f64::from(u8::from(kept))))?;
            }
        }
        log.flush()?;
    }
    Ok(())
}

fn print(comparison: &Comparison<'_>, results: &[PointResult]) {
    let link = comparison.tiers.as_ref().map_or_else(
        || "the device's own link".to_owned(),
        |open| format!("emulated link of {} GB/s", open.tiers.host.offload_bytes_per_s / 1e9),
    );
    println!("{} family, {link}; peaks in MiB", comparison.config.family);
    let mut table = Table::new([
        "workload",
        "budget",
        "policy",
        "decided by",
        "predicted peak",
        "measured",
        "held",
        "predicted overhead",
        "measured",
        "identical",
    ]);
    let dash = || "–".to_owned();
    let yes = |answer: Option<bool>| answer.map_or_else(dash, |yes| if yes { "yes" } else { "NO" }.to_owned());
    for result in results {
        let predicted = result.feasible.then_some(result.predicted);
        table.row([
            result.workload.clone(),
            mib(result.budget_bytes),
            run_name(&result.policy),
            if result.feasible { result.decided_by.clone() } else { "does not fit".to_owned() },
            mib(result.predicted.peak_bytes),
            result.measured.map_or_else(dash, |cost| mib(cost.peak_bytes)),
            yes(result.held),
            predicted.map_or_else(dash, |cost| percent(cost.overhead)),
            result.measured.map_or_else(dash, |cost| percent(cost.overhead)),
            yes(result.identical),
        ]);
    }
    print!("{table}");
    let mut told = Vec::new();
    for result in results.iter().filter(|result| result.dead_tail_bytes > 0) {
        if !told.contains(&&result.workload) {
            told.push(&result.workload);
            println!(
                "{}: {} MiB of the keep-all peak of {} MiB are dead tails, which no plan has to save",
                result.workload,
                mib(result.dead_tail_bytes),
                mib(result.keep_all_peak_bytes),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::run_name;

    #[test]
    fn no_two_policies_that_are_compared_log_the_same_run() {
        let runs = ["demo/gpt.policy", "mine", "dtr", "demo/dtr.policy", "search.policy"].map(run_name);
        assert_eq!(runs, ["gpt", "mine", "dtr", "dtr.policy", "search.policy"]);
    }
}
