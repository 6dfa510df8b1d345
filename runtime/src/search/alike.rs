//! Windows that are alike in every layer, or at every step of a sequence. A deep net says the same thing many times over: where
//! one activation is worth recomputing, the same one of most layers is, and how many layers' the link can take is a matter of
//! the whole. So a few hundred runs of the timeline tell what thousands of decisions, window by window, would.

use std::collections::HashMap;

use crate::lineage::WindowId;
use crate::plan::{Action, Plan};
use crate::sweep::Problem;
use crate::timeline::Timeline;
use crate::trace::{Class, Phase};

/// Stretches of consecutive layers that are told apart.
const STRETCHES: usize = 4;

/// Windows by what they are, each group in order of time.
pub(super) struct Alike {
    groups: Vec<Vec<WindowId>>,
    /// Per window: its group, and its place there; none of those that are in no group.
    places: Vec<Option<(u32, u32)>>,
}

impl Alike {
    /// Groups `windows`, which are in order of time.
    pub(super) fn of(problem: &Problem<'_>, windows: &[WindowId]) -> Self {
        let mut known = HashMap::new();
        let mut alike = Alike { groups: Vec::new(), places: vec![None; problem.lineage.windows().len()] };
        for &id in windows {
            let group = *known.entry(Likeness::of(problem, id)).or_insert(alike.groups.len());
            if group == alike.groups.len() {
                alike.groups.push(Vec::new());
            }
            alike.places[id.index()] = Some((group as u32, alike.groups[group].len() as u32));
            alike.groups[group].push(id);
        }
        alike
    }

    /// The windows that are like `id`, and its place among them.
    pub(super) fn group(&self, id: WindowId) -> (&[WindowId], usize) {
        let (group, place) = self.places[id.index()].expect("a window that was grouped");
        (&self.groups[group as usize], place as usize)
    }

    /// Every way to evict a stretch of a group.
    fn offers(&self, problem: &Problem<'_>) -> Vec<Offer<'_>> {
        let mut offers = Vec::new();
        for windows in &self.groups {
            let stretches = windows.chunks(windows.len().div_ceil(STRETCHES));
            for action in [Action::Swap, Action::Recompute] {
                if problem.allows(windows[0], action) {
                    offers.extend(stretches.clone().map(|windows| Offer { windows, action, ns_per_byte: 0.0 }));
                }
            }
        }
        offers
    }
}

/// A plan that evicts together what is alike, in stretches of layers: whatever adds least to the makespan per byte by which the
/// peak falls, until the budget is held or nothing helps. With it, the runs of the timeline that it took.
pub(super) fn evict_alike(problem: &Problem<'_>, alike: &Alike) -> (Plan, u64) {
    let mut timeline = Timeline::new(problem.trace, problem.lineage, problem.tiers);
    let mut evaluations = 0;
    let mut predict = |plan: &Plan| {
        evaluations += 1;
        timeline.predict(plan, problem.budget_bytes)
    };
    let mut plan = Plan::keep_all(problem.lineage.windows().len());
    let mut now = predict(&plan);
    let mut offers = alike.offers(problem);
    while now.over_budget_bytes > 0 {
        // A price hardly falls: what was dear before is asked again only where nothing cheaper is left.
        offers.sort_by(|a, b| a.ns_per_byte.total_cmp(&b.ns_per_byte));
        let (mut best, mut least_ns_per_byte) = (None, f64::INFINITY);
        for (position, offer) in offers.iter_mut().enumerate() {
            if best.is_some() && offer.ns_per_byte >= least_ns_per_byte {
                break;
            }
            offer.make(&mut plan, offer.action);
            let after = predict(&plan);
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

/// A stretch of windows that are alike, and how they might be evicted.
struct Offer<'a> {
    windows: &'a [WindowId],
    action: Action,
    /// When it was last asked; at first nothing, so that all are asked.
    ns_per_byte: f64,
}

impl Offer<'_> {
    fn make(&self, plan: &mut Plan, action: Action) {
        self.windows.iter().for_each(|&id| plan.set(id, action));
    }
}

/// What windows of different layers have in common: the storage, and the operators around both ends and around the one that
/// made what it holds.
#[derive(PartialEq, Eq, Hash)]
struct Likeness {
    bytes: u64,
    class: Class,
    recomputable: bool,
    used_again: bool,
    operators: [Option<(u32, Phase)>; 6],
}

impl Likeness {
    fn of(problem: &Problem<'_>, id: WindowId) -> Self {
        let (trace, lineage) = (problem.trace, problem.lineage);
        let window = lineage.window(id);
        let storage = &trace.storages[window.storage.index()];
        let producer = lineage.versions()[window.version.index()].producer.map(|producer| producer.index());
        let (start, end) = (window.start as usize, window.end as usize);
        let before = |operator: usize| operator.checked_sub(1);
        let operators = [producer, producer.and_then(before), before(start), Some(start), before(end), Some(end)];
        Likeness {
            bytes: storage.bytes,
            class: storage.class,
            recomputable: window.recomputable,
            used_again: window.used_again,
            operators: operators.map(|index| {
                let operator = trace.operators.get(index?)?;
                Some((operator.name, operator.phase))
            }),
        }
    }
}
