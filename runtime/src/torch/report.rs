//! What a training loop under a budget did: per iteration and in total, as text and as JSON.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

/// What one iteration did, measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct IterationReport {
    /// Elapsed time.
    pub makespan_ns: u64,
    /// Most device bytes, counted at the allocator.
    pub peak_bytes: u64,
    /// What drove it.
    pub course: Course,
    /// Whether a schedule was carried out to its end, to the letter.
    pub followed: bool,
    /// Where and how it first departed from what was expected: the program from its trace, or what was done from the plan.
    pub deviation: Option<String>,
    /// What the plan was predicted to cost, where one was followed that was made for these very sizes.
    pub predicted: Option<Predicted>,
    /// Time that the host spent waiting for copies. On a GPU it does not: the device waits.
    pub stall_ns: u64,
    /// Time that the host spent on reruns. On a GPU it only issues them.
    pub rerun_ns: u64,
    /// Operators rerun.
    pub reruns: u64,
    /// Bytes copied to the slow tier.
    pub offloaded_bytes: u64,
    /// Bytes copied back.
    pub prefetched_bytes: u64,
    /// Storages evicted because bytes ran out, beside those that a plan evicted.
    pub reactive_evictions: u64,
    /// Bytes over the budget at the worst moment. Only the end of an iteration, where every storage is restored, may
    /// exceed it, or what was there when an iteration began of which every operator was refused.
    pub over_budget_bytes: u64,
    /// Copies that failed; what they were to move stayed where it was.
    pub failed_copies: u64,
}

impl IterationReport {
    /// That of a prelude, of which nothing is expected.
    pub(crate) fn of_prelude(self) -> IterationReport {
        let predicted = Some(Predicted { makespan_ns: self.makespan_ns, peak_bytes: self.peak_bytes });
        IterationReport { course: Course::Declined, followed: true, deviation: None, predicted, ..self }
    }

    /// The same, with the part of the iteration that came before.
    pub(crate) fn after(self, before: IterationReport) -> IterationReport {
        let predicted = before.predicted.zip(self.predicted).map(|(before, after)| Predicted {
            makespan_ns: before.makespan_ns + after.makespan_ns,
            peak_bytes: before.peak_bytes.max(after.peak_bytes),
        });
        IterationReport {
            makespan_ns: before.makespan_ns + self.makespan_ns,
            peak_bytes: before.peak_bytes.max(self.peak_bytes),
            course: before.course.min(self.course),
            followed: before.followed && self.followed,
            deviation: before.deviation.or(self.deviation),
            predicted,
            stall_ns: before.stall_ns + self.stall_ns,
            rerun_ns: before.rerun_ns + self.rerun_ns,
            reruns: before.reruns + self.reruns,
            offloaded_bytes: before.offloaded_bytes + self.offloaded_bytes,
            prefetched_bytes: before.prefetched_bytes + self.prefetched_bytes,
            reactive_evictions: before.reactive_evictions + self.reactive_evictions,
            over_budget_bytes: before.over_budget_bytes.max(self.over_budget_bytes),
            failed_copies: before.failed_copies + self.failed_copies,
        }
    }
}

/// What drove an iteration. Of one in parts it is the first of these that drove any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Course {
    /// No plan was known for it that holds the budget: evictions, if any, were made when bytes ran out.
    #[default]
    Reactive,
    /// A plan was carried out, but for where other operators came than its program's: as of a program some of whose layers are left out.
    Resumed,
    /// It was compared with its trace, and no plan was carried out.
    Watched,
    /// A plan was carried out.
    Planned,
    /// Everything fits, so nothing was done.
    Declined,
}

impl Course {
    /// Whether the iteration was a program that is known, from its beginning to its end.
    pub fn is_known(self) -> bool {
        self > Course::Resumed
    }
}

/// What a plan was predicted to cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Predicted {
    /// Elapsed time of the iteration.
    pub makespan_ns: u64,
    /// Most device bytes.
    pub peak_bytes: u64,
}

/// What a training loop has done so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// The budget.
    pub budget_bytes: u64,
    /// Iterations.
    pub iterations: u64,
    /// Highest peak of all of them.
    pub peak_bytes: u64,
    /// Sum of all makespans.
    pub makespan_ns: u64,
    /// Sum of all waits of the host for copies.
    pub stall_ns: u64,
    /// Time that it spent on reruns.
    pub rerun_ns: u64,
    /// Operators rerun.
    pub reruns: u64,
    /// Bytes copied to the slow tier.
    pub offloaded_bytes: u64,
    /// Bytes copied back.
    pub prefetched_bytes: u64,
    /// Storages evicted because bytes ran out.
    pub reactive_evictions: u64,
    /// Copies that failed.
    pub failed_copies: u64,
    /// Most bytes over the budget.
    pub over_budget_bytes: u64,
    /// Most bytes that the slow tier has held: page-locked, where the engine's memory is.
    pub slow_tier_high_water_bytes: u64,
    /// Iterations whose program was known and planned; of those in parts, that of every part.
    pub plan_cache_hits: u64,
    /// Iterations of programs that were not.
    pub plan_cache_misses: u64,
    /// Plans made. After some of them none is made well while planning has taken more than a tenth of the loop's time: it is
    /// decoded greedily, and planned well when there is time.
    pub plans: u64,
    /// Of those, how many are by whom, as [`Decided::by`](crate::Decided::by) says it: [`LEARNED`](crate::planner::LEARNED) and others of
    /// the planner's names, or a baseline's. Where everything fits, or nothing can, it is `keep-all`.
    pub plans_by: BTreeMap<&'static str, u64>,
    /// Plans made anew, with times that were measured anew: because makespans had drifted from the predicted ones; and once for
    /// each program on a GPU, whose operators are only timed well once they are planned.
    pub replans: u64,
    /// Time that planning took.
    pub planning_ns: u64,
    /// The least budget that is known to be feasible for what could not be held; 0 where everything could.
    pub least_feasible_budget_bytes: u64,
    /// The latest iterations, oldest first; at most [`Report::HISTORY`].
    pub latest: Vec<IterationReport>,
}

impl Report {
    /// Iterations of which the reports are kept one by one.
    pub const HISTORY: usize = 1024;

    pub(crate) fn add(&mut self, iteration: IterationReport, is_known: bool) {
        self.iterations += 1;
        *if is_known { &mut self.plan_cache_hits } else { &mut self.plan_cache_misses } += 1;
        self.peak_bytes = self.peak_bytes.max(iteration.peak_bytes);
        self.over_budget_bytes = self.over_budget_bytes.max(iteration.over_budget_bytes);
        self.makespan_ns += iteration.makespan_ns;
        self.stall_ns += iteration.stall_ns;
        self.rerun_ns += iteration.rerun_ns;
        self.reruns += iteration.reruns;
        self.offloaded_bytes += iteration.offloaded_bytes;
        self.prefetched_bytes += iteration.prefetched_bytes;
        self.reactive_evictions += iteration.reactive_evictions;
        self.failed_copies += iteration.failed_copies;
        if self.latest.len() == Self::HISTORY {
            self.latest.remove(0);
        }
        self.latest.push(iteration);
    }

    /// Whether planning has taken no more than this share of the loop's time.
    pub(crate) fn has_time_to_plan(&self, share: f64) -> bool {
        self.planning_ns as f64 <= share * self.makespan_ns as f64
    }

    /// The report as JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("numbers, names and texts")
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let ms = |ns: u64| ns as f64 / 1e6;
        writeln!(f, "iterations          {:>12}", self.iterations)?;
        writeln!(f, "budget              {:>12.2} MiB", mib(self.budget_bytes))?;
        write!(f, "measured peak       {:>12.2} MiB", mib(self.peak_bytes))?;
        match self.over_budget_bytes {
            0 => writeln!(f)?,
            over => writeln!(f, " ({:.2} MiB over, where everything had to be there)", mib(over))?,
        }
        if let Some(last) = self.latest.last() {
            write!(f, "last makespan       {:>12.2} ms", ms(last.makespan_ns))?;
            match last.predicted {
                Some(predicted) => writeln!(
                    f,
                    " (predicted {:.2} ms; peak {:.2} MiB, predicted {:.2} MiB)",
                    ms(predicted.makespan_ns),
                    mib(last.peak_bytes),
                    mib(predicted.peak_bytes)
                )?,
                None => writeln!(f)?,
            }
        }
        let followed = self.latest.iter().filter(|iteration| iteration.followed).count();
        writeln!(f, "followed plans      {followed:>12} of the last {} iterations", self.latest.len())?;
        if let Some(deviation) = self.latest.last().and_then(|last| last.deviation.as_ref()) {
            writeln!(f, "last deviation      {deviation}")?;
        }
        writeln!(f, "total makespan      {:>12.2} ms", ms(self.makespan_ns))?;
        writeln!(f, "waited for copies   {:>12.2} ms", ms(self.stall_ns))?;
        writeln!(f, "offloaded           {:>12.2} MiB", mib(self.offloaded_bytes))?;
        writeln!(f, "prefetched          {:>12.2} MiB", mib(self.prefetched_bytes))?;
        writeln!(f, "recomputed          {:>12} operators, {:.2} ms", self.reruns, ms(self.rerun_ns))?;
        writeln!(f, "slow tier at most   {:>12.2} MiB", mib(self.slow_tier_high_water_bytes))?;
        writeln!(f, "reactive evictions  {:>12}", self.reactive_evictions)?;
        writeln!(f, "plan cache          {:>12} hits, {} misses", self.plan_cache_hits, self.plan_cache_misses)?;
        writeln!(
            f,
            "plans               {:>12} ({} with times measured anew), {:.2} ms",
            self.plans,
            self.replans,
            ms(self.planning_ns)
        )?;
        for (by, plans) in &self.plans_by {
            writeln!(f, "  by {by:<15}{plans:>12}")?;
        }
        if self.failed_copies > 0 {
            writeln!(f, "failed copies       {:>12}", self.failed_copies)?;
        }
        if self.least_feasible_budget_bytes > 0 {
            writeln!(f, "least feasible      {:>12.2} MiB", mib(self.least_feasible_budget_bytes))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planning_may_take_its_share() {
        let after = |planning_ns| Report { planning_ns, makespan_ns: 1_000, ..Report::default() };
        assert!(!after(101).has_time_to_plan(0.1));
        assert!(after(100).has_time_to_plan(0.1));
    }
}
