//! The moves of a walk: what may be changed about the plan at hand.

use super::{NONE, Walk};
use crate::lineage::WindowId;
use crate::plan::Action;
use crate::policy::Policy;
use crate::random::SplitMix64;
use crate::search::cost::NoisyPrice;
use crate::timeline::{CHANGES_MAX, Prediction};

/// Windows that are guessed before all that are eligible are counted.
const GUESSES: usize = 12;
/// The share of moves that graft, where there are donors.
const GRAFTS: f32 = 0.3;
/// The share of the windows, in percent, that one graft looks at.
const GRAFT_PERCENT: usize = 8;
/// Moves of windows that are alike that are made one after another.
const ALIKE_MOVES: usize = 30;
/// Groups of windows that are alike that are evicted at most for one that is kept.
const ALIKE_EVICTIONS_MAX: usize = 3;

impl Walk<'_> {
    /// Draws a move that changes something, and predicts it; none where the draw leads nowhere.
    pub(super) fn propose(&mut self) -> Option<Prediction> {
        let changes = if !self.prediction.fits() && self.random.below(2) == 0 {
            self.relieve_peak()
        } else if !self.donors().is_empty() && self.random.unit() < GRAFTS {
            self.graft()
        } else {
            match self.random.below(28) {
                0..8 => return self.exchange_for_what_fits(),
                8..14 => self.change_one(),
                14..21 => self.exchange(),
                21..23 => self.shift(),
                23..26 => self.other_eviction(),
                _ => self.keep_one(),
            }
        };
        changes.then(|| self.predict_move())
    }

    /// Evicts a kept window that spans the worst operator.
    fn relieve_peak(&mut self) -> bool {
        let peak = self.prediction.peak_operator;
        self.draw(|walk, id| walk.is_kept(id) && walk.spans(id, peak)).is_some_and(|id| self.evict(id))
    }

    /// Takes over what another plan does with some of the next windows in which it differs.
    fn graft(&mut self) -> bool {
        let donors = self.donors();
        let donor = &donors[self.random.below(donors.len())];
        let length = 1 + self.random.below(CHANGES_MAX);
        let first = self.random.below(self.useful.len());
        let last = (first + self.useful.len() * GRAFT_PERCENT / 100 + 1).min(self.useful.len());
        for position in first..last {
            let id = self.useful[position];
            let action = donor.action(id);
            if action != self.plan.action(id) && self.random.below(4) > 0 {
                self.change(id, action);
                if self.changed.len() == length {
                    break;
                }
            }
        }
        !self.changed.is_empty()
    }

    fn change_one(&mut self) -> bool {
        let id = self.useful[self.random.below(self.useful.len())];
        let now = self.plan.action(id);
        self.draw_action(id, |action| action != now).is_some_and(|action| {
            self.change(id, action);
            true
        })
    }

    /// Keeps one evicted window and evicts one that overlaps it.
    fn exchange(&mut self) -> bool {
        let Some(out) = self.draw(Self::is_evicted) else { return false };
        let lineage = self.problem.lineage;
        let span = *lineage.window(out);
        let Some(into) = self.draw(|walk, id| {
            let window = lineage.window(id);
            window.start < span.end && span.start < window.end && walk.is_kept(id)
        }) else {
            return false;
        };
        self.change(out, Action::Keep);
        self.evict(into)
    }

    /// Keeps one evicted window, and evicts others where bytes are missing for that, one after another, until none are. Of
    /// two that are enough it takes the one that more of the donors evict.
    fn exchange_for_what_fits(&mut self) -> Option<Prediction> {
        let out = self.draw(Self::is_evicted)?;
        self.change(out, Action::Keep);
        let mut after = self.predict_move();
        for _ in 1..CHANGES_MAX {
            let (peak, missing) = (after.peak_operator, after.over_budget_bytes);
            if missing == 0 {
                break;
            }
            let helps = |walk: &Self, id: WindowId| id != out && walk.is_kept(id) && walk.spans(id, peak);
            let enough = [(); 2].map(|()| self.draw(|walk, id| helps(walk, id) && walk.bytes(id) >= missing));
            let enough = enough.into_iter().flatten().max_by_key(|id| self.evicted_by[id.index()]);
            let Some(into) = enough.or_else(|| self.draw(helps)) else { break };
            self.evict(into);
            after = self.predict_move();
        }
        Some(after)
    }

    /// Moves an eviction to the previous or the next window of its storage.
    fn shift(&mut self) -> bool {
        let Some(from) = self.draw(Self::is_evicted) else { return false };
        let to = self.siblings[from.index()][self.random.below(2)];
        let action = self.plan.action(from);
        if to == NONE || !self.problem.allows(WindowId(to), action) || self.plan.action(WindowId(to)) != Action::Keep {
            return false;
        }
        self.change(from, Action::Keep);
        self.change(WindowId(to), action);
        true
    }

    /// Swaps what is recomputed, or the other way round.
    fn other_eviction(&mut self) -> bool {
        let Some(id) = self.draw(Self::is_evicted) else { return false };
        let other = self.other_way(id);
        if !self.problem.allows(id, other) {
            return false;
        }
        self.change(id, other);
        true
    }

    /// The other way to evict a window that is evicted.
    fn other_way(&self, id: WindowId) -> Action {
        if self.plan.action(id) == Action::Swap { Action::Recompute } else { Action::Swap }
    }

    fn keep_one(&mut self) -> bool {
        let drawn = self.draw(Self::is_evicted);
        drawn.is_some_and(|id| {
            self.change(id, Action::Keep);
            true
        })
    }

    fn evict(&mut self, id: WindowId) -> bool {
        self.draw_action(id, |action| action != Action::Keep).is_some_and(|action| {
            self.change(id, action);
            true
        })
    }

    /// One of the useful windows that are `eligible`, each as likely as the others.
    fn draw(&mut self, eligible: impl Fn(&Self, WindowId) -> bool) -> Option<WindowId> {
        for _ in 0..GUESSES {
            let id = self.useful[self.random.below(self.useful.len())];
            if eligible(self, id) {
                return Some(id);
            }
        }
        let mut drawn = std::mem::take(&mut self.drawn);
        drawn.clear();
        drawn.extend(self.useful.iter().copied().filter(|&id| eligible(self, id)));
        let found = (!drawn.is_empty()).then(|| drawn[self.random.below(drawn.len())]);
        self.drawn = drawn;
        found
    }

    fn spans(&self, id: WindowId, operator: usize) -> bool {
        self.problem.lineage.window(id).spans(operator)
    }

    pub(super) fn bytes(&self, id: WindowId) -> u64 {
        let lineage = self.problem.lineage;
        lineage.bytes(lineage.window(id).storage)
    }

    fn is_kept(&self, id: WindowId) -> bool {
        self.plan.action(id) == Action::Keep
    }

    pub(super) fn is_evicted(&self, id: WindowId) -> bool {
        !self.is_kept(id)
    }

    /// A legal action that is `wanted`.
    fn draw_action(&mut self, id: WindowId, wanted: impl Fn(Action) -> bool) -> Option<Action> {
        let problem = &self.problem;
        let legal = || Action::ALL.into_iter().filter(|&action| wanted(action) && problem.allows(id, action));
        let count = legal().count();
        (count > 0).then(|| self.random.below(count)).and_then(|drawn| legal().nth(drawn))
    }

    /// Makes some moves of windows that are alike. Each changes so many that it is predicted as a whole plan.
    pub(super) fn move_alike(&mut self, temperature: f64) {
        for _ in 0..ALIKE_MOVES {
            if self.spent() >= 1.0 {
                break;
            }
            let before = self.judge.best().1;
            let proposed = self.exchange_alike();
            self.take_down(before);
            match proposed {
                Some(after)
                    if self.accepts(self.judge.cost(&self.prediction), self.judge.cost(&after), temperature) =>
                {
                    self.prediction = after;
                    self.changed.clear();
                }
                _ => self.take_back(),
            }
        }
        self.astray = true;
    }

    /// Keeps a stretch of evicted windows that are alike, or evicts them in the other way, and evicts others that are alike
    /// where bytes are missing for that.
    fn exchange_alike(&mut self) -> Option<Prediction> {
        let out = self.draw(Self::is_evicted)?;
        let action = if self.random.below(4) > 0 { Action::Keep } else { self.other_way(out) };
        if !self.problem.allows(out, action) {
            return None;
        }
        self.change_alike(out, action, Self::is_evicted);
        let mut after = self.judge.predict(&self.plan);
        for _ in 0..ALIKE_EVICTIONS_MAX {
            if after.fits() {
                break;
            }
            let peak = after.peak_operator;
            let into = self.draw(|walk, id| walk.is_kept(id) && walk.spans(id, peak))?;
            let action = self.draw_action(into, |action| action != Action::Keep)?;
            self.change_alike(into, action, Self::is_kept);
            after = self.judge.predict(&self.plan);
        }
        Some(after)
    }

    /// Gives `action` to a stretch of the windows that are like `id`, itself among them, in its pass or in all passes, as far as
    /// they are `eligible`.
    fn change_alike(&mut self, id: WindowId, action: Action, eligible: impl Fn(&Self, WindowId) -> bool) {
        let (group, pass, place) = self.alike.group(id);
        let count = group[pass].len();
        let length = 1 + self.random.below(count);
        let first = place.saturating_sub(self.random.below(length)).min(count - length);
        let passes = if group.len() > 1 && self.random.below(4) > 0 { 0..group.len() } else { pass..pass + 1 };
        for pass in passes {
            for position in first..first + length {
                let alike = self.alike.group(id).0[pass].get(position).copied();
                if let Some(alike) = alike.filter(|&alike| eligible(self, alike)) {
                    self.change(alike, action);
                }
            }
        }
    }

    /// Frees a stretch of the iteration and sweeps it anew, with other preferences. Returns the evaluations that it took.
    pub(super) fn move_region(&mut self, temperature: f64) -> u64 {
        let (before, evaluations) = ((self.plan.clone(), self.prediction), self.judge.evaluations);
        let operators = self.problem.trace.operators.len();
        let length = (operators * (5 + self.random.below(30))) / 100;
        let from = self.random.below(operators - length.min(operators - 1)) as u32;
        let until = from + length.max(1) as u32;
        for position in 0..self.useful.len() {
            let id = self.useful[position];
            let window = self.problem.lineage.window(id);
            if window.start < until && from < window.end && self.random.below(4) > 0 {
                self.plan.set(id, Action::Keep);
            }
        }
        match self.guide.take() {
            Some(mut guide) if self.random.below(2) == 0 => {
                self.resweep(&mut guide);
                self.guide = Some(guide);
            }
            guide => {
                self.guide = guide;
                let noise = self.random.unit() * 2.0;
                self.resweep_by_price(noise);
            }
        }
        let (old, new) = (self.judge.cost(&before.1), self.judge.cost(&self.prediction));
        if !self.accepts(old, new, temperature) {
            self.go_to(&before.0, before.1);
        }
        self.judge.evaluations - evaluations
    }

    /// Lets a sweep make the plan at hand fit, cheapest price per byte first, prices being multiplied by noise.
    pub(super) fn resweep_by_price(&mut self, noise: f32) {
        let mut policy = NoisyPrice::new(SplitMix64::new(self.random.next()), noise);
        self.resweep(&mut policy);
    }

    /// Lets `policy` make the plan at hand fit.
    fn resweep(&mut self, policy: &mut dyn Policy) {
        let sweep = &mut self.sweep;
        sweep.restart(&self.plan);
        sweep.decide_until(policy, &|| self.limits.is_past(self.started));
        // Where there was no time for the rest.
        sweep.give_up();
        self.plan.clone_from(sweep.plan());
        self.prediction = sweep.prediction();
        self.astray = true;
        self.judge.evaluations += 1 + sweep.decisions() as u64;
        let before = self.judge.best().1;
        self.judge.note(&self.plan, &self.prediction);
        self.take_down(before);
    }
}
