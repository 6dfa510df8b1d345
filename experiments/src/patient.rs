//! Deciding with time to spare: the exact reference and the search, with progress. Ctrl-C ends them with what they have.

use std::ops::ControlFlow;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use plimsoll_runtime::baselines::plans_of_all;
use plimsoll_runtime::planner::SEARCH;
use plimsoll_runtime::search::{Limits, search};
use plimsoll_runtime::{Decided, Planned, Problem};

use crate::exact::{EXACT, Progress, Proof, solve};
use crate::highs::Highs;
use crate::interrupt::watch_for_interrupt;
use crate::progress;
use crate::table::percent;

/// The time that the exact reference takes, unless the command line says otherwise.
const EXACT_LIMIT: Duration = Duration::from_secs(60);

/// Solves `problem` exactly, or as far as `limit` allows.
pub fn decide_exactly(problem: Problem<'_>, limit: Option<Duration>) -> anyhow::Result<(Decided, Proof)> {
    let highs = Highs::find()?;
    let interrupted = watch_for_interrupt()?;
    let spinner = progress::spinner("exact");
    let overhead = overhead_of(&problem);
    let solved = solve(&highs, problem, limit.unwrap_or(EXACT_LIMIT), &|progress: &Progress| {
        let best = progress.best_ns.map_or_else(|| "none yet".to_owned(), &overhead);
        spinner.set_message(format!("{}: bound {}, best {best}", progress.phase, overhead(progress.lower_bound_ns)));
        !interrupted.load(Ordering::Relaxed)
    });
    spinner.finish_and_clear();
    let solved = solved?;
    Ok((Decided { planned: solved.planned, by: EXACT }, solved.proof))
}

/// Searches for `limit` from every baseline's plan, which take time beside that; `seed` says what is drawn.
pub fn decide_by_search(problem: Problem<'_>, limit: Duration, seed: u64) -> anyhow::Result<Decided> {
    let interrupted = watch_for_interrupt()?;
    let spinner = progress::spinner(SEARCH);
    let overhead = overhead_of(&problem);
    let started = Instant::now();
    let limits = Limits { seed, ..Limits::wall(limit) };
    let found = search(problem, &plans_of_all(problem, seed), limits, None, &mut |best| {
        let now =
            if best.prediction.fits() { overhead(best.prediction.makespan_ns) } else { "none fits yet".to_owned() };
        spinner.set_message(format!("best {now} after {} plans", best.evaluations));
        if interrupted.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    spinner.finish_and_clear();
    let planned = Planned { decide_ns: started.elapsed().as_nanos() as u64, ..found.into() };
    Ok(Decided { planned, by: SEARCH })
}

fn overhead_of(problem: &Problem<'_>) -> impl Fn(u64) -> String + Sync + use<> {
    let keep_all_ns = problem.lineage.keep_all_makespan_ns() as f64;
    move |makespan_ns| percent(makespan_ns as f64 / keep_all_ns - 1.0)
}
