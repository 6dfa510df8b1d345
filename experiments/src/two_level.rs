//! What torchtitan's `auto_perf_maxing` decides (pull request 4636; `experiments/graph_trainer/auto_sac_offload_solver.py` as of
//! 163bdff): keep, recompute and offload under an absolute peak, at two levels.
//!
//! A linear program gives each layer the shares of its activations' bytes that are kept, recomputed and offloaded: whatever
//! layers below keep, and the whole of the layer at work, with what comes back for the next one, fit within the budget at
//! every layer, forwards and backwards; what a layer offloads is copied within its own forward time, and comes back within
//! its backward time; and as little as can be is recomputed. Then each layer's share is filled: what takes longest to
//! recompute for its bytes is offloaded, what takes least is recomputed, and so is what would be kept beyond the share.
//!
//! Deviations: traces know no layers, so stretches of as many activations as each other are taken for them, as many as makes
//! the fastest plan of 1, 2, 4, …; what else is resident at a layer is read off the trace, and so are its own times, where
//! torchtitan reckons with means; what a layer hands on to later ones, which torchtitan keeps in any case, is decided like the rest; the
//! host's memory has no limit; and what the result lacks for the budget, which torchtitan finds out at run time, is evicted by the
//! rule of `cheapest`.

use std::ops::Range;
use std::time::{Duration, Instant};

use plimsoll_runtime::baselines::{Cheapest, KeepAll, forward_to_backward};
use plimsoll_runtime::decode::completed;
use plimsoll_runtime::lineage::WindowId;
use plimsoll_runtime::trace::{Operator, StorageId};
use plimsoll_runtime::{Action, Decided, Plan, Planned, Problem, plan};

use crate::highs::{Answer, Column, Highs, HighsError, Model, Solver};

/// The name on the command line and in reports.
pub const TWO_LEVEL: &str = "auto-perf-maxing";

/// The most layers that are tried.
const LAYERS_MAX: usize = 128;
/// How much smaller than what is still to be recomputed an activation may be that is taken to cover it.
const NEARLY: f64 = 0.95;

/// Plans `problem`; keep-all is the answer where no shares hold the budget.
pub fn decide_at_two_levels(highs: &Highs, problem: Problem<'_>) -> Result<Decided, HighsError> {
    let started = Instant::now();
    let mut best = plan(problem, &mut KeepAll);
    let activations = activations(&problem);
    let beside = bytes_beside(&problem, &activations);
    let most = if best.fits() { 0 } else { activations.len().min(LAYERS_MAX) };
    let counts = std::iter::successors(Some(1), |count| Some(2 * count));
    for count in counts.take_while(|&count| count <= most) {
        let layers = layers(&problem, &activations, count);
        let Some(shares) = shares(highs, &problem, &layers, &beside)? else { continue };
        let mut plan = Plan::keep_all(problem.lineage.windows().len());
        layers.iter().zip(shares).for_each(|(layer, share)| layer.fill(share, &mut plan));
        let planned = completed(problem, plan, &mut Cheapest);
        if planned.is_better_than(&best) {
            best = planned;
        }
    }
    Ok(Decided { planned: Planned { decide_ns: started.elapsed().as_nanos() as u64, ..best }, by: TWO_LEVEL })
}

/// What the forward pass leaves for the backward pass.
#[derive(Clone, Copy, Debug)]
struct Activation {
    window: WindowId,
    storage: StorageId,
    bytes: f64,
    /// The operator that made it, and its time.
    producer: usize,
    recompute_ns: f64,
    /// The operator that uses it next.
    used: usize,
    may_swap: bool,
    may_recompute: bool,
}

impl Activation {
    fn may(&self, action: Action) -> bool {
        match action {
            Action::Keep => true,
            Action::Swap => self.may_swap,
            Action::Recompute => self.may_recompute,
        }
    }
}

/// All of them, in order of production.
fn activations(problem: &Problem<'_>) -> Vec<Activation> {
    let (trace, lineage) = (problem.trace, problem.lineage);
    let activation = |id: WindowId| {
        let window = lineage.window(id);
        let producer = lineage.version(window.version).producer?;
        Some(Activation {
            window: id,
            storage: window.storage,
            bytes: trace.storages[window.storage.index()].bytes as f64,
            producer: producer.index(),
            recompute_ns: trace.operators[producer.index()].cost_ns as f64,
            used: window.end as usize,
            may_swap: problem.allows(id, Action::Swap),
            may_recompute: problem.allows(id, Action::Recompute),
        })
    };
    let mut activations: Vec<Activation> = forward_to_backward(problem).into_iter().filter_map(activation).collect();
    activations.sort_by_key(|activation| (activation.producer, activation.window));
    activations
}

/// Activations that the forward pass makes one after another, and the stretches of operators in which it makes them and the
/// backward pass begins to use them.
struct Layer<'a> {
    activations: &'a [Activation],
    forward: Range<usize>,
    backward: Range<usize>,
}

/// So many layers, the first of the forward pass first; fewer where there are few activations.
fn layers<'a>(problem: &Problem<'_>, activations: &'a [Activation], count: usize) -> Vec<Layer<'a>> {
    let mut made_from = 0;
    let of_stretch = |activations: &'a [Activation]| {
        let made_until = activations.iter().map(|activation| activation.producer + 1).max().unwrap_or(made_from);
        let forward = made_from..made_until;
        made_from = made_until;
        Layer { activations, forward, backward: 0..0 }
    };
    let mut layers: Vec<Layer<'a>> = activations.chunks(activations.len().div_ceil(count)).map(of_stretch).collect();
    // The backward pass begins with the last one, once all are made, and ends with the iteration.
    let mut began = made_from;
    for layer in layers.iter_mut().rev() {
        began = layer.activations.iter().map(|activation| activation.used).min().unwrap_or(began).max(began);
        layer.backward = began..problem.trace.operators.len();
    }
    for below in 1..layers.len() {
        layers[below].backward.end = layers[below - 1].backward.start;
    }
    layers
}

/// What is kept and what is offloaded of a layer's bytes, as shares of them. The rest is recomputed.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Share {
    keep: f64,
    offload: f64,
}

impl Layer<'_> {
    fn bytes(&self) -> f64 {
        self.bytes_of(|_| true)
    }

    fn bytes_of(&self, which: impl Fn(&Activation) -> bool) -> f64 {
        self.activations.iter().filter(|activation| which(activation)).map(|activation| activation.bytes).sum()
    }

    /// Sets in `plan` what is offloaded and recomputed.
    fn fill(&self, share: Share, plan: &mut Plan) {
        let mut open: Vec<&Activation> = self.activations.iter().collect();
        let per_byte = |activation: &Activation| activation.recompute_ns / activation.bytes;
        open.sort_by(|one, other| per_byte(other).total_cmp(&per_byte(one)));
        let bytes = self.bytes();
        let offloaded = take(&mut open, share.offload * bytes, Action::Swap, plan);
        open.reverse();
        let recomputed = take(&mut open, (1.0 - share.keep - share.offload) * bytes, Action::Recompute, plan);
        let beyond = bytes - offloaded - recomputed - share.keep * bytes;
        let left = beyond - take(&mut open, beyond, Action::Recompute, plan);
        let covers = |activation: &&&Activation| activation.may_recompute && activation.bytes >= NEARLY * left;
        let smallest = open.iter().filter(covers).min_by(|one, other| one.bytes.total_cmp(&other.bytes));
        if let Some(activation) = smallest.filter(|_| left > 0.0) {
            plan.set(activation.window, Action::Recompute);
        }
    }
}

/// Takes out of `open`, in its order, what `action` may be taken for and fits into so many bytes; returns those that it has.
fn take(open: &mut Vec<&Activation>, bytes: f64, action: Action, plan: &mut Plan) -> f64 {
    let mut taken = 0.0;
    open.retain(|activation| {
        let fits = activation.may(action) && taken + activation.bytes <= bytes;
        if fits {
            plan.set(activation.window, action);
            taken += activation.bytes;
        }
        !fits
    });
    taken
}

/// The columns of a layer's shares.
struct Columns {
    keep: Column,
    offload: Column,
}

/// The linear program of the shares, in units of the budget and of keep-all's makespan.
struct Program<'a> {
    problem: &'a Problem<'a>,
    layers: &'a [Layer<'a>],
    /// Per operator: bytes that are resident beside the layers' activations.
    beside: &'a [f64],
    columns: Vec<Columns>,
    model: Model,
}

/// The shares of each layer that recompute least; none where none hold the budget.
fn shares(
    highs: &Highs,
    problem: &Problem<'_>,
    layers: &[Layer<'_>],
    beside: &[f64],
) -> Result<Option<Vec<Share>>, HighsError> {
    let mut program = Program { problem, layers, beside, columns: Vec::new(), model: Model::default() };
    program.add_layers();
    program.add_peaks();
    let answer = Solver::new(highs, &program.model, false)?.solve(Duration::MAX, &|_| true)?;
    let Answer::Bounded { solution: Some(solution), .. } = answer else { return Ok(None) };
    let value = |column: Column| solution[column.index()];
    let share = |own: &Columns| Share { keep: value(own.keep), offload: value(own.offload) };
    Ok(Some(program.columns.iter().map(share).collect()))
}

impl Program<'_> {
    /// How long these operators take, in makespans.
    fn time(&self, operators: &Range<usize>) -> f64 {
        let lineage = self.problem.lineage;
        self.of_makespan(lineage.start_ns(operators.end) - lineage.start_ns(operators.start))
    }

    fn of_makespan(&self, ns: u64) -> f64 {
        ns as f64 / self.problem.lineage.keep_all_makespan_ns().max(1) as f64
    }

    /// Every layer's three shares, what recomputing costs, and how much can be offloaded and recomputed. The last layer's
    /// activations are wanted at once.
    fn add_layers(&mut self) {
        let tiers = self.problem.tiers;
        for (index, layer) in self.layers.iter().enumerate() {
            let forward_time = self.time(&layer.forward);
            let [keep, recompute, offload] = [0.0, forward_time, 0.0].map(|cost| self.model.share(cost));
            self.model.at_least(1.0, [keep, recompute, offload].map(|column| (column, 1.0)));
            let is_last = index + 1 == self.layers.len();
            let swappable = if is_last { 0.0 } else { layer.bytes_of(|activation| activation.may_swap) };
            let recomputable = layer.bytes_of(|activation| activation.may_recompute);
            for (column, bytes) in [(offload, swappable), (recompute, recomputable)] {
                self.model.at_least(-bytes / layer.bytes(), [(column, -1.0)]);
            }
            let copies_ns = |copy_ns: &dyn Fn(u64) -> u64| {
                layer.activations.iter().map(|activation| copy_ns(activation.bytes as u64)).sum()
            };
            let offloads = copies_ns(&|bytes| tiers.least_offload_ns(bytes));
            let prefetches = copies_ns(&|bytes| tiers.least_prefetch_ns(bytes));
            for (copies_ns, beside) in [(offloads, &layer.forward), (prefetches, &layer.backward)] {
                self.model.at_least(-self.time(beside), [(offload, -self.of_makespan(copies_ns))]);
            }
            self.columns.push(Columns { keep, offload });
        }
    }

    /// At each layer, forwards and backwards: what those below keep, all of its own, what the one before it offloads, which
    /// is still leaving or is back already, and whatever else is resident fit within the budget; and so does all that is kept
    /// between the two passes.
    fn add_peaks(&mut self) {
        let most = |operators: Range<usize>| self.beside[operators].iter().copied().fold(0.0, f64::max);
        let mut rows: Vec<(Vec<(Column, f64)>, f64)> = Vec::new();
        let mut kept: Vec<(Column, f64)> = Vec::new();
        let mut moving = None;
        for (layer, own) in self.layers.iter().zip(&self.columns) {
            for operators in [&layer.forward, &layer.backward] {
                let terms = kept.iter().copied().chain(moving).collect();
                rows.push((terms, layer.bytes() + most(operators.clone())));
            }
            kept.push((own.keep, layer.bytes()));
            moving = Some((own.offload, layer.bytes()));
        }
        if let Some(last) = self.layers.last() {
            rows.push((kept, most(last.forward.end..last.backward.start)));
        }
        let budget = self.problem.budget_bytes.max(1) as f64;
        for (terms, bytes) in rows {
            let negated = terms.into_iter().map(|(column, bytes)| (column, -bytes / budget));
            self.model.at_least(bytes / budget - 1.0, negated);
        }
    }
}

/// Bytes at each operator in keep-all, but for those of the activations.
fn bytes_beside(problem: &Problem<'_>, activations: &[Activation]) -> Vec<f64> {
    let trace = problem.trace;
    let (mut made, mut bytes) = (vec![0.0; trace.operators.len()], vec![0.0; trace.storages.len()]);
    for activation in activations {
        made[activation.producer] += activation.bytes;
        bytes[activation.storage.index()] = activation.bytes;
    }
    let mut alive = 0.0;
    let beside = |((operator, made), all): ((&Operator, f64), &u64)| {
        alive += made;
        let beside = *all as f64 - alive;
        alive -= operator.frees.iter().map(|storage| bytes[storage.index()]).sum::<f64>();
        beside
    };
    trace.operators.iter().zip(made).zip(problem.lineage.keep_all_bytes()).map(beside).collect()
}

#[cfg(test)]
mod tests {
    use plimsoll_runtime::{ActionSet, Lineage, Link, Trace};

    use super::*;
    use crate::support::draw::Draw;
    use crate::support::script::{BYTES, Script};

    const COUNT: u32 = 8;

    /// A chain of activations, each of 1 ms and a unit of bytes, and a backward pass that takes as long for each.
    fn chain() -> Trace {
        let mut script = Script::new(1);
        for storage in 1..=COUNT {
            script.run(1_000_000).reads(storage - 1).creates(storage);
        }
        script.run(1_000_000).backward();
        for storage in (1..=COUNT).rev() {
            script.run(1_000_000).backward().reads(storage).frees(storage);
        }
        script.trace()
    }

    fn link(bytes_per_s: f64) -> Link {
        Link::symmetric(bytes_per_s, 0)
    }

    /// Swapped and recomputed storages of the plan that `decided` is.
    fn evicted(trace: &Trace, decided: &Decided) -> [usize; 2] {
        assert!(decided.planned.fits(), "{:?} of {}", decided.planned.prediction, trace.workload);
        let count = |action| decided.planned.plan.actions().iter().filter(|&&other| other == action).count();
        [count(Action::Swap), count(Action::Recompute)]
    }

    #[test]
    fn what_the_link_takes_in_time_is_offloaded_and_the_rest_recomputed() {
        let (trace, highs) = (chain(), Highs::find().unwrap());
        let lineage = Lineage::of(&trace);
        let decide = |bytes_per_s: f64, missing: u64, actions: ActionSet| {
            let budget_bytes = lineage.keep_all_peak_bytes() - missing * BYTES;
            let tiers = link(bytes_per_s).into();
            decide_at_two_levels(&highs, Problem { trace: &trace, lineage: &lineage, tiers, budget_bytes, actions })
                .unwrap()
        };
        // A unit takes a microsecond, or a second.
        let (fast, slow) = (1e6 * BYTES as f64, BYTES as f64);
        let [swapped, recomputed] = evicted(&trace, &decide(fast, 4, ActionSet::ALL));
        assert!(swapped >= 4 && recomputed == 0, "{swapped} swapped, {recomputed} recomputed");
        let [swapped, recomputed] = evicted(&trace, &decide(slow, 4, ActionSet::ALL));
        assert!(swapped == 0 && recomputed >= 4, "{swapped} swapped, {recomputed} recomputed");
        assert_eq!(evicted(&trace, &decide(fast, 0, ActionSet::ALL)), [0, 0]);
        assert!(!decide(fast, COUNT.into(), ActionSet::ALL).planned.fits(), "one activation has to be there");
        assert_eq!(decide(slow, 4, ActionSet::RECOMPUTE).by, TWO_LEVEL);
    }

    /// A chain of as many activations as are drawn, of sizes and times that are; where it is not `plain`, with a second forward
    /// pass after the backward pass, and backwards through that.
    fn random_chain(draw: &mut Draw, plain: bool) -> Trace {
        let mut script = Script::new(1);
        let mut made = 0;
        for _ in 0..if plain { 1 } else { 2 } {
            let (first, last) = (made + 1, made + draw.within(2, 40) as u32);
            for storage in first..=last {
                let bytes = draw.within(1, 16) * BYTES / 4;
                script.run(draw.within(1, 50) * 10_000).reads(storage - 1).creates_bytes(storage, bytes);
            }
            // The second pass reads the first one's last.
            for storage in (first..=last).rev().filter(|&storage| plain || storage != last) {
                script.run(draw.within(1, 99) * 10_000).backward().reads(storage).frees(storage);
            }
            made = last;
        }
        script.trace()
    }

    #[test]
    fn random_chains_are_planned_lawfully_and_most_budgets_held() {
        let highs = Highs::find().unwrap();
        let (mut plain_held, mut plain_asked) = (0, 0);
        for seed in 0..300 {
            let draw = &mut Draw::new(seed);
            let plain = draw.pick(&[true, true, false]);
            let trace = random_chain(draw, plain);
            let lineage = Lineage::of(&trace);
            let actions = draw.pick(&[ActionSet::ALL, ActionSet::RECOMPUTE, ActionSet::SWAP]);
            let budget_bytes = lineage.keep_all_peak_bytes() * draw.pick(&[90, 75, 60]) / 100;
            let tiers = link(draw.pick(&[1e9, 1e10, 1e11])).into();
            let problem = Problem { trace: &trace, lineage: &lineage, tiers, budget_bytes, actions };
            let planned = decide_at_two_levels(&highs, problem).unwrap().planned;
            assert!(planned.plan.actions().iter().all(|&action| actions.allows(action)), "seed {seed}");
            assert!(!planned.fits() || planned.prediction.peak_bytes <= budget_bytes, "seed {seed}");
            if plain && actions == ActionSet::ALL && !problem.is_hopeless() {
                plain_asked += 1;
                plain_held += usize::from(planned.fits());
            }
        }
        assert!(plain_asked > 40 && 4 * plain_held > 3 * plain_asked, "{plain_held} of {plain_asked} held");
    }

    #[test]
    fn a_layer_offloads_what_is_dear_to_recompute_and_recomputes_what_is_cheap() {
        let activation = |(window, (bytes, recompute_ns)): (u32, (f64, f64))| Activation {
            window: WindowId(window),
            storage: StorageId(window),
            bytes,
            producer: 0,
            recompute_ns,
            used: 1,
            may_swap: true,
            may_recompute: window != 3,
        };
        // Nanoseconds for each byte: 5, 2, 3, 1, 4.
        let facts = [(2.0, 10.0), (2.0, 4.0), (2.0, 6.0), (2.0, 2.0), (2.0, 8.0)];
        let activations: Vec<Activation> = (0..).zip(facts).map(activation).collect();
        let layer = Layer { activations: &activations, forward: 0..1, backward: 1..2 };
        let filled = |keep: f64, offload: f64| {
            let mut plan = Plan::keep_all(activations.len());
            layer.fill(Share { keep, offload }, &mut plan);
            plan.actions().to_vec()
        };
        let (keep, swap, recompute) = (Action::Keep, Action::Swap, Action::Recompute);
        assert_eq!(filled(1.0, 0.0), [keep; 5]);
        assert_eq!(filled(0.6, 0.2), [swap, recompute, keep, keep, keep], "3 may not be recomputed");
        assert_eq!(filled(0.2, 0.4), [swap, recompute, recompute, keep, swap]);
        assert_eq!(filled(0.5, 0.2), [swap, recompute, recompute, keep, keep], "half of one is all of it");
    }
}
