//! Machines other than the one at hand: what they are able to, and what a recorded iteration would take there.
//!
//! A trace measured on two cores has the structure and the bytes of the loop, but not an accelerator's proportion of
//! compute to link. A [`HardwareProfile`] says what a machine does at best, and [`project`] gives the trace the times of
//! such a machine by the roofline model ("Roofline: An Insightful Visual Performance Model for Multicore
//! Architectures", Williams et al. 2009). The machine at hand, an accelerator included, is measured by `copies` and `probe`.

use serde::{Deserialize, Serialize};

mod probe;
mod profile;
mod projection;

pub use profile::{HardwareProfile, Precision};
pub use projection::project;

/// What a machine does at best.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Roofline {
    /// Floating-point operations per second.
    pub flops_per_s: f64,
    /// Bytes that operators read and write per second.
    pub memory_bytes_per_s: f64,
    /// Time that an operator takes however little it does.
    pub launch_overhead_ns: f64,
    /// Whether the program issues operators ahead of the machine that runs them, so that the program's own time hides
    /// behind them.
    pub runs_ahead: bool,
}

impl Roofline {
    /// Whether there may be such a machine.
    pub fn is_plausible(&self) -> bool {
        profile::is_rate(self.flops_per_s)
            && profile::is_rate(self.memory_bytes_per_s)
            && profile::is_cost(self.launch_overhead_ns)
    }
}
