//! Machines that traces are projected to, by the names under which commands and configurations know them.
//!
//! A folder of recorded traces holds the roofline of the machine that recorded them, measured before and after: times
//! can only be projected from the machine on which they were measured, as fast as it was then. Nothing here records.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use plimsoll_env::config::AS_RECORDED;
use plimsoll_env::hardware::{HardwareProfile, Precision, Roofline};
use plimsoll_runtime::{Link, Trace};

use crate::loops::{LATENCY_NS, LinkFlag};
use crate::results::write_json;

/// The file, beside traces, that says what the machine that recorded them does at best.
pub const RECORDED_ON: &str = "recorded-on.json";
/// The device whose times a roofline of this machine explains.
const PROJECTABLE: &str = "cpu";

/// The machine whose times a trace shall have.
#[derive(Clone, Debug)]
pub enum Machine {
    /// The one that recorded it.
    AsRecorded,
    /// Another, of which there is a profile.
    Profiled(Box<HardwareProfile>),
}

impl Machine {
    /// `as-recorded`, the path of a profile, or the name of one in the folder `hardware/` beside `config`.
    pub fn find(name: &str, config: Option<&Path>) -> anyhow::Result<Self> {
        if name == AS_RECORDED {
            return Ok(Machine::AsRecorded);
        }
        let folder = config.and_then(Path::parent).unwrap_or(Path::new("configs")).join("hardware");
        let named = folder.join(format!("{name}.toml"));
        let path = if name.ends_with(".toml") { PathBuf::from(name) } else { named };
        if !path.exists() {
            bail!(
                "no machine `{name}`: expected `{AS_RECORDED}`, a profile's path, or its name in {}",
                folder.display()
            );
        }
        Ok(Machine::Profiled(Box::new(HardwareProfile::load(&path)?)))
    }

    /// Latency of a copy: the profile's, or that of an emulated link.
    pub fn latency_ns(&self) -> u64 {
        match self {
            Machine::AsRecorded => LATENCY_NS,
            Machine::Profiled(profile) => profile.link.latency_ns,
        }
    }

    /// What copies cost a plan for `trace`: over the link that `flag` names, or over this machine's own. Of a trace that an
    /// accelerator recorded that must be named: this host's link is not the accelerator's, and its copies cost no compute here.
    pub fn link(&self, flag: &LinkFlag, trace: &Trace) -> anyhow::Result<Link> {
        Ok(match (self, flag.link) {
            (Machine::AsRecorded, _) if trace.device == PROJECTABLE => flag.resolve(),
            (Machine::AsRecorded, Some(named)) => Link::symmetric(named.bytes_per_second(), LATENCY_NS),
            (Machine::AsRecorded, None) => {
                bail!("{} was recorded on {}: --link says how fast copies are there", trace.workload, trace.device)
            }
            (Machine::Profiled(profile), None) => profile.link,
            (Machine::Profiled(profile), Some(named)) => {
                let rate = named.bytes_per_second();
                Link { offload_bytes_per_s: rate, prefetch_bytes_per_s: rate, ..profile.link }
            }
        })
    }

    /// Whether `trace` gets other times here. What was recorded on an accelerator has an accelerator's times, and keeps them.
    pub fn projects(&self, trace: &Trace) -> bool {
        matches!(self, Machine::Profiled(_)) && trace.device == PROJECTABLE
    }

    /// `trace` with the times of this machine, where it [gets other ones](Machine::projects).
    pub fn project(&self, trace: &Trace, recorded_on: &Roofline) -> Trace {
        match self {
            Machine::Profiled(profile) if self.projects(trace) => {
                profile.project(trace, recorded_on, Precision::F32).expect("a profile always has a value for f32")
            }
            Machine::Profiled(_) | Machine::AsRecorded => trace.clone(),
        }
    }
}

/// The roofline of the machine that recorded the traces in `folder`, as the folder says; where it says nothing, that of
/// this machine, measured now.
pub fn recorded_on(folder: &Path) -> anyhow::Result<Roofline> {
    let path = folder.join(RECORDED_ON);
    if !path.exists() {
        return Ok(Roofline::of_host()?);
    }
    let name = || path.display().to_string();
    let bytes = std::fs::read(&path).with_context(name)?;
    serde_json::from_slice(&bytes).with_context(name)
}

/// Measures this machine, and writes into `folder` the best of that and of what was measured `before`: what else ran in
/// between makes a machine look slower than it is.
pub fn save_recorded_on(folder: &Path, before: &Roofline) -> anyhow::Result<Roofline> {
    let after = Roofline::of_host()?;
    let best = Roofline {
        flops_per_s: before.flops_per_s.max(after.flops_per_s),
        memory_bytes_per_s: before.memory_bytes_per_s.max(after.memory_bytes_per_s),
        launch_overhead_ns: before.launch_overhead_ns.min(after.launch_overhead_ns),
        ..after
    };
    write_json(&folder.join(RECORDED_ON), &best)?;
    Ok(best)
}
