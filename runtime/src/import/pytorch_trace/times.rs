//! Operator times from the trace that PyTorch's profiler exports, `export_chrome_trace`.
//!
//! On a CPU an operator takes as long as its call. On a GPU the call only starts kernels: there it takes from the start
//! of its first kernel to the end of its last, and one that starts none takes no time.

use std::collections::HashMap;

use serde::Deserialize;

use super::{ImportError, Node};
use crate::trace::Trace;

/// When operators and kernels ran.
#[derive(Debug, Default)]
pub struct Times {
    /// Per record-function number: start and end, in nanoseconds.
    calls: HashMap<u64, (u64, u64)>,
    /// Per record-function number: start of its first and end of its last kernel.
    kernels: HashMap<u64, (u64, u64)>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    trace_events: Vec<Event>,
}

#[derive(Deserialize)]
struct Event {
    #[serde(default)]
    ph: String,
    #[serde(default)]
    cat: String,
    /// Microseconds.
    #[serde(default)]
    ts: f64,
    /// Microseconds.
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: Arguments,
}

#[derive(Default, Deserialize)]
struct Arguments {
    #[serde(rename = "External id")]
    external: Option<u64>,
    #[serde(rename = "Record function id")]
    record: Option<u64>,
}

impl Times {
    /// Reads the profiler's trace in `json`.
    pub fn read(json: &[u8]) -> Result<Self, ImportError> {
        let expected = "a trace of PyTorch's profiler";
        let file: File = serde_json::from_slice(json).map_err(|error| ImportError::Malformed { expected, error })?;
        let mut events: Vec<Event> = file.trace_events.into_iter().filter(|event| event.ph == "X").collect();
        // Times of day in microseconds have too many digits for nanoseconds to be told apart: count from the first.
        let first_us = events.iter().map(|event| event.ts).fold(f64::INFINITY, f64::min);
        events.iter_mut().for_each(|event| event.ts -= first_us);
        let ns = |us: f64| (us.max(0.0) * 1e3).round() as u64;
        let span = |event: &Event| (ns(event.ts), ns(event.ts + event.dur));
        let mut times = Times::default();
        let mut records = HashMap::new();
        for event in events.iter().filter(|event| event.cat == "cpu_op") {
            if let Some(record) = event.args.record {
                times.calls.insert(record, span(event));
                records.extend(event.args.external.map(|external| (external, record)));
            }
        }
        for event in events.iter().filter(|event| matches!(event.cat.as_str(), "kernel" | "gpu_memcpy" | "gpu_memset"))
        {
            if let Some(&record) = event.args.external.and_then(|external| records.get(&external)) {
                let (start, end) = span(event);
                let known = times.kernels.entry(record).or_insert((start, end));
                *known = (known.0.min(start), known.1.max(end));
            }
        }
        Ok(times)
    }

    /// Fills in the times of `trace`. `calls` holds each operator's own node, and then those that it calls.
    pub(super) fn fill_in<'a>(
        &self,
        trace: &mut Trace,
        calls: impl Iterator<Item = Vec<&'a Node>>,
    ) -> Result<(), ImportError> {
        let mut missing: Option<(usize, &Node)> = None;
        let mut free_ns = None;
        for (operator, nodes) in trace.operators.iter_mut().zip(calls) {
            let Some(&call) = self.calls.get(&nodes[0].record()) else {
                missing = Some(missing.map_or((1, nodes[0]), |(count, first)| (count + 1, first)));
                continue;
            };
            let kernels = nodes.iter().filter_map(|node| self.kernels.get(&node.record()).copied());
            let kernels = kernels.reduce(|one, other| (one.0.min(other.0), one.1.max(other.1)));
            let Some((start, end)) = (if self.kernels.is_empty() { Some(call) } else { kernels }) else { continue };
            // Kernels of different streams may overlap: time counts once.
            let start = free_ns.map_or(start, |free: u64| free.max(start));
            operator.gap_ns = free_ns.map_or(0, |free| start - free);
            operator.cost_ns = end.saturating_sub(start);
            free_ns = Some(start.max(end));
        }
        match missing {
            None => Ok(()),
            Some((missing, first)) => Err(ImportError::Untimed {
                missing,
                operators: trace.operators.len(),
                name: first.name.clone(),
                record: first.record(),
            }),
        }
    }
}
