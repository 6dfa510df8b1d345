//! Drops the bytes of storages, and makes them again by rerunning what made them.
//!
//! No kernel runs while the table is locked: a rerun is handed out as a [`Job`], for the kernel's own allocations may come
//! back for room, and booked when it has run.

use std::time::Instant;

use super::ancestry::{MakerId, VersionId};
use super::residency::{Fault, Place, Residency};
use super::shim::{self, AllocateError, Entry, Recipe};

/// A rerun, to be run with no lock held.
pub(crate) struct Job {
    maker: MakerId,
    recipe: Recipe,
    inputs: Vec<Entry>,
    outputs: usize,
    /// Inputs that stand in their storages.
    locked: Vec<Entry>,
    /// Whether what nobody waits for is released at once, as opposed to when a schedule says so.
    is_tidy: bool,
}

/// What a rerun gave.
pub(crate) struct Done {
    job: Job,
    results: Result<Vec<Entry>, AllocateError>,
    started: Instant,
    elapsed_ns: u64,
}

impl Job {
    pub(crate) fn run(self) -> Done {
        let started = Instant::now();
        let mut results = vec![Entry::NONE; self.outputs];
        let ran = shim::rerun(&self.recipe, &self.inputs, &mut results);
        Done { job: self, results: ran.map(|()| results), started, elapsed_ns: started.elapsed().as_nanos() as u64 }
    }
}

/// A version being made again, and what waits for that.
struct Frame {
    version: VersionId,
    maker: Option<MakerId>,
    /// Storages that its maker reads, as [`Residency::begin_await`] told them.
    awaited: Vec<(Entry, u64)>,
    /// What was made for its maker, and is kept until that has run. What else stands beside the program may go when bytes
    /// run out, and is then made for it.
    made: Vec<VersionId>,
    /// What is to be made for its maker, and by which, the next one last. All of it in the order in which the program did:
    /// what an operator wrote over is read before, and no more of it is there at once than there was then.
    agenda: Vec<(VersionId, MakerId)>,
}

impl Frame {
    fn of(version: VersionId) -> Self {
        Frame { version, maker: None, awaited: Vec::new(), made: Vec::new(), agenda: Vec::new() }
    }
}

/// Reruns on the way to one version. An explicit stack, not recursion: chains can be as long as the iteration.
pub(crate) struct Rebuild {
    frames: Vec<Frame>,
}

impl Rebuild {
    pub(crate) fn of(version: VersionId) -> Self {
        Rebuild { frames: vec![Frame::of(version)] }
    }
}

impl Residency {
    /// Whether a resident storage may be dropped.
    pub(crate) fn can_drop(&mut self, entry: Entry) -> bool {
        let version = match self.get(entry) {
            Some(live) if matches!(live.place, Place::Resident) && live.is_idle() => live.version,
            _ => None,
        };
        version.is_some_and(|version| self.ancestry.can_drop(version))
    }

    /// Releases device bytes that a rerun can restore.
    pub(crate) fn drop_bytes(&mut self, entry: Entry) -> Result<(), Fault> {
        self.true_bytes(entry)?;
        let version = self.version_of(entry)?;
        if self.look_whether_filled(entry, version)? {
            return Err(Fault::Broken(format!("{entry:?} was filled in outside the dispatcher")));
        }
        if self.give_up(entry, version)? {
            self.absorb_freed()?;
            if self.get(entry).is_none() {
                // Nothing but dropped storages had kept it.
                return Ok(());
            }
        }
        // They are handed out again in the order of one stream, and others may still read them.
        shim::join_streams()?;
        shim::park(entry)?;
        self.free_copy(entry);
        if let Err(fault) = self.count_as_dropped(entry, version) {
            shim::unpark(entry)?;
            return Err(fault);
        }
        shim::release(entry)?;
        Ok(())
    }

    /// Holds what a storage is to be rebuilt from, whose bytes go now. Where that is gone, nothing changes.
    pub(super) fn count_as_dropped(&mut self, entry: Entry, version: VersionId) -> Result<(), Fault> {
        let before = self.put(entry, Place::Dropped)?;
        loop {
            self.ancestry.drop_bytes(version);
            self.dropped.insert(version);
            let Err(fault) = self.take_custody() else { return Ok(()) };
            // Something that was to be held has died: it may do without.
            self.dropped.remove(&version);
            self.ancestry.restored(version);
            self.take_custody()?;
            if !self.ancestry.can_drop(version) {
                self.put(entry, before)?;
                return Err(fault);
            }
        }
    }

    /// A storage that is about to be dropped is not held for the sake of others any more: what it is made from is. Whether it was held.
    pub(super) fn give_up(&mut self, entry: Entry, version: VersionId) -> Result<bool, Fault> {
        let is_held = self.ancestry.is_held(version);
        if is_held && !self.hold_above(version)? {
            return Err(Fault::Broken(format!("what {entry:?} is made from is gone")));
        }
        Ok(is_held)
    }

    /// Whether what `entry` holds was filled in past the dispatcher. Then it is made again no more: a rerun would bring back what the
    /// operator made, not what the program has put there since.
    pub(super) fn look_whether_filled(&mut self, entry: Entry, version: VersionId) -> Result<bool, Fault> {
        let is_filled = shim::is_filled(entry, false)?;
        if is_filled {
            self.ancestry.becomes_root(version);
        }
        Ok(is_filled)
    }

    /// The entry whose bytes are `version` now.
    pub(crate) fn at_hand(&self, version: VersionId) -> Option<Entry> {
        let seen = self.ancestry.version(version);
        let in_place =
            || seen.is_current && self.get(seen.entry).is_some_and(|live| matches!(live.place, Place::Resident));
        seen.beside.or_else(|| in_place().then_some(seen.entry))
    }

    /// The next rerun on the way to what `rebuild` makes; none once it is there.
    pub(crate) fn next_job(&mut self, rebuild: &mut Rebuild) -> Result<Option<Job>, Fault> {
        loop {
            if rebuild.frames.first().is_some_and(|goal| !self.ancestry.version(goal.version).is_current) {
                // The program has let go of it meanwhile.
                self.abandon(rebuild);
                return Ok(None);
            }
            let is_goal = rebuild.frames.len() == 1;
            let Some(top) = rebuild.frames.last_mut() else { return Ok(None) };
            let version = top.version;
            let is_there = if is_goal { self.is_reached(version)? } else { self.at_hand(version).is_some() };
            if is_there {
                let frame = rebuild.frames.pop().expect("looked at above");
                self.close(frame)?;
                continue;
            }
            let seen = self.ancestry.version(version);
            let entry = seen.entry;
            if seen.is_current && !matches!(self.live(entry)?.place, Place::Dropped) {
                self.fetch(entry)?;
                continue;
            }
            let maker = match top.maker {
                Some(maker) => maker,
                None => self.open(top)?,
            };
            let next = match top.agenda.last() {
                Some(&(version, _)) if !self.ancestry.is_missing(version) => {
                    self.settle(top)?;
                    continue;
                }
                // Bytes ran out, and something that was made for it went.
                Some(&(version, next)) if !self.ancestry.is_ready(next) => {
                    rebuild.frames.push(Frame::of(version));
                    continue;
                }
                Some(&(_, next)) => next,
                None if !self.ancestry.is_ready(maker) => {
                    self.fill_agenda(top, maker)?;
                    continue;
                }
                None => maker,
            };
            // What was made meanwhile may have been swapped to make room for the rest, which takes room itself.
            let inputs = self.current_inputs(next);
            self.fetch_together(&inputs)?;
            if self.are_resident(&inputs) && self.ancestry.is_ready(next) {
                return self.job(next, true).map(Some);
            }
        }
    }

    /// Whether the goal of a rebuild is in its storage. What stands beside the program since it was made for a rerun, the
    /// storage having been dropped only later, is put there, unless another thread's rerun reads it.
    fn is_reached(&mut self, goal: VersionId) -> Result<bool, Fault> {
        let seen = self.ancestry.version(goal);
        if seen.is_dropped
            && seen.wanted == 0
            && let Some(twin) = self.take_beside(goal)
        {
            self.restore(goal, twin)?;
            self.take_custody()?;
        }
        Ok(!self.ancestry.version(goal).is_dropped && self.at_hand(goal).is_some())
    }

    /// The storages that still hold what `maker` reads, where it does not stand beside the program.
    fn current_inputs(&self, maker: MakerId) -> Vec<Entry> {
        let inputs = self.ancestry.inputs(maker).iter().flatten().map(|&input| self.ancestry.version(input));
        inputs.filter(|input| input.is_current && input.beside.is_none()).map(|input| input.entry).collect()
    }

    /// Marks what a rerun will read.
    fn open(&mut self, frame: &mut Frame) -> Result<MakerId, Fault> {
        let maker = self.ancestry.version(frame.version).maker;
        let maker = maker.ok_or_else(|| Fault::Broken(format!("{:?} is a lost root", frame.version)))?;
        frame.maker = Some(maker);
        if self.rebuilds == 0 {
            self.given_up.clear();
        }
        self.rebuilds += 1;
        let inputs: Vec<VersionId> = self.ancestry.inputs(maker).iter().flatten().copied().collect();
        for input in inputs {
            let seen = self.ancestry.version(input);
            let (entry, is_current) = (seen.entry, seen.is_current);
            if is_current {
                frame.awaited.push(self.begin_await(entry)?);
            }
        }
        Ok(maker)
    }

    /// Writes down what must be made before a frame's maker can run.
    fn fill_agenda(&mut self, frame: &mut Frame, maker: MakerId) -> Result<(), Fault> {
        frame.agenda = self.ancestry.missing(maker);
        frame.agenda.iter().for_each(|&(_, maker)| self.ancestry.expect(maker, true));
        match frame.agenda[..] {
            [] => Err(Fault::Broken(format!("what {:?} is made from is lost", frame.version))),
            _ => Ok(()),
        }
    }

    /// What comes next on a frame's agenda is there.
    fn settle(&mut self, frame: &mut Frame) -> Result<(), Fault> {
        let Some((version, maker)) = frame.agenda.pop() else { return Ok(()) };
        self.ancestry.expect(maker, false);
        if frame.maker.is_some_and(|reader| self.ancestry.inputs(reader).contains(&Some(version))) {
            frame.made.push(version);
            self.ancestry.version_mut(version).wanted += 1;
        }
        self.tidy_inputs(maker)
    }

    /// Unmarks what a rerun read, and releases what nothing will read again.
    fn close(&mut self, frame: Frame) -> Result<(), Fault> {
        let Some(maker) = frame.maker else { return Ok(()) };
        self.rebuilds -= 1;
        self.end_await(&frame.awaited);
        for &made in &frame.made {
            self.ancestry.version_mut(made).wanted -= 1;
        }
        for &(_, maker) in &frame.agenda {
            self.ancestry.expect(maker, false);
        }
        let given_up = frame.agenda.into_iter().map(|(_, maker)| maker);
        given_up.chain([maker]).try_for_each(|maker| self.tidy_inputs(maker))
    }

    /// Unmarks everything: the rebuild cannot go on, or nobody wants it any more.
    pub(crate) fn abandon(&mut self, rebuild: &mut Rebuild) {
        for frame in rebuild.frames.drain(..).rev() {
            // What cannot be released now is released with the iteration.
            let _ = self.close(frame);
        }
    }

    /// Releases what a maker read and nothing will read again.
    fn tidy_inputs(&mut self, maker: MakerId) -> Result<(), Fault> {
        let inputs: Vec<VersionId> = self.ancestry.inputs(maker).iter().flatten().copied().collect();
        inputs.into_iter().try_for_each(|input| self.tidy(input))
    }

    /// Releases a version beside the program that no rerun wants and no dropped storage will be rebuilt from.
    fn tidy(&mut self, version: VersionId) -> Result<(), Fault> {
        let seen = self.ancestry.version(version);
        let has_use = seen.is_wanted() || (self.ancestry.is_anchored(version) && !seen.is_current);
        if seen.beside.is_some() && !has_use { self.release(version) } else { Ok(()) }
    }

    /// A rerun of `maker`, all of whose inputs must be at hand. They are locked until it is booked.
    pub(crate) fn job(&mut self, maker: MakerId, is_tidy: bool) -> Result<Job, Fault> {
        let recipe = self.ancestry.maker(maker).recipe.clone();
        let (outputs, read) = (self.ancestry.outputs(maker).len(), self.ancestry.inputs(maker).to_vec());
        let mut inputs = Vec::with_capacity(read.len());
        let mut locked = Vec::new();
        for version in &read {
            inputs.push(match *version {
                None => Entry::NONE,
                Some(version) => {
                    let entry = self.at_hand(version);
                    let entry = entry.ok_or_else(|| Fault::Broken(format!("{version:?} is not there")))?;
                    if self.ancestry.version(version).beside.is_none() {
                        locked.push(entry);
                    }
                    entry
                }
            });
        }
        for &version in read.iter().flatten() {
            self.ancestry.version_mut(version).wanted += 1;
        }
        for &entry in &locked {
            self.live_mut(entry)?.users += 1;
        }
        self.rebuilds += 1;
        Ok(Job { maker, recipe, inputs, outputs, locked, is_tidy })
    }

    /// Books a rerun: its results are put into the storages that are dropped at them, the others stand beside.
    pub(crate) fn book(&mut self, done: Done) -> Result<(), Fault> {
        let Done { job, results, started, elapsed_ns } = done;
        self.rebuilds -= 1;
        self.tick(false);
        self.end_use(job.locked.iter().copied());
        let read: Vec<VersionId> = self.ancestry.inputs(job.maker).iter().flatten().copied().collect();
        let outputs = self.ancestry.outputs(job.maker).to_vec();
        for &version in &read {
            self.ancestry.version_mut(version).wanted -= 1;
        }
        let results = match results {
            Ok(results) => results,
            Err(error) => {
                self.discard_half_written(&read, &outputs)?;
                for &entry in &job.locked {
                    // Let go of in another thread before it was read: it is made again, too.
                    if self.has_died(entry)? {
                        return Ok(());
                    }
                }
                return Err(error.into());
            }
        };
        self.report.reruns += 1;
        self.report.rerun_ns += elapsed_ns;
        // On a GPU the host only issues it.
        self.reactive.reruns.taken_ns += elapsed_ns.max(self.ancestry.maker(job.maker).cost_ns);
        self.events.reran(started, elapsed_ns);
        let mut placed = Ok(());
        for (&version, &result) in outputs.iter().zip(&results) {
            // Where one finds no place the others do.
            placed = placed.and(self.place(version, result, &read));
        }
        placed?;
        self.take_custody()?;
        if job.is_tidy {
            for &version in outputs.iter().chain(&read) {
                self.tidy(version)?;
            }
        }
        Ok(())
    }

    /// A rerun of what `read` some versions and wrote others has failed, perhaps half-way: what it was to write in place is not what it
    /// was any more, and is made again.
    fn discard_half_written(&mut self, read: &[VersionId], written: &[VersionId]) -> Result<(), Fault> {
        let storages: Vec<Entry> = written.iter().map(|&version| self.ancestry.version(version).entry).collect();
        let is_written = |version: &&VersionId| storages.contains(&self.ancestry.version(**version).entry);
        let consumed: Vec<VersionId> = read.iter().filter(is_written).copied().collect();
        consumed.into_iter().try_for_each(|version| self.release(version))
    }

    /// Puts what a rerun made, of what it `read`, into the storage that is dropped at it, or else beside the program.
    fn place(&mut self, version: VersionId, result: Entry, read: &[VersionId]) -> Result<(), Fault> {
        // Written in place: the version that it was is no more.
        if let Some(&consumed) = read.iter().find(|&&input| self.ancestry.version(input).beside == Some(result)) {
            self.take_beside(consumed);
        }
        if self.ancestry.version(version).beside.is_some_and(|twin| twin != result) {
            // Another output of this operator was wanted, and this one had been made before.
            self.release(version)?;
        }
        let seen = self.ancestry.version_mut(version);
        if seen.is_dropped {
            return self.restore(version, result);
        }
        seen.beside = Some(result);
        self.beside.push(version);
        Ok(())
    }

    /// Puts the bytes of `made` into the storage that was dropped when it held `version`; nowhere, if that has died meanwhile.
    fn restore(&mut self, version: VersionId, made: Entry) -> Result<(), Fault> {
        let entry = self.ancestry.version(version).entry;
        if let Err(error) = shim::adopt(made, entry) {
            shim::discard(made)?;
            return if self.has_died(entry)? { Ok(()) } else { Err(error.into()) };
        }
        self.put(entry, Place::Resident)?;
        self.dropped.remove(&version);
        self.ancestry.restored(version);
        self.reactive.reruns.expected_ns += std::mem::take(&mut self.ancestry.version_mut(version).expected_ns);
        Ok(())
    }

    /// Releases a version that stands beside the program.
    pub(crate) fn release(&mut self, version: VersionId) -> Result<(), Fault> {
        self.take_beside(version).map_or(Ok(()), |twin| shim::discard(twin).map_err(Fault::from))
    }

    /// Books that a version does not stand beside the program any more, and says what held it there.
    fn take_beside(&mut self, version: VersionId) -> Option<Entry> {
        let twin = self.ancestry.version_mut(version).beside.take();
        if twin.is_some() {
            self.beside.retain(|other| *other != version);
        }
        twin
    }
}
