//! Decides what stays away from one part of an iteration to the next: the optimizer's state, while the gradients of several passes
//! add up.
//!
//! Every part has a plan of its own, and has to bring back what that sends away. What only the last of them uses may go once in an
//! iteration instead, and come once; then the parts between have its room, though they might do without. How much of it goes is the
//! same for all parts: whatever the latest iterations are predicted to be the fastest with.

use std::cmp::Reverse;
use std::collections::VecDeque;

use super::shim::Entry;

/// Iterations that are judged by.
const LATEST: usize = 4;
/// All that could be away is that many shares.
const SHARES: u64 = 4;
/// Iterations until it is looked at again, the first time, and how many times as many it is after that.
const PATIENCE: u32 = 16;
const PATIENCE_GROWS: u32 = 4;
/// By how much something has to be better.
const BETTER: f64 = 0.97;

/// A part of an iteration: the names of its program and of the rung that it went by.
pub(super) type PartName = (u64, u64);

/// What is predicted of several parts together: bytes over the budget, and time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Price {
    pub(super) over_budget_bytes: u64,
    pub(super) makespan_ns: u64,
}

impl Price {
    pub(super) fn and(self, other: Price) -> Price {
        Price {
            over_budget_bytes: self.over_budget_bytes.max(other.over_budget_bytes),
            makespan_ns: self.makespan_ns + other.makespan_ns,
        }
    }

    fn is_better_than(self, other: Price) -> bool {
        let less_ns = (self.makespan_ns as f64) < BETTER * other.makespan_ns as f64;
        self.over_budget_bytes < other.over_budget_bytes || self.over_budget_bytes == other.over_budget_bytes && less_ns
    }
}

/// What is away between the parts of an iteration.
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
}

impl Absence {
    pub(super) fn away(&self) -> &[Entry] {
        &self.away
    }

    /// An iteration of several known parts has ended. Whether to look at what is away, and whether for the first time.
    pub(super) fn note(&mut self, parts: Vec<PartName>) -> Option<Look> {
        if self.latest.len() == LATEST {
            self.latest.pop_front();
        }
        self.latest.push_back(parts);
        self.since += 1;
        let is_due = self.latest.len() == LATEST && self.since >= self.patience;
        is_due.then_some(if self.patience == 0 { Look::First } else { Look::Again })
    }

    /// What has been found out may not hold any more: it is looked at soon.
    pub(super) fn doubt(&mut self) {
        self.patience = 0;
        self.latest.clear();
    }

    /// Parts that are judged by.
    pub(super) fn parts(&self) -> impl Iterator<Item = PartName> {
        self.latest.iter().flatten().copied()
    }

    /// Decides anew how much is away, from what is on, of what `could` be, with its bytes. `price` tells what the parts cost with so
    /// much of it away.
    pub(super) fn decide(&mut self, mut could: Vec<(Entry, u64)>, mut price: impl FnMut(&[Entry]) -> Price) {
        self.since = 0;
        self.patience = (self.patience * PATIENCE_GROWS).max(PATIENCE);
        if could.is_empty() {
            self.away.clear();
            return;
        }
        // The largest first: few copies.
        could.sort_unstable_by_key(|&(entry, bytes)| (Reverse(bytes), entry));
        let before = (price(&share_of(&could, self.share)), self.share);
        let mut best = before;
        let (more, less): (&mut dyn Iterator<Item = u64>, &mut dyn Iterator<Item = u64>) =
            (&mut (self.share + 1..=SHARES), &mut (0..self.share).rev());
        for shares in [more, less] {
            if best.1 != before.1 {
                break;
            }
            for share in shares {
                let price = price(&share_of(&could, share));
                if best.0.is_better_than(price) {
                    break;
                }
                best = best.min((price, share));
            }
        }
        if best.0.is_better_than(before.0) {
            self.share = best.1;
        }
        self.away = share_of(&could, self.share);
    }
}

/// When it is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    First,
    Again,
}

/// So many of [`SHARES`] of all bytes, at most.
fn share_of(could: &[(Entry, u64)], share: u64) -> Vec<Entry> {
    let mut left_bytes = could.iter().map(|(_, bytes)| bytes).sum::<u64>() * share / SHARES;
    let fits = |&&(_, bytes): &&(Entry, u64)| {
        let fits = bytes <= left_bytes;
        left_bytes -= if fits { bytes } else { 0 };
        fits
    };
    could.iter().filter(fits).map(|&(entry, _)| entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn priced(makespan_ns: u64) -> Price {
        Price { over_budget_bytes: 0, makespan_ns }
    }

    #[test]
    fn as_much_is_away_as_is_fastest() {
        let entries = [0, 1, 2, 3].map(Entry::numbered);
        let could = || entries.map(|entry| (entry, 100)).to_vec();
        let mut absence = Absence::default();
        absence.decide(could(), |away| priced(1_000 + 100 * away.len().abs_diff(3) as u64));
        assert_eq!(absence.away(), &entries[..3]);
        absence.decide(could(), |away| priced(1_000 - 10 * away.len() as u64));
        assert_eq!(absence.away(), &entries[..3], "next to nothing is gained");
        absence.decide(could(), |away| Price { over_budget_bytes: 4 - away.len() as u64, ..priced(1_000) });
        assert_eq!(absence.away(), &entries[..]);
        absence.decide(could(), |away| priced(1_000 + 100 * away.len() as u64));
        assert!(absence.away().is_empty());
    }

    #[test]
    fn it_is_looked_at_once_enough_is_known_and_then_ever_more_rarely() {
        let mut absence = Absence::default();
        let mut until = || {
            let look = (1..).find_map(|at| Some((at, absence.note(vec![(1, 1), (2, 2)])?))).expect("without an end");
            absence.decide(Vec::new(), |_| priced(1));
            look
        };
        let again = [PATIENCE, PATIENCE * PATIENCE_GROWS].map(|at| (at, Look::Again));
        assert_eq!([until(), until(), until()], [(LATEST as u32, Look::First), again[0], again[1]]);
    }
}
