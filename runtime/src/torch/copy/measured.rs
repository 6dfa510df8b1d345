//! How fast a link turns out to be: what its copies took.
//!
//! Engines that know when a copy begins and ends add up here what each direction did. Nothing here knows what was copied.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::hardware::{FileTier, Link, SlowTiers, Tier};

/// What one direction of a link has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChannelUse {
    /// Copies made.
    pub copies: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Time that they took, one after another; what they waited for is none of it.
    pub busy_ns: u64,
}

/// What the copies to and from one tier took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierCopies {
    /// Which one.
    pub tier: Tier,
    /// From the device.
    pub offload: ChannelUse,
    /// To the device.
    pub prefetch: ChannelUse,
}

/// A channel's use as its worker adds to it.
#[derive(Clone, Debug, Default)]
pub(super) struct Meter(Arc<Counters>);

#[derive(Debug, Default)]
struct Counters {
    copies: AtomicU64,
    bytes: AtomicU64,
    busy_ns: AtomicU64,
}

impl Meter {
    /// A copy has been made.
    pub(super) fn add(&self, bytes: usize, took: Duration) {
        self.0.copies.fetch_add(1, Ordering::Relaxed);
        self.0.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.0.busy_ns.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
    }

    /// All of them.
    pub(super) fn read(&self) -> ChannelUse {
        ChannelUse {
            copies: self.0.copies.load(Ordering::Relaxed),
            bytes: self.0.bytes.load(Ordering::Relaxed),
            busy_ns: self.0.busy_ns.load(Ordering::Relaxed),
        }
    }
}

impl ChannelUse {
    fn since(self, before: ChannelUse) -> ChannelUse {
        ChannelUse {
            copies: self.copies.saturating_sub(before.copies),
            bytes: self.bytes.saturating_sub(before.bytes),
            busy_ns: self.busy_ns.saturating_sub(before.busy_ns),
        }
    }

    /// The bandwidth, where anything was copied. The latency of every copy is taken off, as far as it leaves half of the
    /// time: one that is set too high must not make a link of any bandwidth out of small copies.
    fn bytes_per_s(self, latency_ns: u64) -> Option<f64> {
        let latency_ns = latency_ns.saturating_mul(self.copies);
        let bytes_ns = self.busy_ns.saturating_sub(latency_ns).max(self.busy_ns / 2);
        (self.bytes > 0 && bytes_ns > 0).then(|| self.bytes as f64 / bytes_ns as f64 * 1e9)
    }
}

/// What was copied between two readings of the same engine.
pub(crate) fn since(now: &[TierCopies], before: &[TierCopies]) -> Vec<TierCopies> {
    let of = |tier: Tier| before.iter().find(|copies| copies.tier == tier);
    let one = |now: &TierCopies| match of(now.tier) {
        Some(before) => TierCopies {
            tier: now.tier,
            offload: now.offload.since(before.offload),
            prefetch: now.prefetch.since(before.prefetch),
        },
        None => *now,
    };
    now.iter().map(one).collect()
}

/// `tiers` with the bandwidths that `copies` had. A direction in which nothing was copied stays as it was.
pub(crate) fn retimed(tiers: SlowTiers, copies: &[TierCopies]) -> SlowTiers {
    let retime = |link: Link, tier: Tier| match copies.iter().find(|copies| copies.tier == tier) {
        Some(TierCopies { offload, prefetch, .. }) => Link {
            offload_bytes_per_s: offload.bytes_per_s(link.latency_ns).unwrap_or(link.offload_bytes_per_s),
            prefetch_bytes_per_s: prefetch.bytes_per_s(link.latency_ns).unwrap_or(link.prefetch_bytes_per_s),
            ..link
        },
        None => link,
    };
    let file = tiers.file.map(|file| FileTier { link: retime(file.link, Tier::File), ..file });
    SlowTiers { host: retime(tiers.host, Tier::Host), file, ..tiers }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(copies: u64, bytes: u64, busy_ns: u64) -> ChannelUse {
        ChannelUse { copies, bytes, busy_ns }
    }

    #[test]
    fn bandwidths_are_what_the_copies_had_beside_their_latency_and_others_stay() {
        let tiers = SlowTiers::from(Link::symmetric(1e9, 1_000));
        let before = [TierCopies { tier: Tier::Host, offload: used(5, 500, 900), prefetch: used(1, 1, 1) }];
        let now = [TierCopies { tier: Tier::Host, offload: used(7, 100_500, 202_900), prefetch: used(1, 1, 1) }];
        let found = retimed(tiers, &since(&now, &before)).host;
        // 100,000 bytes in 202 µs less two latencies.
        assert_eq!(found.offload_bytes_per_s, 5e8);
        assert_eq!((found.prefetch_bytes_per_s, found.latency_ns), (1e9, 1_000));
        assert_eq!(retimed(tiers, &[]), tiers);
    }

    #[test]
    fn a_latency_that_is_set_too_high_makes_no_link_endlessly_fast() {
        let tiers = SlowTiers::from(Link::symmetric(1e9, 1_000_000));
        let copies = [TierCopies { tier: Tier::Host, offload: used(10, 1_000, 2_000), prefetch: used(0, 0, 0) }];
        assert_eq!(retimed(tiers, &copies).host.offload_bytes_per_s, 1e9);
    }
}
