//! `plimsoll train`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use indicatif::ProgressBar;
use plimsoll_agent::{
    Best, ConfigError, Dqn, Evolution, Hyperparameters, Imitation, ImitationConfig, Learner, LearnsFrom,
    PolicyIteration, Ppo, SavedStateError, UpdateReport, greedy_return,
};
use plimsoll_env::config::{FamilyConfig, MachineRange, Split};
use plimsoll_env::units::Bandwidth;
use plimsoll_env::{Domain, TaughtEnvironment};
use plimsoll_runtime::file::{require_writable, sha256_hex};
use plimsoll_runtime::observation::FEATURE_TABLE;
use plimsoll_runtime::{ActionSet, Lineage, Link, PolicyFile, Problem, Trace};
use serde_json::Value;

use crate::interrupt::watch_for_interrupt;
use crate::link::bandwidth;
use crate::loops::{LoopFlags, RECORDED_ITERATIONS};
use crate::machine::Machine;
use crate::members::{self, Recorded};
use crate::outputs::require_logdir;
use crate::progress;
use crate::provenance::{command_line, provenance_of};
use crate::tensorboard::{Hyperparameter, RunLog};

/// Updates between two validations.
const VALIDATION_INTERVAL: usize = 5;
/// Instances that a validation is made of. Their seeds are far from those of the rollouts.
const VALIDATION_SEEDS: std::ops::Range<u64> = 0x5eed_0000_0000..0x5eed_0000_0040;
/// Of so many given traces, one is for validation.
const TRACES_PER_VALIDATION: usize = 4;
/// The machines with links from so much slower to so much faster than a profile's own.
const LINK_SPREAD: f64 = 2.0;
/// Steps after which an episode is truncated: more than any trace at hand has windows and operators. Every step evicts
/// another window, or waits at another operator.
pub const STEPS_MAX: usize = 1 << 20;

/// Flags.
#[derive(Args)]
pub struct Arguments {
    /// Configuration of the model family; its table [randomisation] says what to train on, those of the algorithms how
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Where to write the policy; FILE.traces and FILE.state, for later algorithms FILE.state-NAME, hold the traces and the
    /// training state beside it
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
    #[arg(long, value_name = "N")]
    updates: Option<usize>,
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

/// A learner for the environments at hand.
type Pupil = dyn LearnsFrom<TaughtEnvironment>;

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
    // What was begun last goes on.
    let was_begun = |&stage: &usize| arguments.resume && Course::state(&arguments, stage).exists();
    let first = (0..algorithms.len()).rev().find(was_begun).unwrap_or(0);
    let mut course = Course::open(&config, &arguments, first, arguments.resume)?;
    let from = arguments.from.as_deref().map(|path| start_from(course.pupil.as_mut(), path)).transpose()?;
    // What goes on is as blind as it was.
    if !arguments.resume {
        course.pupil.hide(&hidden);
    }
    // All that can, fails before an hour of training does.
    [&arguments.out, &course.state].into_iter().try_for_each(|path| require_writable(path))?;
    require_logdir(&arguments.logdir)?;
    let open = |stage| Course::open(&config, &arguments, stage, false);
    let mut later = (first + 1..algorithms.len()).map(open).collect::<anyhow::Result<Vec<_>>>()?;
    let weights = course.pupil.weights()?;
    later.iter_mut().try_for_each(|next| next.pupil.start_from(&weights))?;
    // Nobody goes on with what is begun anew.
    if !arguments.resume {
        forget(&course.state)?;
    }
    later.iter().try_for_each(|next| forget(&next.state))?;
    let material = Material::gather(&mut config, &arguments)?;
    let worlds = Worlds::of(&config, &machines, &material)?;
    let family = material.family()?;
    let world = worlds.digest();
    for stage in [&mut course].into_iter().chain(&mut later) {
        stage.pupil.enter(&world).with_context(|| stage.state.display().to_string())?;
    }
    course.pupil.save(&course.state)?;
    if let Some(other) = from.filter(|other| *other != family) {
        eprintln!("plimsoll: warning: --from: that policy was trained on the family {other}, not {family}");
    }
    let interrupted = watch_for_interrupt()?;
    course.take(&worlds, &config, &interrupted)?;
    for mut next in later {
        next.pupil.start_from(&course.best()?.weights)?;
        course = next;
        course.take(&worlds, &config, &interrupted)?;
    }
    let best = course.best()?;
    let quality = [
        ("validation_return", best.validation_return),
        ("best_after_updates", best.updates_done as f64),
        ("updates", course.pupil.updates_done() as f64),
    ];
    let provenance = provenance_of(&config, material.devices(), arguments.flags.seed, started, quality);
    course.pupil.policy_file(&family, config.evaluation.actions, provenance)?.save(&arguments.out)?;
    println!(
        "{}: {:.0} s, validation return {:+.3} (0 is the best heuristic)",
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

/// What one algorithm does.
struct Course {
    pupil: Box<Pupil>,
    /// Runs of the timeline that its teacher's searches take, if it has one.
    teacher_evaluations: u64,
    /// Where its state is saved.
    state: PathBuf,
    /// Where TensorBoard finds it.
    log: PathBuf,
}

impl Course {
    /// The file of the state of the algorithm `stage`.
    fn state(arguments: &Arguments, stage: usize) -> PathBuf {
        beside(&arguments.out, &format!("state{}", Self::suffix(arguments, stage)))
    }

    /// What tells the files of a later algorithm from those of the first.
    fn suffix(arguments: &Arguments, stage: usize) -> String {
        if stage == 0 { String::new() } else { format!("-{}", arguments.algorithm[stage].name()) }
    }

    /// A new learner, or the one that was interrupted.
    fn open(config: &FamilyConfig, arguments: &Arguments, stage: usize, resume: bool) -> anyhow::Result<Self> {
        let state = Self::state(arguments, stage);
        let (pupil, teacher_evaluations) = pupil(config, arguments, arguments.algorithm[stage], resume, &state)?;
        let (seed, suffix) = (arguments.flags.seed, Self::suffix(arguments, stage));
        let policy = arguments.out.file_stem().unwrap_or_default().to_string_lossy();
        let log = arguments.logdir.join(format!("train-{policy}-{seed}{suffix}"));
        Ok(Course { pupil, teacher_evaluations, state, log })
    }

    /// Makes all updates. Fails if the user interrupts. A learner ends with no policy that is worse than what it started from.
    fn take(&mut self, worlds: &Worlds, config: &FamilyConfig, interrupted: &AtomicBool) -> anyhow::Result<()> {
        let Course { pupil, teacher_evaluations, state, log } = self;
        let mut log = RunLog::create(log)?;
        describe(&mut log, config, pupil.as_ref())?;
        let bar = progress::bar(pupil.updates() as u64, &format!("training {}", config.family));
        bar.set_position(pupil.updates_done() as u64);
        bar.reset_eta();
        let mut class = Class::new(worlds, *teacher_evaluations)?;
        if pupil.updates_done() == 0 {
            class.validate(pupil.as_mut())?;
        }
        let trained = train(pupil.as_mut(), &mut class, state, interrupted, &mut log, &bar);
        bar.finish_and_clear();
        trained?;
        if !pupil.is_finished() {
            bail!("interrupted after {} updates; --resume goes on from {}", pupil.updates_done(), state.display());
        }
        println!("{}: the course of {} updates, for TensorBoard", log.path().display(), pupil.updates_done());
        Ok(())
    }

    fn best(&self) -> anyhow::Result<&Best> {
        self.pupil.best().context("no update was validated")
    }
}

/// The learner that the flags ask for, a new one or the one that was interrupted, and the evaluations that its teacher
/// takes, if it has one.
fn pupil(
    config: &FamilyConfig,
    arguments: &Arguments,
    algorithm: Algorithm,
    resume: bool,
    state: &Path,
) -> anyhow::Result<(Box<Pupil>, u64)> {
    let (from, seed) = (resume.then_some(state), arguments.flags.seed);
    let mut teacher_evaluations = 0;
    let pupil = match algorithm {
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
    Ok((pupil, teacher_evaluations))
}

/// The hyperparameters in the configuration, with as many updates as the flags want.
fn hyperparameters<H: Hyperparameters>(config: &FamilyConfig, arguments: &Arguments) -> anyhow::Result<H> {
    let mut table: H = config.table(H::TABLE)?;
    if let Some(updates) = arguments.updates {
        *table.updates_mut() = updates;
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
) -> anyhow::Result<Box<Pupil>> {
    Ok(Box::new(match from {
        Some(state) => resume(state, &hyperparameters, seed)?,
        None => new(hyperparameters, seed)?,
    }))
}

/// Gives `learner` the network of the policy file at `path`. Returns the family that it was trained on.
fn start_from(learner: &mut Pupil, path: &Path) -> anyhow::Result<String> {
    let file = PolicyFile::load(path).context("--from")?;
    learner.start_from(&file.weights).with_context(|| format!("--from {}", path.display()))?;
    Ok(file.family)
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

/// The traces to train on, and those to choose the best update by.
struct Material {
    recorded: Recorded,
    /// How many of the traces are to train on. Those after them are for validation.
    trained: usize,
}

impl Material {
    /// Records them now, or loads those that the interrupted call recorded, or those that the flags name.
    fn gather(config: &mut FamilyConfig, arguments: &Arguments) -> anyhow::Result<Self> {
        let gathered = match &arguments.traces {
            Some(folder) => Self::given(folder, &arguments.leave_out)?,
            None => Self::drawn(config, arguments)?,
        };
        gathered.without_hopeless(config)
    }

    /// Leaves out what no budget that is drawn suffices for: there is nothing to learn there, and nothing to validate by.
    fn without_hopeless(mut self, config: &FamilyConfig) -> anyhow::Result<Self> {
        let traces = &mut self.recorded.traces;
        let (found, most) = (traces.len(), config.randomisation.budget_share[1]);
        // Where every draw recomputes alone, so must what is drawn from.
        let swap = config.evaluation.actions.swap && config.randomisation.recompute_only < 1.0;
        let actions = ActionSet { swap, ..config.evaluation.actions };
        let validation = found - self.trained;
        traces.retain(|trace| {
            let lineage = Lineage::of(trace);
            let budget_bytes = (most * lineage.keep_all_peak_bytes() as f64) as u64;
            // Any link will do: bytes do not depend on it.
            let tiers = Link::symmetric(1e9, 0).into();
            !Problem { trace, lineage: &lineage, tiers, budget_bytes, actions }.is_hopeless()
        });
        if traces.is_empty() {
            bail!(
                "no trace of which more than {:.0} % of the peak can be evicted: nothing to train on",
                100.0 - 100.0 * most
            );
        }
        let left_out = found - traces.len();
        if left_out > 0 {
            eprintln!("plimsoll: {left_out} of {found} members are left out: no budget in the range can hold them");
        }
        self.trained = traces.len() - validation.min(traces.len() - 1);
        Ok(self)
    }

    fn drawn(config: &mut FamilyConfig, arguments: &Arguments) -> anyhow::Result<Self> {
        let drawn = &config.randomisation;
        let (members, validation_members) = (drawn.members, drawn.validation_members);
        let mut names = drawn.workloads.clone();
        names.extend(members::draw(config, Split::Train, members + validation_members, arguments.flags.seed)?);
        if names.len() == validation_members {
            bail!("{}: [randomisation] names no members to train on; --traces names a folder", config.path.display());
        }
        let folder = beside(&arguments.out, "traces");
        let recorded = if arguments.resume {
            members::load_named(&folder, &names)?
        } else {
            members::record(config, &names, &folder, &arguments.flags, RECORDED_ITERATIONS)?
        };
        Ok(Material { recorded, trained: names.len() - validation_members })
    }

    fn given(folder: &Path, left_out: &[String]) -> anyhow::Result<Self> {
        let mut recorded = members::load_all(folder)?;
        for name in left_out {
            let before = recorded.traces.len();
            recorded.traces.retain(|trace| trace.workload != *name);
            if recorded.traces.len() == before {
                bail!("--leave-out {name}: {} holds no trace of a workload of that name", folder.display());
            }
        }
        let found = recorded.traces.len();
        if found == 0 {
            bail!("{}: no trace is left to train on", folder.display());
        }
        Ok(Material { trained: found - found / TRACES_PER_VALIDATION, recorded })
    }

    /// What recorded them.
    fn devices(&self) -> Vec<String> {
        let devices: BTreeSet<&String> = self.recorded.traces.iter().map(|trace| &trace.device).collect();
        devices.into_iter().cloned().collect()
    }

    /// The family of all traces.
    fn family(&self) -> anyhow::Result<String> {
        let traces = &self.recorded.traces;
        let family = &traces[0].family;
        match traces.iter().find(|trace| trace.family != *family) {
            Some(other) => bail!("{} is of the family {}, not {family} like others", other.workload, other.family),
            None => Ok(family.clone()),
        }
    }
}

/// The machines to train for, each with its range of links: those of the configuration, or the one that the flags name.
fn machines(config: &FamilyConfig, arguments: &Arguments) -> anyhow::Result<Vec<(Machine, MachineRange)>> {
    let find = |name: &str| Machine::find(name, Some(&arguments.config));
    let known = &config.randomisation.machines;
    let mut machines = match &arguments.hardware {
        None => {
            known.iter().map(|(name, range)| Ok((find(name)?, range.clone()))).collect::<anyhow::Result<Vec<_>>>()?
        }
        Some(name) => {
            let machine = find(name)?;
            let range = match (known.get(name), &machine) {
                (Some(range), _) => range.clone(),
                (None, Machine::Profiled(profile)) => around(&profile.link, &profile.name)?,
                (None, Machine::AsRecorded) => bail!("--hardware {name}: the configuration has no links for it"),
            };
            vec![(machine, range)]
        }
    };
    if let Some(link) = arguments.link {
        machines.iter_mut().for_each(|(_, range)| range.link = [link; 2]);
    }
    Ok(machines)
}

/// Links around that of a profile, whose copies cost compute nothing to so much more than that profile says.
fn around(link: &Link, name: &str) -> anyhow::Result<MachineRange> {
    let rate = |factor: f64| {
        let rate = Bandwidth::from_bytes_per_second(link.offload_bytes_per_s * factor);
        rate.with_context(|| format!("the link of {name} is out of range"))
    };
    Ok(MachineRange {
        link: [rate(1.0 / LINK_SPREAD)?, rate(LINK_SPREAD)?],
        contention_ns_per_byte: [0.0, LINK_SPREAD * link.contention_ns_per_byte],
        contention_each_ns: [0, (LINK_SPREAD * link.contention_each_ns as f64) as u64],
    })
}

/// What episodes are drawn from: one domain per machine.
struct Worlds {
    training: Arc<[Domain]>,
    validation: Arc<[Domain]>,
}

impl Worlds {
    fn of(config: &FamilyConfig, machines: &[(Machine, MachineRange)], material: &Material) -> anyhow::Result<Self> {
        let Recorded { traces, recorded_on } = &material.recorded;
        let (mut training, mut validation) = (Vec::new(), Vec::new());
        for (machine, range) in machines {
            let projected = traces.iter().map(|trace| Ok(Arc::new(machine.project(trace, recorded_on)?)));
            let mut trained = projected.collect::<anyhow::Result<Vec<_>>>()?;
            let validated = trained.split_off(material.trained);
            // Without traces to validate by, other episodes of the same traces have to do.
            let validated = if validated.is_empty() { trained.clone() } else { validated };
            training.push(domain(config, machine, range, trained));
            validation.push(domain(config, machine, range, validated));
        }
        Ok(Worlds { training: training.into(), validation: validation.into() })
    }

    /// What tells them from others.
    fn digest(&self) -> String {
        let of_domain = |domain: &Domain| {
            let traces =
                domain.traces.iter().map(|trace| sha256_hex(&serde_json::to_vec(&**trace).expect("plain data")));
            let traces = traces.collect::<String>();
            format!("{traces}{:?}", Domain { traces: Vec::new(), ..domain.clone() })
        };
        sha256_hex(self.training.iter().chain(&*self.validation).map(of_domain).collect::<String>().as_bytes())
    }
}

fn domain(config: &FamilyConfig, machine: &Machine, range: &MachineRange, traces: Vec<Arc<Trace>>) -> Domain {
    let randomisation = &config.randomisation;
    Domain {
        traces,
        budget_share: randomisation.budget_share,
        link_bytes_per_s: range.link.map(Bandwidth::bytes_per_second),
        cost_noise: randomisation.cost_noise,
        latency_ns: machine.latency_ns(),
        contention_ns_per_byte: range.contention_ns_per_byte,
        contention_each_ns: range.contention_each_ns,
        actions: config.evaluation.actions,
        recompute_only: randomisation.recompute_only,
        steps_max: STEPS_MAX,
    }
}

/// What the run is about: its hyperparameters and its configuration.
pub fn describe<L: Learner + ?Sized>(log: &mut RunLog, config: &FamilyConfig, trainer: &L) -> anyhow::Result<()> {
    let table = trainer.hyperparameters();
    let hparams = table.as_object().into_iter().flatten().map(|(key, value)| {
        let value = match value {
            Value::Bool(flag) => Hyperparameter::Flag(*flag),
            Value::Number(number) => Hyperparameter::Number(number.as_f64().unwrap_or(f64::NAN)),
            other => Hyperparameter::Text(other.to_string()),
        };
        (key.as_str(), value)
    });
    log.hparams(hparams)?;
    log.text("configuration", 0, &format!("```toml\n{}\n```", config.text))?;
    log.text("command", 0, &command_line())?;
    Ok(())
}

/// The environments of a training run, one per core.
struct Class {
    rollouts: Vec<TaughtEnvironment>,
    validation: Vec<TaughtEnvironment>,
    validation_seeds: Vec<u64>,
}

impl Class {
    fn new(worlds: &Worlds, teacher_evaluations: u64) -> anyhow::Result<Self> {
        let threads = std::thread::available_parallelism()?.get();
        let environments = |domains: &Arc<[Domain]>| {
            (0..threads).map(|_| TaughtEnvironment::new(domains.clone(), teacher_evaluations)).collect()
        };
        Ok(Class {
            rollouts: environments(&worlds.training),
            validation: environments(&worlds.validation),
            validation_seeds: VALIDATION_SEEDS.collect(),
        })
    }

    /// Validates the present weights, which are kept if they are the best so far. Returns what they achieved.
    fn validate(&mut self, trainer: &mut Pupil) -> anyhow::Result<f64> {
        let validation_return = greedy_return(&trainer.weights()?, &mut self.validation, &self.validation_seeds)?;
        trainer.offer_best(validation_return)?;
        Ok(validation_return)
    }
}

/// Updates until all are made or the user interrupts, saving after each.
fn train(
    trainer: &mut Pupil,
    class: &mut Class,
    state: &Path,
    interrupted: &AtomicBool,
    log: &mut RunLog,
    bar: &ProgressBar,
) -> anyhow::Result<()> {
    while !trainer.is_finished() && !interrupted.load(Ordering::Relaxed) {
        let report = trainer.update(&mut class.rollouts)?;
        let step = report.updates_done as u64;
        if report.updates_done.is_multiple_of(VALIDATION_INTERVAL) || trainer.is_finished() {
            log.scalar("train/validation_return", step, class.validate(trainer)?)?;
        }
        trainer.save(state)?;
        for (tag, value) in scalars(&report) {
            log.scalar(&format!("train/{tag}"), step, value)?;
        }
        log.flush()?;
        bar.set_position(step);
        let best = trainer.best().map_or(f64::NAN, |best| best.validation_return);
        bar.set_message(format!("return {:+.3}, best validation {best:+.3}", report.return_mean));
    }
    Ok(())
}

/// What is logged of every update, by name.
pub fn scalars(report: &UpdateReport) -> impl Iterator<Item = (&'static str, f64)> + '_ {
    let common = [
        ("return_mean", report.return_mean),
        ("return_max", report.return_max),
        ("episode_length", report.episode_length_mean()),
        ("transitions_per_second", report.transitions_per_second()),
    ];
    common.into_iter().chain(report.details.iter().copied())
}
