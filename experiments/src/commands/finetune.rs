//! `plimsoll finetune`.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, ensure};
use clap::Args;
use plimsoll_agent::{Evolution, EvolutionConfig, LearnsFrom, Ppo, PpoConfig, UpdateReport};
use plimsoll_env::config::FamilyConfig;
use plimsoll_env::predicted::STEPS_MAX;
use plimsoll_env::real::Rewards;
use plimsoll_env::{Domain, Instance, TorchEnvironment};
use plimsoll_runtime::file::require_writable;
use plimsoll_runtime::network::{Network, NetworkWeights};
use plimsoll_runtime::units::{Bandwidth, Budget};
use plimsoll_runtime::{LearnedPolicy, Lineage, Link, Plan, Planner, PolicyFile, plan};

use crate::chosen::Chosen;
use crate::interrupt::watch_for_interrupt;
use crate::learner_log::{describe, scalars};
use crate::link::{bandwidth, emulated};
use crate::loops::{LoopFlags, build};
use crate::progress;
use crate::provenance::{Calls, provenance_of};
use crate::served::{Served, serve};
use crate::table::percent;
use crate::tensorboard::RunLog;

/// Flags.
#[derive(Args)]
pub struct Arguments {
    /// Configuration of the model family
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Name of the workload in the configuration
    #[arg(long, value_name = "NAME")]
    workload: String,
    /// The policy to start from
    #[arg(long, value_name = "FILE")]
    from: PathBuf,
    /// Where to write the policy
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// How to learn
    #[arg(long, value_enum, default_value_t = Algorithm::Evolution, value_name = "NAME")]
    algorithm: Algorithm,
    /// The budget, absolute or as a share of the keep-all peak [default: each of the configuration's evaluation]
    #[arg(long, value_name = "BUDGET")]
    budget: Option<Budget>,
    /// Emulate a link of this bandwidth, such as 500MB/s [default: that of the configuration's evaluation]
    #[arg(long, value_name = "GBPS", value_parser = bandwidth)]
    link: Option<Bandwidth>,
    /// Updates to make; each rolls eight plans out on the loop
    #[arg(long, default_value_t = 10, value_name = "N")]
    updates: usize,
    /// Planned iterations that a plan's reward is measured on, each beside an untouched one
    #[arg(long, default_value = "3", value_name = "N")]
    iterations: NonZeroUsize,
    /// Turns that both policies take on the loop at the end, at every budget
    #[arg(long, default_value_t = 6, value_name = "N", value_parser = clap::value_parser!(u64).range(3..))]
    rounds: u64,
    /// Where TensorBoard finds the run
    #[arg(long, value_name = "DIR", default_value = "runs")]
    logdir: PathBuf,
    #[command(flatten)]
    flags: LoopFlags,
}

/// A way to learn from few episodes with noisy rewards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Algorithm {
    /// Evolution strategies
    Evolution,
    /// Proximal policy optimisation
    Ppo,
}

/// A learner that can be lent to another thread while this one runs the loop.
type Pupil = dyn LearnsFrom<Served> + Send;

/// Both policies on the loop, by turns.
struct Verdict {
    /// Measured overhead of the start, and of what training led to: means over budgets and rounds.
    overheads: [f64; 2],
    /// Mean over rounds of the second less the first, and its standard error.
    difference: f64,
    standard_error: f64,
    /// Whether every run of the second was within its budget.
    held: bool,
}

impl Verdict {
    /// Whether the start is left for what training led to.
    fn is_better(&self) -> bool {
        self.held && self.difference < -2.0 * self.standard_error
    }
}

/// Runs the command.
pub fn run(arguments: Arguments) -> anyhow::Result<()> {
    let started = Instant::now();
    arguments.flags.require_cpu("finetune")?;
    let config = FamilyConfig::load(&arguments.config)?;
    let start = PolicyFile::load(&arguments.from).context("--from")?;
    let chosen = Chosen::Learned { name: arguments.from.display().to_string(), file: Box::new(start.clone()) };
    chosen.warn_of_family(&config.family.to_string());
    require_writable(&arguments.out)?;
    let mut pupil = pupil(&arguments, &start.weights)?;
    let link = emulated(arguments.link.unwrap_or(config.evaluation.link))?;
    let mut environment = open(&config, &arguments, link)?;
    let instances = instances(&config, &arguments, &environment, link);
    for instance in &instances {
        chosen.plan_or_refuse(instance.problem(), &Planner::decoding(0, 0))?;
    }
    let name = format!("finetune-{}-{}", arguments.workload, arguments.flags.seed);
    let mut log = RunLog::create(arguments.logdir.join(name))?;
    describe(&mut log, &config, pupil.as_ref())?;
    let interrupted = watch_for_interrupt()?;
    let gap = train(pupil.as_mut(), &mut environment, &interrupted, &mut log)?;

    let tuned = pupil.weights()?;
    let verdict = judge(&mut environment, &instances, [&start.weights, &tuned], arguments.rounds)?;
    log.scalar("finetune/overhead_difference", pupil.updates_done() as u64, verdict.difference)?;
    log.flush()?;
    let weights = if verdict.is_better() { tuned } else { start.weights };
    let [before, after] = verdict.overheads;
    let quality = [
        ("measured_overhead_of_start", before),
        ("measured_overhead_when_tuned", after),
        ("measured_difference", verdict.difference),
        ("measured_difference_standard_error", verdict.standard_error),
        ("kept_the_start", f64::from(u8::from(!verdict.is_better()))),
        ("reward_gap_mean", gap),
        ("updates", pupil.updates_done() as f64),
    ];
    let mut calls = Calls::this();
    calls.took(started.elapsed());
    let provenance =
        provenance_of(&config, vec![arguments.flags.device.product()], arguments.flags.seed, &calls, quality);
    PolicyFile { family: start.family, actions: start.actions, provenance, weights }.save(&arguments.out)?;
    println!(
        "{}: measured overhead {} before, {} after {} updates ({:+.2} ± {:.2} points): {}; rewards were measured {gap:+.3} \
         from what was predicted",
        arguments.out.display(),
        percent(before),
        percent(after),
        pupil.updates_done(),
        100.0 * verdict.difference,
        100.0 * verdict.standard_error,
        if verdict.is_better() {
            "better by measurement, kept"
        } else {
            "not better by measurement, the start is kept"
        },
    );
    println!("{}: its course, for TensorBoard", log.path().display());
    Ok(())
}

/// The learner, with few episodes in an update and small steps: it starts from what is good already.
fn pupil(arguments: &Arguments, start: &NetworkWeights) -> anyhow::Result<Box<Pupil>> {
    let (updates, seed, hidden) = (arguments.updates, arguments.flags.seed, start.layers()[0].outputs());
    let mut pupil: Box<Pupil> = match arguments.algorithm {
        Algorithm::Evolution => Box::new(Evolution::new(
            EvolutionConfig {
                updates,
                pairs: 4,
                instances_per_update: 1,
                hidden,
                deviation: 0.03,
                normaliser_updates: 0,
                learning_rate: 0.02,
                ..EvolutionConfig::default()
            },
            seed,
        )?),
        Algorithm::Ppo => Box::new(Ppo::new(
            PpoConfig {
                updates,
                instances_per_update: 1,
                episodes_per_instance: 8,
                hidden,
                learning_rate: 3e-4,
                entropy_coefficient: 0.0,
                ..PpoConfig::default()
            },
            seed,
        )?),
    };
    pupil.start_from(start).with_context(|| format!("--from {}", arguments.from.display()))?;
    Ok(pupil)
}

/// The budgets to train and to be judged at.
fn budgets(config: &FamilyConfig, arguments: &Arguments) -> Vec<Budget> {
    arguments.budget.map_or_else(|| config.evaluation.budgets.clone(), |budget| vec![budget])
}

/// Records the loop, and makes it an environment whose budgets lie between the least and the greatest.
fn open(config: &FamilyConfig, arguments: &Arguments, link: Link) -> anyhow::Result<TorchEnvironment> {
    let session = plimsoll_runtime::torch::Session::install()?;
    let device = arguments.flags.device.open()?;
    let workload = build(config, &arguments.workload, device, arguments.flags.seed)?;
    let domain = |peak_bytes: u64| {
        let shares = budgets(config, arguments).into_iter().map(|budget| budget.resolve(peak_bytes));
        let shares: Vec<f64> = shares.map(|bytes| bytes as f64 / peak_bytes as f64).collect();
        Domain {
            traces: Vec::new(),
            budget_share: [shares.iter().copied().fold(f64::MAX, f64::min), shares.iter().copied().fold(0.0, f64::max)],
            link_bytes_per_s: [link.offload_bytes_per_s; 2],
            cost_noise: 0.0,
            link,
            contention_ns_per_byte: [link.contention_ns_per_byte; 2],
            contention_each_ns: [link.contention_each_ns; 2],
            actions: config.evaluation.actions,
            recompute_only: 0.0,
            steps_max: STEPS_MAX,
        }
    };
    let environment = TorchEnvironment::recording(session, workload, domain, arguments.iterations.get())?;
    for budget in budgets(config, arguments) {
        let (needed, peak) = (budget.resolve(environment.trace().peak_bytes), environment.trace().peak_bytes);
        ensure!(needed < peak, "a budget of {needed} bytes needs no plan: keep-all peaks at {peak} bytes");
    }
    Ok(environment)
}

/// What both policies are judged on.
fn instances(
    config: &FamilyConfig,
    arguments: &Arguments,
    environment: &TorchEnvironment,
    link: Link,
) -> Vec<Instance> {
    let trace = Arc::new(environment.trace().clone());
    let lineage = Arc::new(Lineage::of(&trace));
    let budgets = budgets(config, arguments);
    let instance = |budget: Budget| Instance {
        trace: trace.clone(),
        lineage: lineage.clone(),
        tiers: link.into(),
        budget_bytes: budget.resolve(trace.peak_bytes),
        actions: config.evaluation.actions,
    };
    budgets.into_iter().map(instance).collect()
}

/// Updates until all are made or the user interrupts. Returns the mean of measured less predicted reward.
fn train(
    pupil: &mut Pupil,
    environment: &mut TorchEnvironment,
    interrupted: &AtomicBool,
    log: &mut RunLog,
) -> anyhow::Result<f64> {
    let bar = progress::bar(pupil.updates() as u64, "fine-tuning");
    let (mut gaps, mut episodes) = (0.0, 0usize);
    while !pupil.is_finished() && !interrupted.load(Ordering::Relaxed) {
        let report: UpdateReport = serve(environment, |served| pupil.update(&mut [served]))?;
        let step = report.updates_done as u64;
        for (tag, value) in scalars(&report) {
            log.scalar(&format!("finetune/{tag}"), step, value)?;
        }
        let rewards = environment.take_rewards();
        let mean = |of: fn(&Rewards) -> f64| rewards.iter().map(of).sum::<f64>() / rewards.len().max(1) as f64;
        let (predicted, measured) = (mean(|rewards| rewards.predicted), mean(|rewards| rewards.measured));
        log.scalar("finetune/predicted_reward", step, predicted)?;
        log.scalar("finetune/measured_reward", step, measured)?;
        log.scalar("finetune/reward_gap", step, measured - predicted)?;
        log.flush()?;
        gaps += rewards.iter().map(|rewards| rewards.measured - rewards.predicted).sum::<f64>();
        episodes += rewards.len();
        bar.set_position(step);
        bar.set_message(format!("measured {measured:+.3}, predicted {predicted:+.3}"));
    }
    bar.finish_and_clear();
    Ok(gaps / episodes.max(1) as f64)
}

/// Lets the plans of both networks take turns on the loop, the first of a turn changing from round to round.
fn judge(
    environment: &mut TorchEnvironment,
    instances: &[Instance],
    networks: [&NetworkWeights; 2],
    rounds: u64,
) -> anyhow::Result<Verdict> {
    let greedy = |instance: &Instance, weights: &NetworkWeights| -> Plan {
        plan(instance.problem(), &mut LearnedPolicy::greedy(Network::new(weights))).plan
    };
    let plans: Vec<[Plan; 2]> =
        instances.iter().map(|instance| networks.map(|weights| greedy(instance, weights))).collect();
    let (mut differences, mut totals, mut held) = (Vec::new(), [0.0; 2], true);
    for round in 0..rounds {
        let mut sums = [0.0; 2];
        for (instance, plans) in instances.iter().zip(&plans) {
            for turn in 0..2 {
                let whose = (turn + round as usize) % 2;
                let measured = environment.measure(instance, &plans[whose])?;
                let untouched = measured.untouched.as_ref();
                let keep_all_ns = untouched.map_or(instance.trace.makespan_ns, |own| own.makespan_ns);
                sums[whose] += measured.makespan_ns as f64 / keep_all_ns as f64 - 1.0;
                held &= whose == 0 || measured.peak_bytes <= instance.budget_bytes;
            }
        }
        let means = sums.map(|sum| sum / instances.len() as f64);
        totals = [totals[0] + means[0], totals[1] + means[1]];
        differences.push(means[1] - means[0]);
    }
    let (difference, standard_error) = mean_with_error(&differences);
    Ok(Verdict { overheads: totals.map(|total| total / rounds as f64), difference, standard_error, held })
}

/// The mean, and its standard error.
fn mean_with_error(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
    (mean, (squares / (count - 1.0) / count).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_is_left_only_for_what_is_faster_beyond_the_noise() {
        let verdict = |differences: &[f64], held| {
            let (difference, standard_error) = mean_with_error(differences);
            Verdict { overheads: [0.0; 2], difference, standard_error, held }
        };
        assert!(verdict(&[-0.05, -0.04, -0.06], true).is_better());
        assert!(!verdict(&[-0.05, -0.04, -0.06], false).is_better(), "over the budget");
        assert!(!verdict(&[-0.05, 0.04, -0.03], true).is_better(), "within the noise");
        assert!(!verdict(&[0.0, 0.0, 0.0], true).is_better(), "the same plan");
    }

    #[test]
    fn the_standard_error_is_that_of_the_definition() {
        let (mean, error) = mean_with_error(&[1.0, 2.0, 3.0]);
        assert_eq!((mean, error), (2.0, (1.0f64 / 3.0).sqrt()));
    }
}
