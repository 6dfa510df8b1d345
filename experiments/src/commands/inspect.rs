//! `plimsoll inspect`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use plimsoll_runtime::observation::FEATURE_TABLE;
use plimsoll_runtime::obstacle::obstacles;
use plimsoll_runtime::trace::OperatorId;
use plimsoll_runtime::{FileKind, Lineage, PlanFile, PolicyFile, Trace};

use crate::link::described;
use crate::table::{Table, mib, milliseconds};

/// Flags.
#[derive(Args)]
pub struct Arguments {
    /// A trace, plan or policy file
    file: PathBuf,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> anyhow::Result<()> {
    match FileKind::of(&arguments.file)? {
        Some(FileKind::Trace) => trace(&Trace::load(&arguments.file)?),
        Some(FileKind::Plan) => plan(&PlanFile::load(&arguments.file)?),
        Some(FileKind::Policy) => policy(&PolicyFile::load(&arguments.file)?),
        Some(FileKind::TrainingState) => {
            bail!("{}: a training run goes on from it: `train --resume`", arguments.file.display())
        }
        None => bail!("{}: neither a trace, nor a plan, nor a policy", arguments.file.display()),
    }
    Ok(())
}

fn trace(trace: &Trace) {
    let lineage = Lineage::of(trace);
    println!("trace of {} (family {}) on {}", trace.workload, trace.family, trace.device);
    println!("fingerprint {}", trace.fingerprint());
    println!(
        "{} operators, {} storages, {} windows, {} of them recomputable",
        trace.operators.len(),
        trace.storages.len(),
        lineage.windows().len(),
        lineage.windows().iter().filter(|window| window.recomputable).count(),
    );
    println!(
        "peak {} MiB, makespan {} ms (median of {} iterations)",
        mib(trace.peak_bytes),
        milliseconds(trace.makespan_ns),
        trace.recorded_iterations,
    );
    let mut classes = BTreeMap::new();
    for storage in &trace.storages {
        let (count, bytes) = classes.entry(storage.class).or_insert((0u64, 0u64));
        *count += 1;
        *bytes += storage.bytes;
    }
    let mut table = Table::new(["class", "storages", "MiB"]);
    for (class, (count, bytes)) in classes {
        table.row([format!("{class:?}"), count.to_string(), mib(bytes)]);
    }
    println!("\n{table}");
    let mut table = Table::new(["what may be done", "what stands in the way", "idle", "MiB"]);
    for (obstacle, share) in obstacles(trace, &lineage) {
        let actions = obstacle.actions().to_owned();
        table.row([actions, obstacle.to_string(), share.count.to_string(), mib(share.bytes)]);
    }
    println!("{table}");
    let mut reasons = BTreeMap::new();
    for (index, operator) in trace.operators.iter().enumerate() {
        if let Some(why) = &operator.not_replayable {
            let name = trace.operator_name(OperatorId(index as u32));
            *reasons.entry((name, why.as_str())).or_insert(0u64) += 1;
        }
    }
    if !reasons.is_empty() {
        let mut table = Table::new(["operator that is not rerun", "why", "times"]);
        for ((name, why), count) in reasons {
            table.row([name.to_owned(), why.to_owned(), count.to_string()]);
        }
        println!("{table}");
    }
}

fn plan(file: &PlanFile) {
    let counts = file.plan.counts();
    println!("plan for {} (trace {}) by {}", file.workload, file.fingerprint, file.policy);
    println!("budget {} MiB, over {}", mib(file.budget_bytes), described(&file.tiers.host));
    println!("{} windows kept, {} swapped, {} recomputed", counts.keep, counts.swap, counts.recompute);
}

fn policy(file: &PolicyFile) {
    let provenance = &file.provenance;
    println!("policy for the family {}", file.family);
    println!("{} parameters, {} features", file.weights.parameters(), FEATURE_TABLE.len());
    println!("actions: keep{}{}", yes(file.actions.swap, ", swap"), yes(file.actions.recompute, ", recompute"));
    println!("made by: {}", provenance.command);
    println!("seed {}, commit {}, {}", provenance.seed, provenance.commit, provenance.date);
    if !provenance.recorded_on.is_empty() {
        println!("learned on what was recorded on: {}", provenance.recorded_on.join(", "));
    }
    println!("by a training that took {:.0} s", provenance.training_seconds);
    for (name, value) in &provenance.quality {
        println!("{name}: {value:.4}");
    }
}

fn yes(condition: bool, text: &str) -> &str {
    if condition { text } else { "" }
}
