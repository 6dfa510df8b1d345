//! A machine trains beyond its memory: under a hard limit of the process where the untouched loop is refused, the same
//! loop with the file tier finishes, and its losses are the same bits.
//!
//! Every loop runs in a process of its own, because a limit cannot be lifted again and what an allocator has once got it
//! may keep. There, the loop is recorded with room, the limit is set between two iterations, and more follow.

use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use plimsoll_runtime::hardware::Tier;
use plimsoll_runtime::torch::copy::{CopyEngine, CopyError, FileEngine, FileTier};
use plimsoll_runtime::torch::{Executor, HostEngine};
use plimsoll_runtime::{Action, ActionSet, Lineage, Plan, Problem, Timeline, Trace};
use plimsoll_tests::meddled::{Meddled, Meddler};
use plimsoll_tests::{Recorded, fast_link, session, shipped_workload};

const ROLE: &str = "PLIMSOLL_TEST_PROCESS";
/// Iterations under the limit.
const LIMITED: usize = 3;
/// Windows of smaller storages are left alone: they save nothing.
const WORTH_BYTES: u64 = 64 << 10;

/// Sends everything to the file, whatever the schedule says.
struct AllToFile;

impl Meddler for AllToFile {
    fn offload(&mut self, _: Tier, _: usize) -> Result<Tier, CopyError> {
        Ok(Tier::File)
    }
}

/// A field of this process's status, in bytes.
fn status_bytes(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// Records the resident set size until it is dropped.
struct ResidentSize {
    stop: Arc<AtomicBool>,
    highest_bytes: Arc<AtomicU64>,
    thread: Option<thread::JoinHandle<Vec<u64>>>,
}

impl ResidentSize {
    fn record() -> Self {
        let (stop, highest_bytes) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, highest) = (Arc::clone(&stop), Arc::clone(&highest_bytes));
        let sample = move || {
            let mut samples = Vec::with_capacity(1 << 16);
            while !stopped.load(Ordering::Relaxed) && samples.len() < samples.capacity() {
                let now = status_bytes("VmRSS:");
                samples.push(now);
                highest.fetch_max(now, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(2));
            }
            samples
        };
        ResidentSize { stop, highest_bytes, thread: Some(thread::spawn(sample)) }
    }

    /// Forgets the highest so far.
    fn start_anew(&self) {
        self.highest_bytes.store(0, Ordering::Relaxed);
    }

    /// The highest, and the course of it all in MiB, thinned out.
    fn end(mut self) -> (u64, Vec<u64>) {
        self.stop.store(true, Ordering::Relaxed);
        let samples = self.thread.take().expect("ended once").join().unwrap();
        let course = samples.chunks(samples.len().div_ceil(24)).map(|chunk| chunk.iter().max().unwrap() >> 20);
        (self.highest_bytes.load(Ordering::Relaxed), course.collect())
    }
}

/// Swaps every storage that is worth it, in every window.
fn swap_all(trace: &Trace, lineage: &Lineage) -> Plan {
    let mut plan = Plan::keep_all(lineage.windows().len());
    for (id, window) in (0..).map(plimsoll_runtime::lineage::WindowId).zip(lineage.windows()) {
        if trace.storages[window.storage.index()].bytes >= WORTH_BYTES {
            plan.set(id, Action::Swap);
        }
    }
    plan
}

/// What a process does: trains, first with room, then as its role says.
fn train(role: &str) {
    let resident = ResidentSize::record();
    let directory = tempfile::tempdir().unwrap();
    // The threads, and the memory they need, are there before the limit is.
    let tier = FileTier { directory: directory.path().to_owned(), limit_bytes: 4 << 30, pace: None };
    let to_file: Box<dyn CopyEngine> = Box::new(Meddled::new(FileEngine::new(tier).unwrap(), AllToFile));
    let mut recorded = Recorded::of(&shipped_workload("resnet20"), 5);
    let (trace, lineage) = (&recorded.trace, &recorded.lineage);
    let swaps = swap_all(trace, lineage);
    let problem =
        |budget_bytes| Problem { trace, lineage, tiers: fast_link().into(), budget_bytes, actions: ActionSet::ALL };
    let half = trace.peak_bytes / 2;
    let prediction = Timeline::new(trace, lineage, fast_link()).predict(&swaps, half);
    let saved_bytes = trace.peak_bytes - prediction.peak_bytes;
    assert!(saved_bytes > trace.peak_bytes / 4, "only {saved_bytes} of {} bytes are to be saved", trace.peak_bytes);

    let keep_all = Plan::keep_all(lineage.windows().len());
    let mut executor = match role {
        "file" => Executor::new(session(), &problem(half), &swaps, to_file),
        _ => Executor::new(session(), &problem(u64::MAX), &keep_all, Box::new(HostEngine::new(None))),
    };
    let mut losses = recorded.losses.clone();
    let workload = recorded.workload.as_mut();
    // The first iteration only matches the loop to its trace, so it needs the room that recording did.
    losses.push(executor.iteration(|| workload.iteration()).unwrap().0.unwrap());

    // Half-way between what the plan needs and what the untouched loop needs.
    let live_bytes = session().live_bytes();
    let limit_bytes = status_bytes("VmData:") + prediction.peak_bytes.max(live_bytes) - live_bytes + saved_bytes / 2;
    if role != "free" {
        let limit = libc::rlimit { rlim_cur: limit_bytes, rlim_max: limit_bytes };
        // SAFETY: `limit` is readable.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_DATA, &limit) }, 0);
    }
    resident.start_anew();
    for _ in 0..LIMITED {
        let (loss, report) = executor.iteration(|| workload.iteration()).unwrap();
        losses.push(loss.unwrap_or_else(|error| panic!("refused: {error}")));
        assert!(report.followed, "{:?}", report.deviation);
    }
    let (highest_bytes, course) = resident.end();
    let bits: Vec<String> = losses.iter().map(|loss| format!("{:x}", loss.to_bits())).collect();
    println!("\nlosses {}", bits.join(" "));
    println!("highest {highest_bytes}");
    println!("saved {saved_bytes}");
    println!("course {course:?}");
    println!("file {}", executor.slow_tier_high_water_bytes());
}

fn process(role: &str) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["the_file_tier_trains_where_memory_does_not_suffice", "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        // What libtorch frees goes back to the system at once, so that the limit is felt.
        .env("MALLOC_MMAP_THRESHOLD_", "65536")
        .env("MALLOC_TRIM_THRESHOLD_", "65536")
        .env("MALLOC_ARENA_MAX", "1")
        .env("RUST_BACKTRACE", "0")
        .output()
        .unwrap()
}

/// What a process that ended well printed under `name`.
fn printed(output: &Output, name: &str) -> String {
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("no {name}: {text}"));
    line.trim().to_owned()
}

#[test]
fn the_file_tier_trains_where_memory_does_not_suffice() {
    if let Ok(role) = std::env::var(ROLE) {
        return train(&role);
    }
    let [free, refused, through_file] = ["free", "refused", "file"].map(process);
    let highest = |output: &Output| printed(output, "highest").parse::<u64>().unwrap();
    let saved_bytes: u64 = printed(&through_file, "saved").parse().unwrap();
    for (what, output) in [("without limit", &free), ("under the limit, to the file", &through_file)] {
        println!("{what}: at most {} MiB resident in the last {LIMITED} iterations", highest(output) >> 20);
        println!("  over time, MiB: {}", printed(output, "course"));
    }
    println!("file: {} MiB at most", printed(&through_file, "file").parse::<u64>().unwrap() >> 20);

    assert!(!refused.status.success(), "the untouched loop gets through under the limit as well");
    let complaint = String::from_utf8_lossy(&refused.stderr);
    let reason = complaint.lines().find(|line| line.contains("refused: "));
    println!(
        "the untouched loop under the limit: {}",
        reason.unwrap_or_else(|| panic!("it fails otherwise: {complaint}"))
    );
    assert_eq!(printed(&through_file, "losses"), printed(&free, "losses"), "losses differ");
    let (with_room, limited) = (highest(&free), highest(&through_file));
    assert!(limited + saved_bytes / 2 < with_room, "{limited} bytes resident, {with_room} without Plimsoll");
}
