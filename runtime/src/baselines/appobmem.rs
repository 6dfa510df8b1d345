use crate::lineage::{Lineage, Window, WindowId};
use crate::plan::{Action, Plan};
use crate::policy::Policy;
use crate::slack::Slack;
use crate::sweep::Problem;
use crate::timeline::prefetch::clamped;

/// Swaps blocks that are alive at the peak, largest bytes × idle time first, as long as the copies are hidden (Li et al.,
/// *An Application-oblivious Memory Scheduling System for DNN Accelerators* (AppObMem), ACM TACO 2022; the test for hidden
/// copies, ATI ≥ bytes / B_d2h + bytes / B_h2d, from Li et al., *Pinpointing the Memory Behaviors of DNN Training*, 2021).
///
/// Only the abstracts were at hand. From them: no layers, no graph, large blocks with long idle times at the peak. Ours:
/// a block is gone from when its offload is done until its prefetch has to start; then the next peak is looked at, until
/// none exceeds the budget or nothing that is hidden covers it.
pub struct AppObMem;

impl Policy for AppObMem {
    fn open(&mut self, problem: &Problem<'_>) -> Plan {
        let lineage = problem.lineage;
        let mut plan = Plan::keep_all(lineage.windows().len());
        if !problem.actions.swap {
            return plan;
        }
        let mut absent = absences(problem);
        // Largest bytes × idle time first; the earlier window of equals.
        absent.sort_by_key(|absence| (std::cmp::Reverse(absence.area), absence.window));
        let load = lineage.keep_all_bytes();
        let mut slack = Slack::new(load.len());
        slack.settle(|index, _| clamped(problem.budget_bytes) - load[index] as i64);
        loop {
            let (peak, least) = slack.lowest().expect("an iteration has an end");
            // What is gone already does not help again.
            let covers = |absence: &&Absence| {
                (absence.from..absence.to).contains(&peak) && plan.action(absence.window) == Action::Keep
            };
            let Some(absence) = absent.iter().find(covers).filter(|_| least < 0) else { return plan };
            plan.set(absence.window, Action::Swap);
            slack.add(absence.from..absence.to, absence.bytes as i64);
        }
    }
}

/// While a swapped window's bytes are off the device.
struct Absence {
    window: WindowId,
    bytes: u64,
    /// Operator indices `from..to`.
    from: usize,
    to: usize,
    /// Bytes × idle time.
    area: u128,
}

/// Absences of the windows whose copies are hidden.
fn absences(problem: &Problem<'_>) -> Vec<Absence> {
    let (lineage, link) = (problem.lineage, problem.tiers.host);
    let absence = |(id, window): (u32, &Window)| {
        let bytes = problem.trace.storages[window.storage.index()].bytes;
        let (start_ns, end_ns) = (idle_from_ns(lineage, window), lineage.start_ns(window.end as usize));
        let prefetch_ns = if window.used_again { link.prefetch_ns(bytes) } else { 0 };
        let (gone_ns, back_ns) = (start_ns + link.offload_ns(bytes), end_ns.saturating_sub(prefetch_ns));
        let first_from = |ns| lineage.first_start_from(window.start as usize..window.end as usize, ns);
        let (from, to) = (first_from(gone_ns), first_from(back_ns));
        let area = u128::from(bytes) * u128::from(end_ns - start_ns);
        (gone_ns <= back_ns && from < to).then_some(Absence { window: WindowId(id), bytes, from, to, area })
    };
    (0..).zip(lineage.windows()).filter_map(absence).collect()
}

/// When the window's storage falls idle.
fn idle_from_ns(lineage: &Lineage, window: &Window) -> u64 {
    if window.start == 0 { 0 } else { lineage.start_ns(window.start as usize) }
}
