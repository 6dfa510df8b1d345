//! The storages that may be evicted, in the order in which they became so. Ties between equals are broken by it.

use super::program::SeatId;

const NOWHERE: u32 = u32::MAX;
const GONE: SeatId = SeatId(u32::MAX);

/// An ordered set that is cheap to add to, to remove from and to walk.
#[derive(Debug)]
pub(super) struct Pool {
    entries: Vec<SeatId>,
    position: Vec<u32>,
    gone: usize,
}

impl Pool {
    pub(super) fn new(storages: usize) -> Self {
        Pool { entries: Vec::new(), position: vec![NOWHERE; storages], gone: 0 }
    }

    /// Adds `storage` as the last one.
    pub(super) fn push(&mut self, storage: SeatId) {
        debug_assert_eq!(self.position[storage.index()], NOWHERE);
        self.position[storage.index()] = self.entries.len() as u32;
        self.entries.push(storage);
    }

    pub(super) fn remove(&mut self, storage: SeatId) {
        let position = std::mem::replace(&mut self.position[storage.index()], NOWHERE);
        self.entries[position as usize] = GONE;
        self.gone += 1;
        if self.gone > 64 && self.gone > self.entries.len() / 4 {
            self.close_ranks();
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = SeatId> + '_ {
        self.entries.iter().copied().filter(|&storage| storage != GONE)
    }

    fn close_ranks(&mut self) {
        self.entries.retain(|&storage| storage != GONE);
        self.gone = 0;
        for (position, storage) in (0..).zip(&self.entries) {
            self.position[storage.index()] = position;
        }
    }
}
