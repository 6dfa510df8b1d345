//! Numbers of double precision, written as their bits: a decimal may come back as its neighbour.

use serde::{Deserialize, Deserializer, Serializer};

pub(crate) fn serialize<S: Serializer>(values: &[f64], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(values.iter().map(|value| value.to_bits()))
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f64>, D::Error> {
    Ok(Vec::<u64>::deserialize(deserializer)?.into_iter().map(f64::from_bits).collect())
}
