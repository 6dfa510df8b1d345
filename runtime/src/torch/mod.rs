//! Drives a real libtorch program: sees its operators below autograd, records them, carries out plans, and keeps it
//! under a budget.
//!
//! Mechanism that only C++ can reach stands in the shim beside this file; every decision is made in Rust.

mod absence;
mod ancestry;
mod backoff;
pub mod census;
pub mod copy;
mod deaths;
mod detector;
pub mod device;
mod driver;
mod events;
pub mod executor;
mod ladder;
mod library;
mod lock;
mod names;
mod parts;
mod period;
mod program;
mod reactive;
mod recompute;
pub mod recorder;
mod recording;
pub mod report;
mod residency;
pub mod runtime;
pub mod session;
pub mod settings;
mod shelf;
mod shim;
mod span;
mod succession;
mod swap;
mod told;

pub use census::Census;
pub use copy::{
    CopiedBy, CopyEngine, CopyError, DeviceBytes, FileEngine, FileTier, HostEngine, StreamEngine, TieredEngine,
};
pub use device::DeviceName;
pub use executor::{Executor, TimedIteration};
pub use recorder::{RecordError, Recorder};
pub use report::{IterationReport, Report};
pub use runtime::{Budget, BuildError, Builder, Detecting, Detection, Iteration, Running, Runtime};
pub use session::{Session, SessionError, note_stream, postpone, stand_by, step_aside, step_back, times_aside};
pub use shim::{Audit, DeviceCounts};
