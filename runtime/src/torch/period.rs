//! Finds where iterations begin in a stream of operators, with no call by the program.
//!
//! Training is iterative: the same operators come again and again (AppObMem, Li et al., ACM TACO 2022, observe it and
//! build on it; the rule here is ours, for only the abstract was at hand). The stream is cut where autograd records the first
//! operator after an update. Cuts between stretches that are equal, up to their updates, are iterations; where a loop takes several
//! stretches, the period is found as by the prefix function of Knuth, Morris and Pratt, and begins where least would be allocated
//! if everything were resident. What repeats inside an iteration, a layer say, is never mistaken for one, for no update lies in
//! between. A stream without updates has no iterations, and says so by finding none.
//!
//! Between the update and the cut a loop may print its loss, evaluate its model, let go of its gradients, prepare the next batch.
//! The iteration begins where least would be allocated there, too: what was let go of before is not alive where it begins, and a
//! batch belongs to the iteration that it is for, as do the shapes of what is made from it. Where that will be is known from
//! stretches that were the same up to there; until then the cut has to do.
//!
//! Gradient recording is off in other places, too: in a function with a backward pass of its own, in a checkpointed
//! layer, in what measures a model, or clips gradients. So an update is only what comes after a backward pass and writes
//! what was there before that; or what a backward pass writes of what the forward pass before it has read, where a loop
//! updates each parameter as soon as its gradient is there.

use std::collections::{HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::trace::Phase;

/// Stretches between updates that one iteration may take.
const STRETCHES_MAX: usize = 16;
/// Times that a period must have been seen before it is believed.
const REPEATS: usize = 2;
/// Ways in which stretches may come to where an iteration begins that are remembered.
const WAYS_MAX: usize = 64;

/// An operator, as far as periods go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The number that stands for its name.
    pub name: u32,
    /// When in an iteration it runs. What runs with gradient recording off counts as an update.
    pub phase: Phase,
    /// Whether autograd records it, or what came since the last operator, for a backward pass to come.
    pub recorded: bool,
    /// Whether it writes, with gradient recording off, what had been made before the last backward pass began; in a backward
    /// pass, what the forward pass before it has read and not made.
    pub updates: bool,
}

/// One stretch of operators, from one cut to the next.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    /// Of the names of those up to the last update: what prepares the next batch may go by chance.
    hash: u64,
    /// Bytes that would have been allocated where it began, had everything been resident.
    bytes: u64,
}

/// Watches a stream of operators.
#[derive(Debug, Default)]
pub struct PeriodDetector {
    was_in_backward: bool,
    backward_passes: u32,
    /// Whether a backward pass, and after it an update, is in this stretch.
    has_backward: bool,
    has_update: bool,
    hasher: DefaultHasher,
    operators: u64,
    /// What the stretch was up to its latest update.
    updated: u64,
    started_bytes: u64,
    stretches: VecDeque<Stretch>,
    /// Stretches until the next iteration begins, and how many an iteration takes.
    locked: Option<(usize, usize)>,
    /// What had come of a stretch where an iteration could have begun.
    ways: HashSet<u64>,
    /// Where that was in this one so far since its update, and with how many bytes: the first place with the least.
    least: Option<(u64, u64)>,
    /// Whether the next iteration has begun in this stretch.
    has_begun: bool,
}

impl PeriodDetector {
    /// Stretches between updates that an iteration takes, once that is known.
    pub fn period(&self) -> Option<usize> {
        self.locked.map(|(_, period)| period)
    }

    /// Backward passes that have begun.
    pub fn backward_passes(&self) -> u32 {
        self.backward_passes
    }

    /// Whether an update has come, and nothing that was recorded after it.
    pub fn is_updated(&self) -> bool {
        self.has_update
    }

    /// Takes the next operator. `live_bytes` are allocated before it; `bytes` says how many would be if everything were resident, no
    /// fewer, and takes a while: that is returned where an iteration begins with the operator: where `early`, right after the last update.
    ///
    /// Sizes are left out on purpose: iterations of different shapes are iterations all the same.
    pub fn push(&mut self, step: Step, early: bool, live_bytes: u64, bytes: impl FnOnce() -> u64) -> Option<u64> {
        let Step { name, phase, recorded, updates } = step;
        let in_backward = phase == Phase::Backward;
        let begins = match phase {
            Phase::Forward if self.has_update && recorded => self.cut(bytes()),
            Phase::Forward if self.has_update => self.pause(early, live_bytes, bytes),
            _ => None,
        };
        self.backward_passes += u32::from(in_backward && !self.was_in_backward);
        self.was_in_backward = in_backward;
        self.has_backward |= in_backward;
        name.hash(&mut self.hasher);
        self.operators += 1;
        if updates && self.has_backward {
            self.has_update = true;
            self.least = None;
            self.updated = self.way();
        }
        begins
    }

    /// Unlearns the period, for what it said to be the beginning of an iteration is none.
    pub fn reject(&mut self) {
        self.locked = None;
        self.stretches.clear();
        self.ways.clear();
        self.has_begun = false;
    }

    /// What has come of this stretch.
    fn way(&self) -> u64 {
        self.hasher.finish() ^ self.operators
    }

    /// Between an update and the end of a stretch. Returns the bytes where an iteration begins here.
    fn pause(&mut self, early: bool, live_bytes: u64, bytes: impl FnOnce() -> u64) -> Option<u64> {
        let ends = self.locked.is_none_or(|(left, _)| left == 1);
        if !ends || self.has_begun {
            return None;
        }
        let way = self.way();
        let is_updated = || self.stretches.back().is_some_and(|before| before.hash == way);
        if self.locked.is_some() && (self.ways.contains(&way) || early && is_updated()) {
            self.has_begun = true;
            return Some(bytes());
        }
        let least = self.least.map_or(u64::MAX, |(least, _)| least);
        if live_bytes < least {
            let bytes = bytes();
            if bytes < least {
                self.least = Some((bytes, way));
            }
        }
        None
    }

    /// Ends a stretch. Returns `bytes` where an iteration begins here.
    fn cut(&mut self, bytes: u64) -> Option<u64> {
        (self.has_backward, self.has_update) = (false, false);
        let (has_begun, least) = (std::mem::take(&mut self.has_begun), self.least.take());
        let stretch = Stretch { hash: self.updated, bytes: self.started_bytes };
        (self.hasher, self.operators, self.started_bytes) = (DefaultHasher::new(), 0, bytes);
        self.stretches.push_back(stretch);
        if self.stretches.len() > 2 * REPEATS * STRETCHES_MAX {
            self.stretches.pop_front();
        }
        let begins = match &mut self.locked {
            Some((left @ 1, period)) => {
                *left = *period;
                true
            }
            Some((left, _)) => {
                *left -= 1;
                false
            }
            None => self.lock(bytes),
        };
        if !begins || has_begun {
            return None;
        }
        if let Some((_, way)) = least.filter(|&(least, _)| least < bytes) {
            if self.ways.len() == WAYS_MAX {
                self.ways.clear();
            }
            self.ways.insert(way);
        }
        Some(bytes)
    }

    /// Looks for a period that ends here. Whether an iteration begins at this very cut.
    fn lock(&mut self, bytes: u64) -> bool {
        let Some(period) = self.find() else { return false };
        // Where the stretches of one period began, the next one's first included.
        let count = self.stretches.len();
        let began = |ahead: usize| match ahead {
            0 => bytes,
            _ => self.stretches[count - period + ahead].bytes,
        };
        let ahead = (0..period).min_by_key(|&ahead| began(ahead)).expect("a period is not empty");
        self.locked = Some((if ahead == 0 { period } else { ahead }, period));
        ahead == 0
    }

    /// The least number of stretches after which all of the last ones repeat.
    fn find(&self) -> Option<usize> {
        let count = self.stretches.len();
        (1..=STRETCHES_MAX).find(|&period| {
            let needed = period * REPEATS;
            // The first stretch of all may have started anywhere.
            needed < count
                && (count - needed + period..count)
                    .all(|index| self.stretches[index].hash == self.stretches[index - period].hash)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Phase::{Backward, Forward, Update};

    /// Operators of iterations of one kind: forward, backward and update.
    fn iteration(kind: u32, layers: u32) -> Vec<(u32, Phase, u64)> {
        let forward = (0..layers).flat_map(|_| [(10 * kind, Forward, 5), (10 * kind + 1, Forward, 9)]);
        let backward = (0..layers).map(|_| (10 * kind + 2, Backward, 9));
        forward.chain(backward).chain([(10 * kind + 3, Update, 2), (10 * kind + 3, Update, 2)]).collect()
    }

    /// The number of what has gradient recording off, and is no update.
    const MEASURES: u32 = 1_000;

    /// The numbers of what autograd has nothing to record of, with gradient recording on.
    const PRINTS: u32 = 1_001;
    const FETCHES: u32 = 1_002;

    fn step(name: u32, phase: Phase) -> Step {
        Step {
            name,
            phase,
            recorded: phase == Forward && name < MEASURES,
            updates: phase == Update && name != MEASURES,
        }
    }

    /// Where in the stream iterations are said to begin.
    fn begins(stream: &[(u32, Phase, u64)]) -> Vec<usize> {
        let mut detector = PeriodDetector::default();
        let mut begins = |&(name, phase, bytes)| detector.push(step(name, phase), false, bytes, || bytes).is_some();
        stream.iter().enumerate().filter(|(_, one)| begins(one)).map(|(index, _)| index).collect()
    }

    #[test]
    fn iterations_begin_where_something_is_recorded_after_an_update() {
        // A loss is printed after the update, or nothing is.
        for prints in [0, 2] {
            let one = [iteration(1, 12), vec![(PRINTS, Forward, 6); prints]].concat();
            let stream: Vec<_> = (0..8).flat_map(|_| one.clone()).collect();
            let found = begins(&stream);
            assert_eq!(found, (3..8).map(|index| index * one.len()).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_batch_belongs_to_the_iteration_that_it_is_for() {
        // A loss is printed, the model measured now and then, a batch fetched.
        let prints = [(PRINTS, Forward, 7), (PRINTS, Forward, 5)];
        let fetches = [(FETCHES, Forward, 3), (FETCHES, Forward, 4)];
        let mut trains = iteration(1, 12);
        trains[0].2 = 6;
        let (mut stream, mut expected) = (Vec::new(), Vec::new());
        for at in 0..20 {
            stream.extend([&fetches[..], &trains, &prints].concat());
            if at % 4 == 3 {
                stream.extend([(MEASURES, Update, 9), (MEASURES, Update, 9)]);
            }
            expected.push(stream.len());
        }
        let found = begins(&stream);
        // The first one, and the first one after a measurement, begin where they are found, with the batch there.
        let (late, exact): (Vec<usize>, Vec<usize>) = found.iter().partition(|begin| !expected.contains(begin));
        assert!(exact.len() > 14 && late.len() <= 2, "{late:?} of {found:?}");
        assert!(late.iter().all(|begin| expected.contains(&(begin - fetches.len()))), "{late:?}");
    }

    #[test]
    fn an_iteration_may_take_several_updates_and_begins_where_least_is_alive() {
        let one = |kind: u32, live: u64| {
            let mut steps = iteration(kind, 3);
            steps[0].2 = live;
            steps
        };
        // A discriminator's update and a generator's: less is alive before the discriminator's.
        let stream: Vec<_> = (0..10).flat_map(|_| [one(1, 1), one(2, 7)].concat()).collect();
        let length = 2 * iteration(1, 3).len();
        let found = begins(&stream);
        assert!(found.len() >= 6, "{found:?}");
        assert!(found.iter().all(|begin| begin % length == 0), "{found:?} of {length}");
    }

    #[test]
    fn what_repeats_without_updates_is_no_iteration() {
        let stream: Vec<_> = (0..500).flat_map(|_| [(1, Forward, 1), (2, Forward, 2), (3, Backward, 3)]).collect();
        assert!(begins(&stream).is_empty());
    }

    #[test]
    fn what_has_gradient_recording_off_elsewhere_is_no_update() {
        // After an operator of the forward pass, after one of the backward pass, and between that and the update.
        for at in [3, 15, 18] {
            let mut steps = iteration(1, 6);
            // What follows has gradient recording on.
            steps.splice(at..at, [(MEASURES, Update, 9), (7, Forward, 9)]);
            let stream: Vec<_> = (0..8).flat_map(|_| steps.clone()).collect();
            let found = begins(&stream);
            assert!(found.len() >= 4 && found.iter().all(|begin| begin % steps.len() == 0), "{at}: {found:?}");
        }
    }

    #[test]
    fn what_is_written_before_the_backward_pass_is_no_update() {
        let mut steps = iteration(1, 6);
        // A statistic of each layer, kept from one iteration to the next.
        for at in [9, 6, 3] {
            steps.insert(at, (5, Update, 9));
        }
        let stream: Vec<_> = (0..8).flat_map(|_| steps.clone()).collect();
        let found = begins(&stream);
        assert!(found.len() >= 4 && found.iter().all(|begin| begin % steps.len() == 0), "{found:?}");
    }

    #[test]
    fn a_period_that_is_rejected_has_to_be_seen_again() {
        let mut detector = PeriodDetector::default();
        let mut begins = |iterations: usize| {
            let stream = (0..iterations).flat_map(|_| iteration(1, 3));
            let found =
                stream.filter(|&(name, phase, _)| detector.push(step(name, phase), false, 1, || 1).is_some()).count();
            detector.reject();
            (found, detector.period())
        };
        assert_eq!(begins(8), (5, None));
        // The first of these begins with a cut, too.
        assert_eq!(begins(8), (6, None));
    }

    #[test]
    fn what_never_repeats_has_no_period() {
        let stream: Vec<_> = (0..40).flat_map(|kind| iteration(kind, 2)).collect();
        assert!(begins(&stream).is_empty());
    }
}
