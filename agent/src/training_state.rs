//! The saved training state: all that a training run needs to go on, in one file.
//!
//! ```text
//! plimsoll training-state 8 sha256=9f86d0… bytes=48213
//! ppo
//! lengths of the parts: a u64 each, little-endian
//! counters, configuration, normaliser, best weights and average ones: JSON
//! networks: burnpack
//! Adam's moments: burnpack
//! ```
//!
//! Burnpack, because it keeps the ids of the parameters, by which Adam's moments are found again. Evolution strategies
//! have no such tensors: all of their state is the JSON. Deep Q-learning has another network and one more part, its memory.

use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::store::ModuleRecord;
use burn::tensor::Bytes;
use plimsoll_runtime::file::{FileError, FileKind, read_body, write_body};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::learner::Progress;
use crate::spread::FeatureSpread;

/// The newest format that this build reads and writes.
const VERSION: u32 = 8;

/// A training state that could not be saved, or could not be resumed from.
#[derive(Debug, thiserror::Error)]
pub enum SavedStateError {
    /// It could not be written, or is no whole training state.
    #[error(transparent)]
    File(#[from] FileError),
    /// It could not be made or used.
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
}

impl<C> Header<C> {
    /// The header of a run before its first update.
    pub(crate) fn new(config: C, seed: u64) -> Self {
        Header { config, seed, progress: Progress::default(), spread: FeatureSpread::new() }
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
    let body = [kind.word().as_bytes(), b"\n", lengths.as_flattened(), &parts.concat()].concat();
    Ok(write_body(path, FileKind::TrainingState, VERSION, &body)?)
}

/// Reads a training state of `kind`, made of so many parts.
pub(crate) fn read_parts<const N: usize>(path: &Path, kind: Kind) -> Result<[Vec<u8>; N], SavedStateError> {
    let body = read_body(path, FileKind::TrainingState, VERSION)?;
    let end = body.iter().position(|&byte| byte == b'\n').ok_or_else(|| malformed(path, "it says not of what"))?;
    let found = String::from_utf8_lossy(&body[..end]);
    if found != kind.word() {
        return Err(SavedStateError::unusable(path, format!("a training state of {found}, not of {}", kind.word())));
    }
    let parts = parts(&body[end + 1..]).ok_or_else(|| malformed(path, "its parts do not fill it"))?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::learner::Learner;
    use crate::ppo::Ppo;
    use crate::ppo::PpoConfig;

    fn config() -> PpoConfig {
        PpoConfig { hidden: 4, critic_hidden: 4, ..PpoConfig::default() }
    }

    fn saved() -> (tempfile::TempDir, PathBuf, Vec<u8>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("toy.state");
        Ppo::new(config(), 7).unwrap().save(&path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        (folder, path, bytes)
    }

    fn refusal(path: &Path, config: &PpoConfig, seed: u64) -> String {
        Ppo::resume(path, config, seed).err().expect("refused").to_string()
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
            refused(&whole[..length], if promised { "truncated" } else { "not a plimsoll training-state file" });
        }
        let mut altered = whole.clone();
        *altered.last_mut().unwrap() ^= 1;
        refused(&altered, "altered after it was written");
        let newer = String::from_utf8_lossy(&whole[..40]).replace(&format!("state {VERSION}"), "state 9").into_bytes();
        refused(&[&newer, &whole[40..]].concat(), &format!("version 9 is newer than {VERSION}"));
        let older =
            String::from_utf8_lossy(&whole[..40]).replace(&format!("state {VERSION} "), "state 4 ppo ").into_bytes();
        refused(&[&older, &whole[40..]].concat(), "not a plimsoll training-state file");
        refused(b"plimsoll trace 1 sha256=0 bytes=0\n", "found a trace file");
        write_parts(&path, Kind::Dqn, [b"{}"]).unwrap();
        assert!(refusal(&path, &config(), 7).ends_with("a training state of dqn, not of ppo"));
        write_parts(&path, Kind::Ppo, [b"{}"]).unwrap();
        assert!(refusal(&path, &config(), 7).ends_with("malformed training state: its parts do not fill it"));
    }
}
