//! Parts of a list that many share: there is one for every operator, and a list of its own for each would cost more than all else
//! that is written down, and lie scattered between what the loop itself allocates.

use std::ops::Range;

/// A part of such a list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Span {
    start: u32,
    end: u32,
}

impl Span {
    pub(super) fn range(self) -> Range<usize> {
        self.start as usize..self.end as usize
    }

    /// Appends `items` to the list.
    pub(super) fn of<T>(list: &mut Vec<T>, items: impl IntoIterator<Item = T>) -> Span {
        let start = list.len() as u32;
        list.extend(items);
        Span { start, end: list.len() as u32 }
    }

    /// Appends one more item to the list, of which this is the last part.
    pub(super) fn push<T>(&mut self, list: &mut Vec<T>, item: T) {
        debug_assert_eq!(self.range().end, list.len(), "another part has begun");
        list.push(item);
        self.end += 1;
    }
}
