//! What several test files share. Each of them uses only a part of it.
#![allow(dead_code)]

pub mod draw;
pub mod drawn_policy;
pub mod interpreter;
pub mod oracle;
pub mod problems;
pub mod random_edges;
pub mod random_plan;
pub mod random_trace;
pub mod realistic;
pub mod script;
