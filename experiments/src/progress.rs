//! Progress bars; where nobody looks at a terminal, lines of a log.

use std::io::{self, IsTerminal};
use std::sync::Mutex;
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
        ProgressDrawTarget::term_like_with_hz(Box::new(Log(Mutex::new((String::new(), Instant::now())))), 1)
    }
}

/// What has been drawn last, and when a line was written.
#[derive(Debug)]
struct Log(Mutex<(String, Instant)>);

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
        self.0.lock().unwrap_or_else(|lock| lock.into_inner()).0.push_str(text);
        Ok(())
    }

    fn clear_line(&self) -> io::Result<()> {
        self.0.lock().unwrap_or_else(|lock| lock.into_inner()).0.clear();
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        let mut drawn = self.0.lock().unwrap_or_else(|lock| lock.into_inner());
        let line = std::mem::take(&mut drawn.0);
        if drawn.1.elapsed() >= LOGGED_EVERY && !line.trim().is_empty() {
            drawn.1 = Instant::now();
            eprintln!("{}", line.trim());
        }
        Ok(())
    }
}
