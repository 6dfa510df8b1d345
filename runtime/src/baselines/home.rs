use crate::lineage::WindowId;
use crate::observation::Pressure;
use crate::plan::{Action, Plan};
use crate::policy::{Choice, Policy};
use crate::random::SplitMix64;
use crate::search::cost::{Judge, NoisyPrice, useful_windows};
use crate::sweep::Problem;

/// Particles, as in the paper.
const PARTICLES: usize = 500;
/// Rounds in which every particle moves once.
const ROUNDS: usize = 40;
/// How much of its velocity a particle keeps, and how strongly it is drawn to its own best place and to the swarm's
/// (Clerc and Kennedy, *The Particle Swarm*, IEEE Transactions on Evolutionary Computation 2002).
const INERTIA: f32 = 0.7298;
const PULL: f32 = 1.4962;
/// Keep, swap and recompute have a third of a coordinate's range each.
const RANGE: f32 = 3.0;

/// Keep, swap or recompute for each idle storage, by particle swarm over a cost model of linear time (*HOME: A Holistic
/// GPU Memory Management Framework for Deep Learning*, IEEE Transactions on Computers 2023; known to us by its abstract).
///
/// Deviations: a coordinate is a window and not a tensor; the cost model is the timeline, with bytes over the budget at
/// a price; coefficients and coding are ours to choose; it moves for 40 rounds, where the paper's takes minutes. A window that may not be recomputed reads that third as keep.
/// Where no particle has held the budget, what the best one lacks is evicted by price.
pub struct Home {
    seed: u64,
    repair: NoisyPrice,
}

impl Home {
    /// The same seed gives the same plan.
    pub fn new(seed: u64) -> Self {
        Home { seed, repair: NoisyPrice::quiet() }
    }
}

/// A place in the space of plans: a coordinate per window that matters.
#[derive(Clone)]
struct Place {
    at: Vec<f32>,
    cost: f64,
}

struct Particle {
    at: Vec<f32>,
    velocity: Vec<f32>,
    best: Place,
}

struct Swarm<'a, 'b> {
    problem: &'b Problem<'a>,
    judge: Judge<'a>,
    windows: Vec<WindowId>,
    plan: Plan,
    random: SplitMix64,
}

impl Swarm<'_, '_> {
    fn decode(&mut self, at: &[f32]) {
        for (&window, &coordinate) in self.windows.iter().zip(at) {
            let action = Action::ALL[(coordinate as usize).min(Action::ALL.len() - 1)];
            let action = if self.problem.allows(window, action) { action } else { Action::Keep };
            self.plan.set(window, action);
        }
    }

    fn cost(&mut self, at: &[f32]) -> f64 {
        self.decode(at);
        let prediction = self.judge.predict(&self.plan);
        self.judge.cost(&prediction)
    }

    /// The first three particles keep, swap and recompute everything; the others begin anywhere.
    fn particle(&mut self, index: usize) -> Particle {
        let uniform = Action::ALL.get(index).map(|_| index as f32 + 0.5);
        let random = &mut self.random;
        let at: Vec<f32> = self.windows.iter().map(|_| uniform.unwrap_or_else(|| random.unit() * RANGE)).collect();
        let velocity = self.windows.iter().map(|_| random.unit() - 0.5).collect();
        let cost = self.cost(&at);
        Particle { velocity, best: Place { at: at.clone(), cost }, at }
    }

    fn step(&mut self, particle: &mut Particle, leader: &Place) {
        let drawn_to = particle.best.at.iter().zip(&leader.at);
        for ((at, velocity), (own, leader)) in particle.at.iter_mut().zip(&mut particle.velocity).zip(drawn_to) {
            let (to_own, to_leader) = (self.random.unit() * (own - *at), self.random.unit() * (leader - *at));
            *velocity = INERTIA * *velocity + PULL * (to_own + to_leader);
            *at = (*at + *velocity).clamp(0.0, RANGE);
        }
        let cost = self.cost(&particle.at);
        if cost < particle.best.cost {
            particle.best.at.clone_from(&particle.at);
            particle.best.cost = cost;
        }
    }
}

impl Policy for Home {
    fn open(&mut self, problem: &Problem<'_>) -> Plan {
        let plan = Plan::keep_all(problem.lineage.windows().len());
        let random = SplitMix64::new(self.seed);
        let windows = useful_windows(problem);
        let mut swarm = Swarm { problem, judge: Judge::priced_by_a_sweep(*problem), windows, plan, random };
        if swarm.windows.is_empty() {
            return swarm.plan;
        }
        let mut particles: Vec<Particle> = (0..PARTICLES).map(|index| swarm.particle(index)).collect();
        let best_of = |particles: &[Particle]| {
            let best = particles.iter().map(|particle| &particle.best);
            best.min_by(|a, b| a.cost.total_cmp(&b.cost)).expect("there are particles").clone()
        };
        let mut leader = best_of(&particles);
        for _ in 0..ROUNDS {
            particles.iter_mut().for_each(|particle| swarm.step(particle, &leader));
            leader = best_of(&particles);
        }
        swarm.judge.best().0.clone()
    }

    fn choose(&mut self, pressure: &Pressure<'_>) -> Option<Choice> {
        self.repair.choose(pressure)
    }
}
