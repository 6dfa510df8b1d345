//! Hand-written policies from the literature, by the names under which they are known.

mod appobmem;
mod autoswap;
mod capuchin;
mod cheapest;
mod chen;
mod dtr;
mod dtr_eq;
mod dtr_local;
mod dtr_swap;
mod genetic;
mod heat;
mod home;
mod keep_all;
mod knapsack;
mod largest;
mod lru;
mod megengine;
mod msps;
pub mod online;
mod random;
mod searched;
mod sentinel;
mod superneurons;
mod vdnn;
mod vdnn_conv;
mod vdnn_dyn;
mod vdnn_plus;

use self::appobmem::AppObMem;
use self::autoswap::AutoSwap;
use self::capuchin::Capuchin;
pub use self::cheapest::Cheapest;
use self::chen::Chen;
pub(crate) use self::dtr::Dtr;
use self::dtr_eq::DtrEq;
use self::dtr_local::DtrLocal;
pub(crate) use self::dtr_swap::DtrSwap;
use self::genetic::Genetic;
use self::heat::Heat;
use self::home::Home;
pub use self::keep_all::KeepAll;
use self::knapsack::Knapsack;
pub use self::largest::Largest;
use self::lru::Lru;
use self::megengine::MegEngine;
use self::msps::Msps;
pub use self::random::Random;
use self::searched::Searched;
use self::sentinel::Sentinel;
use self::superneurons::SuperNeurons;
use self::vdnn::VdnnAll;
use self::vdnn_conv::VdnnConv;
use self::vdnn_dyn::VdnnDyn;
use self::vdnn_plus::VdnnPlus;
use crate::decode::plan;
use crate::lineage::WindowId;
use crate::observation::{Candidate, Pressure};
use crate::plan::{Action, Plan};
use crate::policy::{Choice, Policy};
use crate::sweep::Problem;
use crate::timeline::{Prediction, Timeline};
use crate::trace::{OperatorId, Phase};

/// Makes a policy. The seed matters to `random` and to searches alone.
type Make = fn(seed: u64) -> Box<dyn Policy + Send>;

const RULES: [(&str, Make); 23] = [
    ("keep-all", |_| Box::new(KeepAll)),
    ("chen", |_| Box::new(Chen)),
    ("knapsack", |_| Box::new(Knapsack)),
    ("vdnn-all", |_| Box::new(VdnnAll)),
    ("vdnn-conv", |_| Box::new(VdnnConv)),
    ("vdnn-dyn", |_| Box::new(VdnnDyn)),
    ("vdnn++", |_| Box::new(VdnnPlus::default())),
    ("dtr", |_| Box::new(Dtr)),
    ("dtr-eq", |_| Box::new(DtrEq::default())),
    ("dtr-local", |_| Box::new(DtrLocal)),
    ("dtr-swap", |_| Box::new(DtrSwap)),
    ("msps", |_| Box::new(Msps)),
    ("lru", |_| Box::new(Lru)),
    ("largest", |_| Box::new(Largest)),
    ("megengine", |_| Box::new(MegEngine)),
    ("capuchin", |_| Box::new(Capuchin)),
    ("autoswap", |_| Box::new(AutoSwap::default())),
    ("superneurons", |_| Box::new(SuperNeurons::default())),
    ("appobmem", |_| Box::new(AppObMem)),
    ("sentinel", |_| Box::new(Sentinel)),
    ("heat", |_| Box::new(Heat::default())),
    ("cheapest", |_| Box::new(Cheapest)),
    ("random", |seed| Box::new(Random::new(seed))),
];

const SEARCHING: [(&str, Make); 3] = [
    ("search", |seed| Box::new(Searched::new(seed))),
    ("home", |seed| Box::new(Home::new(seed))),
    ("genetic", |seed| Box::new(Genetic::new(seed))),
];

/// The names of rules, which [`baseline`] knows.
pub const BASELINES: [&str; RULES.len()] = names(RULES);

/// Policies that take their time: they evaluate thousands of whole plans before they decide. [`baseline`] knows them too.
pub const SEARCHES: [&str; SEARCHING.len()] = names(SEARCHING);

const fn names<const N: usize>(policies: [(&'static str, Make); N]) -> [&'static str; N] {
    let mut names = [""; N];
    let mut index = 0;
    while index < N {
        names[index] = policies[index].0;
        index += 1;
    }
    names
}

/// The baseline called `name`, if there is one. `seed` matters to `random` and to searches alone.
pub fn baseline(name: &str, seed: u64) -> Option<Box<dyn Policy + Send>> {
    let (_, make) = RULES.iter().chain(&SEARCHING).find(|(known, _)| *known == name)?;
    Some(make(seed))
}

/// The plans of all [`BASELINES`], in their order.
pub fn plans_of_all(problem: Problem<'_>, seed: u64) -> Vec<Plan> {
    RULES.iter().map(|(_, make)| plan(problem, make(seed).as_mut()).plan).collect()
}

/// Operators that compute much for each byte that they make, by how a word of their names begins or ends.
const COMPUTE_HEAVY: [&str; 4] = ["conv", "linear", "mm", "attention"];
/// Convolutions, by the same.
const CONVOLUTIONS: [&str; 1] = ["conv"];

/// The candidate with the lowest score among those that `action` may evict; the first of equals.
fn lowest(pressure: &Pressure<'_>, action: Action, score: impl FnMut(&Candidate) -> f64) -> Option<Choice> {
    lowest_among(pressure, action, |_| true, score)
}

/// The same, of those candidates that are `eligible`.
fn lowest_among(
    pressure: &Pressure<'_>,
    action: Action,
    eligible: impl Fn(&Candidate) -> bool,
    score: impl FnMut(&Candidate) -> f64,
) -> Option<Choice> {
    lowest_scored(pressure, action, eligible, score).map(|(_, choice)| choice)
}

/// The lowest of two scores over all candidates, one for swap and one for recompute; the swap of equals.
fn lower_of_both(
    pressure: &Pressure<'_>,
    swap_score: impl FnMut(&Candidate) -> f64,
    recompute_score: impl FnMut(&Candidate) -> f64,
) -> Option<Choice> {
    let swap = lowest_scored(pressure, Action::Swap, |_| true, swap_score);
    let recompute = lowest_scored(pressure, Action::Recompute, |_| true, recompute_score);
    let lower = match (swap, recompute) {
        (Some(swap), Some(recompute)) => Some(if recompute.0 < swap.0 { recompute } else { swap }),
        (swap, recompute) => swap.or(recompute),
    };
    lower.map(|(_, choice)| choice)
}

fn lowest_scored(
    pressure: &Pressure<'_>,
    action: Action,
    eligible: impl Fn(&Candidate) -> bool,
    mut score: impl FnMut(&Candidate) -> f64,
) -> Option<(f64, Choice)> {
    let mut best: Option<(f64, Choice)> = None;
    for (candidate, facts) in pressure.candidates.iter().enumerate() {
        if facts.allows(action) && eligible(facts) {
            let score = score(facts);
            if best.is_none_or(|(lowest, _)| score < lowest) {
                best = Some((score, Choice { candidate, action }));
            }
        }
    }
    best
}

/// Of `first` and `others`, the plan that holds the budget in the least time; where none holds it, the one that exceeds
/// it least. The first of equals.
fn fastest_that_fits(problem: &Problem<'_>, first: Plan, others: impl IntoIterator<Item = Plan>) -> Plan {
    let mut fastest = Fastest::of(problem, first);
    for plan in others {
        fastest.offer(plan);
    }
    fastest.plan
}

/// That plan, where one is made after the other.
struct Fastest<'a> {
    timeline: Timeline<'a>,
    budget_bytes: u64,
    plan: Plan,
    prediction: Prediction,
}

impl<'a> Fastest<'a> {
    fn of(problem: &Problem<'a>, plan: Plan) -> Self {
        let mut timeline = Timeline::new(problem.trace, problem.lineage, problem.tiers);
        let prediction = timeline.predict(&plan, problem.budget_bytes);
        Fastest { timeline, budget_bytes: problem.budget_bytes, plan, prediction }
    }

    /// Takes the plan if it is better. Whether it holds the budget.
    fn offer(&mut self, plan: Plan) -> bool {
        let prediction = self.timeline.predict(&plan, self.budget_bytes);
        if prediction.rank() < self.prediction.rank() {
            (self.plan, self.prediction) = (plan, prediction);
        }
        prediction.fits()
    }
}

/// Per storage: whether an operator of the forward pass of one of these kinds reads it.
fn read_by(problem: &Problem<'_>, kinds: &[&str]) -> Vec<bool> {
    let mut read = vec![false; problem.trace.storages.len()];
    for (index, operator) in (0..).zip(&problem.trace.operators) {
        if operator.phase == Phase::Forward && is_of_kind(problem.trace.operator_name(OperatorId(index)), kinds) {
            operator.accesses.iter().for_each(|access| read[access.storage.index()] = true);
        }
    }
    read
}

/// The operator that made what the storage holds in the window; none of what was there before.
fn producer(problem: &Problem<'_>, id: WindowId) -> Option<OperatorId> {
    problem.lineage.version(problem.lineage.window(id).version).producer
}

/// Whether an operator of one of these kinds made what the storage holds in the window.
fn made_by(problem: &Problem<'_>, id: WindowId, kinds: &[&str]) -> bool {
    producer(problem, id).is_some_and(|producer| is_of_kind(problem.trace.operator_name(producer), kinds))
}

/// Whether a word of the name begins or ends with one of `kinds`: `addmm` with `mm`, but not `lgamma`.
fn is_of_kind(name: &str, kinds: &[&str]) -> bool {
    let mut words_of_name = name.split([':', '_']);
    words_of_name.any(|word| kinds.iter().any(|kind| word.starts_with(kind) || word.ends_with(kind)))
}

/// Windows of storages made in the forward pass that start there and end in the backward pass.
pub fn forward_to_backward(problem: &Problem<'_>) -> Vec<WindowId> {
    let (trace, lineage) = (problem.trace, problem.lineage);
    let phase = |index: u32| trace.operators.get(index as usize).map(|operator| operator.phase);
    let spans = |id: &WindowId| {
        let window = lineage.window(*id);
        window.storage.0 >= trace.initial_storages
            && window.used_again
            && window.start > 0
            && phase(window.start - 1) == Some(Phase::Forward)
            && phase(window.end) == Some(Phase::Backward)
    };
    (0..lineage.windows().len() as u32).map(WindowId).filter(spans).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_of_operator_is_told_by_words_of_its_name() {
        for heavy in ["aten::addmm", "aten::_convolution", "aten::conv_transpose2d", "aten::linear", "aten::bmm"] {
            assert!(is_of_kind(heavy, &COMPUTE_HEAVY), "{heavy}");
        }
        assert!(is_of_kind("aten::_scaled_dot_product_flash_attention_for_cpu", &COMPUTE_HEAVY));
        for light in ["aten::upsample_bilinear2d", "aten::lgamma", "aten::cummax", "aten::_softmax"] {
            assert!(!is_of_kind(light, &COMPUTE_HEAVY), "{light}");
        }
    }
}
