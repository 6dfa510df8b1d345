use crate::lineage::{Lineage, Window, WindowId};
use crate::plan::{Action, Plan};
use crate::policy::Policy;
use crate::sweep::Problem;

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
        let mut load = lineage.keep_all_bytes().to_vec();
        loop {
            let (peak, &bytes) =
                load.iter().enumerate().max_by_key(|&(_, bytes)| bytes).expect("an iteration has an end");
            let covers = |absence: &Absence| absence.from <= peak && peak < absence.to;
            let Some(found) = absent.iter().position(covers).filter(|_| bytes > problem.budget_bytes) else {
                return plan;
            };
            let absence = absent.remove(found);
            plan.set(absence.window, Action::Swap);
            load[absence.from..absence.to].iter_mut().for_each(|load| *load -= absence.bytes);
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
