//! What comes before a program and after it, and what is away between them.

use crate::trace::StorageId;

/// What follows an iteration, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Follows {
    /// Code that nobody listens to: it finds everything resident.
    Unheard,
    /// The iteration's next part.
    Part,
    /// The loop's next iteration, all of which is listened to.
    Iteration,
}

/// What a program may leave away when it ends, and what comes next finds so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Leaves {
    /// What it does not use: it is a part of an iteration that goes on.
    Unused,
    /// Whatever is there all the time: it is the last part of an iteration that another one follows.
    Lasting,
}

/// What may still be leaving when a program begins. It depends on plans, which depend on it, and may never settle: so it grows at
/// once, and shrinks ever more rarely; and only then is its order another one. What a plan takes for leaving, and is gone, is no harm.
#[derive(Debug, Default)]
pub(super) struct Leaving {
    /// In the order in which they leave.
    storages: Vec<StorageId>,
    /// How often it was less in a row, and how often that has to be.
    less: u32,
    patience: u32,
}

impl Leaving {
    /// They, in that order.
    pub(super) fn storages(&self) -> &[StorageId] {
        &self.storages
    }

    /// These were, in the order in which they left.
    pub(super) fn note(&mut self, now: Vec<StorageId>) {
        let is_new = |storage: &StorageId| !self.storages.contains(storage);
        let is_less = !now.iter().any(is_new) && now.len() < self.storages.len();
        self.less = if is_less { self.less + 1 } else { 0 };
        if now.iter().any(is_new) {
            // What has gone already went first.
            let gone = self.storages.iter().copied().filter(|storage| !now.contains(storage));
            self.storages = gone.chain(now.iter().copied()).collect();
        }
        if self.less > self.patience {
            self.patience = 2 * (self.patience + 1);
            (self.storages, self.less) = (now, 0);
        }
    }
}
