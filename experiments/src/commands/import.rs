//! `plimsoll import`.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use plimsoll_runtime::Trace;
use plimsoll_runtime::file::require_writable;
use plimsoll_runtime::import::pytorch_trace::{self, Times};

use super::record::save;
use crate::logs::{SIMRD, read, simrd_trace, stem};

/// Who recorded the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A log of simrd, the simulator of Dynamic Tensor Rematerialization; as it is or compressed with gzip
    Simrd,
    /// What torch.profiler.ExecutionTraceObserver writes of one iteration; give its times with --times
    PytorchTrace,
    /// What torch.cuda.memory._dump_snapshot() writes; it holds no operators, and only `plimsoll behaviour` reads it
    PytorchSnapshot,
}

/// Flags.
#[derive(Args)]
pub struct Arguments {
    /// Who recorded the file
    format: Format,
    /// The file
    file: PathBuf,
    /// Where to write the trace
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Name of the workload; the file's name up to its first dot, unless given
    #[arg(long, value_name = "NAME")]
    workload: Option<String>,
    /// Name of the model family; the format's name, unless given
    #[arg(long, value_name = "NAME")]
    family: Option<String>,
    #[command(flatten)]
    times: TimesFlags,
}

/// Where the times of an execution trace come from.
#[derive(Args)]
struct TimesFlags {
    /// For pytorch-trace: what torch.profiler's export_chrome_trace() wrote of the same iteration
    #[arg(long, value_name = "FILE", conflicts_with = "untimed")]
    times: Option<PathBuf>,
    /// For pytorch-trace: do without times. Bytes can be reported on; predicted times mean nothing
    #[arg(long)]
    untimed: bool,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> anyhow::Result<()> {
    require_writable(&arguments.out)?;
    let workload = arguments.workload.clone().unwrap_or_else(|| stem(&arguments.file));
    let family = |format: &str| arguments.family.clone().unwrap_or_else(|| format.to_owned());
    let trace = match arguments.format {
        Format::Simrd => simrd_trace(&arguments.file, &workload, &family(SIMRD)),
        Format::PytorchTrace => read_pytorch_trace(&arguments.file, &arguments.times, &workload, &family("pytorch")),
        Format::PytorchSnapshot => bail!(
            "a memory snapshot knows no operators, so nothing can be planned from it; `plimsoll behaviour {}` reports on it",
            arguments.file.display()
        ),
    };
    let trace = trace.with_context(|| arguments.file.display().to_string())?;
    save(&trace, &arguments.out)
}

fn read_pytorch_trace(file: &Path, flags: &TimesFlags, workload: &str, family: &str) -> anyhow::Result<Trace> {
    let json = read(file)?;
    let times = match &flags.times {
        Some(path) => {
            let name = || path.display().to_string();
            Some(Times::read(&read(path).with_context(name)?).with_context(name)?)
        }
        None if flags.untimed => None,
        None => bail!("execution traces hold no times: give the profiler's trace with --times, or --untimed"),
    };
    let trace = pytorch_trace::read(&json, times.as_ref(), workload, family)?;
    if flags.untimed {
        eprintln!("plimsoll: warning: without times, every operator takes none");
    }
    Ok(trace)
}
