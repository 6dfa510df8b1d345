//! Deaths of storages are told once, to whoever listens then. Who knows storages from one iteration to the next hears later of what
//! somebody else was told of meanwhile: the number of a storage that has died may be another's by then.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::shim::{self, Entry};
use crate::locks::lock;

/// What each of those who know storages has not been told of.
static MISSED: Mutex<Vec<Arc<Missed>>> = Mutex::new(Vec::new());
/// How many those are.
static LISTENERS: AtomicUsize = AtomicUsize::new(0);

#[derive(Default)]
struct Missed {
    is_any: AtomicBool,
    entries: Mutex<BTreeSet<Entry>>,
}

/// The deaths of storages, for one who knows some.
pub(crate) struct Deaths {
    missed: Arc<Missed>,
}

impl Deaths {
    pub(crate) fn new() -> Self {
        let missed = Arc::<Missed>::default();
        let mut all = lock(&MISSED);
        all.push(Arc::clone(&missed));
        LISTENERS.store(all.len(), Ordering::Release);
        Deaths { missed }
    }

    /// The numbers of storages of whose deaths others were told since the last call. They may be those of other storages by now, which
    /// are not known by them yet.
    pub(crate) fn take_missed(&self) -> Option<BTreeSet<Entry>> {
        if !self.missed.is_any.load(Ordering::Acquire) {
            return None;
        }
        let mut entries = lock(&self.missed.entries);
        self.missed.is_any.store(false, Ordering::Release);
        Some(std::mem::take(&mut entries))
    }

    /// Tells of every storage that has died since the last call, and frees its number. `freed` is room to do it in.
    pub(crate) fn tell(&self, freed: &mut Vec<Entry>, mut died: impl FnMut(Entry)) {
        self.take_missed().into_iter().flatten().for_each(&mut died);
        shim::take_freed(freed);
        for entry in freed.drain(..) {
            died(entry);
            self.forget(entry);
        }
    }

    /// The number of a storage of whose death this one was told is free.
    pub(crate) fn forget(&self, entry: Entry) {
        if LISTENERS.load(Ordering::Acquire) > 1 {
            for other in lock(&MISSED).iter().filter(|other| !Arc::ptr_eq(other, &self.missed)) {
                let mut entries = lock(&other.entries);
                entries.insert(entry);
                other.is_any.store(true, Ordering::Release);
            }
        }
        shim::forget(entry);
    }
}

impl Drop for Deaths {
    fn drop(&mut self) {
        let mut all = lock(&MISSED);
        all.retain(|other| !Arc::ptr_eq(other, &self.missed));
        LISTENERS.store(all.len(), Ordering::Release);
    }
}
