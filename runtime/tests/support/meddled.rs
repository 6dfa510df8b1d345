//! An engine that somebody meddles with, to test what stands above it.

use plimsoll_runtime::hardware::Tier;
use plimsoll_runtime::torch::copy::{CopyEngine, CopyError, DeviceBytes, SlowCopy, Ticket, TierCopies, TierUse};

/// What is done about an engine's calls: nothing, where nothing else is said. An error before a call is the call's.
pub trait Meddler: Send {
    /// Before `bytes` are offloaded to `tier`. Returns where they go.
    fn offload(&mut self, tier: Tier, _bytes: usize) -> Result<Tier, CopyError> {
        Ok(tier)
    }

    /// Before a prefetch.
    fn prefetch(&mut self) -> Result<(), CopyError> {
        Ok(())
    }

    /// Before [`CopyEngine::rescue`].
    fn rescue(&mut self) -> Result<(), CopyError> {
        Ok(())
    }

    /// Before a wait.
    fn wait(&mut self) {}

    /// After a wait: nothing is under way, whatever this says.
    fn waited(&mut self) -> Result<(), CopyError> {
        Ok(())
    }

    /// What the engine says of its tiers.
    fn tiers(&self, tiers: Vec<TierUse>) -> Vec<TierUse> {
        tiers
    }

    /// What the engine says of [`CopyEngine::dependable_bytes`].
    fn dependable_bytes(&self, bytes: u64) -> u64 {
        bytes
    }
}

/// An engine, and who meddles with it. It keeps the contract.
pub struct Meddled<M> {
    inner: Box<dyn CopyEngine>,
    meddler: M,
}

impl<M: Meddler> Meddled<M> {
    /// `inner`, and `meddler` before it.
    pub fn new(inner: impl CopyEngine + 'static, meddler: M) -> Self {
        Meddled { inner: Box::new(inner), meddler }
    }
}

impl<M: Meddler> CopyEngine for Meddled<M> {
    unsafe fn offload(&mut self, pieces: &[DeviceBytes], tier: Tier) -> Result<(Vec<SlowCopy>, Ticket), CopyError> {
        let tier = self.meddler.offload(tier, pieces.iter().map(|piece| piece.bytes).sum())?;
        // SAFETY: passed on.
        unsafe { self.inner.offload(pieces, tier) }
    }

    unsafe fn prefetch(&mut self, copies: &[(&SlowCopy, *mut u8)]) -> Result<Ticket, CopyError> {
        self.meddler.prefetch()?;
        // SAFETY: passed on.
        unsafe { self.inner.prefetch(copies) }
    }

    fn has_read_out(&mut self) {
        self.inner.has_read_out();
    }

    fn compute_stands(&mut self, stands: bool) {
        self.inner.compute_stands(stands);
    }

    fn wait(&mut self, ticket: &Ticket) -> Result<(), CopyError> {
        self.meddler.wait();
        let waited = self.inner.wait(ticket);
        self.meddler.waited().and(waited)
    }

    unsafe fn rescue(&mut self, copy: &SlowCopy, to: *mut u8) -> Result<(), CopyError> {
        self.meddler.rescue()?;
        // SAFETY: passed on.
        unsafe { self.inner.rescue(copy, to) }
    }

    fn tiers(&self) -> Vec<TierUse> {
        self.meddler.tiers(self.inner.tiers())
    }

    fn dependable_bytes(&self) -> u64 {
        self.meddler.dependable_bytes(self.inner.dependable_bytes())
    }

    fn copies(&self) -> Vec<TierCopies> {
        self.inner.copies()
    }
}
