//! The loops that are checked: models as published on a GPU, tiny ones of the same families on the CPU.

use plimsoll_env::device::DeviceName;
use plimsoll_env::workload::{Arch, GptConfig, Manner, ResnetConfig, WorkloadConfig};
use plimsoll_runtime::torch::settings::Determinism;

/// Symbols of GPT-2 ("Language Models are Unsupervised Multitask Learners", Radford et al. 2019, section 2.2).
const GPT2_VOCABULARY: i64 = 50_257;

/// A loop that is checked.
pub struct Member {
    /// Its name.
    pub name: &'static str,
    /// Its model.
    pub config: WorkloadConfig,
    /// How it is run.
    pub manner: Manner,
    /// What to ask for where bits are compared.
    pub determinism: Determinism,
}

fn gpt(layers: i64, width: i64, heads: i64, sequence: i64, batch: i64, vocabulary: Option<i64>) -> WorkloadConfig {
    let (dropout, learning_rate) = (0.1, 3e-4);
    WorkloadConfig::Gpt(GptConfig { layers, width, heads, sequence, batch, vocabulary, dropout, learning_rate })
}

fn resnet(arch: Arch, classes: i64, image_size: i64, batch: i64) -> WorkloadConfig {
    let (depth, width) = if arch == Arch::Cifar { (Some(8), Some(4)) } else { (None, None) };
    let (learning_rate, momentum) = (0.01, 0.9);
    WorkloadConfig::Resnet(ResnetConfig { arch, depth, width, classes, image_size, batch, learning_rate, momentum })
}

/// The loop of that name; none where there is none. Some are for trying the check itself.
///
/// Sizes of GPT-2 as in its paper, table 2; those of ResNet as in "Deep Residual Learning for Image Recognition" (He et
/// al. 2016), table 1. The text and the pictures that they learn are this repository's own.
pub fn member(name: &str) -> Option<Member> {
    let mixed = Manner { bf16: true, one_batch: true };
    let full = Manner { bf16: false, one_batch: true };
    let vocabulary = Some(GPT2_VOCABULARY);
    let (name, config, manner) = match name {
        "gpt-tiny" => ("gpt-tiny", gpt(2, 64, 2, 64, 4, None), full),
        "gpt-tiny-mixed" => ("gpt-tiny-mixed", gpt(2, 64, 2, 64, 4, None), mixed),
        "gpt-small" => ("gpt-small", gpt(4, 128, 4, 128, 16, None), full),
        "gpt2-small" => ("gpt2-small", gpt(12, 768, 12, 1024, 8, vocabulary), mixed),
        "gpt2-medium" => ("gpt2-medium", gpt(24, 1024, 16, 1024, 8, vocabulary), mixed),
        "gpt2-large" => ("gpt2-large", gpt(36, 1280, 20, 1024, 8, vocabulary), mixed),
        "resnet-tiny" => ("resnet-tiny", resnet(Arch::Cifar, 4, 16, 4), full),
        "resnet50" => ("resnet50", resnet(Arch::Resnet50, 1000, 224, 64), full),
        "resnet152" => ("resnet152", resnet(Arch::Resnet152, 1000, 224, 32), full),
        _ => return None,
    };
    // libtorch calls the backward pass of max-pooling nondeterministic, and has no other.
    let strict = matches!(config, WorkloadConfig::Gpt(_));
    let determinism = if strict { Determinism::Required } else { Determinism::Preferred };
    Some(Member { name, config, manner, determinism })
}

/// The loops of a device, by importance.
pub fn names(device: DeviceName) -> &'static [&'static str] {
    match device {
        DeviceName::Cpu => &["gpt-tiny", "resnet-tiny"],
        DeviceName::Cuda(_) => &["gpt2-medium", "resnet50", "gpt2-small", "resnet152", "gpt2-large"],
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
    fn every_member_is_plausible_and_has_its_own_name() {
        for device in [DeviceName::Cpu, DeviceName::Cuda(0)] {
            for name in names(device).iter().chain(&smallest(device)) {
                let member = member(name).unwrap();
                assert_eq!(member.name, *name);
                member.config.validate().unwrap();
            }
        }
        assert!(member("gpt3").is_none());
    }
}
