//! One contiguous region that grows at its end: first fit and best fit.
//!
//! Requests are served one by one, blocks never move, and neighbouring gaps are one gap. What has been reserved stays.

use std::collections::BTreeMap;

use super::{Allocator, GRANULE_BYTES};
use crate::playback::BlockId;

/// Which gap a block is put in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fit {
    /// The one at the lowest address.
    First,
    /// The smallest; of equals the one at the lowest address.
    Best,
}

/// [`super::Model::FirstFit`] and [`super::Model::BestFit`].
pub(super) struct Arena {
    fit: Fit,
    /// Bytes of each gap below `end`, by address.
    gaps: BTreeMap<u64, u64>,
    /// Address and bytes of each block.
    blocks: Vec<(u64, u64)>,
    end: u64,
}

impl Arena {
    pub(super) fn new(fit: Fit) -> Self {
        Arena { fit, gaps: BTreeMap::new(), blocks: Vec::new(), end: 0 }
    }

    fn gap(&self, bytes: u64) -> Option<u64> {
        let mut fitting = self.gaps.iter().filter(|&(_, &gap)| gap >= bytes);
        let (&address, _) = match self.fit {
            Fit::First => fitting.next(),
            Fit::Best => fitting.min_by_key(|&(_, &gap)| gap),
        }?;
        Some(address)
    }

    /// Address and bytes of a block.
    #[cfg(test)]
    pub(super) fn place(&self, block: BlockId) -> (u64, u64) {
        self.blocks[block.index()]
    }

    /// Where the region would have to grow from: its end, or the gap in front of it.
    fn last_gap(&self) -> u64 {
        match self.gaps.last_key_value() {
            Some((&address, &gap)) if address + gap == self.end => address,
            _ => self.end,
        }
    }
}

impl Allocator for Arena {
    fn allocate(&mut self, _: BlockId, bytes: u64, _: u64) -> u64 {
        let bytes = bytes.next_multiple_of(GRANULE_BYTES);
        let address = self.gap(bytes).unwrap_or_else(|| self.last_gap());
        let gap = self.gaps.remove(&address).unwrap_or(0);
        if gap > bytes {
            self.gaps.insert(address + bytes, gap - bytes);
        }
        self.end = self.end.max(address + bytes);
        self.blocks.push((address, bytes));
        self.end
    }

    fn free(&mut self, block: BlockId) {
        let (mut address, mut bytes) = self.blocks[block.index()];
        if let Some(behind) = self.gaps.remove(&(address + bytes)) {
            bytes += behind;
        }
        if let Some((&before, &gap)) = self.gaps.range(..address).next_back()
            && before + gap == address
        {
            (address, bytes) = (before, bytes + gap);
        }
        self.gaps.insert(address, bytes);
    }
}
