//! What is away from one iteration, or part of one, to the next. What that costs is found out here; [`Absence`](super::Absence)
//! decides.

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use super::Library;
use super::decider::Decider;
use super::planning::{PLANNING_SHARE, carried_over};
use crate::lineage::{Edges, Lineage};
use crate::planner::{PORTFOLIO, Planner, time_for};
use crate::search::Limits;
use crate::timeline::{Prediction, Timeline};
use crate::torch::absence::{Leavable, Look, Price};
use crate::torch::driver::Driver;
use crate::torch::ladder::Rung;
use crate::torch::names::{PartName, RungName};
use crate::torch::program::Program;

/// What planning may have taken before it is found out for the first time what should stay away from one iteration, or part of one, to the
/// next, where the budget is held without.
const SURVEY_SHARE: f64 = 0.5;
/// In which share of the time of a plan that somebody carries out one is made that nobody does, to find out what another would
/// take.
const SURVEYS: u32 = 10;

impl Library {
    /// Whether anything may be left away from one iteration to the next, or from one part of an iteration to the next, for its own sake:
    /// a baseline decides alone.
    pub(in crate::torch) fn may_leave_away(&self) -> bool {
        self.actions.swap && !matches!(self.decider, Decider::Baseline(_))
    }

    /// A program stands otherwise to what comes before and after it than its plan has it.
    pub(super) fn fit_edges(&mut self, driver: &mut Driver, index: usize) {
        let edges = driver.programs[index].edges(self.absence.away());
        let rung = driver.programs[index].ladder.rung_mut();
        let before = rung.known.lineage.edges();
        if *before == edges {
            return;
        }
        let is_same_but_for_time = before.leaves_the_same(&edges);
        let known = rung.known.at(edges);
        if is_same_but_for_time {
            let plan = carried_over(&rung.scheduled.plan, &rung.known.lineage, &known.lineage);
            let scheduled = self.schedule(&known, plan, self.left_bytes(rung));
            if !scheduled.exceeds_budget() {
                (rung.known, rung.scheduled) = (known, scheduled);
                return;
            }
        }
        self.know(rung, known);
    }

    /// An iteration has ended that was divided, or that another one follows: decides, now and then, what stays away in between.
    pub(super) fn settle_absence(&mut self, driver: &Driver) {
        let Some(names) = std::mem::take(&mut self.parts).into_iter().collect::<Option<Vec<PartName>>>() else {
            return;
        };
        if !self.may_leave_away() {
            return;
        }
        let rung = |PartName { program, rung }| {
            let program = driver.programs.iter().find(|other| other.name == program)?;
            Some((program, program.ladder.rungs().iter().find(|other| other.name == rung)?))
        };
        let known = names.iter().filter_map(|&name| rung(name));
        let known: Vec<_> = known.filter(|(program, _)| program.knows_before()).collect();
        let exceeds = known.iter().any(|(_, rung)| rung.scheduled.exceeds_budget());
        let is_urgent = exceeds && known.len() == names.len();
        match self.absence.note(names, is_urgent) {
            Some(Look::AtOnce) if self.absence.is_undecided() || self.report.has_time_to_plan(PLANNING_SHARE) => {}
            Some(Look::First) if self.report.has_time_to_plan(SURVEY_SHARE) => {}
            Some(Look::Again) if self.report.has_time_to_plan(PLANNING_SHARE) => {}
            _ => return,
        }
        let started = Instant::now();
        let mut absence = std::mem::take(&mut self.absence);
        let parts: Vec<_> = absence.parts().filter_map(rung).collect();
        // Where iterations are divided, what some part of them does without; else what is there all the time.
        let leaves = parts.iter().filter_map(|(program, _)| program.leaves()).min();
        let mut could = BTreeMap::new();
        for (program, rung) in parts.iter().filter(|(program, _)| program.leaves() == leaves) {
            let idle_ns = rung.known.lineage.idle_around_ns();
            for (storage, entry) in program.leavable() {
                if let Some(live) = driver.residency.get(entry) {
                    let idle_ns = idle_ns[storage.index()];
                    could.entry(entry).or_insert(Leavable { entry, bytes: live.bytes, idle_ns });
                }
            }
        }
        let could = could.into_values().collect();
        let mut prices: HashMap<(RungName, Edges), Price> = HashMap::new();
        absence.decide(could, |away| {
            let price_of = |(program, rung): &(&Program, &Rung)| {
                let edges = program.edges(away);
                let price = || self.price(rung, edges.clone());
                *prices.entry((rung.name, edges.clone())).or_insert_with(price)
            };
            parts.iter().map(price_of).fold(Price::default(), Price::and)
        });
        self.absence = absence;
        self.report.planning_ns += started.elapsed().as_nanos() as u64;
    }

    /// What an iteration, or a part of one, is predicted to take between such edges, by a plan that is made for that alone.
    fn price(&self, rung: &Rung, edges: Edges) -> Price {
        let trace = &*rung.known.trace;
        let budget_bytes = self.left_bytes(rung);
        let survey = |lineage: &Lineage| {
            let time = time_for(lineage.windows().len()) / SURVEYS;
            let planner = Planner { decodes: 0, portfolio: &PORTFOLIO[..1], limits: Limits::wall(time), threads: 0 };
            self.decider.plan(self.problem(trace, lineage, budget_bytes), &planner, Some(&rung.scheduled.plan)).planned
        };
        let mut lineage = Lineage::between(trace, edges);
        let mut planned = survey(&lineage);
        // What has no time to leave before the end leaves when the next one begins.
        let mut timeline = Timeline::new(trace, &lineage, self.tiers);
        timeline.predict(&planned.plan, budget_bytes);
        let with_leaving = lineage.edges().with_leaving(&timeline.leaving());
        if with_leaving != *lineage.edges() {
            lineage = Lineage::between(trace, with_leaving);
            planned = survey(&lineage);
        }
        let Prediction { makespan_ns, over_budget_bytes, offloaded_bytes, prefetched_bytes, .. } = planned.prediction;
        let unavoidable_bytes =
            self.problem(trace, &lineage, budget_bytes).unavoidable_bytes().saturating_sub(budget_bytes);
        let copied_bytes = offloaded_bytes + prefetched_bytes;
        Price { unavoidable_bytes, over_budget_bytes, makespan_ns, copied_bytes }
    }
}
