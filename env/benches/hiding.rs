//! Whether asynchronous swap hides: what a plan of swaps alone adds to an iteration where its windows are long enough
//! for the link.
//!
//!     cargo bench --workspace --bench hiding [-- WORKLOAD...]
//!
//! The link is emulated: the host engine, paced. For each link the least budget is taken at which a baseline's plan of
//! swaps alone would add at most half a percent on a link of half the bandwidth: windows are twice as long as they have to
//! be, for iterations are not all as long as the recorded one. That plan then runs in turns with iterations in which
//! nothing is evicted. Kernels have one thread, so that copies have a core of their own, as they do where a device copies by
//! itself; `PLIMSOLL_THREADS` sets another number.

#[path = "support/paired.rs"]
mod paired;

use std::sync::Arc;

use paired::{Ratios, Spent, built, wanted};
use plimsoll_env::Instance;
use plimsoll_env::recording::record;
use plimsoll_env::workload::Workload;
use plimsoll_runtime::torch::{Executor, HostEngine, Session};
use plimsoll_runtime::{ActionSet, Lineage, Link, Planned};

const TURNS: usize = 40;
/// Shares of the keep-all peak that are tried, from the top.
const STEPS: u64 = 40;
/// Overhead that may be predicted of a plan whose windows are long enough.
const HIDDEN: f64 = 0.005;
/// Bandwidth of the link over that of the one that plans are made for.
const SLACK: f64 = 2.0;
const LINKS_BYTES_PER_S: [f64; 3] = [1e9, 2e9, 4e9];
const SWAPPING: [&str; 4] = ["autoswap", "capuchin", "appobmem", "vdnn++"];

fn main() {
    let threads = std::env::var("PLIMSOLL_THREADS").map_or(1, |threads| threads.parse().expect("a number of threads"));
    tch::set_num_threads(threads);
    for name in wanted(&["gpt-small", "resnet20"]) {
        let session = Session::install().expect("libtorch takes the interceptor");
        measure(session, &name, built(&name).as_mut());
    }
}

fn measure(session: Session, name: &str, workload: &mut dyn Workload) {
    let (trace, _) = record(session, workload, 5, "cpu").unwrap();
    let (trace, lineage) = (Arc::new(trace.clone()), Arc::new(Lineage::of(&trace)));
    println!(
        "{name}: {:.1} ms, {:.1} MiB at the peak; {} kernel threads; links are emulated",
        trace.makespan_ns as f64 / 1e6,
        trace.peak_bytes as f64 / f64::from(1 << 20),
        tch::get_num_threads()
    );
    for bytes_per_s in LINKS_BYTES_PER_S {
        let link = Link::symmetric(bytes_per_s, 20_000);
        let slower = Link::symmetric(bytes_per_s / SLACK, 20_000);
        let instance = |step: u64| Instance {
            trace: Arc::clone(&trace),
            lineage: Arc::clone(&lineage),
            tiers: slower.into(),
            budget_bytes: trace.peak_bytes * step / STEPS,
            actions: ActionSet::SWAP,
        };
        let hidden = (1..STEPS).rev().map(|step| (instance(step), best(&instance(step))));
        let hidden = hidden.take_while(|(instance, planned)| {
            planned.as_ref().is_some_and(|planned| instance.overhead(&planned.prediction) <= HIDDEN)
        });
        match hidden.last() {
            Some((instance, Some(planned))) => run(session, workload, link, &instance, &planned),
            _ => println!("    {:.0} GB/s: no plan of swaps alone hides", bytes_per_s / 1e9),
        }
    }
}

/// The best plan of swaps alone that holds the budget.
fn best(instance: &Instance) -> Option<Planned> {
    let plans = SWAPPING.iter().map(|name| instance.plan_with(name).expect("a baseline has that name"));
    plans.filter(Planned::fits).min_by_key(|planned| planned.prediction.makespan_ns)
}

fn run(session: Session, workload: &mut dyn Workload, paced: Link, instance: &Instance, planned: &Planned) {
    let (prediction, budget_bytes) = (&planned.prediction, instance.budget_bytes);
    let engine = Box::new(HostEngine::new(Some(paced)));
    let mut executor = Executor::new(session, &instance.problem(), &planned.plan, engine);
    executor.iteration(|| workload.iteration().unwrap()).unwrap();
    let (mut ratios, mut stall_ns, mut swapped_bytes) = (Ratios::default(), Vec::new(), 0);
    for _ in 0..TURNS {
        executor.watch_next(true);
        let kept = Spent::by(|| executor.iteration(|| workload.iteration().unwrap()).unwrap());
        let mut report = None;
        let swapped = Spent::by(|| report = Some(executor.iteration(|| workload.iteration().unwrap()).unwrap().1));
        let report = report.expect("the iteration has run");
        assert!(report.followed, "the plan is carried out: {:?}", report.deviation);
        assert!(report.peak_bytes <= budget_bytes, "the budget is held");
        ratios.add(swapped, kept);
        stall_ns.push(report.stall_ns);
        swapped_bytes = report.offloaded_bytes;
    }
    stall_ns.sort_unstable();
    println!(
        "    {:.0} GB/s: {:.1} MiB swapped out and back, peak {:.1} % of keep-all; predicted overhead {:.2} %, median stall {:.2} ms",
        paced.offload_bytes_per_s / 1e9,
        swapped_bytes as f64 / f64::from(1 << 20),
        100.0 * prediction.peak_bytes as f64 / instance.trace.peak_bytes as f64,
        100.0 * instance.overhead(prediction),
        stall_ns[TURNS / 2] as f64 / 1e6
    );
    ratios.print("swapping / keeping");
}
