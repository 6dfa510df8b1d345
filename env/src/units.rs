//! Quantities with units, as configurations and command lines write them.
//!
//! Parsing is exact: what [`std::fmt::Display`] writes parses to the same value. This module does not
//! know which quantity belongs to which key.

mod budget;
mod bytes;
mod link;

pub use budget::Budget;
pub use bytes::Bytes;
pub use link::Link;

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
