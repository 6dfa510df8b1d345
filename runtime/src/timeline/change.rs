//! Predicting a plan that differs in one action from one that is known: only where the difference matters.
//!
//! The run of the known plan, the *base*, left bookmarks. The run of the changed plan starts from the last of them
//! before the first difference. Wherever it stands at a bookmark as the base stood there, but for the time, for a number
//! of device bytes and for the changed window itself, it passes over all stretches that would go as they went in the
//! base: in which nothing of the change happens, no comparison with the budget would fall otherwise with so many bytes
//! more or less, and no rerun depends on the changed storage.

use crate::hardware::Tier;
use crate::lineage::WindowId;
use crate::moment::{Bookmark, Bookmarks, InFlight};
use crate::plan::{Action, Plan};
use crate::prefetch::Facts;
use crate::timeline::{NO_WINDOW, OnPressure, Prediction, Residency, Timeline};

/// Bookmarks in the base. The more there are, the less of it has to be run again, and the longer it takes to find out.
const BOOKMARKS: usize = 320;

/// The run of a plan that changes are predicted against.
#[derive(Debug)]
pub(super) struct Base {
    pub(super) bookmarks: Bookmarks,
    prediction: Option<Prediction>,
    /// Per bookmark: whether something of the change under way happens between it and the next.
    changed: Vec<bool>,
    /// Operator indices that the change under way added to the agenda.
    noted: Vec<usize>,
    /// Operator indices at which the change under way does something.
    touched: Vec<usize>,
}

impl Base {
    pub(super) fn new(operators: usize) -> Self {
        Base {
            bookmarks: Bookmarks::new(operators, BOOKMARKS),
            prediction: None,
            changed: Vec::new(),
            noted: Vec::new(),
            touched: Vec::new(),
        }
    }

    pub(super) fn forget(&mut self) {
        self.prediction = None;
    }
}

/// How the run of a changed plan stands to its base at a bookmark of that.
#[derive(Clone, Copy)]
struct Difference {
    /// How much later it is.
    lag_ns: i64,
    /// Device bytes more.
    excess_bytes: i64,
    /// Bytes more in the host's memory.
    host_bytes: i64,
    /// Whether the changed window is in another place.
    apart: bool,
}

impl Timeline<'_> {
    /// Predicts `plan` under `budget_bytes` as [`Timeline::predict`] does, and makes it the base of
    /// [`Timeline::predict_change`].
    pub fn rebase(&mut self, plan: &Plan, budget_bytes: u64) -> Prediction {
        self.base.bookmarks.clear();
        self.leaves_base = true;
        let prediction = self.predict(plan, budget_bytes);
        self.leaves_base = false;
        for bookmark in self.base.bookmarks.left() {
            self.agenda.note(bookmark.operator);
        }
        self.base.changed.clear();
        self.base.changed.resize(self.base.bookmarks.left().len(), false);
        self.base.prediction = Some(prediction);
        prediction
    }

    /// Predicts the base with another action for one window, as [`Timeline::predict`] would, in a fraction of the time.
    /// The base stays as it is: to go on from the changed plan, make that the base.
    ///
    /// Where slow tiers are limited a change may displace any copy, and the whole plan is predicted.
    ///
    /// # Panics
    ///
    /// If [`Timeline::rebase`] was not the last run before, changes apart.
    pub fn predict_change(&mut self, window: WindowId, action: Action) -> Prediction {
        let base = self.base.prediction.expect("a change is predicted against a base");
        let was = self.actions[window.index()];
        if !self.placement.is_unlimited() {
            return self.predict_change_whole(window, action);
        }
        if was == action {
            return base;
        }
        self.on_pressure = OnPressure::Exceed;
        let facts = Facts { lineage: self.lineage, copies: &self.copies, placement: &self.placement };
        self.actions[window.index()] = action;
        self.prefetches.change(facts, window, was, &self.actions, self.budget_bytes);
        self.note_change(window);
        let prediction = self.run_change(window, base);
        let facts = Facts { lineage: self.lineage, copies: &self.copies, placement: &self.placement };
        self.prefetches.revert(facts);
        self.actions[window.index()] = was;
        self.forget_change();
        prediction
    }

    fn predict_change_whole(&mut self, window: WindowId, action: Action) -> Prediction {
        let budget_bytes = self.budget_bytes;
        let was = self.asked.action(window);
        let mut plan = std::mem::replace(&mut self.asked, Plan::keep_all(0));
        plan.set(window, action);
        let prediction = self.predict(&plan, budget_bytes);
        plan.set(window, was);
        self.rebase(&plan, budget_bytes);
        prediction
    }

    /// Notes where the changed plan may do something else than the base.
    fn note_change(&mut self, window: WindowId) {
        let facts = self.lineage.window(window);
        self.base.touched.clear();
        self.base.touched.extend([facts.start as usize, facts.last_operator()]);
        for (id, was) in self.prefetches.moved() {
            if was != self.prefetches.before(id) {
                self.base.touched.extend(was.into_iter().chain(self.prefetches.before(id)));
            }
        }
        for &operator in &self.base.touched {
            if self.agenda.note(operator) {
                self.base.noted.push(operator);
            }
            let after = self.base.bookmarks.left().partition_point(|bookmark| bookmark.operator <= operator);
            self.base.changed[after - 1] = true;
        }
    }

    fn forget_change(&mut self) {
        while let Some(operator) = self.base.noted.pop() {
            self.agenda.forget(operator);
        }
        for &operator in &self.base.touched {
            let after = self.base.bookmarks.left().partition_point(|bookmark| bookmark.operator <= operator);
            self.base.changed[after - 1] = false;
        }
    }

    fn run_change(&mut self, window: WindowId, base: Prediction) -> Prediction {
        let mut bookmark = self.base.changed.iter().position(|&changed| changed).expect("the window is somewhere");
        let count = self.base.bookmarks.left().len();
        self.base.bookmarks.left()[bookmark].load(&mut self.at);
        self.operator = self.base.bookmarks.left()[bookmark].operator;
        loop {
            let pressed = self.operate();
            debug_assert!(pressed.is_ok(), "a run that may exceed the budget never stops");
            if self.operator == self.trace.operators.len() {
                return self.conclude();
            }
            self.operator = self.pass_over();
            if bookmark + 1 == count || self.operator != self.base.bookmarks.left()[bookmark + 1].operator {
                continue;
            }
            bookmark += 1;
            let Some(difference) = self.difference(window, bookmark) else { continue };
            let passed = self.pass_over_segments(window, bookmark, difference);
            if passed == bookmark {
                continue;
            }
            let here = &self.base.bookmarks.left()[bookmark].result;
            let there = self.base.bookmarks.left().get(passed).map_or(&base, |bookmark| &bookmark.result);
            self.at.result.add_span(here, there);
            if passed == count {
                let end_ns = base.makespan_ns.saturating_add_signed(difference.lag_ns);
                self.at.segment.clear();
                self.at.now_ns = end_ns;
                return self.conclude();
            }
            self.stand_at(window, passed, difference);
            bookmark = passed;
        }
    }

    /// Passes over stretches of the base from a bookmark on, as far as they go as they went. The bookmark, or one past
    /// the last, where something else happens.
    fn pass_over_segments(&mut self, window: WindowId, from: usize, difference: Difference) -> usize {
        let storage = self.lineage.window(window).storage;
        self.at.close_segment();
        let mut passed = from;
        for (bookmark, &changed) in self.base.bookmarks.left().iter().zip(&self.base.changed).skip(from) {
            let segment = &bookmark.segment;
            let depends = difference.apart && segment.looked_at(storage);
            if changed || depends || !segment.bears(difference.excess_bytes) {
                break;
            }
            self.at.result.include(segment, difference.excess_bytes, difference.host_bytes);
            passed += 1;
        }
        self.at.segment.clear();
        passed
    }

    /// How the run stands to the base at a bookmark of that; none where they differ in more than that can say.
    fn difference(&self, window: WindowId, bookmark: usize) -> Option<Difference> {
        let base = &self.base.bookmarks.left()[bookmark];
        let (now_ns, base_now_ns) = (self.start_now_ns(self.at.lag_ns), self.start_now_ns(base.lag_ns));
        let busy_ns = |moment_ns: u64| moment_ns.saturating_sub(now_ns);
        let base_busy_ns = |moment_ns: u64| moment_ns.saturating_sub(base_now_ns);
        let alike = self.at.offloads.len() == base.offloads.len()
            && self.at.due == base.due
            && busy_ns(self.at.offload_free_ns) == base_busy_ns(base.offload_free_ns)
            && busy_ns(self.at.prefetch_free_ns) == base_busy_ns(base.prefetch_free_ns)
            && self.at.retained == base.retained
            && self.at.offloads.iter().zip(&base.offloads).all(|(offload, other)| {
                offload.storage == other.storage && busy_ns(offload.done_ns) == base_busy_ns(other.done_ns)
            });
        if !alike {
            return None;
        }
        let storage = self.lineage.window(window).storage;
        let mine = (self.at.window[storage.index()] == window.0).then(|| self.at.residency[storage.index()]);
        let mut its = None;
        for &InFlight { storage, window: open, residency, copy_done_ns } in &base.in_flight {
            if open == window.0 {
                its = Some(residency);
                continue;
            }
            let index = storage.index();
            let copied = matches!(residency, Residency::Offloading | Residency::Prefetching);
            if self.at.window[index] != open
                || self.at.residency[index] != residency
                || copied && busy_ns(self.at.copy_done_ns[index]) != base_busy_ns(copy_done_ns)
            {
                return None;
            }
        }
        let both = |place: Option<Residency>| usize::from(place.is_some());
        let settled = |place| matches!(place, None | Some(Residency::Offloaded | Residency::Dropped));
        let same_others = self.at.in_flight().len() - both(mine) == base.in_flight.len() - both(its);
        (same_others && settled(mine) && settled(its)).then(|| Difference {
            lag_ns: self.at.lag_ns as i64 - base.lag_ns as i64,
            excess_bytes: self.at.excess_bytes - base.excess_bytes,
            host_bytes: self.at.slow_bytes[Tier::Host as usize] as i64 - base.slow_bytes[Tier::Host as usize] as i64,
            apart: mine != its,
        })
    }

    /// When the operator at hand starts with such a lag.
    fn start_now_ns(&self, lag_ns: u64) -> u64 {
        self.lineage.start_ns(self.operator) + lag_ns
    }

    /// Takes up the run at a bookmark of the base that it has passed over stretches to.
    fn stand_at(&mut self, window: WindowId, bookmark: usize, difference: Difference) {
        let storage = self.lineage.window(window).storage;
        let mine = (self.at.window[storage.index()] == window.0).then(|| self.at.residency[storage.index()]);
        let result = self.at.result;
        let base: &Bookmark = &self.base.bookmarks.left()[bookmark];
        base.load(&mut self.at);
        self.operator = base.operator;
        let at = &mut self.at;
        at.result = result;
        let later = |moment_ns: &mut u64| *moment_ns = moment_ns.saturating_add_signed(difference.lag_ns);
        later(&mut at.lag_ns);
        later(&mut at.offload_free_ns);
        later(&mut at.prefetch_free_ns);
        for InFlight { storage, .. } in &base.in_flight {
            later(&mut at.copy_done_ns[storage.index()]);
        }
        at.offloads.iter_mut().for_each(|offload| later(&mut offload.done_ns));
        at.excess_bytes += difference.excess_bytes;
        let host_bytes = &mut at.slow_bytes[Tier::Host as usize];
        *host_bytes = host_bytes.saturating_add_signed(difference.host_bytes);
        if at.window[storage.index()] == window.0 {
            at.close_window(storage);
            at.residency[storage.index()] = Residency::Resident;
        }
        if let Some(residency) = mine {
            debug_assert_eq!(at.window[storage.index()], NO_WINDOW);
            at.open_window(storage, window);
            at.residency[storage.index()] = residency;
        }
    }
}
