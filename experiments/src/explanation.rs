//! Why a plan is predicted to cost what it costs, in the terminal.

use plimsoll_runtime::{Explanation, Trace};

use crate::behaviour::history::Kind;
use crate::table::{mib, milliseconds};

/// Prints where the peak is, what makes it, and where the time went.
pub fn print(trace: &Trace, why: &Explanation) {
    let at = match (why.peak_operator, &why.peak_operator_name) {
        (Some(operator), Some(name)) => format!("operator {} ({name})", operator.0),
        _ => "the iteration's end".to_owned(),
    };
    let mut parts: Vec<String> = why
        .peak
        .classes
        .iter()
        .map(|(class, bytes)| format!("{} {}", Kind::from(*class).name(), mib(*bytes)))
        .collect();
    let others = [
        ("copies beside", why.peak.beside_bytes),
        ("its own", why.peak.demand_bytes),
        ("unseen", why.peak.unseen_bytes),
    ];
    parts.extend(others.iter().filter(|(_, bytes)| *bytes > 0).map(|(what, bytes)| format!("{what} {}", mib(*bytes))));
    println!("peak at {at}, in MiB: {}", parts.join(", "));
    let largest = why.peak.largest.iter().map(|(storage, bytes)| {
        let class = Kind::from(trace.storages[storage.index()].class).name();
        format!("storage {} ({class}) {}", storage.0, mib(*bytes))
    });
    println!("largest there, in MiB: {}", largest.collect::<Vec<_>>().join(", "));
    let time = &why.time;
    println!(
        "time in ms: {} compute, {} gaps, {} waiting for data, {} waiting for memory, {} contention, {} recompute; \
         channels busy: offload {:.1} %, prefetch {:.1} %",
        milliseconds(time.compute_ns),
        milliseconds(time.gaps_ns),
        milliseconds(time.data_stall_ns),
        milliseconds(time.memory_stall_ns),
        milliseconds(time.contention_ns),
        milliseconds(time.recompute_ns),
        100.0 * why.offload_utilisation,
        100.0 * why.prefetch_utilisation,
    );
}
