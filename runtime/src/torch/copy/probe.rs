//! Measures a link by copying over it.
//!
//! Copies are made as a loop makes them from its second iteration on: of some mebibytes each, into memory that was used
//! before, and out of memory that has left the caches since it was written.

use std::time::{Duration, Instant};

use super::slabs::{Mapped, Pool};
use super::{CopyEngine, CopyError, DeviceBytes};
use crate::hardware::{Link, Tier};

/// What is copied at a time.
const PIECE_BYTES: usize = 4 << 20;
/// How many pieces are out before the first comes back. Together they are more than caches hold.
const PIECES: usize = 16;
/// What a copy takes beside its bytes.
const LATENCY_NS: u64 = 20_000;
/// How often all of them go there and back. The first time makes the slow tier's memory, and is not counted.
const ROUNDS: usize = 3;
/// Most bytes that a probe has in the slow tier.
pub(super) const PROBE_BYTES: usize = PIECES * PIECE_BYTES;
/// Bytes that a probe copies, both ways together.
pub(super) const COPIED_BYTES: usize = 2 * ROUNDS * PROBE_BYTES;

/// Measures an engine. What copies take from compute is left at zero.
pub(super) fn probe(engine: &mut dyn CopyEngine, tier: Tier) -> Result<Link, CopyError> {
    let room = Pool::new(Box::new(Mapped), u64::MAX).take(PROBE_BYTES)?;
    // SAFETY: the slab holds as many bytes. Memory that was never written would be read from one zero page.
    unsafe { room.at(0).write_bytes(1, PROBE_BYTES) };
    let piece = |index: usize| DeviceBytes { start: room.at(index * PIECE_BYTES), bytes: PIECE_BYTES };
    let (mut out, mut back) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let mut copies = Vec::with_capacity(PIECES);
        for index in 0..PIECES {
            let started = Instant::now();
            // SAFETY: the room lives, unwritten, until the wait.
            let (mut made, ticket) = unsafe { engine.offload(&[piece(index)], tier) }?;
            engine.wait(&ticket)?;
            out.push(started.elapsed());
            copies.append(&mut made);
        }
        for (index, copy) in copies.into_iter().enumerate() {
            let started = Instant::now();
            // SAFETY: the room lives, unread, until the wait.
            let ticket = unsafe { engine.prefetch(&[(&copy, piece(index).start)]) }?;
            engine.wait(&ticket)?;
            back.push(started.elapsed());
            drop(copy);
        }
    }
    let [offload_bytes_per_s, prefetch_bytes_per_s] = [&mut out[PIECES..], &mut back[PIECES..]].map(median_rate);
    Ok(Link { offload_bytes_per_s, prefetch_bytes_per_s, ..Link::symmetric(0.0, LATENCY_NS) })
}

fn median_rate(times: &mut [Duration]) -> f64 {
    times.sort_unstable();
    PIECE_BYTES as f64 / times[times.len() / 2].as_secs_f64()
}
