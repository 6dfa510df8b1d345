//! The file that describes a machine: `configs/hardware/`.

use std::collections::BTreeMap;
use std::path::Path;

use plimsoll_runtime::{Link, Trace};
use serde::{Deserialize, Serialize};

use super::{Roofline, project};
use crate::config::{ConfigError, Problem};

/// What a rate of a machine's has to be. A slower one has lost its exponent.
pub(super) const RATE_RULE: &str = "must be from 1e6 to 1e21 per second";

/// Whether it is that.
pub(super) fn is_rate(per_s: f64) -> bool {
    (1e6..=1e21).contains(&per_s)
}

/// What the time of something has to be, in nanoseconds.
const COST_RULE: &str = "must be from 0 to 1e9";

/// Whether it is that.
pub(super) fn is_cost(ns: f64) -> bool {
    (0.0..=1e9).contains(&ns)
}

/// How numbers are held while they are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 32 bits.
    F32,
    /// 32 bits in memory, of which matrix units read 19.
    Tf32,
    /// 16 bits, 8 of them exponent.
    Bf16,
    /// 16 bits, 5 of them exponent.
    F16,
}

/// What a machine does at best, and how fast its link is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HardwareProfile {
    /// The machine's name.
    pub name: String,
    /// Floating-point operations per second, by how numbers are held. There is always one for `f32`.
    pub flops_per_s: BTreeMap<Precision, f64>,
    /// Bytes that operators read and write per second.
    pub memory_bytes_per_s: f64,
    /// Time that an operator takes however little it does, in nanoseconds.
    pub launch_overhead_ns: f64,
    /// Whether the program issues operators ahead of the machine that runs them.
    pub runs_ahead: bool,
    /// The link to the slow tier.
    pub link: Link,
}

impl HardwareProfile {
    /// The files of those that need no file: their names and what they say. From the slowest machine to the fastest by their data
    /// sheets, then what was measured.
    pub const SHIPPED: [(&str, &str); 5] = [
        ("titan-v", include_str!("../../../configs/hardware/titan-v.toml")),
        ("a100", include_str!("../../../configs/hardware/a100.toml")),
        ("h100", include_str!("../../../configs/hardware/h100.toml")),
        ("h200", include_str!("../../../configs/hardware/h200.toml")),
        ("h200-measured", include_str!("../../../configs/hardware/h200-measured.toml")),
    ];

    /// Reads and checks a profile.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path).map_err(|error| ConfigError::unreadable(path, error))?;
        Self::parse(path, &text)
    }

    /// Checks `text`, which was read at `path`.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let profile: Self = toml::from_str(text).map_err(|error| ConfigError::malformed(path, text, error))?;
        profile.check().map_err(|(key, rule)| {
            ConfigError::at_key(path, text, key.to_owned(), Problem::Implausible { rule: rule.to_owned() })
        })?;
        Ok(profile)
    }

    /// The file that describes it, with `remark` on its first line.
    pub fn to_toml(&self, remark: &str) -> String {
        let body = toml::to_string(self).expect("a profile has no value that TOML lacks");
        format!("# {}\n{body}", remark.replace(['\n', '\r'], " "))
    }

    /// Finds the first value that no machine has, with its key.
    fn check(&self) -> Result<(), (&'static str, &'static str)> {
        let require = |key, holds: bool, rule| if holds { Ok(()) } else { Err((key, rule)) };
        let link = self.link;
        require("flops_per_s", self.flops_per_s.contains_key(&Precision::F32), "must have a value for f32")?;
        require("flops_per_s", self.flops_per_s.values().copied().all(is_rate), RATE_RULE)?;
        require("memory_bytes_per_s", is_rate(self.memory_bytes_per_s), RATE_RULE)?;
        require("launch_overhead_ns", is_cost(self.launch_overhead_ns), COST_RULE)?;
        require("link.offload_bytes_per_s", is_rate(link.offload_bytes_per_s), RATE_RULE)?;
        require("link.prefetch_bytes_per_s", is_rate(link.prefetch_bytes_per_s), RATE_RULE)?;
        require("link.contention_ns_per_byte", is_cost(link.contention_ns_per_byte), COST_RULE)
    }

    /// The roofline for numbers held as `precision` says; none where the machine has no units for it.
    pub fn roofline(&self, precision: Precision) -> Option<Roofline> {
        Some(Roofline {
            flops_per_s: *self.flops_per_s.get(&precision)?,
            memory_bytes_per_s: self.memory_bytes_per_s,
            launch_overhead_ns: self.launch_overhead_ns,
            runs_ahead: self.runs_ahead,
        })
    }

    /// `trace`, which was measured on a machine of the roofline `measured_on`, with the times that this machine takes for numbers
    /// held as f32.
    pub fn project(&self, trace: &Trace, measured_on: &Roofline) -> Trace {
        let roofline = self.roofline(Precision::F32).expect("every profile has a value for f32");
        Trace { device: self.name.clone(), ..project(trace, measured_on, &roofline) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<HardwareProfile, ConfigError> {
        HardwareProfile::parse(Path::new("a.toml"), text)
    }

    #[test]
    fn shipped_profiles_are_valid_and_in_order_of_speed() {
        const BY_DATA_SHEETS: usize = 4;
        let profiles = HardwareProfile::SHIPPED.map(|(name, text)| {
            let profile = parse(text).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(profile.name, name);
            profile
        });
        for pair in profiles[..BY_DATA_SHEETS].windows(2) {
            let [slow, fast] = [&pair[0], &pair[1]].map(|profile| profile.roofline(Precision::F32).unwrap());
            assert!(slow.flops_per_s <= fast.flops_per_s && slow.memory_bytes_per_s < fast.memory_bytes_per_s);
            assert!(pair[0].link.offload_bytes_per_s <= pair[1].link.offload_bytes_per_s);
        }
        assert_eq!(profiles[0].roofline(Precision::Bf16), None, "a Titan V has no units for it");
        let [sheet, measured] = [&profiles[3], &profiles[4]].map(|profile| profile.roofline(Precision::Bf16).unwrap());
        let share = measured.flops_per_s / sheet.flops_per_s;
        assert!((0.5..1.0).contains(&share), "nothing takes less than its data sheet says: {share}");
    }

    #[test]
    fn mistakes_are_named_with_line_and_key() {
        let (_, good) = HardwareProfile::SHIPPED[1];
        let refusal = |from: &str, to: &str| {
            assert!(good.contains(from), "{from}");
            parse(&good.replacen(from, to, 1)).unwrap_err().to_string()
        };
        let unknown = refusal("memory_bytes_per_s", "memory_byte_per_s");
        assert!(unknown.contains("did you mean `memory_bytes_per_s`?"), "{unknown}");
        let line = good.lines().position(|line| line.starts_with("memory_bytes_per_s")).unwrap() + 1;
        let zero = refusal("memory_bytes_per_s = ", "memory_bytes_per_s = 0.0 # ");
        assert_eq!(zero, format!("a.toml:{line}: memory_bytes_per_s: {RATE_RULE}"));
        let none = refusal("\nf32 = ", "\n# ");
        assert!(none.contains("flops_per_s: must have a value for f32"), "{none}");
    }
}
