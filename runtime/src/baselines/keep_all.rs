use crate::observation::Pressure;
use crate::policy::{Choice, Policy};

/// Evicts nothing: the reference for makespan and peak.
pub struct KeepAll;

impl Policy for KeepAll {
    fn name(&self) -> &str {
        "keep-all"
    }

    fn reads_features(&self) -> bool {
        false
    }

    fn choose(&mut self, _pressure: &Pressure<'_>) -> Option<Choice> {
        None
    }
}
