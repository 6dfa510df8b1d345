//! When prefetches start: as late as their copies allow, and only where the bytes are free from then on.
//!
//! Decided from the whole plan before a run. What a run meets may still delay a prefetch, never advance it.
//!
//! Windows are decided from the last one that ends to the first, each behind the copies that are needed after it, and
//! each claims its bytes from its prefetch to its use. So a window depends on later ones through two things only: when
//! the channel has to be free, and what slack they leave. A changed plan is decided anew from where either changes to
//! where both are as before.

use std::ops::Range;

use crate::hardware::CopyTimes;
use crate::lineage::{Lineage, Window, WindowId};
use crate::plan::Action;
use crate::slack::Slack;
use crate::timeline::placement::Placement;

/// Prefetches start this much earlier than their copy needs, against jitter on a real machine.
const PREFETCH_LEAD: f64 = 1.25;

const NONE: u32 = u32::MAX;

/// What the decision for one window was, and what it stands on.
#[derive(Clone, Copy, Debug)]
struct Decision {
    /// The operator index before which it is prefetched; `NONE` where there is nothing to prefetch.
    before: u32,
    /// The operator index before which it would be prefetched if there were room.
    wanted: u32,
    /// The operator index that uses it.
    end: u32,
    /// When the channel has to be free for it.
    channel_ns: u64,
    /// How many bytes less of slack would not change it.
    spare_bytes: i64,
    /// How many bytes more of slack at the last operator index before it would change it.
    missing_bytes: i64,
}

impl Decision {
    /// The last operator index before it, which has too little slack where there is no room for it any earlier.
    fn barrier(&self) -> usize {
        self.before as usize - 1
    }

    /// Whether it depends on the slack of an operator index in `range`.
    fn looked_at(&self, range: &Range<usize>) -> bool {
        self.barrier() < range.end && range.start < self.end as usize
    }
}

const UNDECIDED: Decision =
    Decision { before: NONE, wanted: NONE, end: 0, channel_ns: u64::MAX, spare_bytes: 0, missing_bytes: 0 };

/// A prefetch that starts later than its copy wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Late {
    pub(crate) window: WindowId,
    /// The operator index before which it would start if there were room.
    pub(crate) wanted: usize,
    /// Bytes that are missing for it to start earlier than it does.
    pub(crate) missing_bytes: u64,
}

/// What a run is about.
#[derive(Clone, Copy)]
pub(crate) struct Facts<'a> {
    pub(crate) lineage: &'a Lineage,
    pub(crate) copies: &'a CopyTimes,
    pub(crate) placement: &'a Placement,
}

impl Facts<'_> {
    fn bytes(&self, window: &Window) -> i64 {
        self.lineage.bytes(window.storage) as i64
    }

    fn lead_ns(&self, id: WindowId) -> u64 {
        let storage = self.lineage.window(id).storage;
        (self.copies.prefetch_ns(storage, self.placement.tier(id)) as f64 * PREFETCH_LEAD) as u64
    }
}

/// The operator index before which each swapped storage is prefetched.
#[derive(Debug)]
pub(crate) struct Prefetches {
    /// Per window.
    decisions: Vec<Decision>,
    /// Per operator index: the first window that is due there.
    first: Vec<u32>,
    /// Per window: the next one that is due at the same operator index.
    next: Vec<u32>,
    /// Windows that the plan evicts, in order of their ends.
    evicted: Vec<WindowId>,
    /// Those of them that are prefetched.
    prefetched: Vec<WindowId>,
    /// Per operator index: bytes under the budget once everything that the plan evicts is gone, less what is claimed.
    slack: Slack,
    /// Whether `slack` is that of the plan at hand: they are found only where they are needed.
    slack_found: bool,
    /// Whether it was found while changes were under way, with what they add in it.
    slack_has_changes: bool,
    /// Bytes that the last change is to add to the slack, and where, once that is needed.
    pending: Option<(i64, Range<usize>)>,
    /// Bytes that changes under way have added to the slack, and where.
    shifted: Vec<(i64, Range<usize>)>,
    /// Decisions that changes under way replaced, in order.
    replaced: Vec<(WindowId, Decision)>,
    /// Windows that changes under way put on or took off a list, in order.
    relisted: Vec<(List, WindowId)>,
}

impl Prefetches {
    pub(crate) fn new(operators: usize, windows: usize) -> Self {
        Prefetches {
            decisions: vec![UNDECIDED; windows],
            first: vec![NONE; operators + 1],
            next: vec![NONE; windows],
            evicted: Vec::with_capacity(windows),
            prefetched: Vec::with_capacity(windows),
            slack: Slack::new(operators + 1),
            slack_found: false,
            slack_has_changes: false,
            pending: None,
            shifted: Vec::new(),
            replaced: Vec::with_capacity(windows),
            relisted: Vec::new(),
        }
    }

    /// The operator index before which a window is prefetched, if it is.
    pub(crate) fn before(&self, window: WindowId) -> Option<usize> {
        let before = self.decisions[window.index()].before;
        (before != NONE).then_some(before as usize)
    }

    /// The prefetches that start later than their copies want, for lack of room.
    pub(crate) fn late(&self) -> impl Iterator<Item = Late> + '_ {
        self.prefetched.iter().filter_map(|&window| self.lateness(window))
    }

    /// That of `window`, if it is prefetched and starts later than its copy wants.
    pub(crate) fn lateness(&self, window: WindowId) -> Option<Late> {
        let Decision { before, wanted, missing_bytes, .. } = self.decisions[window.index()];
        let is_late = before != NONE && before > wanted;
        is_late.then_some(Late { window, wanted: wanted as usize, missing_bytes: missing_bytes as u64 })
    }

    /// The windows that the plan evicts, in order of their ends.
    pub(crate) fn evicted(&self) -> &[WindowId] {
        &self.evicted
    }

    /// Windows that the change under way prefetches elsewhere than before, and where that was.
    pub(crate) fn moved(&self) -> impl Iterator<Item = (WindowId, Option<usize>)> + '_ {
        let was = |&(id, decision): &(WindowId, Decision)| {
            (id, (decision.before != NONE).then_some(decision.before as usize))
        };
        self.replaced.iter().map(was)
    }

    /// The windows that are due before operator `index`, soonest used first.
    pub(crate) fn due(&self, index: usize) -> impl Iterator<Item = WindowId> + '_ {
        let some = |window: u32| (window != NONE).then_some(window);
        std::iter::successors(some(self.first[index]), move |&window| some(self.next[window as usize])).map(WindowId)
    }

    /// Decides for every swapped window of `actions`, behind the copies that are needed after it.
    pub(crate) fn decide(&mut self, facts: Facts<'_>, actions: &[Action], budget_bytes: u64) {
        for position in 0..self.prefetched.len() {
            self.replace(self.prefetched[position], UNDECIDED);
        }
        self.prefetched.clear();
        self.commit();
        self.evicted.clear();
        self.slack_found = false;
        collect_evicted(actions, &mut self.evicted);
        let is_prefetched = |id: WindowId| actions[id.index()] == Action::Swap && facts.lineage.window(id).used_again;
        self.prefetched.extend(self.evicted.iter().copied().filter(|&id| is_prefetched(id)));
        if self.prefetched.is_empty() {
            return;
        }
        self.find_slack(facts, budget_bytes);
        let mut channel_ns = u64::MAX;
        for position in (0..self.prefetched.len()).rev() {
            let id = self.prefetched[position];
            let decision = self.decide_window(facts, id, channel_ns);
            channel_ns = decision.channel_ns;
            self.replace(id, decision);
            self.claim(facts, id, decision, 1);
        }
    }

    /// Bytes under the budget at every operator index, once everything that the plan evicts is gone.
    fn find_slack(&mut self, facts: Facts<'_>, budget_bytes: u64) {
        self.slack_found = true;
        let change_bytes = self.slack.raw();
        change_bytes.fill(0);
        for &id in &self.evicted {
            let window = facts.lineage.window(id);
            let bytes = facts.bytes(window);
            change_bytes[window.start as usize] += bytes;
            change_bytes[window.end as usize] -= bytes;
        }
        let (budget, kept) = (clamped(budget_bytes), facts.lineage.profile().values());
        let mut evicted = 0;
        self.slack.settle(|index, change| {
            evicted += change;
            budget - (kept[index] - evicted)
        });
    }

    /// Where a window is prefetched if the channel has to be free at `channel_ns` for what comes after it, with the
    /// slack as it is.
    fn decide_window(&self, facts: Facts<'_>, id: WindowId, channel_ns: u64) -> Decision {
        let Facts { lineage, .. } = facts;
        let window = lineage.window(id);
        let (bytes, end) = (facts.bytes(window), window.end as usize);
        let channel_ns = channel_ns.min(lineage.start_ns(end)).saturating_sub(facts.lead_ns(id));
        // The last operator that starts early enough, unless the window starts later.
        let target = lineage.last_start_until(end, channel_ns).max(window.start as usize + 1).min(end);
        let free = self.slack.free(target..end, bytes);
        Decision {
            before: free.from as u32,
            wanted: target as u32,
            end: window.end,
            channel_ns,
            spare_bytes: free.least.saturating_sub(bytes),
            missing_bytes: free.blocked_by.map_or(i64::MAX, |slack| bytes - slack),
        }
    }

    /// Claims a window's bytes from its prefetch to its use, or with a `sign` of −1 gives them back.
    fn claim(&mut self, facts: Facts<'_>, id: WindowId, decision: Decision, sign: i64) {
        if decision.before != NONE {
            let window = facts.lineage.window(id);
            let bytes = sign * facts.bytes(window);
            self.slack.add(decision.before as usize..window.end as usize, -bytes);
        }
    }

    /// Puts a window where `decision` says.
    fn replace(&mut self, id: WindowId, decision: Decision) {
        let was = std::mem::replace(&mut self.decisions[id.index()], decision).before;
        if was != decision.before {
            if was != NONE {
                self.unlink(id, was);
            }
            if decision.before != NONE {
                self.link(id, decision.before);
            }
        }
    }

    /// Puts a window among those due before an operator, which are ordered by their ends.
    fn link(&mut self, id: WindowId, before: u32) {
        let mut place = &mut self.first[before as usize];
        if *place == NONE || *place > id.0 {
            self.next[id.index()] = std::mem::replace(place, id.0);
            return;
        }
        let mut last = *place;
        loop {
            place = &mut self.next[last as usize];
            if *place == NONE || *place > id.0 {
                break;
            }
            last = *place;
        }
        self.next[id.index()] = std::mem::replace(&mut self.next[last as usize], id.0);
    }

    fn unlink(&mut self, id: WindowId, before: u32) {
        let next = self.next[id.index()];
        let first = &mut self.first[before as usize];
        if *first == id.0 {
            *first = next;
            return;
        }
        let mut last = *first;
        while self.next[last as usize] != id.0 {
            last = self.next[last as usize];
        }
        self.next[last as usize] = next;
    }

    /// Decides again where one window's action was `was` and is what `actions` has already. Several changes may follow each
    /// other, until [`Self::revert`] or [`Self::commit`].
    pub(crate) fn change(
        &mut self,
        facts: Facts<'_>,
        changed: WindowId,
        was: Action,
        actions: &[Action],
        budget_bytes: u64,
    ) {
        let lineage = facts.lineage;
        let action = actions[changed.index()];
        let window = lineage.window(changed);
        let evicts = |action: Action| i64::from(action != Action::Keep);
        let first = self.prefetched.partition_point(|&id| id < changed);
        let is_listed = self.prefetched.get(first) == Some(&changed);
        let listed_now = action == Action::Swap && window.used_again;
        if !self.slack_found && (listed_now || !self.prefetched.is_empty()) {
            self.slack_has_changes = !self.relisted.is_empty();
            self.find_slack(facts, budget_bytes);
        }
        if evicts(action) != evicts(was) {
            self.relist(List::Evicted, changed);
        }
        if !self.slack_found {
            return;
        }
        self.shift_slack();
        self.pending =
            Some(((evicts(action) - evicts(was)) * facts.bytes(window), window.start as usize..window.end as usize));
        let mut again = Again {
            slack: (evicts(action) - evicts(was)) * facts.bytes(window),
            slack_range: window.start as usize..window.end as usize,
            claims_range: None,
            channel_ns: u64::MAX,
            channel_was_ns: u64::MAX,
            given_back: self.prefetched.len(),
        };
        for position in (0..self.prefetched.len()).rev() {
            if !is_listed && position + 1 == first {
                self.decide_again(facts, &mut again, changed, first, action);
            }
            let id = self.prefetched[position];
            let action = if id == changed { action } else { Action::Swap };
            self.decide_again(facts, &mut again, id, position, action);
        }
        if !is_listed && first == 0 {
            self.decide_again(facts, &mut again, changed, 0, action);
        }
        if is_listed != listed_now {
            self.relist(List::Prefetched, changed);
        }
    }

    /// Puts a window on a list, or takes it off.
    fn relist(&mut self, which: List, id: WindowId) {
        self.turn(which, id);
        self.relisted.push((which, id));
    }

    fn turn(&mut self, which: List, id: WindowId) {
        let list = if which == List::Evicted { &mut self.evicted } else { &mut self.prefetched };
        match list.binary_search(&id) {
            Ok(position) => {
                list.remove(position);
            }
            Err(position) => list.insert(position, id),
        }
    }

    /// One window of a changed plan: `position` is its place among the prefetched ones, or that of the first after it.
    fn decide_again(&mut self, facts: Facts<'_>, again: &mut Again, id: WindowId, position: usize, action: Action) {
        let was = self.decisions[id.index()];
        let wanted = action == Action::Swap && (was.before != NONE || facts.lineage.window(id).used_again);
        if was.before == NONE && !wanted {
            return;
        }
        let is_given_back = position >= again.given_back && was.before != NONE;
        if wanted && was.before != NONE && again.leaves(was) {
            if is_given_back {
                self.claim(facts, id, was, 1);
            }
            if again.touches_slack(was) {
                // It stands, with less to spare than it had, perhaps, and with as much missing as there is at its barrier.
                self.replaced.push((id, was));
                let decision = &mut self.decisions[id.index()];
                decision.spare_bytes += again.slack.min(0);
                decision.missing_bytes = was.missing_bytes.saturating_sub(again.slack_at(was.barrier()));
            }
            (again.channel_ns, again.channel_was_ns) = (was.channel_ns, was.channel_ns);
            return;
        }
        let window = facts.lineage.window(id);
        self.shift_slack();
        if was.before != NONE && !is_given_back {
            self.claim(facts, id, was, -1);
        }
        again.given_back = again.given_back.min(position);
        let mut decision = UNDECIDED;
        if wanted {
            // What windows before it claim is no concern of its own.
            let lowest = window.end as usize;
            let channel_ns = again.channel_ns.min(facts.lineage.start_ns(lowest)).saturating_sub(facts.lead_ns(id));
            let target = facts.lineage.last_start_until(lowest, channel_ns);
            while again.given_back > 0 {
                let earlier = self.prefetched[again.given_back - 1];
                if facts.lineage.window(earlier).end as usize <= target {
                    break;
                }
                again.given_back -= 1;
                if earlier != id {
                    self.claim(facts, earlier, self.decisions[earlier.index()], -1);
                }
            }
            decision = self.decide_window(facts, id, again.channel_ns);
            self.claim(facts, id, decision, 1);
            again.channel_ns = decision.channel_ns;
        }
        if was.before != NONE {
            again.channel_was_ns = was.channel_ns;
        }
        if was.before != decision.before {
            let lowest = was.before.min(decision.before) as usize;
            let here = lowest..window.end as usize;
            again.claims_range = Some(match again.claims_range.take() {
                Some(range) => range.start.min(here.start)..range.end.max(here.end),
                None => here,
            });
        }
        self.replaced.push((id, was));
        self.replace(id, decision);
    }

    /// Takes the changes under way back.
    pub(crate) fn revert(&mut self, facts: Facts<'_>) {
        while let Some((id, decision)) = self.replaced.pop() {
            let now = self.decisions[id.index()];
            if now.before != decision.before {
                self.claim(facts, id, now, -1);
                self.claim(facts, id, decision, 1);
            }
            self.replace(id, decision);
        }
        self.pending = None;
        while let Some((bytes, range)) = self.shifted.pop() {
            self.slack.add(range, -bytes);
        }
        while let Some((which, id)) = self.relisted.pop() {
            self.turn(which, id);
        }
        self.slack_found &= !std::mem::take(&mut self.slack_has_changes);
    }

    /// Lets the changes under way stand.
    pub(crate) fn commit(&mut self) {
        self.shift_slack();
        self.shifted.clear();
        self.replaced.clear();
        self.relisted.clear();
        self.slack_has_changes = false;
    }

    /// Changes the slack by what the last change frees or takes.
    fn shift_slack(&mut self) {
        if let Some((bytes, range)) = self.pending.take().filter(|&(bytes, _)| bytes != 0) {
            self.slack.add(range.clone(), bytes);
            self.shifted.push((bytes, range));
        }
    }
}

/// A list that a change may put a window on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum List {
    Evicted,
    Prefetched,
}

/// How far the decisions of a changed plan have come.
struct Again {
    /// Bytes of slack that the change adds, and where.
    slack: i64,
    slack_range: Range<usize>,
    /// Where claims have changed.
    claims_range: Option<Range<usize>>,
    /// When the channel has to be free, now and before the change.
    channel_ns: u64,
    channel_was_ns: u64,
    /// Prefetched windows from this position on that are not decided yet have given their claims back.
    given_back: usize,
}

impl Again {
    /// Whether the change leaves a decision as it was.
    fn leaves(&self, was: Decision) -> bool {
        let slack_matters = self.touches_slack(was) && -self.slack > was.spare_bytes
            || self.slack_at(was.barrier()) >= was.missing_bytes;
        self.channel_ns == self.channel_was_ns
            && !self.claims_range.as_ref().is_some_and(|range| was.looked_at(range))
            && !slack_matters
    }

    /// The slack that the change adds at an operator index.
    fn slack_at(&self, index: usize) -> i64 {
        if self.slack_range.contains(&index) { self.slack } else { 0 }
    }

    /// Whether the change adds slack, or takes some, where a decision looked.
    fn touches_slack(&self, was: Decision) -> bool {
        self.slack != 0 && was.looked_at(&self.slack_range)
    }
}

/// A number of bytes that leaves room for sums: more than any trace has.
pub(crate) fn clamped(bytes: u64) -> i64 {
    bytes.min(1 << 62) as i64
}

/// Finds the evicted windows among mostly kept ones.
fn collect_evicted(actions: &[Action], evicted: &mut Vec<WindowId>) {
    const STRIDE: usize = 16;
    for (position, stride) in actions.chunks(STRIDE).enumerate() {
        // A fixed number of comparisons without a branch: the compiler does them at once.
        if stride.iter().fold(false, |any, &action| any | (action != Action::Keep)) {
            let first = (position * STRIDE) as u32;
            let here = (first..).map(WindowId).zip(stride).filter(|&(_, &action)| action != Action::Keep);
            evicted.extend(here.map(|(id, _)| id));
        }
    }
}
