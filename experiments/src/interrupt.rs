//! Ctrl-C, for what ends in order.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// How a process ends that Ctrl-C has killed.
const KILLED: i32 = 130;

/// A flag that Ctrl-C sets. Who presses it again waits no longer.
pub fn watch_for_interrupt() -> anyhow::Result<Arc<AtomicBool>> {
    let interrupted = Arc::new(AtomicBool::new(false));
    let flag = interrupted.clone();
    ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::Relaxed) {
            // SAFETY: ends the process, whatever other threads are doing.
            unsafe { libc::_exit(KILLED) };
        }
        eprintln!("plimsoll: ending in order; Ctrl-C again ends at once");
    })?;
    Ok(interrupted)
}
