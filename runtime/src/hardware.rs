//! What copies cost.

use serde::{Deserialize, Serialize};

use crate::trace::{Storage, StorageId, Trace};

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
    /// Compute time that every copied byte costs, because copies and kernels share cores or memory.
    pub contention_ns_per_byte: f64,
}

impl Link {
    /// A link of the same bandwidth both ways, which takes nothing from compute.
    pub fn symmetric(bytes_per_s: f64, latency_ns: u64) -> Self {
        let [offload_bytes_per_s, prefetch_bytes_per_s] = [bytes_per_s; 2];
        Link { offload_bytes_per_s, prefetch_bytes_per_s, latency_ns, contention_ns_per_byte: 0.0 }
    }

    /// Compute time that a copy of `bytes` costs.
    pub fn contention_ns(&self, bytes: u64) -> u64 {
        (bytes as f64 * self.contention_ns_per_byte) as u64
    }

    /// Time of one offload.
    pub fn offload_ns(&self, bytes: u64) -> u64 {
        copy_ns(bytes, self.offload_bytes_per_s, self.latency_ns)
    }

    /// Time of one prefetch.
    pub fn prefetch_ns(&self, bytes: u64) -> u64 {
        copy_ns(bytes, self.prefetch_bytes_per_s, self.latency_ns)
    }
}

/// What each storage of one trace takes to copy: looked up far more often than a link changes.
#[derive(Clone, Debug)]
pub(crate) struct CopyTimes {
    /// Offload, prefetch, and what either costs compute; per storage.
    ns: Vec<(u64, u64, u64)>,
}

impl CopyTimes {
    pub(crate) fn of(trace: &Trace, link: &Link) -> Self {
        let times = |&Storage { bytes, .. }: &Storage| {
            (link.offload_ns(bytes), link.prefetch_ns(bytes), link.contention_ns(bytes))
        };
        CopyTimes { ns: trace.storages.iter().map(times).collect() }
    }

    pub(crate) fn offload_ns(&self, storage: StorageId) -> u64 {
        self.ns[storage.index()].0
    }

    pub(crate) fn prefetch_ns(&self, storage: StorageId) -> u64 {
        self.ns[storage.index()].1
    }

    pub(crate) fn contention_ns(&self, storage: StorageId) -> u64 {
        self.ns[storage.index()].2
    }
}

fn copy_ns(bytes: u64, bytes_per_s: f64, latency_ns: u64) -> u64 {
    latency_ns + (bytes as f64 / bytes_per_s * 1e9) as u64
}
