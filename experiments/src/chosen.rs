//! A policy as the command line names it: a baseline by its name, or a policy file by its path.

use std::path::Path;

use anyhow::{Context, bail};
use plimsoll_env::instance::REFERENCES;
use plimsoll_runtime::baselines::{BASELINES, SEARCHES, baseline};
use plimsoll_runtime::{
    ActionSet, Decided, LearnedPolicy, Policy, PolicyFile, Problem, least_feasible_budget, plan, plan_learned,
};

/// Sampled decodes beside the greedy one, unless the command line says otherwise.
pub const DECODES: u64 = 8;

/// What decides.
pub enum Chosen {
    /// A hand-written policy.
    Baseline(&'static str),
    /// A policy file.
    Learned {
        /// Path of the file, as given.
        name: String,
        /// The file.
        file: Box<PolicyFile>,
    },
}

impl Chosen {
    /// A baseline if there is one of that name, else a policy file.
    pub fn parse(name: &str) -> anyhow::Result<Self> {
        if let Some(name) = BASELINES.into_iter().chain(SEARCHES).find(|known| *known == name) {
            return Ok(Chosen::Baseline(name));
        }
        if !Path::new(name).exists() {
            bail!(
                "--policy {name}: no such file, and no baseline of that name; baselines are {}, {}",
                BASELINES.join(", "),
                SEARCHES.join(", ")
            );
        }
        let file = PolicyFile::load(name).context("--policy")?;
        Ok(Chosen::Learned { name: name.to_owned(), file: Box::new(file) })
    }

    /// The name in reports.
    pub fn name(&self) -> &str {
        match self {
            Chosen::Baseline(name) => name,
            Chosen::Learned { name, .. } => name,
        }
    }

    /// Warns where a learned policy was trained on another family or with other actions.
    pub fn warn_of_mismatch(&self, family: &str, actions: ActionSet) {
        let Chosen::Learned { name, file } = self else { return };
        if file.family != family {
            eprintln!(
                "plimsoll: warning: {name} was trained on the family {}, this workload is of the family {family}; it \
                 will work, but decide less well",
                file.family
            );
        }
        if file.actions != actions {
            eprintln!("plimsoll: warning: {name} was trained with another set of actions");
        }
    }

    /// Plans `problem`; `decodes` is the number of sampled decodes of a learned policy.
    pub fn plan(&self, problem: Problem<'_>, decodes: u64) -> Decided {
        match self {
            Chosen::Baseline(name) => {
                let mut policy = baseline(name, 0).expect("parsed as the name of a baseline");
                Decided { planned: plan(problem, policy.as_mut()), by: name }
            }
            Chosen::Learned { file, .. } => plan_learned(problem, &self.learned(file), decodes),
        }
    }

    /// What decides, without sampled decodes and without anybody who stands in.
    pub fn policies(&self) -> Vec<Box<dyn Policy + Send>> {
        match self {
            Chosen::Baseline(name) => baseline(name, 0).into_iter().collect(),
            Chosen::Learned { file, .. } => vec![Box::new(self.learned(file))],
        }
    }

    fn learned(&self, file: &PolicyFile) -> LearnedPolicy {
        file.clone().into_policy()
    }

    /// Plans `problem`, or says which budget would have been enough.
    pub fn plan_or_refuse(&self, problem: Problem<'_>, decodes: u64) -> anyhow::Result<Decided> {
        let decided = self.plan(problem, decodes);
        if !decided.planned.fits() {
            let needed = decided.planned.prediction.peak_bytes;
            // A few that do with little, not all: each is asked many times.
            let mut policies: Vec<_> = REFERENCES.iter().filter_map(|name| baseline(name, 0)).collect();
            if let Chosen::Learned { file, .. } = self {
                policies.push(Box::new(self.learned(file)));
            }
            // The plan at hand may need less than what those find.
            let least = least_feasible_budget(problem, &mut policies).min(needed);
            bail!(
                "{} cannot hold a budget of {} bytes: its plan needs {needed} bytes; the least budget that any policy \
                 holds here is {least} bytes",
                self.name(),
                problem.budget_bytes,
            );
        }
        Ok(decided)
    }
}
