//! A number of bytes.

use std::fmt;
use std::str::FromStr;

use super::{UnitError, in_configurations, split_unit};

const EXPECTED: &str = "bytes, such as \"512MiB\", \"1.5GB\" or 1048576";

/// The units in which bytes are written, and how many bytes each holds.
const UNITS: [(&str, u64); 9] = [
    ("B", 1),
    ("kB", 1_000),
    ("KiB", 1 << 10),
    ("MB", 1_000_000),
    ("MiB", 1 << 20),
    ("GB", 1_000_000_000),
    ("GiB", 1 << 30),
    ("TB", 1_000_000_000_000),
    ("TiB", 1 << 40),
];

/// A number of bytes: `512MiB`, `4GiB`, `1.5GB`, or a plain integer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

impl FromStr for Bytes {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let parse = || {
            let (number, unit) = split_unit(text)?;
            let (_, scale) = UNITS.into_iter().find(|(name, _)| *name == unit || (unit.is_empty() && *name == "B"))?;
            if let Ok(whole) = number.parse::<u64>() {
                return whole.checked_mul(scale);
            }
            let bytes = number.parse::<f64>().ok()? * scale as f64;
            // Below 2^53 every whole number is a double, so a quantity that is a whole number stays exact.
            (unit != "B" && !unit.is_empty() && bytes < (1u64 << 53) as f64).then_some(bytes.round() as u64)
        };
        parse().map(Bytes).ok_or_else(|| UnitError { expected: EXPECTED, found: text.to_owned() })
    }
}

impl fmt::Display for Bytes {
    /// Writes the bytes exactly, in the unit that needs the smallest number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = UNITS.into_iter().rev().filter(|(_, scale)| self.0.is_multiple_of(*scale));
        let (unit, scale) = exact.min_by_key(|(_, scale)| self.0 / scale).unwrap_or(("B", 1));
        write!(f, "{}{unit}", self.0 / scale)
    }
}

in_configurations!(Bytes, expected EXPECTED, of_bytes Bytes);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_is_understood() {
        for (text, bytes) in [
            ("0", 0),
            ("1048576", 1 << 20),
            ("17B", 17),
            ("3kB", 3_000),
            ("512MiB", 512 << 20),
            ("4 GiB", 4 << 30),
            ("1.5GB", 1_500_000_000),
            ("2TiB", 2 << 40),
        ] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
    }

    #[test]
    fn display_round_trips() {
        for bytes in [
            0,
            1,
            999,
            1_000,
            1_024,
            1_536,
            1_500_000_000,
            4 << 30,
            32_000_000_000,
            123_456_789,
            (1 << 53) + 1,
            u64::MAX,
        ] {
            assert_eq!(Bytes(bytes).to_string().parse(), Ok(Bytes(bytes)));
        }
        assert_eq!(Bytes(512 << 20).to_string(), "512MiB");
        assert_eq!(Bytes(1_500_000_000).to_string(), "1500MB");
    }

    #[test]
    fn other_quantities_are_refused() {
        for text in
            ["", "MiB", "12GB/s", "60%", "5 parsecs", "-1", "1e9", "1.2.3GB", "512mib", "1.5", "1.5B", "99999999TiB"]
        {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }
}
