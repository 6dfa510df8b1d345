//! A timetable: when a schedule does what, on the compute lane and on both copy channels.
//!
//! The timeline predicts totals and writes a schedule by operator index. This module plays that schedule against the
//! same three clocks and writes the hours beside it, for people to look at. It decides nothing, and its makespan is the
//! predicted one (`tests/timetable.rs`).

use crate::hardware::{Link, SlowTiers, Tier};
use crate::lineage::Lineage;
use crate::playback::{Event, Wait, play};
use crate::schedule::Schedule;
use crate::trace::{OperatorId, StorageId, Trace};

/// Where something takes place. Of each lane's spans none begins before the one before it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// Operators, one after another, and what holds them up.
    Compute,
    /// The channel from the device.
    Offload,
    /// The channel to the device.
    Prefetch,
}

/// What takes place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Activity {
    /// An operator of the program.
    Run(OperatorId),
    /// An operator, to restore what was dropped.
    Rerun(OperatorId),
    /// Compute waits for the copy of a storage.
    Stall(StorageId, Wait),
    /// Compute loses time to a copy beside it.
    Contention,
    /// A copy of one storage, or of several as one slab.
    Copy(Vec<StorageId>),
}

/// Something that takes time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Where.
    pub lane: Lane,
    /// What.
    pub activity: Activity,
    /// Time from the iteration's start.
    pub start_ns: u64,
    /// Its end.
    pub end_ns: u64,
}

/// Something done at once, to make room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// A storage that was fetched early is given up again.
    Discard(StorageId),
    /// A storage is dropped: as planned, or given up again after a rerun had restored it.
    Drop(StorageId),
}

/// When an iteration under a schedule does what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Timetable {
    /// What takes time, in the order in which it is started.
    pub spans: Vec<Span>,
    /// Marks and their times.
    pub marks: Vec<(u64, Mark)>,
    /// Device bytes in use from each time on. Of entries of one time, the greatest and the last matter.
    pub device_bytes: Vec<(u64, u64)>,
    /// Elapsed time of the iteration.
    pub makespan_ns: u64,
}

/// The clocks of the timeline.
struct Clocks<'a> {
    trace: &'a Trace,
    tiers: SlowTiers,
    now_ns: u64,
    offload_free_ns: u64,
    prefetch_free_ns: u64,
    /// Per storage: when its last copy is done.
    copy_done_ns: Vec<u64>,
    /// Per storage: the tier that its last copy went to.
    tier: Vec<Tier>,
    /// Per block.
    block_bytes: Vec<u64>,
    device_bytes: u64,
    written: Timetable,
}

impl Timetable {
    /// The timetable of an iteration of `trace` under `schedule`, which the timeline wrote for `tiers`.
    pub fn of(trace: &Trace, lineage: &Lineage, schedule: &Schedule, tiers: impl Into<SlowTiers>) -> Self {
        let mut clocks = Clocks {
            trace,
            tiers: tiers.into(),
            now_ns: 0,
            offload_free_ns: 0,
            prefetch_free_ns: 0,
            copy_done_ns: vec![0; trace.storages.len()],
            tier: vec![Tier::Host; trace.storages.len()],
            block_bytes: Vec::new(),
            device_bytes: 0,
            written: Timetable::default(),
        };
        play(trace, lineage, schedule, |operator, event| clocks.hear(operator, event));
        clocks.written.makespan_ns = clocks.now_ns;
        clocks.written
    }

    /// Time in spans that `counts` names.
    pub fn time_ns(&self, counts: impl Fn(&Activity) -> bool) -> u64 {
        self.spans.iter().filter(|span| counts(&span.activity)).map(|span| span.end_ns - span.start_ns).sum()
    }
}

impl Clocks<'_> {
    fn hear(&mut self, operator: usize, event: Event<'_>) {
        match event {
            Event::Arrive => {
                self.now_ns +=
                    self.trace.operators.get(operator).map_or(self.trace.tail_ns, |operator| operator.gap_ns);
            }
            Event::Allocate { bytes, .. } => {
                self.block_bytes.push(bytes);
                self.count(self.device_bytes + bytes);
            }
            Event::Free(block) => self.count(self.device_bytes - self.block_bytes[block.index()]),
            Event::Offload { storages, tier } => {
                storages.iter().for_each(|storage| self.tier[storage.index()] = tier);
                self.offload_free_ns =
                    self.copy(Lane::Offload, storages, self.offload_free_ns, Link::offload_transfer_ns);
                self.contend(storages);
            }
            Event::LeaveAway { storage, tier } => self.tier[storage.index()] = tier,
            Event::Prefetch { storages } => {
                self.prefetch_free_ns =
                    self.copy(Lane::Prefetch, storages, self.prefetch_free_ns, Link::prefetch_transfer_ns);
                self.contend(storages);
            }
            Event::Await { storage, wait } => {
                let late_ns = self.copy_done_ns[storage.index()].saturating_sub(self.now_ns);
                self.compute(Activity::Stall(storage, wait), late_ns);
            }
            Event::Discard(storage) => self.written.marks.push((self.now_ns, Mark::Discard(storage))),
            Event::Drop(storage) => self.written.marks.push((self.now_ns, Mark::Drop(storage))),
            Event::Run => {
                let cost_ns = self.trace.operators[operator].cost_ns;
                self.compute(Activity::Run(OperatorId(operator as u32)), cost_ns);
            }
            Event::Rerun(operator) => {
                self.compute(Activity::Rerun(operator), self.trace.operators[operator.index()].cost_ns);
            }
        }
    }

    /// The way that a slab takes; all of it goes to one tier, or comes from one.
    fn link_of(&self, storages: &[StorageId]) -> Link {
        match storages.first().map(|storage| self.tier[storage.index()]) {
            Some(Tier::File) => self.tiers.file.map_or(self.tiers.host, |file| file.link),
            _ => self.tiers.host,
        }
    }

    fn count(&mut self, device_bytes: u64) {
        self.device_bytes = device_bytes;
        self.written.device_bytes.push((self.now_ns, device_bytes));
    }

    fn compute(&mut self, activity: Activity, time_ns: u64) {
        if time_ns > 0 || matches!(activity, Activity::Run(_) | Activity::Rerun(_)) {
            let (start_ns, end_ns) = (self.now_ns, self.now_ns + time_ns);
            self.written.spans.push(Span { lane: Lane::Compute, activity, start_ns, end_ns });
            self.now_ns = end_ns;
        }
    }

    /// Starts a copy on a channel that is free from `free_ns` on, and returns when it is free again. A slab pays the
    /// latency once.
    fn copy(&mut self, lane: Lane, storages: &[StorageId], free_ns: u64, transfer_ns: fn(&Link, u64) -> u64) -> u64 {
        let (start_ns, link) = (self.now_ns.max(free_ns), self.link_of(storages));
        let transfer_ns = |storage: &StorageId| transfer_ns(&link, self.trace.storages[storage.index()].bytes);
        let end_ns = start_ns + link.latency_ns() + storages.iter().map(transfer_ns).sum::<u64>();
        storages.iter().for_each(|storage| self.copy_done_ns[storage.index()] = end_ns);
        self.written.spans.push(Span { lane, activity: Activity::Copy(storages.to_vec()), start_ns, end_ns });
        end_ns
    }

    fn contend(&mut self, storages: &[StorageId]) {
        let bytes = storages.iter().map(|storage| self.trace.storages[storage.index()].bytes);
        let link = self.link_of(storages);
        let lost_ns = bytes.map(|bytes| link.contention_ns(bytes)).sum();
        self.compute(Activity::Contention, lost_ns);
    }
}
