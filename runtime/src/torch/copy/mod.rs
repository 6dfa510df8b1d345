//! Copies between the device and the slow tiers.
//!
//! A [`CopyEngine`] moves bytes when it is told to. It does not know whose bytes they are, when they will be wanted
//! again, or what a budget is.
//!
//! | engine | slow tier |
//! |---|---|
//! | [`HostEngine`] | this machine's memory, copied to by threads of ours or by whoever asks ([`CopiedBy`]); can emulate a link |
//! | [`FileEngine`] | an unlinked file |
//! | [`StreamEngine`] | page-locked memory, copied to by a device's copy streams ([`Device`]) |
//! | [`TieredEngine`] | a host engine and a file engine, by tier |

mod channel;
mod device;
mod extents;
mod file;
mod gather;
mod host;
mod measured;
mod probe;
mod slabs;
mod spill;
mod stream;
mod ticket;
mod tiered;

use std::sync::Arc;

use crate::hardware::Tier;

pub use channel::CopiedBy;
pub use device::{Device, DeviceCallError, EventId, StreamId};
pub use file::{FileEngine, FileTier};
pub use host::HostEngine;
pub use measured::{ChannelUse, TierCopies};
pub(crate) use measured::{retimed, since};
pub use slabs::PAGE_BYTES;
pub use stream::{StreamEngine, TimedCopies};
pub use ticket::Ticket;
pub use tiered::TieredEngine;

/// Why a copy could not be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CopyError {
    /// The slow tier has no room for so many bytes.
    #[error("the slow tier has no {bytes} bytes left")]
    Full {
        /// Bytes wanted.
        bytes: usize,
    },
    /// The engine has no such tier.
    #[error("there is no {0:?} tier")]
    NoTier(Tier),
    /// The thread that makes the copies is gone.
    #[error("a copy worker has died")]
    WorkerDied,
    /// The file of the slow tier fails.
    #[error("the file of the slow tier: {call}: {message}")]
    File {
        /// What was asked of the system.
        call: &'static str,
        /// What the system says.
        message: String,
    },
    /// The device's driver fails.
    #[error("the device: {call}: {message}")]
    Device {
        /// What was asked of the driver.
        call: &'static str,
        /// What the driver says.
        message: String,
    },
}

/// The device bytes of one storage, one end of a copy.
#[derive(Clone, Copy, Debug)]
pub struct DeviceBytes {
    /// Where they start.
    pub start: *mut u8,
    /// How many.
    pub bytes: usize,
}

/// A storage's bytes in a slow tier: a part of a slab. Its room is taken back when it is dropped.
#[derive(Debug)]
pub struct SlowCopy {
    slab: Slab,
    offset: usize,
    bytes: usize,
}

/// What moved together.
#[derive(Clone, Debug)]
enum Slab {
    Memory(Arc<slabs::MemorySlab>),
    File(Arc<file::FileSlab>),
}

impl SlowCopy {
    /// Where the bytes are.
    pub fn tier(&self) -> Tier {
        match self.slab {
            Slab::Memory(_) => Tier::Host,
            Slab::File(_) => Tier::File,
        }
    }

    /// How many there are.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn in_memory(&self) -> &Arc<slabs::MemorySlab> {
        match &self.slab {
            Slab::Memory(slab) => slab,
            Slab::File(_) => panic!("a copy of another engine"),
        }
    }

    fn in_file(&self) -> &Arc<file::FileSlab> {
        match &self.slab {
            Slab::File(slab) => slab,
            Slab::Memory(_) => panic!("a copy of another engine"),
        }
    }

    /// The parts that `pieces` become in a slab, one after another.
    fn parts(slab: &Slab, pieces: &[DeviceBytes]) -> Vec<SlowCopy> {
        let mut offset = 0;
        let part = |piece: &DeviceBytes| {
            let copy = SlowCopy { slab: slab.clone(), offset, bytes: piece.bytes };
            offset += piece.bytes;
            copy
        };
        pieces.iter().map(part).collect()
    }
}

/// What a slow tier holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierUse {
    /// Which one.
    pub tier: Tier,
    /// Bytes of the copies that it holds, in whole pages.
    pub held_bytes: u64,
    /// Most bytes of copies that it has held at once.
    pub high_water_bytes: u64,
    /// Bytes kept for the next copies, beside those held.
    pub kept_bytes: u64,
    /// Most bytes that it may hold and keep.
    pub limit_bytes: u64,
}

/// The sum over those that hold `tier`.
fn sum_of(tier: Tier, tiers: &[TierUse], bytes: impl Fn(&TierUse) -> u64) -> u64 {
    tiers.iter().filter(|there| there.tier == tier).map(bytes).fold(0, u64::saturating_add)
}

/// Copies storages between the device and a slow tier: one channel each way, in the order asked for.
///
/// **Order is the device's.** On a device that computes when it is told to (the CPU), [`wait`](CopyEngine::wait) blocks.
/// On a device with streams it makes the compute stream wait, and the caller goes on. So "after the wait" always means:
/// in what the program asks of the device from then on. A block may be released to an allocator that hands it
/// out in the compute stream's order, as libtorch's does, as soon as `wait` has returned; and reads of prefetched
/// bytes may be asked for.
///
/// **Room is the engine's.** A copy may be freed at any time. Its room is used again only when no copy from or to it is
/// under way.
///
/// **Errors are clean.** Where `offload` or `prefetch` fails, nothing is under way. Where `wait` fails, the copy was
/// not made, the device bytes are touched no more, and what was being copied is intact at the other end.
pub trait CopyEngine: Send {
    /// Starts copying `pieces` to `tier`, as one slab that is there when the ticket says so. One copy for each piece.
    ///
    /// # Safety
    ///
    /// The pieces stay readable and unchanged until the ticket has been waited for.
    unsafe fn offload(&mut self, pieces: &[DeviceBytes], tier: Tier) -> Result<(Vec<SlowCopy>, Ticket), CopyError>;

    /// Starts copying back, each copy to as many bytes at an address of the device. The offloads that made the copies
    /// need not have been waited for.
    ///
    /// # Safety
    ///
    /// The device bytes stay writable and unread until the ticket has been waited for.
    unsafe fn prefetch(&mut self, copies: &[(&SlowCopy, *mut u8)]) -> Result<Ticket, CopyError>;

    /// Whatever is asked of the device from now on comes after the copy.
    fn wait(&mut self, ticket: &Ticket) -> Result<(), CopyError>;

    /// Whether compute stands still: from a call with true to the next with false nothing is computed that has to do with what is
    /// offloaded, and only this engine makes compute wait for anything, so that offloads need wait for compute only once.
    fn compute_stands(&mut self, _stands: bool) {}

    /// The last that compute was given is a copy: what the program reads out. Something else is put behind it, where marks of compute
    /// would wait for other copies.
    fn has_read_out(&mut self) {}

    /// Copies back at once, by other means than the workers where there are any: the way to save bytes when
    /// `prefetch` or its `wait` has failed. Blocks.
    ///
    /// # Safety
    ///
    /// `to` is writable for the bytes of the copy, and nothing else uses them.
    unsafe fn rescue(&mut self, copy: &SlowCopy, to: *mut u8) -> Result<(), CopyError> {
        // SAFETY: passed on.
        let ticket = unsafe { self.prefetch(&[(copy, to)]) }?;
        self.wait(&ticket)
    }

    /// What each slow tier holds.
    fn tiers(&self) -> Vec<TierUse>;

    /// Most bytes that `tier` may hold: none where there is no such tier.
    fn limit_bytes(&self, tier: Tier) -> u64 {
        sum_of(tier, &self.tiers(), |there| there.limit_bytes)
    }

    /// Bytes that `tier` holds now, in whole pages.
    fn held_bytes(&self, tier: Tier) -> u64 {
        sum_of(tier, &self.tiers(), |there| there.held_bytes)
    }

    /// Most bytes that the slow tiers have held, in whole pages; each counted at its own highest.
    fn high_water_bytes(&self) -> u64 {
        self.tiers().iter().map(|tier| tier.high_water_bytes).sum()
    }

    /// Bytes that there is room for in all, and whose copies fail only where the device does. None where the host's threads or its files
    /// may fail, too.
    fn dependable_bytes(&self) -> u64 {
        0
    }

    /// What the copies so far took, by tier: how fast the link is while the job runs. Nothing where that is not known.
    fn copies(&self) -> Vec<TierCopies> {
        Vec::new()
    }
}
