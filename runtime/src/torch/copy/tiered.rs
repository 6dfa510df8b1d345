//! A host engine and a file engine as one, by tier.

use super::{CopyEngine, CopyError, DeviceBytes, SlowCopy, Ticket, TierCopies, TierUse};
use crate::hardware::Tier;

/// Sends every copy to the engine of its tier. Which tier that is has been decided before.
pub struct TieredEngine {
    host: Box<dyn CopyEngine>,
    file: Box<dyn CopyEngine>,
}

impl TieredEngine {
    /// `host` takes what goes to the host's memory, `file` what goes to a file.
    pub fn new(host: Box<dyn CopyEngine>, file: Box<dyn CopyEngine>) -> Self {
        TieredEngine { host, file }
    }

    fn of(&mut self, tier: Tier) -> &mut dyn CopyEngine {
        match tier {
            Tier::Host => &mut *self.host,
            Tier::File => &mut *self.file,
        }
    }
}

/// The tiers, in the order in which they are asked.
const TIERS: [Tier; 2] = [Tier::Host, Tier::File];

impl CopyEngine for TieredEngine {
    unsafe fn offload(&mut self, pieces: &[DeviceBytes], tier: Tier) -> Result<(Vec<SlowCopy>, Ticket), CopyError> {
        // SAFETY: passed on.
        unsafe { self.of(tier).offload(pieces, tier) }
    }

    unsafe fn prefetch(&mut self, copies: &[(&SlowCopy, *mut u8)]) -> Result<Ticket, CopyError> {
        let mut tickets: Vec<Ticket> = Vec::with_capacity(1);
        for tier in TIERS {
            let of_tier: Vec<_> = copies.iter().copied().filter(|(copy, _)| copy.tier() == tier).collect();
            if of_tier.is_empty() {
                continue;
            }
            // SAFETY: passed on.
            match unsafe { self.of(tier).prefetch(&of_tier) } {
                Ok(ticket) => tickets.push(ticket),
                Err(error) => {
                    // Nothing may be under way after an error; how this ends matters no more.
                    let _ = self.wait(&Ticket::all(tickets));
                    return Err(error);
                }
            }
        }
        Ok(Ticket::all(tickets))
    }

    fn has_read_out(&mut self) {
        // Both would do the same.
        self.of(Tier::Host).has_read_out();
    }

    fn compute_stands(&mut self, stands: bool) {
        for tier in TIERS {
            self.of(tier).compute_stands(stands);
        }
    }

    fn wait(&mut self, ticket: &Ticket) -> Result<(), CopyError> {
        // All of it is waited for, so that nothing is under way after an error.
        let [host, file] = TIERS.map(|tier| ticket.of(tier).map_or(Ok(()), |ticket| self.of(tier).wait(&ticket)));
        host.and(file)
    }

    unsafe fn rescue(&mut self, copy: &SlowCopy, to: *mut u8) -> Result<(), CopyError> {
        // SAFETY: passed on.
        unsafe { self.of(copy.tier()).rescue(copy, to) }
    }

    fn tiers(&self) -> Vec<TierUse> {
        [self.host.tiers(), self.file.tiers()].concat()
    }

    fn copies(&self) -> Vec<TierCopies> {
        [self.host.copies(), self.file.copies()].concat()
    }

    fn dependable_bytes(&self) -> u64 {
        self.host.dependable_bytes()
    }
}
