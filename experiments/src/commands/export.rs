//! `plimsoll export`.

use std::path::PathBuf;

use anyhow::{Context, bail, ensure};
use clap::Args;
use plimsoll_runtime::file::write_whole;
use plimsoll_runtime::timetable::Timetable;
use plimsoll_runtime::units::Budget;
use plimsoll_runtime::{Action, ActionSet, Lineage, Plan, PlanFile, Planner, Problem, SlowTiers, Timeline, Trace};

use crate::chosen::Chosen;
use crate::chrome::{Subject, chrome_trace};
use crate::link::{LinkFlag, described};
use crate::machine::HardwareFlag;
use crate::table::{mib, milliseconds};

/// Flags.
#[derive(Args)]
pub struct Arguments {
    /// A recorded trace
    trace: PathBuf,
    /// A plan for it, as `plimsoll plan --out` writes it: over the link that it was made for, unless --link names another
    #[arg(long, value_name = "FILE", required_unless_present = "policy", conflicts_with_all = ["policy", "budget"])]
    plan: Option<PathBuf>,
    /// Plan it now, with a policy file or the baseline of that name
    #[arg(long, value_name = "FILE|BASELINE", requires = "budget")]
    policy: Option<String>,
    /// Device bytes, such as 512MiB, or a share of the keep-all peak, such as 60%
    #[arg(long, value_name = "BUDGET")]
    budget: Option<Budget>,
    #[command(flatten)]
    hardware: HardwareFlag,
    #[command(flatten)]
    link: LinkFlag,
    /// Where to write the Chrome trace
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

/// A plan, and for which budget and which link it was made by whom.
struct Found {
    plan: Plan,
    policy: String,
    budget_bytes: u64,
    tiers: SlowTiers,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> anyhow::Result<()> {
    let machine = arguments.hardware.machine()?;
    let trace = machine.load(&arguments.trace)?;
    let lineage = Lineage::of(&trace);
    let link = || machine.link(&arguments.link, &trace).map(SlowTiers::from);
    let found = match (&arguments.plan, &arguments.policy, arguments.budget) {
        (Some(path), ..) => {
            let file = read(path, &trace, &lineage).with_context(|| format!("--plan {}", path.display()))?;
            let tiers = if arguments.link.is_emulated() { link()? } else { file.tiers };
            Found { plan: file.plan, policy: file.policy, budget_bytes: file.budget_bytes, tiers }
        }
        (None, Some(policy), Some(budget)) => {
            let policy = Chosen::parse(policy)?;
            policy.warn_of_mismatch(&trace.family, ActionSet::ALL);
            let budget_bytes = budget.resolve(trace.peak_bytes);
            let tiers = link()?;
            let problem = Problem { trace: &trace, lineage: &lineage, tiers, budget_bytes, actions: ActionSet::ALL };
            let plan = policy.plan_or_refuse(problem, &Planner::default())?.planned.plan;
            Found { plan, policy: policy.name().to_owned(), budget_bytes, tiers }
        }
        _ => bail!("expected --plan, or --policy with --budget"),
    };
    let Found { plan, policy, budget_bytes, tiers } = found;
    let (schedule, prediction) = Timeline::new(&trace, &lineage, tiers).schedule(&plan, budget_bytes);
    let timetable = Timetable::of(&trace, &lineage, &schedule, tiers);
    assert_eq!(timetable.makespan_ns, prediction.makespan_ns, "the timetable does not add up to the prediction");
    let subject = Subject { trace: &trace, policy: &policy, budget_bytes };
    write_whole(&arguments.out, &serde_json::to_vec(&chrome_trace(&subject, &timetable))?)?;
    println!(
        "{}: {} on {} at {} MiB over {}, {} spans in {} ms, peak {} MiB",
        arguments.out.display(),
        policy,
        trace.workload,
        mib(budget_bytes),
        described(&tiers.host),
        timetable.spans.len(),
        milliseconds(prediction.makespan_ns),
        mib(prediction.peak_bytes),
    );
    Ok(())
}

/// Reads a plan and checks that it is one for `trace`.
fn read(path: &PathBuf, trace: &Trace, lineage: &Lineage) -> anyhow::Result<PlanFile> {
    let file = PlanFile::load(path)?;
    let (expected, found) = (trace.fingerprint(), &file.fingerprint);
    ensure!(expected == *found, "made for the trace {found}, and this one is {expected}");
    let is_of_its_time = file.device.is_empty() || file.device == trace.device;
    ensure!(
        is_of_its_time,
        "made for the times of {}, and these are those of {}: --hardware",
        file.device,
        trace.device
    );
    let (windows, actions) = (lineage.windows(), file.plan.actions());
    ensure!(windows.len() == actions.len(), "{} actions for {} windows", actions.len(), windows.len());
    let illegal =
        windows.iter().zip(actions).position(|(window, &action)| action == Action::Recompute && !window.recomputable);
    ensure!(illegal.is_none(), "window {} is recomputed and cannot be", illegal.unwrap_or_default());
    Ok(file)
}
