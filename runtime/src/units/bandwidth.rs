//! The speed at which bytes move between the device and the slow tier.

use std::fmt;
use std::str::FromStr;

use super::{Bytes, UnitError, in_configurations};

const EXPECTED: &str = "a link speed, such as \"12GB/s\"";

/// The bandwidth of one direction of the link: `12GB/s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bandwidth {
    bytes_per_second: u64,
}

impl Bandwidth {
    /// So many bytes per second; `None` where that is not a positive number a link could have.
    pub fn from_bytes_per_second(bytes_per_second: f64) -> Option<Self> {
        let plausible = bytes_per_second >= 1.0 && bytes_per_second < (1u64 << 53) as f64;
        plausible.then_some(Bandwidth { bytes_per_second: bytes_per_second.round() as u64 })
    }

    /// The bandwidth in bytes per second.
    pub fn bytes_per_second(self) -> f64 {
        self.bytes_per_second as f64
    }
}

impl FromStr for Bandwidth {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        // A bare number is refused in a file: nobody could tell bytes from gigabytes.
        let bytes = text.trim().strip_suffix("/s").filter(|bytes| bytes.ends_with('B')).map(str::parse);
        match bytes {
            Some(Ok(Bytes(bytes_per_second))) if bytes_per_second > 0 => Ok(Bandwidth { bytes_per_second }),
            _ => Err(UnitError { expected: EXPECTED, found: text.to_owned() }),
        }
    }
}

impl fmt::Display for Bandwidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/s", Bytes(self.bytes_per_second))
    }
}

in_configurations!(Bandwidth, expected EXPECTED);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_are_understood_and_round_trip() {
        for (text, bytes_per_second) in
            [("12GB/s", 12e9), ("1.5GB/s", 1.5e9), ("800MiB/s", 838_860_800.0), ("1B/s", 1.0)]
        {
            let bandwidth: Bandwidth = text.parse().unwrap();
            assert_eq!(bandwidth.bytes_per_second(), bytes_per_second);
            assert_eq!(bandwidth.to_string().parse(), Ok(bandwidth));
        }
        assert_eq!("32GB/s".parse::<Bandwidth>().unwrap().to_string(), "32GB/s");
    }

    #[test]
    fn other_quantities_are_refused() {
        for text in ["", "12", "12GB", "12/s", "0GB/s", "GB/s", "-3GB/s", "60%"] {
            assert!(text.parse::<Bandwidth>().is_err(), "{text}");
        }
        assert_eq!(Bandwidth::from_bytes_per_second(f64::NAN), None);
        assert_eq!(Bandwidth::from_bytes_per_second(0.0), None);
    }
}
