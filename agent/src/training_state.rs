//! The saved training state: all that a training run needs to go on, in one file.
//!
//! ```text
//! plimsoll training-state 4 ppo sha256=9f86d0… bytes=48213
//! lengths of the parts: a u64 each, little-endian
//! counters, configuration, normaliser, best weights: JSON
//! networks: burnpack
//! Adam's moments: burnpack
//! ```
//!
//! Burnpack, because it keeps the ids of the parameters, by which Adam's moments are found again. Evolution strategies
//! have no such tensors: all of their state is the JSON, in which numbers of double precision stand as their bits, for a
//! decimal may come back as its neighbour. Deep Q-learning has another network and one more part, its memory.

use std::io;
use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::store::ModuleRecord;
use burn::tensor::Bytes;
use plimsoll_runtime::file::{FileError, write_whole};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::learner::{Best, Progress};
use crate::spread::FeatureSpread;

/// The newest format that this build reads and writes.
const VERSION: u32 = 4;
/// No saved training state is larger; a larger file is refused before anything is allocated.
const BYTES_MAX: u64 = 1 << 30;
/// A training state that could not be saved, or could not be resumed from.
#[derive(Debug, thiserror::Error)]
pub enum SavedStateError {
    /// It could not be written.
    #[error(transparent)]
    Write(#[from] FileError),
    /// It could not be made, read or used.
    #[error("{}: {reason}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

impl SavedStateError {
    pub(crate) fn unusable(path: &Path, reason: impl ToString) -> Self {
        SavedStateError::Unusable { path: path.to_owned(), reason: reason.to_string() }
    }
}

/// Which way of learning a training state belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Proximal policy optimisation.
    Ppo,
    /// Evolution strategies.
    Evolution,
    /// Imitation of searched plans.
    Imitation,
    /// Policy iteration by rollouts.
    PolicyIteration,
    /// Deep Q-learning.
    Dqn,
}

impl Kind {
    const fn word(self) -> &'static str {
        match self {
            Kind::Ppo => "ppo",
            Kind::Evolution => "evolution",
            Kind::Imitation => "imitation",
            Kind::PolicyIteration => "policy-iteration",
            Kind::Dqn => "dqn",
        }
    }
}

/// All but the tensors, for the hyperparameters `C`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Header<C> {
    pub(crate) config: C,
    pub(crate) seed: u64,
    pub(crate) progress: Progress,
    pub(crate) spread: FeatureSpread,
    pub(crate) best: Option<Best>,
}

impl<C> Header<C> {
    /// The header of a run before its first update.
    pub(crate) fn new(config: C, seed: u64) -> Self {
        Header { config, seed, progress: Progress::default(), spread: FeatureSpread::new(), best: None }
    }
}

/// Writes the state, whole or not at all.
pub(crate) fn write<C: Serialize, M: Module>(
    path: &Path,
    kind: Kind,
    header: &Header<C>,
    model: &M,
    optimizer: &ModuleOptimizer,
) -> Result<(), SavedStateError> {
    write_parts(path, kind, [&json(path, header)?, &model_pack(path, model)?, &optimizer_pack(path, optimizer)?])
}

/// A header as bytes.
pub(crate) fn json(path: &Path, header: &impl Serialize) -> Result<Vec<u8>, SavedStateError> {
    serde_json::to_vec(header).map_err(|error| SavedStateError::unusable(path, error))
}

/// The tensors of a model as bytes.
pub(crate) fn model_pack<M: Module>(path: &Path, model: &M) -> Result<Bytes, SavedStateError> {
    model.clone().into_record().into_bytes().map_err(|error| SavedStateError::unusable(path, error))
}

/// Adam's moments as bytes.
pub(crate) fn optimizer_pack(path: &Path, optimizer: &ModuleOptimizer) -> Result<Bytes, SavedStateError> {
    optimizer.into_bytes().map_err(|error| SavedStateError::unusable(path, error))
}

/// Writes a training state made of `parts`, whole or not at all.
pub(crate) fn write_parts<const N: usize>(path: &Path, kind: Kind, parts: [&[u8]; N]) -> Result<(), SavedStateError> {
    let lengths = parts.map(|part| (part.len() as u64).to_le_bytes());
    let body = [lengths.as_flattened(), &parts.concat()].concat();
    let (kind, digest) = (kind.word(), sha256_hex(&body));
    let line = format!("plimsoll training-state {VERSION} {kind} sha256={digest} bytes={}\n", body.len());
    Ok(write_whole(path, &[line.as_bytes(), &body].concat())?)
}

/// Reads a training state of `kind`, made of so many parts.
pub(crate) fn read_parts<const N: usize>(path: &Path, kind: Kind) -> Result<[Vec<u8>; N], SavedStateError> {
    let bytes = read_bounded(path).map_err(|error| SavedStateError::unusable(path, error))?;
    let parts: [&[u8]; N] = open(&bytes, kind).map_err(|reason| SavedStateError::unusable(path, reason))?;
    Ok(parts.map(<[u8]>::to_vec))
}

/// Refuses a run that was begun with another configuration or seed than those given.
pub(crate) fn require_same<C: Serialize>(
    path: &Path,
    saved: (&C, u64),
    given: (&C, u64),
) -> Result<(), SavedStateError> {
    difference(saved, given).map_or(Ok(()), |difference| Err(SavedStateError::unusable(path, difference)))
}

/// Reads the state of a run of this configuration and seed into `model` and `optimizer`, which must be fresh.
pub(crate) fn read<C: Serialize + DeserializeOwned, M: Module>(
    path: &Path,
    kind: Kind,
    (config, seed): (&C, u64),
    model: M,
    optimizer: ModuleOptimizer,
) -> Result<(Header<C>, M, ModuleOptimizer), SavedStateError> {
    let [header, pack, moments] = read_parts(path, kind)?;
    let header = read_header(path, &header, (config, seed))?;
    Ok((header, unpack_model(path, pack, model)?, unpack_optimizer(path, moments, optimizer)?))
}

fn malformed(path: &Path, error: impl std::fmt::Display) -> SavedStateError {
    SavedStateError::unusable(path, format!("malformed training state: {error}"))
}

/// The header that `bytes` hold, of a run begun with this configuration and seed.
pub(crate) fn read_header<C: Serialize + DeserializeOwned>(
    path: &Path,
    bytes: &[u8],
    given: (&C, u64),
) -> Result<Header<C>, SavedStateError> {
    let header: Header<C> = serde_json::from_slice(bytes).map_err(|error| malformed(path, error))?;
    require_same(path, (&header.config, header.seed), given)?;
    Ok(header)
}

/// The model that [`model_pack`] packed, put into one of the same shape.
pub(crate) fn unpack_model<M: Module>(path: &Path, pack: Vec<u8>, model: M) -> Result<M, SavedStateError> {
    let record = ModuleRecord::from_bytes(Bytes::from_bytes_vec(pack)).map_err(|error| malformed(path, error))?;
    model.try_load_record(record).map_err(|error| malformed(path, error))
}

/// The optimizer that [`optimizer_pack`] packed.
pub(crate) fn unpack_optimizer(
    path: &Path,
    pack: Vec<u8>,
    optimizer: ModuleOptimizer,
) -> Result<ModuleOptimizer, SavedStateError> {
    optimizer.from_bytes(Bytes::from_bytes_vec(pack)).map_err(|error| malformed(path, error))
}

fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    let length = std::fs::metadata(path)?.len();
    if length > BYTES_MAX {
        return Err(io::Error::other(format!("{length} bytes are more than any saved training state holds")));
    }
    std::fs::read(path)
}

/// The parts of a file that is what it should be.
fn open<const N: usize>(bytes: &[u8], kind: Kind) -> Result<[&[u8]; N], String> {
    let foreign = || "not a saved plimsoll training state".to_owned();
    let head = &bytes[..bytes.len().min(160)];
    let newline = head.iter().position(|&byte| byte == b'\n').ok_or_else(foreign)?;
    let line = std::str::from_utf8(&head[..newline]).map_err(|_| foreign())?;
    let words = line.strip_prefix("plimsoll training-state ").ok_or_else(foreign)?;
    let (version, words) = words.split_once(' ').ok_or_else(foreign)?;
    match version.parse::<u32>().map_err(|_| foreign())? {
        VERSION => {}
        version if version > VERSION => {
            return Err(format!("training state version {version} is newer than {VERSION}, which this build reads"));
        }
        version => {
            return Err(format!("training state version {version} is older than {VERSION}, which this build reads"));
        }
    }
    let [found, digest, length] = <[&str; 3]>::try_from(words.split(' ').collect::<Vec<_>>()).map_err(|_| foreign())?;
    if found != kind.word() {
        return Err(format!("a training state of {found}, not of {}", kind.word()));
    }
    let length: usize = length.strip_prefix("bytes=").and_then(|word| word.parse().ok()).ok_or_else(foreign)?;
    let body = &bytes[newline + 1..];
    if body.len() != length {
        return Err(format!(
            "truncated or extended: the header promises {length} bytes, the file holds {}",
            body.len()
        ));
    }
    if digest.strip_prefix("sha256=") != Some(&sha256_hex(body)) {
        return Err("altered after it was written: its SHA-256 is not the one in its header".to_owned());
    }
    parts(body).ok_or_else(|| "malformed training state: its parts do not fill it".to_owned())
}

fn parts<const N: usize>(body: &[u8]) -> Option<[&[u8]; N]> {
    let (lengths, mut rest) = body.split_at_checked(8 * N)?;
    let mut parts: [&[u8]; N] = [&[]; N];
    for (part, length) in parts.iter_mut().zip(lengths.as_chunks::<8>().0) {
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        (*part, rest) = rest.split_at_checked(length)?;
    }
    rest.is_empty().then_some(parts)
}

/// What distinguishes the saved run from the one to be resumed, if anything.
fn difference<C: Serialize>((saved, begun_with): (&C, u64), (given, seed): (&C, u64)) -> Option<String> {
    if begun_with != seed {
        return Some(format!("was begun with seed {begun_with}, not {seed}"));
    }
    let (saved, given) = (serde_json::to_value(saved).ok()?, serde_json::to_value(given).ok()?);
    let (saved, given) = (saved.as_object()?, given.as_object()?);
    let (key, value) = saved.iter().find(|(key, value)| given.get(*key) != Some(*value))?;
    Some(format!("was begun with {key} = {value}, not {}", given.get(key)?))
}

fn sha256_hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::PpoConfig;
    use crate::learner::Learner;
    use crate::trainer::Trainer;

    fn config() -> PpoConfig {
        PpoConfig { hidden: 4, critic_hidden: 4, ..PpoConfig::default() }
    }

    fn saved() -> (tempfile::TempDir, PathBuf, Vec<u8>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("toy.state");
        Trainer::new(config(), 7).unwrap().save(&path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        (folder, path, bytes)
    }

    fn refusal(path: &Path, config: &PpoConfig, seed: u64) -> String {
        Trainer::resume(path, config, seed).err().expect("refused").to_string()
    }

    #[test]
    fn another_run_is_not_resumed() {
        let (_folder, path, _) = saved();
        assert!(refusal(&path, &config(), 8).ends_with("toy.state: was begun with seed 7, not 8"));
        let other = PpoConfig { clip: 0.1, ..config() };
        assert!(refusal(&path, &other, 7).ends_with("was begun with clip = 0.2, not 0.1"));
    }

    #[test]
    fn damage_is_refused() {
        let (_folder, path, whole) = saved();
        let refused = |bytes: &[u8], expected: &str| {
            std::fs::write(&path, bytes).unwrap();
            let message = refusal(&path, &config(), 7);
            assert!(message.contains(expected), "{message}");
        };
        for length in (0..whole.len()).step_by(97) {
            let promised = length > whole.iter().position(|&byte| byte == b'\n').unwrap();
            refused(&whole[..length], if promised { "truncated" } else { "not a saved plimsoll training state" });
        }
        let mut altered = whole.clone();
        *altered.last_mut().unwrap() ^= 1;
        refused(&altered, "altered after it was written");
        let newer = String::from_utf8_lossy(&whole[..40]).replace(&format!("state {VERSION}"), "state 9").into_bytes();
        refused(&[&newer, &whole[40..]].concat(), &format!("version 9 is newer than {VERSION}"));
        refused(b"plimsoll trace 1 sha256=0 bytes=0\n", "not a saved plimsoll training state");
    }
}
