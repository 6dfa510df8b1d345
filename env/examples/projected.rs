//! What recorded iterations would take on other machines.
//!
//!     cargo run -p plimsoll-env --example projected -- configs/hardware/a100.toml a.plimsoll b.plimsoll
//!
//! The traces have to be recorded on the machine at hand, whose own speeds are measured first.

use std::error::Error;

use plimsoll_env::hardware::{HardwareProfile, Precision, Roofline};
use plimsoll_runtime::Trace;
use plimsoll_runtime::trace::Class;

fn main() -> Result<(), Box<dyn Error>> {
    let mut paths = std::env::args().skip(1);
    let profile = HardwareProfile::load(paths.next().ok_or("which profile?")?)?;
    let host = Roofline::of_host()?;
    println!(
        "this machine: {:.0} GFLOP/s, {:.0} GB/s, {:.0} ns an operator",
        host.flops_per_s / 1e9,
        host.memory_bytes_per_s / 1e9,
        host.launch_overhead_ns
    );
    for path in paths {
        let trace = Trace::load(&path)?;
        let projected = profile.project(&trace, &host, Precision::F32).ok_or("no units for 32 bits")?;
        let activations = trace.storages.iter().filter(|storage| storage.class == Class::Activation);
        let bytes: u64 = activations.map(|storage| storage.bytes).sum();
        println!(
            "{}: {:.2} ms here, {:.2} ms on {}, whose link takes {:.2} ms for all activations one way",
            trace.workload,
            trace.makespan_ns as f64 / 1e6,
            projected.makespan_ns as f64 / 1e6,
            profile.name,
            profile.link.offload_ns(bytes) as f64 / 1e6,
        );
    }
    Ok(())
}
