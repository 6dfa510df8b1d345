//! Members of a family as traces: drawn and recorded, or loaded from a folder.
//!
//! Nothing here knows what the traces are for, nor on which machine they will be taken to run.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use plimsoll_env::config::{FamilyConfig, Split};
use plimsoll_env::hardware::Roofline;
use plimsoll_runtime::Trace;
use plimsoll_runtime::trace::TRACE_EXTENSION;

use crate::logs::read_simrd;
use crate::loops::{LoopFlags, RecordedLoop};
use crate::machine::{RecordedOn, save_recorded_on};
use crate::progress;
use crate::table::mib;

/// The extension of a log of simrd.
const LOG_EXTENSION: &str = "log";

/// Traces, and the machine that recorded them.
pub struct Recorded {
    /// The traces.
    pub traces: Vec<Arc<Trace>>,
    /// What that machine does at best.
    pub recorded_on: RecordedOn,
}

/// Draws `count` members of `split` and puts them among the workloads of `config`. Returns their names.
pub fn draw(config: &mut FamilyConfig, split: Split, count: usize, seed: u64) -> anyhow::Result<Vec<String>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    let drawn = config.members(split, count, seed)?;
    let names = drawn.iter().map(|(name, _)| name.clone()).collect();
    config.workloads.extend(drawn);
    Ok(names)
}

/// Records the real loops of the workloads `names`, one after another, into `folder`.
pub fn record(
    config: &FamilyConfig,
    names: &[String],
    folder: &Path,
    flags: &LoopFlags,
    iterations: usize,
) -> anyhow::Result<Recorded> {
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let before = Roofline::of_host()?;
    let bar = progress::bar(names.len() as u64, &format!("recording {}", config.family));
    let mut traces = Vec::with_capacity(names.len());
    for name in names {
        bar.set_message(name.clone());
        let trace = RecordedLoop::open(config, name, flags, iterations)?.trace;
        trace.save_in(folder)?;
        bar.set_message(format!("{name}: {} operators, {} MiB", trace.operators.len(), mib(trace.peak_bytes)));
        bar.inc(1);
        traces.push(Arc::new(trace));
    }
    bar.finish_and_clear();
    Ok(Recorded { traces, recorded_on: save_recorded_on(folder, &before)? })
}

/// Loads the traces of the workloads `names` that an earlier call recorded into `folder`.
pub fn load_named(folder: &Path, names: &[String]) -> anyhow::Result<Recorded> {
    let load =
        |name: &String| -> anyhow::Result<Arc<Trace>> { Ok(Arc::new(Trace::load(Trace::path_in(folder, name))?)) };
    let traces = names.iter().map(load).collect::<anyhow::Result<_>>()?;
    Ok(Recorded { traces, recorded_on: RecordedOn::of(folder) })
}

/// Loads every trace in `folder`, and every log of simrd as the trace that it is, in the order of their names.
pub fn load_all(folder: &Path) -> anyhow::Result<Recorded> {
    let context = || folder.display().to_string();
    let entries =
        std::fs::read_dir(folder).with_context(context)?.collect::<Result<Vec<_>, _>>().with_context(context)?;
    let mut paths: Vec<PathBuf> =
        entries.into_iter().map(|entry| entry.path()).filter(|path| holds_trace(path)).collect();
    paths.sort();
    if paths.is_empty() {
        bail!("{}: holds no traces (*.{TRACE_EXTENSION}, packed or not) and no logs of simrd", folder.display());
    }
    let traces = paths.iter().map(|path| load(path).map(Arc::new)).collect::<anyhow::Result<_>>()?;
    Ok(Recorded { traces, recorded_on: RecordedOn::of(folder) })
}

fn holds_trace(path: &Path) -> bool {
    has_extension(path, TRACE_EXTENSION) || is_log(path)
}

fn is_log(path: &Path) -> bool {
    has_extension(path, LOG_EXTENSION)
}

/// Whether a file has that extension, packed or not.
fn has_extension(path: &Path, extension: &str) -> bool {
    let name = path.to_string_lossy();
    let unpacked = Path::new(name.strip_suffix(".gz").unwrap_or(&name));
    unpacked.extension().is_some_and(|found| found == extension)
}

fn load(path: &Path) -> anyhow::Result<Trace> {
    if !is_log(path) {
        return Ok(Trace::load(path)?);
    }
    read_simrd(path).with_context(|| path.display().to_string())
}
