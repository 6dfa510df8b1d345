//! Copies between the device and a slow tier.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::hardware::{Link, Tier};

/// Why a copy could not be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CopyError {
    /// The slow tier has no room for so many bytes.
    #[error("the slow tier has no {bytes} bytes left")]
    Full {
        /// Bytes wanted.
        bytes: usize,
    },
    /// The engine has no such tier.
    #[error("there is no {0:?} tier")]
    NoTier(Tier),
    /// The thread that makes the copies is gone.
    #[error("a copy worker has died")]
    WorkerDied,
}

/// A storage's bytes in the slow tier: a part of a slab.
#[derive(Debug)]
pub struct SlowCopy {
    slab: Arc<Buffer>,
    offset: usize,
    bytes: usize,
}

impl SlowCopy {
    fn start(&self) -> *mut u8 {
        // SAFETY: the part lies inside its slab.
        unsafe { self.slab.start().add(self.offset) }
    }
}

/// The device bytes of one storage, one end of a copy.
#[derive(Clone, Copy, Debug)]
pub struct DeviceBytes {
    /// Where they start.
    pub start: *mut u8,
    /// How many.
    pub bytes: usize,
}

/// A copy under way.
#[derive(Clone, Debug)]
pub struct Ticket(Arc<(Mutex<bool>, Condvar)>);

/// Copies storages between the device and a slow tier: one channel each way, in the order asked for.
pub trait CopyEngine: Send {
    /// Starts copying `pieces` to `tier`, as one slab that is there when the ticket says so. One copy for each piece.
    ///
    /// # Safety
    ///
    /// The pieces stay readable and unchanged until the ticket has been waited for.
    unsafe fn offload(&mut self, pieces: &[DeviceBytes], tier: Tier) -> Result<(Vec<SlowCopy>, Ticket), CopyError>;

    /// Starts copying back, each copy to as many bytes at an address of the device.
    ///
    /// # Safety
    ///
    /// The device bytes stay writable and unread, and the copies live, until the ticket has been waited for.
    unsafe fn prefetch(&mut self, copies: &[(&SlowCopy, *mut u8)]) -> Result<Ticket, CopyError>;

    /// Blocks until the copy is made.
    fn wait(&mut self, ticket: &Ticket) -> Result<(), CopyError>;

    /// Takes back a copy's room. No copy from or to it may be under way.
    fn free(&mut self, copy: SlowCopy);

    /// Most bytes that the slow tier has held.
    fn high_water_bytes(&self) -> u64;
}

/// The slow tier is this machine's memory; one thread makes the copies each way.
///
/// With a pace, every copy takes at least as long as it would on a link of that bandwidth: an *emulated* link, to
/// study one on a machine without it.
pub struct HostEngine {
    out: Worker,
    back: Worker,
    vacant: HashMap<usize, Vec<Buffer>>,
    held_bytes: u64,
    high_water_bytes: u64,
}

impl HostEngine {
    /// An engine with its two threads; `pace` emulates a link.
    pub fn new(pace: Option<Link>) -> Self {
        HostEngine {
            out: Worker::start("plimsoll-offload", pace.map(|link| (link.offload_bytes_per_s, link.latency_ns))),
            back: Worker::start("plimsoll-prefetch", pace.map(|link| (link.prefetch_bytes_per_s, link.latency_ns))),
            vacant: HashMap::new(),
            held_bytes: 0,
            high_water_bytes: 0,
        }
    }

    /// Measures this machine's own link: the median of several copies of 16 MiB each way, into fresh memory as the loop
    /// would have it. A copy keeps one core busy all the while, which kernels that use every core must wait for.
    pub fn probe() -> Link {
        const BYTES: usize = 16 << 20;
        let mut engine = HostEngine::new(None);
        let source = Buffer::new(BYTES).expect("16 MiB");
        // SAFETY: the buffer holds as many bytes. Memory that was never written would be read from one zero page.
        unsafe { std::ptr::write_bytes(source.start(), 1, BYTES) };
        let mut rates = [[0.0; 7]; 2];
        for round in 0..rates[0].len() {
            let started = Instant::now();
            let piece = DeviceBytes { start: source.start(), bytes: BYTES };
            // SAFETY: `source` lives, unwritten, until the wait.
            let (mut copies, ticket) = unsafe { engine.offload(&[piece], Tier::Host) }.expect("16 MiB");
            let copy = copies.pop().expect("one copy for each piece");
            engine.wait(&ticket).expect("the worker lives");
            rates[0][round] = BYTES as f64 / started.elapsed().as_secs_f64();
            let fresh = Buffer::new(BYTES).expect("16 MiB");
            let started = Instant::now();
            // SAFETY: `fresh` lives, unread, until the wait; so does the copy.
            let ticket = unsafe { engine.prefetch(&[(&copy, fresh.start())]) }.expect("the worker lives");
            engine.wait(&ticket).expect("the worker lives");
            rates[1][round] = BYTES as f64 / started.elapsed().as_secs_f64();
            engine.free(copy);
        }
        let [offload_bytes_per_s, prefetch_bytes_per_s] = rates.map(|mut rates| {
            rates.sort_unstable_by(f64::total_cmp);
            rates[rates.len() / 2]
        });
        let contention_ns_per_byte = 0.5e9 * (1.0 / offload_bytes_per_s + 1.0 / prefetch_bytes_per_s);
        Link { offload_bytes_per_s, prefetch_bytes_per_s, latency_ns: 20_000, contention_ns_per_byte }
    }
}

impl CopyEngine for HostEngine {
    unsafe fn offload(&mut self, pieces: &[DeviceBytes], tier: Tier) -> Result<(Vec<SlowCopy>, Ticket), CopyError> {
        if tier != Tier::Host {
            return Err(CopyError::NoTier(tier));
        }
        let bytes = pieces.iter().map(|piece| piece.bytes).sum();
        let vacant = self.vacant.get_mut(&bytes).and_then(Vec::pop);
        let slab = match vacant {
            Some(slab) => slab,
            None => Buffer::new(bytes).ok_or(CopyError::Full { bytes })?,
        };
        self.held_bytes += bytes as u64;
        self.high_water_bytes = self.high_water_bytes.max(self.held_bytes);
        let slab = Arc::new(slab);
        let mut offset = 0;
        let part = |piece: &DeviceBytes| {
            let copy = SlowCopy { slab: Arc::clone(&slab), offset, bytes: piece.bytes };
            offset += piece.bytes;
            copy
        };
        let copies: Vec<SlowCopy> = pieces.iter().map(part).collect();
        let both = pieces.iter().zip(&copies);
        let moves = both.map(|(piece, copy)| Move { from: piece.start, to: copy.start(), bytes: piece.bytes });
        let ticket = self.out.submit(moves.collect())?;
        Ok((copies, ticket))
    }

    unsafe fn prefetch(&mut self, copies: &[(&SlowCopy, *mut u8)]) -> Result<Ticket, CopyError> {
        let moves = copies.iter().map(|&(copy, to)| Move { from: copy.start(), to, bytes: copy.bytes });
        self.back.submit(moves.collect())
    }

    fn wait(&mut self, ticket: &Ticket) -> Result<(), CopyError> {
        let (done, changed) = &*ticket.0;
        let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
        while !*done {
            if self.out.is_dead() || self.back.is_dead() {
                return Err(CopyError::WorkerDied);
            }
            done = changed.wait_timeout(done, Duration::from_millis(100)).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    fn free(&mut self, copy: SlowCopy) {
        if let Some(slab) = Arc::into_inner(copy.slab) {
            self.held_bytes -= slab.bytes as u64;
            self.vacant.entry(slab.bytes).or_default().push(slab);
        }
    }

    fn high_water_bytes(&self) -> u64 {
        self.high_water_bytes
    }
}

/// Page-aligned bytes.
#[derive(Debug)]
struct Buffer {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a buffer is memory; who may touch it is settled by tickets.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes.max(1), 4096).expect("storages are far below isize::MAX")
    }

    fn new(bytes: usize) -> Option<Self> {
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc(Self::layout(bytes)) })?;
        Some(Buffer { start, bytes })
    }

    fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated with the same layout.
        unsafe { dealloc(self.start.as_ptr(), Self::layout(self.bytes)) }
    }
}

struct Move {
    from: *const u8,
    to: *mut u8,
    bytes: usize,
}

// SAFETY: the engine's callers keep both ends alive until the ticket has been waited for.
unsafe impl Send for Move {}

struct Job {
    asked_for: Instant,
    moves: Vec<Move>,
    ticket: Ticket,
}

/// One direction of the link.
struct Worker {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    fn start(name: &str, pace: Option<(f64, u64)>) -> Self {
        let (jobs, incoming) = channel::<Job>();
        let work = move || {
            // When the emulated link is free again. Sleeping too long must not make it slower, so it keeps its own time.
            let mut free_at = Instant::now();
            for Job { asked_for, moves, ticket } in incoming {
                for &Move { from, to, bytes } in &moves {
                    // SAFETY: both ends hold `bytes` bytes and are distinct allocations.
                    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
                }
                let bytes: usize = moves.iter().map(|part| part.bytes).sum();
                if let Some((bytes_per_s, latency_ns)) = pace {
                    free_at = asked_for.max(free_at)
                        + Duration::from_secs_f64(bytes as f64 / bytes_per_s)
                        + Duration::from_nanos(latency_ns);
                    thread::sleep(free_at.saturating_duration_since(Instant::now()));
                }
                *ticket.0.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
                ticket.0.1.notify_all();
            }
        };
        let thread = thread::Builder::new().name(name.to_owned()).spawn(work).expect("a thread for copies");
        Worker { jobs: Some(jobs), thread: Some(thread) }
    }

    fn submit(&self, moves: Vec<Move>) -> Result<Ticket, CopyError> {
        let ticket = Ticket(Arc::new((Mutex::new(false), Condvar::new())));
        let job = Job { asked_for: Instant::now(), moves, ticket: ticket.clone() };
        let jobs = self.jobs.as_ref().expect("taken only when dropped");
        jobs.send(job).map_err(|_| CopyError::WorkerDied)?;
        Ok(ticket)
    }

    fn is_dead(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // It ends once its queue is empty; a panic in it was reported there.
            let _ = thread.join();
        }
    }
}
