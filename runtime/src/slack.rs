//! Bytes under the budget by operator index, in blocks: stretches are claimed, given back, and asked how far back from
//! their end so many bytes are free, without a look at every operator.

use std::ops::Range;

/// Indices in a block.
pub(crate) const BLOCK: usize = 32;

/// Whole blocks in a range of indices, and the indices before and after them, each in one block.
pub(crate) fn split(range: Range<usize>) -> (Range<usize>, [Range<usize>; 2]) {
    let (first, last) = (range.start.div_ceil(BLOCK), range.end / BLOCK);
    let before = range.start..range.end.min(first * BLOCK);
    let after = before.end.max(last * BLOCK)..range.end;
    (first..last.max(first), [before, after])
}

/// Slack by operator index.
#[derive(Debug)]
pub(crate) struct Slack {
    /// Per index; what its block has in `added` comes on top.
    values: Vec<i64>,
    /// Per block: what has been added to all of it.
    added: Vec<i64>,
    /// Per block: the least slack in it.
    least: Vec<i64>,
}

/// How far back from its end a stretch has so many bytes of slack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Free {
    /// The first index from which on they are free.
    pub(crate) from: usize,
    /// No index from there on has less slack. It may be less than the least there is.
    pub(crate) least: i64,
    /// The slack of the index before, if that is what ended it.
    pub(crate) blocked_by: Option<i64>,
}

/// A part of a block.
#[derive(Clone, Debug)]
pub(crate) struct Stretch<'a> {
    /// Its indices.
    pub(crate) range: Range<usize>,
    /// No index of it has less slack.
    pub(crate) least: i64,
    /// What each of its indices has on top of its value.
    pub(crate) added: i64,
    /// Per index.
    pub(crate) values: std::iter::Copied<std::slice::Iter<'a, i64>>,
}

impl Slack {
    pub(crate) fn new(count: usize) -> Self {
        let blocks = count.div_ceil(BLOCK);
        Slack { values: vec![0; count], added: vec![0; blocks], least: vec![0; blocks] }
    }

    /// Sets every index, in order, to what `slack` makes of what [`Self::raw`] left there.
    pub(crate) fn settle(&mut self, mut slack: impl FnMut(usize, i64) -> i64) {
        self.added.fill(0);
        let blocks = self.values.chunks_mut(BLOCK).zip(&mut self.least);
        for (block, (values, least)) in blocks.enumerate() {
            *least = i64::MAX;
            for (offset, value) in values.iter_mut().enumerate() {
                *value = slack(block * BLOCK + offset, *value);
                *least = (*least).min(*value);
            }
        }
    }

    /// The array to be filled in before [`Self::settle`].
    pub(crate) fn raw(&mut self) -> &mut [i64] {
        &mut self.values
    }

    /// Adds `bytes` to every index of `range`.
    pub(crate) fn add(&mut self, range: Range<usize>, bytes: i64) {
        let (blocks, edges) = split(range);
        self.added[blocks.clone()].iter_mut().for_each(|added| *added += bytes);
        self.least[blocks].iter_mut().for_each(|least| *least += bytes);
        for part in edges {
            if !part.is_empty() {
                self.add_part(part.start / BLOCK, part, bytes);
            }
        }
    }

    fn add_part(&mut self, block: usize, part: Range<usize>, bytes: i64) {
        self.values[part.clone()].iter_mut().for_each(|value| *value += bytes);
        // What became less can only be a new least; what became more may have been the old one.
        let among = if bytes < 0 { part } else { block * BLOCK..self.values.len().min((block + 1) * BLOCK) };
        let found = self.values[among].iter().fold(i64::MAX, |least, &value| least.min(value)) + self.added[block];
        self.least[block] = if bytes < 0 { self.least[block].min(found) } else { found };
    }

    /// The least slack of all, and the last index that has it.
    pub(crate) fn lowest(&self) -> Option<(usize, i64)> {
        let least = *self.least.iter().min()?;
        let block = self.least.iter().rposition(|&of_block| of_block == least)?;
        let values = &self.values[block * BLOCK..self.values.len().min((block + 1) * BLOCK)];
        let offset = values.iter().rposition(|&value| value + self.added[block] == least)?;
        Some((block * BLOCK + offset, least))
    }

    /// `range`, block by block.
    pub(crate) fn stretches(&self, range: Range<usize>) -> impl Iterator<Item = Stretch<'_>> {
        (range.start / BLOCK..range.end.div_ceil(BLOCK)).map(move |block| {
            let part = range.start.max(block * BLOCK)..range.end.min((block + 1) * BLOCK);
            let values = self.values[part.clone()].iter().copied();
            Stretch { range: part, least: self.least[block], added: self.added[block], values }
        })
    }

    /// How far back from its end `range` has `bytes` of slack.
    pub(crate) fn free(&self, range: Range<usize>, bytes: i64) -> Free {
        let mut free = Free { from: range.end, least: i64::MAX, blocked_by: None };
        while free.from > range.start {
            let block = (free.from - 1) / BLOCK;
            let start = range.start.max(block * BLOCK);
            if self.least[block] >= bytes {
                free.least = free.least.min(self.least[block]);
                free.from = start;
                continue;
            }
            for &value in self.values[start..free.from].iter().rev() {
                let slack = value + self.added[block];
                if slack < bytes {
                    free.blocked_by = Some(slack);
                    return free;
                }
                free.least = free.least.min(slack);
                free.from -= 1;
            }
        }
        free
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SplitMix64;

    #[test]
    fn claims_and_questions_are_answered_as_by_looking_at_every_index() {
        let mut random = SplitMix64::new(9);
        let mut below = |end: usize| random.next() as usize % end;
        let mut plain: Vec<i64> = (0..150).map(|_| below(100) as i64).collect();
        let mut slack = Slack::new(plain.len());
        slack.settle(|index, _| plain[index]);
        for _ in 0..20_000 {
            let start = below(plain.len());
            let range = start..start + 1 + below(plain.len() - start);
            let bytes = below(40) as i64 - 20;
            slack.add(range.clone(), bytes);
            plain[range].iter_mut().for_each(|value| *value += bytes);
            let (lowest, &least) = plain.iter().enumerate().rev().min_by_key(|&(_, value)| value).unwrap();
            assert_eq!(slack.lowest(), Some((lowest, least)));
            let start = below(plain.len());
            let (range, bytes) = (start..start + below(plain.len() - start), below(120) as i64 - 40);
            let free = slack.free(range.clone(), bytes);
            let from = range.clone().rev().take_while(|&index| plain[index] >= bytes).last().unwrap_or(range.end);
            assert_eq!(free.from, from);
            assert_eq!(free.blocked_by, (from > range.start).then(|| plain[from - 1]));
            assert!(plain[from..range.end].iter().all(|&value| value >= free.least && free.least >= bytes));
        }
    }
}
