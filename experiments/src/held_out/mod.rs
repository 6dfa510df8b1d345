//! The judgement of a policy on members that nobody trained on: at many budgets, over two links and by recomputing
//! alone, beside every baseline and beside searches of the same time, against the best plan that is known.
//!
//! ```text
//! traces ──► points ──► field (every baseline) ──► contest (policies, searches, reference) ──► summary ──► digest of several reports
//! ```
//!
//! All times are those of one thread's processor, not of the clock on the wall, so that what else runs changes no
//! result: a search of 200 ms gets as many evaluations as it makes in 200 ms of a core. Nothing here runs a real loop.

mod contest;
mod digest;
mod points;
mod processor;
mod summary;

pub use contest::{ALONE, Contest, Contestant, Known, PLANNER, PointReport, called, way_of};
pub use digest::{Digest, Digested};
pub use points::{Field, Skipped, grid, spread_evenly};
pub use summary::{Summary, print};
