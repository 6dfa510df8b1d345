//! Machines that traces are projected to, by the names under which commands and configurations know them.
//!
//! A folder of recorded traces holds the roofline of the machine that recorded them, measured before and after: times
//! can only be projected from the machine on which they were measured, as fast as it was then. Nothing here records.

use std::cell::OnceCell;
use std::path::{Path, PathBuf};

use anyhow::{bail, ensure};
use clap::Args;
use plimsoll_env::config::AS_RECORDED;
use plimsoll_env::hardware::{HardwareProfile, Roofline};
use plimsoll_runtime::{Link, Trace};

use crate::link::{LATENCY_NS, LinkFlag};
use crate::outputs::{read_json, write_json};

/// The file, beside traces, that says what the machine that recorded them does at best.
pub const RECORDED_ON: &str = "recorded-on.json";
/// Where `plimsoll probe` writes a profile of this machine.
pub const PROFILES: &str = "configs/hardware";
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

/// Which machine's times a command goes by.
#[derive(Args)]
pub struct HardwareFlag {
    /// Go by the times and the link of this machine: its profile, or the profile's name in configs/hardware/. What an accelerator has
    /// recorded keeps its times
    #[arg(long, value_name = "FILE|NAME")]
    hardware: Option<String>,
}

impl HardwareFlag {
    /// That machine.
    pub fn machine(&self) -> anyhow::Result<Machine> {
        self.hardware.as_ref().map_or(Ok(Machine::AsRecorded), |name| Machine::find(name, None))
    }
}

impl Machine {
    /// `as-recorded`, the path of a profile, or the name of one: in the folder `hardware/` beside `config`, in `configs/hardware/`, where
    /// `plimsoll probe` writes, or a shipped one.
    pub fn find(name: &str, config: Option<&Path>) -> anyhow::Result<Self> {
        if name == AS_RECORDED {
            return Ok(Machine::AsRecorded);
        }
        let beside = config.and_then(Path::parent).map(|folder| folder.join("hardware"));
        let folders = beside.into_iter().chain([PathBuf::from(PROFILES)]);
        let named = folders.map(|folder| folder.join(format!("{name}.toml")));
        let mut paths = if name.ends_with(".toml") { vec![PathBuf::from(name)] } else { named.collect() };
        paths.dedup();
        let there = paths.iter().find(|path| path.exists());
        let profile = match (there, HardwareProfile::SHIPPED.iter().find(|(shipped, _)| *shipped == name)) {
            (Some(path), _) => HardwareProfile::load(path)?,
            (None, Some((_, text))) => HardwareProfile::parse(Path::new(name), text)?,
            (None, None) => bail!(
                "no machine `{name}`: expected `{AS_RECORDED}`, a profile's path, its name ({}), or {}",
                paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", "),
                HardwareProfile::SHIPPED.map(|(shipped, _)| shipped).join(", "),
            ),
        };
        Ok(Machine::Profiled(Box::new(profile)))
    }

    /// A link of this bandwidth both ways, whose copies cost otherwise what the profile says, or what those of an emulated link do.
    pub fn link_of(&self, bytes_per_s: f64) -> Link {
        match self {
            Machine::AsRecorded => Link::symmetric(bytes_per_s, LATENCY_NS),
            Machine::Profiled(profile) => profile.link.at(bytes_per_s),
        }
    }

    /// What copies cost a plan for `trace`: over the link that `flag` names, or over this machine's own. Of a trace that an
    /// accelerator recorded that must be named: this host's link is not the accelerator's, and its copies cost no compute here.
    pub fn link(&self, flag: &LinkFlag, trace: &Trace) -> anyhow::Result<Link> {
        Ok(match (self, flag.link) {
            (Machine::AsRecorded, _) if trace.device == PROJECTABLE => flag.resolve()?,
            (Machine::AsRecorded, None) => {
                bail!("{} was recorded on {}: --link says how fast copies are there", trace.workload, trace.device)
            }
            (Machine::Profiled(profile), None) => profile.link,
            (Machine::AsRecorded | Machine::Profiled(_), Some(named)) => self.link_of(named.bytes_per_second()),
        })
    }

    /// Reads a trace, with the times of this machine; says so where it keeps its own.
    pub fn load(&self, path: &Path) -> anyhow::Result<Trace> {
        let trace = Trace::load(path)?;
        if let Machine::Profiled(profile) = self
            && self.leaves_times(&trace)
        {
            let (recorded_on, copies_of) = (&trace.device, &profile.name);
            eprintln!(
                "plimsoll: {}: the times are those of {recorded_on}, only copies are those of {copies_of}",
                path.display()
            );
        }
        self.project(&trace, &RecordedOn::of(path.parent().unwrap_or(Path::new(""))))
    }

    /// Whether a trace keeps the times of the machine that recorded it.
    pub fn leaves_times(&self, trace: &Trace) -> bool {
        matches!(self, Machine::AsRecorded) || trace.device != PROJECTABLE
    }

    /// `trace` with the times of this machine. What was recorded on an accelerator has an accelerator's times, and keeps them.
    pub fn project(&self, trace: &Trace, recorded_on: &RecordedOn) -> anyhow::Result<Trace> {
        Ok(match self {
            Machine::Profiled(profile) if !self.leaves_times(trace) => profile.project(trace, &recorded_on.roofline()?),
            Machine::Profiled(_) | Machine::AsRecorded => trace.clone(),
        })
    }
}

/// What the machine that recorded the traces in a folder does at best: what a file in the folder says, and where there is none
/// what this machine does. That is found out when it is first asked for.
pub struct RecordedOn {
    folder: PathBuf,
    found: OnceCell<Roofline>,
}

impl RecordedOn {
    /// Of the traces in `folder`.
    pub fn of(folder: &Path) -> Self {
        RecordedOn { folder: folder.to_owned(), found: OnceCell::new() }
    }

    fn roofline(&self) -> anyhow::Result<Roofline> {
        if let Some(&found) = self.found.get() {
            return Ok(found);
        }
        let path = self.folder.join(RECORDED_ON);
        let roofline = if path.exists() {
            let roofline: Roofline = read_json(&path)?;
            ensure!(roofline.is_plausible(), "{}: no machine is of such rates", path.display());
            roofline
        } else {
            eprintln!(
                "plimsoll: warning: there is no {}: this machine is taken for the one that recorded",
                path.display()
            );
            Roofline::of_host()?
        };
        Ok(*self.found.get_or_init(|| roofline))
    }
}

/// Measures this machine, and writes into `folder` the best of that and of what was measured `before`: what else ran in
/// between makes a machine look slower than it is.
pub fn save_recorded_on(folder: &Path, before: &Roofline) -> anyhow::Result<RecordedOn> {
    let after = Roofline::of_host()?;
    let best = Roofline {
        flops_per_s: before.flops_per_s.max(after.flops_per_s),
        memory_bytes_per_s: before.memory_bytes_per_s.max(after.memory_bytes_per_s),
        launch_overhead_ns: before.launch_overhead_ns.min(after.launch_overhead_ns),
        ..after
    };
    write_json(&folder.join(RECORDED_ON), &best)?;
    Ok(RecordedOn { folder: folder.to_owned(), found: OnceCell::from(best) })
}
