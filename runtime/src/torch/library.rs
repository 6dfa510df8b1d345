//! The programs that a training loop has been seen to run, each with its plan.
//!
//! An iteration that was followed needs nothing more. One that was not is compared with those recorded before; two that
//! are alike make a trace, and the trace a plan. Where they are alike but for the sizes of storages, they are one program, which
//! has a plan for each of them, and for others as they come. A program whose makespan drifts is measured and planned anew.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Instant;

use super::absence::{Absence, Leavable, Look, PartName, Price};
use super::backoff::Backoff;
use super::copy::{TierCopies, retimed, since};
use super::driver::{Driver, Ended, Expected, Record, Wanted};
use super::ladder::{Fit, Proposal, Rung, Served};
use super::parts::{Cuts, Division};
use super::program::{Known, Program, Scheduled};
use super::recording::{RecordedIteration, retime, retime_at_most, trace_of_alike};
use super::report::{Course, IterationReport, Report};
use super::succession::Succession;
use crate::baselines::{Dtr, DtrSwap, baseline};
use crate::hardware::SlowTiers;
use crate::learned::LearnedPolicy;
use crate::lineage::{Edges, Lineage, WindowId};
use crate::plan::{Action, ActionSet, Plan};
use crate::planner::{Decided, KEEP_ALL, PORTFOLIO, Planner, TIME, TIME_PER_WINDOW, least_feasible_budget, plan};
use crate::policy::Policy;
use crate::search::Limits;
use crate::sweep::Problem;
use crate::timeline::{Prediction, Timeline};
use crate::trace::Trace;

/// Followed iterations in a row after which recording stops, until a program is not known again.
const CALM: u32 = 12;
/// Followed iterations that drift is judged by.
const WINDOW: usize = 16;
/// Factor by which measured makespans may drift from what they were in relation to the predicted ones.
const DRIFT: f64 = 1.25;
/// Planned iterations in a row that ran out of bytes after which the plan is made for fewer.
const PRESSED_MAX: u32 = 2;
/// Plans after which none may take any time: until then those for the sizes that a program was found at may.
const PLANS_FREE: u64 = 8;
/// What it may take then, of the loop's own time. What is planned beyond that is decoded greedily.
const PLANNING_SHARE: f64 = 0.1;
/// What it may have taken before it is found out for the first time what should stay away from one iteration, or part of one, to the
/// next, where the budget is held without.
const SURVEY_SHARE: f64 = 0.5;
/// How that is done; without a policy, by the baseline that was the best most often.
const HASTY: Planner = Planner { portfolio: PORTFOLIO.split_at(1).0, ..Planner::decoding(0, 0) };
/// How a plan is made that nobody carries out, to find out what another would take; and in which share of the time of one that
/// somebody does.
const SURVEY: Planner =
    Planner { decodes: 0, portfolio: PORTFOLIO.split_at(1).0, limits: Limits::evaluations(u64::MAX) };
const SURVEYS: u32 = 10;
/// Iterations that wait for another one like them.
const WAITING_MAX: usize = 64;
/// Iterations of a program that may go otherwise than planned, or be disturbed, before it is left with the times that it has.
const TRIES: u32 = 8;
/// What marks on a device may cost an operator; an iteration that they seem to cost more was disturbed by something else. They cost
/// 3 to 14 µs on a host that an H200 waits for.
const MARKS_NS: u64 = 30_000;

/// Who decides.
pub(super) enum Decider {
    Learned(Box<LearnedPolicy>),
    Baseline(&'static str),
    /// Nobody was named.
    Planner,
}

impl Decider {
    /// The policy that decides when bytes run out: DTR's rule, for swaps too, where ours has to see the whole iteration first.
    pub(super) fn reactive(&self) -> Box<dyn Policy + Send> {
        let policy = self.policy();
        if policy.decides_unopened() { policy } else { Box::new(DtrSwap) }
    }

    fn policy(&self) -> Box<dyn Policy + Send> {
        match self {
            Decider::Learned(policy) => policy.clone(),
            Decider::Baseline(name) => baseline(name, 0).expect("the builder has asked for it"),
            Decider::Planner => Box::new(DtrSwap),
        }
    }

    /// The decider's plan, which a baseline makes anew, and others from what they had `before`. Where a baseline's own does not
    /// hold the budget, the planner is asked for one that does: it asks the other baselines, and searches.
    fn plan(&self, problem: Problem<'_>, planner: &Planner, before: Option<&Plan>) -> Decided {
        match self {
            Decider::Learned(policy) => planner.improve(problem, Some(policy), before),
            Decider::Planner => planner.improve(problem, None, before),
            Decider::Baseline(name) => {
                let own = Decided { planned: plan(problem, self.policy().as_mut()), by: name };
                if own.planned.fits() {
                    return own;
                }
                let others = planner.improve(problem, None, before);
                if others.planned.is_better_than(&own.planned) { others } else { own }
            }
        }
    }
}

/// What is known of a program's times.
#[derive(Default)]
enum Times {
    /// Its trace has them.
    #[default]
    Known,
    /// An iteration is to be measured for a plan of new times.
    Wanted(Reason),
    /// One was, by marks on the device; the next tells what it takes without.
    Marked(Reason, Box<RecordedIteration>),
}

impl Times {
    /// Whether they are, or were, what operators take.
    fn are_good(&self) -> bool {
        matches!(self, Times::Known | Times::Wanted(Reason::Drifted) | Times::Marked(Reason::Drifted, _))
    }
}

/// What is wrong with a program's times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    /// They were taken by marks on a device while bytes ran out, or kernels were loaded: none is too small.
    Early,
    /// They no longer are what operators take.
    Drifted,
    /// They are guessed from those at other sizes.
    Guessed,
}

/// An iteration that was measured for a plan of new times.
struct Measured {
    reason: Reason,
    recorded: RecordedIteration,
    /// By how much marks on the device made it longer.
    marks_ns: u64,
}

impl Measured {
    /// Puts its times into a trace at the same sizes.
    fn retime(&self, trace: &mut Trace) {
        match self.reason {
            Reason::Early => retime_at_most(&self.recorded, trace),
            Reason::Drifted | Reason::Guessed => retime(&[&self.recorded], trace),
        }
        trace.cut_to(trace.makespan_ns.saturating_sub(self.marks_ns));
    }
}

/// What is remembered of a program beside its trace and schedule.
#[derive(Default)]
struct Shelf {
    /// Measured ÷ predicted makespan of the latest planned iterations, all of which came `after` the same other.
    ratios: VecDeque<f64>,
    after: Option<u64>,
    /// Those since the last of them that came after others.
    elsewhere: usize,
    /// What that was when the plan was new.
    reference: Option<f64>,
    /// What its operators take.
    times: Times,
    /// Iterations that went as planned since the plan is new, and those that did not while its times were wanted.
    followed: u32,
    astray: u32,
    /// Whether it is planned at the sizes that it was found at, and not for more of them.
    is_first: bool,
    /// Whether there was no time to plan it well.
    is_hasty: bool,
    /// Planned iterations in a row that ran out of bytes.
    pressed: u32,
    /// Bytes that plans leave free, because something else takes them.
    margin_bytes: u64,
    /// Whether they cannot leave more.
    is_tight: bool,
}

/// What an iteration that was not known turns out to be.
enum Compared {
    /// Nothing that has been recorded.
    Unlike,
    /// What has, but neither tells what its operators take.
    Untimed,
    /// The program of that name.
    Program(u64),
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

/// The plan cache.
pub(super) struct Library {
    decider: Decider,
    tiers: SlowTiers,
    actions: ActionSet,
    planner: Planner,
    plans_max: usize,
    /// By the names of rungs.
    shelves: HashMap<u64, Shelf>,
    /// Names given to programs and rungs.
    names: u64,
    recorded: VecDeque<RecordedIteration>,
    /// Whether the last of `recorded` is the iteration before this one.
    predecessor_recorded: bool,
    /// Which programs ran, and at which of their sizes.
    programs: Succession,
    rungs: Succession,
    /// Whether what comes next is expected to be none of the programs.
    awaits_unknown: bool,
    /// Whether two iterations were alike of which neither tells what operators take.
    lacks_times: bool,
    clock: u64,
    calm: u32,
    backoff: Backoff,
    makespan_ns: u64,
    /// Whether the device works through operators later, so that the host takes as long for an iteration as that for the one before.
    runs_behind: bool,
    /// What copies took until the last iteration ended.
    copies: Vec<TierCopies>,
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
        decider: Decider,
        tiers: SlowTiers,
        actions: ActionSet,
        planner: Planner,
        plans_max: usize,
        runs_behind: bool,
    ) -> Self {
        Library {
            decider,
            tiers,
            actions,
            planner,
            plans_max,
            shelves: HashMap::new(),
            names: 0,
            recorded: VecDeque::new(),
            predecessor_recorded: false,
            programs: Succession::default(),
            rungs: Succession::default(),
            awaits_unknown: false,
            lacks_times: false,
            clock: 0,
            calm: 0,
            backoff: Backoff::default(),
            makespan_ns: 0,
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

    /// An iteration begins. The last one may not have come to its end.
    pub(super) fn begin(&mut self) {
        self.before = None;
        self.parts.clear();
    }

    /// Where iterations are divided.
    pub(super) fn cuts(&self) -> Cuts {
        self.division.cuts()
    }

    /// The makespan of the last iteration.
    pub(super) fn makespan_ns(&self) -> u64 {
        self.makespan_ns
    }

    /// The least budget for which a plan was found, where one was looked for.
    pub(super) fn least_feasible_bytes(&self) -> Option<u64> {
        self.least_feasible_bytes
    }

    /// The programs, at the sizes that there are plans for, as far as it is known what their operators take.
    pub(super) fn traces<'a>(&'a self, driver: &'a Driver) -> impl Iterator<Item = &'a Trace> {
        let rungs = driver.rungs().map(|(_, rung)| rung).filter(|rung| self.shelves[&rung.serial].times.are_good());
        rungs.map(|rung| &*rung.known.trace)
    }

    /// The program that the next iteration is expected to be, and what is to be done with it: what followed such as came last, else
    /// the latest. Where something unknown is expected, that is recorded, and goes by the largest program as far as it is that.
    pub(super) fn next(&mut self, driver: &mut Driver) -> (Option<usize>, Wanted) {
        let next = self.programs.next();
        let is_next =
            |&((program, _), _): &((usize, usize), &Rung)| next == Some(Some(driver.programs[program].serial));
        let rung = self.rungs.next().flatten();
        self.awaits_unknown = next.is_some() && !driver.rungs().any(|at| is_next(&at));
        let leader = match self.awaits_unknown {
            true => driver.rungs().max_by_key(|(_, rung)| rung.known.lineage.keep_all_peak_bytes()),
            false => driver.rungs().max_by_key(|at| (is_next(at), rung == Some(at.1.serial), at.1.last_seen)),
        };
        let shelf = leader.map(|(_, rung)| &self.shelves[&rung.serial]);
        let of_unknown = if self.backoff.records() { Record::Whole } else { Record::Nothing };
        let record = match shelf.map(|shelf| (&shelf.times, shelf.followed)) {
            _ if self.awaits_unknown => of_unknown,
            Some((Times::Marked(..), _)) => Record::Makespan,
            // The first planned one makes room on the host for what it copies.
            Some((Times::Wanted(_), 1..)) => Record::Whole,
            // It may be another program after all.
            Some(_) if (1..CALM).contains(&self.calm) && !self.wants_times() => of_unknown.without_times(),
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
    fn wants_times(&self) -> bool {
        self.lacks_times || self.shelves.values().any(|shelf| matches!(shelf.times, Times::Wanted(_)))
    }

    /// Whether anything may be left away from one iteration to the next, or from one part of an iteration to the next, for its own sake:
    /// a baseline decides alone.
    pub(super) fn may_leave_away(&self) -> bool {
        self.actions.swap && !matches!(self.decider, Decider::Baseline(_))
    }

    /// Learns from an iteration, or its last part.
    pub(super) fn learn(&mut self, driver: &mut Driver, ended: Ended, budget_bytes: u64, report: &mut Report) {
        let before = self.before.take();
        let is_divided = before.is_some();
        let part = match before {
            Some(before) => self.learn_one(driver, ended, budget_bytes, report).after(before),
            None => self.learn_program(driver, ended, budget_bytes, report),
        };
        if is_divided || self.is_loop {
            self.settle_absence(driver, budget_bytes, report);
        }
        report.add(part.report, part.is_known);
    }

    /// Learns from a part of an iteration that goes on.
    pub(super) fn learn_part(&mut self, driver: &mut Driver, ended: Ended, budget_bytes: u64, report: &mut Report) {
        let part = self.learn_one(driver, ended, budget_bytes, report);
        self.before = Some(match self.before.take() {
            Some(before) => part.after(before),
            None => part,
        });
    }

    /// One of several parts; nothing is expected of a prelude.
    fn learn_one(&mut self, driver: &mut Driver, ended: Ended, budget_bytes: u64, report: &mut Report) -> Part {
        match ended.was_prelude {
            true => Part { report: ended.report.of_prelude(), is_known: true },
            false => self.learn_program(driver, ended, budget_bytes, report),
        }
    }

    fn learn_program(&mut self, driver: &mut Driver, ended: Ended, budget_bytes: u64, report: &mut Report) -> Part {
        self.clock += 1;
        let Ended { report: iteration, recorded, on_device_ns, program, ran_short, .. } = ended;
        let tells_anew = program.is_some_and(|program| driver.programs[program].ladder.is_told_anew());
        self.makespan_ns = iteration.makespan_ns;
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
                let shelf = self.shelves.get_mut(&rung.serial).expect("every rung has a shelf");
                let measured = shelf.learn((iteration.followed, fit), &mut recorded, on_device_ns);
                if measured.is_some() {
                    self.tiers = retimed(self.tiers, &copies);
                }
                // Sizes beyond those of any plan were not expected to fit.
                let surprises = ran_short && fit < Fit::Beyond;
                self.watch(driver, index, (&iteration, surprises), measured, budget_bytes, report);
                let served = match iteration.course {
                    _ if ran_short => Served::RanShort,
                    Course::Planned => Served::Within(iteration.peak_bytes),
                    _ => Served::Otherwise,
                };
                let program = driver.programs[index].serial;
                self.fit_edges(driver, index, budget_bytes, report);
                Some((program, self.refine(driver, index, (recorded.as_ref(), served), budget_bytes, report)))
            }
            None => {
                if !self.awaits_unknown {
                    self.calm = 0;
                }
                let recorded = recorded.filter(|recorded| !recorded.is_empty());
                let was_recorded = recorded.is_some();
                let compare = |recorded| self.compare(driver, recorded, predecessor_recorded, budget_bytes, report);
                let compared = recorded.map_or(Compared::Unlike, compare);
                self.backoff.note(was_recorded, !matches!(compared, Compared::Unlike));
                match compared {
                    // A program has the name of its first rung.
                    Compared::Program(serial) => Some((serial, serial)),
                    Compared::Untimed | Compared::Unlike => None,
                }
            }
        };
        self.programs.push(found.map(|(program, _)| program));
        self.rungs.push(found.map(|(_, rung)| rung));
        self.parts.push(found.filter(|_| program.is_some()));
        self.division.note(found.is_some());
        self.keep_missed(driver, budget_bytes, report);
        if tells_anew && self.division.divide_passes() {
            self.forget_programs(driver);
        }
        Part { report: iteration, is_known: program.is_some() }
    }

    /// What a program was expected to leave unused, and is not the same any more, is not evicted by its plans from now on.
    fn keep_missed(&mut self, driver: &mut Driver, budget_bytes: u64, report: &mut Report) {
        for program in &mut driver.programs {
            let missed = program.take_missed();
            for rung in program.ladder.rungs_mut().iter_mut().filter(|_| !missed.is_empty()) {
                let known = rung.known.without_evicting(|storage| missed.contains(&storage));
                self.know(rung, known, budget_bytes, report);
            }
        }
    }

    /// A program stands otherwise to what comes before and after it than its plan has it.
    fn fit_edges(&mut self, driver: &mut Driver, index: usize, budget_bytes: u64, report: &mut Report) {
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
            let scheduled = self.schedule(&known, plan, self.left_bytes(rung, budget_bytes));
            if !scheduled.exceeds_budget() {
                (rung.known, rung.scheduled) = (known, scheduled);
                return;
            }
        }
        self.know(rung, known, budget_bytes, report);
    }

    /// What the budget leaves a plan.
    fn left_bytes(&self, rung: &Rung, budget_bytes: u64) -> u64 {
        budget_bytes.saturating_sub(self.shelves[&rung.serial].margin_bytes)
    }

    fn schedule(&self, known: &Known, plan: Plan, budget_bytes: u64) -> Scheduled {
        let mut timeline = Timeline::new(&known.trace, &known.lineage, self.tiers);
        let (mut schedule, prediction) = timeline.schedule(&plan, budget_bytes);
        timeline.let_read_out(&mut schedule);
        Scheduled::new(known, plan, schedule, Some(prediction))
    }

    /// An iteration has ended that was divided, or that another one follows: decides, now and then, what stays away in between.
    fn settle_absence(&mut self, driver: &Driver, budget_bytes: u64, report: &mut Report) {
        let Some(names) = std::mem::take(&mut self.parts).into_iter().collect::<Option<Vec<PartName>>>() else {
            return;
        };
        if !self.may_leave_away() {
            return;
        }
        let rung = |(program, rung): PartName| {
            let program = driver.programs.iter().find(|other| other.serial == program)?;
            Some((program, program.ladder.rungs().iter().find(|other| other.serial == rung)?))
        };
        let known = names.iter().filter_map(|&name| rung(name));
        let known: Vec<_> = known.filter(|(program, _)| program.knows_before()).collect();
        let exceeds = known.iter().any(|(_, rung)| rung.scheduled.exceeds_budget());
        let is_urgent = exceeds && known.len() == names.len();
        match self.absence.note(names, is_urgent) {
            Some(Look::AtOnce) if self.absence.is_undecided() || has_time(report, PLANNING_SHARE) => {}
            Some(Look::First) if has_time(report, SURVEY_SHARE) => {}
            Some(Look::Again) if has_time(report, PLANNING_SHARE) => {}
            _ => return,
        }
        let started = Instant::now();
        let mut absence = std::mem::take(&mut self.absence);
        let parts: Vec<_> = absence.parts().filter_map(rung).collect();
        // Where iterations are divided, what some part of them does without; else what is there all the time.
        let leaves = parts.iter().filter_map(|(program, _)| program.leaves).min();
        let mut could = BTreeMap::new();
        for (program, rung) in parts.iter().filter(|(program, _)| program.leaves == leaves) {
            for (storage, entry) in program.leavable() {
                if let Some(live) = driver.residency.get(entry) {
                    let idle_ns = rung.known.lineage.idle_around_ns(storage);
                    could.entry(entry).or_insert(Leavable { entry, bytes: live.bytes, idle_ns });
                }
            }
        }
        let could = could.into_values().collect();
        let mut prices: HashMap<(u64, Edges), Price> = HashMap::new();
        absence.decide(could, |away| {
            let price_of = |(program, rung): &(&Program, &Rung)| {
                let edges = program.edges(away);
                let price = || self.price(rung, edges.clone(), budget_bytes);
                *prices.entry((rung.serial, edges.clone())).or_insert_with(price)
            };
            parts.iter().map(price_of).fold(Price::default(), Price::and)
        });
        self.absence = absence;
        report.planning_ns += started.elapsed().as_nanos() as u64;
    }

    fn problem<'a>(&self, trace: &'a Trace, lineage: &'a Lineage, budget_bytes: u64) -> Problem<'a> {
        Problem { trace, lineage, tiers: self.tiers, budget_bytes, actions: self.actions }
    }

    /// What an iteration, or a part of one, is predicted to take between such edges, by a plan that is made for that alone.
    fn price(&self, rung: &Rung, edges: Edges, budget_bytes: u64) -> Price {
        let trace = &*rung.known.trace;
        let budget_bytes = self.left_bytes(rung, budget_bytes);
        let survey = |lineage: &Lineage| {
            let time = TIME.max(TIME_PER_WINDOW * lineage.windows().len() as u32) / SURVEYS;
            let planner = Planner { limits: Limits::wall(time), ..SURVEY };
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

    /// Plans a program anew, of which more is known.
    fn know(&mut self, rung: &mut Rung, known: Known, budget_bytes: u64, report: &mut Report) {
        let before = carried_over(&rung.scheduled.plan, &rung.known.lineage, &known.lineage);
        let mut shelf = self.take_shelf(rung);
        rung.scheduled = self.plan(&known, Some(&before), budget_bytes, &mut shelf, report);
        rung.known = known;
        self.shelves.insert(rung.serial, shelf);
    }

    /// Iterations are divided otherwise: what they were will not come again.
    fn forget_programs(&mut self, driver: &mut Driver) {
        driver.forget_programs();
        self.shelves.clear();
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
        budget_bytes: u64,
        report: &mut Report,
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
        let traced = trace_of_alike(of_one_size, &HashMap::new(), ["training loop", "", "cpu"]);
        let Ok(trace) = traced else { return Compared::Unlike };
        self.lacks_times = false;
        let is_marked = of_one_size.iter().any(|iteration| iteration.is_marked);
        let times = if is_marked { Times::Wanted(Reason::Early) } else { Times::Known };
        let rung = self.plan_for(Known::of(trace), None, times, budget_bytes, report);
        let serial = rung.serial;
        let mut program = Program::new(rung);
        program.bind(recorded.bindings());
        driver.programs.push(program);
        self.make_way(driver);
        let place = driver.programs.iter().position(|program| program.serial == serial);
        if let Some(program) = place.filter(|_| same.is_none()) {
            driver.programs[program].ladder.recall(other.sizes());
            self.refine(driver, program, (Some(&other), Served::Otherwise), budget_bytes, report);
        }
        Compared::Program(serial)
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
        budget_bytes: u64,
        report: &mut Report,
    ) -> u64 {
        let has_place = driver.rungs().count() < self.plans_max;
        let edges = driver.programs[index].edges(self.absence.away());
        let ladder = &mut driver.programs[index].ladder;
        let Some(Proposal { mut trace, is_hull }) = ladder.propose(served, has_place) else {
            return ladder.rung().serial;
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
        let rung = self.plan_for(known, Some(&before), times, budget_bytes, report);
        let serial = rung.serial;
        if let Some(outgrown) = driver.programs[index].ladder.insert(rung, is_hull) {
            self.shelves.remove(&outgrown);
        }
        self.make_way(driver);
        serial
    }

    /// A new rung, planned.
    fn plan_for(
        &mut self,
        known: Known,
        before: Option<&Plan>,
        times: Times,
        budget_bytes: u64,
        report: &mut Report,
    ) -> Rung {
        let mut shelf = Shelf { times, is_first: before.is_none(), ..Shelf::default() };
        let scheduled = self.plan(&known, before, budget_bytes, &mut shelf, report);
        self.names += 1;
        self.shelves.insert(self.names, shelf);
        Rung::new(known, scheduled, self.names, self.clock)
    }

    /// Lets go of a plan where there are too many.
    fn make_way(&mut self, driver: &mut Driver) {
        if let Some(left) = driver.make_way(self.plans_max) {
            self.shelves.remove(&left);
        }
    }

    /// Plans a program for what the budget leaves it, from the plan that there was `before`.
    fn plan(
        &mut self,
        known: &Known,
        before: Option<&Plan>,
        budget_bytes: u64,
        shelf: &mut Shelf,
        report: &mut Report,
    ) -> Scheduled {
        let started = Instant::now();
        shelf.take_new_plan();
        shelf.is_hasty = !(shelf.is_first && report.plans < PLANS_FREE || has_time(report, PLANNING_SHARE));
        let planner = if shelf.is_hasty { &HASTY } else { &self.planner };
        let budget_bytes = budget_bytes.saturating_sub(shelf.margin_bytes);
        let (trace, lineage) = (&*known.trace, &*known.lineage);
        let problem = self.problem(trace, lineage, budget_bytes);
        let (plan, by) = if lineage.keep_all_peak_bytes() <= budget_bytes {
            (Plan::keep_all(lineage.windows().len()), KEEP_ALL)
        } else {
            let Decided { planned, by } = self.decider.plan(problem, planner, before);
            // Where something may be left away, less may do.
            let less_may_do = self.is_loop && self.may_leave_away();
            if !(planned.fits() || shelf.is_hasty || less_may_do) {
                let mut policies = [self.decider.policy(), Box::new(Dtr)];
                let least = least_feasible_budget(problem, &mut policies);
                self.least_feasible_bytes = self.least_feasible_bytes.max(Some(least));
            }
            (planned.plan, by)
        };
        let scheduled = self.schedule(known, plan, budget_bytes);
        report.plans += 1;
        *report.plans_by.entry(by).or_default() += 1;
        report.planning_ns += started.elapsed().as_nanos() as u64;
        scheduled
    }

    /// Plans a program anew.
    fn replan(&mut self, rung: &mut Rung, budget_bytes: u64, shelf: &mut Shelf, report: &mut Report) {
        rung.scheduled = self.plan(&rung.known, Some(&rung.scheduled.plan), budget_bytes, shelf, report);
    }

    /// Plans a program anew, so that it leaves so many more bytes free. Where no such plan is found the present one stays.
    fn leave_free(
        &mut self,
        rung: &mut Rung,
        bytes: u64,
        budget_bytes: u64,
        shelf: &mut Shelf,
        report: &mut Report,
    ) -> bool {
        shelf.margin_bytes += bytes;
        let scheduled = self.plan(&rung.known, Some(&rung.scheduled.plan), budget_bytes, shelf, report);
        let fits = !scheduled.exceeds_budget();
        if fits {
            rung.scheduled = scheduled;
        } else {
            shelf.margin_bytes -= bytes;
        }
        fits
    }

    /// Makes every plan anew, for another budget.
    pub(super) fn replan_all(&mut self, programs: &mut [Program], budget_bytes: u64, report: &mut Report) {
        self.least_feasible_bytes = None;
        self.absence.doubt();
        for rung in programs.iter_mut().flat_map(|program| program.ladder.rungs_mut()) {
            let Shelf { times, is_first, .. } = self.take_shelf(rung);
            let mut shelf = Shelf { times, is_first, ..Shelf::default() };
            self.replan(rung, budget_bytes, &mut shelf, report);
            self.shelves.insert(rung.serial, shelf);
        }
    }

    /// Looks at an iteration that was planned: whether it took the time and the bytes that were predicted, or `ran_short` of
    /// bytes. Where its program was `measured`, that is planned anew.
    fn watch(
        &mut self,
        driver: &mut Driver,
        index: usize,
        (iteration, ran_short): (&IterationReport, bool),
        measured: Option<Measured>,
        budget_bytes: u64,
        report: &mut Report,
    ) {
        let start_bytes = driver.start_bytes();
        let ladder = &mut driver.programs[index].ladder;
        let mut shelf = self.take_shelf(ladder.rung());
        let retimed = measured.map(|measured| ladder.retimed(|trace| measured.retime(trace)));
        let rung = ladder.rung_mut();
        if let Some(trace) = retimed {
            driver.residency.reactive.link = self.tiers.host;
            self.absence.reconsider();
            rung.known = rung.known.with(trace);
            shelf = Shelf { margin_bytes: shelf.margin_bytes, is_first: shelf.is_first, ..Shelf::default() };
            self.replan(rung, budget_bytes, &mut shelf, report);
            report.replans += 1;
        } else if shelf.is_hasty
            && matches!(shelf.times, Times::Known | Times::Wanted(Reason::Guessed))
            && has_time(report, PLANNING_SHARE)
        {
            self.replan(rung, budget_bytes, &mut shelf, report);
        } else if ran_short && !shelf.is_tight {
            shelf.pressed += 1;
            if shelf.pressed == PRESSED_MAX {
                shelf.pressed = 0;
                // Something that was not recorded takes bytes. What was there before the iteration is known; else leave it some.
                let surplus_bytes = start_bytes.saturating_sub(rung.known.trace.start_bytes());
                shelf.is_tight = match surplus_bytes {
                    0 => !self.leave_free(rung, budget_bytes / 64, budget_bytes, &mut shelf, report),
                    _ => {
                        let mut trace = Trace::clone(&rung.known.trace);
                        trace.unseen_bytes += surplus_bytes;
                        rung.known = rung.known.with(trace);
                        self.replan(rung, budget_bytes, &mut shelf, report);
                        rung.scheduled.exceeds_budget()
                    }
                };
            }
        } else if iteration.followed {
            shelf.pressed = 0;
            if let Some(predicted) = iteration.predicted {
                let before = if self.runs_behind { self.rungs.last() } else { None };
                shelf.note(iteration.makespan_ns as f64 / predicted.makespan_ns.max(1) as f64, before);
            }
        }
        self.shelves.insert(rung.serial, shelf);
    }

    /// What is remembered of a rung, for as long as that is worked on.
    fn take_shelf(&mut self, rung: &Rung) -> Shelf {
        self.shelves.remove(&rung.serial).expect("every rung has a shelf")
    }
}

/// What a plan does, for the windows of the same program at other sizes: those of small storages are no windows.
fn carried_over(plan: &Plan, from: &Lineage, to: &Lineage) -> Plan {
    let actions: HashMap<_, Action> = from
        .windows()
        .iter()
        .zip(plan.actions())
        .map(|(window, &action)| ((window.storage, window.start), action))
        .collect();
    let mut carried = Plan::keep_all(to.windows().len());
    for (id, window) in (0..).map(WindowId).zip(to.windows()) {
        carried.set(id, actions.get(&(window.storage, window.start)).copied().unwrap_or_default());
    }
    carried
}

/// Whether planning has taken no more than this share of the loop's time.
fn has_time(report: &Report, share: f64) -> bool {
    report.planning_ns as f64 <= share * report.makespan_ns as f64
}

impl Shelf {
    /// There is another plan: what was learned of the last one is void.
    fn take_new_plan(&mut self) {
        self.forget_ratios();
        (self.followed, self.pressed) = (0, 0);
        if let Times::Marked(reason, _) = self.times {
            self.times = Times::Wanted(reason);
        }
    }

    fn forget_ratios(&mut self) {
        self.ratios.clear();
        (self.reference, self.elsewhere) = (None, 0);
    }

    /// What an iteration was measured at, where times are wanted and all is known; takes the recording then. What goes otherwise
    /// than planned takes longer than it would, and tells nothing. At other sizes than the plan's, which may never come again, what
    /// marks take is not found out.
    fn learn(
        &mut self,
        (followed, fit): (bool, Fit),
        recorded: &mut Option<RecordedIteration>,
        on_device_ns: Option<u64>,
    ) -> Option<Measured> {
        if !followed {
            self.go_astray();
            return None;
        }
        let is_warm = self.followed > 0;
        self.followed += 1;
        match std::mem::take(&mut self.times) {
            Times::Wanted(reason) if is_warm && recorded.as_ref().is_some_and(|recorded| recorded.is_timed) => {
                let recorded = recorded.take()?;
                if !recorded.is_marked || fit != Fit::Exact {
                    return Some(Measured { reason, recorded, marks_ns: 0 });
                }
                self.times = Times::Marked(reason, Box::new(recorded));
            }
            Times::Marked(reason, marked) if fit == Fit::Exact && recorded.is_none() && on_device_ns.is_some() => {
                let marks_ns = marked.makespan_ns().saturating_sub(on_device_ns?);
                if marks_ns <= MARKS_NS * marked.operators() as u64 {
                    return Some(Measured { reason, recorded: *marked, marks_ns });
                }
                self.times = Times::Wanted(reason);
                self.go_astray();
            }
            Times::Marked(reason, marked) if fit != Fit::Exact => {
                self.times = Times::Marked(reason, marked);
                self.go_astray();
            }
            before => self.times = before,
        }
        None
    }

    /// An iteration told nothing. After some of them the program is left with the times that it has.
    fn go_astray(&mut self) {
        if matches!(self.times, Times::Known) {
            return;
        }
        self.astray += 1;
        if self.astray == TRIES {
            (self.times, self.astray) = (Times::Known, 0);
            self.forget_ratios();
        }
    }

    /// Notes one more ratio of measured to predicted makespan. Drift is a change of their median over a window from what
    /// it was when the plan was new; a prediction that is off by the same factor all the time does not drift. While times are
    /// wanted anyway none is looked for. Those that come `after` the same are disturbed alike; where none does for long, others count.
    fn note(&mut self, ratio: f64, after: Option<u64>) {
        if !matches!(self.times, Times::Known) {
            return;
        }
        self.elsewhere = if after == self.after { 0 } else { self.elsewhere + 1 };
        if self.ratios.is_empty() || self.elsewhere == WINDOW {
            self.forget_ratios();
            self.after = after;
        } else if self.elsewhere > 0 {
            return;
        }
        if self.ratios.len() == WINDOW {
            self.ratios.pop_front();
        }
        self.ratios.push_back(ratio);
        if self.ratios.len() < WINDOW {
            return;
        }
        let mut sorted: Vec<f64> = self.ratios.iter().copied().collect();
        sorted.sort_unstable_by(f64::total_cmp);
        let median = sorted[WINDOW / 2];
        let reference = *self.reference.get_or_insert(median);
        if median > reference * DRIFT || median < reference / DRIFT {
            self.times = Times::Wanted(Reason::Drifted);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_error_of_prediction_is_no_drift_and_a_change_is() {
        let mut shelf = Shelf::default();
        (0..100).for_each(|_| shelf.note(1.6, None));
        assert!(matches!(shelf.times, Times::Known));
        (0..WINDOW).for_each(|_| shelf.note(2.5, None));
        assert!(matches!(shelf.times, Times::Wanted(Reason::Drifted)));
    }

    /// A program whose first times are not good, once it has been planned.
    fn early() -> Shelf {
        let mut shelf = Shelf { times: Times::Wanted(Reason::Early), ..Shelf::default() };
        assert!(
            shelf.learn((true, Fit::Exact), &mut Some(RecordedIteration::marked(10, 900)), None).is_none(),
            "the first makes room"
        );
        shelf
    }

    #[test]
    fn times_that_are_wanted_take_an_iteration_with_marks_and_one_without() {
        let mut shelf = early();
        assert!(shelf.learn((true, Fit::Exact), &mut Some(RecordedIteration::marked(10, 700)), Some(700)).is_none());
        assert!(matches!(shelf.times, Times::Marked(Reason::Early, _)));
        // Something else comes between.
        assert!(shelf.learn((false, Fit::Exact), &mut None, Some(4_000)).is_none());
        let measured = shelf.learn((true, Fit::Exact), &mut None, Some(640)).expect("all is known");
        assert_eq!((measured.marks_ns, measured.recorded.makespan_ns()), (60, 700));
    }

    #[test]
    fn times_of_another_plan_or_of_an_iteration_that_was_disturbed_do_not_count() {
        let mut shelf = early();
        assert!(shelf.learn((true, Fit::Exact), &mut Some(RecordedIteration::marked(10, 700)), Some(700)).is_none());
        shelf.take_new_plan();
        assert!(matches!(shelf.times, Times::Wanted(Reason::Early)) && shelf.followed == 0);
        let mut shelf = early();
        let disturbed = RecordedIteration::marked(10, 700 + 10 * MARKS_NS);
        assert!(shelf.learn((true, Fit::Exact), &mut Some(disturbed), None).is_none());
        assert!(shelf.learn((true, Fit::Exact), &mut None, Some(640)).is_none());
        assert!(matches!(shelf.times, Times::Wanted(Reason::Early)));
    }

    #[test]
    fn a_program_that_is_never_followed_is_left_with_its_times() {
        let mut shelf = early();
        (0..TRIES).for_each(|_| {
            assert!(shelf.learn((false, Fit::Exact), &mut Some(RecordedIteration::marked(10, 700)), None).is_none())
        });
        assert!(matches!(shelf.times, Times::Known));
    }

    #[test]
    fn while_times_are_wanted_no_drift_is_looked_for() {
        let mut shelf = Shelf::default();
        (0..WINDOW).for_each(|_| shelf.note(1.0, None));
        (0..WINDOW).for_each(|_| shelf.note(2.0, None));
        assert!(matches!(shelf.times, Times::Wanted(Reason::Drifted)));
        shelf.learn((true, Fit::Exact), &mut None, None);
        shelf.learn((true, Fit::Exact), &mut Some(RecordedIteration::marked(10, 700)), None);
        shelf.note(2.0, None);
        assert!(matches!(shelf.times, Times::Marked(Reason::Drifted, _)));
    }

    #[test]
    fn planning_may_take_its_share() {
        let after = |planning_ns| Report { planning_ns, makespan_ns: 1_000, ..Report::default() };
        assert!(!has_time(&after(101), PLANNING_SHARE));
        assert!(has_time(&after(100), PLANNING_SHARE));
    }

    #[test]
    fn one_slow_iteration_is_no_drift() {
        let mut shelf = Shelf::default();
        (0..WINDOW).for_each(|_| shelf.note(1.0, None));
        shelf.note(50.0, None);
        (0..WINDOW).for_each(|_| shelf.note(1.1, None));
        assert!(matches!(shelf.times, Times::Known));
    }
}
