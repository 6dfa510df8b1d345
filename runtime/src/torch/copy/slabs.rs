//! Slabs of memory: page-aligned, made of the size that is asked for, bounded by a limit, and used again.
//!
//! A pool knows how much memory it has given out and kept. Where memory comes from is a [`Memory`]'s affair; who may
//! touch a slab when is settled by tickets.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::ops::RangeInclusive;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard};

use super::ticket::Done;
use super::{CopyError, TierUse};
use crate::hardware::{self, Tier};
use crate::locks::lock;

/// Slabs are whole pages. A tier's limit is counted in them.
pub const PAGE_BYTES: usize = hardware::PAGE_BYTES as usize;

/// `bytes` in whole pages, at least one.
pub(super) fn whole_pages(bytes: usize) -> usize {
    hardware::whole_pages(bytes as u64) as usize
}

/// Where slabs come from.
pub(super) trait Memory: Send + Sync {
    /// `bytes` of page-aligned memory, or none if the system refuses.
    fn allocate(&self, bytes: usize) -> Result<Option<NonNull<u8>>, CopyError>;

    /// Gives memory back once nothing under way uses it any more.
    ///
    /// # Safety
    ///
    /// It came from `allocate` with as many bytes, and nobody uses it but what `last_uses` tells of.
    unsafe fn release(&self, start: NonNull<u8>, bytes: usize, last_uses: LastUses);
}

/// The copies after which a slab's memory may be used for something else.
#[derive(Clone, Debug, Default)]
pub(super) struct LastUses {
    /// The copy that fills the slab.
    pub(super) written: Option<Done>,
    /// The last copy that reads it.
    pub(super) read: Option<Done>,
}

/// A slab that copies share. Its memory goes back to its pool when the last of them, and the last job that uses it, is
/// gone.
pub(super) struct MemorySlab {
    start: NonNull<u8>,
    bytes: usize,
    pub(super) last_uses: Mutex<LastUses>,
    pool: Arc<Pool>,
}

// SAFETY: a slab is memory; who may touch it is settled by tickets.
unsafe impl Send for MemorySlab {}
// SAFETY: as above.
unsafe impl Sync for MemorySlab {}

impl MemorySlab {
    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.bytes, "offset {offset} in a slab of {} bytes", self.bytes);
        // SAFETY: the offset lies inside the slab, or at its end.
        unsafe { self.start.as_ptr().add(offset) }
    }

    pub(super) fn last_uses(&self) -> MutexGuard<'_, LastUses> {
        lock(&self.last_uses)
    }
}

impl fmt::Debug for MemorySlab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemorySlab").field("start", &self.start).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Drop for MemorySlab {
    fn drop(&mut self) {
        let last_uses = std::mem::take(&mut *self.last_uses());
        self.pool.put(Vacant { start: self.start, bytes: self.bytes, last_uses });
    }
}

/// Memory that no copy is in.
#[derive(Debug)]
struct Vacant {
    start: NonNull<u8>,
    bytes: usize,
    last_uses: LastUses,
}

// SAFETY: nobody else has it.
unsafe impl Send for Vacant {}

#[derive(Debug, Default)]
struct Account {
    held_bytes: usize,
    high_water_bytes: usize,
    kept_bytes: usize,
    /// Whether room has ever been missed.
    is_tight: bool,
    /// By size, and of that by when it was put back, oldest first.
    vacant: BTreeMap<usize, VecDeque<(u64, Vacant)>>,
    puts: u64,
}

/// Slow memory is used again for what is smaller than it by at most one part in so many: where shapes change, sizes seldom
/// come back exactly.
const SLACK: usize = 8;

/// Slabs out of one kind of memory. Held and kept together never exceed the limit.
pub(super) struct Pool {
    memory: Box<dyn Memory>,
    limit_bytes: usize,
    is_slow: bool,
    account: Mutex<Account>,
}

impl Pool {
    /// A pool that keeps no more than it has once held, so that it costs at most twice what its copies needed.
    pub(super) fn new(memory: Box<dyn Memory>, limit_bytes: u64) -> Arc<Self> {
        Self::make(memory, limit_bytes, false)
    }

    /// A pool for memory that is slow to get: it keeps all that its limit allows, and uses it again for what is a little smaller.
    pub(super) fn of_slow(memory: Box<dyn Memory>, limit_bytes: u64) -> Arc<Self> {
        Self::make(memory, limit_bytes, true)
    }

    fn make(memory: Box<dyn Memory>, limit_bytes: u64, is_slow: bool) -> Arc<Self> {
        let limit_bytes = usize::try_from(limit_bytes).unwrap_or(usize::MAX);
        Arc::new(Pool { memory, limit_bytes, is_slow, account: Mutex::default() })
    }

    fn account(&self) -> MutexGuard<'_, Account> {
        lock(&self.account)
    }

    /// A slab of `bytes`, with the uses of its memory that may still be under way.
    pub(super) fn take(self: &Arc<Self>, bytes: usize) -> Result<MemorySlab, CopyError> {
        let wanted = whole_pages(bytes);
        let mut account = self.account();
        // Where room has been missed none is wasted.
        let enough = if self.is_slow && !account.is_tight { wanted + wanted / SLACK } else { wanted };
        let Vacant { start, bytes, last_uses } = match account.take_vacant(wanted..=enough) {
            Some(vacant) => vacant,
            None => {
                Vacant { start: self.allocate(&mut account, wanted)?, bytes: wanted, last_uses: LastUses::default() }
            }
        };
        account.held_bytes += bytes;
        account.high_water_bytes = account.high_water_bytes.max(account.held_bytes);
        Ok(MemorySlab { start, bytes, last_uses: Mutex::new(last_uses), pool: Arc::clone(self) })
    }

    fn allocate(&self, account: &mut Account, bytes: usize) -> Result<NonNull<u8>, CopyError> {
        let full = CopyError::Full { bytes };
        let room = self.limit_bytes.checked_sub(account.held_bytes).and_then(|room| room.checked_sub(bytes));
        account.is_tight |= room.is_none();
        self.keep_at_most(account, room.ok_or(full.clone())?);
        if let Some(start) = self.memory.allocate(bytes)? {
            return Ok(start);
        }
        // The system has no more; what is kept for later may be what it lacks.
        self.keep_at_most(account, 0);
        let start = self.memory.allocate(bytes)?;
        account.is_tight |= start.is_none();
        start.ok_or(full)
    }

    fn keep_at_most(&self, account: &mut Account, bytes: usize) {
        while account.kept_bytes > bytes {
            let oldest = account.remove_oldest().expect("what is kept is vacant");
            // SAFETY: it came from this memory, and nobody has it.
            unsafe { self.memory.release(oldest.start, oldest.bytes, oldest.last_uses) };
        }
    }

    fn put(&self, vacant: Vacant) {
        let mut account = self.account();
        account.held_bytes -= vacant.bytes;
        account.insert(vacant);
        let room = self.limit_bytes - account.held_bytes;
        let most = if self.is_slow { room } else { room.min(account.high_water_bytes) };
        self.keep_at_most(&mut account, most);
    }

    pub(super) fn usage(&self) -> TierUse {
        let account = self.account();
        TierUse {
            tier: Tier::Host,
            held_bytes: account.held_bytes as u64,
            high_water_bytes: account.high_water_bytes as u64,
            kept_bytes: account.kept_bytes as u64,
            limit_bytes: self.limit_bytes as u64,
        }
    }
}

impl Account {
    fn insert(&mut self, vacant: Vacant) {
        self.puts += 1;
        self.kept_bytes += vacant.bytes;
        self.vacant.entry(vacant.bytes).or_default().push_back((self.puts, vacant));
    }

    fn remove_oldest(&mut self) -> Option<Vacant> {
        let oldest = self.vacant.iter().min_by_key(|(_, alike)| alike.front().map(|&(put, _)| put));
        let &bytes = oldest?.0;
        self.remove(bytes, VecDeque::pop_front)
    }

    /// The smallest memory of such a size, and of that what was used last.
    fn take_vacant(&mut self, sizes: RangeInclusive<usize>) -> Option<Vacant> {
        let (&bytes, _) = self.vacant.range(sizes).next()?;
        self.remove(bytes, VecDeque::pop_back)
    }

    fn remove(
        &mut self,
        bytes: usize,
        which: impl FnOnce(&mut VecDeque<(u64, Vacant)>) -> Option<(u64, Vacant)>,
    ) -> Option<Vacant> {
        let alike = self.vacant.get_mut(&bytes)?;
        let (_, vacant) = which(alike)?;
        if alike.is_empty() {
            self.vacant.remove(&bytes);
        }
        self.kept_bytes -= bytes;
        Some(vacant)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let mut account = std::mem::take(&mut *self.account());
        self.keep_at_most(&mut account, 0);
    }
}

/// Ordinary memory, mapped from the system and given back to it, so that what is freed leaves the process.
#[derive(Debug)]
pub(super) struct Mapped;

impl Memory for Mapped {
    fn allocate(&self, bytes: usize) -> Result<Option<NonNull<u8>>, CopyError> {
        let (readable, private) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping anywhere touches no existing one.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, readable, private, -1, 0) };
        Ok(if start == libc::MAP_FAILED { None } else { NonNull::new(start.cast()) })
    }

    unsafe fn release(&self, start: NonNull<u8>, bytes: usize, _: LastUses) {
        // Jobs own the slabs that they use, so none uses it any more.
        // SAFETY: the caller says that it was mapped with as many bytes.
        let failed = unsafe { libc::munmap(start.as_ptr().cast(), bytes) };
        assert_eq!(failed, 0, "unmapping {bytes} bytes");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Counts the bytes that are out, and refuses beyond a system limit of its own.
    struct Counted {
        out_bytes: Arc<AtomicUsize>,
        system_bytes: usize,
    }

    impl Memory for Counted {
        fn allocate(&self, bytes: usize) -> Result<Option<NonNull<u8>>, CopyError> {
            if self.out_bytes.load(Ordering::Relaxed) + bytes > self.system_bytes {
                return Ok(None);
            }
            self.out_bytes.fetch_add(bytes, Ordering::Relaxed);
            Mapped.allocate(bytes)
        }

        unsafe fn release(&self, start: NonNull<u8>, bytes: usize, last_uses: LastUses) {
            self.out_bytes.fetch_sub(bytes, Ordering::Relaxed);
            // SAFETY: passed on.
            unsafe { Mapped.release(start, bytes, last_uses) }
        }
    }

    fn made(
        make: fn(Box<dyn Memory>, u64) -> Arc<Pool>,
        limit_pages: usize,
        system_pages: usize,
    ) -> (Arc<Pool>, Arc<AtomicUsize>) {
        let out_bytes = Arc::new(AtomicUsize::new(0));
        let memory = Counted { out_bytes: Arc::clone(&out_bytes), system_bytes: system_pages * PAGE_BYTES };
        (make(Box::new(memory), (limit_pages * PAGE_BYTES) as u64), out_bytes)
    }

    fn pool(limit_pages: usize, system_pages: usize) -> (Arc<Pool>, Arc<AtomicUsize>) {
        made(Pool::new, limit_pages, system_pages)
    }

    fn pages(out_bytes: &AtomicUsize) -> usize {
        out_bytes.load(Ordering::Relaxed) / PAGE_BYTES
    }

    #[test]
    fn a_slab_is_as_large_as_it_must_be_and_stands_on_a_page() {
        let (pool, out) = pool(100, 100);
        for (bytes, expected) in [(0, 1), (1, 1), (PAGE_BYTES, 1), (PAGE_BYTES + 1, 2), (33 * PAGE_BYTES, 33)] {
            let slab = pool.take(bytes).unwrap();
            assert_eq!(slab.at(0) as usize % PAGE_BYTES, 0);
            assert_eq!(slab.bytes / PAGE_BYTES, expected, "{bytes} bytes");
        }
        drop(pool);
        assert_eq!(pages(&out), 0, "nothing is left when the pool is gone");
    }

    #[test]
    fn what_is_kept_counts_towards_the_limit_and_goes_oldest_first() {
        let (pool, out) = pool(10, 100);
        let (first, second) = (pool.take(4 * PAGE_BYTES).unwrap(), pool.take(5 * PAGE_BYTES).unwrap());
        let old_memory = first.at(0);
        assert_eq!(pool.take(2 * PAGE_BYTES).unwrap_err(), CopyError::Full { bytes: 2 * PAGE_BYTES });
        drop(first);
        drop(second);
        assert_eq!((pages(&out), pool.usage().held_bytes), (9, 0));
        let again = pool.take(4 * PAGE_BYTES).unwrap();
        assert_eq!((again.at(0), pages(&out)), (old_memory, 9), "memory of the right size is used again");
        drop(again);
        // Five pages were put back first, so they go first.
        let three = pool.take(3 * PAGE_BYTES).unwrap();
        assert_eq!((pages(&out), pool.usage().kept_bytes), (7, 4 * PAGE_BYTES as u64));
        drop(three);
    }

    #[test]
    fn no_more_is_kept_than_was_once_held() {
        let (pool, out) = pool(1_000, 1_000);
        for size in 1..=40 {
            drop(pool.take(size * PAGE_BYTES).unwrap());
            assert!(pages(&out) <= size, "{} pages are kept though no more than {size} were held", pages(&out));
        }
    }

    #[test]
    fn slow_memory_is_used_again_for_what_is_a_little_smaller() {
        let (pool, out) = made(Pool::of_slow, 100, 100);
        drop((pool.take(16 * PAGE_BYTES).unwrap(), pool.take(17 * PAGE_BYTES).unwrap()));
        let (first, second) = (pool.take(15 * PAGE_BYTES).unwrap(), pool.take(16 * PAGE_BYTES).unwrap());
        assert_eq!((first.bytes, second.bytes), (16 * PAGE_BYTES, 17 * PAGE_BYTES), "the smallest first");
        assert_eq!((pages(&out), pool.usage().held_bytes), (33, 33 * PAGE_BYTES as u64));
        drop((first, second));
        let smaller = pool.take(14 * PAGE_BYTES).unwrap();
        assert_eq!((smaller.bytes, pages(&out)), (14 * PAGE_BYTES, 47), "an eighth of it is less than two pages");
        drop(smaller);
    }

    #[test]
    fn slow_memory_is_wasted_until_it_is_missed() {
        let (pool, _) = made(Pool::of_slow, 100, 100);
        let take = |pages: &[usize]| -> Result<Vec<_>, CopyError> {
            pages.iter().map(|pages| pool.take(pages * PAGE_BYTES)).collect()
        };
        drop(take(&[17, 17]).unwrap());
        assert_eq!(take(&[16, 16, 68]).unwrap_err(), CopyError::Full { bytes: 68 * PAGE_BYTES });
        let slabs = take(&[16, 16, 68]).unwrap();
        assert_eq!(pool.usage().held_bytes, 100 * PAGE_BYTES as u64);
        drop(slabs);
    }

    #[test]
    fn memory_that_the_system_lacks_is_taken_from_what_is_kept() {
        let (pool, out) = pool(100, 10);
        drop(pool.take(6 * PAGE_BYTES).unwrap());
        let slab = pool.take(7 * PAGE_BYTES).unwrap();
        assert_eq!(pages(&out), 7);
        assert_eq!(pool.take(4 * PAGE_BYTES).unwrap_err(), CopyError::Full { bytes: 4 * PAGE_BYTES });
        drop(slab);
    }

    #[test]
    fn slabs_outlive_the_engine_that_made_them() {
        let (pool, out) = pool(10, 10);
        let slab = pool.take(3 * PAGE_BYTES).unwrap();
        drop(pool);
        // SAFETY: the slab has three pages.
        unsafe { slab.at(0).write_bytes(7, 3 * PAGE_BYTES) };
        drop(slab);
        assert_eq!(pages(&out), 0);
    }
}
