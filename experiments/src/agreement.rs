//! How well predictions agree with measurements, as numbers and as a picture.

use std::fmt::{self, Write as _};

use serde::Serialize;

use crate::results::{Cost, PointResult};
use crate::svg::escaped;

/// How well what was predicted agrees with what was measured, over all points that were run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Agreement {
    /// Points that were run.
    pub points: usize,
    /// Greatest deviation of a measured peak from its prediction, as a share of the prediction.
    pub peak_error_max: f64,
    /// What the plan was predicted to take, when it was made.
    pub as_planned: Determination,
    /// What it is predicted to take with operators as fast as they were while it was measured.
    pub retimed: Determination,
}

/// Coefficients of determination.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Determination {
    /// Of the makespan, absolute.
    pub makespan_r2: f64,
    /// Of the slowdown: the makespan over the keep-all makespan.
    pub slowdown_r2: f64,
}

impl Determination {
    fn of(pairs: &[(Cost, Cost)]) -> Self {
        let of = |figure: fn(&Cost) -> f64| {
            r2(&pairs.iter().map(|(predicted, measured)| (figure(predicted), figure(measured))).collect::<Vec<_>>())
        };
        Determination { makespan_r2: of(|cost| cost.makespan_ns as f64), slowdown_r2: of(|cost| cost.overhead) }
    }
}

impl Agreement {
    /// The agreement of `results`; none where fewer than two were run.
    pub fn of(results: &[PointResult]) -> Option<Self> {
        let points: Vec<_> = Point::of_all(results).collect();
        let peak_error = points.iter().map(|Point { predicted, measured, .. }| {
            measured.peak_bytes.abs_diff(predicted.peak_bytes) as f64 / predicted.peak_bytes as f64
        });
        let pairs = |predicted: fn(&Point<'_>) -> Cost| {
            points.iter().map(|point| (predicted(point), point.measured)).collect::<Vec<_>>()
        };
        (points.len() >= 2).then(|| Agreement {
            points: points.len(),
            peak_error_max: peak_error.fold(0.0, f64::max),
            as_planned: Determination::of(&pairs(|point| point.predicted)),
            retimed: Determination::of(&pairs(|point| point.retimed)),
        })
    }
}

impl fmt::Display for Agreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Agreement { points, peak_error_max, as_planned, retimed } = self;
        write!(
            f,
            "{points} points measured: peaks within {:.2} % of their prediction; R² of the makespan {:.3}, of the \
             slowdown {:.3}; with operators as fast as while it was measured {:.3} and {:.3}",
            100.0 * peak_error_max,
            as_planned.makespan_r2,
            as_planned.slowdown_r2,
            retimed.makespan_r2,
            retimed.slowdown_r2,
        )
    }
}

/// What was predicted of one plan beside what was measured of it.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Point<'a> {
    workload: &'a str,
    policy: &'a str,
    budget_bytes: u64,
    link_bytes_per_s: f64,
    predicted: Cost,
    retimed: Cost,
    measured: Cost,
    identical: Option<bool>,
}

impl<'a> Point<'a> {
    /// The points of `results` that were run.
    pub fn of_all(results: &'a [PointResult]) -> impl Iterator<Item = Self> {
        results.iter().filter_map(|result| {
            let &PointResult { budget_bytes, link_bytes_per_s, predicted, identical, .. } = result;
            let (measured, retimed) = (result.measured?, result.retimed?);
            let (workload, policy) = (result.workload.as_str(), result.policy.as_str());
            Some(Point { workload, policy, budget_bytes, link_bytes_per_s, predicted, retimed, measured, identical })
        })
    }
}

/// 1 − Σ(measured − predicted)² / Σ(measured − mean)², for pairs of predicted and measured.
fn r2(pairs: &[(f64, f64)]) -> f64 {
    let mean = pairs.iter().map(|(_, measured)| measured).sum::<f64>() / pairs.len() as f64;
    let total: f64 = pairs.iter().map(|(_, measured)| (measured - mean).powi(2)).sum();
    let left: f64 = pairs.iter().map(|(predicted, measured)| (measured - predicted).powi(2)).sum();
    1.0 - left / total
}

/// Side of the picture, and the margin that axes and their names take, in pixels.
const SIDE: f64 = 560.0;
const MARGIN: f64 = 56.0;
/// One colour per policy, from Okabe and Ito's palette for all kinds of sight.
const COLOURS: [&str; 8] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"];

/// A scatter plot of predicted against measured slowdowns, as SVG: a point on the diagonal was predicted exactly. The
/// predictions are those with operators as fast as while the plan was measured.
pub fn scatter(title: &str, results: &[PointResult]) -> String {
    let mut policies: Vec<&str> = Vec::new();
    let mut points = Vec::new();
    for point in Point::of_all(results) {
        let known = policies.iter().position(|policy| *policy == point.policy);
        let policy = known.unwrap_or_else(|| {
            policies.push(point.policy);
            policies.len() - 1
        });
        points.push((1.0 + point.retimed.overhead, 1.0 + point.measured.overhead, policy, point));
    }
    let all = || points.iter().flat_map(|&(predicted, measured, ..)| [predicted, measured]);
    let least = all().fold(1.0, f64::min).min(1.0);
    let most = all().fold(1.0, f64::max).max(least + 0.1);
    let along = |slowdown: f64| MARGIN + (slowdown - least) / (most - least) * (SIDE - 2.0 * MARGIN);
    let (left, right) = (along(least), along(most));
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{SIDE}\" height=\"{SIDE}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{MARGIN}\" y=\"24\" font-size=\"14\">{}</text>\n\
         <line x1=\"{left}\" y1=\"{right}\" x2=\"{right}\" y2=\"{left}\" stroke=\"#bbbbbb\"/>\n",
        escaped(title),
    );
    // Writing to a String cannot fail.
    for tick in 0..=4 {
        let slowdown = least + (most - least) * f64::from(tick) / 4.0;
        let (x, y) = (along(slowdown), SIDE - along(slowdown));
        let _ = writeln!(svg, "<text x=\"{x}\" y=\"{}\" text-anchor=\"middle\">{slowdown:.2}</text>", right + 20.0);
        let _ = writeln!(svg, "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{slowdown:.2}</text>", left - 8.0, y + 4.0);
    }
    let _ = writeln!(
        svg,
        "<path d=\"M {left} {left} V {right} H {right}\" fill=\"none\" stroke=\"black\"/>\n\
         <text x=\"{}\" y=\"{}\" text-anchor=\"middle\">predicted makespan / keep-all makespan</text>\n\
         <text transform=\"translate(14 {}) rotate(-90)\" text-anchor=\"middle\">measured</text>",
        SIDE / 2.0,
        right + 42.0,
        SIDE / 2.0,
    );
    for (predicted, measured, policy, point) in points {
        let (x, y, colour) = (along(predicted), SIDE - along(measured), COLOURS[policy % COLOURS.len()]);
        let label = format!("{} {} at {} bytes", point.workload, point.policy, point.budget_bytes);
        let _ = writeln!(
            svg,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{colour}\" fill-opacity=\"0.7\"><title>{}</title></circle>",
            escaped(&label)
        );
    }
    for (index, policy) in policies.iter().enumerate() {
        let (y, colour) = (MARGIN + 16.0 * index as f64, COLOURS[index % COLOURS.len()]);
        let _ = writeln!(svg, "<circle cx=\"{}\" cy=\"{y}\" r=\"4\" fill=\"{colour}\"/>", left + 14.0);
        let _ = writeln!(svg, "<text x=\"{}\" y=\"{}\">{}</text>", left + 24.0, y + 4.0, escaped(policy));
    }
    svg.push_str("</svg>\n");
    svg
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn determination_is_that_of_the_definition() {
        assert_eq!(r2(&[(1.0, 1.0), (2.0, 2.0), (4.0, 4.0)]), 1.0);
        assert_eq!(r2(&[(2.0, 1.0), (2.0, 2.0), (2.0, 3.0)]), 0.0);
        assert_eq!(r2(&[(3.0, 1.0), (2.0, 2.0), (1.0, 3.0)]), -3.0);
    }
}
