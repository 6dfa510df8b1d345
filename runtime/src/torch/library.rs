//! The programs that a training loop has been seen to run, each with its plan.
//!
//! An iteration that was followed needs nothing more. One that was not is compared with those recorded before; two that
//! are alike make a trace, and the trace a plan. Where they are alike but for the sizes of storages, they are one program, which
//! has a plan for each of them, and for others as they come. A program whose makespan drifts is measured and planned anew.

mod away;
mod decider;
mod planning;
mod turns;

use std::collections::{HashMap, VecDeque};

pub(super) use self::decider::Decider;
use self::planning::{PLANNING_SHARE, carried_over};
pub(super) use self::turns::Next;
use super::absence::Absence;
use super::backoff::Backoff;
use super::copy::{TierCopies, retimed, since};
use super::driver::{Driver, Ended, Expected, Record, Wanted};
use super::ladder::{Fit, Proposal, Rung, Served};
use super::names::{PartName, ProgramName, RungName};
use super::parts::{Cuts, Division};
use super::program::{Known, Program};
use super::recording::{RecordedIteration, retime, trace_of};
use super::report::{Course, IterationReport, Report};
use super::runtime::Budget;
use super::shelf::{Measured, Reason, Shelf, Times};
use super::succession::{Foreseen, Succession};
use crate::hardware::{Refusal, SlowTiers};
use crate::lineage::Lineage;
use crate::plan::ActionSet;
use crate::planner::Planner;
use crate::trace::Trace;

/// Followed iterations in a row after which recording stops, until a program is not known again.
const CALM: u32 = 12;
/// Planned iterations in a row that ran out of bytes after which the plan is made for fewer.
const PRESSED_MAX: u32 = 2;
/// Iterations within which a tier that refuses something again is not counted on for it any more.
const REFUSALS_WITHIN: u64 = 16;
/// Iterations that wait for another one like them.
const WAITING_MAX: usize = 64;

/// What an iteration that was not known turns out to be.
enum Compared {
    /// Nothing that has been recorded.
    Unlike,
    /// What has, but neither tells what its operators take.
    Untimed,
    /// The program of that name.
    Program(ProgramName),
}

/// A part of an iteration, or several.
struct Part {
    report: IterationReport,
    is_known: bool,
}

impl Part {
    /// The same, with those that came before.
    fn after(self, before: Part) -> Part {
        Part { report: self.report.after(before.report), is_known: before.is_known && self.is_known }
    }
}

/// What is known from one iteration to the next: the programs with their plans, and what the loop has done so far.
pub(super) struct Library {
    budget: Budget,
    /// That of the next iteration, where it is to be another.
    asked: Option<Budget>,
    pub(super) report: Report,
    decider: Decider,
    tiers: SlowTiers,
    /// Per tier: what it refused that was news, and in which iteration.
    refusals: [Option<(u64, Refusal)>; 2],
    actions: ActionSet,
    planner: Planner<'static>,
    plans_max: usize,
    /// The rung that was planned last, whose name no other gets.
    latest_name: RungName,
    recorded: VecDeque<RecordedIteration>,
    /// Whether the last of `recorded` is the iteration before this one.
    predecessor_recorded: bool,
    /// Which programs ran, and at which of their sizes.
    programs: Succession<ProgramName>,
    rungs: Succession<RungName>,
    /// Whether what comes next is expected to be none of the programs.
    awaits_unknown: bool,
    /// Whether two iterations were alike of which neither tells what operators take.
    lacks_times: bool,
    clock: u64,
    calm: u32,
    backoff: Backoff,
    /// Whether the device works through operators later, so that the host takes as long for an iteration as that for the one before.
    runs_behind: bool,
    /// What copies took until the last iteration ended.
    copies: Vec<TierCopies>,
    /// The least budget for which a plan was found, where one was looked for.
    least_feasible_bytes: Option<u64>,
    division: Division,
    /// The parts of the iteration under way that have ended, and the names of those that are programs, as far as they are known.
    before: Option<Part>,
    parts: Vec<Option<PartName>>,
    absence: Absence,
    /// Whether all of a loop is listened to, and not its iterations alone.
    pub(super) is_loop: bool,
}

impl Library {
    pub(super) fn new(
        budget: Budget,
        decider: Decider,
        tiers: SlowTiers,
        actions: ActionSet,
        planner: Planner<'static>,
        plans_max: usize,
        runs_behind: bool,
    ) -> Self {
        Library {
            budget,
            asked: None,
            report: Report::default(),
            decider,
            tiers,
            refusals: [None; 2],
            actions,
            planner,
            plans_max,
            latest_name: RungName::default(),
            recorded: VecDeque::new(),
            predecessor_recorded: false,
            programs: Succession::default(),
            rungs: Succession::default(),
            awaits_unknown: false,
            lacks_times: false,
            clock: 0,
            calm: 0,
            backoff: Backoff::default(),
            runs_behind,
            copies: Vec::new(),
            least_feasible_bytes: None,
            division: Division::default(),
            before: None,
            parts: Vec::new(),
            absence: Absence::default(),
            is_loop: false,
        }
    }

    /// Where iterations are divided.
    pub(super) fn cuts(&self) -> Cuts {
        self.division.cuts()
    }

    /// The programs, at those sizes at which they ran and were timed.
    pub(super) fn traces<'a>(&'a self, driver: &'a Driver) -> impl Iterator<Item = &'a Trace> {
        let rungs = driver.rungs().map(|(_, rung)| rung).filter(|rung| !rung.is_hull);
        rungs.filter(|rung| rung.shelf.times.are_good()).map(|rung| &*rung.known.trace)
    }

    /// The program that the next iteration is expected to be, and what is to be done with it: what followed such as came last, else
    /// the latest. Where something unknown is expected, that is recorded, and goes by the largest program as far as it is that.
    fn expect(&mut self, driver: &mut Driver) -> (Option<usize>, Wanted) {
        let next = self.programs.next();
        let is_next =
            |&((program, _), _): &((usize, usize), &Rung)| next == Foreseen::Known(driver.programs[program].name);
        let rung = self.rungs.next();
        self.awaits_unknown = next != Foreseen::Nothing && !driver.rungs().any(|at| is_next(&at));
        let leader = match self.awaits_unknown {
            true => driver.rungs().max_by_key(|(_, rung)| rung.known.lineage.keep_all_peak_bytes()),
            false => driver.rungs().max_by_key(|at| (is_next(at), rung == Foreseen::Known(at.1.name), at.1.last_seen)),
        };
        let shelf = leader.map(|(_, rung)| &rung.shelf);
        let of_unknown = if self.backoff.records() { Record::Whole } else { Record::Nothing };
        let record = match shelf.map(|shelf| (&shelf.times, shelf.followed)) {
            _ if self.awaits_unknown => of_unknown,
            Some((Times::Marked(..), _)) => Record::Makespan,
            // The first planned one makes room on the host for what it copies.
            Some((Times::Wanted(_), 1..)) => Record::Whole,
            // It may be another program after all.
            Some(_) if (1..CALM).contains(&self.calm) && !self.wants_times(driver) => of_unknown.without_times(),
            _ if self.calm < CALM => of_unknown,
            _ => Record::Nothing,
        };
        let leader = leader.map(|(place, _)| place);
        if let Some((program, rung)) = leader {
            driver.programs[program].ladder.expect(rung);
        }
        let expected = match self.programs.is_proven() {
            _ if self.awaits_unknown => Expected::Unknown,
            true => Expected::Leader,
            false => Expected::Any,
        };
        let wanted = Wanted { act: true, strictly: false, record, is_prelude: false, expected };
        (leader.map(|(program, _)| program), wanted)
    }

    /// Whether it is not known of something what its operators take.
    fn wants_times(&self, driver: &Driver) -> bool {
        self.lacks_times || driver.rungs().any(|(_, rung)| matches!(rung.shelf.times, Times::Wanted(_)))
    }

    /// Learns from an iteration, or its last part.
    fn learn(&mut self, driver: &mut Driver, ended: Ended) {
        let before = self.before.take();
        let is_divided = before.is_some();
        let part = match before {
            Some(before) => self.learn_one(driver, ended).after(before),
            None => self.learn_program(driver, ended),
        };
        if is_divided || self.is_loop {
            self.settle_absence(driver);
        }
        let (over_bytes, budget_bytes) = (part.report.over_budget_bytes, self.budget.0);
        if over_bytes > 0 && self.report.over_budget_bytes == 0 {
            eprintln!(
                "plimsoll: where all has to be there, as at the end of an iteration, that took {over_bytes} bytes more than the \
                 budget of {budget_bytes}; the report counts later ones"
            );
        }
        self.report.add(part.report, part.is_known);
    }

    /// Learns from a part of an iteration that goes on.
    fn learn_part(&mut self, driver: &mut Driver, ended: Ended) {
        let part = self.learn_one(driver, ended);
        self.before = Some(match self.before.take() {
            Some(before) => part.after(before),
            None => part,
        });
    }

    /// One of several parts; nothing is expected of a prelude.
    fn learn_one(&mut self, driver: &mut Driver, ended: Ended) -> Part {
        match ended.was_prelude {
            true => Part { report: ended.report.of_prelude(), is_known: true },
            false => self.learn_program(driver, ended),
        }
    }

    fn learn_program(&mut self, driver: &mut Driver, ended: Ended) -> Part {
        self.clock += 1;
        let counts_on_less = self.heed_refusals(driver);
        let Ended { report: iteration, recorded, on_device_ns, program, ran_short, .. } = ended;
        let tells_anew = program.is_some_and(|program| driver.programs[program].ladder.is_told_anew());
        let before = std::mem::replace(&mut self.copies, driver.residency.engine.copies());
        let copies = since(&self.copies, &before);
        let predecessor_recorded = std::mem::take(&mut self.predecessor_recorded);
        let found = match program.map(|program| (program, driver.programs[program].fit())) {
            Some((index, fit)) => {
                self.calm += 1;
                // What was to tell them has not come again.
                self.lacks_times &= self.calm < CALM;
                let rung = driver.programs[index].ladder.rung_mut();
                rung.last_seen = self.clock;
                let mut recorded = recorded;
                let measured = rung.shelf.learn((iteration.followed, fit), &mut recorded, on_device_ns);
                if measured.is_some() {
                    self.tiers = retimed(self.tiers, &copies);
                }
                // Sizes beyond those of any plan were not expected to fit.
                let surprises = ran_short && fit < Fit::Beyond;
                self.watch(driver, index, (&iteration, surprises), measured);
                let served = match iteration.course {
                    _ if ran_short => Served::RanShort,
                    Course::Planned => Served::Within(iteration.peak_bytes),
                    _ => Served::Otherwise,
                };
                let program = driver.programs[index].name;
                self.fit_edges(driver, index);
                Some(PartName { program, rung: self.refine(driver, index, (recorded.as_ref(), served)) })
            }
            None => {
                if !self.awaits_unknown {
                    self.calm = 0;
                }
                let recorded = recorded.filter(|recorded| !recorded.is_empty());
                let was_recorded = recorded.is_some();
                let compare = |recorded| self.compare(driver, recorded, predecessor_recorded);
                let compared = recorded.map_or(Compared::Unlike, compare);
                self.backoff.note(was_recorded, !matches!(compared, Compared::Unlike));
                match compared {
                    Compared::Program(program) => Some(PartName { program, rung: program.0 }),
                    Compared::Untimed | Compared::Unlike => None,
                }
            }
        };
        self.programs.push(found.map(|part| part.program));
        self.rungs.push(found.map(|part| part.rung));
        self.parts.push(found.filter(|_| program.is_some()));
        self.division.note(found.is_some());
        self.keep_missed(driver);
        if tells_anew && self.division.divide_passes() {
            self.forget_programs(driver);
        }
        if counts_on_less {
            self.replan_all(&mut driver.programs);
        }
        Part { report: iteration, is_known: program.is_some() }
    }

    /// What a program was expected to leave unused, and is not the same any more, is not evicted by its plans from now on.
    fn keep_missed(&mut self, driver: &mut Driver) {
        for program in &mut driver.programs {
            let missed = program.take_missed();
            for rung in program.ladder.rungs_mut().iter_mut().filter(|_| !missed.is_empty()) {
                let known = rung.known.without_evicting(|storage| missed.contains(&storage));
                self.know(rung, known);
            }
        }
    }

    /// Iterations are divided otherwise: what they were will not come again.
    fn forget_programs(&mut self, driver: &mut Driver) {
        driver.forget_programs();
        self.recorded.clear();
        (self.predecessor_recorded, self.lacks_times) = (false, false);
        (self.programs, self.rungs) = Default::default();
        self.absence = Absence::default();
        self.calm = 0;
    }

    /// Compares an iteration that was not known with those recorded before: it may make a program with one of them.
    fn compare(
        &mut self,
        driver: &mut Driver,
        mut recorded: RecordedIteration,
        predecessor_recorded: bool,
    ) -> Compared {
        driver.remember(&recorded);
        let place = |is_alike: &dyn Fn(&RecordedIteration) -> bool| self.recorded.iter().rposition(is_alike);
        let same = place(&|other| other.same_steps(&recorded).is_ok());
        let Some(alike) = same.or_else(|| place(&|other| other.same_but_for_sizes(&recorded))) else {
            let before = self.recorded.back().filter(|_| predecessor_recorded);
            self.division.doubt(before.is_some_and(|before| before.trains_like(&recorded)));
            self.await_alike(recorded);
            return Compared::Unlike;
        };
        // Those at other sizes say nothing of what its operators take.
        if !recorded.is_timed && !same.is_some_and(|same| self.recorded[same].is_timed) {
            // The later one stands for both.
            if let Some(same) = same {
                self.recorded.remove(same);
            }
            self.lacks_times = true;
            self.await_alike(recorded);
            return Compared::Untimed;
        }
        // Where another program came before, its names for storages say nothing.
        if !(predecessor_recorded && alike == self.recorded.len() - 1) {
            recorded.forget_predecessor();
        }
        let mut other = self.recorded.remove(alike).expect("found above");
        recorded.share_unused(&mut other);
        let both = [&other, &recorded];
        let of_one_size = if same.is_some() { &both[..] } else { &both[1..] };
        let traced = trace_of(of_one_size, &HashMap::new(), ["training loop", "", "cpu"]);
        let Ok(trace) = traced else { return Compared::Unlike };
        self.lacks_times = false;
        let is_marked = of_one_size.iter().any(|iteration| iteration.is_marked);
        let times = if is_marked { Times::Wanted(Reason::Early) } else { Times::Known };
        let rung = self.plan_for(Known::of(trace), None, times);
        let name = ProgramName(rung.name);
        let mut program = Program::new(rung);
        program.bind(recorded.bindings());
        driver.programs.push(program);
        driver.make_way(self.plans_max);
        let place = driver.programs.iter().position(|program| program.name == name);
        if let Some(program) = place.filter(|_| same.is_none()) {
            driver.programs[program].ladder.recall(other.sizes());
            self.refine(driver, program, (Some(&other), Served::Otherwise));
        }
        Compared::Program(name)
    }

    /// Keeps an iteration for the next one that is like it.
    fn await_alike(&mut self, recorded: RecordedIteration) {
        if self.recorded.len() == WAITING_MAX {
            self.recorded.pop_front();
        }
        self.recorded.push_back(recorded);
        self.predecessor_recorded = true;
    }

    /// A program was at other sizes than those that it has been planned for, perhaps, and it is planned for these where that pays.
    /// That iteration may have been `recorded`. Returns the name of the rung that it is on.
    fn refine(
        &mut self,
        driver: &mut Driver,
        index: usize,
        (recorded, served): (Option<&RecordedIteration>, Served),
    ) -> RungName {
        let has_place = driver.rungs().count() < self.plans_max;
        let edges = driver.programs[index].edges(self.absence.away());
        let ladder = &mut driver.programs[index].ladder;
        let Some(Proposal { mut trace, is_hull }) = ladder.propose(served, has_place) else {
            return ladder.rung().name;
        };
        let timed = recorded.filter(|recorded| recorded.is_timed);
        let times = match timed {
            Some(recorded) => {
                retime(&[recorded], &mut trace);
                if recorded.is_marked { Times::Wanted(Reason::Early) } else { Times::Known }
            }
            None => Times::Wanted(Reason::Guessed),
        };
        let lineage = Lineage::between(&trace, edges);
        trace.peak_bytes = lineage.keep_all_peak_bytes();
        let known = Known { trace: trace.into(), lineage: lineage.into() };
        let nearest = ladder.rung();
        let before = carried_over(&nearest.scheduled.plan, &nearest.known.lineage, &known.lineage);
        let rung = self.plan_for(known, Some(&before), times);
        let name = rung.name;
        driver.programs[index].ladder.insert(rung, is_hull);
        driver.make_way(self.plans_max);
        name
    }

    /// Looks at an iteration that was planned: whether it took the time and the bytes that were predicted, or `ran_short` of
    /// bytes. Where its program was `measured`, that is planned anew.
    fn watch(
        &mut self,
        driver: &mut Driver,
        index: usize,
        (iteration, ran_short): (&IterationReport, bool),
        measured: Option<Measured>,
    ) {
        let start_bytes = driver.start_bytes();
        let ladder = &mut driver.programs[index].ladder;
        let retimed = measured.map(|measured| ladder.retimed(|trace| measured.retime(trace)));
        let rung = ladder.rung_mut();
        if let Some(trace) = retimed {
            driver.residency.reactive.link = self.tiers.host;
            self.absence.reconsider();
            rung.known = rung.known.with(trace);
            let Shelf { margin_bytes, is_first, .. } = rung.shelf;
            rung.shelf = Shelf { margin_bytes, is_first, ..Shelf::default() };
            self.replan(rung);
            self.report.replans += 1;
        } else if rung.shelf.is_hasty
            && (rung.shelf.times.are_settled() || matches!(rung.shelf.times, Times::Wanted(Reason::Guessed)))
            && self.report.has_time_to_plan(PLANNING_SHARE)
        {
            self.replan(rung);
        } else if ran_short && !rung.shelf.is_tight {
            rung.shelf.pressed += 1;
            if rung.shelf.pressed == PRESSED_MAX {
                rung.shelf.pressed = 0;
                // Something that was not recorded takes bytes. What was there before the iteration is known; else leave it some.
                let surplus_bytes = start_bytes.saturating_sub(rung.known.trace.start_bytes());
                rung.shelf.is_tight = match surplus_bytes {
                    0 => !self.leave_free(rung, self.budget.0 / 64),
                    _ => {
                        self.replan_from(rung, start_bytes);
                        rung.scheduled.exceeds_budget()
                    }
                };
            }
        } else if rung.scheduled.is_reactive()
            && let trace = &rung.known.trace
            && trace.unseen_bytes.saturating_sub(trace.unseen_of(start_bytes)) > self.budget.0 / 64
            && self.report.has_time_to_plan(PLANNING_SHARE)
        {
            // Less is there before the iteration than when no plan did fit.
            rung.shelf.is_tight = false;
            self.replan_from(rung, start_bytes);
        } else if iteration.followed {
            rung.shelf.pressed = 0;
            if let Some(predicted) = iteration.predicted {
                let before = if self.runs_behind { self.rungs.last() } else { None };
                rung.shelf.note(iteration.makespan_ns as f64 / predicted.makespan_ns.max(1) as f64, before);
            }
        }
    }

    /// Counts on less of a tier that has refused something in two iterations, not long after each other: once may be by chance. Whether
    /// there is one.
    fn heed_refusals(&mut self, driver: &mut Driver) -> bool {
        let iteration = self.report.iterations;
        let mut counts_on_less = false;
        for now in driver.residency.take_refusals().into_iter().flatten() {
            let earlier = &mut self.refusals[now.tier as usize];
            match earlier.filter(|(then, _)| iteration - then <= REFUSALS_WITHIN) {
                Some((then, _)) if then == iteration => {}
                Some((_, before)) => {
                    *earlier = None;
                    self.tiers = self.tiers.having_refused(if now.says_more_than(before) { before } else { now });
                    let (tier, limit_bytes) = (now.tier, self.tiers.limit_bytes(now.tier));
                    eprintln!(
                        "plimsoll: the {tier} refuses copies; plans count on {limit_bytes} bytes of it from now on"
                    );
                    counts_on_less = true;
                }
                None => *earlier = Some((iteration, now)),
            }
        }
        counts_on_less
    }
}
