//! What copies cost, and how much the slow tiers hold.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::trace::{Storage, StorageId, Trace};

/// Storages of at most this size that are copied before the same operator, to or from the same tier, move in one slab:
/// the latency is paid once, and all of them are there when the last byte is. Below it the latency of a copy weighs
/// more than its bytes on the links of today (10 µs at 25 GB/s are 250 kB).
pub const SLAB_MEMBER_BYTES_MAX: u64 = 256 << 10;

/// Slow tiers hold whole pages, each slab its own.
pub const PAGE_BYTES: u64 = 4096;

/// `bytes` in whole pages, at least one.
pub(crate) fn whole_pages(bytes: u64) -> u64 {
    bytes.max(1).next_multiple_of(PAGE_BYTES)
}

/// No single copy is taken to last longer, about 18 minutes: a link as slow as that, or of no bandwidth, is as good as
/// none, and times stay far from overflow.
const COPY_NS_MAX: u64 = 1 << 40;

/// Where offloaded bytes go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tier {
    /// The host's memory.
    #[default]
    Host,
    /// A file.
    File,
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Tier::Host => "host's memory",
            Tier::File => "file",
        })
    }
}

/// The link between device and slow tier: one channel each way, each copying one storage after another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Bytes per second from the device.
    pub offload_bytes_per_s: f64,
    /// Bytes per second to the device.
    pub prefetch_bytes_per_s: f64,
    /// Time that every copy takes beside its bytes.
    pub latency_ns: u64,
    /// Time that every storage takes beside its bytes, in a slab too: what a device takes that copies each by itself.
    #[serde(default)]
    pub each_ns: u64,
    /// Compute time that every copied storage costs beside its bytes: a host that compute waits for queues copies, too.
    #[serde(default)]
    pub contention_each_ns: u64,
    /// Compute time that every copied byte costs, because copies and kernels share cores or memory.
    pub contention_ns_per_byte: f64,
}

impl Link {
    /// A link of the same bandwidth both ways, which takes nothing from compute.
    pub fn symmetric(bytes_per_s: f64, latency_ns: u64) -> Self {
        let [offload_bytes_per_s, prefetch_bytes_per_s] = [bytes_per_s; 2];
        Link {
            offload_bytes_per_s,
            prefetch_bytes_per_s,
            latency_ns,
            each_ns: 0,
            contention_each_ns: 0,
            contention_ns_per_byte: 0.0,
        }
    }

    /// The same with another bandwidth, of so many bytes per second both ways.
    pub fn at(self, bytes_per_s: f64) -> Self {
        Link { offload_bytes_per_s: bytes_per_s, prefetch_bytes_per_s: bytes_per_s, ..self }
    }

    /// The same at so much of its bandwidth.
    pub fn at_share(self, share: f64) -> Self {
        let [offload_bytes_per_s, prefetch_bytes_per_s] =
            [self.offload_bytes_per_s, self.prefetch_bytes_per_s].map(|rate| share * rate);
        Link { offload_bytes_per_s, prefetch_bytes_per_s, ..self }
    }

    /// Compute time that a copy of `bytes` costs.
    pub fn contention_ns(&self, bytes: u64) -> u64 {
        let of_bytes_ns = (bytes as f64 * self.contention_ns_per_byte) as u64;
        of_bytes_ns.saturating_add(self.contention_each_ns).min(COPY_NS_MAX)
    }

    /// Time of one offload.
    pub fn offload_ns(&self, bytes: u64) -> u64 {
        self.latency_ns() + self.offload_transfer_ns(bytes)
    }

    /// … beside the latency.
    pub fn offload_transfer_ns(&self, bytes: u64) -> u64 {
        self.each_ns.min(COPY_NS_MAX) + transfer_ns(bytes, self.offload_bytes_per_s)
    }

    /// Time of one prefetch.
    pub fn prefetch_ns(&self, bytes: u64) -> u64 {
        self.latency_ns() + self.prefetch_transfer_ns(bytes)
    }

    /// … beside the latency.
    pub fn prefetch_transfer_ns(&self, bytes: u64) -> u64 {
        self.each_ns.min(COPY_NS_MAX) + transfer_ns(bytes, self.prefetch_bytes_per_s)
    }

    /// Time of a copy beside what its storages take.
    pub fn latency_ns(&self) -> u64 {
        self.latency_ns.min(COPY_NS_MAX)
    }

    /// The latency, where a copy of `bytes` may join a slab.
    fn latency_saved_ns(&self, bytes: u64) -> u64 {
        if bytes <= SLAB_MEMBER_BYTES_MAX { self.latency_ns() } else { 0 }
    }
}

/// A file that holds what the host's memory does not.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileTier {
    /// The way to the file and back. It shares the device's channels with the way to the host.
    pub link: Link,
    /// Most bytes in it.
    pub limit_bytes: u64,
}

/// A tier would not hold what was to go there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) tier: Tier,
    /// Bytes that it would have held then, in whole pages.
    pub(crate) wanted_bytes: u64,
    /// Whether a plan counted on it; where not, the tier itself says that it has the room.
    pub(crate) was_planned: bool,
}

impl Refusal {
    /// Whether it was planned where the other was not, or is of less.
    pub(crate) fn says_more_than(&self, other: Refusal) -> bool {
        (self.was_planned, other.wanted_bytes) > (other.was_planned, self.wanted_bytes)
    }
}

/// Where offloaded bytes may go: to the host while its limit allows, else to the file.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SlowTiers {
    /// The way to the host's memory and back.
    pub host: Link,
    /// Most bytes in the host's memory.
    pub host_limit_bytes: u64,
    /// The file, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<FileTier>,
}

impl From<Link> for SlowTiers {
    /// The host alone, without a limit.
    fn from(host: Link) -> Self {
        SlowTiers { host, host_limit_bytes: u64::MAX, file: None }
    }
}

impl SlowTiers {
    /// Most bytes in `tier`: none in a tier that there is not.
    pub fn limit_bytes(&self, tier: Tier) -> u64 {
        match tier {
            Tier::Host => self.host_limit_bytes,
            Tier::File => self.file.map_or(0, |file| file.limit_bytes),
        }
    }

    /// The least time that an offload of `bytes` takes of its channel, whichever tier it goes to: one that may join a
    /// slab pays no latency.
    pub fn least_offload_ns(&self, bytes: u64) -> u64 {
        self.least(|link| link.offload_ns(bytes) - link.latency_saved_ns(bytes))
    }

    /// The least time that a prefetch of `bytes` takes of its channel.
    pub fn least_prefetch_ns(&self, bytes: u64) -> u64 {
        self.least(|link| link.prefetch_ns(bytes) - link.latency_saved_ns(bytes))
    }

    /// The least compute time that a copy of `bytes` costs.
    pub fn least_contention_ns(&self, bytes: u64) -> u64 {
        self.least(|link| link.contention_ns(bytes))
    }

    fn least(&self, of: impl Fn(&Link) -> u64) -> u64 {
        let host = of(&self.host);
        self.file.map_or(host, |file| host.min(of(&file.link)))
    }

    /// The same with less in the tier that has refused something.
    pub(crate) fn having_refused(self, Refusal { tier, wanted_bytes, was_planned }: Refusal) -> Self {
        let limit_bytes = self.limit_bytes(tier);
        // A plan that keeps within the limit, and is refused beyond it, does not count all that is there: no more of that than half.
        let uncounted_bytes =
            if was_planned { wanted_bytes.saturating_sub(limit_bytes).min(limit_bytes / 2) } else { 0 };
        let least_bytes = if was_planned { wanted_bytes.min(limit_bytes) } else { wanted_bytes };
        let most_bytes = least_bytes.saturating_sub(uncounted_bytes.max(least_bytes / 64).max(PAGE_BYTES));
        self.within(|other| if other == tier { most_bytes } else { u64::MAX })
    }

    /// The same with no more in a tier than `limit_bytes` says.
    pub(crate) fn within(self, limit_bytes: impl Fn(Tier) -> u64) -> Self {
        let limited = |file: FileTier| FileTier { limit_bytes: file.limit_bytes.min(limit_bytes(Tier::File)), ..file };
        let host_limit_bytes = self.host_limit_bytes.min(limit_bytes(Tier::Host));
        SlowTiers { host_limit_bytes, file: self.file.map(limited), ..self }
    }
}

/// Time of a copy beside its latency.
#[derive(Clone, Copy, Debug)]
struct CopyTime {
    offload_ns: u64,
    prefetch_ns: u64,
    contention_ns: u64,
}

/// What each storage of one trace takes to copy: looked up far more often than a link changes.
#[derive(Clone, Debug)]
pub(crate) struct CopyTimes {
    latency_ns: [u64; 2],
    /// Per tier that there is, per storage.
    times: [Vec<CopyTime>; 2],
}

impl CopyTimes {
    pub(crate) fn of(trace: &Trace, tiers: SlowTiers) -> Self {
        let times = |link: Link| {
            let of_storage = |&Storage { bytes, .. }: &Storage| CopyTime {
                offload_ns: link.offload_transfer_ns(bytes),
                prefetch_ns: link.prefetch_transfer_ns(bytes),
                contention_ns: link.contention_ns(bytes),
            };
            trace.storages.iter().map(of_storage).collect()
        };
        let file = tiers.file.map(|file| file.link);
        CopyTimes {
            latency_ns: [tiers.host.latency_ns(), file.map_or(0, |link| link.latency_ns())],
            times: [times(tiers.host), file.map_or(Vec::new(), times)],
        }
    }

    pub(crate) fn latency_ns(&self, tier: Tier) -> u64 {
        self.latency_ns[tier as usize]
    }

    /// Time of an offload beside the latency.
    pub(crate) fn offload_transfer_ns(&self, storage: StorageId, tier: Tier) -> u64 {
        self.times[tier as usize][storage.index()].offload_ns
    }

    /// Time of a prefetch beside the latency.
    pub(crate) fn prefetch_transfer_ns(&self, storage: StorageId, tier: Tier) -> u64 {
        self.times[tier as usize][storage.index()].prefetch_ns
    }

    pub(crate) fn offload_ns(&self, storage: StorageId, tier: Tier) -> u64 {
        self.latency_ns(tier) + self.offload_transfer_ns(storage, tier)
    }

    pub(crate) fn prefetch_ns(&self, storage: StorageId, tier: Tier) -> u64 {
        self.latency_ns(tier) + self.prefetch_transfer_ns(storage, tier)
    }

    pub(crate) fn contention_ns(&self, storage: StorageId, tier: Tier) -> u64 {
        self.times[tier as usize][storage.index()].contention_ns
    }
}

fn transfer_ns(bytes: u64, bytes_per_s: f64) -> u64 {
    if bytes_per_s > 0.0 { ((bytes as f64 / bytes_per_s * 1e9) as u64).min(COPY_NS_MAX) } else { COPY_NS_MAX }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tier_that_refuses_the_same_again_is_counted_on_for_as_much_as_before() {
        let refusal = Refusal { tier: Tier::Host, wanted_bytes: 8 << 20, was_planned: false };
        let before = SlowTiers::from(Link::symmetric(1e10, 0));
        let once = before.having_refused(refusal);
        assert!((7 << 20..8 << 20).contains(&once.host_limit_bytes), "{once:?}");
        assert_eq!(once.having_refused(refusal), once);
        // A plan that was made for less than it wants counts wrong.
        let planned = once.having_refused(Refusal {
            wanted_bytes: once.host_limit_bytes + (1 << 20),
            was_planned: true,
            ..refusal
        });
        assert_eq!(planned.host_limit_bytes, once.host_limit_bytes - (1 << 20));
        let none = before.having_refused(Refusal { wanted_bytes: PAGE_BYTES, ..refusal });
        assert_eq!(none.host_limit_bytes, 0);
    }

    #[test]
    fn a_link_of_no_or_absurd_bandwidth_takes_long_and_not_for_ever() {
        for bytes_per_s in [0.0, -1.0, f64::NAN, 1e-300] {
            let link = Link { contention_ns_per_byte: f64::MAX, ..Link::symmetric(bytes_per_s, u64::MAX) };
            assert_eq!(link.offload_ns(1 << 30), 2 * COPY_NS_MAX, "{bytes_per_s}");
            assert_eq!(link.prefetch_ns(1 << 30), 2 * COPY_NS_MAX, "{bytes_per_s}");
            assert_eq!(link.contention_ns(1 << 30), COPY_NS_MAX);
        }
        assert_eq!(Link::symmetric(f64::INFINITY, 7).offload_ns(1 << 30), 7);
        assert_eq!(Link::symmetric(2e9, 5).prefetch_ns(4_000), 2_005);
    }

    #[test]
    fn at_half_of_its_bandwidth_bytes_take_twice_as_long_and_the_rest_does_not() {
        let link = Link { each_ns: 30, contention_each_ns: 7, ..Link::symmetric(1e9, 5) };
        let half = link.at_share(0.5);
        assert_eq!((half.offload_ns(100), half.prefetch_ns(100)), (235, 235));
        assert_eq!(half.contention_ns(100), link.contention_ns(100));
    }

    #[test]
    fn in_a_slab_the_latency_is_saved_and_what_each_storage_takes_is_not() {
        let link = Link { each_ns: 30, ..Link::symmetric(1e9, 5) };
        assert_eq!((link.offload_ns(100), link.offload_transfer_ns(100)), (135, 130));
        assert_eq!(SlowTiers::from(link).least_prefetch_ns(100), 130);
        let large = SLAB_MEMBER_BYTES_MAX + 1;
        assert_eq!(SlowTiers::from(link).least_prefetch_ns(large), link.prefetch_ns(large));
    }
}
