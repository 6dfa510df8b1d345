//! `plimsoll record`.

use std::path::PathBuf;

use clap::Args;
use plimsoll_env::config::FamilyConfig;
use plimsoll_runtime::file::require_writable;

use crate::loops::{LoopFlags, RECORDED_ITERATIONS, RecordedLoop};
use crate::table::{mib, milliseconds};

/// Flags.
#[derive(Args)]
pub struct Arguments {
    /// Configuration of the model family
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Name of the workload in the configuration
    #[arg(long, value_name = "NAME")]
    workload: String,
    /// Where to write the trace
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Iterations to record, after a warm-up
    #[arg(long, default_value_t = RECORDED_ITERATIONS, value_name = "N")]
    iterations: usize,
    #[command(flatten)]
    flags: LoopFlags,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> anyhow::Result<()> {
    let config = FamilyConfig::load(&arguments.config)?;
    require_writable(&arguments.out)?;
    let recorded = RecordedLoop::open(&config, &arguments.workload, &arguments.flags, arguments.iterations)?;
    let trace = &recorded.trace;
    trace.save(&arguments.out)?;
    println!(
        "{}: {} operators, {} storages, peak {} MiB, makespan {} ms",
        arguments.out.display(),
        trace.operators.len(),
        trace.storages.len(),
        mib(trace.peak_bytes),
        milliseconds(trace.makespan_ns),
    );
    Ok(())
}
