//! How sure a figure is that was measured several times: the percentile interval of the bootstrap ("An Introduction to the
//! Bootstrap", Efron and Tibshirani 1993, section 13.3).

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Resamplings.
const RESAMPLED: usize = 2_000;

/// Draws values again.
pub struct Resampling(ChaCha8Rng);

impl Resampling {
    /// As many of `values` as there are, each draw from all of them.
    ///
    /// # Panics
    ///
    /// If there are none.
    pub fn of(&mut self, values: &[f64]) -> Vec<f64> {
        values.iter().map(|_| values[self.0.random_range(0..values.len())]).collect()
    }
}

/// The interval that 95 % of a statistic of resampled values lie in. The same values give the same interval.
pub fn interval(mut statistic: impl FnMut(&mut Resampling) -> f64) -> [f64; 2] {
    let mut resampling = Resampling(ChaCha8Rng::seed_from_u64(1));
    let mut statistics: Vec<f64> = (0..RESAMPLED).map(|_| statistic(&mut resampling)).collect();
    statistics.sort_unstable_by(f64::total_cmp);
    [0.025, 0.975].map(|share| statistics[(share * (RESAMPLED - 1) as f64).round() as usize])
}

/// The middle one of `values`, the mean of two.
///
/// # Panics
///
/// If there are none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    0.5 * (values[(values.len() - 1) / 2] + values[values.len() / 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mean of n uniform values has the standard deviation 1 / √(12 n).
    #[test]
    fn the_interval_of_a_mean_is_as_wide_as_theory_says() {
        let values: Vec<f64> = (0..300).map(|index| f64::from(index) / 300.0).collect();
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        let [low, high] = interval(|resampling| mean(&resampling.of(&values)));
        let expected = 1.96 / (12.0 * 300.0f64).sqrt();
        assert!((mean(&values) - low - expected).abs() < 0.1 * expected, "{low}");
        assert!((high - mean(&values) - expected).abs() < 0.1 * expected, "{high}");
    }

    #[test]
    fn the_median_is_the_middle_one() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), 2.5);
    }
}
