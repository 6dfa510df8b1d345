//! The engine whose slow tier is this machine's memory.

use std::sync::Arc;
use std::time::Instant;

use super::channel::{Channel, CopiedBy};
use super::gather::Move;
use super::measured::TierCopies;
use super::probe::probe;
use super::slabs::{Mapped, MemorySlab, Pool};
use super::ticket::{Done, Promise, Ticket};
use super::{CopyEngine, CopyError, DeviceBytes, Slab, SlowCopy, TierUse};
use crate::hardware::{Link, Tier};

/// The slow tier is this machine's memory.
///
/// With a pace, every copy takes at least as long as it would on a link of that bandwidth: an *emulated* link, to
/// study one on a machine without it.
pub struct HostEngine {
    out: Channel,
    back: Channel,
    slabs: Arc<Pool>,
}

impl HostEngine {
    /// An engine with no limit but the system's, whose copies are made by whom that suits best; `pace` emulates a link.
    pub fn new(pace: Option<Link>) -> Self {
        Self::with_limit(u64::MAX, pace)
    }

    /// An engine that holds and keeps at most `limit_bytes`, in whole pages; `pace` emulates a link.
    pub fn with_limit(limit_bytes: u64, pace: Option<Link>) -> Self {
        Self::copied_by(CopiedBy::suiting_kernels(), limit_bytes, pace)
    }

    /// The same, with copies made by whom the caller says.
    pub fn copied_by(copied_by: CopiedBy, limit_bytes: u64, pace: Option<Link>) -> Self {
        let (out, back) = Channel::there_and_back(copied_by, pace);
        let slabs = Pool::new(Box::new(Mapped), limit_bytes);
        HostEngine { out, back, slabs }
    }

    /// Measures this machine's own link: the median of several copies each way. Kernels that use every core wait for a copy
    /// as long as it takes; others do not. Fails where there are not 128 MiB for it.
    pub fn probe() -> Result<Link, CopyError> {
        let copied_by = CopiedBy::suiting_kernels();
        let mut engine = Self::copied_by(copied_by, u64::MAX, None);
        let link = probe(&mut engine, Tier::Host)?;
        let copying_s_per_byte = 0.5 * (1.0 / link.offload_bytes_per_s + 1.0 / link.prefetch_bytes_per_s);
        let contention_ns_per_byte = match copied_by {
            CopiedBy::Caller => 1e9 * copying_s_per_byte,
            CopiedBy::Threads | CopiedBy::LargeByThreads => 0.0,
        };
        Ok(Link { contention_ns_per_byte, ..link })
    }

    /// Makes both threads die, as a fault to be survived. For tests.
    #[doc(hidden)]
    pub fn kill_workers(&mut self) {
        self.out.kill();
        self.back.kill();
    }
}

/// Waits until the offload that fills `slab` has ended.
fn written(slab: &MemorySlab) -> Result<(), CopyError> {
    let written = slab.last_uses().written.clone();
    match written {
        Some(Done::Worker(completion)) => completion.wait(),
        _ => panic!("a copy of another engine"),
    }
}

impl CopyEngine for HostEngine {
    unsafe fn offload(&mut self, pieces: &[DeviceBytes], tier: Tier) -> Result<(Vec<SlowCopy>, Ticket), CopyError> {
        if tier != Tier::Host {
            return Err(CopyError::NoTier(tier));
        }
        let bytes = pieces.iter().map(|piece| piece.bytes).sum();
        let slab = Arc::new(self.slabs.take(bytes)?);
        let (promise, completion) = Promise::new();
        let done = Done::Worker(completion);
        slab.last_uses().written = Some(done.clone());
        let copies = SlowCopy::parts(&Slab::Memory(Arc::clone(&slab)), pieces);
        let ends = pieces.iter().zip(&copies);
        let moves: Vec<Move> = ends
            .map(|(piece, copy)| Move { from: piece.start, to: slab.at(copy.offset), bytes: piece.bytes })
            .collect();
        let job = move |_: &mut Instant| {
            // SAFETY: the caller keeps the pieces readable; the job holds the slab, which is no one else's before this
            // is done.
            moves.iter().for_each(|part| unsafe { part.make() });
            drop(slab);
            Ok(())
        };
        self.out.submit(bytes, promise, Box::new(job))?;
        Ok((copies, Ticket::new(Tier::Host, done)))
    }

    unsafe fn prefetch(&mut self, copies: &[(&SlowCopy, *mut u8)]) -> Result<Ticket, CopyError> {
        let bytes = copies.iter().map(|(copy, _)| copy.bytes).sum();
        let of_copy = |&(copy, to): &(&SlowCopy, *mut u8)| {
            let slab = Arc::clone(copy.in_memory());
            let part = Move { from: slab.at(copy.offset), to, bytes: copy.bytes };
            (slab, part)
        };
        let parts: Vec<(Arc<MemorySlab>, Move)> = copies.iter().map(of_copy).collect();
        let job = move |began: &mut Instant| {
            parts.iter().try_for_each(|(slab, _)| written(slab))?;
            *began = Instant::now();
            for (_slab, part) in parts {
                // SAFETY: the caller keeps the device bytes writable; the job holds the slab, which is filled.
                unsafe { part.make() };
            }
            Ok(())
        };
        self.back.ticket(Tier::Host, bytes, Box::new(job))
    }

    fn wait(&mut self, ticket: &Ticket) -> Result<(), CopyError> {
        ticket.wait_for_workers()
    }

    unsafe fn rescue(&mut self, copy: &SlowCopy, to: *mut u8) -> Result<(), CopyError> {
        let slab = copy.in_memory();
        written(slab)?;
        // SAFETY: the slab is filled and held by the copy; the caller says that `to` is writable.
        unsafe { Move { from: slab.at(copy.offset), to, bytes: copy.bytes }.make() };
        Ok(())
    }

    fn tiers(&self) -> Vec<TierUse> {
        vec![self.slabs.usage()]
    }

    fn copies(&self) -> Vec<TierCopies> {
        vec![TierCopies { tier: Tier::Host, offload: self.out.copies(), prefetch: self.back.copies() }]
    }
}
