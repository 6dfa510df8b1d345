//! Why storages cannot be evicted, or only be swapped: what `plimsoll inspect` shows of a trace.
//!
//! It reads what the lineage has decided and decides nothing itself.

use std::collections::BTreeMap;
use std::fmt;

use crate::lineage::{EVICTION_FLOOR_BYTES, Lineage, Window};
use crate::trace::{AccessMode, OperatorId, Trace};

/// What may be done with a storage while it is idle, and what stands in the way of more.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Obstacle {
    /// Nothing: it may be swapped and recomputed.
    None,
    /// It may only be swapped: it held these bytes before the iteration started.
    Initial,
    /// It may only be swapped: the operator that made these bytes cannot be rerun.
    NotReplayable {
        /// The operator's name.
        operator: String,
        /// Why not.
        why: String,
    },
    /// It may only be swapped: an operator wrote these bytes as a side effect that a rerun must not repeat.
    SideEffect {
        /// The operator's name.
        operator: String,
    },
    /// It may only be swapped: what a rerun would start from is overwritten or freed too early.
    RootGone,
    /// It may only be swapped: it was made from nothing and not used yet, so the program may still fill it in.
    MayBeFilledIn,
    /// It stays: see [`Storage::locked`](crate::trace::Storage::locked).
    Locked(String),
    /// It stays: it is smaller than the least storage that is evicted.
    BelowFloor,
}

/// How many idle storages an obstacle stands before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// Windows; storages, where they are never evicted.
    pub count: u64,
    /// Bytes of their storages.
    pub bytes: u64,
}

/// Every window of the trace by what stands in its way, and every storage that has no window because it must stay.
pub fn obstacles(trace: &Trace, lineage: &Lineage) -> BTreeMap<Obstacle, Share> {
    let mut shares: BTreeMap<Obstacle, Share> = BTreeMap::new();
    let mut add = |obstacle: Obstacle, bytes: u64| {
        let share = shares.entry(obstacle).or_default();
        share.count += 1;
        share.bytes += bytes;
    };
    let unmade_by = makers(trace, lineage);
    for window in lineage.windows() {
        let bytes = trace.storages[window.storage.index()].bytes;
        add(obstacle(trace, lineage, &unmade_by, window), bytes);
    }
    for storage in &trace.storages {
        if let Some(why) = &storage.locked {
            add(Obstacle::Locked(why.clone()), storage.bytes);
        } else if storage.bytes < EVICTION_FLOOR_BYTES {
            add(Obstacle::BelowFloor, storage.bytes);
        }
    }
    shares
}

fn obstacle(trace: &Trace, lineage: &Lineage, makers: &[Option<OperatorId>], window: &Window) -> Obstacle {
    if window.recomputable {
        return Obstacle::None;
    }
    let version = lineage.version(window.version);
    if let Some(producer) = version.producer {
        let in_time = version.rebuildable_until.is_some_and(|until| until as usize >= window.last_operator());
        debug_assert!(!in_time || trace.operators[producer.index()].accesses.is_empty());
        return if in_time { Obstacle::MayBeFilledIn } else { Obstacle::RootGone };
    }
    let Some(maker) = makers[window.version.index()] else { return Obstacle::Initial };
    let operator = trace.operator_name(maker).to_owned();
    let facts = &trace.operators[maker.index()];
    let on_the_side = |mode| mode == AccessMode::SideEffect;
    if facts.accesses.iter().any(|access| access.storage == window.storage && on_the_side(access.mode)) {
        return Obstacle::SideEffect { operator };
    }
    Obstacle::NotReplayable { operator, why: facts.not_replayable.clone().unwrap_or_default() }
}

/// The operator that each version comes from, whether it can be rerun or not; none where the iteration found it.
fn makers(trace: &Trace, lineage: &Lineage) -> Vec<Option<OperatorId>> {
    let mut makers = vec![None; lineage.versions().len()];
    for index in 0..trace.operators.len() {
        for version in lineage.writes(index) {
            makers[version.index()] = Some(OperatorId(index as u32));
        }
    }
    makers
}

impl Obstacle {
    /// What may be done: `swap or recompute`, `swap` or `keep`.
    pub fn actions(&self) -> &'static str {
        match self {
            Obstacle::None => "swap or recompute",
            Obstacle::Locked(_) | Obstacle::BelowFloor => "keep",
            _ => "swap",
        }
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Obstacle::None => write!(to, "–"),
            Obstacle::Initial => write!(to, "made before the iteration"),
            Obstacle::NotReplayable { operator, why } => write!(to, "made by {operator}: {why}"),
            Obstacle::SideEffect { operator } => write!(to, "written by {operator} as a side effect"),
            Obstacle::RootGone => write!(to, "a root that it depends on is overwritten or freed before"),
            Obstacle::MayBeFilledIn => write!(to, "may yet be filled in past the dispatcher"),
            Obstacle::Locked(why) => write!(to, "locked: {why}"),
            Obstacle::BelowFloor => write!(to, "smaller than {EVICTION_FLOOR_BYTES} bytes"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Access, Class, Operator, Phase, Storage, StorageId};

    /// Storages: 0 a parameter that operator 3 overwrites, 1 made from 0, 2 made by an operator that cannot be rerun,
    /// 3 small, 4 locked.
    fn trace() -> Trace {
        let storage =
            |bytes, locked: Option<&str>| Storage { bytes, class: Class::Temporary, locked: locked.map(str::to_owned) };
        let operator = |accesses: &[(u32, AccessMode)], creates: &[u32], why: Option<&str>| Operator {
            name: 0,
            phase: Phase::Forward,
            cost_ns: 1,
            spread_ns: 0,
            gap_ns: 0,
            workspace_bytes: 0,
            accesses: accesses.iter().map(|&(id, mode)| Access { storage: StorageId(id), mode }).collect(),
            creates: creates.iter().map(|&id| StorageId(id)).collect(),
            frees: Vec::new(),
            not_replayable: why.map(str::to_owned),
        };
        let (read, write) = (AccessMode::Read, AccessMode::Write);
        Trace {
            workload: String::new(),
            family: String::new(),
            device: String::new(),
            recorded_iterations: 1,
            unseen_bytes: 0,
            tail_ns: 0,
            makespan_ns: 0,
            peak_bytes: 0,
            names: vec!["aten::op".into()],
            storages: vec![
                storage(8192, None),
                storage(8192, None),
                storage(8192, None),
                storage(8, None),
                storage(8192, Some("held elsewhere")),
            ],
            initial_storages: 1,
            operators: vec![
                operator(&[(0, read)], &[1], None),
                operator(&[(0, read)], &[2], Some("says so")),
                operator(&[(1, read)], &[3, 4], None),
                operator(&[(0, write)], &[], None),
                operator(&[(1, read), (2, read)], &[], None),
            ],
            carried: Vec::new(),
        }
    }

    #[test]
    fn every_window_has_its_reason() {
        let trace = trace();
        assert_eq!(trace.check(), Ok(()));
        let lineage = Lineage::of(&trace);
        let shares = obstacles(&trace, &lineage);
        let windows: u64 =
            shares.iter().filter(|(obstacle, _)| obstacle.actions() != "keep").map(|(_, share)| share.count).sum();
        assert_eq!(windows, lineage.windows().len() as u64);
        let count = |obstacle: &Obstacle| shares.get(obstacle).map_or(0, |share| share.count);
        assert_eq!(count(&Obstacle::BelowFloor), 1);
        assert_eq!(count(&Obstacle::Locked("held elsewhere".into())), 1);
        let unreplayable = Obstacle::NotReplayable { operator: "aten::op".into(), why: "says so".into() };
        assert!(count(&unreplayable) >= 1, "{shares:?}");
        assert!(count(&Obstacle::RootGone) >= 1, "{shares:?}");
        assert!(count(&Obstacle::None) >= 1, "{shares:?}");
    }
}
