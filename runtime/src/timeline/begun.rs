//! The windows that have begun by an operator, in order of their ends: among them are those that can be evicted there.
//!
//! A sweep asks at one pressure point after another, mostly near the last one, so what lies between is added or taken
//! away. It knows nothing of what a plan does with a window.

use crate::lineage::{Lineage, WindowId};

/// Windows that start at an operator index or before.
#[derive(Debug)]
pub(crate) struct Begun {
    /// One bit per window; windows are ordered by their ends.
    words: Vec<u64>,
    /// Windows that start before this operator index are in it.
    until: usize,
}

impl Begun {
    pub(crate) fn new(windows: usize) -> Self {
        Begun { words: vec![0; windows.div_ceil(64)], until: 0 }
    }

    /// Those that start at operator `index` or before and end after it, in order of their ends; and only those `among` whose
    /// words of 64 windows each they are.
    pub(crate) fn open<'s>(
        &'s mut self,
        lineage: &Lineage,
        index: usize,
        among: impl Fn(usize) -> u64 + 's,
    ) -> impl Iterator<Item = WindowId> + 's {
        self.go_to(lineage, index + 1);
        let first = lineage.windows().partition_point(|window| window.end as usize <= index);
        let not_ended = move |word| if word == first / 64 { u64::MAX << (first % 64) } else { u64::MAX };
        let words = self.words.iter().enumerate().skip(first / 64);
        words.flat_map(move |(word, begun)| {
            let mut bits = begun & not_ended(word) & among(word);
            std::iter::from_fn(move || {
                let bit = (bits != 0).then(|| bits.trailing_zeros())?;
                bits &= bits - 1;
                Some(WindowId(word as u32 * 64 + bit))
            })
        })
    }

    /// One bit per window for which it `holds`, in words of 64 windows each.
    pub(crate) fn words<T>(windows: &[T], holds: impl Fn(&T) -> bool) -> impl Iterator<Item = u64> {
        windows.chunks(64).map(move |chunk| {
            chunk.iter().enumerate().fold(0, |word, (bit, window)| word | u64::from(holds(window)) << bit)
        })
    }

    fn go_to(&mut self, lineage: &Lineage, until: usize) {
        for index in self.until.min(until)..self.until.max(until) {
            for &id in lineage.windows_starting(index) {
                self.words[id.index() / 64] ^= 1 << (id.0 % 64);
            }
        }
        self.until = until;
    }
}
