//! The loops that are checked: of the shipped configurations, models as published on a GPU, and tiny ones on the CPU.

use std::path::Path;

use anyhow::bail;
use plimsoll_env::config::FamilyConfig;
use plimsoll_env::workload::{Manner, WorkloadConfig};
use plimsoll_runtime::torch::device::DeviceName;

/// The configurations: there is no repository where a check runs.
const CONFIGURATIONS: [(&str, &str); 4] = [
    ("gpt2", include_str!("../../../configs/gpt2.toml")),
    ("resnet224", include_str!("../../../configs/resnet224.toml")),
    ("gpt", include_str!("../../../configs/gpt.toml")),
    ("resnet", include_str!("../../../configs/resnet.toml")),
];
/// What is behind the name of a loop that is to run in mixed precision, where its configuration says nothing of it.
const MIXED: &str = "-mixed";

/// A loop that is checked.
pub struct Member {
    /// Its name.
    pub name: String,
    /// What its configuration is called, and its shipped policy.
    pub configuration: &'static str,
    /// Its model.
    pub config: WorkloadConfig,
    /// How it is run.
    pub manner: Manner,
}

/// The loop of that name.
pub fn member(name: &str) -> anyhow::Result<Member> {
    let (workload, mixed) = name.strip_suffix(MIXED).map_or((name, false), |workload| (workload, true));
    for (configuration, text) in CONFIGURATIONS {
        let mut family = FamilyConfig::parse(Path::new(configuration), text)?;
        if let Some(config) = family.workloads.remove(workload) {
            let manner = Manner { bf16: mixed || family.manner.bf16, ..family.manner };
            return Ok(Member { name: name.to_owned(), configuration, config, manner });
        }
    }
    bail!("--member {name}: there is no such loop")
}

/// The loops of a device, by importance.
pub fn names(device: DeviceName) -> &'static [&'static str] {
    match device {
        DeviceName::Cpu => &["gpt-tiny", "resnet-tiny"],
        DeviceName::Cuda(_) => {
            &["gpt2-medium", "resnet50", "gpt2-small", "resnet152", "gpt2-large", "gpt2-medium-batch-32"]
        }
    }
}

/// The loop whose batches are of any length.
pub fn of_any_length(device: DeviceName) -> &'static str {
    match device {
        DeviceName::Cpu => "gpt-tiny-lengths",
        DeviceName::Cuda(_) => "gpt2-small-lengths",
    }
}

/// The smallest loop of each family, where bits are compared.
pub fn smallest(device: DeviceName) -> [&'static str; 2] {
    match device {
        DeviceName::Cpu => ["gpt-tiny", "resnet-tiny"],
        DeviceName::Cuda(_) => ["gpt2-small", "resnet50"],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_loop_of_a_check_is_there_and_runs_as_its_configuration_says() {
        for device in [DeviceName::Cpu, DeviceName::Cuda(0)] {
            for name in names(device).iter().chain(&smallest(device)).chain([&of_any_length(device)]) {
                assert_eq!(member(name).unwrap().name, *name);
            }
        }
        assert!(member("gpt3").is_err());
        let [plain, mixed] = ["gpt-tiny", "gpt-tiny-mixed"].map(|name| member(name).unwrap());
        assert_eq!((plain.manner.bf16, mixed.manner.bf16, &plain.config), (false, true, &mixed.config));
        assert!(member("gpt2-small").unwrap().manner.bf16);
    }
}
