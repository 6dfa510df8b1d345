//! What every copy engine promises, and what the engine for devices with streams promises on a simulated device.

mod beds;
mod contract;
mod draw;
mod faults;
#[path = "../support/faulty.rs"]
mod faulty;
mod ordering;
mod processes;
mod simulated;
