//! The period of a sequence that has come into its rhythm: how many events one iteration takes.
//!
//! An application-oblivious observer (AppObMem, Li et al., ACM TACO 2022, of which the abstract was at hand) finds the
//! iteration in the raw stream. Ours looks for the longest stretch that repeats exactly, up to the stream's end or a little
//! before it; what comes before is the warm-up, and what comes after may be an evaluation, or a file being written.

use serde::Serialize;

/// A share of the longest repeating end that a shorter period may fall short of it: that a multiple of a period repeats
/// a little further back is chance.
const AS_GOOD: f64 = 0.9;

/// How a stream repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Period {
    /// Events of one iteration.
    pub events: usize,
    /// Events in a row that repeat with this period.
    pub repeating_events: usize,
    /// Events after those.
    pub later_events: usize,
}

impl Period {
    /// Whole iterations among the repeating events.
    pub fn iterations(&self) -> usize {
        self.repeating_events / self.events
    }
}

/// The period of the longest stretch of `stream` that holds at least two iterations; none where there is none. The stretch
/// ends with the stream, or 1, 2, 4, … events before it: one of those ends lies in the rhythm, whatever follows it.
pub fn period(stream: &[u64]) -> Option<Period> {
    let cuts = std::iter::once(0).chain((0..).map(|power| 1 << power).take_while(|&cut| cut <= stream.len() / 2));
    let found = cuts.filter_map(|cut| period_of_end(&stream[..stream.len() - cut], cut));
    // Of equally long ones the latest: `max_by_key` would take the last.
    found.reduce(|best, other| if other.repeating_events > best.repeating_events { other } else { best })
}

/// Linear in the stream's length: the reversed stream's common prefixes with its own shifts (Gusfield, *Algorithms on
/// Strings, Trees, and Sequences*, 1997) are how far its end repeats.
fn period_of_end(stream: &[u64], later_events: usize) -> Option<Period> {
    let reversed: Vec<u64> = stream.iter().rev().copied().collect();
    let repeats = common_prefixes(&reversed);
    let periods = (1..reversed.len()).filter(|&shift| repeats[shift] >= shift);
    let periods: Vec<Period> =
        periods.map(|shift| Period { events: shift, repeating_events: shift + repeats[shift], later_events }).collect();
    let longest = periods.iter().map(|period| period.repeating_events).max()?;
    periods.into_iter().find(|period| period.repeating_events as f64 >= AS_GOOD * longest as f64)
}

/// For each shift: how long a prefix `sequence` and its shifted self have in common.
fn common_prefixes(sequence: &[u64]) -> Vec<usize> {
    let length = sequence.len();
    let mut common = vec![0; length];
    let (mut start, mut end) = (0, 0);
    for shift in 1..length {
        let mut known = if shift < end { common[shift - start].min(end - shift) } else { 0 };
        while shift + known < length && sequence[known] == sequence[shift + known] {
            known += 1;
        }
        if shift + known > end {
            (start, end) = (shift, shift + known);
        }
        common[shift] = known;
    }
    common
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_iteration_is_found_behind_a_warm_up() {
        let iteration = [7, 7, 7, 3, 9, 9, 3, 7];
        let stream: Vec<u64> = [1, 2, 3, 4, 5].into_iter().chain(iteration.repeat(5)).collect();
        let found = period(&stream).unwrap();
        assert_eq!((found.events, found.iterations()), (8, 5));
    }

    #[test]
    fn a_stream_that_was_cut_anywhere_has_the_same_period() {
        let iteration = [4, 1, 1, 8, 2, 2, 2, 6, 4, 5];
        let stream = iteration.repeat(6);
        for cut in 0..10 {
            assert_eq!(period(&stream[..stream.len() - cut]).unwrap().events, 10);
        }
    }

    #[test]
    fn what_follows_the_last_iteration_does_not_hide_the_others() {
        let iteration = [4, 1, 1, 8, 2, 2, 2, 6, 4, 5];
        for after in 0..12 {
            let stream: Vec<u64> = [3, 3].into_iter().chain(iteration.repeat(6)).chain(100..100 + after).collect();
            let found = period(&stream).unwrap();
            assert!(found.events == 10 && found.iterations() >= 5, "{found:?}");
            assert!(found.repeating_events + found.later_events <= stream.len());
        }
    }

    #[test]
    fn layers_inside_an_iteration_are_no_iteration() {
        // Three equal layers there and back; the layers alone repeat, but not as far.
        let iteration = [[1, 2, 3].repeat(3), vec![9], [6, 5].repeat(3)].concat();
        assert_eq!(period(&iteration.repeat(4)).unwrap().events, iteration.len());
    }

    #[test]
    fn what_never_repeats_has_no_period() {
        assert_eq!(period(&[]), None);
        assert_eq!(period(&[5]), None);
        assert_eq!(period(&(0..100).collect::<Vec<_>>()), None);
    }
}
