//! libtorch's caching allocator, `c10/cuda/CUDACachingAllocator.cpp` with its default settings.
//!
//! Device memory is reserved in segments and kept. A request is rounded to 512 bytes and served from one of two pools:
//! up to 1 MiB from segments of 2 MiB; above, from segments of 20 MiB, or of its own size rounded to 2 MiB from 10 MiB
//! on. Within a pool the best fit wins, the lowest address of equals. What a block leaves over is split off where it is
//! worth keeping; free neighbours of a segment are joined. Nothing is moved, and segments are given back only where the
//! next one would not fit, all that stand empty at once.
//!
//! Deviations: one stream (a real allocator delays a block's reuse until copies on other streams are done; here the
//! schedule frees it when they are), and segments stand at rising addresses, since a model cannot know the driver's.

use std::collections::BTreeSet;

use super::Allocator;
use crate::playback::BlockId;

/// `kMinBlockSize`: all sizes are multiples of it.
const GRANULE_BYTES: u64 = 512;
/// `kSmallSize`: the largest request that is served from the pool of small blocks.
const SMALL_BYTES: u64 = 1 << 20;
/// `kSmallBuffer`: a segment of small blocks.
const SMALL_SEGMENT_BYTES: u64 = 2 << 20;
/// `kLargeBuffer`: a segment of large blocks, for requests under `OWN_SEGMENT_BYTES`.
const LARGE_SEGMENT_BYTES: u64 = 20 << 20;
/// `kMinLargeAlloc`: a request of this size has a segment of its own.
const OWN_SEGMENT_BYTES: u64 = 10 << 20;
/// `kRoundLarge`: what the sizes of such segments are rounded up to.
const OWN_SEGMENT_GRANULE_BYTES: u64 = 2 << 20;

type PieceId = usize;

/// A part of a segment, in use or free.
#[derive(Clone, Copy)]
struct Piece {
    address: u64,
    bytes: u64,
    small: bool,
    in_use: bool,
    before: Option<PieceId>,
    after: Option<PieceId>,
}

/// [`super::Model::Caching`].
#[derive(Default)]
pub(super) struct Caching {
    pieces: Vec<Piece>,
    /// Numbers of pieces that are no more.
    vacant: Vec<PieceId>,
    /// Free pieces: whether small, bytes, address.
    free: BTreeSet<(bool, u64, u64, PieceId)>,
    /// The piece of each block.
    blocks: Vec<PieceId>,
    next_address: u64,
    reserved_bytes: u64,
}

impl Caching {
    fn put(&mut self, piece: Piece) -> PieceId {
        match self.vacant.pop() {
            Some(id) => {
                self.pieces[id] = piece;
                id
            }
            None => {
                self.pieces.push(piece);
                self.pieces.len() - 1
            }
        }
    }

    /// Address and bytes of a block.
    #[cfg(test)]
    pub(super) fn place(&self, block: BlockId) -> (u64, u64) {
        let piece = self.pieces[self.blocks[block.index()]];
        (piece.address, piece.bytes)
    }

    fn key(&self, id: PieceId) -> (bool, u64, u64, PieceId) {
        let Piece { small, bytes, address, .. } = self.pieces[id];
        (small, bytes, address, id)
    }

    /// The smallest free piece of the pool that holds `bytes`.
    fn best_fit(&mut self, small: bool, bytes: u64) -> Option<PieceId> {
        let &found = self.free.range((small, bytes, 0, 0)..).next().filter(|found| found.0 == small)?;
        self.free.remove(&found);
        Some(found.3)
    }

    fn reserve(&mut self, small: bool, bytes: u64, limit_bytes: u64) -> PieceId {
        let segment_bytes = match bytes {
            _ if small => SMALL_SEGMENT_BYTES,
            ..OWN_SEGMENT_BYTES => LARGE_SEGMENT_BYTES,
            _ => bytes.next_multiple_of(OWN_SEGMENT_GRANULE_BYTES),
        };
        if self.reserved_bytes + segment_bytes > limit_bytes {
            self.give_back();
        }
        self.reserved_bytes += segment_bytes;
        let address = self.next_address;
        self.next_address += segment_bytes;
        self.put(Piece { address, bytes: segment_bytes, small, in_use: true, before: None, after: None })
    }

    /// Gives back every segment of which nothing is in use.
    fn give_back(&mut self) {
        let empty = |&(.., id): &(bool, u64, u64, PieceId)| {
            let piece = self.pieces[id];
            piece.before.is_none() && piece.after.is_none()
        };
        let segments: Vec<_> = self.free.iter().copied().filter(empty).collect();
        for segment in segments {
            self.free.remove(&segment);
            self.reserved_bytes -= segment.1;
            self.vacant.push(segment.3);
        }
    }

    /// Splits off what `bytes` leave over of a piece, where that is worth keeping.
    fn split(&mut self, id: PieceId, bytes: u64) {
        let whole = self.pieces[id];
        let left_over = whole.bytes - bytes;
        let worth_keeping = if whole.small { left_over >= GRANULE_BYTES } else { left_over > SMALL_BYTES };
        if !worth_keeping {
            return;
        }
        let rest = Piece { address: whole.address + bytes, bytes: left_over, in_use: false, before: Some(id), ..whole };
        let rest = self.put(rest);
        if let Some(after) = whole.after {
            self.pieces[after].before = Some(rest);
        }
        (self.pieces[id].bytes, self.pieces[id].after) = (bytes, Some(rest));
        self.free.insert(self.key(rest));
    }

    /// Joins `id`, which is not in use, with the piece behind it, if that is free.
    fn join_next(&mut self, id: PieceId) {
        let Some(next) = self.pieces[id].after.filter(|&next| !self.pieces[next].in_use) else { return };
        self.free.remove(&self.key(next));
        let Piece { bytes, after, .. } = self.pieces[next];
        self.pieces[id].bytes += bytes;
        self.pieces[id].after = after;
        if let Some(after) = after {
            self.pieces[after].before = Some(id);
        }
        self.vacant.push(next);
    }
}

impl Allocator for Caching {
    fn allocate(&mut self, _: BlockId, bytes: u64, limit_bytes: u64) -> u64 {
        let bytes = bytes.next_multiple_of(GRANULE_BYTES);
        let small = bytes <= SMALL_BYTES;
        let id = match self.best_fit(small, bytes) {
            Some(id) => id,
            None => self.reserve(small, bytes, limit_bytes),
        };
        self.pieces[id].in_use = true;
        self.split(id, bytes);
        self.blocks.push(id);
        self.reserved_bytes
    }

    fn free(&mut self, block: BlockId) {
        let mut id = self.blocks[block.index()];
        self.pieces[id].in_use = false;
        self.join_next(id);
        if let Some(before) = self.pieces[id].before.filter(|&before| !self.pieces[before].in_use) {
            self.free.remove(&self.key(before));
            self.join_next(before);
            id = before;
        }
        self.free.insert(self.key(id));
    }
}
