//! Online rematerialisation: a program runs under a budget, and whenever bytes run out a rule says which storage goes.
//!
//! This is Kirisame et al., *Dynamic Tensor Rematerialization* (ICLR 2021), as its authors simulate it: no plan, no look
//! ahead, no swap. The baselines of the same names in [`super`] decide by the same scores, but at the pressure points of
//! a known iteration, and what they decide can be scheduled; here the rule meets the program for the first time, which
//! is what a published figure of DTR stands for. On the authors' logs ([`crate::import::simrd`]) the two simulators agree
//! to the byte and to the nanosecond.
//!
//! What the rules share, from the paper and from what the authors' simulator does:
//!
//! - a storage without references is evicted at once, and may be rebuilt like any other if a rebuild needs it;
//! - a view is lost with its storage and is made again when it is asked for;
//! - a rerun makes all results of its operator; those that were there already take their bytes twice for that moment;
//! - of equal scores the storage goes that became evictable last; a score of zero ends the search;
//! - the clock counts compute, starts at 1, and reaches the end only when everything that is still referred to is there.

mod dtr;
mod dtr_eq;
mod dtr_local;
mod heuristic;
mod largest;
mod lru;
mod msps;
mod neighbourhood;
mod pool;
mod program;
mod simulator;
mod walk;

pub use program::Program;

pub(crate) use program::{CallId, Output, Step, TensorId, Writer};

use simulator::Simulator;

/// How an online run ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Outcome {
    /// The program ran to its end within the budget.
    #[default]
    Held,
    /// Bytes ran out and nothing was left to evict.
    OutOfMemory {
        /// Device bytes that were needed at that moment.
        needed_bytes: u64,
    },
    /// Reruns took more time than was allowed.
    Thrashed,
}

/// What an online run came to; where it failed, up to that moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OnlineRun {
    /// How it ended.
    pub outcome: Outcome,
    /// Elapsed time.
    pub makespan_ns: u64,
    /// Part of it that went into reruns.
    pub recompute_ns: u64,
    /// Most device bytes at any moment.
    pub peak_bytes: u64,
    /// Storages evicted because bytes ran out.
    pub evictions: u64,
}

/// A rule that says which storage goes. Names are those of the baselines in [`super`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// h = (c₀ + Σ c₀ of the evicted neighbourhood) / (bytes · staleness).
    Dtr,
    /// The same, with the neighbourhood's cost taken from a union–find over evicted storages.
    DtrEq,
    /// The same, without the neighbourhood.
    DtrLocal,
    /// h = (c₀ + Σ c₀ of the evicted ancestors) / bytes.
    Msps,
    /// What was asked for longest ago.
    Lru,
    /// The largest storage.
    Largest,
}

impl Rule {
    /// Every rule.
    pub const ALL: [Rule; 6] = [Rule::Dtr, Rule::DtrEq, Rule::DtrLocal, Rule::Msps, Rule::Lru, Rule::Largest];

    /// The name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Rule::Dtr => "dtr",
            Rule::DtrEq => "dtr-eq",
            Rule::DtrLocal => "dtr-local",
            Rule::Msps => "msps",
            Rule::Lru => "lru",
            Rule::Largest => "largest",
        }
    }

    /// The rule called `name`, if there is one.
    pub fn by_name(name: &str) -> Option<Rule> {
        Rule::ALL.into_iter().find(|rule| rule.name() == name)
    }
}

impl Program {
    /// Runs the program under `budget_bytes`. It fails where reruns take more than `recompute_ns_max` in all: the
    /// authors allow one keep-all compute.
    pub fn run(&self, rule: Rule, budget_bytes: u64, recompute_ns_max: u64) -> OnlineRun {
        match rule {
            Rule::Dtr => Simulator::new(self, dtr::Dtr::new(self), budget_bytes, recompute_ns_max).run(),
            Rule::DtrEq => Simulator::new(self, dtr_eq::DtrEq::new(self), budget_bytes, recompute_ns_max).run(),
            Rule::DtrLocal => Simulator::new(self, dtr_local::DtrLocal, budget_bytes, recompute_ns_max).run(),
            Rule::Msps => Simulator::new(self, msps::Msps::new(self), budget_bytes, recompute_ns_max).run(),
            Rule::Lru => Simulator::new(self, lru::Lru, budget_bytes, recompute_ns_max).run(),
            Rule::Largest => Simulator::new(self, largest::Largest, budget_bytes, recompute_ns_max).run(),
        }
    }
}
