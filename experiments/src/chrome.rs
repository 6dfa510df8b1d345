//! Timetables as Chrome traces: the JSON that Perfetto and chrome://tracing open.
//!
//! One process, a lane each for compute and for both copy channels, a counter of device bytes, and markers where the
//! budget pressed. Chrome counts in microseconds; the fractions are kept.

use std::collections::BTreeMap;
use std::ops::Range;

use plimsoll_runtime::Trace;
use plimsoll_runtime::playback::Wait;
use plimsoll_runtime::timetable::{Activity, Lane, Mark, Span, Timetable};
use plimsoll_runtime::torch::copy::TimedCopies;
use plimsoll_runtime::trace::{OperatorId, StorageId};
use serde_json::{Value, json};

const PROCESS: u32 = 1;

/// What a Chrome trace says of itself.
pub struct Subject<'a> {
    /// The iteration.
    pub trace: &'a Trace,
    /// Who planned it.
    pub policy: &'a str,
    /// The budget that it was planned for.
    pub budget_bytes: u64,
}

/// `timetable` as a Chrome trace.
pub fn chrome_trace(subject: &Subject<'_>, timetable: &Timetable) -> Value {
    let mut events = rows(subject);
    events.extend(timetable.spans.iter().map(|span| duration(subject.trace, span)));
    events.extend(device_bytes(timetable).into_iter().map(|(ns, bytes)| {
        let args = json!({"in use": bytes});
        json!({"ph": "C", "pid": PROCESS, "name": "device bytes", "ts": microseconds(ns), "args": args})
    }));
    events.extend(pressure(subject, timetable));
    json!({
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "workload": subject.trace.workload,
            "policy": subject.policy,
            "budget_bytes": subject.budget_bytes,
            "makespan_ns": timetable.makespan_ns,
        },
    })
}

/// An iteration as a device noted it: when each operator of the trace began and ended, and every copy.
pub fn noted_trace(subject: &Subject<'_>, operators: &[Range<u64>], copies: &[TimedCopies]) -> Value {
    let ran = (0..).zip(operators).map(|(index, time)| {
        let activity = Activity::Run(OperatorId(index));
        duration(subject.trace, &Span { lane: Lane::Compute, activity, start_ns: time.start, end_ns: time.end })
    });
    let copied = copies.iter().map(|copy| {
        complete(copy.lane, thread(copy.lane).1, "copy", copy.start_ns..copy.end_ns, json!({"bytes": copy.bytes}))
    });
    json!({
        "traceEvents": rows(subject).into_iter().chain(ran).chain(copied).collect::<Vec<_>>(),
        "displayTimeUnit": "ms",
        "otherData": {
            "workload": subject.trace.workload,
            "policy": subject.policy,
            "budget_bytes": subject.budget_bytes,
        },
    })
}

/// What names the process and its rows.
fn rows(subject: &Subject<'_>) -> Vec<Value> {
    let title = format!("{} under {} at {} bytes", subject.trace.workload, subject.policy, subject.budget_bytes);
    let mut events = vec![json!({"ph": "M", "pid": PROCESS, "name": "process_name", "args": {"name": title}})];
    for lane in [Lane::Compute, Lane::Offload, Lane::Prefetch] {
        let (thread, name) = thread(lane);
        events.push(json!({"ph": "M", "pid": PROCESS, "tid": thread, "name": "thread_name", "args": {"name": name}}));
        let order = json!({"sort_index": thread});
        events.push(json!({"ph": "M", "pid": PROCESS, "tid": thread, "name": "thread_sort_index", "args": order}));
    }
    events
}

fn microseconds(ns: u64) -> f64 {
    ns as f64 / 1e3
}

fn thread(lane: Lane) -> (u32, &'static str) {
    match lane {
        Lane::Compute => (1, "compute"),
        Lane::Offload => (2, "offload"),
        Lane::Prefetch => (3, "prefetch"),
    }
}

fn duration(trace: &Trace, span: &Span) -> Value {
    let bytes = |storages: &[StorageId]| storages.iter().map(|id| trace.storages[id.index()].bytes).sum::<u64>();
    let ids = |storages: &[StorageId]| storages.iter().map(|id| id.0).collect::<Vec<_>>();
    let (name, category, args) = match &span.activity {
        Activity::Run(operator) => {
            let phase = trace.operators[operator.index()].phase;
            (trace.operator_name(*operator).to_owned(), "operator", json!({"operator": operator.0, "phase": phase}))
        }
        Activity::Rerun(operator) => {
            (format!("rerun {}", trace.operator_name(*operator)), "rerun", json!({"operator": operator.0}))
        }
        Activity::Stall(storage, wait) => {
            let name = match wait {
                Wait::Memory => "stall for memory",
                Wait::Data => "stall for data",
                Wait::Freed => "stall for a copy of what is freed",
            };
            (name.to_owned(), "stall", json!({"storage": storage.0, "bytes": bytes(&[*storage])}))
        }
        Activity::Contention => ("contention".to_owned(), "contention", json!({})),
        Activity::Copy(storages) => {
            let name = if span.lane == Lane::Offload { "offload" } else { "prefetch" };
            let args = json!({"storages": ids(storages), "bytes": bytes(storages)});
            (format!("{name} {}", list(&ids(storages))), "copy", args)
        }
    };
    complete(span.lane, &name, category, span.start_ns..span.end_ns, args)
}

/// Something that takes time.
fn complete(lane: Lane, name: &str, category: &str, time: Range<u64>, args: Value) -> Value {
    json!({
        "ph": "X",
        "pid": PROCESS,
        "tid": thread(lane).0,
        "name": name,
        "cat": category,
        "ts": microseconds(time.start),
        "dur": microseconds(time.end.saturating_sub(time.start)),
        "args": args,
    })
}

fn list(ids: &[u32]) -> String {
    let words: Vec<String> = ids.iter().map(u32::to_string).collect();
    if let [one] = words.as_slice() { format!("storage {one}") } else { format!("storages {}", words.join(", ")) }
}

/// The counter's samples: of each time the most bytes in use, and then, where it differs, the last.
fn device_bytes(timetable: &Timetable) -> Vec<(u64, u64)> {
    let mut of_time: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for &(ns, bytes) in &timetable.device_bytes {
        let (most, last) = of_time.entry(ns).or_default();
        (*most, *last) = (bytes.max(*most), bytes);
    }
    let samples = of_time.into_iter().flat_map(|(ns, (most, last))| [(ns, most), (ns, last)]);
    let at_the_end = timetable.device_bytes.last().map(|&(_, bytes)| (timetable.makespan_ns, bytes));
    let mut samples: Vec<_> = samples.chain(at_the_end).collect();
    samples.dedup();
    samples
}

/// Where the budget pressed: compute waited for memory, something restored was given up again, or the budget was
/// exceeded.
fn pressure(subject: &Subject<'_>, timetable: &Timetable) -> Vec<Value> {
    let marker = |ns: u64, name: String, args: Value| {
        json!({
            "ph": "i",
            "s": "p",
            "pid": PROCESS,
            "tid": thread(Lane::Compute).0,
            "cat": "pressure",
            "name": name,
            "ts": microseconds(ns),
            "args": args,
        })
    };
    let waits = timetable.spans.iter().filter_map(|span| match span.activity {
        Activity::Stall(storage, Wait::Memory) => {
            Some(marker(span.start_ns, "pressure: waits for memory".to_owned(), json!({"storage": storage.0})))
        }
        _ => None,
    });
    let given_up = timetable.marks.iter().filter_map(|&(ns, mark)| match mark {
        Mark::Discard(storage) => Some(marker(ns, "pressure: discards".to_owned(), json!({"storage": storage.0}))),
        Mark::Drop(_) => None,
    });
    let mut over = false;
    let exceeded = timetable.device_bytes.iter().filter_map(move |&(ns, bytes)| {
        let begins = bytes > subject.budget_bytes && !over;
        over = bytes > subject.budget_bytes;
        let over_bytes = bytes.saturating_sub(subject.budget_bytes);
        begins.then(|| marker(ns, "pressure: over the budget".to_owned(), json!({"over_budget_bytes": over_bytes})))
    });
    waits.chain(given_up).chain(exceeded).collect()
}
