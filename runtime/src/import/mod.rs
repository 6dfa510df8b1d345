//! Traces that others recorded, as far as their formats tell what a [`crate::Trace`] has to know.

pub mod pytorch_trace;
pub mod simrd;
