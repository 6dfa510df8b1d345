//! Which slow tier each offload goes to: the host while its limit allows, else the file, else nowhere.
//!
//! A copy takes room from the window's start to its end, whenever its bytes move in between: in whole pages, and, where it
//! may be made together with others, until the last of them goes. So this follows from the plan alone, and knows nothing
//! of time.

use crate::hardware::{PAGE_BYTES, SLAB_MEMBER_BYTES_MAX, SlowTiers, Tier};
use crate::lineage::{Lineage, Window, WindowId};
use crate::plan::Action;
use crate::trace::Trace;

const TIERS: [Tier; 2] = [Tier::Host, Tier::File];

/// Where the copies of one plan's swaps are.
#[derive(Debug)]
pub(crate) struct Placement {
    tiers: SlowTiers,
    /// Per window; empty where the host takes everything.
    tier: Vec<Tier>,
    /// Per window: bytes that its end gives back, of its own copy and of those in its slab. Empty like `tier`.
    given_back_bytes: Vec<u64>,
    /// Per tier and operator index: bytes there while that operator runs. Empty like `tier`.
    used_bytes: [Vec<u64>; 2],
    /// Bytes of swaps that no tier had room for.
    pub(crate) refused_bytes: u64,
}

impl Placement {
    pub(crate) fn new(trace: &Trace, lineage: &Lineage, tiers: SlowTiers) -> Self {
        // No copies take as much as there would be if everything were kept, and a quarter more for pages and slabs.
        let limited = tiers.host_limit_bytes < lineage.keep_all_peak_bytes() / 4 * 5;
        let used = || if limited { vec![0; trace.operators.len() + 1] } else { Vec::new() };
        let windows = if limited { lineage.windows().len() } else { 0 };
        Placement {
            tiers,
            tier: vec![Tier::Host; windows],
            given_back_bytes: vec![0; windows],
            used_bytes: [used(), used()],
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
            // Per tier: of those in one slab, the one that ends last.
            let mut last_of_slab: [Option<WindowId>; 2] = [None; 2];
            for &id in lineage.windows_starting(index) {
                if actions[id.index()] != Action::Swap {
                    continue;
                }
                let bytes = trace.storages[lineage.window(id).storage.index()].bytes;
                let taken = in_pages(bytes);
                let roomy = |tier: &Tier| used[*tier as usize] + taken <= self.tiers.limit_bytes(*tier);
                let Some(tier) = TIERS.into_iter().find(roomy) else {
                    actions[id.index()] = Action::Keep;
                    self.refused_bytes += bytes;
                    continue;
                };
                self.tier[id.index()] = tier;
                self.given_back_bytes[id.index()] = taken;
                used[tier as usize] += taken;
                if bytes <= SLAB_MEMBER_BYTES_MAX {
                    self.join(lineage, id, &mut last_of_slab[tier as usize]);
                }
            }
            for (tier, used) in used.iter().enumerate() {
                self.used_bytes[tier][index] = *used;
            }
            self.leave(lineage, index, actions, true, &mut used);
        }
    }

    /// Has the bytes of a slab given back by the one of its copies that ends last.
    fn join(&mut self, lineage: &Lineage, joining: WindowId, last: &mut Option<WindowId>) {
        let ends = |id: WindowId| (lineage.window(id).end, lineage.window(id).used_again);
        let Some(before) = last.replace(joining) else { return };
        let (earlier, later) = if ends(before) > ends(joining) { (joining, before) } else { (before, joining) };
        self.given_back_bytes[later.index()] += std::mem::take(&mut self.given_back_bytes[earlier.index()]);
        *last = Some(later);
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

    /// The tier that `window` would go to beside all that is placed; none where no tier has room all along.
    pub(crate) fn room_for(&self, window: &Window, bytes: u64) -> Option<Tier> {
        if self.tier.is_empty() {
            return Some(Tier::Host);
        }
        let span = window.start as usize..(window.end as usize + 1).min(self.used_bytes[0].len());
        TIERS.into_iter().find(|&tier| {
            let most = self.used_bytes[tier as usize][span.clone()].iter().copied().max().unwrap_or(0);
            most + in_pages(bytes) <= self.tiers.limit_bytes(tier)
        })
    }
}

/// What a copy of so many bytes takes by itself.
fn in_pages(bytes: u64) -> u64 {
    bytes.next_multiple_of(PAGE_BYTES)
}
