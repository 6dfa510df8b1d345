//! Windows that are alike in every layer, or at every step of a sequence. A deep net says the same thing many times over: where
//! one activation is worth recomputing, the same one of most layers is, and how many layers' the link can take is a matter of
//! the whole. So a few hundred runs of the timeline tell what thousands of decisions, window by window, would.
//!
//! An iteration that accumulates gradients says all of that again in every pass. Its peaks are equally high, so that nothing
//! helps that is not done in all of them.

use std::collections::HashMap;

use crate::lineage::WindowId;
use crate::plan::{Action, Plan};
use crate::sweep::Problem;
use crate::timeline::Timeline;
use crate::trace::{Class, Phase, Trace};

/// Stretches of consecutive layers that are told apart.
const STRETCHES: usize = 4;

/// Windows that are alike: of each pass of a forward and a backward, in order of time.
type Group = Vec<Vec<WindowId>>;

/// Windows by what they are.
pub(super) struct Alike {
    groups: Vec<Group>,
    /// Per window: where it is; none of those that are in no group.
    places: Vec<Option<Place>>,
}

/// Where a window is.
#[derive(Clone, Copy)]
struct Place {
    group: u32,
    pass: u32,
    /// Among those of its pass.
    position: u32,
}

impl Alike {
    /// Groups `windows`, which are in order of time.
    pub(super) fn of(problem: &Problem<'_>, windows: &[WindowId]) -> Self {
        let passes = passes(problem.trace);
        let mut alike = Alike { groups: Vec::new(), places: vec![None; problem.lineage.windows().len()] };
        // Of this pass, and of all by what is known of those of a pass.
        let (mut of_pass, mut of_all) = (HashMap::new(), HashMap::new());
        let (mut kinds, mut last_pass) = (HashMap::new(), 0);
        for &id in windows {
            let pass = passes[problem.lineage.window(id).start as usize];
            if std::mem::replace(&mut last_pass, pass) != pass {
                of_pass.clear();
                kinds.clear();
            }
            let (kind, likeness) = (Kind::of(problem, id), likeness(problem, id));
            let group = *of_pass.entry((kind, likeness)).or_insert_with(|| {
                // The same of another pass is the one that came as the same one of its kind.
                let which = kinds.entry(kind).and_modify(|which| *which += 1).or_insert(0u32);
                *of_all.entry((kind, *which)).or_insert_with(|| {
                    alike.groups.push(Group::new());
                    alike.groups.len() - 1
                })
            });
            let of_passes = &mut alike.groups[group];
            of_passes.resize(of_passes.len().max(pass as usize + 1), Vec::new());
            let windows = &mut of_passes[pass as usize];
            alike.places[id.index()] = Some(Place { group: group as u32, pass, position: windows.len() as u32 });
            windows.push(id);
        }
        alike
    }

    /// The windows that are like `id`, by passes, its own pass, and its place there.
    pub(super) fn group(&self, id: WindowId) -> (&[Vec<WindowId>], usize, usize) {
        let Place { group, pass, position } = self.places[id.index()].expect("a window that was grouped");
        (&self.groups[group as usize], pass as usize, position as usize)
    }

    /// Every way to evict a stretch of a group, as far as `plan` keeps it.
    fn offers(&self, problem: &Problem<'_>, plan: &Plan) -> Vec<Offer> {
        let mut offers = Vec::new();
        for group in &self.groups {
            for mut stretch in stretches(group) {
                stretch.retain(|&id| plan.action(id) == Action::Keep);
                if stretch.is_empty() {
                    continue;
                }
                for action in Action::EVICTIONS {
                    if problem.allows(stretch[0], action) {
                        offers.push(Offer { windows: stretch.clone(), action, ns_per_byte: 0.0 });
                    }
                }
            }
        }
        offers
    }
}

/// What `plan` evicts and, together, what is alike, in stretches of layers: whatever adds least to the makespan per byte by which
/// the peak falls, until the budget is held, nothing helps, or `is_over` says so of the runs of the timeline so far. With it, how
/// many those were.
pub(super) fn evict_alike(
    problem: &Problem<'_>,
    alike: &Alike,
    mut plan: Plan,
    is_over: impl Fn(u64) -> bool,
) -> (Plan, u64) {
    let mut timeline = Timeline::new(problem.trace, problem.lineage, problem.tiers);
    let mut predict = |plan: &Plan| timeline.predict(plan, problem.budget_bytes);
    let (mut now, mut evaluations) = (predict(&plan), 1);
    let mut offers = alike.offers(problem, &plan);
    while !now.fits() && !is_over(evaluations) {
        // A price hardly falls: what was dear before is asked again only where nothing cheaper is left.
        offers.sort_by(|a, b| a.ns_per_byte.total_cmp(&b.ns_per_byte));
        let (mut best, mut least_ns_per_byte) = (None, f64::INFINITY);
        // The peak falls by what would be away there alone.
        let helps = |(_, offer): &(usize, &mut Offer)| offer.spans(problem, now.peak_operator);
        for (position, offer) in offers.iter_mut().enumerate().filter(helps) {
            if is_over(evaluations) || best.is_some() && offer.ns_per_byte >= least_ns_per_byte {
                break;
            }
            offer.make(&mut plan, offer.action);
            let after = predict(&plan);
            evaluations += 1;
            offer.make(&mut plan, Action::Keep);
            let relief_bytes = now.over_budget_bytes.saturating_sub(after.over_budget_bytes);
            let delay_ns = after.makespan_ns.saturating_sub(now.makespan_ns) + 1;
            offer.ns_per_byte = if relief_bytes > 0 { delay_ns as f64 / relief_bytes as f64 } else { f64::INFINITY };
            if offer.ns_per_byte < least_ns_per_byte {
                (best, least_ns_per_byte) = (Some((position, after)), offer.ns_per_byte);
            }
        }
        let Some((best, after)) = best else { break };
        let taken = offers.swap_remove(best);
        taken.make(&mut plan, taken.action);
        now = after;
        offers.retain(|offer| offer.windows[0] != taken.windows[0]);
    }
    (plan, evaluations)
}

/// A group by stretches of layers, each in every pass.
fn stretches(group: &Group) -> impl Iterator<Item = Vec<WindowId>> {
    let stretch = |which: usize| {
        let of_passes = group.iter().filter_map(|windows| {
            let length = windows.len().div_ceil(STRETCHES).max(1);
            windows.chunks(length).nth(which)
        });
        of_passes.flatten().copied().collect::<Vec<_>>()
    };
    (0..STRETCHES).map(stretch).filter(|windows| !windows.is_empty())
}

/// By operator: how many backward passes have ended before it.
fn passes(trace: &Trace) -> Vec<u32> {
    let phases = trace.operators.iter().map(|operator| operator.phase);
    let mut last = Phase::Forward;
    let mut pass = 0;
    phases
        .map(|phase| {
            pass += u32::from(last == Phase::Backward && phase != Phase::Backward);
            last = phase;
            pass
        })
        .collect()
}

/// A stretch of windows that are alike, and how they might be evicted.
struct Offer {
    windows: Vec<WindowId>,
    action: Action,
    /// When it was last asked; at first nothing, so that all are asked.
    ns_per_byte: f64,
}

impl Offer {
    fn make(&self, plan: &mut Plan, action: Action) {
        self.windows.iter().for_each(|&id| plan.set(id, action));
    }

    /// Whether any of it might be away while that operator runs.
    fn spans(&self, problem: &Problem<'_>, operator: usize) -> bool {
        self.windows.iter().any(|&id| problem.lineage.window(id).spans(operator))
    }
}

/// An operator, as far as windows are alike: its name, and what it is for.
type Around = Option<(u32, Phase)>;

/// What windows of different passes have in common: the storage, and the operators at both ends and the one that made what it
/// holds. Those beside them may differ: the first pass makes gradients, to which others add.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Kind {
    bytes: u64,
    class: Class,
    recomputable: bool,
    used_again: bool,
    operators: [Around; 3],
}

/// What those of different layers have in common beside that: the operators before these.
type Likeness = [Around; 3];

impl Kind {
    fn of(problem: &Problem<'_>, id: WindowId) -> Self {
        let window = problem.lineage.window(id);
        let storage = &problem.trace.storages[window.storage.index()];
        Kind {
            bytes: storage.bytes,
            class: storage.class,
            recomputable: window.recomputable,
            used_again: window.used_again,
            operators: ends(problem, id).map(|end| around(problem, end)),
        }
    }
}

fn likeness(problem: &Problem<'_>, id: WindowId) -> Likeness {
    ends(problem, id).map(|end| around(problem, end.and_then(|end| end.checked_sub(1))))
}

/// The operator that made what a window holds, and those at its ends.
fn ends(problem: &Problem<'_>, id: WindowId) -> [Option<usize>; 3] {
    let window = problem.lineage.window(id);
    let producer = problem.lineage.version(window.version).producer;
    [producer.map(|producer| producer.index()), Some(window.start as usize), Some(window.end as usize)]
}

fn around(problem: &Problem<'_>, operator: Option<usize>) -> Around {
    let operator = problem.trace.operators.get(operator?)?;
    Some((operator.name, operator.phase))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::Link;
    use crate::lineage::Lineage;
    use crate::plan::ActionSet;
    use crate::trace::{Access, AccessMode, Operator, Storage, StorageId};

    const LAYERS: u32 = 8;

    /// An iteration of so many passes: each saves an activation in every layer, and its backward pass makes a gradient of the
    /// layer, or adds to it.
    fn accumulating(passes: u32) -> Trace {
        let names = ["input", "forward", "backward", "add"].map(str::to_owned).to_vec();
        let initial = LAYERS + 1;
        let activation = |pass: u32, layer: u32| StorageId(initial + pass * (LAYERS + 1) + layer);
        let mut operators = Vec::new();
        let mut run =
            |name, phase, accesses: &[(StorageId, AccessMode)], creates: &[StorageId], frees: &[StorageId]| {
                operators.push(Operator {
                    name,
                    phase,
                    cost_ns: 1_000,
                    spread_ns: 0,
                    gap_ns: 0,
                    workspace_bytes: 0,
                    accesses: accesses.iter().map(|&(storage, mode)| Access { storage, mode }).collect(),
                    creates: creates.to_vec(),
                    frees: frees.to_vec(),
                    not_replayable: None,
                });
            };
        for pass in 0..passes {
            let input = StorageId(0);
            run(0, Phase::Forward, &[(input, AccessMode::Read)], &[activation(pass, 0)], &[]);
            for layer in 1..=LAYERS {
                let reads = [(activation(pass, layer - 1), AccessMode::Read)];
                run(1, Phase::Forward, &reads, &[activation(pass, layer)], &[]);
            }
            for layer in (0..=LAYERS).rev() {
                let saved = activation(pass, layer);
                run(2, Phase::Backward, &[(saved, AccessMode::Read)], &[], &[saved]);
                if layer > 0 && pass > 0 {
                    run(3, Phase::Backward, &[(StorageId(layer), AccessMode::Write)], &[], &[]);
                }
            }
        }
        let storage = |bytes| Storage { bytes, class: Class::Activation, locked: None };
        let trace = Trace {
            workload: String::new(),
            family: String::new(),
            device: String::new(),
            recorded_iterations: 2,
            unseen_bytes: 0,
            tail_ns: 0,
            makespan_ns: 0,
            peak_bytes: 0,
            names,
            storages: (0..initial + passes * (LAYERS + 1))
                .map(|id| storage(if id < initial { 1 } else { 1 << 20 }))
                .collect(),
            initial_storages: initial,
            operators,
            carried: Vec::new(),
        };
        trace.check().unwrap();
        trace
    }

    #[test]
    fn what_is_alike_is_evicted_in_every_pass() {
        let link = Link::symmetric(1e12, 0);
        let evaluations = [1, 4].map(|passes| {
            let trace = accumulating(passes);
            let lineage = Lineage::of(&trace);
            let budget_bytes = lineage.keep_all_peak_bytes() / 2;
            let problem =
                Problem { trace: &trace, lineage: &lineage, tiers: link.into(), budget_bytes, actions: ActionSet::ALL };
            let windows: Vec<WindowId> = (0..lineage.windows().len() as u32).map(WindowId).collect();
            let alike = Alike::of(&problem, &windows);
            let nothing = Plan::keep_all(windows.len());
            let (plan, evaluations) = evict_alike(&problem, &alike, nothing, |_| false);
            let prediction = Timeline::new(&trace, &lineage, problem.tiers).predict(&plan, budget_bytes);
            assert_eq!(prediction.over_budget_bytes, 0, "{passes} passes");
            // An activation's one window: the same layers in every pass.
            let evicted = windows.iter().filter(|&&id| plan.action(id) != Action::Keep);
            let mut evicted: Vec<u32> = evicted.map(|&id| lineage.window(id).storage.0 - LAYERS - 1).collect();
            evicted.sort_unstable();
            let of_first: Vec<u32> = evicted.iter().copied().filter(|storage| *storage <= LAYERS).collect();
            let of_all: Vec<u32> =
                (0..passes).flat_map(|pass| of_first.iter().map(move |layer| pass * (LAYERS + 1) + layer)).collect();
            assert_eq!(evicted, of_all, "{passes} passes");
            evaluations
        });
        assert!(evaluations[1] < 2 * evaluations[0], "what is done in all passes is tried at once: {evaluations:?}");
    }

    #[test]
    fn it_ends_where_it_is_told_to() {
        let trace = accumulating(1);
        let lineage = Lineage::of(&trace);
        let (tiers, budget_bytes) = (Link::symmetric(1e12, 0).into(), lineage.keep_all_peak_bytes() / 2);
        let problem = Problem { trace: &trace, lineage: &lineage, tiers, budget_bytes, actions: ActionSet::ALL };
        let windows: Vec<WindowId> = (0..lineage.windows().len() as u32).map(WindowId).collect();
        let alike = Alike::of(&problem, &windows);
        let nothing = || Plan::keep_all(windows.len());
        let ((complete, whole), (begun, some)) = (
            evict_alike(&problem, &alike, nothing(), |_| false),
            evict_alike(&problem, &alike, nothing(), |evaluations| evaluations == 3),
        );
        assert!(some == 3 && whole > 3, "{some} of {whole}");
        let evicted = |plan: &Plan| windows.iter().filter(|&&id| plan.action(id) != Action::Keep).count();
        assert!(evicted(&begun) > 0, "the best of what was asked is taken");
        // And goes on from there.
        let (from_there, _) = evict_alike(&problem, &alike, begun.clone(), |_| false);
        let stays = |&&id: &&WindowId| begun.action(id) != Action::Keep && from_there.action(id) == begun.action(id);
        assert_eq!(windows.iter().filter(stays).count(), evicted(&begun), "what is evicted stays so");
        let over_bytes = |plan| Timeline::new(&trace, &lineage, tiers).predict(plan, budget_bytes).over_budget_bytes;
        assert!(over_bytes(&begun) > 0 && over_bytes(&from_there) == 0);
        assert_eq!(evicted(&from_there), evicted(&complete));
    }
}
