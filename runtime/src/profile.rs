//! Bytes by operator index with nothing evicted, and the questions that a timeline asks of them when it passes over a
//! stretch in which nothing happens: where do they first exceed something, where do they first leave room, what is
//! their peak?
//!
//! Answered by blocks: a stretch is mostly shorter than one block, and an iteration has few blocks.

use std::ops::Range;

use crate::slack::{BLOCK, split};

/// Values with the extremes of each block of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Profile {
    values: Vec<i64>,
    highest: Vec<i64>,
    lowest: Vec<i64>,
}

impl Profile {
    pub(crate) fn new(values: Vec<i64>) -> Self {
        let extremes = |of: fn(&[i64]) -> Option<i64>| values.chunks(BLOCK).filter_map(of).collect();
        let highest = extremes(|block| block.iter().copied().max());
        let lowest = extremes(|block| block.iter().copied().min());
        Profile { values, highest, lowest }
    }

    /// Puts another value in the place of one. They are put in order, from the first to the last.
    pub(crate) fn put(&mut self, index: usize, value: i64) {
        self.values[index] = value;
        let (highest, lowest) = (&mut self.highest[index / BLOCK], &mut self.lowest[index / BLOCK]);
        let is_first = index.is_multiple_of(BLOCK);
        *highest = if is_first { value } else { value.max(*highest) };
        *lowest = if is_first { value } else { value.min(*lowest) };
    }

    pub(crate) fn at(&self, index: usize) -> i64 {
        self.values[index]
    }

    pub(crate) fn values(&self) -> &[i64] {
        &self.values
    }

    /// The first index in `range` whose value is above `bound`.
    pub(crate) fn first_above(&self, range: Range<usize>, bound: i64) -> Option<usize> {
        first(range, &self.values, &self.highest, |value| value > bound)
    }

    /// The first index in `range` whose value is at most `bound`.
    pub(crate) fn first_at_most(&self, range: Range<usize>, bound: i64) -> Option<usize> {
        first(range, &self.values, &self.lowest, |value| value <= bound)
    }

    /// The highest value in `range` and the first index that has it; none if it is empty.
    pub(crate) fn peak(&self, range: Range<usize>) -> Option<(usize, i64)> {
        let (blocks, edges) = split(range.clone());
        let highest = self.highest[blocks].iter();
        let edges = edges.into_iter().flat_map(|edge| self.values[edge].iter());
        let peak = highest.chain(edges).copied().max()?;
        Some((self.first_above(range, peak - 1)?, peak))
    }
}

#[inline]
fn first(range: Range<usize>, values: &[i64], extremes: &[i64], holds: impl Fn(i64) -> bool) -> Option<usize> {
    let within = |range: Range<usize>| {
        values[range.clone()].iter().position(|&value| holds(value)).map(|offset| range.start + offset)
    };
    let (blocks, [before, after]) = split(range);
    within(before).or_else(|| match extremes[blocks.clone()].iter().position(|&extreme| holds(extreme)) {
        Some(offset) => {
            let start = (blocks.start + offset) * BLOCK;
            within(start..start + BLOCK)
        }
        None => within(after),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SplitMix64;

    #[test]
    fn every_range_is_answered_as_by_looking_at_each_value() {
        let mut random = SplitMix64::new(3);
        let values: Vec<i64> = (0..150).map(|_| (random.next() % 40) as i64 - 20).collect();
        let mut profile = Profile::new(vec![-1; values.len()]);
        values.iter().enumerate().for_each(|(index, &value)| profile.put(index, value));
        let Profile { highest, lowest, .. } = Profile::new(values.clone());
        assert_eq!((&profile.highest, &profile.lowest), (&highest, &lowest));
        for start in 0..=values.len() {
            for end in start..=values.len() {
                let bound = (random.next() % 44) as i64 - 22;
                let find = |holds: &dyn Fn(i64) -> bool| (start..end).find(|&index| holds(values[index]));
                assert_eq!(profile.first_above(start..end, bound), find(&|value| value > bound));
                assert_eq!(profile.first_at_most(start..end, bound), find(&|value| value <= bound));
                let peak = values[start..end].iter().copied().max();
                assert_eq!(profile.peak(start..end), peak.map(|peak| (find(&|value| value == peak).unwrap(), peak)));
            }
        }
    }
}
