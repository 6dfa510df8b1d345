//! What a copy to this machine's memory takes from kernels, by its size and by who makes it.
//!
//!     cargo bench --workspace --bench contention
//!
//! Rounds of kernels with one copy before each take turns with rounds without copies; what a round with copies takes longer,
//! the waits at its end included, is divided by its copies. Kernels have as many threads as libtorch gives them;
//! `PLIMSOLL_THREADS` sets another number.

use std::time::Instant;

use plimsoll_runtime::hardware::Tier;
use plimsoll_runtime::torch::{CopiedBy, CopyEngine, DeviceBytes, HostEngine};
use tch::{Device, Kind, Tensor};

const KERNELS: usize = 16;
const ROUNDS: usize = 100;
/// Rounds before those that count, in which memory is first touched.
const WARM_UP: usize = 5;
const COPY_BYTES: [usize; 5] = [16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20];
/// Blocks that are copied in turns, so that none is still in a cache from last time.
const BLOCKS: usize = 64;

fn main() {
    if let Ok(threads) = std::env::var("PLIMSOLL_THREADS") {
        tch::set_num_threads(threads.parse().expect("a number of threads"));
    }
    println!("{} kernel threads; a copy suits {:?}", tch::get_num_threads(), CopiedBy::suiting_kernels());
    let random = |size: &[i64]| Tensor::rand(size, (Kind::Float, Device::Cpu));
    let (rows, columns) = (random(&[512, 256]), random(&[256, 1024]));
    let many = random(&[4 << 20]);
    let kernels: [(&str, &dyn Fn()); 2] =
        [("product", &|| drop(rows.mm(&columns))), ("sum of 16 MiB", &|| drop(&many + &many))];
    for (name, kernel) in kernels {
        for bytes in COPY_BYTES {
            for copied_by in [CopiedBy::Threads, CopiedBy::LargeByThreads, CopiedBy::Caller] {
                let Costs { kernel_ns, copy_ns: [quartile, median, upper] } = measure(kernel, bytes, copied_by);
                println!(
                    "{name:<14} of {kernel_ns:9.0} ns: {:>5} KiB copied by {:<14} take {median:8.0} ns of it [{quartile:.0}, {upper:.0}], {:.3} per byte",
                    bytes >> 10,
                    format!("{copied_by:?}"),
                    median / bytes as f64
                );
            }
        }
    }
}

/// Median time of a kernel, and the quartiles of what a copy takes from it.
struct Costs {
    kernel_ns: f64,
    copy_ns: [f64; 3],
}

fn measure(kernel: &dyn Fn(), bytes: usize, copied_by: CopiedBy) -> Costs {
    let mut engine = HostEngine::copied_by(copied_by, u64::MAX, None);
    let mut blocks = vec![vec![1_u8; bytes]; BLOCKS];
    let (mut alone_ns, mut cost_ns) = (Vec::new(), Vec::new());
    for round in 0..WARM_UP + ROUNDS {
        let started = Instant::now();
        (0..KERNELS).for_each(|_| kernel());
        let without_ns = started.elapsed().as_nanos() as f64;
        let (mut copies, mut tickets) = (Vec::new(), Vec::new());
        let started = Instant::now();
        for index in 0..KERNELS {
            let start = blocks[(round * KERNELS + index) % BLOCKS].as_mut_ptr();
            // SAFETY: the blocks outlive the round, at whose end the copy is waited for, and nobody writes them.
            let (made, ticket) = unsafe { engine.offload(&[DeviceBytes { start, bytes }], Tier::Host) }.expect("room");
            copies.extend(made);
            tickets.push(ticket);
            kernel();
        }
        tickets.iter().for_each(|ticket| engine.wait(ticket).expect("a copy"));
        let with_ns = started.elapsed().as_nanos() as f64;
        drop(copies);
        if round >= WARM_UP {
            alone_ns.push(without_ns / KERNELS as f64);
            cost_ns.push((with_ns - without_ns) / KERNELS as f64);
        }
    }
    alone_ns.sort_unstable_by(f64::total_cmp);
    cost_ns.sort_unstable_by(f64::total_cmp);
    Costs { kernel_ns: alone_ns[ROUNDS / 2], copy_ns: [1, 2, 3].map(|quarter| cost_ns[quarter * ROUNDS / 4]) }
}
