//! What the promises share: the shipped tiny workloads, a loop with everything awkward in it, plans drawn at random,
//! and the bits of a model.

mod awkward;
pub mod beyond_tch;
pub mod budget;
pub mod command;
#[path = "../../runtime/tests/support/faulty.rs"]
pub mod faulty;
pub mod fuzz;
#[path = "../../runtime/tests/support/meddled.rs"]
pub mod meddled;
pub mod perceptron;
pub mod python;
pub mod stand_in;

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use plimsoll_env::config::FamilyConfig;
use plimsoll_env::recording::{WARM_UP, record};
use plimsoll_env::workload::{Family, Workload, WorkloadConfig, bits};
use plimsoll_env::{Domain, Instance};
use plimsoll_runtime::lineage::WindowId;
use plimsoll_runtime::network::{Dense, NetworkWeights, Normaliser};
use plimsoll_runtime::observation::FEATURES;
use plimsoll_runtime::policy_file::PolicyFile;
use plimsoll_runtime::torch::{Executor, HostEngine, IterationReport, Session};
use plimsoll_runtime::{Action, ActionSet, Lineage, Link, Plan, Prediction, Problem, Timeline, Trace};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::Device;

pub use awkward::{Awkward, Departure};

/// Iterations that a trace is made of in these tests.
const RECORDED: usize = 3;

/// Libtorch's operators, its allocator and its generator belong to the whole process: one test of a binary at a time.
pub fn one_at_a_time() -> MutexGuard<'static, ()> {
    static RUNNING: Mutex<()> = Mutex::new(());
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lets a test pass without a check, because something that it needs is not there, where `PLIMSOLL_WITHOUT` names that.
///
/// # Panics
///
/// Elsewhere: what `make` fetches has all of it.
pub(crate) fn go_without(need: &str, why: &str) {
    let without = std::env::var("PLIMSOLL_WITHOUT").unwrap_or_default();
    assert!(
        without.split(',').any(|named| named == need),
        "{why}; with PLIMSOLL_WITHOUT={need} this test checks nothing"
    );
}

/// The process's session.
pub fn session() -> Session {
    Session::install().expect("libtorch takes the interceptor")
}

/// The shipped configuration of that name: a family's, unless it is one for a GPU.
pub fn shipped(name: &str) -> FamilyConfig {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../configs/{name}.toml"));
    FamilyConfig::load(path).unwrap_or_else(|error| panic!("{error}"))
}

/// A workload of a shipped configuration.
pub fn shipped_workload(name: &str) -> WorkloadConfig {
    let shipped = Family::ALL.iter().map(|family| shipped(family.name()));
    let mut named = shipped.filter_map(|mut config| config.workloads.remove(name));
    named.next().unwrap_or_else(|| panic!("no shipped configuration has a workload {name}"))
}

/// Builds a workload on the CPU. The session comes first, so that every byte of the model is counted.
pub fn build(config: &WorkloadConfig, seed: u64) -> Box<dyn Workload> {
    session();
    config.build("under-test", Device::Cpu, seed).unwrap()
}

/// A link so fast that no test waits for it.
pub fn fast_link() -> Link {
    Link::symmetric(4e9, 20_000)
}

/// A plan that takes for every window one of its lawful actions, each as likely as the others.
pub fn random_plan(lineage: &Lineage, seed: u64) -> Plan {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    plan_by(lineage, |recomputable| match random.random_range(0..if recomputable { 3 } else { 2 }) {
        0 => Action::Keep,
        1 => Action::Swap,
        _ => Action::Recompute,
    })
}

/// A plan that chooses for every window by whether it may be recomputed.
pub fn plan_by(lineage: &Lineage, mut choose: impl FnMut(bool) -> Action) -> Plan {
    let mut plan = Plan::keep_all(lineage.windows().len());
    for (window, id) in lineage.windows().iter().zip(0..) {
        plan.set(WindowId(id), choose(window.recomputable));
    }
    plan
}

/// A policy that nobody trained: all weights are drawn.
pub fn tiny_policy(seed: u64) -> PolicyFile {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut draw = |count: usize| (0..count).map(|_| random.random_range(-0.5..0.5)).collect::<Vec<f32>>();
    let layers = [(FEATURES, 8), (8, 8), (8, 2)].map(|(from, to)| Dense { weights: draw(from * to), bias: draw(to) });
    PolicyFile {
        family: "perceptron".to_owned(),
        actions: ActionSet::ALL,
        provenance: Default::default(),
        weights: NetworkWeights::new(Normaliser::identity(), layers).expect("as many as a policy has"),
    }
}

/// A training loop that has been recorded, with the losses of all its iterations.
pub struct Recorded<W> {
    /// The loop.
    pub workload: W,
    /// One iteration of it.
    pub trace: Trace,
    /// What follows from the trace.
    pub lineage: Lineage,
    /// Losses, of every iteration so far.
    pub losses: Vec<f64>,
}

impl Recorded<Box<dyn Workload>> {
    /// Builds and records a workload.
    pub fn of(config: &WorkloadConfig, seed: u64) -> Self {
        let mut workload = build(config, seed);
        let (trace, losses) = record(session(), workload.as_mut(), RECORDED, "cpu").unwrap();
        Recorded { workload, lineage: Lineage::of(&trace), trace, losses }
    }
}

impl Recorded<Awkward> {
    /// Builds and records the awkward loop.
    pub fn awkward(seed: u64) -> Self {
        session();
        let mut workload = Awkward::new(seed);
        let (trace, losses) = record(session(), &mut workload, RECORDED, "cpu").unwrap();
        Recorded { workload, lineage: Lineage::of(&trace), trace, losses }
    }
}

impl<W> Recorded<W> {
    /// Iterations that recording takes.
    pub const ITERATIONS: usize = WARM_UP + RECORDED;

    /// Runs `iterations` of the loop under `plan`, the first of which only matches it to its trace. `iterate` runs one,
    /// by its number. Returns the prediction and every report.
    pub fn follow(
        &mut self,
        plan: &Plan,
        budget_bytes: u64,
        iterations: usize,
        mut iterate: impl FnMut(&mut W, usize) -> f64,
    ) -> (Prediction, Vec<IterationReport>) {
        let (trace, lineage, tiers) = (&self.trace, &self.lineage, fast_link().into());
        let problem = Problem { trace, lineage, tiers, budget_bytes, actions: ActionSet::ALL };
        let prediction = Timeline::new(trace, lineage, tiers).predict(plan, budget_bytes);
        let mut executor = Executor::new(session(), &problem, plan, Box::new(HostEngine::new(None)));
        let reports = (0..iterations)
            .map(|iteration| {
                let (loss, report) = executor.iteration(|| iterate(&mut self.workload, iteration)).unwrap();
                self.losses.push(loss);
                report
            })
            .collect();
        (prediction, reports)
    }

    /// The planning problem of this trace at a share of its keep-all peak.
    pub fn instance(&self, share: f64) -> Instance {
        Instance {
            trace: Arc::new(self.trace.clone()),
            lineage: Arc::new(self.lineage.clone()),
            tiers: fast_link().into(),
            budget_bytes: (share * self.trace.peak_bytes as f64) as u64,
            actions: ActionSet::ALL,
        }
    }
}

/// The instances that environments draw from `traces` in these tests.
pub fn domain(traces: Vec<Arc<Trace>>, steps_max: usize) -> Domain {
    Domain {
        traces,
        budget_share: [0.5, 0.8],
        link_bytes_per_s: [1e8, 4e9],
        cost_noise: 0.1,
        link: Link::symmetric(1e9, 20_000),
        contention_ns_per_byte: [0.0, 0.4],
        contention_each_ns: [0, 0],
        actions: ActionSet::ALL,
        recompute_only: 0.0,
        steps_max,
    }
}

/// What some iterations of a loop came to: the bits of their losses, and of all variables after them.
#[derive(Clone, Debug, PartialEq)]
pub struct Stage {
    losses: Vec<f64>,
    variables: Vec<(String, Vec<u8>)>,
}

impl Stage {
    /// What `losses` have come to.
    pub fn of(losses: &[f64], workload: &dyn Workload) -> Self {
        Stage { losses: losses.to_vec(), variables: bits(workload).unwrap() }
    }

    /// Asserts that both are the same bits, naming the first iteration or variable that differs.
    pub fn assert_same(&self, untouched: &Stage, what: &str) {
        assert_eq!(self.losses.len(), untouched.losses.len(), "{what}");
        for (iteration, (found, untouched)) in self.losses.iter().zip(&untouched.losses).enumerate() {
            assert!(
                !found.is_nan() || untouched.is_nan(),
                "{what}: iteration {iteration} failed, or its loss is no number"
            );
            let same = found.to_bits() == untouched.to_bits();
            assert!(same, "{what}: the loss is {found}, not {untouched}, in iteration {iteration}");
        }
        for ((name, found), (_, untouched)) in self.variables.iter().zip(&untouched.variables) {
            assert!(found == untouched, "{what}: {name} differs");
        }
    }
}
