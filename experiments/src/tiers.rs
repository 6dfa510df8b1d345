//! The slow tiers as the command line and configurations name them, and the engine that copies to them.
//!
//! Which storage goes where is not decided here.

use std::path::PathBuf;

use anyhow::{Context, bail, ensure};
use clap::Args;
use plimsoll_env::config::Spill;
use plimsoll_runtime::hardware::{FileTier as FileCost, PAGE_BYTES};
use plimsoll_runtime::torch::device::DeviceName;
use plimsoll_runtime::torch::{CopyEngine, FileEngine, FileTier, HostEngine, TieredEngine};
use plimsoll_runtime::units::Bytes;
use plimsoll_runtime::{Link, SlowTiers};

/// Flags of every command that offloads storages.
#[derive(Args, Clone, Debug, Default)]
pub struct TierFlags {
    /// Most bytes of this machine's memory that offloaded storages may take, such as 2GiB [default: no limit]
    #[arg(long, value_name = "BYTES")]
    pub host_limit: Option<Bytes>,
    /// Offload to a file in this folder what the memory does not take; the file has no name there and leaves nothing
    #[arg(long, value_name = "DIR")]
    pub spill: Option<PathBuf>,
    /// Most bytes of that file [default: what the disk holds]
    #[arg(long, value_name = "BYTES", requires = "spill")]
    pub spill_limit: Option<Bytes>,
}

impl TierFlags {
    /// What the flags say, and where they say nothing what the configuration says.
    pub fn or(self, host_limit: Option<Bytes>, spill: Option<&Spill>) -> Self {
        let (folder, limit) = spill.map_or((None, None), |spill| (Some(spill.folder.clone()), spill.limit));
        match self.spill {
            Some(_) => TierFlags { host_limit: self.host_limit.or(host_limit), ..self },
            None => TierFlags { host_limit: self.host_limit.or(host_limit), spill: folder, spill_limit: limit },
        }
    }

    /// Makes and measures the tiers. `link` leads to the memory; where it is `emulated`, copies there are paced to it.
    pub fn open(&self, link: Link, emulated: bool) -> anyhow::Result<OpenTiers> {
        let host_limit_bytes = limit("--host-limit", self.host_limit)?;
        let file_limit_bytes = limit("--spill-limit", self.spill_limit)?;
        let file = match &self.spill {
            None => None,
            Some(folder) => {
                let name = || format!("--spill {}", folder.display());
                if !folder.is_dir() {
                    bail!("{}: no such folder", name());
                }
                let link = FileEngine::probe(folder.clone()).with_context(name)?;
                Some(FileCost { link, limit_bytes: file_limit_bytes })
            }
        };
        let pace = emulated.then_some(link);
        Ok(OpenTiers { tiers: SlowTiers { host: link, host_limit_bytes, file }, pace, folder: self.spill.clone() })
    }
}

impl TierFlags {
    /// [`TierFlags::open`] for loops on the CPU. None for another `device`, whose memory and link are its own; what
    /// cannot be had there is refused.
    pub fn open_on(
        &self,
        device: DeviceName,
        link: impl FnOnce() -> anyhow::Result<Link>,
        emulated: bool,
    ) -> anyhow::Result<Option<OpenTiers>> {
        if device == DeviceName::Cpu {
            return self.open(link()?, emulated).map(Some);
        }
        ensure!(!emulated, "--link: a link is emulated on the CPU alone; on {device} its own is measured");
        let none = self.host_limit.is_none() && self.spill.is_none();
        ensure!(none, "--host-limit and --spill: slow tiers are chosen on the CPU alone, not on {device}");
        Ok(None)
    }
}

/// A limit that holds something.
fn limit(flag: &str, limit: Option<Bytes>) -> anyhow::Result<u64> {
    let Some(Bytes(bytes)) = limit else { return Ok(u64::MAX) };
    ensure!(bytes >= PAGE_BYTES, "{flag} {bytes}: a tier of less than one page, {PAGE_BYTES} bytes, holds nothing");
    Ok(bytes)
}

/// Slow tiers that can be copied to.
#[derive(Clone, Debug)]
pub struct OpenTiers {
    /// What copies cost and how much there is room for.
    pub tiers: SlowTiers,
    pace: Option<Link>,
    folder: Option<PathBuf>,
}

impl OpenTiers {
    /// What `link` of a device leads to, without a limit.
    pub fn of_device(link: Link) -> Self {
        OpenTiers { tiers: link.into(), pace: None, folder: None }
    }

    /// An engine that copies to them.
    pub fn engine(&self) -> anyhow::Result<Box<dyn CopyEngine>> {
        let host = HostEngine::with_limit(self.tiers.host_limit_bytes, self.pace);
        let (Some(file), Some(directory)) = (self.tiers.file, self.folder.clone()) else { return Ok(Box::new(host)) };
        let name = format!("--spill {}", directory.display());
        let tier = FileTier { directory, limit_bytes: file.limit_bytes, pace: None };
        let file = FileEngine::new(tier).context(name)?;
        Ok(Box::new(TieredEngine::new(Box::new(host), Box::new(file))))
    }
}
