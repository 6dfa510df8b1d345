//! The memory-behaviour report: what device memory is used for, how long, and what of it lies idle.
//!
//! After "Pinpointing the Memory Behaviors of DNN Training" (Li et al., arXiv 2104.00258), of which the abstract was at
//! hand: lifetimes, access-time intervals, the breakdown by what bytes are for, and the evidence that iterations repeat.
//! Recorded traces and PyTorch's CUDA memory snapshots come down to one [`history::History`]; the report and its drawing
//! know nothing else.

pub mod drawing;
pub mod history;
pub mod period;
pub mod report;
pub mod snapshot;
