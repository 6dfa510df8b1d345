//! The runtime's own random numbers: small, seeded, the same on every machine.
//!
//! For sampled decodes and for searches. It is no source of secrets.

/// SplitMix64, from Steele, Lea and Flood, *Fast Splittable Pseudorandom Number Generators* (2014), section 4.
#[derive(Clone, Debug)]
pub(crate) struct SplitMix64 {
    position: u64,
}

impl SplitMix64 {
    pub(crate) const fn new(seed: u64) -> Self {
        SplitMix64 { position: seed }
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.position = self.position.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.position;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// Uniform in the open interval (0, 1): never 0, so its logarithm is finite; never 1 either.
    pub(crate) fn unit(&mut self) -> f32 {
        ((self.next() >> 41) as f32 + 0.5) / (1u64 << 23) as f32
    }

    /// Uniform below `end`, which is not 0. The bias of the remainder is beyond notice at the sizes drawn here.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// A draw from the standard Gumbel distribution. Of several logits, each with a draw of its own added,
    /// the largest is a draw from their softmax.
    pub(crate) fn gumbel(&mut self) -> f32 {
        -(-self.unit().ln()).ln()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_numbers_are_those_of_the_reference_implementation() {
        let mut random = SplitMix64::new(1_234_567);
        let expected = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!([random.next(), random.next(), random.next()], expected);
    }

    #[test]
    fn the_unit_interval_is_open() {
        let lowest = 0.5 / (1u64 << 23) as f32;
        let highest = (((1u64 << 23) - 1) as f32 + 0.5) / (1u64 << 23) as f32;
        assert!(lowest > 0.0 && highest < 1.0);
        let mut random = SplitMix64::new(0);
        let mean = (0..10_000).map(|_| random.unit()).sum::<f32>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
    }
}
