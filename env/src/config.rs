//! The configuration of a model family: its workloads, what an agent trains on, and what it is judged by.
//!
//! One TOML file per family, in `configs/`. Every mistake in it is one line that names file, line and key.
//! The tables `[ppo]`, `[evolution]`, `[imitation]`, `[policy_iteration]` and `[dqn]` belong to the agent and are only
//! carried here.

mod error;
mod keys;
mod members;

pub use error::{ConfigError, Problem};
pub use members::{Members, Range, Span, Split};

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use plimsoll_runtime::hardware::PAGE_BYTES;
use plimsoll_runtime::plan::{Action, ActionSet};
use plimsoll_runtime::units::{Bandwidth, Budget, Bytes};
use serde::de::{DeserializeOwned, Error, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

pub use crate::workload::Family;
use crate::workload::{Manner, ReadFamily, WorkloadConfig};
use error::nearest;

/// Standard deviations of the logarithm of an operator's cost beyond which sums of costs might not fit into 64 bits, nor
/// anything be learned.
const COST_NOISE_MAX: f64 = 2.0;
/// The most members that are drawn: each is a loop to be recorded.
const MEMBERS_MAX: usize = 10_000;

/// A family's configuration file, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct FamilyConfig {
    /// Where it was read.
    pub path: PathBuf,
    /// The family of all its workloads.
    pub family: FamilyName,
    /// How their loops are run.
    pub manner: Manner,
    /// The members that have a name, by it.
    pub workloads: BTreeMap<String, WorkloadConfig>,
    /// The ranges that more members can be drawn from.
    pub members: Option<Members>,
    /// What the agent trains on.
    pub randomisation: Randomisation,
    /// The whole file.
    pub text: String,
    /// What policies are compared on.
    pub evaluation: Evaluation,
}

/// A family by its name in configurations, traces and policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FamilyName {
    /// One whose members are training loops.
    Loops(Family),
    /// Traces that are given, and say which family they are of. There are no loops, so nothing can be recorded or run.
    Traces,
}

/// What stands for the family of traces that are given.
const TRACES: &str = "traces";

impl FamilyName {
    /// The name.
    pub const fn name(self) -> &'static str {
        match self {
            FamilyName::Loops(family) => family.name(),
            FamilyName::Traces => TRACES,
        }
    }

    fn has_loops(self) -> bool {
        matches!(self, FamilyName::Loops(_))
    }
}

impl fmt::Display for FamilyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl<'de> Deserialize<'de> for FamilyName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        if name == TRACES {
            return Ok(FamilyName::Traces);
        }
        let known = Family::ALL.iter().find(|family| family.name() == name);
        known.copied().map(FamilyName::Loops).ok_or_else(|| {
            let names: Vec<&str> = Family::ALL.iter().map(|family| family.name()).collect();
            D::Error::custom(format_args!(
                "no family `{name}`: expected {}, or `{TRACES}`, which has no loops and takes any traces with --traces",
                names.join(", ")
            ))
        })
    }
}

/// The distribution that training episodes are drawn from.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Randomisation {
    /// Names of the workloads.
    #[serde(default)]
    pub workloads: Vec<String>,
    /// How many members are drawn beside them.
    #[serde(default)]
    pub members: usize,
    /// How many further members are drawn to choose the best update by; without them, episodes of other seeds are.
    #[serde(default)]
    pub validation_members: usize,
    /// Least and greatest budget as a share of the keep-all peak, drawn uniformly.
    pub budget_share: [f64; 2],
    /// The share of episodes in which nothing may be swapped.
    #[serde(default)]
    pub recompute_only: f64,
    /// Standard deviation of the logarithm of the log-normal factor on operator times.
    pub cost_noise: f64,
    /// The machines, each as likely as the others: [`AS_RECORDED`], or profiles in the folder `hardware/` beside the
    /// file.
    pub machines: BTreeMap<String, MachineRange>,
}

/// The name of the machine whose operator times are those that were recorded.
pub const AS_RECORDED: &str = "as-recorded";

/// What differs from episode to episode on one machine.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineRange {
    /// Slowest and fastest link, drawn log-uniformly.
    pub link: [Bandwidth; 2],
    /// Least and greatest compute time that a copied byte costs, in nanoseconds, drawn uniformly.
    pub contention_ns_per_byte: [f64; 2],
    /// Least and greatest compute time that a copied storage costs beside its bytes, in nanoseconds, drawn uniformly.
    #[serde(default)]
    pub contention_each_ns: [u64; 2],
}

/// The points at which policies are compared.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evaluation {
    /// Names of the workloads.
    pub workloads: Vec<String>,
    /// Budgets, each for every workload.
    pub budgets: Vec<Budget>,
    /// The link.
    pub link: Bandwidth,
    /// Iterations that a real run takes.
    pub iterations: usize,
    /// Names of the baselines to compare with; whoever runs them knows which there are.
    pub baselines: Vec<String>,
    /// Which actions a plan may take.
    #[serde(deserialize_with = "action_set")]
    pub actions: ActionSet,
    /// Most bytes of the machine's memory that offloaded storages may take; none for no limit.
    #[serde(default)]
    pub host_limit: Option<Bytes>,
    /// Where what the memory does not take is offloaded to; none for nowhere.
    #[serde(default)]
    pub spill: Option<Spill>,
}

/// A file that takes what the machine's memory does not.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spill {
    /// The folder of the file, which has no name there.
    pub folder: PathBuf,
    /// Most bytes of it; none for what the disk holds.
    #[serde(default)]
    pub limit: Option<Bytes>,
}

/// Reads `["keep", "swap", "recompute"]`. Keeping is allowed whether or not it is listed.
fn action_set<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ActionSet, D::Error> {
    Vec::<Action>::deserialize(deserializer).map(ActionSet::from_iter)
}

/// Reads one table of the file, and passes over all others.
struct OneTable<P> {
    name: &'static str,
    table: PhantomData<P>,
}

impl<'de, P: DeserializeOwned + Default> Visitor<'de> for OneTable<P> {
    type Value = P;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a file with a table `{}`", self.name)
    }

    fn visit_map<M: MapAccess<'de>>(self, mut file: M) -> Result<P, M::Error> {
        let mut found = None;
        while let Some(key) = file.next_key::<String>()? {
            if key == self.name {
                found = Some(file.next_value()?);
            } else {
                file.next_value::<IgnoredAny>()?;
            }
        }
        Ok(found.unwrap_or_default())
    }
}

/// The part of the file that says how to read the rest.
#[derive(Deserialize)]
struct Head {
    family: FamilyName,
}

/// The file as it stands, for workloads of one family.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document<W> {
    family: FamilyName,
    #[serde(default)]
    manner: Manner,
    #[serde(default = "BTreeMap::new")]
    workloads: BTreeMap<String, W>,
    members: Option<Members>,
    randomisation: Randomisation,
    #[serde(default, rename = "ppo")]
    _ppo: IgnoredAny,
    #[serde(default, rename = "evolution")]
    _evolution: IgnoredAny,
    #[serde(default, rename = "imitation")]
    _imitation: IgnoredAny,
    #[serde(default, rename = "policy_iteration")]
    _policy_iteration: IgnoredAny,
    #[serde(default, rename = "dqn")]
    _dqn: IgnoredAny,
    evaluation: Evaluation,
}

/// Reads a whole file for one family.
struct ReadDocument<'a> {
    path: &'a Path,
    text: &'a str,
}

/// The workload of a family that has none: no table is one.
#[derive(Deserialize)]
enum NoLoop {}

impl ReadFamily for ReadDocument<'_> {
    type Output = Result<FamilyConfig, ConfigError>;

    fn read<C: DeserializeOwned>(self, wrap: fn(C) -> WorkloadConfig) -> Self::Output {
        let ReadDocument { path, text } = self;
        let document: Document<C> = toml::from_str(text).map_err(|error| ConfigError::malformed(path, text, error))?;
        Ok(FamilyConfig {
            path: path.to_owned(),
            family: document.family,
            manner: document.manner,
            workloads: document.workloads.into_iter().map(|(name, config)| (name, wrap(config))).collect(),
            members: document.members,
            randomisation: document.randomisation,
            text: text.to_owned(),
            evaluation: document.evaluation,
        })
    }
}

impl FamilyConfig {
    /// Reads and checks a configuration file.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path).map_err(|error| ConfigError::unreadable(path, error))?;
        Self::parse(path, &text)
    }

    /// Checks `text`, which was read at `path`.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let head: Head = toml::from_str(text).map_err(|error| ConfigError::malformed(path, text, error))?;
        let document = ReadDocument { path, text };
        let config = match head.family {
            FamilyName::Loops(family) => family.read(document)?,
            FamilyName::Traces => document.read(|no_loop: NoLoop| match no_loop {})?,
        };
        config.check().map_err(|(key, problem)| ConfigError::at_key(path, text, key, problem))?;
        Ok(config)
    }

    /// What the file is called.
    pub fn name(&self) -> Cow<'_, str> {
        self.path.file_stem().unwrap_or_default().to_string_lossy()
    }

    /// The agent's own table `name`, as the agent reads it; the defaults where there is none.
    pub fn table<P: DeserializeOwned + Default>(&self, name: &'static str) -> Result<P, ConfigError> {
        let table = OneTable { name, table: PhantomData };
        let read = toml::Deserializer::parse(&self.text).and_then(|file| file.deserialize_map(table));
        read.map_err(|error| ConfigError::malformed(&self.path, &self.text, error))
    }

    /// The workload of that name.
    pub fn workload(&self, name: &str) -> Result<&WorkloadConfig, ConfigError> {
        self.find(name).map_err(|problem| ConfigError::in_file(&self.path, problem))
    }

    fn find(&self, name: &str) -> Result<&WorkloadConfig, Problem> {
        self.workloads.get(name).ok_or_else(|| Problem::UnknownWorkload {
            name: name.to_owned(),
            nearest: nearest(name, self.workloads.keys().map(String::as_str)),
        })
    }

    /// Finds the first value that makes no sense, with the path of its key.
    fn check(&self) -> Result<(), (String, Problem)> {
        for (name, workload) in &self.workloads {
            workload.validate().map_err(|implausible| {
                (format!("workloads.{name}.{}", implausible.key), Problem::Implausible { rule: implausible.rule })
            })?;
        }
        for (table, names) in
            [("randomisation", &self.randomisation.workloads), ("evaluation", &self.evaluation.workloads)]
        {
            let key = || format!("{table}.workloads");
            let drawn = table == "randomisation" && self.randomisation.members > 0;
            let none_wanted = drawn || !self.family.has_loops();
            require(key, none_wanted || !names.is_empty(), "must name at least one workload")?;
            names.iter().try_for_each(|name| self.find(name).map(drop)).map_err(|problem| (key(), problem))?;
        }
        match (&self.members, self.family) {
            (Some(members), FamilyName::Loops(family)) => members::check(family, members)?,
            (members, _) => {
                require(|| "members".into(), members.is_none(), "cannot be drawn: the family has no loops")?
            }
        }
        self.randomisation.check()?;
        let Evaluation { budgets, iterations, actions, .. } = &self.evaluation;
        require(|| "evaluation.actions".into(), actions.swap || actions.recompute, "must hold swap or recompute")?;
        require(|| "evaluation.budgets".into(), !budgets.is_empty(), "must hold at least one budget")?;
        require(|| "evaluation.iterations".into(), *iterations >= 1, "must be at least 1")?;
        let holds = |limit: Option<Bytes>| limit.is_none_or(|Bytes(bytes)| bytes >= PAGE_BYTES);
        let rule = "must be at least a page, 4096 bytes";
        require(|| "evaluation.host_limit".into(), holds(self.evaluation.host_limit), rule)?;
        let spill_limit = self.evaluation.spill.as_ref().and_then(|spill| spill.limit);
        require(|| "evaluation.spill.limit".into(), holds(spill_limit), rule)
    }
}

impl Randomisation {
    /// Finds the first value that makes no sense, with the path of its key.
    fn check(&self) -> Result<(), (String, Problem)> {
        let key = |name: &'static str| move || format!("randomisation.{name}");
        let [least, most] = self.budget_share;
        let share = 0.0 < least && least <= most && most < 1.0;
        require(key("budget_share"), share, "must be two shares between 0 and 1, the lesser first")?;
        let among = (0.0..=1.0).contains(&self.recompute_only);
        require(key("recompute_only"), among, "must be a share between 0 and 1")?;
        let noise = (0.0..=COST_NOISE_MAX).contains(&self.cost_noise);
        require(key("cost_noise"), noise, "must be between 0 and 2")?;
        let rule = "must be at most 10000";
        require(key("members"), self.members <= MEMBERS_MAX, rule)?;
        require(key("validation_members"), self.validation_members <= MEMBERS_MAX, rule)?;
        require(key("machines"), !self.machines.is_empty(), "must hold at least one machine")?;
        for (name, machine) in &self.machines {
            let key = |of: &'static str| move || format!("randomisation.machines.{name}.{of}");
            let MachineRange {
                link: [slowest, fastest],
                contention_ns_per_byte: [lightest, heaviest],
                contention_each_ns: [least_each, most_each],
            } = machine;
            require(key("link"), slowest <= fastest, "must be two links, the slower first")?;
            let contention = 0.0 <= *lightest && lightest <= heaviest && heaviest.is_finite();
            let rule = "must be two times of at least 0, the lesser first";
            require(key("contention_ns_per_byte"), contention, rule)?;
            require(key("contention_each_ns"), least_each <= most_each, rule)?;
        }
        Ok(())
    }
}

fn require(key: impl Fn() -> String, holds: bool, rule: &str) -> Result<(), (String, Problem)> {
    if holds { Ok(()) } else { Err((key(), Problem::Implausible { rule: rule.to_owned() })) }
}

#[cfg(test)]
mod tests;
