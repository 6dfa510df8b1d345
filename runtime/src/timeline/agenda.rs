//! The operator indices at which a plan does something.

/// A set of operator indices, with the next one after another in a few steps.
#[derive(Debug, Default)]
pub(crate) struct Agenda {
    words: Vec<u64>,
}

impl Agenda {
    /// An empty agenda of indices below `end`.
    pub(crate) fn new(end: usize) -> Self {
        Agenda { words: vec![0; end.div_ceil(64)] }
    }

    pub(crate) fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Whether the index had not been noted.
    pub(crate) fn note(&mut self, index: usize) -> bool {
        let (word, bit) = (&mut self.words[index / 64], 1 << (index % 64));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    pub(crate) fn forget(&mut self, index: usize) {
        self.words[index / 64] &= !(1 << (index % 64));
    }

    /// The first index noted from `from` on.
    ///
    /// # Panics
    ///
    /// If there is none: an agenda holds the iteration's end.
    pub(crate) fn next(&self, from: usize) -> usize {
        let mut word = from / 64;
        let mut bits = self.words[word] & (u64::MAX << (from % 64));
        while bits == 0 {
            word += 1;
            bits = self.words[word];
        }
        word * 64 + bits.trailing_zeros() as usize
    }
}

#[cfg(test)]
mod tests {
    use super::Agenda;

    #[test]
    fn the_next_index_is_the_first_that_was_noted() {
        let mut agenda = Agenda::new(300);
        let noted = [0, 1, 63, 64, 191, 299];
        agenda.note(100);
        assert!(noted.iter().all(|&index| agenda.note(index)) && !agenda.note(100));
        agenda.forget(100);
        for from in 0..300 {
            assert_eq!(Some(agenda.next(from)), noted.iter().copied().find(|&index| index >= from));
        }
    }
}
