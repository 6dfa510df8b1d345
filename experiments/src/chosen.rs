//! What decides as the command line names it: a baseline by its name, or a policy file by its path; how hard it tries, and which
//! actions it may take.

use std::path::Path;
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use clap::builder::RangedU64ValueParser;
use plimsoll_env::instance::REFERENCES;
use plimsoll_runtime::baselines::{BASELINES, SEARCHES, baseline};
use plimsoll_runtime::planner::LEARNED;
use plimsoll_runtime::search::Limits;
use plimsoll_runtime::{
    Action, ActionSet, Decided, LearnedPolicy, Planner, Policy, PolicyFile, Problem, least_feasible_budget, plan,
};

/// How much is tried for each plan of a learned policy.
#[derive(Args, Clone, Copy, Debug)]
pub struct PlannerFlags {
    /// Decodes of a learned policy beside the greedy one: for shares of the budget, then sampled
    #[arg(long, default_value_t = 8, value_name = "N")]
    pub decodes: u64,
    /// Milliseconds that planning with a learned policy may take: more decodes, baselines, and search from the best of
    /// them. 0: decodes alone, and baselines only where no decode holds the budget [default: 200, or a fifth for each window
    /// of the trace, where that is more]
    #[arg(long, value_name = "MS")]
    pub search_ms: Option<u64>,
    /// Plans that the search tries, in place of a limit of time: on the times of --hardware the same plan on every machine
    #[arg(long, conflicts_with = "search_ms", value_name = "N")]
    pub search_plans: Option<u64>,
    /// Seed of decodes and search, and of baselines that draw
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub search_seed: u64,
    /// Threads that plan where time is limited [default: as many as the machine runs at once, up to eight]
    #[arg(long, default_value_t = 0, hide_default_value = true, value_name = "N",
        value_parser = RangedU64ValueParser::<usize>::new().range(..=THREADS_MAX))]
    pub search_threads: usize,
}

/// As many threads as any machine plans with.
const THREADS_MAX: u64 = 1024;

impl PlannerFlags {
    /// What the flags ask for.
    pub fn planner(&self) -> Planner<'static> {
        let limits = match (self.search_plans, self.search_ms) {
            (Some(plans), _) => Limits::evaluations(plans),
            (None, Some(0)) => return Planner::decoding(self.decodes, self.search_seed),
            (None, Some(ms)) => Limits::wall(Duration::from_millis(ms)),
            (None, None) => Planner::default().limits,
        };
        let limits = Limits { seed: self.search_seed, ..limits };
        Planner { decodes: self.decodes, limits, threads: self.search_threads, ..Planner::default() }
    }
}

/// The flag that says what may be decided.
#[derive(Args, Clone, Copy, Debug)]
pub struct ActionsFlag {
    /// Actions that may be taken
    #[arg(long, value_name = "LIST", default_value = "keep,swap,recompute", value_parser = action_set)]
    pub actions: ActionSet,
}

/// A list such as `keep,swap`.
fn action_set(text: &str) -> Result<ActionSet, String> {
    let action = |word: &str| match word.trim() {
        "keep" => Ok(Action::Keep),
        "swap" => Ok(Action::Swap),
        "recompute" => Ok(Action::Recompute),
        other => Err(format!("unknown action `{other}`: expected keep, swap or recompute")),
    };
    text.split(',').map(action).collect()
}

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
                "{name}: no such file, and no baseline of that name; baselines are {}, {}",
                BASELINES.join(", "),
                SEARCHES.join(", ")
            );
        }
        let file = PolicyFile::load(name)?;
        Ok(Chosen::Learned { name: name.to_owned(), file: Box::new(file) })
    }

    /// The name in reports.
    pub fn name(&self) -> &str {
        match self {
            Chosen::Baseline(name) => name,
            Chosen::Learned { name, .. } => name,
        }
    }

    /// The name of what decides, in results.
    pub fn decides(&self) -> &'static str {
        match self {
            Chosen::Baseline(name) => name,
            Chosen::Learned { .. } => LEARNED,
        }
    }

    /// Warns where a learned policy was trained on another family.
    pub fn warn_of_family(&self, family: &str) {
        let Chosen::Learned { name, file } = self else { return };
        if file.family != family {
            eprintln!(
                "plimsoll: warning: {name} was trained on the family {}, this workload is of the family {family}; it \
                 will work, but decide less well",
                file.family
            );
        }
    }

    /// Warns where a learned policy was trained on another family or with other actions.
    pub fn warn_of_mismatch(&self, family: &str, actions: ActionSet) {
        self.warn_of_family(family);
        if let Chosen::Learned { name, file } = self
            && file.actions != actions
        {
            eprintln!("plimsoll: warning: {name} was trained with another set of actions");
        }
    }

    /// Plans `problem`: a baseline as it does, a learned policy with the help of `planner`.
    pub fn plan(&self, problem: Problem<'_>, planner: &Planner<'_>) -> Decided {
        match self {
            Chosen::Baseline(name) => {
                let mut policy = baseline(name, planner.limits.seed).expect("parsed as the name of a baseline");
                Decided { planned: plan(problem, policy.as_mut()), by: name }
            }
            Chosen::Learned { .. } => planner.plan(problem, self.learned().as_ref()),
        }
    }

    /// What decides, without sampled decodes and without anybody who stands in.
    pub fn policy(&self) -> Box<dyn Policy + Send> {
        match self {
            Chosen::Baseline(name) => baseline(name, 0).expect("a choice names one that there is"),
            Chosen::Learned { file, .. } => Box::new(PolicyFile::clone(file).into_policy()),
        }
    }

    /// The learned policy, if it is one.
    pub fn learned(&self) -> Option<LearnedPolicy> {
        match self {
            Chosen::Baseline(_) => None,
            Chosen::Learned { file, .. } => Some(PolicyFile::clone(file).into_policy()),
        }
    }

    /// Plans `problem`, or says which budget would have been enough.
    pub fn plan_or_refuse(&self, problem: Problem<'_>, planner: &Planner<'_>) -> anyhow::Result<Decided> {
        let decided = self.plan(problem, planner);
        if !decided.planned.fits() {
            let needed = decided.planned.prediction.peak_bytes;
            let why = if problem.is_hopeless() {
                format!("{} bytes can never be evicted", problem.unavoidable_bytes())
            } else {
                format!("its plan needs {needed} bytes")
            };
            // A few that do with little, not all: each is asked many times.
            let mut policies: Vec<_> = REFERENCES.iter().filter_map(|name| baseline(name, 0)).collect();
            if let Some(policy) = self.learned() {
                policies.push(Box::new(policy));
            }
            // The plan at hand may need less than what those find.
            let least = least_feasible_budget(problem, &mut policies).min(needed);
            bail!(
                "{} cannot hold a budget of {} bytes: {why}; the least budget that any policy was found to hold here is {least} bytes",
                self.name(),
                problem.budget_bytes,
            );
        }
        Ok(decided)
    }
}
