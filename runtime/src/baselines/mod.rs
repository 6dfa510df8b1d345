//! Hand-written policies from the literature, by the names under which they are known.

mod capuchin;
mod chen;
mod dtr;
mod keep_all;
mod lru;
mod random;
mod vdnn;

pub use capuchin::Capuchin;
pub use chen::Chen;
pub use dtr::Dtr;
pub use keep_all::KeepAll;
pub use lru::Lru;
pub use random::Random;
pub use vdnn::VdnnAll;

use crate::lineage::WindowId;
use crate::observation::{Candidate, Pressure};
use crate::plan::Action;
use crate::policy::{Choice, Policy};
use crate::sweep::Problem;
use crate::trace::Phase;

/// The names that [`baseline`] knows.
pub const BASELINES: [&str; 7] = ["keep-all", "chen", "vdnn-all", "dtr", "capuchin", "lru", "random"];

/// The baseline called `name`, if there is one. `seed` matters to `random` alone.
pub fn baseline(name: &str, seed: u64) -> Option<Box<dyn Policy + Send>> {
    Some(match name {
        "keep-all" => Box::new(KeepAll),
        "chen" => Box::new(Chen),
        "vdnn-all" => Box::new(VdnnAll),
        "dtr" => Box::new(Dtr),
        "capuchin" => Box::new(Capuchin),
        "lru" => Box::new(Lru),
        "random" => Box::new(Random::new(seed)),
        _ => return None,
    })
}

/// The candidate with the lowest score among those that `action` may evict; the first of equals.
fn lowest(pressure: &Pressure<'_>, action: Action, score: impl Fn(&Candidate) -> f64) -> Option<Choice> {
    let mut best: Option<(f64, usize)> = None;
    for (candidate, facts) in pressure.candidates.iter().enumerate() {
        if facts.allows(action) {
            let score = score(facts);
            if best.is_none_or(|(lowest, _)| score < lowest) {
                best = Some((score, candidate));
            }
        }
    }
    best.map(|(_, candidate)| Choice { candidate, action })
}

/// Windows of storages made in the forward pass that start there and end in the backward pass.
fn forward_to_backward(problem: &Problem<'_>) -> Vec<WindowId> {
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
