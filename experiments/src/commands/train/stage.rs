//! What one algorithm does: a learner, its environments, and where it is saved and logged.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, bail};
use clap::ValueEnum;
use indicatif::ProgressBar;
use plimsoll_agent::{
    Best, ConfigError, Dqn, Evolution, Hyperparameters, Imitation, ImitationConfig, LearnsFrom, PolicyIteration, Ppo,
    SavedStateError, greedy_return,
};
use plimsoll_env::config::FamilyConfig;
use plimsoll_env::{Domain, TaughtEnvironment};
use plimsoll_runtime::PolicyFile;
use plimsoll_runtime::observation::FEATURE_TABLE;

use super::worlds::Worlds;
use super::{Algorithm, Arguments, beside};
use crate::learner_log::{describe, scalars};
use crate::progress;
use crate::tensorboard::RunLog;

/// Updates between two validations.
const VALIDATION_INTERVAL: usize = 5;
/// Instances that a validation is made of. Their seeds are far from those of the rollouts.
const VALIDATION_SEEDS: std::ops::Range<u64> = 0x5eed_0000_0000..0x5eed_0000_0100;

/// A learner for the environments at hand.
pub type AnyLearner = dyn LearnsFrom<TaughtEnvironment>;

/// What one algorithm does.
pub struct Stage {
    pub learner: Box<AnyLearner>,
    /// Runs of the timeline that its teacher's searches take, if it has one.
    teacher_evaluations: u64,
    /// Where its state is saved.
    pub state: PathBuf,
    /// Where TensorBoard finds it.
    log: PathBuf,
}

impl Stage {
    /// The file of the state of the algorithm of that number.
    pub fn state(arguments: &Arguments, number: usize) -> PathBuf {
        beside(&arguments.out, &format!("state{}", Self::suffix(arguments, number)))
    }

    /// The files of the states of all algorithms, wherever they come.
    pub fn states(arguments: &Arguments) -> Vec<PathBuf> {
        let later = Algorithm::value_variants().iter().map(|algorithm| format!("state-{}", algorithm.name()));
        std::iter::once("state".to_owned()).chain(later).map(|extension| beside(&arguments.out, &extension)).collect()
    }

    /// What tells the files of a later algorithm from those of the first.
    fn suffix(arguments: &Arguments, number: usize) -> String {
        if number == 0 { String::new() } else { format!("-{}", arguments.algorithm[number].name()) }
    }

    /// A new learner, or the one that was interrupted.
    pub fn open(config: &FamilyConfig, arguments: &Arguments, number: usize, resume: bool) -> anyhow::Result<Self> {
        let state = Self::state(arguments, number);
        let (seed, suffix) = (arguments.flags.seed, Self::suffix(arguments, number));
        // Each meets other instances than the one whose policy it starts from.
        let own_seed = seed.wrapping_add(number as u64);
        let from = resume.then_some(state.as_path());
        let algorithm = arguments.algorithm[number];
        let (learner, teacher_evaluations) = learner(config, arguments, algorithm, from, own_seed)?;
        let policy = arguments.out.file_stem().unwrap_or_default().to_string_lossy();
        let log = arguments.logdir.join(format!("train-{policy}-{seed}{suffix}"));
        Ok(Stage { learner, teacher_evaluations, state, log })
    }

    /// Makes all updates. Fails if the user interrupts. A learner ends with no policy that is worse than what it started from.
    pub fn take(&mut self, worlds: &Worlds, config: &FamilyConfig, interrupted: &AtomicBool) -> anyhow::Result<()> {
        let Stage { learner, teacher_evaluations, state, log } = self;
        let mut log = RunLog::create(log)?;
        describe(&mut log, config, learner.as_ref())?;
        let bar = progress::bar(learner.updates() as u64, &format!("training {}", config.family));
        bar.set_position(learner.updates_done() as u64);
        bar.reset_eta();
        let mut environments = Environments::new(worlds, *teacher_evaluations)?;
        if learner.updates_done() == 0 {
            environments.validate(learner.as_mut())?;
        }
        let trained = train(learner.as_mut(), &mut environments, state, interrupted, &mut log, &bar);
        bar.finish_and_clear();
        trained?;
        if !learner.is_finished() {
            bail!("interrupted after {} updates; --resume goes on from {}", learner.updates_done(), state.display());
        }
        println!("{}: the course of {} updates, for TensorBoard", log.path().display(), learner.updates_done());
        Ok(())
    }

    pub fn best(&self) -> anyhow::Result<&Best> {
        self.learner.best().context("no update was validated")
    }
}

/// The learner that the flags ask for, a new one or one that goes on `from` a training state, and the evaluations that its teacher
/// takes, if it has one.
fn learner(
    config: &FamilyConfig,
    arguments: &Arguments,
    algorithm: Algorithm,
    from: Option<&Path>,
    seed: u64,
) -> anyhow::Result<(Box<AnyLearner>, u64)> {
    let mut teacher_evaluations = 0;
    let learner = match algorithm {
        Algorithm::Ppo => opened(from, hyperparameters(config, arguments)?, seed, Ppo::new, Ppo::resume)?,
        Algorithm::Evolution => {
            opened(from, hyperparameters(config, arguments)?, seed, Evolution::new, Evolution::resume)?
        }
        Algorithm::Imitation => {
            let imitation: ImitationConfig = hyperparameters(config, arguments)?;
            teacher_evaluations = imitation.teacher_evaluations;
            opened(from, imitation, seed, Imitation::new, Imitation::resume)?
        }
        Algorithm::PolicyIteration => {
            opened(from, hyperparameters(config, arguments)?, seed, PolicyIteration::new, PolicyIteration::resume)?
        }
        Algorithm::Dqn => opened(from, hyperparameters(config, arguments)?, seed, Dqn::new, Dqn::resume)?,
    };
    Ok((learner, teacher_evaluations))
}

/// The hyperparameters in the configuration, with as many updates as the flags want.
fn hyperparameters<H: Hyperparameters>(config: &FamilyConfig, arguments: &Arguments) -> anyhow::Result<H> {
    let mut table: H = config.table(H::TABLE)?;
    if let Some(updates) = arguments.updates {
        *table.updates_mut() = updates as usize;
    }
    table.validate().with_context(|| format!("{}: {}", config.path.display(), H::TABLE))?;
    Ok(table)
}

/// A learner that goes on `from` a training state, or a new one.
fn opened<'a, H, L: LearnsFrom<TaughtEnvironment> + 'static>(
    from: Option<&'a Path>,
    hyperparameters: H,
    seed: u64,
    new: fn(H, u64) -> Result<L, ConfigError>,
    resume: fn(&'a Path, &H, u64) -> Result<L, SavedStateError>,
) -> anyhow::Result<Box<AnyLearner>> {
    Ok(Box::new(match from {
        Some(state) => resume(state, &hyperparameters, seed)?,
        None => new(hyperparameters, seed)?,
    }))
}

/// Gives `learner` the network of the policy file at `path`, which may be blind for nothing but the columns that are `hidden` from now on,
/// too. Returns the family that it was trained on.
pub fn start_from(learner: &mut AnyLearner, path: &Path, hidden: &[usize]) -> anyhow::Result<String> {
    let file = PolicyFile::load(path).context("--from")?;
    let scales = file.weights.normaliser().scale.iter().enumerate();
    let mut unseen = scales.filter(|(column, scale)| **scale == 0.0 && !hidden.contains(column));
    if let Some((column, _)) = unseen.next() {
        let others = unseen.count();
        bail!(
            "--from {}: that policy does not see {}, nor {others} others: --without has to say so",
            path.display(),
            FEATURE_TABLE[column].name
        );
    }
    learner.start_from(&file.weights).with_context(|| format!("--from {}", path.display()))?;
    Ok(file.family)
}

/// The environments of a training run, one per core.
struct Environments {
    rollouts: Vec<TaughtEnvironment>,
    validation: Vec<TaughtEnvironment>,
    validation_seeds: Vec<u64>,
}

impl Environments {
    fn new(worlds: &Worlds, teacher_evaluations: u64) -> anyhow::Result<Self> {
        let threads = std::thread::available_parallelism()?.get();
        let validation_seeds: Vec<u64> = VALIDATION_SEEDS.collect();
        let environment = |domains: &Arc<[Domain]>| TaughtEnvironment::new(domains.clone(), teacher_evaluations);
        let validated_by_each = validation_seeds.len().div_ceil(threads);
        let validation = || environment(&worlds.validation).remembering(validated_by_each);
        Ok(Environments {
            rollouts: (0..threads).map(|_| environment(&worlds.training)).collect(),
            validation: (0..threads).map(|_| validation()).collect(),
            validation_seeds,
        })
    }

    /// Validates the steady weights, which are kept if they are the best so far. Returns what they achieved.
    fn validate(&mut self, learner: &mut AnyLearner) -> anyhow::Result<f64> {
        let validation_return =
            greedy_return(&learner.steady_weights()?, &mut self.validation, &self.validation_seeds)?;
        learner.offer_best(validation_return)?;
        Ok(validation_return)
    }
}

/// Updates until all are made or the user interrupts, saving after each.
fn train(
    learner: &mut AnyLearner,
    environments: &mut Environments,
    state: &Path,
    interrupted: &AtomicBool,
    log: &mut RunLog,
    bar: &ProgressBar,
) -> anyhow::Result<()> {
    while !learner.is_finished() && !interrupted.load(Ordering::Relaxed) {
        let report = learner.update(&mut environments.rollouts)?;
        let step = report.updates_done as u64;
        if report.updates_done.is_multiple_of(VALIDATION_INTERVAL) || learner.is_finished() {
            log.scalar("train/validation_return", step, environments.validate(learner)?)?;
        }
        learner.save(state)?;
        for (tag, value) in scalars(&report) {
            log.scalar(&format!("train/{tag}"), step, value)?;
        }
        log.flush()?;
        bar.set_position(step);
        let best = learner.best().map_or(f64::NAN, |best| best.validation_return);
        bar.set_message(format!("return {:+.3}, best validation {best:+.3}", report.return_mean));
    }
    Ok(())
}
