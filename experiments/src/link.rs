//! The link between a device and its slow tier, as the command line names it.

use clap::Args;
use plimsoll_runtime::Link;
use plimsoll_runtime::torch::HostEngine;
use plimsoll_runtime::units::{Bandwidth, UnitError};

/// Latency of a copy on an emulated link.
pub const LATENCY_NS: u64 = 20_000;

/// The flag that says how fast copies are.
#[derive(Args, Clone, Debug)]
pub struct LinkFlag {
    /// A link of this bandwidth, such as 8GB/s: plans reckon with it, and copies of loops that run are paced to it [default: as fast
    /// as this host copies; with --hardware, as that says; of `evaluate`, as its configuration says]
    #[arg(long, value_name = "GBPS", value_parser = bandwidth)]
    pub link: Option<Bandwidth>,
}

/// A bandwidth with its unit, or a bare number of GB/s.
pub fn bandwidth(text: &str) -> Result<Bandwidth, UnitError> {
    let bare = text.parse::<f64>().is_ok();
    if bare { format!("{text}GB/s").parse() } else { text.parse() }
}

impl LinkFlag {
    /// The link to plan for: the emulated one, or this host's own, measured.
    pub fn resolve(&self) -> anyhow::Result<Link> {
        self.link.map_or_else(|| Ok(HostEngine::probe()?), emulated)
    }

    /// Whether copies are paced.
    pub fn is_emulated(&self) -> bool {
        self.link.is_some()
    }
}

/// A link in words.
pub fn described(link: &Link) -> String {
    let [there, back] = [link.offload_bytes_per_s, link.prefetch_bytes_per_s].map(|rate| format!("{:.1}", rate / 1e9));
    if there == back { format!("a link of {there} GB/s") } else { format!("a link of {there} and back {back} GB/s") }
}

/// An emulated link of the same bandwidth both ways. Its copies are this host's, and cost compute what those cost.
pub fn emulated(bandwidth: Bandwidth) -> anyhow::Result<Link> {
    let contention_ns_per_byte = HostEngine::probe()?.contention_ns_per_byte;
    Ok(Link { contention_ns_per_byte, ..Link::symmetric(bandwidth.bytes_per_second(), LATENCY_NS) })
}
