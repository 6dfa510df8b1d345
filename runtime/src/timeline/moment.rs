//! Where a run of the timeline stands between two operators, and the bookmarks that a later run of almost the
//! same plan starts from.
//!
//! A sweep runs the timeline once per decision, and a decision changes nothing before the window that it evicts. So
//! those runs leave bookmarks, and each starts from the last one that lies before the first difference. A bookmark holds
//! what a plan has changed by then, not what the trace is large.

use std::cell::Cell;
use std::collections::VecDeque;

use crate::lineage::{Lineage, WindowId};
use crate::plan::Action;
use crate::timeline::prefetch::{Late, Prefetches};
use crate::timeline::{NO_WINDOW, PendingOffload, Prediction, Residency, Retained, RetainedEntry};
use crate::trace::StorageId;

/// Bookmarks in one iteration of a sweep. More of them cost more to leave than they save.
const BOOKMARKS: usize = 8;

/// All that a run changes from one operator to the next.
#[derive(Debug, Default)]
pub(crate) struct Moment {
    pub(crate) now_ns: u64,
    /// How far the run is behind the keep-all times.
    pub(crate) lag_ns: u64,
    pub(crate) offload_free_ns: u64,
    pub(crate) prefetch_free_ns: u64,
    /// Device bytes beyond those of the keep-all profile.
    pub(crate) excess_bytes: i64,
    /// Per tier: bytes of the copies in it.
    pub(crate) slow_bytes: [u64; 2],
    /// What is known of the outcome; peaks only up to the last bookmark.
    pub(crate) result: Prediction,
    /// What the stretch from the last bookmark on was like.
    pub(crate) segment: Segment,
    /// Per storage: where what it holds is; resident, for one that does not exist.
    pub(crate) residency: Vec<Residency>,
    /// Per storage: the evicted window that it is in.
    pub(crate) window: Vec<u32>,
    /// Per storage: when its last copy is done.
    pub(crate) copy_done_ns: Vec<u64>,
    /// Storages that are in an evicted window, and for each where in this list.
    in_flight: Vec<StorageId>,
    seat: Vec<u32>,
    /// Per version: whether it is materialised beside its storage. Between two operators, those that are retained.
    pub(crate) beside: Vec<bool>,
    /// Offloads under way, oldest first.
    pub(crate) offloads: VecDeque<PendingOffload>,
    /// Windows that wait to be prefetched.
    pub(crate) due: Vec<WindowId>,
    /// What is kept although nothing uses it just now, soonest used first.
    pub(crate) retained: VecDeque<RetainedEntry>,
}

impl Moment {
    pub(crate) fn new(storages: usize, versions: usize) -> Self {
        Moment {
            segment: Segment::new(storages),
            residency: vec![Residency::Resident; storages],
            window: vec![NO_WINDOW; storages],
            copy_done_ns: vec![0; storages],
            seat: vec![0; storages],
            in_flight: Vec::with_capacity(storages),
            beside: vec![false; versions],
            ..Moment::default()
        }
    }

    /// Becomes the moment before the iteration, with nothing evicted.
    pub(crate) fn reset(&mut self) {
        self.now_ns = 0;
        self.lag_ns = 0;
        self.offload_free_ns = 0;
        self.prefetch_free_ns = 0;
        self.excess_bytes = 0;
        self.slow_bytes = [0; 2];
        self.result = Prediction::default();
        self.segment.clear();
        self.land();
        self.offloads.clear();
        self.due.clear();
        self.retained.clear();
    }

    /// Takes a storage into an evicted window.
    pub(crate) fn open_window(&mut self, storage: StorageId, window: WindowId) {
        self.window[storage.index()] = window.0;
        self.seat[storage.index()] = self.in_flight.len() as u32;
        self.in_flight.push(storage);
    }

    /// Takes a storage out of its evicted window, and says which that was, if any.
    pub(crate) fn close_window(&mut self, storage: StorageId) -> Option<WindowId> {
        let window = std::mem::replace(&mut self.window[storage.index()], NO_WINDOW);
        if window == NO_WINDOW {
            return None;
        }
        let seat = self.seat[storage.index()];
        self.in_flight.swap_remove(seat as usize);
        if let Some(moved) = self.in_flight.get(seat as usize) {
            self.seat[moved.index()] = seat;
        }
        Some(WindowId(window))
    }

    /// No storage is in an evicted window any more, and nothing is beside its storage.
    fn land(&mut self) {
        for &storage in &self.in_flight {
            self.residency[storage.index()] = Residency::Resident;
            self.window[storage.index()] = NO_WINDOW;
        }
        self.in_flight.clear();
        for entry in &self.retained {
            if let Retained::Version(version) = entry.what {
                self.beside[version.index()] = false;
            }
        }
    }

    /// Whether an offload has been neither finished nor recalled.
    pub(crate) fn is_under_way(&self, offload: &PendingOffload) -> bool {
        let PendingOffload { storage, done_ns } = *offload;
        self.residency[storage.index()] == Residency::Offloading && self.copy_done_ns[storage.index()] == done_ns
    }

    pub(crate) fn in_flight(&self) -> &[StorageId] {
        &self.in_flight
    }

    /// Adds the peaks of the stretch since the last bookmark to the result, and begins another one.
    pub(crate) fn close_segment(&mut self) {
        self.result.include(&self.segment, 0, 0);
    }
}

/// What a stretch of a run was like, as far as a slightly different run needs to know to pass over it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Segment {
    /// Most device bytes, and at which operator index first.
    pub(crate) peak: (u64, usize),
    pub(crate) slow_peak_bytes: [u64; 2],
    /// With up to so many device bytes more, everything would happen as it did.
    pub(crate) spare_bytes: i64,
    /// With up to so many device bytes less, everything would happen as it did.
    pub(crate) idle_bytes: i64,
    /// Storages whose residency a rerun depended on, one bit each.
    looked_at: Vec<Cell<u64>>,
}

impl Segment {
    fn new(storages: usize) -> Self {
        Segment { looked_at: vec![Cell::new(0); storages.div_ceil(64)], ..Segment::default() }
    }

    pub(crate) fn clear(&mut self) {
        self.peak = (0, 0);
        self.slow_peak_bytes = [0; 2];
        self.spare_bytes = i64::MAX;
        self.idle_bytes = i64::MAX;
        self.looked_at.fill(Cell::new(0));
    }

    /// Takes down that something depends on where a storage is.
    #[inline]
    pub(crate) fn look_at(&self, storage: StorageId) {
        let word = &self.looked_at[storage.index() / 64];
        word.set(word.get() | 1 << (storage.index() % 64));
    }

    pub(crate) fn looked_at(&self, storage: StorageId) -> bool {
        self.looked_at[storage.index() / 64].get() >> (storage.index() % 64) & 1 == 1
    }

    /// Whether everything would happen as it did with so many device bytes more.
    pub(crate) fn bears(&self, more_bytes: i64) -> bool {
        more_bytes <= self.spare_bytes && -more_bytes <= self.idle_bytes
    }

    fn copy_from(&mut self, other: &Segment) {
        let Segment { peak, slow_peak_bytes, spare_bytes, idle_bytes, looked_at } = other;
        (self.peak, self.slow_peak_bytes) = (*peak, *slow_peak_bytes);
        (self.spare_bytes, self.idle_bytes) = (*spare_bytes, *idle_bytes);
        self.looked_at.clone_from(looked_at);
    }
}

/// A storage in an evicted window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InFlight {
    pub(crate) storage: StorageId,
    pub(crate) window: u32,
    pub(crate) residency: Residency,
    pub(crate) copy_done_ns: u64,
}

/// A moment, as small as the plan leaves it, and what the stretch from it to the next bookmark was like.
#[derive(Debug, Default)]
pub(crate) struct Bookmark {
    /// The moment is just before this operator.
    pub(crate) operator: usize,
    pub(crate) lag_ns: u64,
    pub(crate) offload_free_ns: u64,
    pub(crate) prefetch_free_ns: u64,
    pub(crate) excess_bytes: i64,
    pub(crate) slow_bytes: [u64; 2],
    pub(crate) result: Prediction,
    pub(crate) in_flight: Vec<InFlight>,
    pub(crate) offloads: VecDeque<PendingOffload>,
    pub(crate) due: Vec<WindowId>,
    pub(crate) retained: VecDeque<RetainedEntry>,
    pub(crate) segment: Segment,
}

impl Bookmark {
    /// Takes down the moment before `operator`.
    fn save(&mut self, operator: usize, moment: &Moment) {
        self.operator = operator;
        self.lag_ns = moment.lag_ns;
        self.offload_free_ns = moment.offload_free_ns;
        self.prefetch_free_ns = moment.prefetch_free_ns;
        self.excess_bytes = moment.excess_bytes;
        self.slow_bytes = moment.slow_bytes;
        self.result = moment.result;
        self.in_flight.clear();
        self.in_flight.extend(moment.in_flight.iter().map(|&storage| InFlight {
            storage,
            window: moment.window[storage.index()],
            residency: moment.residency[storage.index()],
            copy_done_ns: moment.copy_done_ns[storage.index()],
        }));
        self.offloads.clone_from(&moment.offloads);
        self.due.clone_from(&moment.due);
        self.retained.clone_from(&moment.retained);
    }

    /// Sets `moment` to what was taken down.
    pub(crate) fn load(&self, moment: &mut Moment) {
        moment.land();
        moment.lag_ns = self.lag_ns;
        moment.offload_free_ns = self.offload_free_ns;
        moment.prefetch_free_ns = self.prefetch_free_ns;
        moment.excess_bytes = self.excess_bytes;
        moment.slow_bytes = self.slow_bytes;
        moment.result = self.result;
        moment.segment.clear();
        for &InFlight { storage, window, residency, copy_done_ns } in &self.in_flight {
            moment.open_window(storage, WindowId(window));
            moment.residency[storage.index()] = residency;
            moment.copy_done_ns[storage.index()] = copy_done_ns;
        }
        moment.offloads.clone_from(&self.offloads);
        moment.due.clone_from(&self.due);
        moment.retained.clone_from(&self.retained);
        for entry in &moment.retained {
            if let Retained::Version(version) = entry.what {
                moment.beside[version.index()] = true;
            }
        }
    }
}

/// Bookmarks of one run, a stride of operators or more apart.
#[derive(Debug)]
pub(crate) struct Bookmarks {
    /// Those from `left` on are of earlier runs.
    bookmarks: Vec<Bookmark>,
    left: usize,
    stride: usize,
}

impl Bookmarks {
    /// Room for about `count` bookmarks in a trace of so many operators.
    pub(crate) fn new(operators: usize, count: usize) -> Self {
        Bookmarks { bookmarks: Vec::new(), left: 0, stride: operators.div_ceil(count).max(16) }
    }

    /// Forgets the last run.
    pub(crate) fn clear(&mut self) {
        self.left = 0;
    }

    /// The bookmarks left, in order.
    pub(crate) fn left(&self) -> &[Bookmark] {
        &self.bookmarks[..self.left]
    }

    /// Leaves a bookmark before operator `index`, where one is due.
    pub(crate) fn pass(&mut self, index: usize, moment: &mut Moment) {
        if self.left().last().is_some_and(|last| index < last.operator + self.stride) {
            return;
        }
        self.close_last(moment);
        moment.segment.clear();
        if self.bookmarks.len() == self.left {
            self.bookmarks.push(Bookmark::default());
        }
        self.bookmarks[self.left].save(index, moment);
        self.left += 1;
    }

    /// The stretch since the last bookmark ends here.
    pub(crate) fn close_last(&mut self, moment: &mut Moment) {
        moment.close_segment();
        if let Some(last) = self.bookmarks[..self.left].last_mut() {
            last.segment.copy_from(&moment.segment);
        }
    }

    /// Forgets those after the bookmark `last`, and sets `moment` to that.
    pub(crate) fn go_back_to(&mut self, last: usize, moment: &mut Moment) {
        self.left = last + 1;
        self.bookmarks[last].load(moment);
    }

    /// Forgets those after operator index `until`, and sets `moment` to the last one left. Before which operator that
    /// is, or none.
    fn go_back(&mut self, until: usize, moment: &mut Moment) -> Option<usize> {
        self.left = self.left().partition_point(|bookmark| bookmark.operator <= until);
        let last = self.left().last()?;
        last.load(moment);
        Some(last.operator)
    }
}

/// Bookmarks of the last run of a sweep, and what that run was asked.
#[derive(Debug)]
pub(crate) struct LastRun {
    pub(crate) bookmarks: Bookmarks,
    budget_bytes: u64,
    evicted: Vec<Evicted>,
}

/// What a run was asked about an evicted window.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Evicted {
    window: WindowId,
    action: Action,
    /// Before which operator it is prefetched.
    before: Option<usize>,
    /// Where the run may have stopped, for that is later than its copy wants.
    late: Option<Late>,
}

impl Evicted {
    fn of(window: WindowId, actions: &[Action], prefetches: &Prefetches) -> Self {
        let action = actions[window.index()];
        Evicted { window, action, before: prefetches.before(window), late: prefetches.lateness(window) }
    }

    /// The first operator index at which a run may do something else on account of it, or may be asked something, other
    /// than that it begins.
    fn asked_from(&self) -> usize {
        self.before.into_iter().chain(self.late.map(|late| late.wanted)).min().unwrap_or(usize::MAX)
    }
}

impl LastRun {
    pub(crate) fn new(operators: usize) -> Self {
        LastRun { bookmarks: Bookmarks::new(operators, BOOKMARKS), budget_bytes: 0, evicted: Vec::new() }
    }

    /// Sets `moment` to the last bookmark that a run of `actions` would pass as well, and says before which operator
    /// that is; none where it has to start afresh. From here on, the bookmarks are of that run.
    pub(crate) fn resume(
        &mut self,
        lineage: &Lineage,
        actions: &[Action],
        prefetches: &Prefetches,
        budget_bytes: u64,
        moment: &mut Moment,
    ) -> Option<usize> {
        if self.budget_bytes != budget_bytes {
            self.bookmarks.clear();
        }
        let same_until = self.same_until(lineage, actions, prefetches);
        self.budget_bytes = budget_bytes;
        self.evicted.clear();
        self.evicted.extend(prefetches.evicted().iter().map(|&id| Evicted::of(id, actions, prefetches)));
        self.bookmarks.go_back(same_until, moment)
    }

    /// The first operator index at which a run of `actions` may do something that the last run did not.
    fn same_until(&self, lineage: &Lineage, actions: &[Action], prefetches: &Prefetches) -> usize {
        let start = |id: WindowId| lineage.window(id).start as usize;
        let mut until = usize::MAX;
        let mut old = self.evicted.iter().copied().peekable();
        for &id in prefetches.evicted() {
            while let Some(gone) = old.next_if(|other| other.window < id) {
                until = until.min(start(gone.window));
            }
            let now = Evicted::of(id, actions, prefetches);
            match old.next_if(|other| other.window == id) {
                Some(was) if was == now => {}
                Some(was) if was.action == now.action => until = until.min(was.asked_from()).min(now.asked_from()),
                _ => until = until.min(start(id)),
            }
        }
        old.map(|gone| start(gone.window)).chain([until]).min().unwrap_or(until)
    }
}
