//! `plimsoll behaviour`.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use plimsoll_runtime::file::write_whole;
use plimsoll_runtime::{FileKind, Lineage, Trace};

use crate::behaviour::drawing::draw;
use crate::behaviour::history::History;
use crate::behaviour::report::{Iteration, Report};
use crate::behaviour::snapshot;
use crate::link::LinkFlag;
use crate::machine::Machine;
use crate::outputs::{require_outputs, write_json};
use crate::results::dead_tail_bytes;

/// Flags.
#[derive(Args)]
pub struct Arguments {
    /// A recorded trace, or a CUDA memory snapshot of PyTorch's (pickle or JSON)
    file: PathBuf,
    #[command(flatten)]
    link: LinkFlag,
    /// How many of the blocks that are large and idle for long to list
    #[arg(long, default_value_t = 12, value_name = "N")]
    top: usize,
    /// Which device of a snapshot
    #[arg(long, default_value_t = 0, value_name = "N")]
    device: usize,
    /// Where to write the report as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Where to draw bytes by kind over time, and the lives of the largest blocks
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> anyhow::Result<()> {
    require_outputs(&[("--json", arguments.json.as_ref()), ("--svg", arguments.svg.as_ref())])?;
    let (history, report) = if FileKind::of(&arguments.file)? == Some(FileKind::Trace) {
        let trace = Trace::load(&arguments.file)?;
        let link = Machine::AsRecorded.link(&arguments.link, &trace)?;
        let history = History::of_trace(&trace);
        let dead_tail_bytes = Some(dead_tail_bytes(&trace, &Lineage::of(&trace)));
        let report =
            Report { dead_tail_bytes, ..Report::of(&history, Iteration::of_trace(&trace), link, arguments.top) };
        (history, report)
    } else {
        let bytes = std::fs::read(&arguments.file).with_context(|| arguments.file.display().to_string())?;
        let recorded = snapshot::read(&arguments.file, &bytes, arguments.device)
            .with_context(|| arguments.file.display().to_string())?;
        let iteration = Iteration::of_stream(&recorded.allocations);
        let link = arguments.link.resolve()?;
        let report = Report {
            reserved_bytes: Some(recorded.reserved_bytes),
            out_of_memory: Some(recorded.out_of_memory),
            ..Report::of(&recorded.history, iteration, link, arguments.top)
        };
        (recorded.history, report)
    };
    if let Some(path) = &arguments.json {
        write_json(path, &report)?;
    }
    if let Some(path) = &arguments.svg {
        write_whole(path, draw(&history).as_bytes())?;
    }
    print!("{report}");
    Ok(())
}
