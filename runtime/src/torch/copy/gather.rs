//! Moves between pieces that lie apart and bytes that lie together.

use super::DeviceBytes;

/// One copy of some bytes to another place.
pub(super) struct Move {
    pub(super) from: *const u8,
    pub(super) to: *mut u8,
    pub(super) bytes: usize,
}

// SAFETY: the engine's callers keep the device's end alive until the ticket has been waited for; jobs own the other.
unsafe impl Send for Move {}

impl Move {
    /// # Safety
    ///
    /// Both ends hold as many bytes, apart from each other, and nobody else writes the one or uses the other.
    pub(super) unsafe fn make(&self) {
        // SAFETY: the caller says so.
        unsafe { std::ptr::copy_nonoverlapping(self.from, self.to, self.bytes) };
    }
}

/// Reads pieces one after another, as if they lay together.
pub(super) struct Gather<'a> {
    pieces: std::slice::Iter<'a, DeviceBytes>,
    rest: DeviceBytes,
}

impl<'a> Gather<'a> {
    pub(super) fn of(pieces: &'a [DeviceBytes]) -> Self {
        Gather { pieces: pieces.iter(), rest: DeviceBytes { start: std::ptr::null_mut(), bytes: 0 } }
    }

    /// Copies the next bytes into `room`, as many as there are. Says how many.
    ///
    /// # Safety
    ///
    /// The pieces are readable.
    pub(super) unsafe fn fill(&mut self, room: &mut [u8]) -> usize {
        let mut filled = 0;
        while filled < room.len() {
            if self.rest.bytes == 0 {
                let Some(&next) = self.pieces.next() else { break };
                self.rest = next;
                continue;
            }
            let bytes = self.rest.bytes.min(room.len() - filled);
            // SAFETY: the caller says that the piece is readable; `bytes` of it and of the room are left.
            unsafe { std::ptr::copy_nonoverlapping(self.rest.start, room[filled..].as_mut_ptr(), bytes) };
            // SAFETY: as above.
            self.rest = DeviceBytes { start: unsafe { self.rest.start.add(bytes) }, bytes: self.rest.bytes - bytes };
            filled += bytes;
        }
        filled
    }
}

/// Where some bytes of a slab go.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// Where they lie in the slab.
    pub(super) offset: usize,
    pub(super) to: DeviceBytes,
}

// SAFETY: as for `Move`.
unsafe impl Send for Part {}

impl Part {
    pub(super) fn end(&self) -> usize {
        self.offset + self.to.bytes
    }

    /// Copies what of this part lies in `chunk`, the bytes from `chunk_offset` in the slab.
    ///
    /// # Safety
    ///
    /// The part's place is writable.
    pub(super) unsafe fn scatter(&self, chunk: &[u8], chunk_offset: usize) {
        let start = self.offset.max(chunk_offset);
        let end = self.end().min(chunk_offset + chunk.len());
        if start < end {
            let from = &chunk[start - chunk_offset..end - chunk_offset];
            // SAFETY: the caller says so, and the overlap lies inside the part.
            unsafe {
                std::ptr::copy_nonoverlapping(from.as_ptr(), self.to.start.add(start - self.offset), from.len());
            }
        }
    }
}
