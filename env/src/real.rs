//! The real environment: the same decisions, applied to a running training loop and rewarded by what was measured.

use std::sync::Arc;

use plimsoll_runtime::torch::report::Course;
use plimsoll_runtime::torch::{CopyEngine, Executor, HostEngine, IterationReport, Session, SessionError};
use plimsoll_runtime::{Choice, Plan, Problem, Trace};
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
///
/// Times are lower quartiles: what else a machine does makes iterations slower and none faster, and often for seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Measurement {
    /// Lower quartile of the makespans of the planned iterations.
    pub makespan_ns: u64,
    /// What the untouched iterations did; none where none were asked for.
    pub untouched: Option<Untouched>,
    /// Makespan of every planned iteration over the mean of the two untouched ones beside it; empty where there are none.
    pub ratios: Vec<f64>,
    /// Lower quartile of the time that they waited for copies. None on a GPU, which waits without the host.
    pub stall_ns: Option<u64>,
    /// Lower quartile of the time of their reruns. None on a GPU, where the host only issues them.
    pub rerun_ns: Option<u64>,
    /// Highest peak of all planned iterations.
    pub peak_bytes: u64,
    /// Losses, in the order of the iterations, untouched ones included.
    pub losses: Vec<f64>,
    /// Reports of the planned iterations.
    pub reports: Vec<IterationReport>,
    /// Most bytes that the slow tier has held.
    pub slow_tier_high_water_bytes: u64,
}

/// What untouched iterations did, between planned ones.
#[derive(Clone, Debug, PartialEq)]
pub struct Untouched {
    /// Lower quartile of their makespans.
    pub makespan_ns: u64,
    /// The trace, with the times that operators took in the faster half of them, in the median; on a GPU in another one, for
    /// to be timed takes time.
    pub trace: Trace,
}

/// Runs `plan` on the loop that `instance` was recorded from: one iteration to match it to the trace, then `iterations`
/// planned ones, each between two untouched ones if `interleave` is set.
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
    let mut planned = Executor::new(session, problem, plan, engine);
    let mut losses = Vec::new();
    let (mut reports, mut untouched) = (Vec::new(), Vec::new());
    let mut next = |executor: &mut Executor| -> Result<IterationReport, RealError> {
        let (loss, report) = executor.iteration(|| workload.iteration())?;
        losses.push(loss?);
        match report.deviation {
            Some(why) if report.course == Course::Reactive => Err(RealError::Deviated(why)),
            _ => Ok(report),
        }
    };
    let in_passing = session.times_in_passing();
    next(&mut planned)?;
    for _ in 0..iterations {
        if interleave {
            planned.watch_next(in_passing);
            untouched.push(next(&mut planned)?.makespan_ns);
        }
        reports.push(next(&mut planned)?);
    }
    let mut timed = Vec::new();
    if interleave {
        planned.watch_next(in_passing);
        untouched.push(next(&mut planned)?.makespan_ns);
        timed = faster_half(&untouched);
        if !in_passing {
            // One that is slower for being asked, and says where the time of the others goes.
            planned.watch_next(true);
            next(&mut planned)?;
            timed = vec![0];
        }
    }
    let planned_ns = |time_ns: fn(&IterationReport) -> u64| quartile(reports.iter().map(time_ns)).unwrap_or(0);
    Ok(Measurement {
        makespan_ns: planned_ns(|report| report.makespan_ns),
        stall_ns: in_passing.then(|| planned_ns(|report| report.stall_ns)),
        rerun_ns: in_passing.then(|| planned_ns(|report| report.rerun_ns)),
        untouched: quartile(untouched.iter().copied())
            .map(|makespan_ns| Untouched { makespan_ns, trace: planned.retimed(problem.trace, &timed) }),
        ratios: ratios(&reports, &untouched),
        peak_bytes: reports.iter().map(|report| report.peak_bytes).max().unwrap_or(0),
        losses,
        reports,
        slow_tier_high_water_bytes: planned.slow_tier_high_water_bytes(),
    })
}

/// Of every report, its makespan over the mean of the two of `untouched_ns` that it stands between.
fn ratios(reports: &[IterationReport], untouched_ns: &[u64]) -> Vec<f64> {
    let beside_ns = untouched_ns.windows(2).map(|pair| (pair[0] + pair[1]) as f64 / 2.0);
    reports.iter().zip(beside_ns).map(|(report, beside_ns)| report.makespan_ns as f64 / beside_ns).collect()
}

/// Which iterations were the fastest: half of them, in order.
fn faster_half(makespans_ns: &[u64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..makespans_ns.len()).collect();
    order.sort_by_key(|&index| makespans_ns[index]);
    order.truncate(makespans_ns.len().div_ceil(2));
    order.sort_unstable();
    order
}

/// The lower quartile of `values`, between two of them where it falls there, so that it is expected to be the same of any number of
/// them: that of planned iterations is compared with one of more untouched ones.
fn quartile(values: impl Iterator<Item = u64>) -> Option<u64> {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    // A quarter of the values' ranks and one, counted from one.
    let at = ((values.len() + 1) as f64 / 4.0 - 1.0).max(0.0);
    let [below, above] = [*values.get(at.floor() as usize)?, values[at.ceil() as usize]].map(|value| value as f64);
    Some((below + at.fract() * (above - below)).round() as u64)
}

/// Rewards what was measured on a real loop.
pub struct TorchEnvironment {
    session: Session,
    workload: Box<dyn Workload>,
    domain: Domain,
    iterations: usize,
    episode: Option<(Walk, f64)>,
    last: Option<Measurement>,
    rewards: Vec<Rewards>,
}

/// What a finished episode earned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rewards {
    /// By what was predicted of its plan.
    pub predicted: f64,
    /// By what was measured: what the agent was given.
    pub measured: f64,
}

impl TorchEnvironment {
    /// Records `workload`; episodes draw budgets and links from `domain`, whose traces and operator noise are replaced
    /// by the recording. Every episode ends with `iterations` planned iterations of the loop, each between two untouched
    /// ones.
    pub fn new(
        session: Session,
        workload: Box<dyn Workload>,
        domain: Domain,
        iterations: usize,
    ) -> Result<Self, RealError> {
        Self::recording(session, workload, |_| domain, iterations)
    }

    /// The same, with a domain that depends on the recorded keep-all peak, in bytes.
    pub fn recording(
        session: Session,
        mut workload: Box<dyn Workload>,
        domain: impl FnOnce(u64) -> Domain,
        iterations: usize,
    ) -> Result<Self, RealError> {
        let (trace, _) = record(session, workload.as_mut(), iterations.max(5), "cpu")?;
        let domain = domain(trace.peak_bytes);
        let domain = Domain { traces: vec![Arc::new(trace)], cost_noise: 0.0, ..domain };
        Ok(TorchEnvironment { session, workload, domain, iterations, episode: None, last: None, rewards: Vec::new() })
    }

    /// The recorded iteration.
    pub fn trace(&self) -> &Trace {
        &self.domain.traces[0]
    }

    /// What the last finished episode measured.
    pub fn last_measurement(&self) -> Option<&Measurement> {
        self.last.as_ref()
    }

    /// The rewards of the episodes that have finished since this was last asked.
    pub fn take_rewards(&mut self) -> Vec<Rewards> {
        std::mem::take(&mut self.rewards)
    }

    /// Runs `plan` as at the end of an episode.
    pub fn measure(&mut self, instance: &Instance, plan: &Plan) -> Result<Measurement, RealError> {
        let engine = Box::new(HostEngine::new(Some(instance.tiers.host)));
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
            let (instance, plan, prediction) = (walk.instance().clone(), walk.plan().clone(), walk.prediction());
            let measured = self.measure(&instance, &plan)?;
            let keep_all_ns = measured.untouched.as_ref().map_or(self.trace().makespan_ns, |own| own.makespan_ns);
            let overhead = measured.makespan_ns as f64 / keep_all_ns as f64 - 1.0;
            let over_budget_bytes = measured.peak_bytes.saturating_sub(instance.budget_bytes);
            let earned = |overhead, over| plan_reward(overhead, reference_overhead, over, instance.budget_bytes);
            reward = earned(overhead, over_budget_bytes);
            let predicted = earned(instance.overhead(&prediction), prediction.over_budget_bytes);
            self.rewards.push(Rewards { predicted: predicted.into(), measured: reward.into() });
            self.last = Some(measured);
        }
        Ok(StepResult { observation, reward, terminated, truncated })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_a_quiet_machine() {
        assert_eq!(faster_half(&[90, 570, 150, 900, 140]), [0, 2, 4]);
        assert_eq!(quartile([8, 900, 7, 2, 500, 9, 700, 800].into_iter()), Some(7));
        assert_eq!(quartile([30, 10, 20].into_iter()), Some(10));
        assert_eq!(quartile([40, 30, 10, 20].into_iter()), Some(13), "a quarter of the way to the next");
        assert_eq!(quartile([5].into_iter()), Some(5));
        assert_eq!(quartile([].into_iter()), None);
    }
}
