use crate::observation::Pressure;
use crate::policy::{Choice, Policy};
use crate::random::SplitMix64;

/// Any legal eviction, each as likely as the others. Says what a policy is worth that has learnt nothing.
pub struct Random {
    random: SplitMix64,
}

impl Random {
    /// The same seed gives the same choices.
    pub fn new(seed: u64) -> Self {
        Random { random: SplitMix64::new(seed) }
    }
}

impl Policy for Random {
    fn choose(&mut self, pressure: &Pressure<'_>) -> Option<Choice> {
        let count = pressure.choices().count() as u64;
        pressure.choices().nth((self.random.next() % count) as usize)
    }
}
