use super::lowest;
use crate::decode::completed;
use crate::lineage::WindowId;
use crate::observation::Pressure;
use crate::plan::{Action, Plan};
use crate::policy::{Choice, Policy};
use crate::random::SplitMix64;
use crate::search::cost::{Judge, useful_windows};
use crate::sweep::Problem;

/// Plans in a generation.
const POPULATION: usize = 100;
/// Generations.
const GENERATIONS: usize = 200;
/// Plans that are drawn to find one parent: the best of them.
const TOURNAMENT: usize = 4;
/// The best plans go on unchanged.
const ELITE: usize = 4;
/// Windows that a mutation changes, on average.
const MUTATIONS: f32 = 2.0;

/// A genetic algorithm over evictions, begun from Belady's choice (Huang, Jin and Li, *SwapAdvisor: Pushing Deep Learning
/// Beyond the GPU Memory Limit via Smart Swapping*, ASPLOS 2020, sections 4 and 5).
///
/// Deviations: there, genes are the schedule and the memory allocation, and swaps follow from them; here the program fixes
/// the schedule and the allocator the addresses, so the genes are the actions of windows themselves, recompute among
/// them where it is allowed. Belady's rule (evict what is used farthest from now) makes the first plan, and the sweep
/// gives every plan of the first generation its chance to fit.
pub struct Genetic {
    seed: u64,
}

impl Genetic {
    /// The same seed gives the same plan.
    pub fn new(seed: u64) -> Self {
        Genetic { seed }
    }
}

/// Swaps what is used farthest from now; recomputes it where nothing may be swapped.
struct Belady;

impl Policy for Belady {
    fn choose(&mut self, pressure: &Pressure<'_>) -> Option<Choice> {
        let farthest = |action| lowest(pressure, action, |candidate| -(candidate.to_use_ns as f64));
        farthest(Action::Swap).or_else(|| farthest(Action::Recompute))
    }
}

struct Genome {
    plan: Plan,
    cost: f64,
}

struct Breeding<'a, 'b> {
    problem: &'b Problem<'a>,
    judge: Judge<'a>,
    windows: Vec<WindowId>,
    random: SplitMix64,
}

impl Breeding<'_, '_> {
    fn judged(&mut self, plan: Plan) -> Genome {
        let prediction = self.judge.predict(&plan);
        Genome { cost: self.judge.cost(&prediction), plan }
    }

    /// Each window evicted with a chance of its own, and Belady's evictions where that does not suffice.
    fn first(&mut self, index: usize) -> Genome {
        let mut plan = Plan::keep_all(self.problem.lineage.windows().len());
        let chance = index as f32 / POPULATION as f32;
        for position in 0..self.windows.len() {
            if self.random.unit() < chance {
                self.mutate_one(&mut plan, position);
            }
        }
        self.judged(completed(*self.problem, plan, &mut Belady).plan)
    }

    fn mutate_one(&mut self, plan: &mut Plan, position: usize) {
        let window = self.windows[position];
        let action = Action::ALL[self.random.below(Action::ALL.len())];
        if self.problem.allows(window, action) {
            plan.set(window, action);
        }
    }

    fn parent<'p>(&mut self, population: &'p [Genome]) -> &'p Plan {
        let drawn = (0..TOURNAMENT).map(|_| &population[self.random.below(population.len())]);
        let best = drawn.min_by(|a, b| a.cost.total_cmp(&b.cost));
        &best.expect("a tournament has entrants").plan
    }

    /// Two parents crossed at two points in time, and mutated.
    fn child(&mut self, population: &[Genome]) -> Genome {
        let mut plan = self.parent(population).clone();
        let other = self.parent(population).clone();
        let (one, two) = (self.random.below(self.windows.len() + 1), self.random.below(self.windows.len() + 1));
        for &window in &self.windows[one.min(two)..one.max(two)] {
            plan.set(window, other.action(window));
        }
        let chance = MUTATIONS / self.windows.len() as f32;
        for position in 0..self.windows.len() {
            if self.random.unit() < chance {
                self.mutate_one(&mut plan, position);
            }
        }
        self.judged(plan)
    }
}

impl Policy for Genetic {
    fn open(&mut self, problem: &Problem<'_>) -> Plan {
        let (windows, random) = (useful_windows(problem), SplitMix64::new(self.seed));
        let mut breeding = Breeding { problem, judge: Judge::priced_by_a_sweep(*problem), windows, random };
        if breeding.windows.is_empty() {
            return Plan::keep_all(problem.lineage.windows().len());
        }
        let by_cost = |a: &Genome, b: &Genome| a.cost.total_cmp(&b.cost);
        let mut population: Vec<Genome> = (0..POPULATION).map(|index| breeding.first(index)).collect();
        population.sort_by(by_cost);
        for _ in 0..GENERATIONS {
            let children: Vec<Genome> = (ELITE..POPULATION).map(|_| breeding.child(&population)).collect();
            population.truncate(ELITE);
            population.extend(children);
            population.sort_by(by_cost);
        }
        breeding.judge.best().0.clone()
    }
}
