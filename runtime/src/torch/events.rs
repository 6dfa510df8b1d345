//! What happened when: a log of operators, reruns, copies and bytes, for Chrome's trace viewer and Perfetto.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::session::operator_name;
use super::shim::Entry;

/// Events kept at most; later ones are left out, and the trace says how many.
const EVENTS_MAX: usize = 1 << 20;

/// A direction of the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Channel {
    Offload,
    Prefetch,
}

/// A row of the viewer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Track {
    Compute,
    Stall,
    Offload,
    Prefetch,
}

#[derive(Clone, Debug)]
enum What {
    Operator(u32),
    Rerun,
    Stall,
    Copy(u64),
    Iteration,
}

#[derive(Clone, Debug)]
struct Event {
    what: What,
    track: Track,
    start_ns: u64,
    duration_ns: u64,
}

/// The log. It is empty, and costs nothing, until it is switched on.
#[derive(Debug, Default)]
pub(crate) struct Events {
    origin: Option<Instant>,
    events: Vec<Event>,
    memory: Vec<(u64, u64)>,
    under_way: HashMap<(Channel, Entry), (u64, u64)>,
    left_out: u64,
}

impl Events {
    pub(crate) fn switch_on(&mut self) {
        self.origin.get_or_insert_with(Instant::now);
    }

    pub(crate) fn is_on(&self) -> bool {
        self.origin.is_some()
    }

    fn at_ns(&self, moment: Instant) -> u64 {
        self.origin.map_or(0, |origin| moment.saturating_duration_since(origin).as_nanos() as u64)
    }

    fn push(&mut self, what: What, track: Track, start_ns: u64, duration_ns: u64) {
        if self.events.len() < EVENTS_MAX {
            self.events.push(Event { what, track, start_ns, duration_ns });
        } else {
            self.left_out += 1;
        }
    }

    /// An operator has just ended.
    pub(crate) fn operator(&mut self, name: u32, duration_ns: u64, live_bytes: u64) {
        if self.origin.is_some() {
            let now_ns = self.at_ns(Instant::now());
            self.push(What::Operator(name), Track::Compute, now_ns.saturating_sub(duration_ns), duration_ns);
            if self.memory.len() < EVENTS_MAX {
                self.memory.push((now_ns, live_bytes));
            }
        }
    }

    pub(crate) fn reran(&mut self, started: Instant, duration_ns: u64) {
        if self.origin.is_some() {
            self.push(What::Rerun, Track::Compute, self.at_ns(started), duration_ns);
        }
    }

    pub(crate) fn stalled(&mut self, started: Instant, duration_ns: u64) {
        if self.origin.is_some() {
            self.push(What::Stall, Track::Stall, self.at_ns(started), duration_ns);
        }
    }

    pub(crate) fn iteration(&mut self, started: Instant) {
        if self.origin.is_some() {
            let start_ns = self.at_ns(started);
            self.push(What::Iteration, Track::Stall, start_ns, self.at_ns(Instant::now()) - start_ns);
        }
    }

    /// A copy was asked for; `first` is the first storage of its slab.
    pub(crate) fn copy_started(&mut self, channel: Channel, first: Entry, bytes: u64) {
        if self.origin.is_some() {
            let now_ns = self.at_ns(Instant::now());
            self.under_way.insert((channel, first), (now_ns, bytes));
        }
    }

    /// Its end was noticed: copies end at the latest now.
    pub(crate) fn copy_ended(&mut self, channel: Channel, first: Entry) {
        if let Some((start_ns, bytes)) = self.under_way.remove(&(channel, first)) {
            let track = match channel {
                Channel::Offload => Track::Offload,
                Channel::Prefetch => Track::Prefetch,
            };
            let now_ns = self.at_ns(Instant::now());
            self.push(What::Copy(bytes), track, start_ns, now_ns - start_ns);
        }
    }

    /// The log in Chrome's trace event format.
    pub(crate) fn to_chrome_json(&self) -> String {
        let us = |ns: u64| Duration::from_nanos(ns).as_secs_f64() * 1e6;
        let mut rows: Vec<Row> = TRACKS.iter().map(|&(track, name)| Row::name_of(track, name)).collect();
        rows.extend(self.events.iter().map(|event| Row {
            name: match event.what {
                What::Operator(name) => operator_name(name),
                What::Rerun => "rerun".to_owned(),
                What::Stall => "stall".to_owned(),
                What::Copy(bytes) => format!("{bytes} bytes"),
                What::Iteration => "iteration".to_owned(),
            },
            ph: "X",
            ts: us(event.start_ns),
            dur: Some(us(event.duration_ns)),
            pid: 1,
            tid: event.track as u32,
            args: None,
        }));
        rows.extend(self.memory.iter().map(|&(at_ns, bytes)| Row {
            name: "device bytes".to_owned(),
            ph: "C",
            ts: us(at_ns),
            dur: None,
            pid: 1,
            tid: 0,
            args: Some(Arguments::Bytes { bytes }),
        }));
        let file = File { trace_events: rows, display_time_unit: "ms", events_left_out: self.left_out };
        serde_json::to_string(&file).expect("numbers and names")
    }
}

const TRACKS: [(Track, &str); 4] = [
    (Track::Compute, "compute"),
    (Track::Stall, "iterations and stalls"),
    (Track::Offload, "offload channel"),
    (Track::Prefetch, "prefetch channel"),
];

#[derive(Serialize)]
struct File {
    #[serde(rename = "traceEvents")]
    trace_events: Vec<Row>,
    #[serde(rename = "displayTimeUnit")]
    display_time_unit: &'static str,
    #[serde(rename = "eventsLeftOut")]
    events_left_out: u64,
}

#[derive(Serialize)]
struct Row {
    name: String,
    ph: &'static str,
    ts: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    pid: u32,
    tid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<Arguments>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Arguments {
    Name { name: &'static str },
    Bytes { bytes: u64 },
}

impl Row {
    fn name_of(track: Track, name: &'static str) -> Self {
        Row {
            name: "thread_name".to_owned(),
            ph: "M",
            ts: 0.0,
            dur: None,
            pid: 1,
            tid: track as u32,
            args: Some(Arguments::Name { name }),
        }
    }
}
