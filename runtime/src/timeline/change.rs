//! Predicting a plan that differs in a few actions from one that is known: only where the difference matters.
//!
//! The run of the known plan, the *base*, left bookmarks. The run of the changed plan starts from the last of them
//! before the first difference. Wherever it stands at a bookmark as the base stood there, but for the time, for a number
//! of device bytes and for the changed windows themselves, it passes over all stretches that would go as they went in the
//! base: in which nothing of the change happens, no comparison with the budget would fall otherwise with so many bytes
//! more or less, and no rerun depends on a changed storage.

use crate::hardware::Tier;
use crate::lineage::WindowId;
use crate::plan::{Action, Plan};
use crate::timeline::moment::{Bookmark, Bookmarks, InFlight};
use crate::timeline::prefetch::Facts;
use crate::timeline::{NO_WINDOW, OnPressure, Prediction, Residency, Run, Stopped, Timeline, reruns_max};

/// Changes that are predicted together; more are predicted as a whole plan.
pub const CHANGES_MAX: usize = 4;

/// Bookmarks in the base. The more there are, the less of it has to be run again, and the longer it takes to find out.
const BOOKMARKS: usize = 320;

/// Changes made to a base one after another, after which it is run as a whole again: each leaves a few stops behind at
/// which nothing happens any more.
const ACCEPTED_MAX: usize = 32;

/// The run of a plan that changes are predicted against.
#[derive(Debug)]
pub(super) struct Base {
    pub(super) bookmarks: Bookmarks,
    prediction: Option<Prediction>,
    /// The changes under way: windows, and what the base does with them.
    changes: Vec<(WindowId, Action)>,
    /// Changes that were made to the base since it was run as a whole.
    accepted: usize,
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
            changes: Vec::with_capacity(CHANGES_MAX),
            accepted: 0,
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
    /// Where the storage of each changed window is, while it is in that window.
    places: Places,

    /// How much later it is.
    lag_ns: i64,
    /// Device bytes more.
    excess_bytes: i64,
    /// Bytes more in the host's memory.
    host_bytes: i64,
    /// Whether each changed window is in another place.
    apart: [bool; CHANGES_MAX],
}

/// Per change under way: where its storage is, while that is in the changed window.
type Places = [Option<Residency>; CHANGES_MAX];

impl Timeline<'_> {
    /// Predicts `plan` under `budget_bytes` as [`Timeline::predict`] does, and makes it the base of
    /// [`Timeline::predict_changes`].
    pub fn rebase(&mut self, plan: &Plan, budget_bytes: u64) -> Prediction {
        self.base.bookmarks.clear();
        self.base.accepted = 0;
        self.leaves_base = true;
        let prediction = self.predict(plan, budget_bytes);
        self.leaves_base = false;
        self.settle_base(prediction)
    }

    /// Makes the run whose bookmarks are left the base.
    fn settle_base(&mut self, prediction: Prediction) -> Prediction {
        for bookmark in self.base.bookmarks.left() {
            self.agenda.note(bookmark.operator);
        }
        self.base.changed.clear();
        self.base.changed.resize(self.base.bookmarks.left().len(), false);
        self.base.prediction = Some(prediction);
        prediction
    }

    /// Predicts the base with other actions for some windows, each named once, as [`Timeline::predict`] would, in a
    /// fraction of the time. The base stays as it is: to go on from the changed plan, accept the changes.
    ///
    /// Where slow tiers are limited a change may displace any copy, and the whole plan is predicted. So it is of more than
    /// [`CHANGES_MAX`] changes, and where the base was given up.
    ///
    /// # Panics
    ///
    /// If [`Timeline::rebase`] was not the last run before, changes apart.
    pub fn predict_changes(&mut self, changes: &[(WindowId, Action)]) -> Prediction {
        let base = self.base.prediction.expect("a change is predicted against a base");
        if !self.placement.is_unlimited() || changes.len() > CHANGES_MAX || base.given_up {
            return self.predict_changes_whole(changes);
        }
        self.on_pressure = OnPressure::Exceed;
        self.begin_changes(changes);
        if self.base.changes.is_empty() {
            return base;
        }
        let prediction = self.run_changes(base);
        let facts = Facts { lineage: self.lineage, copies: &self.copies, placement: &self.placement };
        self.prefetches.revert(facts);
        for &(window, was) in &self.base.changes {
            self.actions[window.index()] = was;
        }
        self.forget_changes();
        prediction
    }

    /// Makes the changed plan the base: [`Timeline::rebase`], from the first change on.
    ///
    /// # Panics
    ///
    /// As [`Timeline::predict_changes`] does.
    pub fn accept_changes(&mut self, changes: &[(WindowId, Action)]) -> Prediction {
        let base = self.base.prediction.expect("a change is made to a base");
        self.base.accepted += 1;
        let whole = !self.placement.is_unlimited() || changes.len() > CHANGES_MAX || base.given_up;
        if whole || self.base.accepted > ACCEPTED_MAX {
            let (plan, budget_bytes) = (self.changed_plan(changes), self.budget_bytes);
            return self.rebase(&plan, budget_bytes);
        }
        self.on_pressure = OnPressure::Exceed;
        self.begin_changes(changes);
        if self.base.changes.is_empty() {
            return base;
        }
        self.prefetches.commit();
        let first = self.first_changed();
        self.base.noted.clear();
        self.forget_changes();
        self.base.forget();
        self.base.bookmarks.go_back_to(first, &mut self.at);
        self.operator = self.base.bookmarks.left()[first].operator;
        self.leaves_base = true;
        let run = self.run_on();
        self.leaves_base = false;
        let Run::Finished(prediction) = run else { unreachable!("a run that may exceed the budget never stops") };
        self.settle_base(prediction)
    }

    fn changed_plan(&self, changes: &[(WindowId, Action)]) -> Plan {
        let asked = if self.placement.is_unlimited() { &self.actions } else { self.asked.actions() };
        let mut plan = Plan::keep_all(asked.len());
        for (window, &action) in (0..).map(WindowId).zip(asked) {
            plan.set(window, action);
        }
        for &(window, action) in changes {
            plan.set(window, action);
        }
        plan
    }

    fn predict_changes_whole(&mut self, changes: &[(WindowId, Action)]) -> Prediction {
        let (base, changed, budget_bytes) = (self.changed_plan(&[]), self.changed_plan(changes), self.budget_bytes);
        let prediction = self.predict(&changed, budget_bytes);
        self.rebase(&base, budget_bytes);
        prediction
    }

    /// Makes the changes to actions and prefetches, and notes where the changed plan may do something else than the base.
    fn begin_changes(&mut self, changes: &[(WindowId, Action)]) {
        self.base.changes.clear();
        self.base.touched.clear();
        for &(window, action) in changes.iter().filter(|(window, _)| !self.lineage.is_decided(*window)) {
            let was = std::mem::replace(&mut self.actions[window.index()], action);
            if was == action {
                continue;
            }
            debug_assert!(self.base.changes.iter().all(|&(other, _)| other != window), "window {} twice", window.0);
            let facts = Facts { lineage: self.lineage, copies: &self.copies, placement: &self.placement };
            self.prefetches.change(facts, window, was, &self.actions, self.budget_bytes);
            self.base.changes.push((window, was));
            let window = self.lineage.window(window);
            self.base.touched.extend([window.start as usize, window.last_operator()]);
        }
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

    fn forget_changes(&mut self) {
        while let Some(operator) = self.base.noted.pop() {
            self.agenda.forget(operator);
        }
        for &operator in &self.base.touched {
            let after = self.base.bookmarks.left().partition_point(|bookmark| bookmark.operator <= operator);
            self.base.changed[after - 1] = false;
        }
    }

    /// The last bookmark before anything changes.
    fn first_changed(&self) -> usize {
        self.base.changed.iter().position(|&changed| changed).expect("the windows are somewhere")
    }

    fn run_changes(&mut self, base: Prediction) -> Prediction {
        let mut bookmark = self.first_changed();
        let count = self.base.bookmarks.left().len();
        self.base.bookmarks.left()[bookmark].load(&mut self.at);
        self.operator = self.base.bookmarks.left()[bookmark].operator;
        loop {
            if let Err(stopped) = self.operate() {
                debug_assert!(matches!(stopped, Stopped::GivenUp), "a run that may exceed the budget never stops");
                return self.give_up();
            }
            if self.operator == self.trace.operators.len() {
                return self.conclude();
            }
            self.operator = self.pass_over();
            if bookmark + 1 == count || self.operator != self.base.bookmarks.left()[bookmark + 1].operator {
                continue;
            }
            bookmark += 1;
            let Some(difference) = self.difference(bookmark) else { continue };
            let passed = self.pass_over_segments(bookmark, difference);
            if passed == bookmark {
                continue;
            }
            let here = &self.base.bookmarks.left()[bookmark].result;
            let there = self.base.bookmarks.left().get(passed).map_or(&base, |bookmark| &bookmark.result);
            self.at.result.add_span(here, there);
            if self.at.result.reruns > reruns_max(self.trace) {
                return self.give_up();
            }
            if passed == count {
                let end_ns = base.makespan_ns.saturating_add_signed(difference.lag_ns);
                self.at.segment.clear();
                self.at.now_ns = end_ns;
                return self.conclude();
            }
            self.stand_at(passed, difference);
            bookmark = passed;
        }
    }

    /// Passes over stretches of the base from a bookmark on, as far as they go as they went. The bookmark, or one past
    /// the last, where something else happens.
    fn pass_over_segments(&mut self, from: usize, difference: Difference) -> usize {
        self.at.close_segment();
        let mut passed = from;
        for (bookmark, &changed) in self.base.bookmarks.left().iter().zip(&self.base.changed).skip(from) {
            let segment = &bookmark.segment;
            let depends = |(&(window, _), apart): (&(WindowId, Action), bool)| {
                apart && segment.looked_at(self.lineage.window(window).storage)
            };
            if changed
                || self.base.changes.iter().zip(difference.apart).any(depends)
                || !segment.bears(difference.excess_bytes)
            {
                break;
            }
            self.at.result.include(segment, difference.excess_bytes, difference.host_bytes);
            passed += 1;
        }
        self.at.segment.clear();
        passed
    }

    /// How the run stands to the base at a bookmark of that; none where they differ in more than that can say.
    fn difference(&self, bookmark: usize) -> Option<Difference> {
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
        let (mine, mut its): (Places, Places) = (self.places(), [None; CHANGES_MAX]);
        for &InFlight { storage, window: open, residency, copy_done_ns } in &base.in_flight {
            if let Some(change) = self.base.changes.iter().position(|&(window, _)| open == window.0) {
                its[change] = Some(residency);
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
        let count = |places: &Places| places.iter().flatten().count();
        let settled =
            |place: &Option<Residency>| matches!(place, None | Some(Residency::Offloaded | Residency::Dropped));
        let same_others = self.at.in_flight().len() - count(&mine) == base.in_flight.len() - count(&its);
        (same_others && mine.iter().chain(&its).all(settled)).then(|| Difference {
            places: mine,
            lag_ns: self.at.lag_ns as i64 - base.lag_ns as i64,
            excess_bytes: self.at.excess_bytes - base.excess_bytes,
            host_bytes: self.at.slow_bytes[Tier::Host as usize] as i64 - base.slow_bytes[Tier::Host as usize] as i64,
            apart: std::array::from_fn(|change| mine[change] != its[change]),
        })
    }

    /// Where the storages of changed windows are in the run under way.
    fn places(&self) -> Places {
        let mut places = [None; CHANGES_MAX];
        for (place, &(window, _)) in places.iter_mut().zip(&self.base.changes) {
            let storage = self.lineage.window(window).storage.index();
            *place = (self.at.window[storage] == window.0).then(|| self.at.residency[storage]);
        }
        places
    }

    /// When the operator at hand starts with such a lag.
    fn start_now_ns(&self, lag_ns: u64) -> u64 {
        self.lineage.start_ns(self.operator) + lag_ns
    }

    /// Takes up the run at a bookmark of the base that it has passed over stretches to.
    fn stand_at(&mut self, bookmark: usize, difference: Difference) {
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
        for &(window, _) in &self.base.changes {
            let storage = self.lineage.window(window).storage;
            if at.window[storage.index()] == window.0 {
                at.close_window(storage);
                at.residency[storage.index()] = Residency::Resident;
            }
        }
        for (&(window, _), place) in self.base.changes.iter().zip(difference.places) {
            if let Some(residency) = place {
                let storage = self.lineage.window(window).storage;
                debug_assert_eq!(at.window[storage.index()], NO_WINDOW);
                at.open_window(storage, window);
                at.residency[storage.index()] = residency;
            }
        }
    }
}
