//! What the interceptor adds to a whole training iteration when everything is kept:
//!
//!     cargo bench --workspace --bench iteration [-- WORKLOAD...]
//!
//! One loop runs untouched, observed, under a schedule that keeps everything, and untouched twice more, in blocks that take
//! turns; the least iteration of each block is compared with the mean of the untouched blocks before and after it, so that
//! a machine that grows slower favours nobody. The last block but one is a control: what it differs by from the others is
//! not the interceptor's doing. Reported: the median ratio, with its 95 % bootstrap interval. With one
//! kernel thread all the work is this thread's, and its CPU time is the exact measure; with all of them kernels are
//! shorter, and what is added weighs most. Other programs disturb both clocks: interval and median mean little where the
//! machine is not quiet, and the cost of an operator (`--bench interceptor`) times their number says more.
//! `PLIMSOLL_THREADS` sets one number of threads, `PLIMSOLL_TURNS` another number of turns than 60.
//!
//! Instructions are the same on every machine. `PLIMSOLL_COUNTED` runs one iteration in the way that it names, `untouched`,
//! `observed` or `followed`, by one thread, for callgrind to count:
//!
//!     PLIMSOLL_COUNTED=followed valgrind --tool=callgrind --toggle-collect='*counted*' \
//!         target/release/deps/iteration-* gpt-tiny

#[path = "support/paired.rs"]
mod paired;

use paired::{Ratios, Spent, built, wanted};
use plimsoll_env::recording::record;
use plimsoll_env::workload::Workload;
use plimsoll_runtime::torch::{Census, Executor, HostEngine, Session};
use plimsoll_runtime::{ActionSet, Lineage, Link, Plan, Problem, Trace};

/// Turns, unless told.
const TURNS: usize = 60;
/// Iterations of a block.
const BLOCK: usize = 4;

fn main() {
    let told = |name: &str| std::env::var(name).ok().map(|number| number.parse::<usize>().expect("a number"));
    let turns = told("PLIMSOLL_TURNS").unwrap_or(TURNS);
    let threads = told("PLIMSOLL_THREADS").map_or(vec![1, tch::get_num_threads()], |threads| vec![threads as i32]);
    for name in wanted(&["gpt-small", "resnet20"]) {
        let session = Session::install().expect("libtorch takes the interceptor");
        let mut workload = built(&name);
        if let Ok(way) = std::env::var("PLIMSOLL_COUNTED") {
            tch::set_num_threads(1);
            count(session, workload.as_mut(), &way);
            continue;
        }
        for &threads in &threads {
            tch::set_num_threads(threads);
            measure(session, &name, workload.as_mut(), turns);
        }
    }
}

/// Runs one iteration in the way called `way` where it is counted, and others before it where they are not.
fn count(session: Session, workload: &mut dyn Workload, way: &str) {
    let (trace, _) = record(session, workload, 3, "cpu").unwrap();
    let lineage = Lineage::of(&trace);
    let mut census = Census::new(session, false);
    let mut executor = keeper(session, &trace, &lineage);
    match way {
        "untouched" => counted(|| _ = workload.iteration().unwrap()),
        "observed" => counted(|| _ = census.observe(|| workload.iteration().unwrap()).unwrap()),
        "followed" => {
            executor.iteration(|| workload.iteration().unwrap()).unwrap();
            counted(|| assert!(executor.iteration(|| workload.iteration().unwrap()).unwrap().1.followed));
        }
        other => panic!("nothing runs {other:?}"),
    }
}

/// What callgrind is told to count.
#[inline(never)]
fn counted(body: impl FnOnce()) {
    body();
}

/// Carries out a schedule that keeps everything.
fn keeper(session: Session, trace: &Trace, lineage: &Lineage) -> Executor {
    let plan = Plan::keep_all(lineage.windows().len());
    let tiers = Link::symmetric(1e9, 0).into();
    let problem = Problem { trace, lineage, tiers, budget_bytes: u64::MAX, actions: ActionSet::ALL };
    Executor::new(session, &problem, &plan, Box::new(HostEngine::new(None)))
}

fn measure(session: Session, name: &str, workload: &mut dyn Workload, turns: usize) {
    let (trace, _) = record(session, workload, 3, "cpu").unwrap();
    let lineage = Lineage::of(&trace);
    let mut executor = keeper(session, &trace, &lineage);
    let mut census = Census::new(session, false);
    let (mut observed, mut followed, mut control) = (Ratios::default(), Ratios::default(), Ratios::default());
    for _ in 0..turns {
        let before = untouched(workload);
        let seen = least((0..BLOCK).map(|_| Spent::by(|| census.observe(|| workload.iteration().unwrap()).unwrap())));
        // The iterations that nobody watched have to be forgotten, and the loop matched to its trace anew.
        for _ in 0..2 {
            executor.iteration(|| workload.iteration().unwrap()).unwrap();
        }
        let kept = least((0..BLOCK).map(|_| {
            let mut was_followed = false;
            let spent =
                Spent::by(|| was_followed = executor.iteration(|| workload.iteration().unwrap()).unwrap().1.followed);
            assert!(was_followed, "the loop repeats itself");
            spent
        }));
        let again = untouched(workload);
        let between = mean(before, untouched(workload));
        observed.add(seen, between);
        followed.add(kept, between);
        control.add(again, between);
    }
    println!(
        "{name}: {} operators, {:.1} ms untouched, {} kernel threads; ratios to untouched, {turns} turns of {BLOCK}",
        trace.operators.len(),
        trace.makespan_ns as f64 / 1e6,
        tch::get_num_threads()
    );
    observed.print("observed");
    followed.print("followed, all kept");
    control.print("untouched, as a control");
}

/// The least of a block of iterations that nothing watches, after one that is not counted.
fn untouched(workload: &mut dyn Workload) -> Spent {
    workload.iteration().unwrap();
    least((0..BLOCK).map(|_| Spent::by(|| workload.iteration().unwrap())))
}

/// The least of several, each clock by itself: what disturbs an iteration only ever lengthens it.
fn least(spent: impl Iterator<Item = Spent>) -> Spent {
    let none = Spent { elapsed_s: f64::INFINITY, thread_s: f64::INFINITY };
    spent.into_iter().fold(none, |least, one| Spent {
        elapsed_s: least.elapsed_s.min(one.elapsed_s),
        thread_s: least.thread_s.min(one.thread_s),
    })
}

fn mean(one: Spent, other: Spent) -> Spent {
    let half = |a: f64, b: f64| 0.5 * (a + b);
    Spent { elapsed_s: half(one.elapsed_s, other.elapsed_s), thread_s: half(one.thread_s, other.thread_s) }
}
