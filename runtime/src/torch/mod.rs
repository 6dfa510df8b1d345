//! Drives a real libtorch program: sees its operators below autograd, records them, and carries out a schedule.
//!
//! Mechanism that only C++ can reach stands in the shim beside this file; every decision is made in Rust.

pub mod copy;
pub mod executor;
pub mod recorder;
pub mod session;
mod shim;

pub use copy::{CopyEngine, CopyError, DeviceBytes, FileEngine, FileTier, HostEngine, StreamEngine, TieredEngine};
pub use executor::{Executor, IterationReport};
pub use recorder::{RecordError, Recorder};
pub use session::{Session, SessionError};
