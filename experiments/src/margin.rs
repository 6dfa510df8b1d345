//! What a policy costs on running loops beside the best baseline, and how sure that is.

use std::fmt;

use plimsoll_env::bootstrap::{Resampling, interval, median};
use serde::Serialize;

use crate::results::PointResult;

/// A figure, and the interval that 95 % of its values lie in when the iterations it was measured in are drawn again.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// The figure.
    pub value: f64,
    /// Its 95 % bootstrap interval.
    pub interval: [f64; 2],
}

impl Estimate {
    /// Of the overhead at a point where these are the ratios of planned iterations to the untouched ones beside them.
    pub fn of_overhead(ratios: &[f64]) -> Self {
        Self::of(|draw| overhead(&draw(ratios)))
    }

    /// Of a statistic of samples: each is as measured first, then drawn again.
    fn of(statistic: impl Fn(&mut dyn FnMut(&[f64]) -> Vec<f64>) -> f64) -> Self {
        let value = statistic(&mut |sample| sample.to_vec());
        let drawn = |resampling: &mut Resampling| statistic(&mut |sample| resampling.of(sample));
        Estimate { value, interval: interval(drawn) }
    }
}

impl fmt::Display for Estimate {
    /// In percent.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [low, high] = self.interval;
        write!(f, "{:.1}% [{:.1}, {:.1}]", 100.0 * self.value, 100.0 * low, 100.0 * high)
    }
}

/// Measured overheads, in the mean over all points at which the policy and some baseline were run: at each, the median of
/// the ratios of planned iterations to the untouched ones beside them, less one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Margin {
    /// Points.
    pub points: usize,
    /// The policy's overhead.
    pub policy: Estimate,
    /// That of the baseline that was measured to be the best at each point.
    pub best_baseline: Estimate,
    /// By what share the policy's is the lesser.
    pub less: Estimate,
}

impl Margin {
    /// What `policy` came to; none where it met no baseline.
    pub fn of(policy: &str, results: &[PointResult]) -> Option<Self> {
        let measured = || results.iter().filter(|result| !result.ratios.is_empty());
        let pairs: Vec<[&[f64]; 2]> = measured()
            .filter(|result| result.policy == policy)
            .filter_map(|own| {
                let rivals = measured().filter(|other| {
                    other.policy != policy && other.workload == own.workload && other.budget_bytes == own.budget_bytes
                });
                let best = rivals.min_by(|one, other| overhead(&one.ratios).total_cmp(&overhead(&other.ratios)))?;
                Some([own.ratios.as_slice(), best.ratios.as_slice()])
            })
            .collect();
        Self::over(&pairs)
    }

    /// Of the ratios of the policy and of the best baseline at every point.
    fn over(pairs: &[[&[f64]; 2]]) -> Option<Self> {
        let mean = |which: usize, draw: &mut dyn FnMut(&[f64]) -> Vec<f64>| {
            pairs.iter().map(|pair| overhead(&draw(pair[which]))).sum::<f64>() / pairs.len() as f64
        };
        (!pairs.is_empty()).then(|| Margin {
            points: pairs.len(),
            policy: Estimate::of(|draw| mean(0, draw)),
            best_baseline: Estimate::of(|draw| mean(1, draw)),
            less: Estimate::of(|draw| {
                let own = mean(0, draw);
                1.0 - own / mean(1, draw)
            }),
        })
    }
}

impl fmt::Display for Margin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Margin { points, policy, best_baseline, less } = self;
        write!(
            f,
            "measured overhead in the mean of {points} points, each by the median of its iterations over the untouched ones \
             beside them, with 95% intervals: {policy}; the best baseline of each point: {best_baseline}; less by {less}"
        )
    }
}

fn overhead(ratios: &[f64]) -> f64 {
    median(ratios.to_vec()) - 1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn margins_are_those_of_the_means() {
        let margin =
            Margin::over(&[[&[1.1, 1.0, 1.2], &[1.3, 1.3, 1.3]], [&[1.1, 1.1, 1.1], &[1.1, 1.1, 1.1]]]).unwrap();
        let near = |figure: f64, expected: f64| assert!((figure - expected).abs() < 1e-9, "{figure}, not {expected}");
        assert_eq!(margin.points, 2);
        near(margin.policy.value, 0.1);
        near(margin.best_baseline.value, 0.2);
        near(margin.less.value, 0.5);
        // What does not vary is sure; the other's median is now and then any of its values.
        margin.best_baseline.interval.into_iter().for_each(|end| near(end, 0.2));
        let [low, high] = margin.policy.interval;
        near(low, 0.05);
        near(high, 0.15);
        let [low, high] = margin.less.interval;
        near(low, 0.25);
        near(high, 0.75);
        assert_eq!(Margin::over(&[]), None);
    }
}
