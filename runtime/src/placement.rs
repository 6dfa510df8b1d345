//! Which slow tier each offload goes to: the host while its limit allows, else the file, else nowhere.
//!
//! A copy takes room from the window's start to its end, whenever its bytes move in between. So this follows from the
//! plan alone, and knows nothing of time.

use crate::hardware::{SlowTiers, Tier};
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
    /// Per tier and operator index: bytes there while that operator runs. Empty like `tier`.
    used_bytes: [Vec<u64>; 2],
    /// Bytes of swaps that no tier had room for.
    pub(crate) refused_bytes: u64,
}

impl Placement {
    pub(crate) fn new(trace: &Trace, lineage: &Lineage, tiers: SlowTiers) -> Self {
        // There are never more copies than there would be bytes if everything were kept.
        let limited = tiers.host_limit_bytes < lineage.keep_all_peak_bytes();
        let used = || if limited { vec![0; trace.operators.len() + 1] } else { Vec::new() };
        let tier = if limited { vec![Tier::Host; lineage.windows().len()] } else { Vec::new() };
        Placement { tiers, tier, used_bytes: [used(), used()], refused_bytes: 0 }
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
        let bytes_of = |window: &Window| trace.storages[window.storage.index()].bytes;
        let mut used = [0; 2];
        for index in 0..=trace.operators.len() {
            // What was let go of before this operator has left; what this operator uses leaves with it.
            self.leave(trace, lineage, index, actions, false, &mut used);
            for &id in lineage.windows_starting(index) {
                let bytes = bytes_of(lineage.window(id));
                if actions[id.index()] == Action::Swap {
                    let roomy = |tier: &Tier| used[*tier as usize] + bytes <= self.tiers.limit_bytes(*tier);
                    match TIERS.into_iter().find(roomy) {
                        Some(tier) => {
                            self.tier[id.index()] = tier;
                            used[tier as usize] += bytes;
                        }
                        None => {
                            actions[id.index()] = Action::Keep;
                            self.refused_bytes += bytes;
                        }
                    }
                }
            }
            for (tier, used) in used.iter().enumerate() {
                self.used_bytes[tier][index] = *used;
            }
            self.leave(trace, lineage, index, actions, true, &mut used);
        }
    }

    fn leave(
        &self,
        trace: &Trace,
        lineage: &Lineage,
        index: usize,
        actions: &[Action],
        used_again: bool,
        used: &mut [u64; 2],
    ) {
        for &id in lineage.windows_ending(index) {
            let window = lineage.window(id);
            if window.used_again == used_again && actions[id.index()] == Action::Swap {
                used[self.tier[id.index()] as usize] -= trace.storages[window.storage.index()].bytes;
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
            most + bytes <= self.tiers.limit_bytes(tier)
        })
    }
}
