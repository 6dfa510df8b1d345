//! Time of the processor that one thread had.

use std::time::Duration;

/// Runs `work` on this thread and says how long its processor took.
pub fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let before = thread_time();
    let result = work();
    (result, thread_time().saturating_sub(before))
}

/// How much processor time this thread has had.
pub fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes the time to a place that lives long enough.
    let status = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(status, 0, "every thread has a clock of its processor time");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_takes_no_processor_time_and_work_does() {
        let pause = Duration::from_millis(50);
        assert!(timed(|| std::thread::sleep(pause)).1 < pause);
        let (sum, time) = timed(|| (0..2_000_000u64).fold(0, |sum, number| std::hint::black_box(sum ^ number)));
        assert!(time > Duration::ZERO, "{sum}");
    }
}
