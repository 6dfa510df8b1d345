//! What comes before an iteration, or a part of one, and after it.

use std::time::{Duration, Instant};

use super::Library;
use crate::torch::driver::{Driver, Ended, Wanted};
use crate::torch::parts::Cuts;
use crate::torch::runtime::Budget;
use crate::torch::shim;

/// How long another thread may take to let go of what nobody needs any more: autograd's own has the last of a graph, and is not
/// waited for.
const LINGERING: Duration = Duration::from_millis(100);

/// The bytes that are there between iterations. Where they exceed `budget_bytes` others are given the time to let go of theirs.
fn resident_within(budget_bytes: u64) -> u64 {
    let started = Instant::now();
    loop {
        let resident_bytes = shim::live_bytes();
        if resident_bytes <= budget_bytes || started.elapsed() > LINGERING {
            return resident_bytes;
        }
        std::thread::yield_now();
    }
}

/// What the next iteration, or part of one, is to be.
pub(in crate::torch) struct Next {
    pub(in crate::torch) leader: Option<usize>,
    pub(in crate::torch) wanted: Wanted,
    pub(in crate::torch) line_bytes: u64,
    /// Where it is divided.
    pub(in crate::torch) cuts: Cuts,
}

impl Library {
    /// Prepares the next iteration, or its first part.
    pub(in crate::torch) fn next(&mut self, driver: &mut Driver) -> Next {
        // The last one may not have come to its end.
        self.before = None;
        self.parts.clear();
        if let Some(budget) = self.asked.take() {
            self.go_over_to(driver, budget);
        }
        self.prepare(driver, true)
    }

    /// Whether an iteration that another one follows may end where so many bytes would be allocated if everything were resident.
    pub(in crate::torch) fn may_pause(&self, bytes: u64) -> bool {
        self.may_leave_away() || bytes <= self.budget.0
    }

    /// Prepares what comes next, which may have a prelude or not.
    fn prepare(&mut self, driver: &mut Driver, may_have_prelude: bool) -> Next {
        let budget_bytes = self.budget.0;
        let resident_bytes = resident_within(budget_bytes);
        let goes = |driver: &mut Driver| self.is_loop && driver.residency.leave_within(budget_bytes);
        let over = resident_bytes > budget_bytes && !goes(driver);
        driver.refusal = over.then(|| {
            let unless = match self.is_loop {
                true => "the model and its optimizer are made within the loop as well",
                false => "all of the loop is listened to (`detect()`)",
            };
            format!(
                "{resident_bytes} bytes are resident between iterations, which exceeds the budget of {budget_bytes} \
                 bytes; the least feasible budget found so far is {resident_bytes} bytes, unless {unless}"
            )
        });
        if over {
            self.report.least_feasible_budget_bytes = self.report.least_feasible_budget_bytes.max(resident_bytes);
        }
        let cuts = self.cuts();
        let is_prelude = may_have_prelude && cuts.after_prelude;
        let (leader, wanted) = if is_prelude { (None, Wanted::PRELUDE) } else { self.expect(driver) };
        // Where every operator is refused, nothing is to be evicted.
        Next { leader, wanted, line_bytes: if over { u64::MAX } else { budget_bytes }, cuts }
    }

    /// Where every operator was refused nothing was evicted: more was there than the budget from the beginning.
    fn end_refusal(&self, driver: &mut Driver, ended: &mut Ended) {
        if driver.refusal.take().is_some() {
            ended.report.over_budget_bytes = ended.report.peak_bytes.saturating_sub(self.budget.0);
        }
    }

    /// A part of an iteration has ended: learns from it, and prepares the next.
    pub(in crate::torch) fn after_part(&mut self, driver: &mut Driver, mut ended: Ended) -> Next {
        self.end_refusal(driver, &mut ended);
        let was_prelude = ended.was_prelude;
        self.learn_part(driver, ended);
        self.prepare(driver, !was_prelude)
    }

    /// Learns from an iteration.
    pub(in crate::torch) fn after(&mut self, driver: &mut Driver, mut ended: Ended) {
        self.end_refusal(driver, &mut ended);
        self.learn(driver, ended);
        if let Some(least) = self.least_feasible_bytes {
            driver.residency.reactive.least_bytes = driver.residency.reactive.least_bytes.max(least);
        }
    }

    /// The line, as it is from the next iteration on.
    pub(in crate::torch) fn budget(&self) -> Budget {
        self.asked.unwrap_or(self.budget)
    }

    /// Draws the line elsewhere from the next iteration on: the one that may be under way goes by the plans that there are.
    pub(in crate::torch) fn set_budget(&mut self, budget: Budget) {
        self.asked = Some(budget);
    }

    /// Draws the line elsewhere.
    fn go_over_to(&mut self, driver: &mut Driver, budget: Budget) {
        self.budget = budget;
        self.report.least_feasible_budget_bytes = 0;
        driver.residency.reactive.least_bytes = 0;
        let rungs = driver.programs.iter_mut().flat_map(|program| program.ladder.rungs_mut());
        rungs.for_each(|rung| rung.shelf.forget_plan());
        self.replan_all(&mut driver.programs);
    }
}
