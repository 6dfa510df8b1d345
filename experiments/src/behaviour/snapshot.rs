//! PyTorch's CUDA memory snapshots: the allocator's own history.
//!
//! A user makes one in the training program:
//!
//! ```python
//! torch.cuda.memory._record_memory_history(max_entries=1_000_000)
//! ...                                    # some iterations
//! torch.cuda.memory._dump_snapshot("snapshot.pickle")
//! ```
//!
//! The pickle holds plain dictionaries, lists, strings and numbers; what `json.dump` makes of
//! `torch.cuda.memory._snapshot()` is read as well. It knows when blocks are allocated and freed, and not when they are
//! read or written, nor what for: no access-time intervals can be had from it, and nothing can be planned.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, anyhow, bail};
use serde::Deserialize;

use super::history::{Block, History, Kind};

/// The parts of a snapshot that are read. PyTorch adds others from version to version.
#[derive(Deserialize)]
struct Snapshot {
    #[serde(default)]
    segments: Vec<Segment>,
    /// Of each device, what its allocator did.
    device_traces: Vec<Vec<Entry>>,
}

#[derive(Deserialize)]
struct Segment {
    #[serde(default)]
    device: usize,
    #[serde(default)]
    total_size: u64,
    #[serde(default)]
    blocks: Vec<SegmentBlock>,
}

#[derive(Deserialize)]
struct SegmentBlock {
    size: u64,
    /// What the program asked for; older versions do not say.
    requested_size: Option<u64>,
    address: Option<u64>,
    state: String,
}

#[derive(Deserialize)]
struct Entry {
    action: String,
    #[serde(default)]
    addr: u64,
    #[serde(default)]
    size: u64,
    /// Wall-clock time; older versions do not say.
    time_us: Option<u64>,
    #[serde(default)]
    frames: Vec<Frame>,
}

#[derive(Deserialize)]
struct Frame {
    filename: String,
    line: i64,
    name: String,
}

/// What a snapshot tells of one device.
pub struct Recorded {
    /// The blocks.
    pub history: History,
    /// Bytes of each allocation, in order: what repeats from one iteration to the next.
    pub allocations: Vec<u64>,
    /// Most bytes that the allocator had reserved in segments.
    pub reserved_bytes: u64,
    /// Times that it ran out of memory.
    pub out_of_memory: usize,
}

/// Reads the snapshot in `bytes`, a pickle or JSON, which was read at `path`: the history of `device`.
pub fn read(path: &Path, bytes: &[u8], device: usize) -> anyhow::Result<Recorded> {
    let json = bytes.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{');
    let snapshot: Snapshot = if json {
        serde_json::from_slice(bytes).context("not a memory snapshot as JSON")?
    } else {
        serde_pickle::from_slice(bytes, serde_pickle::DeOptions::new().decode_strings())
            // What it read last may be anything, and long.
            .map_err(|_| anyhow!("neither a plimsoll trace, nor a memory snapshot as a pickle or as JSON"))?
    };
    let devices = snapshot.device_traces.len();
    let Some(entries) = snapshot.device_traces.get(device) else {
        bail!("device {device} of {devices}: the snapshot holds no such device");
    };
    if entries.is_empty() {
        let others: Vec<usize> = (0..devices).filter(|&other| !snapshot.device_traces[other].is_empty()).collect();
        bail!(
            "device {device} has no history (devices that have one: {others:?}); \
             torch.cuda.memory._record_memory_history() has to be called before the iterations"
        );
    }
    let segments: Vec<&Segment> = snapshot.segments.iter().filter(|segment| segment.device == device).collect();
    let subject = format!("{}, device {device}", path.display());
    Ok(Reader::default().read(subject, &segments, entries))
}

#[derive(Default)]
struct Reader {
    blocks: Vec<Block>,
    /// The live block at an address that the history saw allocated.
    live: HashMap<u64, usize>,
    allocations: Vec<u64>,
    reserved_change: i128,
    reserved_change_max: i128,
    out_of_memory: usize,
}

impl Reader {
    fn read(mut self, subject: String, segments: &[&Segment], entries: &[Entry]) -> Recorded {
        entries.iter().enumerate().for_each(|(tick, entry)| self.enter(tick, entry));
        self.add_survivors(segments);
        let timed = entries.iter().all(|entry| entry.time_us.is_some());
        let first_us = entries.iter().find_map(|entry| entry.time_us).unwrap_or(0);
        let time = |(tick, entry): (usize, &Entry)| match entry.time_us {
            Some(us) if timed => us.saturating_sub(first_us).saturating_mul(1_000),
            _ => tick as u64,
        };
        let ticks = entries.iter().enumerate().map(time).collect();
        // What was reserved when the history began follows from what is reserved at its end.
        let at_the_end: i128 = segments.iter().map(|segment| i128::from(segment.total_size)).sum();
        let reserved_bytes = at_the_end - self.reserved_change + self.reserved_change_max;
        let reserved_bytes = reserved_bytes.clamp(0, u64::MAX.into()) as u64;
        let history = History { subject, ticks, timed, blocks: self.blocks, has_accesses: false };
        Recorded { history, allocations: self.allocations, reserved_bytes, out_of_memory: self.out_of_memory }
    }

    fn enter(&mut self, tick: usize, entry: &Entry) {
        match entry.action.as_str() {
            "alloc" => {
                self.allocations.push(entry.size);
                self.live.insert(entry.addr, self.blocks.len());
                self.blocks.push(block(entry.size, label(&entry.frames), Some(tick)));
            }
            "free_completed" => match self.live.remove(&entry.addr) {
                Some(known) => self.blocks[known].died = Some(tick),
                // Allocated before the history began.
                None => self.blocks.push(Block { died: Some(tick), ..block(entry.size, label(&[]), None) }),
            },
            "segment_alloc" | "segment_map" => {
                self.reserved_change += i128::from(entry.size);
                self.reserved_change_max = self.reserved_change.max(self.reserved_change_max);
            }
            "segment_free" | "segment_unmap" => self.reserved_change -= i128::from(entry.size),
            "oom" => self.out_of_memory += 1,
            // A block whose free is requested counts until it is completed; snapshots change nothing.
            _ => {}
        }
    }

    /// Adds what is in use at the end and was allocated before the history began.
    fn add_survivors(&mut self, segments: &[&Segment]) {
        for held in segments.iter().flat_map(|segment| &segment.blocks) {
            let known = held.address.is_some_and(|address| self.live.contains_key(&address));
            if held.state.starts_with("active") && !known {
                self.blocks.push(block(held.requested_size.unwrap_or(held.size), label(&[]), None));
            }
        }
    }
}

fn block(bytes: u64, label: String, born: Option<usize>) -> Block {
    Block { bytes, kind: Kind::Unknown, label, born, died: None, accesses: Vec::new() }
}

/// The innermost line of the program that is none of PyTorch's own.
fn label(frames: &[Frame]) -> String {
    let own = |frame: &&Frame| !frame.filename.contains("/torch/") && frame.filename.ends_with(".py");
    match frames.iter().find(own).or(frames.first()) {
        Some(Frame { filename, line, name }) => {
            let file = filename.rsplit('/').next().unwrap_or(filename);
            format!("{name} ({file}:{line})")
        }
        None => "allocated elsewhere".to_owned(),
    }
}
