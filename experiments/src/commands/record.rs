//! `plimsoll record`.

use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::{Args, ValueEnum};
use plimsoll_env::config::{FamilyConfig, Split};
use plimsoll_runtime::Trace;
use plimsoll_runtime::file::require_writable;

use crate::loops::{LoopFlags, RECORDED_ITERATIONS, RecordedLoop};
use crate::members;
use crate::table::{Table, mib, milliseconds};

/// Flags.
#[derive(Args)]
pub struct Arguments {
    /// Configuration of the model family
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Name of a workload in the configuration; may be given several times
    #[arg(long, value_name = "NAME", required_unless_present = "members")]
    workload: Vec<String>,
    /// Record members that are drawn from the ranges of the configuration: those to train on, or those held out
    #[arg(long, value_enum, value_name = "SPLIT", requires = "count")]
    members: Option<SplitName>,
    /// How many members to draw; --seed says which
    #[arg(long, value_name = "N", requires = "members", value_parser = clap::value_parser!(u16).range(1..))]
    count: Option<u16>,
    /// Where to write the trace; a folder where there are several, or drawn ones
    #[arg(long, value_name = "FILE|DIR")]
    out: PathBuf,
    /// Iterations to record, after a warm-up
    #[arg(long, default_value_t = RECORDED_ITERATIONS as u64, value_name = "N", value_parser = clap::value_parser!(u64).range(2..))]
    iterations: u64,
    #[command(flatten)]
    flags: LoopFlags,
}

/// The side of the split that drawn members are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SplitName {
    /// Members to train on
    Train,
    /// Members of another structure, to judge by
    HeldOut,
}

impl From<SplitName> for Split {
    fn from(name: SplitName) -> Split {
        match name {
            SplitName::Train => Split::Train,
            SplitName::HeldOut => Split::HeldOut,
        }
    }
}

/// Runs the command.
pub fn run(arguments: Arguments) -> anyhow::Result<()> {
    let mut config = FamilyConfig::load(&arguments.config)?;
    match (arguments.workload.as_slice(), arguments.members) {
        ([name], None) => record_one(&config, name, &arguments),
        (named, split) => {
            let mut names = named.to_vec();
            names.iter().try_for_each(|name| config.workload(name).map(drop))?;
            if let (Some(split), Some(count)) = (split, arguments.count) {
                names.extend(members::draw(&mut config, split.into(), count.into(), arguments.flags.seed)?);
            }
            record_several(&config, &names, &arguments)
        }
    }
}

fn record_one(config: &FamilyConfig, name: &str, arguments: &Arguments) -> anyhow::Result<()> {
    require_writable(&arguments.out)?;
    let trace = RecordedLoop::open(config, name, &arguments.flags, arguments.iterations as usize)?.trace;
    save(&trace, &arguments.out)
}

/// Saves a trace, and says what it holds.
pub fn save(trace: &Trace, path: &Path) -> anyhow::Result<()> {
    trace.save(path)?;
    println!(
        "{}: {} operators, {} storages, peak {} MiB, makespan {} ms",
        path.display(),
        trace.operators.len(),
        trace.storages.len(),
        mib(trace.peak_bytes),
        milliseconds(trace.makespan_ns),
    );
    Ok(())
}

fn record_several(config: &FamilyConfig, names: &[String], arguments: &Arguments) -> anyhow::Result<()> {
    let folder = &arguments.out;
    if folder.exists() && !folder.is_dir() {
        bail!("{}: is no folder; several traces need one", folder.display());
    }
    let recorded = members::record(config, names, folder, &arguments.flags, arguments.iterations as usize)?;
    let mut table = Table::new(["trace", "operators", "storages", "peak (MiB)", "makespan (ms)"]);
    for trace in &recorded.traces {
        let Trace { operators, storages, .. } = trace.as_ref();
        table.row([
            trace.workload.clone(),
            operators.len().to_string(),
            storages.len().to_string(),
            mib(trace.peak_bytes),
            milliseconds(trace.makespan_ns),
        ]);
    }
    print!("{table}");
    println!("{}: {} traces", folder.display(), names.len());
    Ok(())
}
