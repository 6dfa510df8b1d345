//! Makes room when bytes run out: evicts idle storages, one decision after another, until the allocation fits.
//!
//! The decisions are those of a rule on a [`Pressure`], as in a planner's sweep. What a sweep reads from a trace is
//! estimated here: a storage idle for so long is expected to stay idle for as long again (Lindy's rule), copies hide
//! behind nothing, and reruns take longer than what is dropped by now says, by as much as they have lately.

use super::ancestry::VersionId;
use super::residency::{Fault, Live, Place, Residency, Restoring};
use super::shim::{self, Entry};
use crate::baselines::Dtr;
use crate::estimate::ANCESTORS_MAX;
use crate::hardware::{Link, Tier};
use crate::lineage::{EVICTION_FLOOR_BYTES, WindowId};
use crate::observation::{Candidate, Pressure};
use crate::plan::{Action, ActionSet};
use crate::policy::{Choice, Policy};

/// How often one rebuild may give up the same of what its reruns will read. Each time it is made anew, with all that this takes; without
/// end that is twice and more the work for each step of a chain.
const GIVEN_UP_MAX: u32 = 4;
/// Candidates of one decision. Where there are more, it begins to look for them where the last one ended: to look at thousands for each of
/// thousands of evictions takes far longer than the evictions do. DTR draws its candidates, too.
const CANDIDATES_MAX: usize = 512;

/// What may be evicted, the first resort first.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Eligible {
    /// What is idle, but no gradient is dropped. What is rebuilt from a gradient needs it alive, and autograd adds in place
    /// only to what nobody else refers to: the program would run other operators than it does left alone.
    Idle,
    /// Gradients, too.
    GradientsToo,
    /// And what takes more reruns to make again than are looked at.
    DistantToo,
    /// What somebody waits for who still waits for something else.
    Awaited,
    /// What reruns to come will read.
    Expected,
    /// What was made from nothing, zeros say, and not used so far: an optimizer makes its state so, all at once. It is not dropped.
    /// What has no bytes yet stays, and so does what was made just now: a program that fills it in past the dispatcher is at that.
    Fresh,
}

/// What it takes to make a version again.
#[derive(Clone, Copy)]
struct RebuildCost {
    /// Time of its maker and of everything else that has to run again for it, as far as it was looked at.
    total_ns: u64,
    /// Whether that is not all.
    is_distant: bool,
}

/// How reruns went, beside what was expected of them when storages were dropped. That knew what was dropped by then, not what would be
/// dropped later and have to be made again, too.
#[derive(Clone, Copy, Debug, Default)]
struct Experience {
    expected_ns: f64,
    taken_ns: f64,
}

impl Experience {
    /// How much of what was known before counts beside a further rebuild.
    const LASTS: f64 = 1.0 - 1.0 / 64.0;
    /// How much of it still counts in the next iteration, or part of one: where nothing is dropped any more, nothing is learned.
    const NEXT: f64 = 0.9;
    /// What was as expected, to begin with.
    const FIRST_NS: f64 = 1e5;
    /// How many times as much as expected is reckoned with, at most.
    const MOST: f64 = 16.0;

    fn learn(&mut self, expected_ns: u64, taken_ns: u64) {
        self.expected_ns = Self::LASTS * self.expected_ns + expected_ns as f64;
        self.taken_ns = Self::LASTS * self.taken_ns + taken_ns as f64;
    }

    fn fade(&mut self) {
        self.taken_ns = self.expected_ns + Self::NEXT * (self.taken_ns - self.expected_ns);
    }

    /// What so much is worth.
    fn corrected(&self, expected_ns: u64) -> u64 {
        let factor = (self.taken_ns + Self::FIRST_NS) / (self.expected_ns + Self::FIRST_NS);
        (factor.clamp(1.0, Self::MOST) * expected_ns as f64) as u64
    }
}

/// What reruns have taken so far, and what had been expected of those for what they brought back.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Reruns {
    pub(super) taken_ns: u64,
    pub(super) expected_ns: u64,
}

/// Who decides under pressure, and what the decisions go by.
pub(crate) struct Reactive {
    pub(crate) rule: Box<dyn Policy + Send>,
    pub(crate) actions: ActionSet,
    pub(crate) link: Link,
    /// Device bytes that must not be exceeded; `u64::MAX` for no budget.
    pub(crate) budget_bytes: u64,
    /// Where evictions start: the budget, or above it while what exceeds it is restored.
    pub(crate) line_bytes: u64,
    /// What operators that found no room would have needed, with all else evicted; none before there was one.
    pub(crate) least_bytes: u64,
    /// The place in the table at which the next decision begins to look for candidates.
    pub(super) next_look: usize,
    pub(crate) reruns: Reruns,
    experience: Experience,
    entries: Vec<Entry>,
    candidates: Vec<Candidate>,
}

impl Reactive {
    pub(crate) fn new(rule: Box<dyn Policy + Send>, actions: ActionSet, link: Link) -> Self {
        debug_assert!(!rule.reads_features(), "there are none");
        Reactive {
            rule,
            actions,
            link,
            budget_bytes: u64::MAX,
            line_bytes: u64::MAX,
            least_bytes: 0,
            next_look: 0,
            reruns: Reruns::default(),
            experience: Experience::default(),
            entries: Vec::new(),
            candidates: Vec::new(),
        }
    }

    /// An iteration begins.
    pub(super) fn begin(&mut self) {
        self.next_look = 0;
        self.experience.fade();
    }
}

impl Residency {
    /// Whether so many bytes more fit under the line.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        shim::live_bytes().saturating_add(bytes) <= self.reactive.line_bytes
    }

    /// What runs from now on has so many bytes at most.
    pub(crate) fn expect_at_most(&mut self, bytes: u64) {
        self.swaps.are_dependable = self.engine.dependable_bytes() >= bytes;
    }

    /// Whether whatever there is can be swapped when bytes run out, and no copy has ever failed.
    pub(crate) fn can_rely_on_swaps(&self) -> bool {
        self.reactive.actions.swap && self.swaps.are_dependable && !self.swaps.have_failed
    }

    /// Evicts until `wanted_bytes` more fit under the line.
    pub(crate) fn relieve(&mut self, wanted_bytes: u64) -> Result<(), Fault> {
        loop {
            // Read once: other threads allocate and free meanwhile.
            let needed = shim::live_bytes().saturating_add(wanted_bytes);
            let deficit_bytes = needed.saturating_sub(self.reactive.line_bytes);
            if deficit_bytes == 0 {
                return Ok(());
            }
            if !self.evict_some(deficit_bytes)? && !self.has_room(wanted_bytes) {
                if !self.exempt {
                    return Err(self.no_room(wanted_bytes, needed));
                }
                // By no more than it takes.
                self.reactive.line_bytes = needed;
                shim::set_line(needed);
            }
        }
    }

    /// Sends away what exceeds so many bytes, and leaves it away. Whether there was enough to send.
    pub(crate) fn leave_within(&mut self, bytes: u64) -> bool {
        let before = std::mem::replace(&mut self.reactive.line_bytes, bytes);
        let is_within = self.relieve(0).is_ok();
        self.reactive.line_bytes = before;
        self.leave_away(|_, _| true);
        is_within
    }

    /// Gives back so many bytes, or as many as there are, because the device refuses what the line has room for: its memory
    /// is in pieces, or somebody else's. Whether there were any.
    pub(crate) fn relieve_device(&mut self, bytes: u64) -> Result<bool, Fault> {
        let before = shim::live_bytes();
        while shim::live_bytes().saturating_add(bytes) > before {
            if !self.evict_some(bytes)? {
                return Ok(shim::live_bytes() < before);
            }
        }
        Ok(true)
    }

    /// Whether storages that have died since gave bytes back.
    fn absorb_pressed(&mut self) -> Result<bool, Fault> {
        let before = shim::live_bytes();
        self.absorb_freed()?;
        Ok(shim::live_bytes() < before)
    }

    /// Nothing is left to evict.
    fn no_room(&mut self, wanted_bytes: u64, needed_bytes: u64) -> Fault {
        let budget = self.reactive.budget_bytes;
        let exceed = format!("{wanted_bytes} bytes more exceed the budget of {budget} bytes, and");
        if shim::is_capturing() {
            return Fault::NoRoom(format!("{exceed} {}", Fault::Captured));
        }
        self.reactive.least_bytes = self.reactive.least_bytes.max(needed_bytes);
        let least = self.reactive.least_bytes;
        let also = if self.swaps.are_refused { "; a copy to a slow tier has failed" } else { "" };
        Fault::NoRoom(format!(
            "{exceed} nothing is left to evict{also}; the least feasible budget found so far is {least} bytes"
        ))
    }

    /// Gives some bytes back: what costs nothing first. Whether there was anything to give.
    fn evict_some(&mut self, deficit_bytes: u64) -> Result<bool, Fault> {
        if self.absorb_pressed()? {
            return Ok(true);
        }
        if shim::is_capturing() {
            return Ok(false);
        }
        let under_way: u64 = self.offloading.iter().filter_map(|&entry| self.get(entry)).map(|live| live.bytes).sum();
        if under_way >= deficit_bytes {
            return self.finish_oldest_offload();
        }
        if self.release_oldest_beside()? {
            return Ok(true);
        }
        if self.restoring == Restoring::Swapped {
            return self.finish_oldest_offload();
        }
        if self.discard_oldest_copy()? {
            return Ok(true);
        }
        use Eligible::{Awaited, DistantToo, Expected, Fresh, GradientsToo, Idle};
        for eligible in [Idle, GradientsToo, DistantToo, Awaited, Expected, Fresh] {
            if let Some((entry, action)) = self.choose(deficit_bytes - under_way, eligible) {
                // A failure is remembered, so that it is not chosen again.
                match action {
                    Action::Swap => self.evict_by_swap(entry),
                    _ => self.evict_by_drop(entry),
                }?;
                return Ok(true);
            }
            if self.finish_oldest_offload()? {
                return Ok(true);
            }
        }
        Ok(self.release_cheapest_expected()? || self.tries_swaps_again())
    }

    /// Whether what was refused is tried again: nothing else is left, and a slow tier that was full may have room by now.
    fn tries_swaps_again(&mut self) -> bool {
        let again = self.reactive.actions.swap && self.swaps.are_refused && self.swaps.more_tries > 0;
        if again {
            self.swaps.are_refused = false;
            self.swaps.more_tries -= 1;
        }
        again
    }

    fn finish_oldest_offload(&mut self) -> Result<bool, Fault> {
        let Some(&entry) = self.offloading.front() else { return Ok(false) };
        self.settle_offload(entry).map(|()| true)
    }

    fn release_oldest_beside(&mut self) -> Result<bool, Fault> {
        let idle = |&&version: &&_| !self.ancestry.version(version).is_wanted();
        match self.beside.iter().find(idle).copied() {
            Some(version) => self.release(version).map(|()| true),
            None => Ok(false),
        }
    }

    /// Releases what reruns to come will have to make again; not what was made again for them often enough: there is no room.
    fn release_cheapest_expected(&mut self) -> Result<bool, Fault> {
        let times = |version: &VersionId| self.given_up.get(version).copied().unwrap_or(0);
        let unread = self.beside.iter().copied().filter(|&version| self.ancestry.version(version).wanted == 0);
        let cheapest = unread
            .filter(|version| times(version) < GIVEN_UP_MAX)
            .min_by_key(|&version| self.rebuild_cost(version).total_ns);
        let Some(version) = cheapest else { return Ok(false) };
        *self.given_up.entry(version).or_default() += 1;
        self.release(version).map(|()| true)
    }

    /// Releases what was brought back early and is not in use: its copy is still there.
    fn discard_oldest_copy(&mut self) -> Result<bool, Fault> {
        let early = |(entry, live): &(Entry, &Live)| {
            live.users + live.awaited == 0 && (self.has_copy(*entry) || matches!(live.place, Place::Prefetching(_)))
        };
        let oldest = self.iter().filter(early).min_by_key(|(_, live)| live.last_use_ns).map(|(entry, _)| entry);
        let Some(entry) = oldest else { return Ok(false) };
        if self.has_copy(entry) {
            self.discard(entry)?;
        } else if let Err(fault) = self.finish_prefetch(entry) {
            // Its device bytes are free again either way.
            debug_assert!(!matches!(fault, Fault::NoRoom(_)));
        }
        Ok(true)
    }

    fn evict_by_swap(&mut self, entry: Entry) -> Result<(), Fault> {
        match self.offload(&[entry], Tier::Host, false) {
            // It was let go of meanwhile, and somebody is about to say so, which gives its bytes back.
            Ok(()) if self.get(entry).is_some_and(|live| matches!(live.place, Place::Resident)) => {
                if !self.has_died(entry)? {
                    self.lock(entry, "it has died");
                }
            }
            Ok(()) => self.report.reactive_evictions += 1,
            Err(Fault::Copy(_)) => {}
            Err(_) => self.lock(entry, "it could not be offloaded"),
        }
        Ok(())
    }

    fn evict_by_drop(&mut self, entry: Entry) -> Result<(), Fault> {
        let version = self.version_of(entry)?;
        let RebuildCost { total_ns, is_distant } = self.rebuild_cost(version);
        match self.drop_bytes(entry) {
            Ok(()) => {
                self.report.reactive_evictions += 1;
                // Of what is distant it is not known.
                self.ancestry.version_mut(version).expected_ns = if is_distant { 0 } else { total_ns };
            }
            Err(_) if self.can_drop(entry) => self.lock(entry, "it could not be dropped"),
            Err(_) => {}
        }
        Ok(())
    }

    /// What was dropped has been made again, by all reruns since `before`.
    pub(crate) fn learn(&mut self, before: Reruns) {
        let Reruns { taken_ns, expected_ns } = self.reactive.reruns;
        if expected_ns > before.expected_ns {
            self.reactive.experience.learn(expected_ns - before.expected_ns, taken_ns - before.taken_ns);
        }
    }

    fn lock(&mut self, entry: Entry, why: &'static str) {
        if let Ok(live) = self.live_mut(entry) {
            live.locked = Some(why);
        }
    }

    /// What the rule evicts, if anything is `eligible`.
    fn choose(&mut self, deficit_bytes: u64, eligible: Eligible) -> Option<(Entry, Action)> {
        self.find_candidates(eligible);
        let Reactive { rule, candidates, entries, .. } = &mut self.reactive;
        if candidates.is_empty() {
            return None;
        }
        let pressure = Pressure { operator: 0, deficit_bytes, wait: None, candidates, features: &[] };
        let chosen = rule.choose(&pressure).or_else(|| Dtr.choose(&pressure));
        chosen.map(|Choice { candidate, action }| (entries[candidate], action))
    }

    /// The storages that are `eligible`, and what evicting them would cost.
    fn find_candidates(&mut self, eligible: Eligible) {
        let mut entries = std::mem::take(&mut self.reactive.entries);
        let mut candidates = std::mem::take(&mut self.reactive.candidates);
        entries.clear();
        candidates.clear();
        let is_expected = |version| self.ancestry.version(version).expected > 0;
        let is_idle = |live: &Live| {
            live.users == 0
                && (live.awaited > 0) == (eligible == Eligible::Awaited)
                && (eligible == Eligible::Expected || !live.version.is_some_and(is_expected))
                && match eligible {
                    Eligible::Fresh => live.filled_at.is_some_and(|at| self.operators >= at),
                    _ => live.filled_at.is_none(),
                }
                && live.locked.is_none()
                && live.bytes >= EVICTION_FLOOR_BYTES
                && matches!(live.place, Place::Resident)
        };
        entries.extend(self.iter().filter(|(_, live)| is_idle(live)).map(|(entry, _)| entry));
        let now_ns = self.now_ns();
        if entries.len() > CANDIDATES_MAX {
            let first = entries.partition_point(|entry| entry.index() < self.reactive.next_look);
            entries.rotate_left(first);
        }
        let mut looked = 0;
        entries.retain(|&entry| {
            if candidates.len() == CANDIDATES_MAX {
                return false;
            }
            looked = entry.index() + 1;
            let row = WindowId(candidates.len() as u32);
            let candidate = self.candidate(entry, row, now_ns, eligible);
            let lawful = candidate.can_swap || candidate.can_recompute;
            if lawful {
                candidates.push(candidate);
            }
            lawful
        });
        self.reactive.next_look = looked;
        self.reactive.entries = entries;
        self.reactive.candidates = candidates;
    }

    fn candidate(&mut self, entry: Entry, window: WindowId, now_ns: u64, eligible: Eligible) -> Candidate {
        let live = self.get(entry).expect("found in the table");
        let (bytes, version) = (live.bytes, live.version);
        let may_drop = eligible != Eligible::Fresh && (eligible != Eligible::Idle || !live.is_gradient);
        let staleness_ns = now_ns - live.last_use_ns.min(now_ns);
        let ActionSet { swap, recompute } = self.reactive.actions;
        let link = &self.reactive.link;
        let transfer_ns = link.offload_ns(bytes) + link.prefetch_ns(bytes);
        let contention_ns = 2 * link.contention_ns(bytes);
        let can_recompute = recompute && may_drop && self.restoring == Restoring::Nothing && self.can_drop(entry);
        let rebuild = version.filter(|_| can_recompute).map(|version| self.rebuild_cost(version));
        let may_be_distant = !matches!(eligible, Eligible::Idle | Eligible::GradientsToo);
        let rebuild = rebuild.filter(|rebuild| !rebuild.is_distant || may_be_distant);
        let maker = version.and_then(|version| self.ancestry.version(version).maker);
        Candidate {
            window,
            bytes,
            staleness_ns,
            gap_ns: 2 * staleness_ns,
            to_use_ns: staleness_ns,
            transfer_ns,
            swap_exposed_ns: transfer_ns,
            contention_ns,
            own_recompute_ns: maker.map_or(0, |maker| self.ancestry.maker(maker).cost_ns),
            recompute_ns: rebuild.map_or(0, |rebuild| self.reactive.experience.corrected(rebuild.total_ns)),
            // For a learned policy.
            dropped_children_bytes: 0,
            dropped_children_ns: version.map_or(0, |version| self.ancestry.version(version).dropped_children_ns),
            used_again: true,
            can_swap: swap && !self.swaps.are_refused,
            can_recompute: rebuild.is_some(),
        }
    }

    /// What it takes to make a version again.
    fn rebuild_cost(&self, version: VersionId) -> RebuildCost {
        let mut total_ns = 0;
        let mut seen = Vec::with_capacity(8);
        let mut next = 0;
        seen.push(version);
        while next < seen.len() && next < ANCESTORS_MAX {
            let version = seen[next];
            next += 1;
            let Some(maker) = self.ancestry.version(version).maker else { continue };
            total_ns += self.ancestry.maker(maker).cost_ns;
            for &input in self.ancestry.inputs(maker).iter().flatten() {
                if self.ancestry.is_missing(input) && !seen.contains(&input) {
                    seen.push(input);
                }
            }
        }
        RebuildCost { total_ns, is_distant: next < seen.len() }
    }
}

#[cfg(test)]
mod tests {
    use super::Experience;

    #[test]
    fn drops_cost_what_they_have_cost_lately() {
        const EXPECTED_NS: u64 = 1_000_000;
        let mut experience = Experience::default();
        assert_eq!(experience.corrected(EXPECTED_NS), EXPECTED_NS, "nothing is known");
        (0..64).for_each(|_| experience.learn(EXPECTED_NS, 4 * EXPECTED_NS));
        let learned = experience.corrected(EXPECTED_NS);
        assert!((39 * EXPECTED_NS / 10..4 * EXPECTED_NS).contains(&learned), "{learned}");
        // Where nothing is dropped for that, it is tried again some day.
        (0..40).for_each(|_| experience.fade());
        let faded = experience.corrected(EXPECTED_NS);
        assert!((EXPECTED_NS..11 * EXPECTED_NS / 10).contains(&faded), "{faded}");
        (0..640).for_each(|_| experience.learn(EXPECTED_NS, EXPECTED_NS / 2));
        assert_eq!(experience.corrected(EXPECTED_NS), EXPECTED_NS, "no less than what is known for certain");
    }
}
