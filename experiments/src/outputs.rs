//! What commands write: that it can be written, before anything is computed, and files of JSON, which later calls read.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use plimsoll_runtime::file::{require_writable, write_whole};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Fails where a file that a call shall write cannot be written, or is another one, too, which would be lost. By their flags.
pub fn require_outputs(outputs: &[(&str, Option<&PathBuf>)]) -> anyhow::Result<()> {
    let outputs: Vec<_> = outputs.iter().filter_map(|&(flag, path)| Some((flag, path?))).collect();
    for (index, &(flag, path)) in outputs.iter().enumerate() {
        require_writable(path)?;
        let takes_one = path.is_file() || !path.exists();
        if let Some((other, _)) = outputs[..index].iter().find(|&&(_, other)| takes_one && other == path) {
            bail!("{other} and {flag}: both are {}", path.display());
        }
    }
    Ok(())
}

/// Fails where no runs can be logged in a folder, which need not exist.
pub fn require_logdir(folder: &Path) -> anyhow::Result<()> {
    let existing = folder.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(Path::new("."));
    require_writable(&existing.join("run")).with_context(|| format!("--logdir {}", folder.display()))
}

/// Reads a file of JSON. Errors name it.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> anyhow::Result<T> {
    let name = || path.display().to_string();
    serde_json::from_slice(&std::fs::read(path).with_context(name)?).with_context(name)
}

/// Writes `results` as indented JSON, whole or not at all.
pub fn write_json(path: &Path, results: &impl Serialize) -> anyhow::Result<()> {
    let mut text = serde_json::to_vec_pretty(results)?;
    text.push(b'\n');
    write_whole(path, &text)?;
    Ok(())
}
