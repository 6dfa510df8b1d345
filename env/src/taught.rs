//! The predicted environment with a teacher, who has searched for a plan of the same instance.

use std::convert::Infallible;
use std::ops::ControlFlow;
use std::sync::Arc;

use plimsoll_runtime::search::{Limits, search};
use plimsoll_runtime::{Action, Choice, Plan};

use crate::environment::{Branching, Environment, Observation, StepResult, Taught};
use crate::instance::Instance;
use crate::predicted::{Domain, PredictedEnvironment};
use crate::walk::{Mark, Walk};

/// Baselines whose plans the teacher's search starts from: greedy rules that know the present load of the channels.
const STARTS: [&str; 2] = ["cheapest", "dtr-swap"];

/// A [`PredictedEnvironment`] whose every instance has a searched plan, made when it is first asked for.
pub struct TaughtEnvironment {
    inner: PredictedEnvironment,
    /// Runs of the timeline that a search may take.
    evaluations: u64,
    seed: Option<u64>,
    /// The teacher's plan, by the seed of its instance.
    taught: Option<(u64, Plan)>,
}

impl TaughtEnvironment {
    /// An environment whose episodes are drawn from `domains`, each as likely as the others, and whose teacher's searches
    /// take so many evaluations.
    pub fn new(domains: Arc<[Domain]>, evaluations: u64) -> Self {
        TaughtEnvironment { inner: PredictedEnvironment::new(domains), evaluations, seed: None, taught: None }
    }

    /// The same environment, which remembers so many instances, as [`PredictedEnvironment::remembering`] does.
    pub fn remembering(self, instances: usize) -> Self {
        TaughtEnvironment { inner: self.inner.remembering(instances), ..self }
    }

    /// Makes the teacher's plan of the episode under way, if it is not made yet.
    fn teach(&mut self) {
        let seed = self.seed.expect("reset starts an episode");
        if self.taught.as_ref().is_none_or(|(taught, _)| *taught != seed) {
            let walk = self.inner.walk().expect("reset starts an episode");
            self.taught = Some((seed, searched(walk.instance(), self.evaluations)));
        }
    }
}

/// The best plan that a search finds.
fn searched(instance: &Instance, evaluations: u64) -> Plan {
    let starts: Vec<Plan> = STARTS.iter().filter_map(|name| Some(instance.plan_with(name)?.plan)).collect();
    search(instance.problem(), &starts, Limits::evaluations(evaluations), None, &mut |_| ControlFlow::Continue(())).plan
}

impl Environment for TaughtEnvironment {
    type Error = Infallible;

    fn reset(&mut self, seed: u64) -> Result<Observation, Infallible> {
        self.seed = Some(seed);
        self.inner.reset(seed)
    }

    fn step(&mut self, choice: Choice) -> Result<StepResult, Infallible> {
        self.inner.step(choice)
    }
}

impl Branching for TaughtEnvironment {
    type Mark = Mark;

    fn mark(&self) -> Mark {
        self.inner.mark()
    }

    fn return_to(&mut self, mark: &Mark) {
        self.inner.return_to(mark);
    }
}

impl Taught for TaughtEnvironment {
    fn lesson(&mut self) -> Vec<[bool; 2]> {
        self.teach();
        let (_, plan) = self.taught.as_ref().expect("made above");
        let Some(pressure) = self.inner.walk().and_then(Walk::pressure) else { return Vec::new() };
        let lesson = pressure.candidates.iter().map(|candidate| {
            let taken = plan.action(candidate.window);
            Action::EVICTIONS.map(|action| action == taken && candidate.allows(action))
        });
        let mut lesson: Vec<[bool; 2]> = lesson.collect();
        if pressure.wait.is_some() {
            let evicts_more = lesson.iter().flatten().any(|&right| right);
            lesson.push([!evicts_more, false]);
        }
        lesson
    }
}
