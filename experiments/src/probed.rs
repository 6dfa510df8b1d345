//! A machine as it was measured: its profile, and what copies take by size.

use plimsoll_env::hardware::HardwareProfile;
use plimsoll_runtime::torch::device::{CopyTable, DeviceName, Engines, PAGE_LOCKED_LIMIT_BYTES, cuda_devices};

/// What was measured.
pub struct Probed {
    /// What it was measured of, in words.
    pub machine: String,
    /// Copies, alone and beside compute.
    pub copies: CopyTable,
    /// The machine.
    pub profile: HardwareProfile,
}

impl Probed {
    /// Measures `device` now; its profile is called `name`.
    pub fn of(device: DeviceName, name: &str) -> anyhow::Result<Self> {
        let (place, engines) = (device.open()?, Engines::open(device, PAGE_LOCKED_LIMIT_BYTES)?);
        let copies = CopyTable::measure(&engines, place, &CopyTable::SIZES)?;
        let profile = HardwareProfile::measure(name, place, &engines, copies.link(place))?;
        let machine = match device {
            DeviceName::Cpu => "this machine's processor".to_owned(),
            DeviceName::Cuda(ordinal) => cuda_devices()?[ordinal].name.clone(),
        };
        Ok(Probed { machine, copies, profile })
    }

    /// The profile as a file of `configs/hardware/`.
    pub fn to_toml(&self) -> String {
        self.profile.to_toml(&format!("{}, as `plimsoll probe` measured it.", self.machine))
    }
}
