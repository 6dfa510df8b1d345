//! `plimsoll train`.

mod stage;
mod worlds;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use plimsoll_env::config::FamilyConfig;
use plimsoll_runtime::file::require_writable;
use plimsoll_runtime::observation::FEATURE_TABLE;
use plimsoll_runtime::units::Bandwidth;

use self::stage::{Stage, start_from};
use self::worlds::{Material, Worlds, machines};
use crate::interrupt::watch_for_interrupt;
use crate::link::bandwidth;
use crate::loops::LoopFlags;
use crate::outputs::require_logdir;
use crate::provenance::{Calls, provenance_of};

/// Flags.
#[derive(Args)]
pub struct Arguments {
    /// Configuration of the model family; its table [randomisation] says what to train on, those of the algorithms how
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Where to write the policy; FILE.traces and FILE.state, for later algorithms FILE.state-NAME, hold the traces and the
    /// training state beside it, FILE.calls what has made them
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// How to learn. Of several, divided by commas, each starts from the best policy of the one before
    #[arg(long, value_enum, value_name = "NAMES", value_delimiter = ',',
        default_values_t = [Algorithm::PolicyIteration])]
    algorithm: Vec<Algorithm>,
    /// Start from the network of this policy, in place of a random one
    #[arg(long, value_name = "FILE", conflicts_with = "resume")]
    from: Option<PathBuf>,
    /// Hide these features of the observation from the network, to find out what they are worth; of another name, all are
    /// listed
    #[arg(long, value_name = "FEATURES", value_delimiter = ',', conflicts_with = "resume")]
    without: Vec<String>,
    /// Go on from the training state where an earlier call was interrupted
    #[arg(long)]
    resume: bool,
    /// Updates to make, in place of the configuration's, by each algorithm
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    updates: Option<u32>,
    /// Where TensorBoard finds the training run
    #[arg(long, value_name = "DIR", default_value = "runs")]
    logdir: PathBuf,
    /// Train for this link alone, such as 8GB/s, in place of the configuration's range of links
    #[arg(long, value_name = "GBPS", value_parser = bandwidth)]
    link: Option<Bandwidth>,
    /// Train for this machine alone, in place of the configuration's: its profile, the profile's name, or `as-recorded`
    #[arg(long, value_name = "FILE|NAME")]
    hardware: Option<String>,
    /// Train on the traces in this folder, in place of recording members; logs of simrd count as traces
    #[arg(long, value_name = "DIR")]
    traces: Option<PathBuf>,
    /// Leave the trace of this workload out; may be given several times
    #[arg(long, value_name = "NAME", requires = "traces")]
    leave_out: Vec<String>,
    #[command(flatten)]
    flags: LoopFlags,
}

/// A way to learn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Algorithm {
    /// Proximal policy optimisation
    Ppo,
    /// Evolution strategies
    Evolution,
    /// Imitation of plans that a search finds
    Imitation,
    /// Policy iteration by rollouts
    PolicyIteration,
    /// Deep Q-learning with the state and the reward of DeepTM, to compare with
    Dqn,
}

impl Algorithm {
    /// Its name on the command line.
    fn name(self) -> String {
        self.to_possible_value().expect("none is hidden").get_name().to_owned()
    }
}

/// Runs the command.
pub fn run(arguments: Arguments) -> anyhow::Result<()> {
    let started = Instant::now();
    let mut config = FamilyConfig::load(&arguments.config)?;
    let hidden = arguments.without.iter().map(|name| column(name)).collect::<anyhow::Result<Vec<_>>>()?;
    let machines = machines(&config, &arguments)?;
    let algorithms = &arguments.algorithm;
    if let Some(twice) = algorithms.iter().enumerate().find(|(index, name)| algorithms[..*index].contains(name)) {
        bail!("--algorithm: {} is named twice", twice.1.name());
    }
    if algorithms[..algorithms.len() - 1].contains(&Algorithm::Dqn) {
        bail!("--algorithm: no other starts from dqn, whose network sees only what DeepTM's does");
    }
    // What was begun last goes on.
    let was_begun = |&number: &usize| arguments.resume && Stage::state(&arguments, number).exists();
    let first = (0..algorithms.len()).rev().find(was_begun).unwrap_or(0);
    let mut stage = Stage::open(&config, &arguments, first, arguments.resume)?;
    let from = arguments.from.as_deref().map(|path| start_from(stage.learner.as_mut(), path, &hidden)).transpose()?;
    // What goes on is as blind as it was.
    if !arguments.resume {
        stage.learner.hide(&hidden);
    }
    // All that can, fails before an hour of training does.
    [&arguments.out, &stage.state].into_iter().try_for_each(|path| require_writable(path))?;
    require_logdir(&arguments.logdir)?;
    let open = |number| Stage::open(&config, &arguments, number, false);
    let mut later = (first + 1..algorithms.len()).map(open).collect::<anyhow::Result<Vec<_>>>()?;
    let weights = stage.learner.weights()?;
    later.iter_mut().try_for_each(|next| next.learner.start_from(&weights))?;
    // Nobody goes on with what is begun anew, by this or another algorithm.
    if !arguments.resume {
        Stage::states(&arguments).iter().try_for_each(|state| forget(state))?;
    }
    later.iter().try_for_each(|next| forget(&next.state))?;
    let told = beside(&arguments.out, "calls");
    let mut calls = if arguments.resume { Calls::and_this(&told)? } else { Calls::this() };
    let material = Material::gather(&mut config, &arguments)?;
    let worlds = Worlds::of(&config, &machines, &material)?;
    let family = material.family()?;
    let world = worlds.digest();
    for stage in [&mut stage].into_iter().chain(&mut later) {
        stage.learner.enter(&world).with_context(|| stage.state.display().to_string())?;
    }
    stage.learner.save(&stage.state)?;
    calls.save(&told)?;
    if let Some(other) = from.filter(|other| *other != family) {
        eprintln!("plimsoll: warning: --from: that policy was trained on the family {other}, not {family}");
    }
    let interrupted = watch_for_interrupt()?;
    let take_all = |mut stage: Stage| {
        stage.take(&worlds, &config, &interrupted)?;
        for mut next in later {
            next.learner.start_from(&stage.best()?.weights)?;
            stage = next;
            stage.take(&worlds, &config, &interrupted)?;
        }
        anyhow::Ok(stage)
    };
    let taken = take_all(stage);
    calls.took(started.elapsed());
    calls.save(&told)?;
    let stage = taken?;
    let best = stage.best()?;
    let quality = [
        ("validation_return", best.validation_return),
        ("best_after_updates", best.updates_done as f64),
        ("updates", stage.learner.updates_done() as f64),
    ];
    let provenance = provenance_of(&config, material.devices(), arguments.flags.seed, &calls, quality);
    stage.learner.policy_file(&family, config.evaluation.actions, provenance)?.save(&arguments.out)?;
    println!(
        "{}: {:.0} s, validation return {:+.3} (0 is the best of five heuristics)",
        arguments.out.display(),
        started.elapsed().as_secs_f64(),
        best.validation_return,
    );
    Ok(())
}

/// The column of a feature of the observation.
fn column(name: &str) -> anyhow::Result<usize> {
    let position = FEATURE_TABLE.iter().position(|feature| feature.name == name);
    position.with_context(|| {
        let all: Vec<&str> = FEATURE_TABLE.iter().map(|feature| feature.name).collect();
        format!("--without {name}: no feature has that name, only {}", all.join(", "))
    })
}

/// Removes what an earlier call left at `path`, if it did.
fn forget(path: &Path) -> anyhow::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| path.display().to_string())
        }
        _ => Ok(()),
    }
}

/// `policy.state` for `policy`.
fn beside(path: &Path, extension: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{extension}"));
    path.with_file_name(name)
}
