use std::ops::ControlFlow;

use super::plans_of_all;
use crate::plan::Plan;
use crate::policy::Policy;
use crate::search::{Limits, search};
use crate::sweep::Problem;

/// Evaluations unless another number is asked for: some half a second on a trace of some hundred windows.
const EVALUATIONS: u64 = 20_000;

/// The anytime search of [`crate::search`] from every baseline's plan: what is to be had without learning, given time.
pub struct Searched {
    limits: Limits,
}

impl Searched {
    /// The same seed gives the same plans.
    pub fn new(seed: u64) -> Self {
        Searched { limits: Limits { seed, ..Limits::evaluations(EVALUATIONS) } }
    }
}

impl Policy for Searched {
    fn open(&mut self, problem: &Problem<'_>) -> Plan {
        let starts = plans_of_all(*problem, self.limits.seed);
        search(*problem, &starts, self.limits, None, &mut |_| ControlFlow::Continue(())).plan
    }
}
