//! The predicted environment: the timeline on recorded traces, with hardware that differs from episode to episode.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;

use plimsoll_runtime::{ActionSet, Choice, Lineage, Link, Trace};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, LogNormal};

use crate::environment::{Branching, Environment, Observation, StepResult};
use crate::instance::Instance;
use crate::reward::plan_reward;
use crate::walk::{Mark, Walk};

/// Draws that are tried for an instance on which something can be learned.
const DRAWS_MAX: usize = 32;
/// Instances that a hand-written policy solves at less overhead than this teach nothing.
pub const TRIVIAL_OVERHEAD: f64 = 0.002;
/// Steps after which an episode is truncated: more than any trace at hand has windows and operators. Every step evicts
/// another window, or waits at another operator.
pub const STEPS_MAX: usize = 1 << 20;
/// The stream of random numbers that picks a domain, beside the one that draws from it.
const DOMAIN_STREAM: u64 = 1;

/// An instance and the overhead of the best reference policy on it.
type Drawn = (Instance, f64);

/// The distribution that instances are drawn from.
#[derive(Clone, Debug)]
pub struct Domain {
    /// Recorded iterations, each as likely as the others.
    pub traces: Vec<Arc<Trace>>,
    /// Least and greatest budget as a share of the keep-all peak, drawn uniformly.
    pub budget_share: [f64; 2],
    /// Slowest and fastest link in bytes per second, drawn log-uniformly.
    pub link_bytes_per_s: [f64; 2],
    /// Standard deviation of the logarithm of the log-normal factor on each operator's time.
    pub cost_noise: f64,
    /// What copies cost, but for what is drawn: bandwidth and contention.
    pub link: Link,
    /// Least and greatest compute time that a copied byte costs, drawn uniformly.
    pub contention_ns_per_byte: [f64; 2],
    /// Least and greatest compute time that a copied storage costs beside its bytes, drawn uniformly.
    pub contention_each_ns: [u64; 2],
    /// Evictions that may be used.
    pub actions: ActionSet,
    /// The share of instances in which nothing may be swapped.
    pub recompute_only: f64,
    /// Steps after which an episode is truncated.
    pub steps_max: usize,
}

impl Domain {
    /// An instance and the least overhead of a reference policy on it, or of the first that is trivial; one where none holds its
    /// budget. The same seed gives the same instance.
    ///
    /// Draws again where there is nothing to decide, where no reference policy holds the budget, or where one does at
    /// next to no overhead; if every draw was such, the last that a policy does hold is taken as it is, or else the first.
    ///
    /// # Panics
    ///
    /// If no draw leaves anything to decide.
    pub fn draw(&self, seed: u64) -> Drawn {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut fallback = None;
        for _ in 0..DRAWS_MAX {
            let instance = self.draw_once(&mut random);
            if !instance.asks_for_a_decision() {
                continue;
            }
            match instance.reference_overhead(TRIVIAL_OVERHEAD) {
                Some(overhead) if overhead > TRIVIAL_OVERHEAD => return (instance, overhead),
                Some(overhead) => fallback = Some((instance, overhead)),
                None => fallback = fallback.or(Some((instance, 1.0))),
            }
        }
        fallback.expect("some instance of the domain asks for a decision")
    }

    fn draw_once(&self, random: &mut ChaCha8Rng) -> Instance {
        let trace = &self.traces[random.random_range(0..self.traces.len())];
        let trace = if self.cost_noise > 0.0 { Arc::new(self.jittered(trace, random)) } else { trace.clone() };
        let lineage = Arc::new(Lineage::of(&trace));
        let between = |[low, high]: [f64; 2], at: f64| low + (high - low) * at;
        let share = between(self.budget_share, random.random());
        let log_rate = between(self.link_bytes_per_s.map(f64::ln), random.random());
        let budget_bytes = (share * lineage.keep_all_peak_bytes() as f64) as u64;
        let contention_ns_per_byte = between(self.contention_ns_per_byte, random.random());
        let swap = self.actions.swap && (self.recompute_only <= 0.0 || random.random::<f64>() >= self.recompute_only);
        let [least_each_ns, most_each_ns] = self.contention_each_ns;
        let contention_each_ns = if least_each_ns < most_each_ns {
            random.random_range(least_each_ns..=most_each_ns)
        } else {
            least_each_ns
        };
        let link = Link { contention_ns_per_byte, contention_each_ns, ..self.link.at(log_rate.exp()) };
        let actions = ActionSet { swap, ..self.actions };
        Instance { trace, lineage, tiers: link.into(), budget_bytes, actions }
    }

    fn jittered(&self, trace: &Trace, random: &mut ChaCha8Rng) -> Trace {
        let factor = LogNormal::new(0.0, self.cost_noise).expect("the configuration checks that the noise is finite");
        let mut trace = trace.clone();
        for operator in &mut trace.operators {
            operator.cost_ns = (operator.cost_ns as f64 * factor.sample(random)) as u64;
        }
        trace
    }
}

/// Rewards what the timeline predicts.
pub struct PredictedEnvironment {
    domains: Arc<[Domain]>,
    /// The last instances drawn, by their seeds: the same one is often rolled out several times in a row.
    drawn: HashMap<u64, Drawn>,
    /// How many of them.
    remembered: usize,
    /// The walk, and the overhead of the best reference policy.
    episode: Option<(Walk, f64)>,
}

impl PredictedEnvironment {
    /// An environment whose episodes are drawn from `domains`, each as likely as the others.
    ///
    /// # Panics
    ///
    /// If there are none.
    pub fn new(domains: Arc<[Domain]>) -> Self {
        assert!(!domains.is_empty(), "an environment needs a domain to draw episodes from");
        PredictedEnvironment { domains, drawn: HashMap::new(), remembered: 1, episode: None }
    }

    /// The same environment, which remembers so many instances: as many as are rolled out again and again.
    pub fn remembering(self, instances: usize) -> Self {
        PredictedEnvironment { remembered: instances, ..self }
    }

    /// The domain of the episode that `seed` gives.
    fn domain(&self, seed: u64) -> &Domain {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(DOMAIN_STREAM);
        &self.domains[random.random_range(0..self.domains.len())]
    }

    /// What `seed` gives, which was drawn before or is now.
    fn draw(&mut self, seed: u64) -> Drawn {
        if let Some(drawn) = self.drawn.get(&seed) {
            return drawn.clone();
        }
        if self.drawn.len() >= self.remembered {
            self.drawn.clear();
        }
        let drawn = self.domain(seed).draw(seed);
        self.drawn.insert(seed, drawn.clone());
        drawn
    }

    /// The episode under way, or the last one.
    pub(crate) fn walk(&self) -> Option<&Walk> {
        self.episode.as_ref().map(|(walk, _)| walk)
    }
}

impl Branching for PredictedEnvironment {
    type Mark = Mark;

    fn mark(&self) -> Mark {
        self.walk().expect("reset starts an episode").mark()
    }

    fn return_to(&mut self, mark: &Mark) {
        let (walk, _) = self.episode.as_mut().expect("reset starts an episode");
        walk.return_to(mark);
    }
}

impl Environment for PredictedEnvironment {
    type Error = Infallible;

    fn reset(&mut self, seed: u64) -> Result<Observation, Infallible> {
        let (instance, reference_overhead) = self.draw(seed);
        let walk = Walk::start(instance, self.domain(seed).steps_max);
        let observation = walk.observe();
        self.episode = Some((walk, reference_overhead));
        Ok(observation)
    }

    fn step(&mut self, choice: Choice) -> Result<StepResult, Infallible> {
        let (walk, reference_overhead) = self.episode.as_mut().expect("reset starts an episode");
        walk.take(choice);
        let mut reward = 0.0;
        if walk.is_complete() {
            let (prediction, instance) = (walk.prediction(), walk.instance());
            let overhead = instance.overhead(&prediction);
            reward = plan_reward(overhead, *reference_overhead, prediction.over_budget_bytes, instance.budget_bytes);
        }
        Ok(StepResult {
            observation: walk.observe(),
            reward,
            terminated: walk.is_complete(),
            truncated: walk.is_truncated(),
        })
    }
}
