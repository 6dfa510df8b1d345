//! What every copy engine promises, and what the engine for devices with streams promises on a simulated device.

mod beds;
mod contract;
mod draw;
mod faults;
#[path = "../support/faulty.rs"]
mod faulty;
#[path = "../support/meddled.rs"]
mod meddled;
mod ordering;
mod processes;
mod simulated;
