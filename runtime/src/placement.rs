//! Which slow tier each offload goes to: the host while its limit allows, else the file, else nowhere.
//!
//! A copy takes room from the window's start to its end, whenever its bytes move in between: in whole pages, and, where it
//! may be made together with others, until the last of them goes. So this follows from the plan alone, and knows nothing
//! of time. What is away when an iteration begins was copied in the one before, which is taken to have gone the same way.

use std::collections::HashMap;

use crate::hardware::{PAGE_BYTES, SLAB_MEMBER_BYTES_MAX, SlowTiers, Tier};
use crate::lineage::{Lineage, Window, WindowId};
use crate::plan::Action;
use crate::profile::Profile;
use crate::trace::{StorageId, Trace};

const TIERS: [Tier; 2] = [Tier::Host, Tier::File];

/// Which of the copies that are in a tier when an operator runs may have been made together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Made {
    /// Before this operator.
    Now,
    /// When the iteration before ended, and had no time to finish them.
    Leaving,
    /// Before that operator of the iteration before.
    Earlier(u32),
}

/// Where the copies of one plan's swaps are.
#[derive(Debug)]
pub(crate) struct Placement {
    tiers: SlowTiers,
    /// Per window; empty where the host takes everything.
    tier: Vec<Tier>,
    /// Per window: bytes that its end gives back, of its own copy and of those in its slab. Empty like `tier`.
    given_back_bytes: Vec<u64>,
    /// Per tier and operator index: bytes there while that operator runs. Empty like `tier`.
    used_bytes: [Profile; 2],
    /// Of what is away when the iteration ends: the operator from which on it stays away. Empty like `tier`.
    stays_from: HashMap<StorageId, u32>,
    /// Bytes of swaps that no tier had room for.
    pub(crate) refused_bytes: u64,
}

impl Placement {
    pub(crate) fn new(trace: &Trace, lineage: &Lineage, tiers: SlowTiers) -> Self {
        if tiers.host_limit_bytes == u64::MAX {
            return Self::over(0, 0, tiers);
        }
        let (windows, indices) = (lineage.windows().len(), trace.operators.len() + 1);
        let mut all = Self::over(windows, indices, SlowTiers { host_limit_bytes: u64::MAX, ..tiers });
        let last = lineage.windows_ending(trace.operators.len()).iter().filter(|id| lineage.stays_away(**id));
        let last = last.map(|id| lineage.window(*id));
        all.stays_from = last.map(|window| (window.storage, window.start)).collect();
        all.decide(trace, lineage, &mut vec![Action::Swap; windows]);
        // No plan takes more than the one that swaps everything.
        match all.used_bytes[Tier::Host as usize].first_above(0..indices, bound(tiers.host_limit_bytes, 0)) {
            Some(_) => Placement { tiers, ..all },
            None => Self::over(0, 0, tiers),
        }
    }

    fn over(windows: usize, indices: usize, tiers: SlowTiers) -> Self {
        Placement {
            tiers,
            tier: vec![Tier::Host; windows],
            given_back_bytes: vec![0; windows],
            used_bytes: [(); 2].map(|()| Profile::new(vec![0; indices])),
            stays_from: HashMap::new(),
            refused_bytes: 0,
        }
    }

    /// Whether the host takes everything.
    pub(crate) fn is_unlimited(&self) -> bool {
        self.tier.is_empty()
    }

    /// Places every swap of `actions`, in order of their starts. Those that find no room become `Keep`.
    pub(crate) fn decide(&mut self, trace: &Trace, lineage: &Lineage, actions: &mut [Action]) {
        self.refused_bytes = 0;
        if self.tier.is_empty() {
            return;
        }
        let mut used = [0; 2];
        for index in 0..=trace.operators.len() {
            // What was let go of before this operator has left; what this operator uses leaves with it.
            self.leave(lineage, index, actions, false, &mut used);
            let mut slabs: Vec<(Made, Tier, WindowId)> = Vec::new();
            let starting = lineage.windows_starting(index);
            // What is away already is there before all else.
            let is_away = |id: &&WindowId| index == 0 && lineage.begins_away(**id);
            let others = starting.iter().filter(|id| !is_away(id));
            for &id in starting.iter().filter(is_away).chain(others) {
                if actions[id.index()] == Action::Swap && !self.place(trace, lineage, id, &mut used, &mut slabs) {
                    actions[id.index()] = Action::Keep;
                    self.refused_bytes += trace.storages[lineage.window(id).storage.index()].bytes;
                }
            }
            for (profile, used) in self.used_bytes.iter_mut().zip(used) {
                profile.put(index, used as i64);
            }
            self.leave(lineage, index, actions, true, &mut used);
        }
    }

    /// Whether there is room for a copy from now on. Where it may be in a slab with others, the last of them that ends gives back what
    /// all of them take.
    fn place(
        &mut self,
        trace: &Trace,
        lineage: &Lineage,
        id: WindowId,
        used: &mut [u64; 2],
        slabs: &mut Vec<(Made, Tier, WindowId)>,
    ) -> bool {
        let window = lineage.window(id);
        let bytes = trace.storages[window.storage.index()].bytes;
        let taken = in_pages(bytes);
        let roomy = |tier: &Tier| used[*tier as usize] + taken <= self.tiers.limit_bytes(*tier);
        let Some(tier) = TIERS.into_iter().find(roomy) else { return false };
        self.tier[id.index()] = tier;
        self.given_back_bytes[id.index()] = taken;
        used[tier as usize] += taken;
        let made = match lineage.begins_away(id) {
            true => self.stays_from.get(&window.storage).map(|&operator| Made::Earlier(operator)),
            false if lineage.begins_leaving(id) => Some(Made::Leaving),
            false => Some(Made::Now),
        };
        let Some(made) = made.filter(|_| bytes <= SLAB_MEMBER_BYTES_MAX) else { return true };
        let Some((.., last)) = slabs.iter_mut().find(|(other, there, _)| (*other, *there) == (made, tier)) else {
            slabs.push((made, tier, id));
            return true;
        };
        let ends = |id: WindowId| (lineage.window(id).end, lineage.window(id).used_again);
        let (earlier, later) = if ends(*last) > ends(id) { (id, *last) } else { (*last, id) };
        self.given_back_bytes[later.index()] += std::mem::take(&mut self.given_back_bytes[earlier.index()]);
        *last = later;
        true
    }

    fn leave(&self, lineage: &Lineage, index: usize, actions: &[Action], used_again: bool, used: &mut [u64; 2]) {
        for &id in lineage.windows_ending(index) {
            if lineage.window(id).used_again == used_again && actions[id.index()] == Action::Swap {
                used[self.tier[id.index()] as usize] -= self.given_back_bytes[id.index()];
            }
        }
    }

    /// The tier of a window that is swapped.
    #[inline]
    pub(crate) fn tier(&self, window: WindowId) -> Tier {
        if self.tier.is_empty() { Tier::Host } else { self.tier[window.index()] }
    }

    /// The tier that `window` would go to beside all that is placed; none where no tier has room all along, as long as it does not make
    /// a slab last longer.
    pub(crate) fn room_for(&self, window: &Window, bytes: u64) -> Option<Tier> {
        if self.tier.is_empty() {
            return Some(Tier::Host);
        }
        let indices = self.used_bytes[0].values().len();
        let span = window.start as usize..(window.end as usize + 1).min(indices);
        TIERS.into_iter().find(|&tier| {
            let bound = bound(self.tiers.limit_bytes(tier), in_pages(bytes));
            self.used_bytes[tier as usize].first_above(span.clone(), bound).is_none()
        })
    }
}

/// What may be in a tier of that limit beside a copy that takes so many bytes.
fn bound(limit_bytes: u64, taken_bytes: u64) -> i64 {
    limit_bytes.min(i64::MAX as u64) as i64 - taken_bytes as i64
}

/// What a copy of so many bytes takes by itself.
fn in_pages(bytes: u64) -> u64 {
    bytes.next_multiple_of(PAGE_BYTES)
}
