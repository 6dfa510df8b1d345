//! Results as JSON: what was predicted beside what was measured.

use plimsoll_env::real::{Measurement, Untouched};
use plimsoll_runtime::allocators::{Footprint, Model, Requests};
use plimsoll_runtime::plan::ActionCounts;
use plimsoll_runtime::tails::peak_without_dead_tails_bytes;
use plimsoll_runtime::timetable::{Activity, Timetable};
use plimsoll_runtime::{Decided, Lineage, Plan, Prediction, Problem, Timeline, Trace};
use serde::Serialize;

use crate::exact::Proof;

/// Makespan and peak of an iteration.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Cost {
    /// Elapsed time.
    pub makespan_ns: u64,
    /// Most device bytes.
    pub peak_bytes: u64,
    /// Makespan over keep-all makespan, less one. Measured beside untouched iterations, both are lower quartiles; where there are none,
    /// the median iteration that was recorded stands for them.
    pub overhead: f64,
    /// What it took beyond the keep-all makespan. None where a GPU was measured, whose waits and reruns the host does not see.
    pub delay: Option<Delay>,
}

/// What an iteration takes beyond the keep-all makespan, by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Delay {
    /// Waits for copies.
    pub stall_ns: u64,
    /// Reruns.
    pub rerun_ns: u64,
    /// The rest. In a prediction it is what copies take from compute; in a measurement also what moving bytes costs
    /// beside it, and what the machine happened to do.
    pub other_ns: i64,
}

impl Cost {
    /// The cost of an iteration beside `keep_all_ns`, and what of it are waits for copies and reruns, where that is known.
    fn of(makespan_ns: u64, peak_bytes: u64, keep_all_ns: u64, causes: Option<(u64, u64)>) -> Self {
        let delay = causes.map(|(stall_ns, rerun_ns)| {
            let other_ns = makespan_ns as i64 - keep_all_ns as i64 - stall_ns as i64 - rerun_ns as i64;
            Delay { stall_ns, rerun_ns, other_ns }
        });
        Cost { makespan_ns, peak_bytes, overhead: makespan_ns as f64 / keep_all_ns as f64 - 1.0, delay }
    }
}

/// One policy on one workload at one budget.
#[derive(Clone, Debug, Serialize)]
pub struct PointResult {
    /// Name of the workload.
    pub workload: String,
    /// Name of the policy, or path of its file.
    pub policy: String,
    /// Who made the plan, as [`Decided::by`] says.
    pub decided_by: String,
    /// Bandwidth that the plan was made for, in bytes per second from the device.
    pub link_bytes_per_s: f64,
    /// Whether the link is emulated by pacing host copies.
    pub link_emulated: bool,
    /// The budget.
    pub budget_bytes: u64,
    /// Peak with nothing evicted, measured when the loop was recorded.
    pub keep_all_peak_bytes: u64,
    /// How much lower that would be if the program held nothing after its last use: a plan gives such dead tails up for
    /// nothing, so they are no saving of its own.
    pub dead_tail_bytes: u64,
    /// Whether the plan is predicted to hold the budget.
    pub feasible: bool,
    /// What the timeline says.
    pub predicted: Cost,
    /// What the loop did, where it was run.
    pub measured: Option<Cost>,
    /// What the same schedule is predicted to cost with operators as fast as they were while it was measured, where
    /// untouched iterations were run in between.
    pub retimed: Option<Cost>,
    /// Makespan of every planned iteration over the mean of the untouched ones beside it.
    pub ratios: Vec<f64>,
    /// Whether every iteration that was measured held the budget.
    pub held: Option<bool>,
    /// Evictions chosen at pressure points.
    pub decisions: usize,
    /// Time that planning took.
    pub decide_ns: u64,
    /// What the exact reference proved, where it decided.
    #[serde(flatten)]
    pub proof: Option<Proof>,
    /// Windows by action.
    pub actions: ActionCounts,
    /// Losses of the iterations run for this point.
    pub losses: Vec<f64>,
    /// Whether losses, and final parameters where they could be compared, equal those of the untouched loop.
    pub identical: Option<bool>,
    /// Operators rerun in one iteration.
    pub reruns: Option<u64>,
    /// What the plan makes each model of an allocator reserve.
    pub allocators: Vec<Reserved>,
    /// Bytes offloaded in one iteration.
    pub offloaded_bytes: Option<u64>,
    /// Most bytes that the slow tier has held.
    pub slow_tier_high_water_bytes: Option<u64>,
}

/// How much of the keep-all peak is held after its last use.
pub fn dead_tail_bytes(trace: &Trace, lineage: &Lineage) -> u64 {
    lineage.keep_all_peak_bytes() - peak_without_dead_tails_bytes(trace)
}

/// What a plan makes one model of an allocator reserve.
#[derive(Clone, Debug, Serialize)]
pub struct Reserved {
    /// Name of the model.
    pub allocator: &'static str,
    /// Bytes.
    #[serde(flatten)]
    pub footprint: Footprint,
    /// 1 - largest use / reserved.
    pub fragmentation: f64,
    /// Whether the plan runs where no more than the budget may be reserved.
    pub within_budget: bool,
}

/// What `plan` makes every model of an allocator reserve.
fn reserved(problem: &Problem<'_>, plan: &Plan) -> Vec<Reserved> {
    let mut timeline = Timeline::new(problem.trace, problem.lineage, problem.tiers);
    let (schedule, _) = timeline.schedule(plan, problem.budget_bytes);
    let requests = Requests::of(problem.trace, problem.lineage, &schedule);
    let serve = |model: Model| {
        let footprint = model.serve(&requests, None).expect("it may reserve as much as it takes");
        Reserved {
            allocator: model.name(),
            footprint,
            fragmentation: footprint.fragmentation(),
            within_budget: footprint.reserved_bytes <= problem.budget_bytes
                || model.serve(&requests, Some(problem.budget_bytes)).is_ok(),
        }
    };
    Model::ALL.map(serve).to_vec()
}

impl PointResult {
    /// The result of planning alone.
    pub fn planned(policy: &str, problem: &Problem<'_>, link_emulated: bool, decided: &Decided) -> Self {
        let planned = &decided.planned;
        PointResult {
            workload: problem.trace.workload.clone(),
            policy: policy.to_owned(),
            decided_by: decided.by.to_owned(),
            link_bytes_per_s: problem.tiers.host.offload_bytes_per_s,
            link_emulated,
            budget_bytes: problem.budget_bytes,
            keep_all_peak_bytes: problem.trace.peak_bytes,
            dead_tail_bytes: dead_tail_bytes(problem.trace, problem.lineage),
            feasible: planned.fits(),
            predicted: predicted(problem, &planned.prediction),
            measured: None,
            retimed: None,
            ratios: Vec::new(),
            held: None,
            decisions: planned.decisions,
            decide_ns: planned.decide_ns,
            proof: None,
            actions: planned.plan.counts(),
            losses: Vec::new(),
            identical: None,
            allocators: reserved(problem, &planned.plan),
            reruns: None,
            offloaded_bytes: None,
            slow_tier_high_water_bytes: None,
        }
    }

    /// Adds what a run of the plan measured. Without untouched iterations in between, the makespan is compared with the
    /// recorded one.
    pub fn measure(&mut self, problem: &Problem<'_>, plan: &Plan, measured: &Measurement) {
        let &Measurement { makespan_ns, peak_bytes, stall_ns, rerun_ns, .. } = measured;
        let untouched = measured.untouched.as_ref();
        let keep_all_ns = untouched.map_or(problem.trace.makespan_ns, |untouched| untouched.makespan_ns);
        self.measured = Some(Cost::of(makespan_ns, peak_bytes, keep_all_ns, stall_ns.zip(rerun_ns)));
        self.retimed = untouched.map(|untouched| retimed(problem, plan, untouched));
        self.held = Some(measured.peak_bytes <= self.budget_bytes);
        self.ratios.clone_from(&measured.ratios);
        self.losses.clone_from(&measured.losses);
        self.reruns = measured.reports.last().map(|report| report.reruns);
        self.offloaded_bytes = measured.reports.last().map(|report| report.offloaded_bytes);
        self.slow_tier_high_water_bytes = Some(measured.slow_tier_high_water_bytes);
    }
}

fn predicted(problem: &Problem<'_>, prediction: &Prediction) -> Cost {
    let Prediction { makespan_ns, peak_bytes, stall_ns, recompute_ns, .. } = *prediction;
    Cost::of(makespan_ns, peak_bytes, problem.lineage.keep_all_makespan_ns(), Some((stall_ns, recompute_ns)))
}

/// The trace with the times that untouched iterations took: each operator's share of their makespan.
pub fn at_speed_of(untouched: &Untouched) -> Trace {
    let mut trace = untouched.trace.clone();
    trace.scale_to(untouched.makespan_ns);
    trace
}

/// What `plan`'s schedule costs with operators as fast as in the untouched iterations while it was measured. The schedule is
/// the one that was carried out: a plan made with these times might wait for its copies elsewhere.
fn retimed(problem: &Problem<'_>, plan: &Plan, untouched: &Untouched) -> Cost {
    let Problem { trace, lineage, tiers, budget_bytes, .. } = *problem;
    let (schedule, prediction) = Timeline::new(trace, lineage, tiers).schedule(plan, budget_bytes);
    let (trace, keep_all_ns) = (at_speed_of(untouched), untouched.makespan_ns);
    let timetable = Timetable::of(&trace, lineage, &schedule, tiers);
    let stall_ns = timetable.time_ns(|activity| matches!(activity, Activity::Stall(..)));
    let rerun_ns = timetable.time_ns(|activity| matches!(activity, Activity::Rerun(_)));
    Cost::of(timetable.makespan_ns, prediction.peak_bytes, keep_all_ns, Some((stall_ns, rerun_ns)))
}
