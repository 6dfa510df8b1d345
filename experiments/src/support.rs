//! Traces for tests, drawn and written by hand, as the runtime's tests have them.

#![allow(dead_code, reason = "the runtime's tests use the rest")]

#[path = "../../runtime/tests/support/draw.rs"]
pub mod draw;
#[path = "../../runtime/tests/support/random_trace.rs"]
pub mod random_trace;
#[path = "../../runtime/tests/support/script.rs"]
pub mod script;
