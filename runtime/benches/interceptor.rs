//! What the interceptor costs per operator, in thread CPU time:
//!
//!     cargo bench --workspace --bench interceptor
//!
//! Rounds of every way to run a loop take turns; the least of many rounds is taken of each, so that other programs on the
//! machine matter little. Six ways: with libtorch's own allocator and nothing of ours, with our allocator alone, with
//! every operator told to Rust, with a recipe of every operator kept as long as what it made, as in a
//! production job that keeps everything: each operator checked against the recorded iteration, its storages followed; and
//! that with a recipe of every operator, as under a plan that recomputes what it made.
//! Also: the bytes that observing takes for each live storage.

use plimsoll_runtime::torch::{Census, Executor, HostEngine, Recorder, Session};
use plimsoll_runtime::{ActionSet, Lineage, Link, Plan, Problem};
use tch::{Device, Kind, Tensor};

unsafe extern "C" {
    fn plimsoll_bench_own_allocator(own: i32);
    fn plimsoll_bench_adds(rounds: u64) -> u64;
    fn plimsoll_bench_large_adds(rounds: u64) -> u64;
    fn plimsoll_bench_views(rounds: u64) -> u64;
    fn plimsoll_bench_in_place(rounds: u64) -> u64;
}

const OPERATORS: u64 = 5_000;
const ROUNDS: usize = 100;

fn main() {
    let session = Session::install().expect("libtorch takes the interceptor");
    let loops: [(&str, unsafe extern "C" fn(u64) -> u64); 4] = [
        ("add of two 8-element tensors", plimsoll_bench_adds),
        ("add of two 8 KiB tensors", plimsoll_bench_large_adds),
        ("multiplication in place", plimsoll_bench_in_place),
        ("view", plimsoll_bench_views),
    ];
    println!("ns of thread CPU time per operator; what is added, to the bare dispatcher with our allocator");
    let heads = ["own allocator", "bare", "told", "recipes", "followed", "both"];
    println!("{:<30}{}", "", heads.map(|head| format!("{head:>15}")).concat());
    for (name, run) in loops {
        // SAFETY: the loops take any number of rounds.
        let once = || unsafe { run(OPERATORS) } as f64 / OPERATORS as f64;
        let [own, bare, added @ ..] = least_of(session, once);
        let added = added.map(|ns| format!("{:>+15.0}", ns - bare)).concat();
        println!("{name:<30}{own:>15.0}{bare:>15.0}{added}");
    }
    bytes_per_storage(session);
}

/// The least of many rounds of each way to run a loop.
fn least_of(session: Session, once: impl Fn() -> f64) -> [f64; 6] {
    let mut told = Census::new(session, false);
    let mut recipes = Census::new(session, true);
    let mut followed = following(session, &once);
    let mut both = following(session, &once);
    both.keep_all_recipes();
    let own_allocator = |own: bool| {
        // SAFETY: both allocators live for ever, and each frees what it has allocated.
        unsafe { plimsoll_bench_own_allocator(i32::from(own)) }
    };
    let mut least = [f64::INFINITY; 6];
    for _ in 0..ROUNDS {
        own_allocator(true);
        let own = once();
        own_allocator(false);
        let [follows, follows_with_recipes] = [&mut followed, &mut both].map(|executor| {
            let (spent, report) = executor.iteration(&once).unwrap();
            assert!(report.followed, "{:?}", report.deviation);
            spent
        });
        let (tells, records) = (told.observe(&once).unwrap(), recipes.observe(&once).unwrap());
        let times = [own, once(), tells, records, follows, follows_with_recipes];
        least = std::array::from_fn(|index| least[index].min(times[index]));
    }
    least
}

/// What follows the loop by a trace of it and keeps everything.
fn following(session: Session, once: &impl Fn() -> f64) -> Executor {
    let mut recorder = Recorder::new(session);
    for _ in 0..3 {
        recorder.iteration(once).unwrap();
    }
    let trace = recorder.finish(1, "loop", "bench", "cpu").unwrap();
    let lineage = Lineage::of(&trace);
    let plan = Plan::keep_all(lineage.windows().len());
    let tiers = Link::symmetric(1e9, 0).into();
    let problem = Problem { trace: &trace, lineage: &lineage, tiers, budget_bytes: u64::MAX, actions: ActionSet::ALL };
    let mut executor = Executor::new(session, &problem, &plan, Box::new(HostEngine::new(None)));
    executor.iteration(once).unwrap();
    executor
}

/// Makes many small tensors and leaves them alive.
fn bytes_per_storage(session: Session) {
    const STORAGES: usize = 20_000;
    let mut census = Census::new(session, true);
    let (one, other) = (Tensor::ones([8], (Kind::Float, Device::Cpu)), Tensor::ones([8], (Kind::Float, Device::Cpu)));
    let alive: Vec<Tensor> = census.observe(|| (0..STORAGES).map(|_| &one + &other).collect()).unwrap();
    let (recipes, recipe_bytes) = census.recipe_bytes();
    let per = |bytes: usize| bytes as f64 / alive.len() as f64;
    // What stands in front of every allocation, and what aligning it takes: runtime/src/torch/allocator.cpp.
    let header_bytes = 64;
    println!(
        "\n{} live storages: {:.0} bytes each in the table, {:.0} in a recipe ({recipes} recorded), {header_bytes} in front \
         of the bytes: {:.0} in all",
        alive.len(),
        per(census.entry_bytes()),
        per(recipe_bytes),
        per(census.entry_bytes() + recipe_bytes) + f64::from(header_bytes),
    );
}
