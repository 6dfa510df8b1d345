//! What the interceptor costs per operator, in thread CPU time:
//!
//!     cargo bench -p plimsoll-runtime --features torch --bench interceptor
//!
//! Rounds of bare, intercepted and recorded loops take turns; the least of many rounds is taken of each, so that other
//! programs on the machine matter little. Also: the bytes that observing takes for each live storage.

use plimsoll_runtime::torch::{Census, Session};
use tch::{Device, Kind, Tensor};

unsafe extern "C" {
    fn plimsoll_bench_adds(rounds: u64) -> u64;
    fn plimsoll_bench_views(rounds: u64) -> u64;
    fn plimsoll_bench_in_place(rounds: u64) -> u64;
}

const OPERATORS: u64 = 5_000;
const ROUNDS: usize = 100;

fn main() {
    let session = Session::install().expect("libtorch takes the interceptor");
    let mut kept = Census::new(session, false);
    let mut recipes = Census::new(session, true);
    let loops: [(&str, unsafe extern "C" fn(u64) -> u64); 3] = [
        ("add of two 8-element tensors", plimsoll_bench_adds),
        ("multiplication in place", plimsoll_bench_in_place),
        ("view", plimsoll_bench_views),
    ];
    println!(
        "{:<30} {:>9} {:>11} {:>14}   ns of thread CPU time per operator",
        "", "bare", "everything", "every recipe"
    );
    println!("{:<30} {:>9} {:>11} {:>14}", "", "", "kept", "recorded");
    for (name, run) in loops {
        let mut least = [f64::INFINITY; 3];
        // SAFETY: the loops take any number of rounds.
        let once = || unsafe { run(OPERATORS) } as f64 / OPERATORS as f64;
        for _ in 0..ROUNDS {
            let times = [once(), kept.observe(once).unwrap(), recipes.observe(once).unwrap()];
            least = std::array::from_fn(|index| least[index].min(times[index]));
        }
        let [bare, kept, recorded] = least;
        println!("{name:<30} {bare:>9.0} {:>+11.0} {:>+14.0}", kept - bare, recorded - bare);
    }
    bytes_per_storage(session);
}

/// Makes many small tensors and leaves them alive.
fn bytes_per_storage(session: Session) {
    const STORAGES: usize = 20_000;
    let mut census = Census::new(session, true);
    let (one, other) = (Tensor::ones([8], (Kind::Float, Device::Cpu)), Tensor::ones([8], (Kind::Float, Device::Cpu)));
    let alive: Vec<Tensor> = census.observe(|| (0..STORAGES).map(|_| &one + &other).collect()).unwrap();
    let (recipes, recipe_bytes) = census.recipe_bytes();
    let per = |bytes: usize| bytes as f64 / alive.len() as f64;
    // What stands in front of every allocation: runtime/src/torch/allocator.cpp.
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
