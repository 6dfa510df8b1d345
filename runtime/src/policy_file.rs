//! The policy file: all that a production job needs of a training run.
//!
//! It is a safetensors file. The tensors are the normaliser and the weights, little-endian `F32`:
//!
//! | tensor | shape |
//! |---|---|
//! | `normaliser.mean`, `normaliser.scale` | `[FEATURES]` |
//! | `layer.0.weights`, `layer.0.bias` | `[FEATURES, H0]`, `[H0]` |
//! | `layer.1.weights`, `layer.1.bias` | `[H0, H1]`, `[H1]` |
//! | `layer.2.weights`, `layer.2.bias` | `[H1, 2]`, `[2]` |
//!
//! Its metadata hold one string, `plimsoll`: a JSON object with the format version, the family, the feature
//! table and its hash, the action set and the provenance. That object begins with the SHA-256 of the whole
//! file, taken with its own 64 digits as zeros, so the alteration of any byte is noticed.
//!
//! One string, because safetensors writes several in no certain order: so equal policies are equal files.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize};
use serde::{Deserialize, Serialize};

use crate::file::{FileError, FileErrorReason, FileKind, read_whole, sha256_hex, write_whole};
use crate::learned::LearnedPolicy;
use crate::network::{Dense, LOGITS, Network, NetworkWeights, Normaliser};
use crate::observation::{FEATURE_TABLE, FEATURES, Feature, feature_table_hash};
use crate::plan::ActionSet;

/// The newest policy format that this build reads and writes.
const POLICY_VERSION: u32 = 1;

/// No policy file is larger; a larger one is refused before anything is allocated.
const POLICY_BYTES_MAX: u64 = 64 << 20;
/// The key of our metadata.
const METADATA_KEY: &str = "plimsoll";
/// What every policy file holds after its first eight bytes, up to the digits of its SHA-256.
const PREFIX: &[u8] = br#"{"__metadata__":{"plimsoll":"{\"sha256\":\""#;
/// Where the digits of the SHA-256 start.
const DIGEST_START: usize = 8 + PREFIX.len();
/// Where they end.
const DIGEST_END: usize = DIGEST_START + 64;
/// What stands for the digits while the SHA-256 is taken.
const ZERO_DIGITS: [u8; 64] = [b'0'; 64];

/// Where a policy came from.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// The command line that made it.
    pub command: String,
    /// The complete configuration it was trained with, as text.
    pub configuration: String,
    /// What recorded the iterations that it learned on; empty where nobody said.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recorded_on: Vec<String>,
    /// The seed of the training run.
    pub seed: u64,
    /// The commit that the trainer was built from.
    pub commit: String,
    /// When training ended, in ISO 8601.
    pub date: String,
    /// How long it was trained.
    pub training_seconds: f64,
    /// What was measured of it: name to value.
    pub quality: BTreeMap<String, f64>,
}

/// A trained policy with all that is known of it.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyFile {
    /// The model family it was trained on.
    pub family: String,
    /// The actions it was trained with.
    pub actions: ActionSet,
    /// Where it came from.
    pub provenance: Provenance,
    /// The network.
    pub weights: NetworkWeights,
}

/// A row of the feature table as it stands in a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FeatureEntry {
    name: String,
    doc: String,
}

/// The metadata. `sha256` must come first: [`PREFIX`] ends in it.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Card {
    sha256: String,
    version: u32,
    family: String,
    feature_table_sha256: String,
    features: Vec<FeatureEntry>,
    actions: ActionSet,
    provenance: Provenance,
}

/// The part of the metadata that every version keeps.
#[derive(Deserialize)]
struct AnyVersion {
    version: u32,
}

impl PolicyFile {
    /// Reads a policy file, and refuses one that is damaged, foreign, newer, or made for other features.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, FileError> {
        let path = path.as_ref();
        let length = std::fs::metadata(path).map_err(|error| FileError::new(path, error))?.len();
        if length > POLICY_BYTES_MAX {
            let message = format!("{length} bytes are more than any policy file holds");
            return Err(FileError::malformed(path, FileKind::Policy, message));
        }
        PolicyFile::from_bytes(&read_whole(path)?).map_err(|reason| FileError::new(path, reason))
    }

    /// Writes the policy file, whole or not at all. Equal policies give equal files.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), FileError> {
        let path = path.as_ref();
        let bytes = self.to_bytes().map_err(|reason| FileError::new(path, reason))?;
        write_whole(path, &bytes)
    }

    /// The policy, ready to decide, always taking what it scores highest.
    pub fn into_policy(self) -> LearnedPolicy {
        LearnedPolicy::greedy(Network::new(&self.weights))
    }

    fn from_bytes(bytes: &[u8]) -> Result<Self, FileErrorReason> {
        let card_follows = bytes.get(8..DIGEST_START) == Some(PREFIX) && bytes.len() >= DIGEST_END;
        if !card_follows {
            return Err(FileErrorReason::Foreign { expected: FileKind::Policy });
        }
        let damaged = |error| malformed(format!("truncated or altered after it was written: {error}"));
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(damaged)?;
        let tensors = SafeTensors::deserialize(bytes).map_err(damaged)?;
        let text = header.metadata().as_ref().and_then(|metadata| metadata.get(METADATA_KEY));
        let text = text.ok_or(FileErrorReason::Foreign { expected: FileKind::Policy })?;
        let AnyVersion { version } = serde_json::from_str(text).map_err(malformed)?;
        if version > POLICY_VERSION {
            return Err(FileErrorReason::Newer { kind: FileKind::Policy, supported: POLICY_VERSION, found: version });
        }
        check_digest(bytes)?;
        let card: Card = serde_json::from_str(text).map_err(malformed)?;
        check_features(&card)?;
        Ok(PolicyFile {
            family: card.family,
            actions: card.actions,
            provenance: card.provenance,
            weights: read_weights(&tensors)?,
        })
    }

    fn to_bytes(&self) -> Result<Vec<u8>, FileErrorReason> {
        let Provenance { training_seconds, quality, .. } = &self.provenance;
        let numbers = quality.iter().map(|(name, &value)| (name.as_str(), value));
        for (name, value) in numbers.chain([("training_seconds", *training_seconds)]) {
            if !value.is_finite() {
                return Err(malformed(format!("{name} is {value}, which JSON cannot hold")));
            }
        }
        let card = Card {
            sha256: "0".repeat(64),
            version: POLICY_VERSION,
            family: self.family.clone(),
            feature_table_sha256: feature_table_hash(),
            features: feature_entries(),
            actions: self.actions,
            provenance: self.provenance.clone(),
        };
        let text = serde_json::to_string(&card).map_err(malformed)?;
        let arrays = tensors_of(&self.weights);
        let mut views = Vec::with_capacity(arrays.len());
        for (name, shape, data) in &arrays {
            views.push((name, TensorView::new(Dtype::F32, shape.clone(), data).map_err(malformed)?));
        }
        let metadata = HashMap::from([(METADATA_KEY.to_owned(), text)]);
        let mut bytes = serialize(views, Some(metadata)).map_err(malformed)?;
        debug_assert_eq!(&bytes[8..DIGEST_START], PREFIX);
        let digest = sha256_hex(&bytes);
        bytes[DIGEST_START..DIGEST_END].copy_from_slice(digest.as_bytes());
        Ok(bytes)
    }
}

fn malformed(message: impl ToString) -> FileErrorReason {
    FileErrorReason::Malformed { kind: FileKind::Policy, message: message.to_string() }
}

/// Compares the SHA-256 that `bytes` carry with the one they have.
fn check_digest(bytes: &[u8]) -> Result<(), FileErrorReason> {
    let expected = String::from_utf8_lossy(&bytes[DIGEST_START..DIGEST_END]).into_owned();
    let mut zeroed = bytes.to_vec();
    zeroed[DIGEST_START..DIGEST_END].copy_from_slice(&ZERO_DIGITS);
    let found = sha256_hex(&zeroed);
    if found == expected { Ok(()) } else { Err(FileErrorReason::Digest { expected, found }) }
}

fn feature_entries() -> Vec<FeatureEntry> {
    let entry = |feature: &Feature| FeatureEntry { name: feature.name.to_owned(), doc: feature.doc.to_owned() };
    FEATURE_TABLE.iter().map(entry).collect()
}

/// Refuses a policy that was trained on another feature table, by the first feature that differs.
fn check_features(card: &Card) -> Result<(), FileErrorReason> {
    let ours = feature_entries();
    if card.features == ours && card.feature_table_sha256 == feature_table_hash() {
        return Ok(());
    }
    let differs = (0..FEATURES).find(|&index| card.features.get(index) != ours.get(index)).unwrap_or(FEATURES);
    let message = match (card.features.get(differs), ours.get(differs)) {
        (Some(theirs), Some(ours)) if theirs.name == ours.name => {
            format!(
                "feature {differs}, `{}`, means `{}` in the file and `{}` in this build",
                ours.name, theirs.doc, ours.doc
            )
        }
        (Some(theirs), Some(ours)) => {
            format!("feature {differs} is `{}` in the file and `{}` in this build", theirs.name, ours.name)
        }
        (Some(theirs), None) => format!("feature {differs}, `{}`, is unknown to this build", theirs.name),
        (None, Some(ours)) => format!("feature {differs}, `{}`, is missing from the file", ours.name),
        (None, None) => "its hash does not belong to it".to_owned(),
    };
    Err(malformed(format!("trained on another feature table: {message}")))
}

/// A tensor on its way to a file: name, shape, little-endian bytes.
type NamedArray = (String, Vec<usize>, Vec<u8>);

fn tensors_of(weights: &NetworkWeights) -> Vec<NamedArray> {
    let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let vector = |name: String, values: &[f32]| (name, vec![values.len()], bytes(values));
    let Normaliser { mean, scale } = weights.normaliser();
    let mut arrays = vec![vector("normaliser.mean".to_owned(), mean), vector("normaliser.scale".to_owned(), scale)];
    for (index, layer) in weights.layers().iter().enumerate() {
        let shape = vec![layer.weights.len() / layer.outputs(), layer.outputs()];
        arrays.push((format!("layer.{index}.weights"), shape, bytes(&layer.weights)));
        arrays.push(vector(format!("layer.{index}.bias"), &layer.bias));
    }
    arrays
}

fn read_weights(tensors: &SafeTensors<'_>) -> Result<NetworkWeights, FileErrorReason> {
    let expected = 8;
    if tensors.len() != expected {
        return Err(malformed(format!("{} tensors, expected {expected}", tensors.len())));
    }
    let vector = |name: &str| read_array::<1>(tensors, name).map(|(_, values)| values);
    let normaliser = Normaliser { mean: vector("normaliser.mean")?, scale: vector("normaliser.scale")? };
    let mut inputs = FEATURES;
    let mut layer = |index: usize| -> Result<Dense, FileErrorReason> {
        let name = format!("layer.{index}.weights");
        let (shape, weights) = read_array::<2>(tensors, &name)?;
        let outputs = if index == 2 { LOGITS } else { shape[1] };
        if shape != [inputs, outputs] {
            return Err(malformed(format!("tensor `{name}` has shape {shape:?}, expected [{inputs}, {outputs}]")));
        }
        inputs = outputs;
        Ok(Dense { weights, bias: vector(&format!("layer.{index}.bias"))? })
    };
    let layers = [layer(0)?, layer(1)?, layer(2)?];
    NetworkWeights::new(normaliser, layers).map_err(malformed)
}

/// The shape and the values of a tensor of rank `D`.
fn read_array<const D: usize>(
    tensors: &SafeTensors<'_>,
    name: &str,
) -> Result<([usize; D], Vec<f32>), FileErrorReason> {
    let view = tensors.tensor(name).map_err(malformed)?;
    if view.dtype() != Dtype::F32 {
        return Err(malformed(format!("tensor `{name}` is {:?}, expected F32", view.dtype())));
    }
    let shape = <[usize; D]>::try_from(view.shape())
        .map_err(|_| malformed(format!("tensor `{name}` has shape {:?}, expected {D} dimensions", view.shape())))?;
    let values = view.data().as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
    Ok((shape, values))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::tests::drawn;

    fn policy() -> PolicyFile {
        PolicyFile {
            family: "gpt".to_owned(),
            actions: ActionSet::ALL,
            provenance: Provenance {
                command: "plimsoll train --config \"gpt.toml\"".to_owned(),
                configuration: "family = \"gpt\"\n".to_owned(),
                recorded_on: vec!["cpu".to_owned()],
                seed: 7,
                commit: "dd9ef20".to_owned(),
                date: "2026-11-21T12:00:00Z".to_owned(),
                training_seconds: 12.5,
                quality: BTreeMap::from([("overhead_mean".to_owned(), 0.081)]),
            },
            weights: drawn(1, 6, 5),
        }
    }

    fn refusal(bytes: &[u8]) -> String {
        PolicyFile::from_bytes(bytes).unwrap_err().to_string()
    }

    /// The bytes of a policy file whose metadata were changed by somebody who can compute a SHA-256.
    fn forged(change: impl Fn(&str) -> String) -> Vec<u8> {
        let whole = policy().to_bytes().unwrap();
        let length = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
        let header = change(std::str::from_utf8(&whole[8..8 + length]).unwrap());
        seal([&(header.len() as u64).to_le_bytes(), header.as_bytes(), &whole[8 + length..]].concat())
    }

    fn seal(mut bytes: Vec<u8>) -> Vec<u8> {
        bytes[DIGEST_START..DIGEST_END].copy_from_slice(&ZERO_DIGITS);
        let digest = sha256_hex(&bytes);
        bytes[DIGEST_START..DIGEST_END].copy_from_slice(digest.as_bytes());
        bytes
    }

    #[test]
    fn a_policy_comes_back_and_equal_policies_are_equal_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gpt.policy");
        policy().save(&path).unwrap();
        assert_eq!(PolicyFile::load(&path).unwrap(), policy());
        assert_eq!(std::fs::read(&path).unwrap(), policy().to_bytes().unwrap());
    }

    #[test]
    fn truncation_is_always_refused() {
        let whole = policy().to_bytes().unwrap();
        for length in (0..whole.len()).step_by(16).chain([whole.len() - 1]) {
            let message = refusal(&whole[..length]);
            assert!(
                message.contains("truncated") || message.contains("not a plimsoll policy file"),
                "{length}: {message}"
            );
        }
        assert!(refusal(&[&whole[..], b"x"].concat()).contains("truncated or altered"));
    }

    #[test]
    fn the_alteration_of_any_byte_is_refused() {
        let whole = policy().to_bytes().unwrap();
        for index in 0..whole.len() {
            for mask in [0x01, 0x80, 0xff] {
                let mut altered = whole.clone();
                altered[index] ^= mask;
                assert!(PolicyFile::from_bytes(&altered).is_err(), "byte {index} ^ {mask:#x} went unnoticed");
            }
        }
        let mut altered = whole.clone();
        *altered.last_mut().unwrap() ^= 1;
        assert!(refusal(&altered).contains("altered after it was written: its SHA-256 is"));
    }

    #[test]
    fn foreign_files_are_refused() {
        let nothing: [(&str, TensorView<'_>); 0] = [];
        let other = serialize(nothing, Some(HashMap::from([("format".to_owned(), "pt".to_owned())]))).unwrap();
        for bytes in [&b"\x89PNG"[..], &other, b"", &[0xff; 4096]] {
            assert_eq!(refusal(bytes), "not a plimsoll policy file");
        }
    }

    #[test]
    fn a_newer_format_is_refused_whatever_else_it_says() {
        let newer = forged(|header| header.replace(r#"\"version\":1,"#, r#"\"version\":9,\"novelty\":[],"#));
        assert_eq!(refusal(&newer), "policy format version 9 is newer than 1, the newest this build reads");
    }

    #[test]
    fn another_feature_table_is_refused_by_its_first_difference() {
        let renamed = forged(|header| header.replace(r#"\"name\":\"log_gap\""#, r#"\"name\":\"gap\""#));
        assert!(refusal(&renamed).ends_with("feature 4 is `gap` in the file and `log_gap` in this build"));
        let redefined = forged(|header| header.replace("min(1, bytes / deficit)", "bytes / deficit"));
        assert!(refusal(&redefined).contains("feature 0, `share_of_deficit`, means `bytes / deficit` in the file"));
        let rehashed = forged(|header| header.replace(&feature_table_hash(), &"a".repeat(64)));
        assert!(refusal(&rehashed).contains("its hash does not belong to it"));
    }

    #[test]
    fn an_unknown_key_is_refused() {
        let unknown = forged(|header| header.replace(r#"\"family\""#, r#"\"novelty\":1,\"family\""#));
        assert!(refusal(&unknown).contains("unknown field `novelty`"));
    }

    #[test]
    fn weights_that_are_not_finite_or_of_the_wrong_shape_are_refused() {
        let mut infinite = policy().to_bytes().unwrap();
        let last = infinite.len() - 4;
        infinite[last..].copy_from_slice(&f32::INFINITY.to_le_bytes());
        assert!(refusal(&seal(infinite)).contains("a value that is not finite"));
        let reshaped = forged(|header| header.replace("\"shape\":[6,5]", "\"shape\":[5,6]"));
        assert!(refusal(&reshaped).contains("tensor `layer.1.weights` has shape [5, 6], expected [6, 6]"));
        let retyped = forged(|header| header.replacen("\"dtype\":\"F32\"", "\"dtype\":\"I32\"", 1));
        assert!(refusal(&retyped).contains("is I32, expected F32"));
        let renamed = forged(|header| header.replace("layer.1.bias", "layer.1.tilt"));
        assert!(refusal(&renamed).contains("tensor `layer.1.bias` not found"));
    }

    #[test]
    fn what_json_cannot_hold_is_not_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gpt.policy");
        let mut policy = policy();
        policy.provenance.quality.insert("overhead_worst".to_owned(), f64::NAN);
        assert!(policy.save(&path).unwrap_err().to_string().contains("overhead_worst is NaN"));
        assert!(!path.exists());
    }

    #[test]
    fn a_file_larger_than_any_policy_is_refused_unread() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("large.policy");
        std::fs::File::create(&path).unwrap().set_len(POLICY_BYTES_MAX + 1).unwrap();
        assert!(PolicyFile::load(&path).unwrap_err().to_string().contains("more than any policy file holds"));
    }
}
