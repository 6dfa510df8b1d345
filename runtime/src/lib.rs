//! Keeps a training job under an absolute device-memory budget by choosing, for every tensor storage, to keep it,
//! swap it or recompute it.
//!
//! What a production job needs: traces, plans, the timeline that predicts them, the interface that policies share, the
//! baselines, and, with the feature `torch`, what records and drives a real libtorch program. Beside it stands what
//! studies traces and plans, which no job calls: [`allocators`], [`baselines::online`], [`import`], [`obstacle`],
//! [`playback`], [`tails`] and [`timetable`]. This crate knows nothing of how a policy is learned.

// What tests share names the crate as its users do.
#[cfg(test)]
extern crate self as plimsoll_runtime;

pub mod allocators;
pub mod baselines;
pub mod decode;
mod estimate;
pub mod file;
pub mod hardware;
pub mod import;
pub mod learned;
pub mod lineage;
mod locks;
pub mod network;
pub mod observation;
pub mod obstacle;
pub mod plan;
pub mod planner;
pub mod playback;
pub mod policy;
pub mod policy_file;
mod profile;
mod random;
pub mod schedule;
pub mod search;
mod slack;
pub mod sweep;
pub mod tails;
pub mod timeline;
pub mod timetable;
#[cfg(feature = "torch")]
pub mod torch;
pub mod trace;
pub mod units;

pub use decode::{Planned, plan};
pub use file::{FileError, FileKind};
pub use hardware::{Link, SlowTiers};
pub use learned::LearnedPolicy;
pub use lineage::Lineage;
pub use plan::{Action, ActionSet, Plan, PlanFile};
pub use planner::{Decided, Planner, least_feasible_budget};
pub use policy::{Choice, Policy};
pub use policy_file::PolicyFile;
pub use schedule::Schedule;
pub use sweep::{Problem, Sweep};
pub use timeline::{Explanation, Prediction, Timeline};
pub use trace::Trace;
