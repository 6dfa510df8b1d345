//! How much device memory a workload may use.

use std::fmt;
use std::str::FromStr;

use super::{Bytes, UnitError, in_configurations, split_unit};

const EXPECTED: &str = "a budget in bytes or as a share of the keep-all peak, such as \"512MiB\" or \"60%\"";

/// A budget: `512MiB`, or `60%` of the peak that keeping everything needs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// An absolute number of device bytes.
    Bytes(u64),
    /// A share of the keep-all peak: 0.6 stands for 60 %.
    Share(f64),
}

impl Budget {
    /// The budget in bytes for a workload whose keep-all peak is `keep_all_peak_bytes`.
    pub fn resolve(self, keep_all_peak_bytes: u64) -> u64 {
        match self {
            Budget::Bytes(bytes) => bytes,
            Budget::Share(share) => (keep_all_peak_bytes as f64 * share).round() as u64,
        }
    }
}

impl FromStr for Budget {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let percent = || match split_unit(text)? {
            (number, "%") => number.parse::<f64>().ok().filter(|percent| *percent > 0.0),
            _ => None,
        };
        match (percent(), text.parse()) {
            (Some(percent), _) => Ok(Budget::Share(percent / 100.0)),
            (None, Ok(Bytes(bytes))) => Ok(Budget::Bytes(bytes)),
            (None, Err(_)) => Err(UnitError { expected: EXPECTED, found: text.to_owned() }),
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Budget::Bytes(bytes) => Bytes(bytes).fmt(f),
            // Rounded, because 0.56 * 100 is 56.00000000000001 in binary.
            Budget::Share(share) => write!(f, "{}%", (share * 1e11).round() / 1e9),
        }
    }
}

in_configurations!(Budget, expected EXPECTED, of_bytes Budget::Bytes);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_and_bytes_resolve() {
        assert_eq!("60%".parse::<Budget>().unwrap().resolve(1_000), 600);
        assert_eq!("29 %".parse::<Budget>().unwrap().resolve(100), 29);
        assert_eq!("1KiB".parse::<Budget>().unwrap().resolve(7), 1_024);
        assert_eq!("4096".parse::<Budget>().unwrap().resolve(7), 4_096);
    }

    #[test]
    fn display_round_trips() {
        for tenths in 1..=1_200 {
            let budget = Budget::Share(f64::from(tenths) / 10.0 / 100.0);
            assert_eq!(budget.to_string().parse(), Ok(budget));
        }
        assert_eq!(Budget::Share(0.56).to_string(), "56%");
        assert_eq!(Budget::Bytes(512 << 20).to_string(), "512MiB");
    }

    #[test]
    fn other_quantities_are_refused() {
        for text in ["", "%", "0%", "-5%", "8GB/s", "0.6x"] {
            assert!(text.parse::<Budget>().is_err(), "{text}");
        }
    }
}
