//! The sweep: one decision after another, each at the first operator where the budget would be exceeded. For a policy
//! that weighs it, also where something would have to wait for room: there the plan goes on without it, but slowly.
//!
//! A planner, an environment and a baseline all walk an iteration this way. The sweep knows what can be
//! evicted and what that would cost; it does not know what is wise.

#[cfg(test)]
mod direct;

use crate::estimate::Estimator;
use crate::hardware::SlowTiers;
use crate::lineage::{Lineage, WindowId};
use crate::observation::{Candidate, FEATURES, Pressure};
use crate::plan::{Action, ActionSet, Plan};
use crate::policy::{Choice, Policy};
use crate::timeline::{OnPressure, Prediction, Pressed, Run, Timeline};
use crate::trace::Trace;

/// What is to be planned.
#[derive(Clone, Copy, Debug)]
pub struct Problem<'a> {
    /// The recorded iteration.
    pub trace: &'a Trace,
    /// Its lineage.
    pub lineage: &'a Lineage,
    /// Where offloaded bytes go, and what copies cost.
    pub tiers: SlowTiers,
    /// Device bytes that must not be exceeded.
    pub budget_bytes: u64,
    /// Evictions that may be used.
    pub actions: ActionSet,
}

impl Problem<'_> {
    /// Whether `action` may be taken for `window`.
    pub fn allows(&self, window: WindowId, action: Action) -> bool {
        self.actions.allows(action)
            && (action != Action::Recompute || self.lineage.window(window).recomputable)
            && (action == Action::Keep || !self.lineage.is_decided(window))
    }

    /// Whether some action may evict `window`.
    pub fn may_evict(&self, window: WindowId) -> bool {
        Action::EVICTIONS.into_iter().any(|action| self.allows(window, action))
    }

    /// Whether no plan holds the budget, because more bytes can never be evicted. Where it is not, there may still be none.
    pub fn is_hopeless(&self) -> bool {
        self.budget_bytes < self.unavoidable_bytes()
    }

    /// Device bytes that every plan takes: the most, at any operator, that is left where all is evicted that may be.
    pub fn unavoidable_bytes(&self) -> u64 {
        let keep_all_bytes = self.lineage.keep_all_bytes();
        // What evictions add to the bytes, from one operator to the next.
        let mut change = vec![0i64; keep_all_bytes.len()];
        let windows = (0..).map(WindowId).zip(self.lineage.windows());
        for (id, window) in windows.filter(|(id, _)| self.may_evict(*id) || self.lineage.is_decided(*id)) {
            let bytes = self.lineage.bytes(window.storage) as i64;
            change[window.start as usize] -= bytes;
            change[window.end as usize] += if self.lineage.stays_away(id) { 0 } else { bytes };
        }
        let evicted = change.iter().scan(0, |evicted, change| {
            *evicted += change;
            Some(*evicted)
        });
        let left = keep_all_bytes.iter().zip(evicted).map(|(&bytes, evicted)| bytes.saturating_add_signed(evicted));
        left.max().unwrap_or(0)
    }
}

/// Where a sweep stands: what was decided so far.
#[derive(Clone, Debug)]
pub struct Mark {
    plan: Plan,
    decisions: usize,
    patient_until: usize,
}

/// One walk over an iteration, from the first pressure point to a complete plan.
pub struct Sweep<'a> {
    problem: Problem<'a>,
    timeline: Timeline<'a>,
    plan: Plan,
    decisions: usize,
    pressed: Option<(usize, Pressed)>,
    /// Before this operator, waiting is accepted without a question.
    patient_until: usize,
    prediction: Prediction,
    candidates: Vec<Candidate>,
    /// Whether features are wanted beside the candidates.
    described: bool,
    features: Vec<f32>,
    estimator: Estimator,
}

impl<'a> Sweep<'a> {
    /// Starts from `plan`: the decisions made before the sweep. It stops only where the budget would be exceeded.
    pub fn new(problem: Problem<'a>, plan: Plan) -> Self {
        Self::starting(problem, plan, usize::MAX)
    }

    /// Starts from `plan`, and stops as well where something would have to wait for room.
    pub fn weighing_waits(problem: Problem<'a>, plan: Plan) -> Self {
        Self::starting(problem, plan, 0)
    }

    fn starting(problem: Problem<'a>, plan: Plan, patient_until: usize) -> Self {
        let timeline = Timeline::new(problem.trace, problem.lineage, problem.tiers);
        let estimator = Estimator::new(&problem);
        let mut sweep = Sweep {
            problem,
            timeline,
            plan,
            decisions: 0,
            pressed: None,
            patient_until,
            prediction: Prediction::default(),
            candidates: Vec::new(),
            described: true,
            features: Vec::new(),
            estimator,
        };
        sweep.advance();
        sweep
    }

    /// Starts anew, from another plan, and stops where it stopped before.
    pub(crate) fn restart(&mut self, plan: &Plan) {
        self.plan.clone_from(plan);
        self.decisions = 0;
        if self.asks_to_wait() {
            self.patient_until = 0;
        }
        self.advance();
    }

    /// Whether it stops where something would have to wait.
    fn asks_to_wait(&self) -> bool {
        self.patient_until != usize::MAX
    }

    /// Where it stands.
    pub fn mark(&self) -> Mark {
        Mark { plan: self.plan.clone(), decisions: self.decisions, patient_until: self.patient_until }
    }

    /// Goes back to where it stood.
    pub fn return_to(&mut self, mark: &Mark) {
        self.plan.clone_from(&mark.plan);
        (self.decisions, self.patient_until) = (mark.decisions, mark.patient_until);
        self.advance();
    }

    /// The pressure point where the sweep stands, or none when nothing more can or need be decided.
    pub fn pressure(&self) -> Option<Pressure<'_>> {
        self.pressed.map(|(operator, Pressed { deficit_bytes, wait, .. })| Pressure {
            operator,
            deficit_bytes,
            wait,
            candidates: &self.candidates,
            features: &self.features,
        })
    }

    /// Evicts what `choice` names, or waits, and goes on to the next pressure point.
    ///
    /// # Panics
    ///
    /// If the choice is not legal at the pressure point, or there is none.
    pub fn take(&mut self, choice: Choice) {
        let Some((operator, Pressed { wait, .. })) = self.pressed else {
            panic!("a choice was made where there is nothing to choose")
        };
        if wait.is_some() && choice.candidate == self.candidates.len() {
            self.patient_until = operator + 1;
            return self.advance();
        }
        let candidate = &self.candidates[choice.candidate];
        assert!(candidate.allows(choice.action), "{:?} is masked for candidate {}", choice.action, choice.candidate);
        self.plan.set(candidate.window, choice.action);
        self.decisions += 1;
        self.advance();
    }

    /// Lets the plan go over the budget from here on, without another decision.
    pub fn give_up(&mut self) {
        if self.pressed.is_some() {
            self.advance_by(OnPressure::Exceed);
        }
    }

    /// Lets `policy` decide everything that is left.
    pub fn decide(&mut self, policy: &mut dyn Policy) {
        self.decide_until(policy, &|| false);
    }

    /// Lets `policy` decide what is left until `is_over` says so after a decision. Whether that was everything.
    pub(crate) fn decide_until(&mut self, policy: &mut dyn Policy, is_over: &dyn Fn() -> bool) -> bool {
        self.described = policy.reads_features();
        if policy.weighs_waiting() != self.asks_to_wait() {
            self.patient_until = if policy.weighs_waiting() { 0 } else { usize::MAX };
            self.advance();
        }
        while let Some(pressure) = self.pressure() {
            match policy.choose(&pressure) {
                Some(choice) => self.take(choice),
                None => self.give_up(),
            }
            if is_over() {
                break;
            }
        }
        self.described = true;
        self.pressed.is_none()
    }

    /// How many evictions were chosen.
    pub fn decisions(&self) -> usize {
        self.decisions
    }

    /// The decisions so far.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What the complete plan is predicted to cost; meaningful once [`Sweep::pressure`] is none.
    pub fn prediction(&self) -> Prediction {
        self.prediction
    }

    fn advance(&mut self) {
        let (actions, patient_until) = (self.problem.actions, self.patient_until);
        self.advance_by(OnPressure::Stop { actions, patient_until });
    }

    fn advance_by(&mut self, on_pressure: OnPressure) {
        self.pressed = None;
        match self.timeline.run(&self.plan, self.problem.budget_bytes, on_pressure) {
            Run::Finished(prediction) => self.prediction = prediction,
            Run::Pressed { operator, pressed } => {
                self.observe(operator, pressed);
                debug_assert!(!self.candidates.is_empty(), "a run stops only where something can be evicted");
                self.pressed = Some((operator, pressed));
            }
        }
    }

    fn observe(&mut self, operator: usize, pressed: Pressed) {
        let point = (operator, pressed.actions);
        self.estimator.find_candidates(&self.problem, &self.timeline, point, &mut self.candidates);
        let rows = self.candidates.len() + usize::from(pressed.wait.is_some());
        // All of it is filled in.
        self.features.resize(if self.described { rows * FEATURES } else { 0 }, 0.0);
        if self.described {
            let point = (operator, pressed);
            self.estimator.describe(&self.problem, &self.timeline, point, &self.candidates, &mut self.features);
        }
    }
}
