//! Progress bars; where nobody looks at a terminal, lines of a log.

use std::io::{self, IsTerminal};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};

/// Time between two lines of a log.
const LOGGED_EVERY: Duration = Duration::from_secs(30);

/// A bar over `length` steps with the time left, and a message that says what they have come to.
pub fn bar(length: u64, what: &str) -> ProgressBar {
    let style = ProgressStyle::with_template("{prefix} [{bar:30}] {pos}/{len} · {per_sec} · {msg} · {eta} left")
        .expect("a template that a test of the command has rendered")
        .progress_chars("█▌ ");
    ProgressBar::with_draw_target(Some(length), target()).with_style(style).with_prefix(what.to_owned())
}

/// The time elapsed, and a message that says what it has come to.
pub fn spinner(what: &str) -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {prefix} · {elapsed} · {msg}")
        .expect("a template that a test of the command has rendered");
    let spinner = ProgressBar::with_draw_target(None, target()).with_style(style).with_prefix(what.to_owned());
    spinner.enable_steady_tick(Duration::from_millis(200));
    spinner
}

fn target() -> ProgressDrawTarget {
    if io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::term_like_with_hz(Box::new(Log::begin()), 1)
    }
}

/// What is drawn, of which a line is written now and then.
#[derive(Debug)]
struct Log(Mutex<Drawn>);

#[derive(Debug)]
struct Drawn {
    line: String,
    /// When a line was written.
    logged: Instant,
}

impl Log {
    fn begin() -> Self {
        Log(Mutex::new(Drawn { line: String::new(), logged: Instant::now() }))
    }

    fn drawn(&self) -> MutexGuard<'_, Drawn> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TermLike for Log {
    fn width(&self) -> u16 {
        160
    }

    fn move_cursor_up(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_down(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_right(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_left(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn write_line(&self, line: &str) -> io::Result<()> {
        self.write_str(line)
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.drawn().line.push_str(text);
        Ok(())
    }

    fn clear_line(&self) -> io::Result<()> {
        self.drawn().line.clear();
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        let mut drawn = self.drawn();
        let line = std::mem::take(&mut drawn.line);
        if drawn.logged.elapsed() >= LOGGED_EVERY && !line.trim().is_empty() {
            drawn.logged = Instant::now();
            eprintln!("{}", line.trim());
        }
        Ok(())
    }
}
