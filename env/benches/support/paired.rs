//! Two ways of running the same loop, compared on a machine that others use too: blocks of iterations take turns, and
//! every block is compared with the one beside it.

use std::path::Path;
use std::time::Instant;

use plimsoll_env::bootstrap::{interval, median};
use plimsoll_env::config::FamilyConfig;
use plimsoll_env::workload::Workload;
use tch::Device;

/// Seconds that something took: elapsed, and of this thread's CPU time.
#[derive(Clone, Copy, Debug)]
pub struct Spent {
    /// By the wall clock.
    pub elapsed_s: f64,
    /// Of the thread that runs the loop and the interceptor; other threads, and other programs, do not count.
    pub thread_s: f64,
}

impl Spent {
    /// What `body` takes.
    pub fn by<R>(body: impl FnOnce() -> R) -> Self {
        let (started, thread_s) = (Instant::now(), thread_cpu_s());
        body();
        Spent { elapsed_s: started.elapsed().as_secs_f64(), thread_s: thread_cpu_s() - thread_s }
    }
}

/// Ratios of paired blocks, by clock.
#[derive(Default)]
pub struct Ratios {
    elapsed: Vec<f64>,
    thread: Vec<f64>,
}

impl Ratios {
    /// Adds a pair.
    pub fn add(&mut self, spent: Spent, untouched: Spent) {
        self.elapsed.push(spent.elapsed_s / untouched.elapsed_s);
        self.thread.push(spent.thread_s / untouched.thread_s);
    }

    /// One line for each clock: the median ratio, and the interval that 95 % of resampled medians lie in.
    pub fn print(&self, what: &str) {
        for (clock, ratios) in [("elapsed time", &self.elapsed), ("thread CPU time", &self.thread)] {
            let [low, high] = interval(|resampling| median(resampling.of(ratios)));
            println!("    {what:<24} {clock:<16} {:.4}  [{low:.4}, {high:.4}]", median(ratios.clone()));
        }
    }
}

fn thread_cpu_s() -> f64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists on Linux, and `now` is there to be written.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut now) }, 0);
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}

/// A workload of the gpt or the resnet family.
pub fn built(name: &str) -> Box<dyn Workload> {
    let family = if name.starts_with("gpt") { "gpt" } else { "resnet" };
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../configs/{family}.toml"));
    let config = FamilyConfig::load(path).unwrap_or_else(|error| panic!("{error}"));
    let workload = config.workload(name).unwrap_or_else(|error| panic!("{error}"));
    workload.build(name, Device::Cpu, 1).unwrap()
}

/// What was asked for behind `--`: workloads, or the ones of `else_these`.
pub fn wanted(else_these: &[&str]) -> Vec<String> {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    if wanted.is_empty() { else_these.iter().map(|&name| name.to_owned()).collect() } else { wanted }
}
