//! The engine whose slow tier is a file, so that a machine can train beyond its memory.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use super::channel::{Channel, CopiedBy};
use super::extents::Extents;
use super::gather::{Gather, Part};
use super::measured::TierCopies;
use super::probe::{COPIED_BYTES, PROBE_BYTES, probe};
use super::slabs::{Mapped, MemorySlab, PAGE_BYTES, Pool, whole_pages};
use super::spill::SpillFile;
use super::ticket::{Completion, Done, Promise, Ticket};
use super::{CopyEngine, CopyError, DeviceBytes, Slab, SlowCopy, TierUse};
use crate::hardware::{Link, Tier};
use crate::locks::lock;

/// Bytes that go through memory at a time, each way. All the memory that the tier takes.
const BOUNCE_BYTES: usize = 2 << 20;
/// Parts of a slab that lie closer together are read together: reading the gap costs less than another request.
const GAP_BYTES: usize = 64 << 10;

/// Where the file is and how large it may become.
#[derive(Clone, Debug)]
pub struct FileTier {
    /// A directory to make the file in. The file has no name there.
    pub directory: PathBuf,
    /// Most bytes of the file, in whole pages.
    pub limit_bytes: u64,
    /// Emulates a slower disk.
    pub pace: Option<Link>,
}

/// The slow tier is an unlinked file; one thread writes it and one reads it, each through a small aligned buffer.
///
/// The threads read and write the device's bytes themselves, so the device must be the CPU: a GPU's bytes would first
/// have to go through page-locked memory, which no engine does yet.
pub struct FileEngine {
    out: Channel,
    back: Channel,
    room: Arc<Room>,
    write_bounce: Arc<Bounce>,
    read_bounce: Arc<Bounce>,
}

/// The file and which of its bytes are free.
#[derive(Debug)]
struct Room {
    file: SpillFile,
    limit_bytes: u64,
    account: Mutex<Account>,
}

#[derive(Debug)]
struct Account {
    extents: Extents,
    /// The file's length, for which the disk has room.
    reserved_bytes: u64,
    high_water_bytes: u64,
}

/// A slab's bytes in the file. They are free again when the last copy, and the last job that uses them, is gone.
#[derive(Debug)]
pub(super) struct FileSlab {
    extents: Vec<Range<u64>>,
    written: Arc<Completion>,
    room: Arc<Room>,
}

impl Room {
    fn account(&self) -> MutexGuard<'_, Account> {
        lock(&self.account)
    }

    fn take(&self, bytes: usize) -> Result<Vec<Range<u64>>, CopyError> {
        let mut account = self.account();
        let bytes = whole_pages(bytes);
        let extents = account.extents.take(bytes as u64).ok_or(CopyError::Full { bytes })?;
        let end = extents.iter().map(|extent| extent.end).max().unwrap_or(0);
        if end > account.reserved_bytes {
            if let Err(error) = self.file.reserve(account.reserved_bytes..end) {
                account.extents.give(&extents);
                return Err(if matches!(error, CopyError::Full { .. }) { CopyError::Full { bytes } } else { error });
            }
            account.reserved_bytes = end;
        }
        account.high_water_bytes = account.high_water_bytes.max(self.limit_bytes - account.extents.free_bytes());
        Ok(extents)
    }
}

impl Drop for FileSlab {
    fn drop(&mut self) {
        self.room.account().extents.give(&self.extents);
    }
}

impl FileSlab {
    /// Where in the file the slab's bytes `span` are, in steps of at most [`BOUNCE_BYTES`]: offset in the file, bytes
    /// of the slab.
    fn steps(&self, span: Range<usize>) -> impl Iterator<Item = (u64, Range<usize>)> {
        let mut base = 0;
        self.extents.iter().flat_map(move |extent| {
            let (start, end) = (base, base + (extent.end - extent.start) as usize);
            base = end;
            let overlap = span.start.max(start)..span.end.min(end);
            let file_offset = extent.start;
            overlap.clone().step_by(BOUNCE_BYTES).map(move |from| {
                let to = overlap.end.min(from + BOUNCE_BYTES);
                (file_offset + (from - start) as u64, from..to)
            })
        })
    }

    fn write(&self, pieces: &[DeviceBytes], bounce: &Bounce) -> Result<(), CopyError> {
        let bytes = pieces.iter().map(|piece| piece.bytes).sum();
        let mut pieces = Gather::of(pieces);
        let mut bounce = bounce.lock();
        for (file_offset, span) in self.steps(0..whole_pages(bytes)) {
            let pages = &mut bounce.pages()[..span.len()];
            // SAFETY: the caller of `offload` keeps the pieces readable.
            let filled = unsafe { pieces.fill(pages) };
            // The last page's rest; nobody reads it.
            pages[filled..].fill(0);
            self.room.file.write(pages, file_offset)?;
        }
        Ok(())
    }

    /// Reads parts that are in order of their offsets.
    fn read(&self, parts: &[Part], bounce: &Bounce) -> Result<(), CopyError> {
        let mut bounce = bounce.lock();
        for run in parts.chunk_by(|before, after| after.offset <= before.end() + GAP_BYTES) {
            let end = run.iter().map(Part::end).max().unwrap_or(0);
            let span = run[0].offset / PAGE_BYTES * PAGE_BYTES..end.next_multiple_of(PAGE_BYTES);
            let mut rest = run;
            for (file_offset, span) in self.steps(span) {
                let pages = &mut bounce.pages()[..span.len()];
                self.room.file.read(pages, file_offset)?;
                while rest.first().is_some_and(|part| part.end() <= span.start) {
                    rest = &rest[1..];
                }
                for part in rest.iter().take_while(|part| part.offset < span.end) {
                    // SAFETY: the caller of `prefetch` keeps the device bytes writable.
                    unsafe { part.scatter(pages, span.start) };
                }
            }
        }
        Ok(())
    }
}

/// Aligned memory that one direction's bytes go through.
struct Bounce {
    slab: MemorySlab,
    in_use: Mutex<()>,
}

struct BounceLock<'a> {
    slab: &'a MemorySlab,
    _in_use: MutexGuard<'a, ()>,
}

impl Bounce {
    fn new() -> Result<Self, CopyError> {
        let slab = Pool::new(Box::new(Mapped), u64::MAX).take(BOUNCE_BYTES)?;
        Ok(Bounce { slab, in_use: Mutex::new(()) })
    }

    fn lock(&self) -> BounceLock<'_> {
        BounceLock { slab: &self.slab, _in_use: lock(&self.in_use) }
    }
}

impl BounceLock<'_> {
    fn pages(&mut self) -> &mut [u8] {
        // SAFETY: the slab has as many bytes, mapped and so initialised, and the lock makes them ours alone.
        unsafe { std::slice::from_raw_parts_mut(self.slab.at(0), BOUNCE_BYTES) }
    }
}

impl FileEngine {
    /// Makes the file and starts the two threads.
    pub fn new(tier: FileTier) -> Result<Self, CopyError> {
        let (write_bounce, read_bounce) = (Bounce::new()?, Bounce::new()?);
        let file = SpillFile::create(&tier.directory, &mut write_bounce.lock().pages()[..PAGE_BYTES])?;
        // Offsets in a file are signed.
        let limit_bytes = tier.limit_bytes.min(i64::MAX as u64) / PAGE_BYTES as u64 * PAGE_BYTES as u64;
        let account = Account { extents: Extents::below(limit_bytes), reserved_bytes: 0, high_water_bytes: 0 };
        let (out, back) = Channel::there_and_back(CopiedBy::Threads, tier.pace);
        Ok(FileEngine {
            out,
            back,
            room: Arc::new(Room { file, limit_bytes, account: Mutex::new(account) }),
            write_bounce: Arc::new(write_bounce),
            read_bounce: Arc::new(read_bounce),
        })
    }

    /// Measures the link to a file in this directory, as [`HostEngine::probe`](super::HostEngine::probe) does to memory.
    /// What a copy takes from compute is the processor time of this process while it copies.
    pub fn probe(directory: PathBuf) -> Result<Link, CopyError> {
        let mut engine = FileEngine::new(FileTier { directory, limit_bytes: PROBE_BYTES as u64, pace: None })?;
        let before_ns = processor_ns();
        let link = probe(&mut engine, Tier::File)?;
        // The probe's own filling of its source counts for little beside the copies.
        let contention_ns_per_byte = (processor_ns() - before_ns) as f64 / COPIED_BYTES as f64;
        Ok(Link { contention_ns_per_byte, ..link })
    }

    /// Makes both worker threads die, as a fault to be survived. For tests.
    #[doc(hidden)]
    pub fn kill_workers(&mut self) {
        self.out.kill();
        self.back.kill();
    }
}

/// Processor time that this process has used.
fn processor_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is writable.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The pieces of one offload, on their way to the worker.
struct Pieces(Vec<DeviceBytes>);

// SAFETY: the caller of `offload` keeps them readable until the ticket has been waited for.
unsafe impl Send for Pieces {}

/// What is to be read, slab by slab and in order of offsets.
fn by_slab(copies: &[(&SlowCopy, *mut u8)]) -> Vec<(Arc<FileSlab>, Vec<Part>)> {
    let mut slabs: Vec<(Arc<FileSlab>, Vec<Part>)> = Vec::new();
    for &(copy, to) in copies {
        let slab = copy.in_file();
        let part = Part { offset: copy.offset, to: DeviceBytes { start: to, bytes: copy.bytes } };
        match slabs.iter_mut().rev().find(|(known, _)| Arc::ptr_eq(known, slab)) {
            Some((_, parts)) => parts.push(part),
            None => slabs.push((Arc::clone(slab), vec![part])),
        }
    }
    slabs.iter_mut().for_each(|(_, parts)| parts.sort_by_key(|part| part.offset));
    slabs
}

impl CopyEngine for FileEngine {
    unsafe fn offload(&mut self, pieces: &[DeviceBytes], tier: Tier) -> Result<(Vec<SlowCopy>, Ticket), CopyError> {
        if tier != Tier::File {
            return Err(CopyError::NoTier(tier));
        }
        let bytes = pieces.iter().map(|piece| piece.bytes).sum();
        let (promise, written) = Promise::new();
        let done = Done::Worker(Arc::clone(&written));
        let slab = Arc::new(FileSlab { extents: self.room.take(bytes)?, written, room: Arc::clone(&self.room) });
        let copies = SlowCopy::parts(&Slab::File(Arc::clone(&slab)), pieces);
        let (pieces, bounce) = (Pieces(pieces.to_vec()), Arc::clone(&self.write_bounce));
        let job = move |_: &mut Instant| {
            let pieces = pieces;
            slab.write(&pieces.0, &bounce)
        };
        self.out.submit(bytes, promise, Box::new(job))?;
        Ok((copies, Ticket::new(Tier::File, done)))
    }

    unsafe fn prefetch(&mut self, copies: &[(&SlowCopy, *mut u8)]) -> Result<Ticket, CopyError> {
        let bytes = copies.iter().map(|(copy, _)| copy.bytes).sum();
        let (slabs, bounce) = (by_slab(copies), Arc::clone(&self.read_bounce));
        let job = move |began: &mut Instant| {
            slabs.iter().try_for_each(|(slab, _)| slab.written.wait())?;
            *began = Instant::now();
            for (slab, parts) in slabs {
                slab.read(&parts, &bounce)?;
            }
            Ok(())
        };
        self.back.ticket(Tier::File, bytes, Box::new(job))
    }

    fn wait(&mut self, ticket: &Ticket) -> Result<(), CopyError> {
        ticket.wait_for_workers()
    }

    unsafe fn rescue(&mut self, copy: &SlowCopy, to: *mut u8) -> Result<(), CopyError> {
        let slab = copy.in_file();
        slab.written.wait()?;
        let to = DeviceBytes { start: to, bytes: copy.bytes };
        slab.read(&[Part { offset: copy.offset, to }], &self.read_bounce)
    }

    fn tiers(&self) -> Vec<TierUse> {
        let account = self.room.account();
        let limit_bytes = self.room.limit_bytes;
        vec![TierUse {
            tier: Tier::File,
            held_bytes: limit_bytes - account.extents.free_bytes(),
            high_water_bytes: account.high_water_bytes,
            kept_bytes: 0,
            limit_bytes,
        }]
    }

    fn copies(&self) -> Vec<TierCopies> {
        vec![TierCopies { tier: Tier::File, offload: self.out.copies(), prefetch: self.back.copies() }]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_measures_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let link = FileEngine::probe(directory.path().to_owned()).unwrap();
        let rates = [link.offload_bytes_per_s, link.prefetch_bytes_per_s];
        assert!(rates.iter().all(|rate| rate.is_finite() && *rate > 0.0), "{link:?}");
        // Bytes go through the buffer by the processor's hand, which takes time of it.
        assert!(link.contention_ns_per_byte > 0.0, "{link:?}");
    }

    #[test]
    fn a_slab_in_several_extents_is_gone_through_in_order_and_in_small_steps() {
        let page = PAGE_BYTES as u64;
        let mapped = Bounce::new().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let file = SpillFile::create(directory.path(), &mut mapped.lock().pages()[..PAGE_BYTES]).unwrap();
        let account = Account { extents: Extents::below(0), reserved_bytes: 0, high_water_bytes: 0 };
        let room = Arc::new(Room { file, limit_bytes: 0, account: Mutex::new(account) });
        let bounce = BOUNCE_BYTES as u64;
        let extents = vec![7 * page..8 * page, 100 * page..100 * page + bounce + page, 2 * page..4 * page];
        let slab = std::mem::ManuallyDrop::new(FileSlab { extents, written: Arc::default(), room });
        let steps: Vec<_> = slab.steps(0..BOUNCE_BYTES + 4 * PAGE_BYTES).collect();
        let expected = [
            (7 * page, 0..PAGE_BYTES),
            (100 * page, PAGE_BYTES..PAGE_BYTES + BOUNCE_BYTES),
            (100 * page + bounce, PAGE_BYTES + BOUNCE_BYTES..2 * PAGE_BYTES + BOUNCE_BYTES),
            (2 * page, 2 * PAGE_BYTES + BOUNCE_BYTES..4 * PAGE_BYTES + BOUNCE_BYTES),
        ];
        assert_eq!(steps, expected);
        let inner: Vec<_> = slab.steps(PAGE_BYTES..3 * PAGE_BYTES).collect();
        assert_eq!(inner, [(100 * page, PAGE_BYTES..3 * PAGE_BYTES)]);
    }
}
