//! Least-squares fits of PAPAYA's coefficients, and how good they are.

use serde::Serialize;

/// y(x) = max(level, slope·x + intercept).
#[derive(Clone, Copy)]
struct Bend {
    level: f64,
    slope: f64,
    intercept: f64,
}

impl Bend {
    /// Fits points in ascending order of x; none where there are not two.
    ///
    /// Where the bend lies is tried between every two points, and beyond the last: at least two below it are a constant, at least two above
    /// it a line that rises. A bend that a fit puts outside its two points is no solution. The fit with the least squares wins.
    fn of(points: &[(f64, f64)]) -> Option<Self> {
        debug_assert!(points.is_sorted_by_key(|point| point.0));
        line(points)?;
        let fits = (0..=points.len()).filter(|&flat| flat != 1).filter_map(|flat| Self::with_flat(points, flat));
        fits.min_by(|one, other| one.squares(points).total_cmp(&other.squares(points)))
    }

    /// The fit whose first `flat` points are below the bend.
    fn with_flat(points: &[(f64, f64)], flat: usize) -> Option<Self> {
        let level = match flat {
            0 => f64::NEG_INFINITY,
            _ => points[..flat].iter().map(|point| point.1).sum::<f64>() / flat as f64,
        };
        if flat == points.len() {
            return Some(Bend { level, slope: 0.0, intercept: level });
        }
        let (slope, intercept) = line(&points[flat..])?;
        let is_between = || (points[flat - 1].0..=points[flat].0).contains(&((level - intercept) / slope));
        (slope > 0.0 && (flat == 0 || is_between())).then_some(Bend { level, slope, intercept })
    }

    fn squares(&self, points: &[(f64, f64)]) -> f64 {
        points.iter().map(|&(x, y)| (y - self.level.max(self.slope * x + self.intercept)).powi(2)).sum()
    }
}

/// peak(b) = max(floor, α·b + β), in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PeakFit {
    /// What parameters and optimizer state take alone; 0 where no batch was so small.
    pub floor_bytes: f64,
    /// Bytes that every sample adds.
    pub alpha_bytes: f64,
    /// Bytes without any sample.
    pub beta_bytes: f64,
}

impl PeakFit {
    /// Fits points of batch size and bytes, in ascending order of batch sizes; none where there are not two batch sizes.
    pub fn of(points: &[(f64, f64)]) -> Option<Self> {
        let Bend { level, slope, intercept } = Bend::of(points)?;
        Some(PeakFit { floor_bytes: level.max(0.0), alpha_bytes: slope, beta_bytes: intercept })
    }

    /// The line through the last two points, which later ones do not come below where bytes are the most of several that grow.
    pub fn beyond(points: &[(f64, f64)]) -> Option<Self> {
        let (alpha_bytes, beta_bytes) = line(&points[points.len().checked_sub(2)?..])?;
        Some(PeakFit { floor_bytes: 0.0, alpha_bytes, beta_bytes })
    }

    /// Peak at a batch size.
    pub fn peak_bytes(&self, batch: f64) -> f64 {
        self.floor_bytes.max(self.alpha_bytes * batch + self.beta_bytes)
    }

    /// The largest batch whose peak is within `budget_bytes`: 0 where none is; none where no batch is too large.
    pub fn largest_batch(&self, budget_bytes: u64) -> Option<u64> {
        if self.floor_bytes > budget_bytes as f64 {
            return Some(0);
        }
        let room_bytes = budget_bytes as f64 - self.beta_bytes;
        (self.alpha_bytes > 0.0).then(|| (room_bytes / self.alpha_bytes).max(0.0).floor() as u64)
    }
}

/// latency(b) = max(a, k·b) + c, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LatencyFit {
    /// The least time of the part that grows: what a device that is not full takes. 0 where no batch was so small.
    pub a_ns: f64,
    /// Time that every sample adds.
    pub k_ns: f64,
    /// Time without any sample.
    pub c_ns: f64,
}

impl LatencyFit {
    /// Fits points of batch size and time, in ascending order of batch sizes; none where there are not two.
    pub fn of(points: &[(f64, f64)]) -> Option<Self> {
        let Bend { level, slope, intercept } = Bend::of(points)?;
        Some(LatencyFit { a_ns: (level - intercept).max(0.0), k_ns: slope, c_ns: intercept })
    }

    /// Time of an iteration with a batch of that size.
    pub fn latency_ns(&self, batch: f64) -> f64 {
        self.a_ns.max(self.k_ns * batch) + self.c_ns
    }
}

/// How predictions compare with what they predict.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Quality {
    /// Pearson's correlation; none where either does not vary.
    pub r: Option<f64>,
    /// 1 - squared errors / squared deviations from the mean; none where what is predicted does not vary.
    pub r_squared: Option<f64>,
    /// The largest error, as a share of what is predicted.
    pub worst_share: f64,
}

impl Quality {
    /// Compares pairs of predicted and found.
    pub fn of(pairs: &[(f64, f64)]) -> Self {
        let count = pairs.len().max(1) as f64;
        let mean = |of: fn(&(f64, f64)) -> f64| pairs.iter().map(of).sum::<f64>() / count;
        let (predicted_mean, found_mean) = (mean(|pair| pair.0), mean(|pair| pair.1));
        let sum =
            |of: &dyn Fn(f64, f64) -> f64| pairs.iter().map(|&(predicted, found)| of(predicted, found)).sum::<f64>();
        let together = sum(&|predicted, found| (predicted - predicted_mean) * (found - found_mean));
        let predicted_spread = sum(&|predicted, _| (predicted - predicted_mean).powi(2));
        let found_spread = sum(&|_, found| (found - found_mean).powi(2));
        let errors = sum(&|predicted, found| (found - predicted).powi(2));
        let shares = pairs.iter().map(|&(predicted, found)| ((predicted - found) / found).abs());
        Quality {
            r: (predicted_spread > 0.0 && found_spread > 0.0)
                .then(|| together / (predicted_spread * found_spread).sqrt()),
            r_squared: (found_spread > 0.0).then(|| 1.0 - errors / found_spread),
            worst_share: shares.fold(0.0, f64::max),
        }
    }
}

/// Slope and intercept of the least-squares line; none where the points have not two abscissas.
fn line(points: &[(f64, f64)]) -> Option<(f64, f64)> {
    let count = points.len() as f64;
    let x_mean = points.iter().map(|point| point.0).sum::<f64>() / count;
    let y_mean = points.iter().map(|point| point.1).sum::<f64>() / count;
    let spread: f64 = points.iter().map(|point| (point.0 - x_mean).powi(2)).sum();
    let together: f64 = points.iter().map(|point| (point.0 - x_mean) * (point.1 - y_mean)).sum();
    let slope = (spread > 0.0).then(|| together / spread)?;
    Some((slope, y_mean - slope * x_mean))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coefficients_of_exact_points_are_found() {
        let peak = PeakFit::of(&[(2.0, 70.0), (4.0, 90.0), (8.0, 130.0)]).unwrap();
        assert_eq!((peak.floor_bytes, peak.alpha_bytes, peak.beta_bytes), (0.0, 10.0, 50.0));
        assert_eq!(peak.largest_batch(129), Some(7));
        assert_eq!(peak.largest_batch(130), Some(8));
        assert_eq!(peak.largest_batch(40), Some(0));
        assert_eq!(PeakFit { alpha_bytes: 0.0, ..peak }.largest_batch(40), None);
        assert_eq!(PeakFit::of(&[(2.0, 70.0), (2.0, 71.0)]), None);
    }

    #[test]
    fn what_small_batches_do_not_add_to_says_nothing_of_large_ones() {
        let peak = |batch: f64| 90f64.max(10.0 * batch);
        let points = |batches: &[f64]| -> Vec<_> { batches.iter().map(|&batch| (batch, peak(batch))).collect() };
        let bent = PeakFit::of(&points(&[2.0, 4.0, 8.0, 12.0, 16.0])).unwrap();
        assert_eq!((bent.largest_batch(200), bent.largest_batch(89)), (Some(20), Some(0)), "{bent:?}");
        let flat = PeakFit::of(&points(&[2.0, 4.0, 8.0])).unwrap();
        assert_eq!((flat.peak_bytes(100.0), flat.largest_batch(200)), (90.0, None));
        let beyond = PeakFit::beyond(&points(&[2.0, 4.0, 12.0, 16.0])).unwrap();
        assert_eq!(beyond.largest_batch(200), Some(20));
    }

    #[test]
    fn times_that_fall_are_noise_about_their_mean() {
        let fit = LatencyFit::of(&[(1.0, 9.0), (2.0, 7.0), (4.0, 5.0)]).unwrap();
        assert_eq!(fit.latency_ns(100.0), 7.0, "{fit:?}");
    }

    #[test]
    fn the_bend_of_a_device_that_is_not_full_is_found() {
        let latency = |batch: f64| 40f64.max(5.0 * batch) + 3.0;
        let points: Vec<_> = [1.0, 2.0, 4.0, 6.0, 10.0, 16.0, 20.0].map(|batch| (batch, latency(batch))).to_vec();
        let fit = LatencyFit::of(&points).unwrap();
        for (found, expected) in [(fit.a_ns, 40.0), (fit.k_ns, 5.0), (fit.c_ns, 3.0)] {
            assert!((found - expected).abs() < 1e-9, "{fit:?}");
        }
        let straight = LatencyFit::of(&[(1.0, 7.0), (2.0, 9.0), (3.0, 11.0)]).unwrap();
        assert!(straight.a_ns == 0.0 && (straight.latency_ns(10.0) - 25.0).abs() < 1e-9, "{straight:?}");
    }

    #[test]
    fn a_fit_is_as_good_as_its_errors() {
        let perfect = Quality::of(&[(1.0, 1.0), (2.0, 2.0), (5.0, 5.0)]);
        assert_eq!((perfect.r, perfect.r_squared, perfect.worst_share), (Some(1.0), Some(1.0), 0.0));
        // Off by a constant: correlated, and wrong.
        let biased = Quality::of(&[(2.0, 1.0), (3.0, 2.0), (4.0, 3.0)]);
        assert!(
            (biased.r.unwrap() - 1.0).abs() < 1e-12 && biased.r_squared.unwrap() < 0.0 && biased.worst_share == 1.0
        );
        assert_eq!(Quality::of(&[(1.0, 2.0)]).r_squared, None);
    }
}
