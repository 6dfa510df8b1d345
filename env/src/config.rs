//! The configuration of a model family: its workloads, what an agent trains on, and what it is judged by.
//!
//! One TOML file per family, in `configs/`. Every mistake in it is one line that names file, line and key.
//! The tables `[ppo]` and `[evolution]` belong to the agent and are only carried here.

mod error;
mod keys;
mod members;

pub use error::{ConfigError, Problem};
pub use members::{Members, Range, Span, Split};

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use plimsoll_runtime::plan::{Action, ActionSet};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};

use crate::units::{Budget, Bytes, Link};
pub use crate::workload::Family;
use crate::workload::{ReadFamily, WorkloadConfig};
use error::nearest;

/// What slow tiers are divided into.
const PAGE_BYTES: u64 = plimsoll_runtime::torch::copy::PAGE_BYTES as u64;

/// A family's configuration file, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct FamilyConfig {
    /// Where it was read.
    pub path: PathBuf,
    /// The family of all its workloads.
    pub family: Family,
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

/// The distribution that training episodes are drawn from.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Randomisation {
    /// Names of the workloads.
    pub workloads: Vec<String>,
    /// Least and greatest budget as a share of the keep-all peak, drawn uniformly.
    pub budget_share: [f64; 2],
    /// Slowest and fastest link, drawn log-uniformly.
    pub link: [Link; 2],
    /// Least and greatest compute time that a copied byte costs, in nanoseconds, drawn uniformly.
    pub contention_ns_per_byte: [f64; 2],
    /// Standard deviation of the logarithm of the log-normal factor on operator times.
    pub cost_noise: f64,
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
    pub link: Link,
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
    let actions = Vec::<Action>::deserialize(deserializer)?;
    Ok(ActionSet { swap: actions.contains(&Action::Swap), recompute: actions.contains(&Action::Recompute) })
}

/// The part of the file that belongs to proximal policy optimisation.
#[derive(Deserialize)]
struct PpoPart<P> {
    #[serde(default)]
    ppo: P,
}

/// The part of the file that belongs to evolution strategies.
#[derive(Deserialize)]
struct EvolutionPart<P> {
    #[serde(default)]
    evolution: P,
}

/// The part of the file that says how to read the rest.
#[derive(Deserialize)]
struct Head {
    family: Family,
}

/// The file as it stands, for workloads of one family.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document<W> {
    family: Family,
    workloads: BTreeMap<String, W>,
    members: Option<Members>,
    randomisation: Randomisation,
    #[serde(default, rename = "ppo")]
    _ppo: serde::de::IgnoredAny,
    #[serde(default, rename = "evolution")]
    _evolution: serde::de::IgnoredAny,
    evaluation: Evaluation,
}

/// Reads a whole file for one family.
struct ReadDocument<'a> {
    path: &'a Path,
    text: &'a str,
}

impl ReadFamily for ReadDocument<'_> {
    type Output = Result<FamilyConfig, ConfigError>;

    fn read<C: DeserializeOwned>(self, wrap: fn(C) -> WorkloadConfig) -> Self::Output {
        let ReadDocument { path, text } = self;
        let document: Document<C> = toml::from_str(text).map_err(|error| ConfigError::malformed(path, text, error))?;
        Ok(FamilyConfig {
            path: path.to_owned(),
            family: document.family,
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
        let config = head.family.read(ReadDocument { path, text })?;
        config.check().map_err(|(key, problem)| ConfigError::at_key(path, text, key, problem))?;
        Ok(config)
    }

    /// The agent's own table `[ppo]`, as the agent reads it; the defaults where there is none.
    pub fn ppo<P: DeserializeOwned + Default>(&self) -> Result<P, ConfigError> {
        Ok(self.part::<PpoPart<P>>()?.ppo)
    }

    /// The agent's own table `[evolution]`, as the agent reads it; the defaults where there is none.
    pub fn evolution<P: DeserializeOwned + Default>(&self) -> Result<P, ConfigError> {
        Ok(self.part::<EvolutionPart<P>>()?.evolution)
    }

    fn part<P: DeserializeOwned>(&self) -> Result<P, ConfigError> {
        toml::from_str(&self.text).map_err(|error| ConfigError::malformed(&self.path, &self.text, error))
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
            require(key, !names.is_empty(), "must name at least one workload")?;
            names.iter().try_for_each(|name| self.find(name).map(drop)).map_err(|problem| (key(), problem))?;
        }
        self.members.as_ref().map_or(Ok(()), |members| members::check(self.family, members))?;
        let Randomisation { budget_share: [least, most], link: [slowest, fastest], .. } = self.randomisation;
        let Randomisation { contention_ns_per_byte: [lightest, heaviest], cost_noise, .. } = self.randomisation;
        let share = 0.0 < least && least <= most && most.is_finite();
        require(|| "randomisation.budget_share".into(), share, "must be two shares above 0, the lesser first")?;
        require(|| "randomisation.link".into(), slowest <= fastest, "must be two links, the slower first")?;
        let contention = 0.0 <= lightest && lightest <= heaviest && heaviest.is_finite();
        let rule = "must be two times of at least 0, the lesser first";
        require(|| "randomisation.contention_ns_per_byte".into(), contention, rule)?;
        let noise = cost_noise.is_finite() && cost_noise >= 0.0;
        require(|| "randomisation.cost_noise".into(), noise, "must be at least 0")?;
        let Evaluation { budgets, iterations, .. } = &self.evaluation;
        require(|| "evaluation.budgets".into(), !budgets.is_empty(), "must hold at least one budget")?;
        require(|| "evaluation.iterations".into(), *iterations >= 1, "must be at least 1")?;
        let holds = |limit: Option<Bytes>| limit.is_none_or(|Bytes(bytes)| bytes >= PAGE_BYTES);
        let rule = "must be at least a page, 4096 bytes";
        require(|| "evaluation.host_limit".into(), holds(self.evaluation.host_limit), rule)?;
        let spill_limit = self.evaluation.spill.as_ref().and_then(|spill| spill.limit);
        require(|| "evaluation.spill.limit".into(), holds(spill_limit), rule)
    }
}

fn require(key: impl Fn() -> String, holds: bool, rule: &str) -> Result<(), (String, Problem)> {
    if holds { Ok(()) } else { Err((key(), Problem::Implausible { rule: rule.to_owned() })) }
}

#[cfg(test)]
mod tests;
