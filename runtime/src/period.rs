//! Finds where iterations begin in a stream of operators, with no call by the program.
//!
//! Training is iterative: the same operators come again and again (AppObMem, Li et al., ACM TACO 2022, observe it and
//! build on it; the rule here is ours, for only the abstract was at hand). The stream is cut where an update ends and
//! something else begins. Cuts between equal stretches are iterations; where a loop takes several stretches, the period
//! is found as by the prefix function of Knuth, Morris and Pratt, and begins where least is alive. What repeats inside
//! an iteration, a layer say, is never mistaken for one, for no update lies in between. A stream without updates has no
//! iterations, and says so by finding none.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::trace::Phase;

/// Stretches between updates that one iteration may take.
const STRETCHES_MAX: usize = 16;
/// Times that a period must have been seen before it is believed.
const REPEATS: usize = 2;

/// One stretch of operators, from one cut to the next.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    hash: u64,
    /// Bytes alive where it began.
    live_bytes: u64,
}

/// Watches a stream of operators.
#[derive(Debug, Default)]
pub struct PeriodDetector {
    last: Option<Phase>,
    hasher: DefaultHasher,
    operators: u64,
    started_bytes: u64,
    stretches: VecDeque<Stretch>,
    /// Stretches until the next iteration begins, and how many an iteration takes.
    locked: Option<(usize, usize)>,
}

impl PeriodDetector {
    /// A detector that has seen nothing.
    pub fn new() -> Self {
        PeriodDetector::default()
    }

    /// Stretches between updates that an iteration takes, once that is known.
    pub fn period(&self) -> Option<usize> {
        self.locked.map(|(_, period)| period)
    }

    /// Takes the next operator: the number that stands for its name, its phase, and the bytes alive before it. Whether an
    /// iteration begins with it.
    ///
    /// Sizes are left out on purpose: iterations of different shapes are iterations all the same.
    pub fn push(&mut self, name: u32, phase: Phase, live_bytes: u64) -> bool {
        let cut = self.last == Some(Phase::Update) && phase == Phase::Forward;
        self.last = Some(phase);
        let begins = cut && self.cut(live_bytes);
        name.hash(&mut self.hasher);
        self.operators += 1;
        begins
    }

    /// Ends a stretch. Whether an iteration begins here.
    fn cut(&mut self, live_bytes: u64) -> bool {
        let stretch = Stretch { hash: self.hasher.finish() ^ self.operators, live_bytes: self.started_bytes };
        (self.hasher, self.operators, self.started_bytes) = (DefaultHasher::new(), 0, live_bytes);
        self.stretches.push_back(stretch);
        if self.stretches.len() > 2 * REPEATS * STRETCHES_MAX {
            self.stretches.pop_front();
        }
        match &mut self.locked {
            Some((left, period)) => {
                *left -= 1;
                if *left > 0 {
                    return false;
                }
                *left = *period;
                true
            }
            None => self.lock(live_bytes),
        }
    }

    /// Looks for a period that ends here. Whether an iteration begins at this very cut.
    fn lock(&mut self, live_bytes: u64) -> bool {
        let Some(period) = self.find() else { return false };
        // Where the stretches of one period began, the next one's first included: the least alive is between iterations.
        let count = self.stretches.len();
        let began = |ahead: usize| match ahead {
            0 => live_bytes,
            _ => self.stretches[count - period + ahead].live_bytes,
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
    use Phase::{Backward, Forward, Update};

    /// Operators of iterations of one kind: forward, backward and update.
    fn iteration(kind: u32, layers: u32) -> Vec<(u32, Phase, u64)> {
        let forward = (0..layers).flat_map(|_| [(10 * kind, Forward, 5), (10 * kind + 1, Forward, 9)]);
        let backward = (0..layers).map(|_| (10 * kind + 2, Backward, 9));
        forward.chain(backward).chain([(10 * kind + 3, Update, 2), (10 * kind + 3, Update, 2)]).collect()
    }

    /// Where in the stream iterations are said to begin.
    fn begins(stream: &[(u32, Phase, u64)]) -> Vec<usize> {
        let mut detector = PeriodDetector::new();
        let pushed = stream.iter().enumerate();
        pushed.filter(|(_, step)| detector.push(step.0, step.1, step.2)).map(|(index, _)| index).collect()
    }

    #[test]
    fn iterations_begin_where_updates_end() {
        let stream: Vec<_> = (0..8).flat_map(|_| iteration(1, 12)).collect();
        let length = iteration(1, 12).len();
        let found = begins(&stream);
        assert_eq!(found, (3..8).map(|index| index * length).collect::<Vec<_>>());
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
    fn what_never_repeats_has_no_period() {
        let stream: Vec<_> = (0..40).flat_map(|kind| iteration(kind, 2)).collect();
        assert!(begins(&stream).is_empty());
    }
}
