//! Which slow tier each offload goes to: the host while its limit allows, else the file, else nowhere.
//!
//! A copy takes room from the window's start to its end, whenever its bytes move in between: in whole pages, and, where it
//! may be made together with others, until the last of them goes. So this follows from the plan alone, and knows nothing
//! of time. What is away when an iteration begins was copied in the one before, which is taken to have gone the same way;
//! what was copied there together with it, and has come back since, is not counted any more.

use std::collections::HashMap;

use crate::hardware::{SLAB_MEMBER_BYTES_MAX, SlowTiers, Tier, whole_pages};
use crate::lineage::{Lineage, Window, WindowId};
use crate::plan::Action;
use crate::profile::Profile;
use crate::trace::Trace;

const TIERS: [Tier; 2] = [Tier::Host, Tier::File];

/// Where the copies of one plan's swaps are.
#[derive(Debug)]
pub(crate) struct Placement {
    /// None where the host takes everything.
    limited: Option<Limited>,
    /// Bytes of swaps that no tier had room for.
    pub(crate) refused_bytes: u64,
}

/// What is decided where tiers may be full.
#[derive(Debug)]
struct Limited {
    tiers: SlowTiers,
    /// Per window.
    tier: Vec<Tier>,
    /// Per window: bytes that its end gives back, of its own copy and of those in its slab.
    given_back_bytes: Vec<u64>,
    /// Per tier and operator index: bytes there while that operator runs.
    used_bytes: [Profile; 2],
    slabs: Slabs,
}

/// Which copies may be in one slab.
#[derive(Debug)]
struct Slabs {
    /// Per window: the group of small ones that are copied at once. None where it is copied alone.
    group: Vec<Option<usize>>,
    /// Per group and tier: of those placed so far, the window that ends last.
    last: Vec<[Option<WindowId>; 2]>,
}

impl Slabs {
    /// What is copied before the operator at hand.
    const NOW: usize = 0;
    /// What is leaving when the iteration begins.
    const LEAVING: usize = 1;

    fn of(trace: &Trace, lineage: &Lineage) -> Self {
        let staying = lineage.windows_ending(trace.operators.len()).iter().filter(|id| lineage.stays_away(**id));
        let staying = staying.map(|id| lineage.window(*id));
        let away_from: HashMap<_, _> = staying.map(|window| (window.storage, window.start)).collect();
        // What is away when it begins was copied together where it began to stay away in the iteration before.
        let mut groups: HashMap<u32, usize> = HashMap::new();
        let group_of = |(id, window): (WindowId, &Window)| {
            if trace.storages[window.storage.index()].bytes > SLAB_MEMBER_BYTES_MAX {
                return None;
            }
            if lineage.begins_away(id) {
                let next = groups.len() + 2;
                return away_from.get(&window.storage).map(|&from| *groups.entry(from).or_insert(next));
            }
            Some(if lineage.begins_leaving(id) { Slabs::LEAVING } else { Slabs::NOW })
        };
        let group = (0..).map(WindowId).zip(lineage.windows()).map(group_of).collect();
        Slabs { group, last: vec![[None; 2]; groups.len() + 2] }
    }
}

impl Placement {
    pub(crate) fn new(trace: &Trace, lineage: &Lineage, tiers: SlowTiers) -> Self {
        let mut limited = None;
        if tiers.host_limit_bytes < u64::MAX {
            // No plan takes more than the one that swaps everything.
            let mut all = Limited::new(trace, lineage, SlowTiers { host_limit_bytes: u64::MAX, ..tiers });
            all.decide(trace, lineage, &mut vec![Action::Swap; lineage.windows().len()]);
            let host = &all.used_bytes[Tier::Host as usize];
            let exceeds = host.first_above(0..host.values().len(), bound(tiers.host_limit_bytes, 0)).is_some();
            limited = exceeds.then_some(Limited { tiers, ..all });
        }
        Placement { limited, refused_bytes: 0 }
    }

    /// Whether the host takes everything.
    pub(crate) fn is_unlimited(&self) -> bool {
        self.limited.is_none()
    }

    /// Places every swap of `actions`, in order of their starts. Those that find no room become `Keep`.
    pub(crate) fn decide(&mut self, trace: &Trace, lineage: &Lineage, actions: &mut [Action]) {
        self.refused_bytes = self.limited.as_mut().map_or(0, |limited| limited.decide(trace, lineage, actions));
    }

    /// The tier of a window that is swapped.
    #[inline]
    pub(crate) fn tier(&self, window: WindowId) -> Tier {
        self.limited.as_ref().map_or(Tier::Host, |limited| limited.tier[window.index()])
    }

    /// The tier that `window` would go to beside all that is placed; none where no tier has room all along, as long as it does not make
    /// a slab last longer.
    pub(crate) fn room_for(&self, window: &Window, bytes: u64) -> Option<Tier> {
        self.limited.as_ref().map_or(Some(Tier::Host), |limited| limited.room_for(window, bytes))
    }
}

impl Limited {
    fn new(trace: &Trace, lineage: &Lineage, tiers: SlowTiers) -> Self {
        let windows = lineage.windows().len();
        Limited {
            tiers,
            tier: vec![Tier::Host; windows],
            given_back_bytes: vec![0; windows],
            used_bytes: TIERS.map(|_| Profile::new(vec![0; trace.operators.len() + 1])),
            slabs: Slabs::of(trace, lineage),
        }
    }

    /// Says how many bytes are refused.
    fn decide(&mut self, trace: &Trace, lineage: &Lineage, actions: &mut [Action]) -> u64 {
        let mut refused_bytes = 0;
        let mut used = [0; 2];
        self.slabs.last.fill([None; 2]);
        for index in 0..=trace.operators.len() {
            // What was let go of before this operator has left; what this operator uses leaves with it.
            self.leave(lineage, index, actions, false, &mut used);
            self.slabs.last[Slabs::NOW] = [None; 2];
            let starting = lineage.windows_starting(index);
            // What is away already is there before all else.
            let is_away = |id: &&WindowId| index == 0 && lineage.begins_away(**id);
            let others = starting.iter().filter(|id| !is_away(id));
            for &id in starting.iter().filter(is_away).chain(others) {
                let bytes = trace.storages[lineage.window(id).storage.index()].bytes;
                if actions[id.index()] == Action::Swap && !self.place(lineage, id, bytes, &mut used) {
                    actions[id.index()] = Action::Keep;
                    refused_bytes += bytes;
                }
            }
            for (profile, used) in self.used_bytes.iter_mut().zip(used) {
                profile.put(index, used as i64);
            }
            self.leave(lineage, index, actions, true, &mut used);
        }
        refused_bytes
    }

    /// Whether there is room for a copy from now on. What a slab takes is given back by the last of it that ends.
    fn place(&mut self, lineage: &Lineage, id: WindowId, bytes: u64, used: &mut [u64; 2]) -> bool {
        let taken = whole_pages(bytes);
        let roomy = |tier: &Tier| used[*tier as usize] + taken <= self.tiers.limit_bytes(*tier);
        let Some(tier) = TIERS.into_iter().find(roomy) else { return false };
        self.tier[id.index()] = tier;
        self.given_back_bytes[id.index()] = taken;
        used[tier as usize] += taken;
        let Some(group) = self.slabs.group[id.index()] else { return true };
        let last = &mut self.slabs.last[group][tier as usize];
        if let Some(before) = last.replace(id) {
            let ends = |id: WindowId| (lineage.window(id).end, lineage.window(id).used_again);
            let (earlier, later) = if ends(before) > ends(id) { (id, before) } else { (before, id) };
            self.given_back_bytes[later.index()] += std::mem::take(&mut self.given_back_bytes[earlier.index()]);
            *last = Some(later);
        }
        true
    }

    fn leave(&self, lineage: &Lineage, index: usize, actions: &[Action], used_again: bool, used: &mut [u64; 2]) {
        for &id in lineage.windows_ending(index) {
            if lineage.window(id).used_again == used_again && actions[id.index()] == Action::Swap {
                used[self.tier[id.index()] as usize] -= self.given_back_bytes[id.index()];
            }
        }
    }

    fn room_for(&self, window: &Window, bytes: u64) -> Option<Tier> {
        let indices = self.used_bytes[0].values().len();
        let span = window.start as usize..(window.end as usize + 1).min(indices);
        TIERS.into_iter().find(|&tier| {
            let bound = bound(self.tiers.limit_bytes(tier), whole_pages(bytes));
            self.used_bytes[tier as usize].first_above(span.clone(), bound).is_none()
        })
    }
}

/// What may be in a tier of that limit beside a copy that takes so many bytes.
fn bound(limit_bytes: u64, taken_bytes: u64) -> i64 {
    limit_bytes.min(i64::MAX as u64) as i64 - taken_bytes as i64
}
