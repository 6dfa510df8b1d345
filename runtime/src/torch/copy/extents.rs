//! Which bytes of a file are free: first fit, neighbours coalesced.
//!
//! Knows no file. Everything is in whole pages, so that direct I/O can be used.

use std::collections::BTreeMap;
use std::ops::Range;

/// The free bytes below a limit.
#[derive(Debug)]
pub(super) struct Extents {
    /// Length by start. No two touch.
    free: BTreeMap<u64, u64>,
    free_bytes: u64,
}

impl Extents {
    pub(super) fn below(limit_bytes: u64) -> Self {
        let free = (limit_bytes > 0).then_some((0, limit_bytes));
        Extents { free: free.into_iter().collect(), free_bytes: limit_bytes }
    }

    pub(super) fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    /// Takes `bytes`: the first gap that is long enough, else the first gaps that are together. So a file is full only
    /// when it is full.
    pub(super) fn take(&mut self, bytes: u64) -> Option<Vec<Range<u64>>> {
        if bytes > self.free_bytes {
            return None;
        }
        let fitting = self.free.iter().find(|&(_, &gap)| gap >= bytes).map(|(&start, _)| start);
        let mut taken = Vec::with_capacity(1);
        let mut missing = bytes;
        while missing > 0 {
            let start = fitting.unwrap_or_else(|| *self.free.keys().next().expect("enough is free"));
            let gap = self.free.remove(&start).expect("a free gap");
            let used = gap.min(missing);
            if gap > used {
                self.free.insert(start + used, gap - used);
            }
            taken.push(start..start + used);
            missing -= used;
        }
        self.free_bytes -= bytes;
        Some(taken)
    }

    pub(super) fn give(&mut self, extents: &[Range<u64>]) {
        for &Range { mut start, end } in extents {
            self.free_bytes += end - start;
            let mut length = end - start;
            if let Some(after) = self.free.remove(&end) {
                length += after;
            }
            if let Some((&before, gap)) = self.free.range_mut(..start).next_back() {
                assert!(before + *gap <= start, "bytes from {start} are given back twice");
                if before + *gap == start {
                    length += *gap;
                    start = before;
                }
            }
            self.free.insert(start, length);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_first_gap_that_is_long_enough_is_taken() {
        let mut extents = Extents::below(100);
        let all: Vec<_> = (0..10).map(|_| extents.take(10).unwrap()).collect();
        assert_eq!(extents.take(1), None);
        for index in [1, 4, 5, 8] {
            extents.give(&all[index]);
        }
        assert_eq!(extents.take(20).as_deref(), Some(std::slice::from_ref(&(40..60))));
        assert_eq!(extents.take(15), Some(vec![10..20, 80..85]), "no gap is long enough, all of them are");
        assert_eq!(extents.free_bytes(), 5);
    }

    proptest! {
        #[test]
        fn extents_are_apart_and_all_come_back(sizes in proptest::collection::vec((1_u64..40, any::<u8>()), 1..200)) {
            let mut extents = Extents::below(500);
            let mut taken: Vec<Vec<Range<u64>>> = Vec::new();
            for (bytes, draw) in sizes {
                match extents.take(bytes) {
                    Some(ranges) => {
                        prop_assert_eq!(ranges.iter().map(|range| range.end - range.start).sum::<u64>(), bytes);
                        taken.push(ranges);
                    }
                    None => {
                        prop_assert!(extents.free_bytes() < bytes, "refused with room left");
                        let freed = taken.swap_remove(draw as usize % taken.len());
                        extents.give(&freed);
                    }
                }
                let mut bytes_taken: Vec<u64> = taken.iter().flatten().cloned().flatten().collect();
                let count = bytes_taken.len();
                bytes_taken.sort_unstable();
                bytes_taken.dedup();
                prop_assert_eq!(bytes_taken.len(), count, "no byte is given out twice");
                prop_assert_eq!(count as u64 + extents.free_bytes(), 500);
            }
            taken.iter().for_each(|ranges| extents.give(ranges));
            prop_assert_eq!(extents.free.into_iter().collect::<Vec<_>>(), vec![(0, 500)]);
        }
    }
}
