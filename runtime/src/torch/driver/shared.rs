//! The driver as operators reach it, from any thread: what is due is carried out and what they use brought back before they run, and the
//! reruns that this takes are made while nobody holds the driver.

use std::cell::RefCell;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

use super::{Driver, Ended, Wanted};
use crate::torch::lock::Lock;
use crate::torch::program::Follows;
use crate::torch::recompute::{Job, Rebuild};
use crate::torch::residency::{Fault, Restoring, Written};
use crate::torch::session::{Listening, Observer, SessionError, Wish};
use crate::torch::shim::{self, DeviceTiming, Entry, RawOperator};

/// What the lists of an operator hold, as of a fused optimizer's, may be that part of the budget. Where it would be more it is run in
/// pieces, which need not all be there together.
const PIECES: u64 = 16;

/// What the lists of one piece may hold: a power of two, so that the program has the same operators within most other budgets.
fn piece_bytes(budget_bytes: u64) -> u64 {
    (budget_bytes / PIECES).checked_ilog2().map_or(0, |exponent| 1 << exponent)
}

/// The operator that a thread runs.
struct UnderWay {
    /// The iteration, or the part of one, that it arrived in.
    part: u32,
    /// What it is writing over.
    written: Vec<Written>,
}

thread_local! {
    static UNDER_WAY: RefCell<UnderWay> = const { RefCell::new(UnderWay { part: 0, written: Vec::new() }) };
}

/// Books what this thread's operator was writing over. Not where it arrived in an iteration that is over, or in another part of one: an
/// autograd thread's, whose backward pass has failed in another thread, is no part of what runs now.
fn with_written<R>(driver: &mut Driver, book: impl FnOnce(&mut Driver, &[Written]) -> R) -> Option<R> {
    UNDER_WAY
        .with_borrow(|UnderWay { part, written }| (*part == driver.residency.part()).then(|| book(driver, written)))
}

/// The driver as operators reach it: from any thread, never locked while a kernel runs.
pub(crate) struct Shared {
    driver: Lock<Driver>,
    /// Whoever carries out what is due, or brings back what an operator is to use, does it to the end before another thread does, though
    /// the driver is not locked while reruns for that are made. Taken before the driver is locked.
    turn: Lock<()>,
}

impl Shared {
    pub(crate) fn new(driver: Driver) -> Self {
        Shared { driver: Lock::new(driver), turn: Lock::new(()) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Driver> {
        self.driver.lock()
    }

    /// Takes the turn, with the driver locked before and after.
    fn take_turn<'a>(&'a self, driver: MutexGuard<'a, Driver>) -> (MutexGuard<'a, ()>, MutexGuard<'a, Driver>) {
        if let Some(turn) = self.turn.try_lock() {
            return (turn, driver);
        }
        drop(driver);
        (self.turn.lock(), self.lock())
    }

    /// Starts an iteration within `line_bytes`.
    pub(crate) fn begin(&self, leader: Option<usize>, wanted: Wanted, line_bytes: u64) -> Result<(), SessionError> {
        let _turn = self.turn.lock();
        // What an earlier iteration could not restore comes first.
        let restored = self.restore_all(self.lock());
        let mut driver = restored?;
        driver.residency.restoring = Restoring::Nothing;
        driver.residency.reactive.line_bytes = line_bytes;
        driver.residency.reactive.budget_bytes = line_bytes;
        driver.begin(leader, wanted)?;
        drop(driver);
        shim::set_line(line_bytes);
        shim::set_piece(piece_bytes(line_bytes));
        Ok(())
    }

    /// Runs a rerun with the driver unlocked, for its kernel's allocations may need it.
    fn run<'a>(&'a self, driver: MutexGuard<'a, Driver>, job: Job) -> Result<MutexGuard<'a, Driver>, Fault> {
        drop(driver);
        let done = job.run();
        let mut driver = self.lock();
        driver.residency.book(done)?;
        Ok(driver)
    }

    fn rebuild<'a>(
        &'a self,
        mut driver: MutexGuard<'a, Driver>,
        mut rebuild: Rebuild,
    ) -> Result<MutexGuard<'a, Driver>, Fault> {
        if shim::is_capturing() {
            return Err(Fault::Captured);
        }
        let before = driver.residency.reactive.reruns;
        loop {
            let next = match driver.residency.next_job(&mut rebuild) {
                Ok(Some(job)) => self.run(driver, job),
                Ok(None) => {
                    driver.residency.learn(before);
                    return Ok(driver);
                }
                Err(fault) => {
                    driver.residency.abandon(&mut rebuild);
                    return Err(fault);
                }
            };
            driver = match next {
                Ok(driver) => driver,
                Err(fault) => {
                    self.lock().residency.abandon(&mut rebuild);
                    return Err(fault);
                }
            };
        }
    }

    /// Carries out what is due. What cannot be done is no part of the iteration any more: it goes on without its plan.
    fn carry_out<'a>(&'a self, mut driver: MutexGuard<'a, Driver>) -> MutexGuard<'a, Driver> {
        while let Some(job) = driver.carry_out() {
            driver = self.run(driver, job).unwrap_or_else(|fault| {
                let mut driver = self.lock();
                driver.leave_schedule(fault.to_string());
                driver
            });
        }
        driver
    }

    /// Carries out what is due before the operator, and sees to it that it finds what it uses.
    #[inline(never)]
    fn intervene<'a>(
        &'a self,
        driver: MutexGuard<'a, Driver>,
        operator: &RawOperator,
    ) -> Result<MutexGuard<'a, Driver>, Fault> {
        shim::device_interrupted();
        let (_turn, mut driver) = self.take_turn(driver);
        if driver.is_due() {
            driver = self.carry_out(driver);
            if driver.residency.use_at_once(operator.accesses()) {
                return Ok(driver);
            }
        }
        let ready = self.make_ready(driver, operator);
        if let Err(fault) = &ready {
            self.lock().leave_schedule(fault.to_string());
        }
        ready
    }

    /// Sees to it that the operator finds what it uses, where it does not at once. Nothing of that may be evicted from
    /// then on.
    fn make_ready<'a>(
        &'a self,
        mut driver: MutexGuard<'a, Driver>,
        operator: &RawOperator,
    ) -> Result<MutexGuard<'a, Driver>, Fault> {
        let entries: Vec<Entry> = operator.entries().collect();
        driver.residency.begin_wait(operator);
        let prepared = self.prepare(driver, operator, &entries);
        let (mut driver, fault) = match prepared {
            Ok(driver) => (driver, None),
            Err(fault) => (self.lock(), Some(fault)),
        };
        driver.residency.restoring = Restoring::Nothing;
        driver.residency.end_wait(&entries);
        fault.map_or(Ok(driver), Err)
    }

    /// Sees to it that the operator finds what it uses, and nothing is lost by what it writes. Nothing of `entries` may
    /// be evicted from then on.
    ///
    /// What is dropped comes back first, at the expense of anything that can be swapped, the operator's other inputs
    /// included; then what is swapped comes back together. So there is room wherever the operator itself has room.
    fn prepare<'a>(
        &'a self,
        mut driver: MutexGuard<'a, Driver>,
        operator: &RawOperator,
        entries: &[Entry],
    ) -> Result<MutexGuard<'a, Driver>, Fault> {
        driver.look_for_filled(operator)?;
        loop {
            while let Some(version) = driver.residency.first_dropped(entries) {
                driver = self.rebuild(driver, Rebuild::of(version))?;
            }
            while let Some(version) = driver.residency.at_risk(operator.accesses())? {
                // What comes back now must not be dropped again before the write.
                driver.residency.restoring = Restoring::Dropped;
                driver = self.rebuild(driver, Rebuild::of(version))?;
            }
            driver.residency.fetch_together(entries)?;
            if driver.residency.are_resident(entries) && driver.residency.at_risk(operator.accesses())?.is_none() {
                driver.look_for_filled(operator)?;
                driver.residency.begin_use(entries)?;
                driver.residency.free_copies(operator.accesses());
                return Ok(driver);
            }
        }
    }

    /// The driver, told of all that has died by the end of an iteration, or of a part of one: none of that need be restored, nor what a
    /// backward pass that failed had yet to do.
    fn lock_at_end(&self) -> Result<MutexGuard<'_, Driver>, Fault> {
        shim::forget_failed_backward();
        let mut driver = self.lock();
        driver.absorb_deaths()?;
        driver.tell_orphans()?;
        Ok(driver)
    }

    /// Makes resident what a part of an iteration does not leave away for the next, where there is room for that; else what it has
    /// to, if all of a loop is listened to. Whether the part ends.
    pub(crate) fn make_resident(&self, is_loop: bool) -> Result<bool, Fault> {
        let _turn = self.turn.lock();
        let mut driver = self.lock_at_end()?;
        // What is due before an operator that is still to come has to wait for that to be looked at.
        if driver.iteration.leader.is_some_and(|leader| driver.programs[leader].is_complete()) {
            driver = self.carry_out(driver);
        }
        driver.leave_away();
        let leaves = !driver.residency.may_bring_back();
        if leaves && !is_loop {
            driver.residency.leave_away(|_, _| false);
            return Ok(false);
        }
        let restored = self.restore(driver, leaves).map(drop);
        let mut driver = self.lock();
        driver.residency.restoring = Restoring::Nothing;
        if restored.is_err() {
            driver.residency.leave_away(|_, _| false);
        }
        match restored {
            Err(Fault::NoRoom(_)) => Ok(false),
            restored => restored.map(|()| true),
        }
    }

    /// Ends the iteration, or a part of one: everything is restored, within the budget where that can be, but for what is left away for
    /// what `follows`.
    pub(crate) fn end(&self, follows: Follows) -> Result<Ended, Fault> {
        let _turn = self.turn.lock();
        let ended = self.restore_and_finish(follows);
        let mut driver = self.lock();
        driver.residency.restoring = Restoring::Nothing;
        driver.residency.exempt = false;
        driver.residency.reactive.line_bytes = u64::MAX;
        // With the driver locked: whoever makes room meanwhile may draw another line.
        shim::set_line(u64::MAX);
        shim::set_piece(u64::MAX);
        if let Err(fault) = &ended {
            driver.iteration.recording = None;
            driver.leave_schedule(fault.to_string());
        }
        ended
    }

    fn restore_and_finish(&self, follows: Follows) -> Result<Ended, Fault> {
        let left = Instant::now();
        // What is restored is the runtime's.
        shim::time_on_device(DeviceTiming::Nothing);
        let mut driver = self.lock_at_end()?;
        driver.follows = follows;
        driver.settle_end();
        driver.residency.settle_fresh();
        let mut driver = self.carry_out(driver);
        match follows {
            Follows::Unheard => driver.residency.leave_away(|_, _| false),
            Follows::Part => {}
            Follows::Iteration => driver.leave_away(),
        }
        let leaves = follows == Follows::Iteration && !driver.residency.may_bring_back();
        let mut driver = match self.restore(driver, leaves) {
            Err(Fault::NoRoom(_)) => {
                let mut driver = self.lock();
                driver.residency.exempt = true;
                self.restore(driver, follows == Follows::Iteration)?
            }
            restored => restored?,
        };
        let ended = Instant::now();
        driver.absorb_deaths()?;
        driver.finish(left, ended)
    }

    /// Makes room in the middle of an operator.
    fn make_room<T>(&self, make: impl FnOnce(&mut Driver) -> Result<T, Fault>) -> Result<T, String> {
        let started = Instant::now();
        let mut driver = self.lock();
        let made = make(&mut driver);
        driver.iteration.lost_ns += started.elapsed().as_nanos() as u64;
        made.map_err(|fault| fault.to_string())
    }

    /// Makes everything resident that is not left away. What is in a slow tier is left there, too, if it `leaves`: what is dropped
    /// cannot be rebuilt in another iteration.
    fn restore<'a>(
        &'a self,
        mut driver: MutexGuard<'a, Driver>,
        leaves: bool,
    ) -> Result<MutexGuard<'a, Driver>, Fault> {
        if leaves {
            driver = self.rebuild_dropped(driver)?;
            driver.residency.leave_away(|_, _| true);
        }
        self.restore_all(driver)
    }

    /// Rebuilds what is dropped, at the expense of what can be swapped.
    fn rebuild_dropped<'a>(&'a self, mut driver: MutexGuard<'a, Driver>) -> Result<MutexGuard<'a, Driver>, Fault> {
        driver.residency.restoring = Restoring::Dropped;
        while let Some(rebuild) = driver.next_dropped() {
            driver = self.rebuild(driver, rebuild)?;
        }
        Ok(driver)
    }

    /// Makes everything resident. Where bytes run out meanwhile, dropped storages come back first, at the expense of
    /// others that are swapped; those come back at nobody's expense.
    pub(crate) fn restore_all<'a>(
        &'a self,
        mut driver: MutexGuard<'a, Driver>,
    ) -> Result<MutexGuard<'a, Driver>, Fault> {
        loop {
            driver = self.rebuild_dropped(driver)?;
            driver.residency.restoring = Restoring::Swapped;
            driver.residency.absorb_freed()?;
            driver.fetch_all()?;
            if driver.residency.dropped.is_empty() {
                return Ok(driver);
            }
        }
    }
}

/// An iteration under way: operators of this thread are driven until it is closed or dropped.
pub(crate) struct Open {
    shared: Arc<Shared>,
    listening: Option<Listening>,
}

impl Open {
    /// Starts an iteration within `line_bytes`.
    pub(crate) fn begin(
        listening: Listening,
        shared: &Arc<Shared>,
        leader: Option<usize>,
        wanted: Wanted,
        line_bytes: u64,
    ) -> Result<Self, SessionError> {
        shared.begin(leader, wanted, line_bytes)?;
        Ok(Open { shared: Arc::clone(shared), listening: Some(listening) })
    }

    /// Ends it.
    pub(crate) fn close(mut self) -> Result<Ended, SessionError> {
        if self.is_inherited() {
            return Err(SessionError::Forked);
        }
        let ended = self.shared.end(Follows::Unheard);
        self.listening = None;
        Ok(ended?)
    }

    /// Whether it is that of the process that this one was forked from.
    fn is_inherited(&self) -> bool {
        self.listening.as_ref().is_some_and(Listening::is_inherited)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        // The iteration panicked: its storages are restored all the same.
        if self.listening.is_some()
            && !self.is_inherited()
            && let Err(fault) = self.shared.end(Follows::Unheard)
        {
            eprintln!("plimsoll: storages could not be restored: {fault}");
        }
    }
}

impl Observer for Shared {
    fn before(&self, operator: &RawOperator) -> Result<Wish, String> {
        let mut driver = self.lock();
        if let Some(refusal) = &driver.refusal {
            return Err(refusal.clone());
        }
        driver.arrive(operator).map_err(|fault| fault.to_string())?;
        if driver.is_due() || !driver.residency.use_at_once(operator.accesses()) {
            driver = self.intervene(driver, operator).map_err(|fault| fault.to_string())?;
        }
        let wish = driver.wish(operator);
        // Until the operator has run the lock is only taken by who makes room, and what is being written is no longer
        // what anything could be rebuilt from.
        let begun = UNDER_WAY.with_borrow_mut(|UnderWay { part, written }| {
            *part = driver.residency.part();
            driver.residency.begin_writes(operator.accesses(), wish.recipe, written)
        });
        if let Err(fault) = begun {
            driver.residency.end_use(operator.entries());
            driver.leave_schedule(fault.to_string());
            return Err(fault.to_string());
        }
        Ok(wish)
    }

    fn after(&self, operator: &RawOperator) {
        let mut driver = self.lock();
        let rarely = driver.iteration.leader.is_some() && !operator.is_timed();
        driver.residency.tick(rarely);
        driver.residency.end_use(operator.entries());
        match with_written(&mut driver, |driver, written| driver.ran(operator, written)) {
            Some(Ok(())) => {}
            // The operator has run; what cannot be booked is refused from here on.
            Some(Err(fault)) => _ = driver.refusal.get_or_insert(fault.to_string()),
            None => drop(operator.take_recipe()),
        }
    }

    fn failed(&self, operator: &RawOperator) {
        let mut driver = self.lock();
        driver.residency.tick(false);
        driver.residency.end_use(operator.entries());
        if with_written(&mut driver, |driver, written| driver.residency.end_writes(written)).is_none() {
            return;
        }
        if let Some(recording) = &mut driver.iteration.recording {
            recording.failed();
        }
        if let Some(leader) = driver.iteration.leader {
            let why = driver.programs[leader].failed();
            driver.leave_schedule(why);
        }
    }

    fn before_bystander(&self, operator: &RawOperator) -> Result<(), String> {
        let mut driver = self.lock();
        if !driver.residency.use_at_once(operator.accesses()) {
            let (_turn, unready) = self.take_turn(driver);
            driver = self.make_ready(unready, operator).map_err(|fault| fault.to_string())?;
        }
        let mut written = Vec::new();
        let begun = driver.residency.begin_writes(operator.accesses(), false, &mut written);
        // It may outlast the iteration, and what the iteration knew of versions.
        driver.residency.end_writes(&written);
        if begun.is_err() {
            driver.residency.end_use(operator.entries());
        }
        begun.map_err(|fault| fault.to_string())
    }

    fn after_bystander(&self, operator: &RawOperator) {
        let mut driver = self.lock();
        driver.residency.tick(false);
        driver.residency.end_use(operator.entries());
        driver.residency.lock_used(operator.accesses());
    }

    fn pressed(&self, bytes: u64) -> Result<(), String> {
        self.make_room(|driver| {
            driver.residency.release_for(bytes)?;
            if !driver.residency.has_room(bytes) {
                driver.runs_short();
            }
            driver.residency.relieve(bytes)
        })
    }

    fn refused(&self, bytes: u64) -> Result<bool, String> {
        self.make_room(|driver| {
            driver.runs_short();
            driver.residency.relieve_device(bytes)
        })
    }
}
