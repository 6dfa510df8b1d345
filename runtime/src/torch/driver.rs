//! Drives one iteration after another: carries out the schedule of the program that runs, brings back whatever an
//! operator is about to use, and makes room when bytes run out.
//!
//! While the program is the one that the schedule was made for, bytes move as was predicted, to the byte. Where other
//! operators come, nothing is due until one comes that the program has still to come to, and nothing else changes: what is
//! absent comes back when it is used. How programs are recorded and planned is not known here.
//!
//! Where a host sets the pace, an operator costs what its instructions take to be fetched: what few operators need is in functions that
//! are not inlined, out of the way of the others.

mod following;
mod instructions;
mod shared;
mod wanted;

use std::collections::{BTreeSet, HashMap};
use std::time::Instant;

pub(crate) use self::shared::{Open, Shared};
pub(crate) use self::wanted::{Ended, Expected, Record, Wanted};
use super::ancestry::MakerId;
use super::ladder::{Fit, Rung};
use super::program::{Follows, Program};
use super::recompute::Rebuild;
use super::recording::{Local, RawStorage, RecordedIteration, Recording};
use super::report::{Course, Predicted};
use super::residency::{Fault, Live, Place, Residency, Written};
use super::session::Wish;
use super::shim::{self, DeviceTiming, Entry, RawOperator};
use super::succession::{Left, Legacies};
use crate::trace::Phase;

/// How an iteration goes otherwise than was expected.
enum Deviation {
    /// Bytes ran out, though all had gone as planned.
    RanShort(String),
    /// Anything else.
    Other(String),
}

/// The iteration under way, or the part of one.
struct Iteration {
    wanted: Wanted,
    /// Whether a schedule is carried out.
    acts: bool,
    /// The program whose schedule is carried out, or would be.
    leader: Option<usize>,
    /// The one that was it until other operators came than its own.
    lost: Option<usize>,
    recording: Option<Recording>,
    /// What runs operators again, in the order in which they ran.
    makers: Vec<Option<MakerId>>,
    /// What first went otherwise than was expected.
    deviation: Option<Deviation>,
    started: Instant,
    /// Device bytes when the first operator arrived, if everything were resident: what the program let go of before that is no part of
    /// the iteration.
    start_bytes: Option<u64>,
    /// Whether so much more was there then than its trace has that its plan does not fit any more.
    outgrows: bool,
    /// Time that went into making room inside the operator under way.
    lost_ns: u64,
    /// What is away when it begins, and what is leaving.
    begun_without: (Vec<Entry>, Vec<Entry>),
    /// Held storages that the program has let go of.
    orphans: BTreeSet<Entry>,
    /// Those that it should have let go of by now, and that are asked about until they go.
    late: BTreeSet<Entry>,
    /// Where it is not known where it ends, whether it has come to a backward pass: what updates write from then on is rebuilt from no
    /// earlier update.
    endless: Option<bool>,
}

impl Iteration {
    /// One that begins now, while these are away and leaving.
    fn begin(leader: Option<usize>, wanted: Wanted, begun_without: (Vec<Entry>, Vec<Entry>)) -> Self {
        Iteration {
            wanted,
            acts: false,
            leader,
            lost: None,
            recording: None,
            makers: Vec::new(),
            deviation: None,
            started: Instant::now(),
            start_bytes: None,
            outgrows: false,
            lost_ns: 0,
            begun_without,
            orphans: BTreeSet::new(),
            late: BTreeSet::new(),
            endless: None,
        }
    }
}

/// The iteration under way, and what lasts from one to the next.
pub(crate) struct Driver {
    pub(crate) residency: Residency,
    pub(crate) programs: Vec<Program>,
    iteration: Iteration,
    /// What came before may have left these away; none where it was not known.
    left_before: Option<Vec<Entry>>,
    /// What follows what ends, or ended last.
    follows: Follows,
    /// What the iteration before, if it was recorded, knew the storages as that it left.
    survivors: HashMap<Entry, Local>,
    /// What programs call the storages that others leave them.
    legacies: Legacies,
    /// Why operators are refused.
    pub(crate) refusal: Option<String>,
    /// Whether anything may be recomputed, so that every operator's recipe is kept while nothing is planned.
    pub(crate) may_recompute: bool,
    /// Whether it is under a plan too, whatever that wants.
    pub(crate) keeps_all_recipes: bool,
}

impl Driver {
    pub(crate) fn new(residency: Residency) -> Self {
        Driver {
            residency,
            programs: Vec::new(),
            // None begins before it is said what is wanted of it.
            iteration: Iteration::begin(None, Wanted::PRELUDE, Default::default()),
            left_before: Some(Vec::new()),
            follows: Follows::Unheard,
            survivors: HashMap::new(),
            legacies: Legacies::default(),
            refusal: None,
            may_recompute: false,
            keeps_all_recipes: false,
        }
    }

    /// Starts an iteration; `leader` is the program that it is expected to be.
    pub(crate) fn begin(&mut self, leader: Option<usize>, wanted: Wanted) -> Result<(), Fault> {
        self.absorb_deaths()?;
        self.legacies.forget_dead(|entry| self.residency.get(entry).is_none());
        self.residency.begin();
        for program in self.programs.iter_mut().filter(|_| !wanted.is_prelude) {
            program.begin(self.residency.reactive.line_bytes);
            let names = self.legacies.of(program.name);
            program.tell(names);
        }
        self.residency.expect_at_most(self.programs.iter().map(Program::most_bytes).max().unwrap_or(0));
        if self.follows == Follows::Unheard {
            self.left_before = Some(Vec::new());
        }
        // Kept for the room that they have.
        let mut makers = std::mem::take(&mut self.iteration.makers);
        makers.clear();
        self.iteration = Iteration { makers, ..Iteration::begin(leader, wanted, self.residency.away()) };
        let may_lead = |leader: usize| !wanted.strictly || self.programs[leader].is_bound();
        self.iteration.acts = wanted.act && leader.is_some_and(may_lead);
        let survivors = if wanted.is_prelude { HashMap::new() } else { std::mem::take(&mut self.survivors) };
        self.iteration.recording = wanted.record.has_operators().then(|| self.begin_recording(&survivors));
        shim::time_on_device(match wanted.record {
            Record::Nothing => DeviceTiming::Nothing,
            Record::Makespan | Record::Program => DeviceTiming::Makespan,
            Record::Times | Record::Whole => DeviceTiming::Operators,
        });
        shim::reset_peak();
        Ok(())
    }

    /// Takes down what is there when the iteration begins; the one before called them `survivors`.
    fn begin_recording(&self, survivors: &HashMap<Entry, Local>) -> Recording {
        let known = self.residency.iter().map(|(entry, live)| {
            (entry, (survivors.get(&entry).copied(), RawStorage { bytes: live.bytes, locked: live.locked }))
        });
        let mut recording = Recording::begin(known.collect(), self.iteration.started);
        let (away, leaving) = &self.iteration.begun_without;
        if !(away.is_empty() && leaving.is_empty()) {
            recording.pressed();
        }
        recording
    }

    /// Tells everyone which storages have died.
    fn absorb_deaths(&mut self) -> Result<(), Fault> {
        self.residency.absorb_freed()?;
        self.tell_deaths();
        Ok(())
    }

    fn tell_deaths(&mut self) {
        let Driver { residency, programs, iteration: Iteration { recording, orphans, .. }, .. } = self;
        if !residency.have_died() {
            return;
        }
        for (entry, bytes) in residency.drain_died() {
            if orphans.remove(&entry) {
                continue;
            }
            programs.iter_mut().for_each(|program| program.freed(entry, bytes));
            if let Some(recording) = recording {
                recording.freed(entry);
            }
        }
    }

    /// Storages that the program has let go of, though a dropped one keeps them alive: dead to recording and programs.
    fn tell_orphans(&mut self) -> Result<(), Fault> {
        match self.residency.held().is_empty() {
            true => Ok(()),
            false => self.look_for_orphans(),
        }
    }

    #[inline(never)]
    fn look_for_orphans(&mut self) -> Result<(), Fault> {
        let late = std::mem::take(&mut self.iteration.late);
        let mut suspects = late.clone();
        // What is recorded of a program that nobody knows says when each of them goes. Known ones ask for no more than what should be
        // gone by now: there may be thousands.
        let asks_all = self.iteration.recording.is_some() && self.iteration.leader.is_none();
        if asks_all {
            suspects.extend(self.residency.held());
        } else {
            let matching = self.programs.iter().filter(|program| program.matches());
            suspects.extend(matching.flat_map(Program::overdue).map(|(_, entry)| entry));
        }
        for entry in suspects {
            let was_told = self.iteration.orphans.contains(&entry);
            if (was_told && !late.contains(&entry)) || !self.residency.held().contains(&entry) {
                continue;
            }
            if !shim::is_orphan(entry)? {
                if !asks_all {
                    self.iteration.late.insert(entry);
                }
                continue;
            }
            if !was_told {
                if let Some(recording) = &mut self.iteration.recording {
                    recording.freed(entry);
                }
                let bytes = self.residency.get(entry).map_or(0, |live| live.bytes);
                self.programs.iter_mut().for_each(|program| program.freed(entry, bytes));
                self.iteration.orphans.insert(entry);
            }
            if !self.residency.relinquish(entry)? {
                self.iteration.late.insert(entry);
            }
            // What comes next may have been made from it.
            self.absorb_deaths()?;
        }
        Ok(())
    }

    /// An operator is about to run.
    fn arrive(&mut self, operator: &RawOperator) -> Result<(), Fault> {
        let arrived = self.iteration.recording.is_some().then(Instant::now);
        self.absorb_deaths()?;
        // A program that is followed is asked what it lets go of.
        let is_followed = self.followed().is_some();
        if self.residency.hold_near(is_followed)? {
            self.absorb_deaths()?;
        }
        self.tell_orphans()?;
        if self.iteration.start_bytes.is_none() {
            self.starts();
        }
        let start_bytes = self.start_bytes();
        if let (Some(recording), Some(arrived)) = (&mut self.iteration.recording, arrived) {
            recording.arrive(arrived, start_bytes);
        }
        self.iteration.lost_ns = 0;
        self.ask_programs(|program| program.check(operator));
        self.find_again(operator);
        Ok(())
    }

    /// The first operator is about to run.
    #[cold]
    fn starts(&mut self) {
        let bytes = self.residency.bytes_if_resident();
        self.iteration.start_bytes = Some(bytes);
        self.programs.iter_mut().for_each(|program| program.ladder.starts_with(bytes));
        let line_bytes = self.residency.reactive.line_bytes;
        self.iteration.outgrows =
            self.iteration.leader.is_some_and(|leader| !self.programs[leader].fits_from(bytes, line_bytes));
    }

    /// What was away when its operator arrived is back: only now can it be seen whether it was filled in past the
    /// dispatcher.
    fn look_for_filled(&mut self, operator: &RawOperator) -> Result<(), Fault> {
        for entry in self.residency.find_filled(operator.accesses())? {
            if let Some(recording) = &mut self.iteration.recording {
                recording.filled(entry);
            }
            self.ask_programs(|program| program.filled(entry));
        }
        Ok(())
    }

    /// Whether anything may have to be dropped, whatever the plan says: there is more than it was made for, or what it keeps could not all
    /// be swapped, should the program depart from it.
    fn may_drop_anything(&self, program: &Program) -> bool {
        self.iteration.outgrows || program.fit() == Fit::Beyond || !self.residency.can_rely_on_swaps()
    }

    /// What begins goes on until an iteration of the loop is found, which may be never.
    pub(crate) fn has_no_end(&mut self) {
        self.iteration.endless = Some(false);
    }

    /// Whether an operator writes what another iteration would begin with.
    fn updates(&self, operator: &RawOperator) -> bool {
        self.iteration.endless == Some(true)
            && operator.accesses().iter().any(|access| access.mode().writes())
            && shim::phase() == Phase::Update
    }

    fn wish(&self, operator: &RawOperator) -> Wish {
        let wants_recipe = self.keeps_all_recipes
            || match self.followed() {
                Some(program) => program.wants_recipe() || self.may_recompute && self.may_drop_anything(program),
                None => self.may_recompute,
            };
        let recipe = wants_recipe && !self.updates(operator);
        let watch = recipe || self.iteration.recording.is_some() && self.iteration.wanted.record != Record::Times;
        // What an operator costs that is known stands in its trace.
        let costs_wanted = recipe && self.iteration.leader.is_none();
        let times = costs_wanted || self.iteration.recording.is_some() || self.residency.events.is_on();
        Wish { recipe, watch, times }
    }

    /// What an operator took that has run.
    fn cost_ns(&self, operator: &RawOperator) -> u64 {
        match self.iteration.leader {
            Some(leader) if !operator.is_timed() => self.programs[leader].cost_ns(),
            _ => (operator.end_ns - operator.start_ns).saturating_sub(self.iteration.lost_ns),
        }
    }

    /// An operator has run.
    fn ran(&mut self, operator: &RawOperator, written: &[Written]) -> Result<(), Fault> {
        if operator.created().iter().any(|created| self.residency.has_died_untold(created.entry)) {
            // It has the number of one that died while room was made for it.
            self.tell_deaths();
        }
        self.residency.record(operator, written);
        let recipe = operator.take_recipe().filter(|_| operator.is_replayable());
        let maker = recipe.map(|recipe| self.residency.keep(recipe, operator, written, self.cost_ns(operator)));
        let maker = maker.transpose()?;
        if self.residency.events.is_on() {
            self.residency.events.operator(operator.name, operator.end_ns - operator.start_ns, shim::live_bytes());
        }
        if let Some(recording) = &mut self.iteration.recording {
            recording.ran(operator, self.iteration.lost_ns);
        }
        if self.iteration.endless == Some(false) && shim::phase() == Phase::Backward {
            self.iteration.endless = Some(true);
        }
        let nth = self.iteration.makers.len();
        self.ask_programs(|program| program.ran(operator, nth));
        if self.iteration.leader.is_some() || self.iteration.lost.is_some() {
            self.iteration.makers.push(maker);
        } else {
            // Nobody leads any more, or will.
            self.residency.prune();
        }
        Ok(())
    }

    /// The iteration ends: what goes on is not what ran.
    fn settle_end(&mut self) {
        self.ask_programs(|program| if program.is_over() { Ok(()) } else { Err(program.ends_early()) });
    }

    /// The next dropped storage to restore at the iteration's end.
    fn next_dropped(&self) -> Option<Rebuild> {
        self.residency.dropped.first().map(|&version| Rebuild::of(version))
    }

    /// Brings back all that the slow tier holds and that is not left there.
    fn fetch_all(&mut self) -> Result<(), Fault> {
        let absent = |place: &Place| !matches!(place, Place::Resident | Place::Dropped);
        let returns = |live: &Live| absent(&live.place) && !live.is_left_away;
        let entries: Vec<Entry> =
            self.residency.iter().filter(|(_, live)| returns(live)).map(|(entry, _)| entry).collect();
        entries.into_iter().try_for_each(|entry| self.residency.fetch(entry))
    }

    /// Something ends that is not the last of what is listened to: what its plan leaves away is left so, and what it found away and did
    /// without, where it is a prelude.
    fn leave_away(&mut self) {
        let Driver { residency, programs, iteration: Iteration { leader, wanted, .. }, .. } = self;
        let program = leader.map(|leader| &programs[leader]).filter(|program| program.is_complete());
        let stays = |entry| program.is_some_and(|program| program.stays(entry));
        residency.leave_away(|entry, was_left| if wanted.is_prelude { was_left } else { stays(entry) });
    }

    /// The program ended at `left`, and everything was restored at `ended`.
    fn finish(&mut self, left: Instant, ended: Instant) -> Result<Ended, Fault> {
        self.residency.tidy_up()?;
        self.residency.check_at_end();
        self.residency.forget_makers();
        let is_it = |program: &Program| program.matches() && program.is_complete();
        let leader = self.iteration.leader.filter(|&leader| is_it(&self.programs[leader]));
        let program = leader.or_else(|| self.programs.iter().position(is_it));
        if !self.iteration.wanted.is_prelude {
            let before = self.left_before.take();
            if let Some(program) = program.map(|program| &mut self.programs[program]) {
                before.iter().for_each(|left| program.comes_after(left, &self.iteration.begun_without.1));
                program.comes_before(self.follows);
                self.left_before = Some(program.leavable().map(|(_, entry)| entry).collect());
            }
            self.hand_over(program);
        }
        let peak_bytes = shim::peak_bytes();
        let mut report = std::mem::take(&mut self.residency.report);
        report.makespan_ns = (ended - self.iteration.started).as_nanos() as u64;
        report.peak_bytes = peak_bytes;
        report.over_budget_bytes = peak_bytes.saturating_sub(self.residency.reactive.budget_bytes);
        let planned = program.map(|program| &self.programs[program]).filter(|program| self.acts_on(program));
        report.followed = self.iteration.deviation.is_none() && planned.is_some();
        let ran_short = matches!(self.iteration.deviation, Some(Deviation::RanShort(_)));
        report.deviation =
            self.iteration.deviation.take().map(|(Deviation::RanShort(what) | Deviation::Other(what))| what);
        report.course = match program.map(|program| self.programs[program].scheduled()) {
            Some(_) if !self.iteration.acts => Course::Watched,
            Some(scheduled) if !scheduled.schedule.is_idle() => Course::Planned,
            Some(scheduled) if !scheduled.exceeds_budget() => Course::Declined,
            None if self.has_resumed() => Course::Resumed,
            _ => Course::Reactive,
        };
        // Where sizes are others than in the plan, or numbers live for longer, or other storages were away, nothing was predicted.
        let is_as_planned = |program: &Program| {
            let ends_alike = self.follows != Follows::Unheard || !program.leaves_any();
            let stands_alike = program.begins_without(&self.iteration.begun_without) && ends_alike;
            program.fit() == Fit::Exact && !program.differs_in_small() && stands_alike
        };
        let exact = planned.filter(|program| is_as_planned(program));
        let prediction = exact.and_then(|program| program.scheduled().prediction);
        report.predicted =
            prediction.map(|seen| Predicted { makespan_ns: seen.makespan_ns, peak_bytes: seen.peak_bytes });
        self.residency.events.iteration(self.iteration.started);
        let mut recorded = self.iteration.recording.take();
        if let Some(recording) = &mut recorded
            && (report.reactive_evictions > 0 || report.offloaded_bytes > 0 || report.reruns > 0)
        {
            recording.pressed();
        }
        let on_device = match self.iteration.wanted.record {
            Record::Nothing => Ok(None),
            _ => shim::take_device_times(recorded.as_ref().map_or(0, Recording::operators)),
        };
        // What could not be timed is no recording.
        let recorded = recorded.filter(|_| on_device.is_ok());
        let on_device = on_device.ok().flatten();
        let on_device_ns = on_device.as_ref().map(|on_device| on_device.makespan_ns);
        let recorded = recorded.map(|recording| recording.end(left, peak_bytes, on_device));
        self.iteration.leader = None;
        Ok(Ended { report, recorded, on_device_ns, program, ran_short, was_prelude: self.iteration.wanted.is_prelude })
    }

    /// Whether a plan was carried out that was found again after other operators than its program's.
    fn has_resumed(&self) -> bool {
        let program = self.iteration.leader.or(self.iteration.lost).map(|leader| &self.programs[leader]);
        program.is_some_and(|program| program.has_gaps() && !program.scheduled().schedule.is_idle())
    }

    /// Programs take down what they call the storages that the iteration left, which was `program`.
    fn hand_over(&mut self, program: Option<usize>) {
        let Driver { programs, legacies, .. } = self;
        programs.iter().filter(|program| program.is_misled()).for_each(|program| legacies.distrust(program.name));
        if let Some(heir) = program.map(|program| &programs[program]) {
            legacies.learn(heir.name, heir.found());
        }
        // One that is alone is its own heir: what its trace does not say of that, because none of it came right before another, is learned.
        let left = program.map(|program| &programs[program]);
        legacies.leave(left.map(|program| Left { by: program.name, entries: program.entries().to_vec() }));
        for (index, followed) in programs.iter_mut().enumerate() {
            followed.hand_over(program == Some(index));
        }
    }

    /// What there are plans for, by the places of programs and of their rungs.
    pub(crate) fn rungs(&self) -> impl Iterator<Item = ((usize, usize), &Rung)> {
        let programs = self.programs.iter().enumerate();
        programs.flat_map(|(place, program)| {
            program.ladder.rungs().iter().enumerate().map(move |(rung, it)| ((place, rung), it))
        })
    }

    /// Lets go of the rung that was not seen for longest, where there are more than `most`, and of its program with the last one.
    /// The largest of several stays: it is what keeps those that come from being larger than any. Programs may have other
    /// places then.
    pub(crate) fn make_way(&mut self, most: usize) {
        if self.rungs().count() <= most {
            return;
        }
        let is_needed =
            |(program, rung): (usize, usize)| rung > 0 && rung + 1 == self.programs[program].ladder.rungs().len();
        let oldest = self.rungs().filter(|&(place, _)| !is_needed(place)).min_by_key(|(_, rung)| rung.last_seen);
        let Some(((program, rung), _)) = oldest else { return };
        if self.programs[program].ladder.remove(rung) {
            self.legacies.forget(self.programs.swap_remove(program).name);
        }
    }

    /// Lets go of every program.
    pub(crate) fn forget_programs(&mut self) {
        self.programs.clear();
        self.legacies = Legacies::default();
    }

    /// Bytes that would be allocated just now if every storage had its own.
    pub(crate) fn bytes_if_resident(&mut self) -> u64 {
        // What fails here fails again when an operator arrives, which says so.
        let _ = self.absorb_deaths();
        self.residency.bytes_if_resident()
    }

    /// What begins comes after code that nobody listened to: it is an iteration by itself, or the first of a loop, as the last one was
    /// or was not.
    pub(crate) fn come_from_elsewhere(&mut self, is_loop: bool, was_loop: bool) {
        if is_loop {
            // Nobody knows what would be left away; what could not be restored may be.
            (self.follows, self.left_before) = (Follows::Iteration, None);
            self.residency.leave_away(|_, _| true);
        }
        if is_loop != was_loop {
            self.programs.iter_mut().for_each(Program::forget_neighbours);
        }
    }

    /// Whether an operator has arrived.
    pub(crate) fn has_started(&self) -> bool {
        self.iteration.start_bytes.is_some()
    }

    /// Device bytes when the first operator arrived, if everything were resident.
    pub(crate) fn start_bytes(&self) -> u64 {
        self.iteration.start_bytes.unwrap_or_default()
    }

    /// Tells the next recording what this one called the storages that it left.
    pub(crate) fn remember(&mut self, recorded: &RecordedIteration) {
        self.survivors = recorded.locals().clone();
    }
}
