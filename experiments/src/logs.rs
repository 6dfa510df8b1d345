//! Files that other tools wrote, as they are or packed by gzip.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use plimsoll_runtime::Trace;
use plimsoll_runtime::file::unpacked;
use plimsoll_runtime::import::simrd;

/// The family of traces that are logs of simrd, unless another is named.
pub const SIMRD: &str = "simrd";

/// The trace that a log of simrd is, named after the file and of the family `simrd`.
pub fn read_simrd(file: &Path) -> anyhow::Result<Trace> {
    simrd_trace(file, &stem(file), SIMRD)
}

/// The same by other names.
pub fn simrd_trace(file: &Path, workload: &str, family: &str) -> anyhow::Result<Trace> {
    Ok(simrd::Log::read(open(file)?)?.trace(workload, family)?)
}

/// The file's name up to its first dot.
pub fn stem(file: &Path) -> String {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    name.split('.').next().unwrap_or_default().to_owned()
}

/// All bytes of a file, unpacked where gzip packed them.
pub fn read(file: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(file)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The same, one after the other.
fn open(file: &Path) -> std::io::Result<Box<dyn BufRead>> {
    unpacked(BufReader::new(File::open(file)?))
}
