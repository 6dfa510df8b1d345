//! The real environment: the same decisions, applied to a running training loop and rewarded by what was measured.

use std::sync::Arc;

use plimsoll_runtime::torch::{CopyEngine, Executor, HostEngine, IterationReport, Session, SessionError};
use plimsoll_runtime::{Choice, Plan, Problem, Timeline, Trace};
use tch::TchError;

use crate::environment::{Environment, Observation, StepResult};
use crate::instance::Instance;
use crate::predicted::Domain;
use crate::recording::{RecordingError, record};
use crate::reward::plan_reward;
use crate::walk::Walk;
use crate::workload::Workload;

/// Why a training loop could not be run.
#[derive(Debug, thiserror::Error)]
pub enum RealError {
    /// Another loop of the process is being observed.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The training loop failed.
    #[error("the training loop failed: {0}")]
    Loop(#[from] TchError),
    /// The loop does not do what was recorded.
    #[error("the training loop departed from its trace: {0}")]
    Deviated(String),
    /// The loop could not be recorded.
    #[error(transparent)]
    Recording(#[from] RecordingError),
}

/// What a plan did on a real loop.
#[derive(Clone, Debug, PartialEq)]
pub struct Measurement {
    /// Median makespan of the planned iterations.
    pub makespan_ns: u64,
    /// Median makespan of the untouched iterations run in between; none where none were asked for.
    pub keep_all_makespan_ns: Option<u64>,
    /// Highest peak of the planned iterations.
    pub peak_bytes: u64,
    /// Losses, in the order of the iterations, untouched ones included.
    pub losses: Vec<f64>,
    /// Reports of the planned iterations.
    pub reports: Vec<IterationReport>,
    /// Most bytes that the slow tier has held.
    pub slow_tier_high_water_bytes: u64,
}

/// Runs `plan` on the loop that `instance` was recorded from: one iteration to match it to the trace, then `iterations`
/// planned ones, each preceded by an untouched one if `interleave` is set.
///
/// `engine` makes the copies, which `problem` says the cost of.
pub fn run_plan(
    session: Session,
    workload: &mut dyn Workload,
    problem: &Problem<'_>,
    plan: &Plan,
    engine: Box<dyn CopyEngine>,
    iterations: usize,
    interleave: bool,
) -> Result<Measurement, RealError> {
    let Problem { trace, lineage, tiers, budget_bytes, .. } = *problem;
    let (schedule, _) = Timeline::new(trace, lineage, tiers).schedule(plan, budget_bytes);
    let mut planned = Executor::new(session, trace, lineage, plan, schedule, engine);
    let mut losses = Vec::new();
    let (mut reports, mut untouched) = (Vec::new(), Vec::new());
    let mut next = |executor: &mut Executor| -> Result<IterationReport, RealError> {
        let (loss, report) = executor.iteration(|| workload.iteration())?;
        losses.push(loss?);
        match report.deviation {
            Some(why) => Err(RealError::Deviated(why)),
            None => Ok(report),
        }
    };
    next(&mut planned)?;
    for _ in 0..iterations {
        if interleave {
            planned.watch_next();
            untouched.push(next(&mut planned)?.makespan_ns);
        }
        reports.push(next(&mut planned)?);
    }
    Ok(Measurement {
        makespan_ns: median(reports.iter().map(|report| report.makespan_ns)).unwrap_or(0),
        keep_all_makespan_ns: median(untouched.into_iter()),
        peak_bytes: reports.iter().map(|report| report.peak_bytes).max().unwrap_or(0),
        losses,
        reports,
        slow_tier_high_water_bytes: planned.slow_tier_high_water_bytes(),
    })
}

fn median(values: impl Iterator<Item = u64>) -> Option<u64> {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    values.get(values.len() / 2).copied()
}

/// Rewards what was measured on a real loop.
pub struct TorchEnvironment {
    session: Session,
    workload: Box<dyn Workload>,
    domain: Domain,
    iterations: usize,
    episode: Option<(Walk, f64)>,
    last: Option<Measurement>,
}

impl TorchEnvironment {
    /// Records `workload`; episodes draw budgets and links from `domain`, whose traces and operator noise are replaced
    /// by the recording. Every episode ends with `iterations` planned iterations of the loop, interleaved with as
    /// many untouched ones.
    pub fn new(
        session: Session,
        mut workload: Box<dyn Workload>,
        domain: Domain,
        iterations: usize,
    ) -> Result<Self, RealError> {
        let (trace, _) = record(session, workload.as_mut(), iterations.max(5), "cpu")?;
        let domain = Domain { traces: vec![Arc::new(trace)], cost_noise: 0.0, ..domain };
        Ok(TorchEnvironment { session, workload, domain, iterations, episode: None, last: None })
    }

    /// The recorded iteration.
    pub fn trace(&self) -> &Trace {
        &self.domain.traces[0]
    }

    /// What the last finished episode measured.
    pub fn last_measurement(&self) -> Option<&Measurement> {
        self.last.as_ref()
    }

    fn measure(&mut self, instance: &Instance, plan: &Plan) -> Result<Measurement, RealError> {
        let engine = Box::new(HostEngine::new(Some(instance.link)));
        run_plan(self.session, self.workload.as_mut(), &instance.problem(), plan, engine, self.iterations, true)
    }
}

impl Environment for TorchEnvironment {
    type Error = RealError;

    fn reset(&mut self, seed: u64) -> Result<Observation, RealError> {
        let (instance, reference_overhead) = self.domain.draw(seed);
        let walk = Walk::start(instance, self.domain.steps_max);
        let observation = walk.observe();
        self.episode = Some((walk, reference_overhead));
        Ok(observation)
    }

    fn step(&mut self, choice: Choice) -> Result<StepResult, RealError> {
        let (walk, reference_overhead) = self.episode.as_mut().expect("reset starts an episode");
        walk.take(choice);
        let (terminated, truncated) = (walk.is_complete(), walk.is_truncated());
        let (observation, reference_overhead) = (walk.observe(), *reference_overhead);
        let mut reward = 0.0;
        if terminated {
            let (instance, plan) = (walk.instance().clone(), walk.plan().clone());
            let measured = self.measure(&instance, &plan)?;
            let keep_all_ns = measured.keep_all_makespan_ns.unwrap_or(self.trace().makespan_ns);
            let overhead = measured.makespan_ns as f64 / keep_all_ns as f64 - 1.0;
            let over_budget_bytes = measured.peak_bytes.saturating_sub(instance.budget_bytes);
            reward = plan_reward(overhead, reference_overhead, over_budget_bytes, instance.budget_bytes);
            self.last = Some(measured);
        }
        Ok(StepResult { observation, reward, terminated, truncated })
    }
}
