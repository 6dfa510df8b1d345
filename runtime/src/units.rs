//! Quantities with units, as configurations and command lines write them.
//!
//! Parsing is exact: what [`std::fmt::Display`] writes parses to the same value. This module does not
//! know which quantity belongs to which key.

mod bandwidth;
mod budget;
mod bytes;

pub use bandwidth::Bandwidth;
pub use budget::Budget;
pub use bytes::Bytes;

/// Writes and reads a quantity as text; one that is a number of bytes may be read from a plain integer, too.
macro_rules! in_configurations {
    ($quantity:ty, expected $expected:expr $(, of_bytes $of_bytes:expr)?) => {
        impl serde::Serialize for $quantity {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> serde::Deserialize<'de> for $quantity {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Quantity;

                impl serde::de::Visitor<'_> for Quantity {
                    type Value = $quantity;

                    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                        f.write_str($expected)
                    }

                    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<$quantity, E> {
                        text.parse().map_err(E::custom)
                    }

                    $(
                        fn visit_u64<E: serde::de::Error>(self, bytes: u64) -> Result<$quantity, E> {
                            Ok($of_bytes(bytes))
                        }

                        fn visit_i64<E: serde::de::Error>(self, bytes: i64) -> Result<$quantity, E> {
                            let unexpected = serde::de::Unexpected::Signed(bytes);
                            u64::try_from(bytes).map($of_bytes).map_err(|_| E::invalid_value(unexpected, &self))
                        }
                    )?
                }

                deserializer.deserialize_any(Quantity)
            }
        }
    };
}
use in_configurations;

/// A quantity that could not be understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected {expected}, found `{found}`")]
pub struct UnitError {
    /// What is wanted, with examples.
    pub expected: &'static str,
    /// What was written.
    pub found: String,
}

/// Splits `3.5 GiB` into its number and its unit. The number is digits and points: no sign, no exponent.
fn split_unit(text: &str) -> Option<(&str, &str)> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    (!number.is_empty()).then_some((number, unit.trim_start()))
}
