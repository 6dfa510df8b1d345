//! What the interceptor adds to a whole training iteration when everything is kept:
//!
//!     cargo bench -p plimsoll-env --bench iteration [-- WORKLOAD...]
//!
//! One loop runs untouched, observed, and under a schedule that keeps everything, in turns; each turn is compared with
//! the untouched iteration before it. Reported: the median ratio, with the interval that holds it with 95 % confidence.

use std::path::Path;
use std::time::Instant;

use plimsoll_env::config::FamilyConfig;
use plimsoll_env::recording::record;
use plimsoll_env::workload::Workload;
use plimsoll_runtime::torch::{Census, Executor, HostEngine, Session};
use plimsoll_runtime::{Lineage, Link, Plan, Timeline};
use tch::Device;

const TURNS: usize = 40;

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let wanted = if wanted.is_empty() { vec!["gpt-small".to_owned(), "resnet20".to_owned()] } else { wanted };
    for name in wanted {
        let family = if name.starts_with("gpt") { "gpt" } else { "resnet" };
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../configs/{family}.toml"));
        let config = FamilyConfig::load(path).unwrap_or_else(|error| panic!("{error}"));
        let session = Session::install().expect("libtorch takes the interceptor");
        let workload = config.workload(&name).unwrap_or_else(|error| panic!("{error}"));
        measure(session, &name, workload.build(&name, Device::Cpu, 1).unwrap().as_mut());
    }
}

fn measure(session: Session, name: &str, workload: &mut dyn Workload) {
    let (trace, _) = record(session, workload, 3, "cpu").unwrap();
    let lineage = Lineage::of(&trace);
    let plan = Plan::keep_all(lineage.windows().len());
    let (schedule, _) = Timeline::new(&trace, &lineage, Link::symmetric(1e9, 0)).schedule(&plan, u64::MAX);
    let mut executor = Executor::new(session, &trace, &lineage, &plan, schedule, Box::new(HostEngine::new(None)));
    let mut census = Census::new(session, false);
    let (mut observed, mut followed) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    let add = |to: &mut [Vec<f64>; 2], spent: [f64; 2], untouched: [f64; 2]| {
        (0..2).for_each(|clock| to[clock].push(spent[clock] / untouched[clock]));
    };
    for _ in 0..TURNS {
        let untouched = timed(|| workload.iteration().unwrap());
        add(&mut observed, timed(|| census.observe(|| workload.iteration().unwrap()).unwrap()), untouched);
        // The iterations that nobody watched have to be forgotten, and the loop matched to its trace anew.
        for _ in 0..2 {
            executor.iteration(|| workload.iteration().unwrap()).unwrap();
        }
        let mut was_followed = false;
        let spent = timed(|| was_followed = executor.iteration(|| workload.iteration().unwrap()).unwrap().1.followed);
        assert!(was_followed, "the loop repeats itself");
        add(&mut followed, spent, untouched);
    }
    println!("{name}: {} operators, {:.1} ms untouched", trace.operators.len(), trace.makespan_ns as f64 / 1e6);
    for (what, [elapsed, cpu]) in [("observed", observed), ("followed, all kept", followed)] {
        for (clock, ratios) in [("elapsed time", elapsed), ("CPU time", cpu)] {
            let [low, median, high] = median_and_interval(ratios);
            println!("    {what:<20} {clock:<14} {median:.4}  [{low:.4}, {high:.4}] of untouched");
        }
    }
}

/// Seconds that `body` takes: elapsed, and of all the process's threads.
fn timed<R>(body: impl FnOnce() -> R) -> [f64; 2] {
    let (started, cpu) = (Instant::now(), process_cpu_s());
    body();
    [started.elapsed().as_secs_f64(), process_cpu_s() - cpu]
}

fn process_cpu_s() -> f64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists on Linux, and `now` is there to be written.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut now) }, 0);
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}

/// The median, between the order statistics that enclose it with 95 % confidence whatever the distribution is.
fn median_and_interval(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_unstable_by(f64::total_cmp);
    let count = values.len();
    let reach = (0.98 * (count as f64).sqrt()).ceil() as usize;
    let middle = count / 2;
    [values[middle.saturating_sub(reach)], values[middle], values[(middle + reach).min(count - 1)]]
}
