//! Loops that are several programs in turn, such as steps that accumulate gradients and one that applies them: which comes
//! next, and what the next one calls the storages that the last one left.

use std::collections::{HashMap, HashSet};

use super::names::ProgramName;
use super::shim::Entry;
use crate::trace::StorageId;

/// Iterations that are remembered.
const PAST: usize = 256;
/// Iterations in a row that tell enough, and how often they have to have been seen for that.
const ALIKE: usize = 64;
const ENOUGH: usize = 3;
/// Iterations in a row that have to have come as foreseen for the next one to count as foreseen.
const PROVEN: u32 = 8;

/// What comes next, as far as the past tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Foreseen<Name> {
    /// Nobody knows.
    #[default]
    Nothing,
    /// None of those that are known.
    Unknown,
    /// That one.
    Known(Name),
}

/// Which programs ran, or at which of their sizes, the latest last. None stands for one that was not known.
#[derive(Debug)]
pub(super) struct Succession<Name> {
    past: Vec<Option<Name>>,
    /// What was said to come next.
    foreseen: Foreseen<Name>,
    /// How many in a row came as was said.
    proven: u32,
}

impl<Name> Default for Succession<Name> {
    fn default() -> Self {
        Succession { past: Vec::new(), foreseen: Foreseen::Nothing, proven: 0 }
    }
}

impl<Name: Copy + PartialEq> Succession<Name> {
    /// The one that ran last.
    pub(super) fn last(&self) -> Option<Name> {
        self.past.last().copied().flatten()
    }

    pub(super) fn push(&mut self, program: Option<Name>) {
        let foreseen = std::mem::take(&mut self.foreseen);
        let is_foreseen = program.is_some_and(|program| foreseen == Foreseen::Known(program));
        self.proven = if is_foreseen { self.proven + 1 } else { 0 };
        if self.past.len() == 2 * PAST {
            self.past.drain(..PAST);
        }
        self.past.push(program);
    }

    /// The program that comes next: what came oftenest, and of that the latest, when so many iterations before were what the last ones
    /// are, in the same order, as there ever were.
    pub(super) fn next(&mut self) -> Foreseen<Name> {
        self.foreseen = self.foresee();
        self.foreseen
    }

    /// Whether what comes next is what was said, as far as can be told.
    pub(super) fn is_proven(&self) -> bool {
        self.proven >= PROVEN
    }

    fn foresee(&self) -> Foreseen<Name> {
        let past = &self.past[self.past.len().saturating_sub(PAST)..];
        let (mut came, mut most) = (Vec::new(), 1);
        for place in (0..past.len()).rev() {
            let before = past[..place].iter().rev().zip(past.iter().rev());
            let alike = before.take(ALIKE).take_while(|(then, now)| then == now).count();
            if alike > most {
                came.clear();
                most = alike;
            }
            if alike == most {
                came.push(past[place]);
            }
            if most == ALIKE && came.len() == ENOUGH {
                break;
            }
        }
        let times = |program: &&Option<Name>| came.iter().filter(|other| other == program).count();
        match came.iter().rev().max_by_key(times) {
            None => Foreseen::Nothing,
            Some(None) => Foreseen::Unknown,
            Some(&Some(program)) => Foreseen::Known(program),
        }
    }
}

/// The names of storages that outlive an iteration, in its program and in the one that comes after it.
#[derive(Debug, Default)]
pub(super) struct Legacies {
    /// By both programs. None where a storage turned out to be another one.
    names: HashMap<(ProgramName, ProgramName), Option<Names>>,
    left: Option<Left>,
}

/// What a program calls storages, and what its heir does.
type Names = Vec<(StorageId, StorageId)>;

/// The program that ran last, and the storages that stand for those of its trace.
#[derive(Debug)]
pub(super) struct Left {
    pub(super) by: ProgramName,
    pub(super) entries: Vec<Option<Entry>>,
}

impl Legacies {
    /// What `heir` will call storages that were left, as far as that is known.
    pub(super) fn of(&self, heir: ProgramName) -> impl Iterator<Item = (StorageId, Entry)> {
        let left = self.left.as_ref().and_then(|left| Some((self.names.get(&(left.by, heir))?, left)));
        left.into_iter().flat_map(|(names, left)| {
            names.iter().flatten().filter_map(|&(from, to)| Some((to, left.entries[from.index()]?)))
        })
    }

    /// The heir has found out by itself what it calls storages that were there before it.
    pub(super) fn learn(&mut self, heir: ProgramName, found: &[(StorageId, Entry)]) {
        let Some(left) = self.left.as_ref().filter(|_| !found.is_empty()) else { return };
        let Some(names) = self.names.entry((left.by, heir)).or_insert(Some(Vec::new())) else { return };
        let called: HashMap<Entry, StorageId> = found.iter().map(|&(to, entry)| (entry, to)).collect();
        let are_found: HashSet<StorageId> = found.iter().map(|&(to, _)| to).collect();
        names.retain(|(_, to)| !are_found.contains(to));
        let left = (0..).map(StorageId).zip(&left.entries);
        names.extend(left.filter_map(|(from, entry)| Some((from, *called.get(entry.as_ref()?)?))));
    }

    /// What the heir was told is not so.
    pub(super) fn distrust(&mut self, heir: ProgramName) {
        if let Some(left) = &self.left {
            self.names.insert((left.by, heir), None);
        }
    }

    /// Lets go of storages that have died since. Their numbers may be those of others.
    pub(super) fn forget_dead(&mut self, is_dead: impl Fn(Entry) -> bool) {
        for entry in self.left.iter_mut().flat_map(|left| &mut left.entries) {
            *entry = entry.filter(|&entry| !is_dead(entry));
        }
    }

    /// An iteration has ended.
    pub(super) fn leave(&mut self, left: Option<Left>) {
        self.left = left;
    }

    /// There is no such program any more.
    pub(super) fn forget(&mut self, program: ProgramName) {
        self.names.retain(|&(from, to), _| from != program && to != program);
        self.left.take_if(|left| left.by == program);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_stretch_that_was_seen_before_tells_what_comes_next() {
        // Gradients are accumulated over some steps, then applied; every so often something else is run.
        let round = [1, 2, 2, 2, 2, 3];
        let mut succession = Succession::default();
        let mut wrong = Vec::new();
        for at in 0..1000 {
            let program = if at % 100 == 99 { 9 } else { round[at % 100 % round.len()] };
            if succession.next() != Foreseen::Known(program) {
                wrong.push(at);
            }
            succession.push(Some(program));
        }
        // The first rounds, what nobody could know, and what came after that for the first time.
        assert!(wrong.iter().all(|&at| at < 12 || at % 100 == 99 || at == 100 || at == 103), "{wrong:?}");
    }

    #[test]
    fn what_comes_next_is_proven_after_a_while_and_until_something_else_comes() {
        let mut succession = Succession::default();
        let mut run = |program| {
            succession.next();
            succession.push(Some(program));
            succession.is_proven()
        };
        let proven: Vec<bool> = [1, 2, 2].repeat(6).into_iter().map(&mut run).collect();
        assert!(proven[..8].iter().all(|is_proven| !is_proven) && proven[15..].iter().all(|&is_proven| is_proven));
        assert!(!run(3));
    }

    #[test]
    fn what_is_not_known_is_expected_like_what_is() {
        let mut succession = Succession::default();
        assert_eq!(succession.next(), Foreseen::Nothing);
        [Some(1), None, Some(2), Some(1)].into_iter().for_each(|program| succession.push(program));
        assert_eq!(succession.next(), Foreseen::Unknown);
        succession.push(None);
        assert_eq!(succession.next(), Foreseen::Known(2));
        succession.push(Some(7));
        assert_eq!(succession.next(), Foreseen::Nothing);
    }

    #[test]
    fn an_heir_is_told_what_it_found_out_before() {
        let entry = Entry::numbered;
        let mut legacies = Legacies::default();
        let [before, heir, other] = [1, 2, 3].map(ProgramName::numbered);
        let left = |entries: [Option<u32>; 3]| {
            Some(Left { by: before, entries: entries.map(|number| number.map(entry)).to_vec() })
        };
        legacies.leave(left([Some(5), None, Some(6)]));
        assert_eq!(legacies.of(heir).count(), 0);
        // The last of these was not there when the other program ended.
        legacies.learn(heir, &[(StorageId(0), entry(6)), (StorageId(4), entry(9))]);
        // The next time storages are others.
        legacies.leave(left([Some(15), None, Some(16)]));
        assert_eq!(legacies.of(heir).collect::<Vec<_>>(), [(StorageId(0), entry(16))]);
        assert_eq!(legacies.of(other).count(), 0);
        legacies.distrust(heir);
        legacies.learn(heir, &[(StorageId(0), entry(16))]);
        assert_eq!(legacies.of(heir).count(), 0);
    }
}
