//! The exact reference: the best plan that can be found, and a proven bound on what any plan could do.
//!
//! Three things work on it, and each hands what it found to the next. The program ([`program`]), a relaxation of the
//! timeline that HiGHS solves, first linear and then whole, gives the bound. The search on the timeline, begun from the
//! program's plan and every baseline's, gives the plan. Branch and bound over the windows' actions ([`branch`]) closes
//! what is left between them where the trace is small. The bound holds for the timeline's model of the iteration, like
//! every prediction; where the gap is 0 no plan is better.

mod branch;
mod program;

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use plimsoll_runtime::baselines::plans_of_all;
use plimsoll_runtime::search::{Limits, search};
use plimsoll_runtime::{Plan, Planned, Problem};
use serde::Serialize;

use crate::highs::{Answer, Highs, HighsError, Solver};
use crate::table::percent;
use branch::{Incumbent, Tree};
use program::{Program, Size, choose_cuts};

/// The name on the command line and in reports.
pub const EXACT: &str = "exact";

/// Operators at which the first program counts bytes. Each next one counts them at twice as many.
const CUTS_MIN: usize = 8;
/// Columns up to which HiGHS gets anywhere.
const COLUMNS_MAX: usize = 60_000;
/// Share of the time limit that a linear program may take for a finer one to be tried, and for the whole one to be.
const LINEAR_SHARE: f64 = 0.02;
/// Whole programs that are solved one after another, each finer than the last.
const WHOLE_RUNGS: usize = 2;
/// Share of the time limit after which linear programs end.
const LINEAR_UNTIL: f64 = 0.2;
/// Share of the time limit after which the search ends.
const SEARCH_UNTIL: f64 = 0.4;
/// Share of the time limit after which whole programs end.
const WHOLE_UNTIL: f64 = 0.9;
/// Runs of the timeline per window in the search, so that small problems do not wait for it.
const EVALUATIONS_PER_WINDOW: u64 = 2_000;

/// What is known so far.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// What is at work.
    pub phase: &'static str,
    /// No plan that fits takes less.
    pub lower_bound_ns: u64,
    /// The best plan that fits takes so long.
    pub best_ns: Option<u64>,
}

/// How far the best plan is from a proven optimum.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Proof {
    /// No plan that fits takes less; none where it is proven that no plan fits.
    pub lower_bound_ns: Option<u64>,
    /// (makespan − bound) / bound; none where no plan was found.
    pub gap: Option<f64>,
    /// The program that gave the bound.
    pub program: Size,
    /// Operators at which keep-all exceeds the budget.
    pub over_budget_operators: usize,
    /// Nodes of branch and bound.
    pub nodes: u64,
}

impl Proof {
    /// The proof in words, for makespans over keep-all's.
    pub fn sentence(&self, keep_all_ns: u64) -> String {
        let Some(bound_ns) = self.lower_bound_ns else { return "no plan holds this budget: proven".to_owned() };
        let bound = percent(bound_ns as f64 / keep_all_ns as f64 - 1.0);
        let Size { cuts, columns, rows } = self.program;
        let program = format!(
            "{columns} columns, {rows} rows, bytes counted at {cuts} of {} operators over the budget, {} nodes",
            self.over_budget_operators, self.nodes
        );
        match self.gap {
            Some(0.0) => format!("proven optimal on the timeline ({program})"),
            Some(gap) => format!("no plan takes less than {bound}: gap {:.2}% ({program})", 100.0 * gap),
            None => format!("no plan takes less than {bound} ({program})"),
        }
    }
}

/// The best plan, and what is proven.
pub struct Solved {
    /// The plan.
    pub planned: Planned,
    /// The proof.
    pub proof: Proof,
}

struct Solve<'a, 'h> {
    highs: &'h Highs,
    problem: Problem<'a>,
    started: Instant,
    limit: Duration,
    watch: &'h (dyn Fn(&Progress) -> bool + Sync),
    incumbent: Incumbent<'a>,
    lower_bound_ns: u64,
    /// It is proven that no plan fits.
    hopeless: bool,
    stopped: bool,
}

/// A limit that is none.
const LIMIT_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// Solves `problem` as far as `limit` allows, for a year at most. `watch` hears of progress, and ends it by answering false.
pub fn solve(
    highs: &Highs,
    problem: Problem<'_>,
    limit: Duration,
    watch: &(dyn Fn(&Progress) -> bool + Sync),
) -> Result<Solved, HighsError> {
    let solve = Solve {
        highs,
        problem,
        started: Instant::now(),
        limit: limit.min(LIMIT_MAX),
        watch,
        incumbent: Incumbent::new(problem),
        lower_bound_ns: problem.lineage.keep_all_makespan_ns(),
        hopeless: false,
        stopped: false,
    };
    solve.run()
}

impl Solve<'_, '_> {
    fn run(mut self) -> Result<Solved, HighsError> {
        let over = choose_cuts(&self.problem, usize::MAX).len();
        let (mut size, mut nodes) = (Size::default(), 0);
        if !self.is_closed() {
            let mut starts = self.starts();
            let programs = self.climb(over, &mut starts, &mut size)?;
            self.search(&starts, EVALUATIONS_PER_WINDOW, SEARCH_UNTIL);
            let last = self.solve_whole(&programs, &mut size)?;
            nodes = self.branch(&programs[last])?;
        }
        let best_ns = self.incumbent.makespan_ns();
        let bound_ns = self.lower_bound_ns;
        let proof = Proof {
            lower_bound_ns: (!self.hopeless).then_some(bound_ns),
            gap: best_ns.map(|best| best.saturating_sub(bound_ns) as f64 / bound_ns.max(1) as f64),
            program: size,
            over_budget_operators: over,
            nodes,
        };
        let Incumbent { plan, prediction, .. } = self.incumbent;
        let decide_ns = self.started.elapsed().as_nanos() as u64;
        Ok(Solved { planned: Planned { plan, prediction, decisions: 0, decide_ns }, proof })
    }

    /// Solves linear programs of ever more cuts, until one takes long. Returns those that did not, the first at any rate.
    fn climb(&mut self, over: usize, starts: &mut Vec<Plan>, size: &mut Size) -> Result<Vec<Program>, HighsError> {
        let mut programs: Vec<Program> = Vec::new();
        let mut cuts_max = CUTS_MIN;
        loop {
            let program = Program::new(&self.problem, &choose_cuts(&self.problem, cuts_max));
            if program.model.columns() > COLUMNS_MAX && !programs.is_empty() {
                break;
            }
            let began = Instant::now();
            starts.extend(self.relax("linear program", &program, false, LINEAR_UNTIL, size)?.0);
            let took_long = began.elapsed() > self.limit.mul_f64(LINEAR_SHARE);
            if !took_long || programs.is_empty() {
                programs.push(program);
            }
            if took_long || self.is_closed() || cuts_max >= over {
                break;
            }
            cuts_max *= 2;
        }
        Ok(programs)
    }

    /// Solves whole programs, from a middling one up to the finest for which there is time. Returns which that was.
    fn solve_whole(&mut self, programs: &[Program], size: &mut Size) -> Result<usize, HighsError> {
        let first = programs.len().saturating_sub(WHOLE_RUNGS);
        for (rung, program) in programs.iter().enumerate().skip(first) {
            let (plan, finished) = self.relax("whole program", program, true, WHOLE_UNTIL, size)?;
            // It may not fit, being a relaxation's.
            let starts: Vec<Plan> = plan.into_iter().chain([self.incumbent.plan.clone()]).collect();
            self.search(&starts, EVALUATIONS_PER_WINDOW / 10, 1.0);
            if !finished || self.is_closed() {
                return Ok(rung);
            }
        }
        Ok(programs.len() - 1)
    }

    fn is_closed(&self) -> bool {
        self.hopeless || self.stopped || self.incumbent.makespan_ns().is_some_and(|best| best <= self.lower_bound_ns)
    }

    fn until(&self, share: f64) -> Instant {
        self.started + self.limit.mul_f64(share)
    }

    fn left(&self, share: f64) -> Duration {
        self.until(share).saturating_duration_since(Instant::now())
    }

    fn progress(&self, phase: &'static str) -> Progress {
        Progress { phase, lower_bound_ns: self.lower_bound_ns, best_ns: self.incumbent.makespan_ns() }
    }

    /// Every baseline's plan.
    fn starts(&mut self) -> Vec<Plan> {
        let starts = plans_of_all(self.problem, 0);
        starts.iter().for_each(|start| self.incumbent.offer(start));
        starts
    }

    /// Solves the program, linear or whole, for a bound and perhaps a plan; and says whether it was solved to its end.
    fn relax(
        &mut self,
        phase: &'static str,
        program: &Program,
        whole: bool,
        share: f64,
        size: &mut Size,
    ) -> Result<(Option<Plan>, bool), HighsError> {
        let left = self.left(share);
        if self.is_closed() || left.is_zero() {
            return Ok((None, false));
        }
        let (progress, stopped) = (self.progress(phase), AtomicBool::new(false));
        let watch = |bound: f64| {
            let bound_ns = program.makespan_ns(bound).max(progress.lower_bound_ns);
            let go_on = (self.watch)(&Progress { lower_bound_ns: bound_ns, ..progress });
            stopped.fetch_or(!go_on, Ordering::Relaxed);
            go_on
        };
        let answer = Solver::new(self.highs, &program.model, whole)?.solve(left, &watch)?;
        self.stopped |= stopped.into_inner();
        Ok(match answer {
            Answer::Infeasible => {
                self.hopeless = true;
                *size = program.size();
                (None, true)
            }
            Answer::Bounded { bound, solution, finished } => {
                let bound_ns = program.makespan_ns(bound);
                if bound_ns > self.lower_bound_ns || *size == Size::default() {
                    self.lower_bound_ns = bound_ns.max(self.lower_bound_ns);
                    *size = program.size();
                }
                let plan = solution.map(|solution| program.plan(&solution));
                plan.iter().for_each(|plan| self.incumbent.offer(plan));
                (plan, finished)
            }
        })
    }

    /// Makes starts fit and improves them.
    fn search(&mut self, starts: &[Plan], evaluations_per_window: u64, share: f64) {
        let left = self.left(share);
        if self.is_closed() || left.is_zero() {
            return;
        }
        let evaluations = evaluations_per_window * self.problem.lineage.windows().len() as u64;
        let limits = Limits { time: Some(left), ..Limits::evaluations(evaluations) };
        let (progress, bound_ns) = (self.progress("search"), self.lower_bound_ns);
        let mut stopped = false;
        let found = search(self.problem, starts, limits, None, &mut |best| {
            let best_ns = best.prediction.fits().then_some(best.prediction.makespan_ns);
            stopped = !(self.watch)(&Progress { best_ns, ..progress });
            let closed = best_ns.is_some_and(|best| best <= bound_ns);
            if stopped || closed { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        self.stopped |= stopped;
        self.incumbent.offer(&found.plan);
    }

    /// Closes the gap by branch and bound, as far as time allows.
    fn branch(&mut self, program: &Program) -> Result<u64, HighsError> {
        if self.is_closed() || self.left(1.0).is_zero() {
            return Ok(0);
        }
        let mut tree = Tree::new(self.highs, self.problem, program)?;
        let (deadline, progress) = (self.until(1.0), self.progress("branch and bound"));
        let watch = |best_ns: Option<u64>, bound_ns: u64| {
            (self.watch)(&Progress { best_ns, lower_bound_ns: bound_ns.max(progress.lower_bound_ns), ..progress })
        };
        tree.run(&mut self.incumbent, deadline, &watch)?;
        match (tree.bound_ns(), self.incumbent.makespan_ns()) {
            (Some(open_ns), best_ns) => {
                let bound_ns = best_ns.map_or(open_ns, |best| best.min(open_ns));
                self.lower_bound_ns = self.lower_bound_ns.max(bound_ns);
            }
            (None, Some(best_ns)) => self.lower_bound_ns = best_ns,
            (None, None) => self.hopeless = true,
        }
        Ok(tree.nodes)
    }
}

#[cfg(test)]
mod tests;
