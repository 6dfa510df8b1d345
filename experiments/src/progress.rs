//! Progress bars.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// A bar over `length` steps with the time left, and a message that says what they have come to.
pub fn bar(length: u64, what: &str) -> ProgressBar {
    let style = ProgressStyle::with_template("{prefix} [{bar:30}] {pos}/{len} · {per_sec} · {msg} · {eta} left")
        .expect("a template that a test of the command has rendered")
        .progress_chars("█▌ ");
    ProgressBar::new(length).with_style(style).with_prefix(what.to_owned())
}

/// The time elapsed, and a message that says what it has come to.
pub fn spinner(what: &str) -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {prefix} · {elapsed} · {msg}")
        .expect("a template that a test of the command has rendered");
    let spinner = ProgressBar::new_spinner().with_style(style).with_prefix(what.to_owned());
    spinner.enable_steady_tick(Duration::from_millis(200));
    spinner
}
