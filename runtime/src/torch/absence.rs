//! Decides what stays away from one part of an iteration to the next, as the optimizer's state while the gradients of several passes
//! add up; and from one iteration to the next, where nobody needs it in between.
//!
//! Every part has a plan of its own, and has to bring back what that sends away. What only the last of them uses may go once in an
//! iteration instead, and come once; then the parts between have its room, though they might do without. And where all that is there
//! all the time, parameters and the optimizer's state, exceeds the budget, some of it has to be away where one iteration ends and the
//! next begins. How much of it is away is the same everywhere: whatever the latest iterations are predicted to be the fastest with.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};

use super::names::PartName;
use super::shim::Entry;

/// Iterations that are judged by.
const LATEST: usize = 4;
/// All that could be away is that many shares.
const SHARES: u64 = 16;
/// By how many of them more or fewer it is tried, one after the other.
const STEPS: [u64; 3] = [4, 2, 1];
/// Iterations until it is looked at again, the first time, and how many times as many it is after that.
const PATIENCE: u32 = 16;
const PATIENCE_GROWS: u32 = 4;
/// By how much something has to be better.
const BETTER: f64 = 0.97;
/// What differs by less in time is alike: then it counts what is copied, which costs more than is predicted.
const ALIKE: f64 = 0.99;

/// What is predicted of several parts together: bytes over the budget, time, and bytes that are copied there or back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Price {
    /// Bytes that every plan takes over the budget. Where there are any, what the one that was made takes says little.
    pub(super) unavoidable_bytes: u64,
    pub(super) over_budget_bytes: u64,
    pub(super) makespan_ns: u64,
    pub(super) copied_bytes: u64,
}

impl Price {
    pub(super) fn and(self, other: Price) -> Price {
        Price {
            unavoidable_bytes: self.unavoidable_bytes.max(other.unavoidable_bytes),
            over_budget_bytes: self.over_budget_bytes.max(other.over_budget_bytes),
            makespan_ns: self.makespan_ns + other.makespan_ns,
            copied_bytes: self.copied_bytes + other.copied_bytes,
        }
    }

    /// By how much it does not hold the budget.
    fn excess(self) -> (u64, u64) {
        (self.unavoidable_bytes, self.over_budget_bytes)
    }

    /// Whether it holds the budget as well, and takes less than this share of the other's time.
    fn is_faster(self, share: f64, other: Price) -> bool {
        self.excess() == other.excess() && (self.makespan_ns as f64) < share * other.makespan_ns as f64
    }

    /// Whether it is better, or by so little that neither is.
    fn comes_before(self, other: Price) -> bool {
        self.is_better_than(other) || self < other && !other.is_better_than(self)
    }

    fn is_better_than(self, other: Price) -> bool {
        let copies_less = (self.copied_bytes as f64) < BETTER * other.copied_bytes as f64;
        self.excess() < other.excess()
            || self.is_faster(BETTER, other)
            || self.excess() == other.excess() && copies_less && !other.is_faster(ALIKE, self)
    }
}

/// What could be away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Leavable {
    pub(super) entry: Entry,
    pub(super) bytes: u64,
    /// How long it is not used, before and after.
    pub(super) idle_ns: u64,
}

/// What is away between the parts of an iteration, or from one to the next.
#[derive(Debug, Default)]
pub(super) struct Absence {
    away: Vec<Entry>,
    /// How many of [`SHARES`] of all that could be that is.
    share: u64,
    /// The latest iterations all of whose parts were known.
    latest: VecDeque<Vec<PartName>>,
    /// Iterations since it was last looked at, and until it is.
    since: u32,
    patience: u32,
    /// Whether it is to be looked at before.
    is_doubtful: bool,
    /// What it was last judged by.
    judged: Vec<PartName>,
}

impl Absence {
    pub(super) fn away(&self) -> &[Entry] {
        &self.away
    }

    /// An iteration of known parts has ended; it is urgent where they do not hold the budget. Whether to look at what is away, and why.
    pub(super) fn note(&mut self, parts: Vec<PartName>, is_urgent: bool) -> Option<Look> {
        if self.latest.len() == LATEST {
            self.latest.pop_front();
        }
        let is_urgent = is_urgent && parts.iter().any(|part| !self.judged.contains(part));
        self.latest.push_back(parts);
        self.since = self.since.saturating_add(1);
        let is_due = self.latest.len() == LATEST && (self.is_doubtful || self.since >= self.patience);
        let look = if self.patience == 0 { Look::First } else { Look::Again };
        if is_urgent { Some(Look::AtOnce) } else { is_due.then_some(look) }
    }

    /// What has been found out may not hold any more: it is looked at soon.
    pub(super) fn doubt(&mut self) {
        self.patience = 0;
        self.latest.clear();
        self.judged.clear();
    }

    /// Whether nothing was decided so far.
    pub(super) fn is_undecided(&self) -> bool {
        self.judged.is_empty()
    }

    /// It is looked at soon, where there is time.
    pub(super) fn reconsider(&mut self) {
        self.is_doubtful = true;
        self.latest.clear();
    }

    /// Parts that are judged by.
    pub(super) fn parts(&self) -> impl Iterator<Item = PartName> {
        self.latest.iter().flatten().copied()
    }

    /// Decides anew how much is away, from what is on, of what `could` be. `price` tells what the parts cost with so much of it away.
    pub(super) fn decide(&mut self, mut could: Vec<Leavable>, mut price: impl FnMut(&[Entry]) -> Price) {
        if !std::mem::take(&mut self.is_doubtful) && self.since >= self.patience {
            self.patience = self.patience.saturating_mul(PATIENCE_GROWS).max(PATIENCE);
        }
        self.since = 0;
        self.judged = self.parts().collect();
        if could.is_empty() {
            self.away.clear();
            return;
        }
        // What is large and not used for long first: few copies, and time for them.
        let area = |one: &Leavable| u128::from(one.bytes) * u128::from(one.idle_ns);
        could.sort_unstable_by_key(|one| (Reverse(area(one)), one.entry));
        let mut prices = BTreeMap::new();
        let mut price = |share: u64| *prices.entry(share).or_insert_with(|| price(&share_of(&could, share)));
        let (before, mut best) = (price(self.share), self.share);
        let mut go_on = |mut share: u64, further: &dyn Fn(u64) -> u64| loop {
            let next = further(share);
            if next == share || !price(next).comes_before(price(share)) {
                return share;
            }
            share = next;
        };
        for step in STEPS {
            let more = go_on(best, &|share| (share + step).min(SHARES));
            best = if more > best { more } else { go_on(best, &|share| share.saturating_sub(step)) };
        }
        if price(best).is_better_than(before) {
            self.share = best;
        }
        self.away = share_of(&could, self.share);
    }
}

/// When it is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    First,
    Again,
    /// The budget is not held, by a program that nothing was decided for.
    AtOnce,
}

/// So many of [`SHARES`] of all bytes, at most.
fn share_of(could: &[Leavable], share: u64) -> Vec<Entry> {
    let mut left_bytes = could.iter().map(|one| one.bytes).sum::<u64>() * share / SHARES;
    let fits = |one: &&Leavable| {
        let fits = one.bytes <= left_bytes;
        left_bytes -= if fits { one.bytes } else { 0 };
        fits
    };
    could.iter().filter(fits).map(|one| one.entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(numbers: &[u64]) -> Vec<PartName> {
        numbers.iter().copied().map(PartName::numbered).collect()
    }

    fn priced(makespan_ns: u64) -> Price {
        Price { makespan_ns, ..Price::default() }
    }

    #[test]
    fn as_much_is_away_as_is_fastest() {
        let entries = [0, 1, 2, 3].map(Entry::numbered);
        let could = || entries.map(|entry| Leavable { entry, bytes: 100, idle_ns: 1 }).to_vec();
        let mut absence = Absence::default();
        absence.decide(could(), |away| priced(1_000 + 100 * away.len().abs_diff(3) as u64));
        assert_eq!(absence.away(), &entries[..3]);
        absence.decide(could(), |away| priced(1_000 - 10 * away.len() as u64));
        assert_eq!(absence.away(), &entries[..3], "next to nothing is gained");
        absence.decide(could(), |away| Price { over_budget_bytes: 4 - away.len() as u64, ..priced(1_000) });
        assert_eq!(absence.away(), &entries[..]);
        absence.decide(could(), |away| priced(1_000 + 100 * away.len() as u64));
        assert!(absence.away().is_empty());
        absence.decide(could(), |away| Price {
            copied_bytes: 10 - away.len() as u64,
            ..priced(1_000 + away.len() as u64)
        });
        assert_eq!(absence.away(), &entries[..], "less is copied in what is hardly more time");
    }

    /// Where no plan holds the budget, the one that was made does not tell that it becomes easier.
    #[test]
    fn as_much_is_away_as_some_plan_needs() {
        let could = [0, 1, 2, 3].map(|entry| Leavable { entry: Entry::numbered(entry), bytes: 100, idle_ns: 1 });
        let mut absence = Absence::default();
        absence.decide(could.to_vec(), |away| {
            let unavoidable_bytes = 3_u64.saturating_sub(away.len() as u64);
            let over_budget_bytes = if unavoidable_bytes == 0 { 0 } else { 9 };
            Price { unavoidable_bytes, over_budget_bytes, ..priced(1_000 + 100 * away.len() as u64) }
        });
        assert_eq!(absence.away().len(), 3);
    }

    #[test]
    fn what_is_large_and_idle_for_long_goes_first() {
        let [short, small, large] = [0, 1, 2].map(Entry::numbered);
        let could = vec![
            Leavable { entry: short, bytes: 200, idle_ns: 1 },
            Leavable { entry: small, bytes: 100, idle_ns: 10 },
            Leavable { entry: large, bytes: 100, idle_ns: 20 },
        ];
        let mut absence = Absence::default();
        let over = |away: &[Entry]| u64::from(!away.contains(&large)) + u64::from(!away.contains(&small));
        absence.decide(could, |away| Price { over_budget_bytes: over(away), ..priced(1_000 + away.len() as u64) });
        assert_eq!(absence.away(), &[large, small]);
    }

    #[test]
    fn it_is_looked_at_at_once_where_a_program_is_new_and_does_not_hold_the_budget() {
        let mut absence = Absence::default();
        assert_eq!(absence.note(parts(&[1]), false), None);
        assert_eq!(absence.note(parts(&[1]), true), Some(Look::AtOnce));
        absence.decide(Vec::new(), |_| priced(1));
        assert_eq!(absence.note(parts(&[1]), true), None);
        assert_eq!(absence.note(parts(&[1, 2]), true), Some(Look::AtOnce));
    }

    #[test]
    fn it_is_looked_at_once_enough_is_known_and_then_ever_more_rarely() {
        let mut absence = Absence::default();
        let mut until = || {
            let look = (1..).find_map(|at| Some((at, absence.note(parts(&[1, 2]), false)?))).expect("without an end");
            absence.decide(Vec::new(), |_| priced(1));
            look
        };
        let again = [PATIENCE, PATIENCE * PATIENCE_GROWS].map(|at| (at, Look::Again));
        assert_eq!([until(), until(), until()], [(LATEST as u32, Look::First), again[0], again[1]]);
    }

    #[test]
    fn to_look_at_it_sooner_does_not_make_it_rarer() {
        let mut absence = Absence::default();
        let until = |absence: &mut Absence| {
            let at = (1..).find(|_| absence.note(parts(&[1, 2]), false).is_some()).expect("without an end");
            absence.decide(Vec::new(), |_| priced(1));
            at
        };
        assert_eq!(until(&mut absence), LATEST as u32);
        for _ in 0..100 {
            absence.reconsider();
            assert_eq!(until(&mut absence), LATEST as u32);
        }
        assert_eq!(until(&mut absence), PATIENCE);
    }
}
