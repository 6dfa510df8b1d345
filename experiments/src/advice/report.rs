//! What advice comes to: fits, how good they are, and which method to use.

use std::fmt;

use plimsoll_runtime::Prediction;
use serde::Serialize;

use super::fit::{LatencyFit, PeakFit, Quality};
use super::method::{Figures, Made};
use super::quantisation::Cost;
use crate::table::{Table, mib, milliseconds, percent};

/// What one method makes of one batch size.
#[derive(Clone, Debug, Serialize)]
pub struct Point {
    /// Samples in a batch.
    pub batch: i64,
    /// Whether it was kept from the fits, to judge them.
    pub held_out: bool,
    /// Time of an iteration with nothing evicted.
    pub keep_all_ns: u64,
    /// The least budget that the method can hold.
    pub least_budget_bytes: u64,
    /// What no plan of the method's can do without.
    pub unavoidable_bytes: u64,
    /// The plan at the budget.
    pub at_budget: Figures,
    /// Whether it holds the budget.
    pub feasible: bool,
    /// The plan at the least budget.
    pub full_strength: Figures,
    /// What the training loop did under that plan, where it was run.
    pub measured: Option<Figures>,
    /// Where the time of the plan at the budget goes, beside the operators of the loop.
    #[serde(skip)]
    prediction: Prediction,
}

impl Point {
    /// A method's plans for one batch size.
    pub fn of(batch: i64, held_out: bool, keep_all_ns: u64, made: &Made, measured: Option<Figures>) -> Self {
        Point {
            batch,
            held_out,
            keep_all_ns,
            least_budget_bytes: made.least_budget_bytes,
            unavoidable_bytes: made.unavoidable_bytes,
            at_budget: (&made.at_budget).into(),
            feasible: made.at_budget.fits(),
            full_strength: (&made.at_full_strength).into(),
            measured,
            prediction: made.at_budget.prediction,
        }
    }

    fn overhead(&self) -> f64 {
        self.at_budget.latency_ns as f64 / self.keep_all_ns as f64 - 1.0
    }
}

/// One method at full strength, over all batch sizes.
#[derive(Clone, Debug, Serialize)]
pub struct MethodAdvice {
    /// The method.
    pub method: &'static str,
    /// Whether results stay as they are. Plimsoll carries out no other method; the others are predicted alone.
    pub exact: bool,
    /// What it makes of each batch size.
    pub points: Vec<Point>,
    /// Its peak.
    pub peak: PeakFit,
    /// Its time.
    pub latency: LatencyFit,
    /// How well the peak fits the points that it was fitted to.
    pub peak_fitted: Quality,
    /// How well the time does.
    pub latency_fitted: Quality,
    /// How well the peak was foretold for the batch sizes that were held out, by what the timeline says of them.
    pub peak_held_out: Quality,
    /// How well throughput was.
    pub throughput_held_out: Quality,
    /// The largest batch whose peak is within the budget, but at most [`REACH`] times the largest that was recorded.
    pub largest_batch: u64,
    /// Whether the fits put it beyond that.
    pub may_be_larger: bool,
    /// Samples per second with that batch.
    pub throughput_there: Option<f64>,
}

/// What was recorded says nothing of batches more times as large.
const REACH: u64 = 2;

impl MethodAdvice {
    fn largest_batch_told(&self) -> String {
        format!("{}{}", self.largest_batch, if self.may_be_larger { "+" } else { "" })
    }

    /// Fits `points`, whose batch sizes ascend; none where fewer than two batch sizes are not held out.
    pub fn of(method: &'static str, exact: bool, points: Vec<Point>, budget_bytes: u64) -> Option<Self> {
        let select = |held_out: bool, of: fn(&Point) -> u64| -> Vec<(f64, f64)> {
            let selected = points.iter().filter(|point| point.held_out == held_out);
            selected.map(|point| (point.batch as f64, of(point) as f64)).collect()
        };
        let (peaks, latencies) =
            (|point: &Point| point.full_strength.peak_bytes, |point: &Point| point.full_strength.latency_ns);
        let peak = PeakFit::of(&select(false, peaks))?;
        let latency = LatencyFit::of(&select(false, latencies))?;
        let judge = |held_out: bool, of: fn(&Point) -> u64, predict: &dyn Fn(f64) -> f64| {
            let pairs: Vec<_> =
                select(held_out, of).into_iter().map(|(batch, found)| (predict(batch), found)).collect();
            Quality::of(&pairs)
        };
        let throughput: Vec<_> = select(true, latencies)
            .into_iter()
            .map(|(batch, ns)| (per_second(batch, latency.latency_ns(batch)), per_second(batch, ns)))
            .collect();
        let unavoidable: Vec<_> =
            points.iter().map(|point| (point.batch as f64, point.unavoidable_bytes as f64)).collect();
        let bounds = [Some(peak), PeakFit::beyond(&unavoidable)];
        let foretold = bounds.into_iter().flatten().filter_map(|fit| fit.largest_batch(budget_bytes)).min();
        let reach = REACH * points.last().map_or(0, |point| point.batch as u64);
        let largest_batch = foretold.map_or(reach, |batch| batch.min(reach));
        let there = (largest_batch > 0).then_some(largest_batch as f64);
        Some(MethodAdvice {
            method,
            exact,
            peak,
            latency,
            peak_fitted: judge(false, peaks, &|batch| peak.peak_bytes(batch)),
            latency_fitted: judge(false, latencies, &|batch| latency.latency_ns(batch)),
            peak_held_out: judge(true, peaks, &|batch| peak.peak_bytes(batch)),
            throughput_held_out: Quality::of(&throughput),
            largest_batch,
            may_be_larger: foretold.is_none_or(|batch| batch > reach),
            throughput_there: there.map(|batch| per_second(batch, latency.latency_ns(batch))),
            points,
        })
    }

    fn at(&self, batch: i64) -> &Point {
        self.points.iter().find(|point| point.batch == batch).expect("every method plans every batch size")
    }
}

/// Samples per second.
pub fn per_second(batch: f64, latency_ns: f64) -> f64 {
    batch * 1e9 / latency_ns
}

/// Which method to use.
#[derive(Clone, Debug, Serialize)]
pub struct Recommendation {
    /// The method for the batch size of the configuration; none where none holds the budget.
    pub method: Option<&'static str>,
    /// The method with the highest throughput at its largest batch.
    pub fastest: Option<&'static str>,
    /// Why, one sentence for each method.
    pub reasons: Vec<String>,
}

/// The whole of it.
#[derive(Clone, Debug, Serialize)]
pub struct Advice {
    /// Name of the workload.
    pub workload: String,
    /// Batch size of the configuration.
    pub batch: i64,
    /// The budget.
    pub budget_bytes: u64,
    /// Bytes per second from the device.
    pub link_bytes_per_s: f64,
    /// Compute time of 16-bit quantisation on this machine.
    pub half: Cost,
    /// Compute time of 8-bit quantisation on this machine.
    pub int8: Cost,
    /// Every method.
    pub methods: Vec<MethodAdvice>,
    /// Which to use.
    pub recommendation: Recommendation,
}

impl Recommendation {
    /// Of the methods that leave results as they are: the fastest at `batch` that holds the budget, and the one with the
    /// highest throughput at its largest batch.
    pub fn of(methods: &[MethodAdvice], batch: i64, budget_bytes: u64) -> Self {
        let exact = || methods.iter().filter(|method| method.exact);
        let holding = exact().filter(|method| method.at(batch).feasible);
        let best = holding.min_by_key(|method| method.at(batch).at_budget.latency_ns);
        let throughput = |method: &&MethodAdvice| method.throughput_there.unwrap_or(0.0);
        let fastest = exact().filter(|method| method.throughput_there.is_some());
        let fastest = fastest.max_by(|one, other| throughput(one).total_cmp(&throughput(other)));
        Recommendation {
            method: best.map(|method| method.method),
            fastest: fastest.map(|method| method.method),
            reasons: methods.iter().map(|method| reason(method, batch, budget_bytes)).collect(),
        }
    }
}

/// What speaks for a method, or against it.
fn reason(method: &MethodAdvice, batch: i64, budget_bytes: u64) -> String {
    let point = method.at(batch);
    let name = method.method;
    if !point.feasible {
        let least = mib(point.least_budget_bytes);
        return format!("{name} cannot hold {} MiB at a batch of {batch}: it needs {least} MiB", mib(budget_bytes));
    }
    let Prediction { stall_ns, contention_ns, recompute_ns, .. } = point.prediction;
    if stall_ns + contention_ns + recompute_ns == 0 {
        return format!("{name} holds the budget at a batch of {batch} and costs nothing");
    }
    let causes =
        [(recompute_ns, "reruns"), (contention_ns, "compute lost beside copies"), (stall_ns, "waits for copies")];
    let causes: Vec<String> = causes
        .iter()
        .filter(|(ns, _)| *ns > 0)
        .map(|(ns, cause)| format!("{} ms of {cause}", milliseconds(*ns)))
        .collect();
    let changed = if method.exact { "" } else { "; it would change results, and is not carried out" };
    format!("{name} costs {} at a batch of {batch}: {}{changed}", percent(point.overhead()), causes.join(", "))
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} under {} MiB, copies at {:.2} GB/s\n",
            self.workload,
            mib(self.budget_bytes),
            self.link_bytes_per_s / 1e9
        )?;
        let at = format!("ms at batch {}", self.batch);
        let mut table = Table::new([
            "method",
            "results",
            "largest batch",
            "samples/s there",
            "R² peak",
            "R² time",
            "overhead",
            &at,
        ]);
        for method in &self.methods {
            let point = method.at(self.batch);
            let held = |text: String| if point.feasible { text } else { "-".to_owned() };
            table.row([
                method.method.to_owned(),
                if method.exact { "the same" } else { "changed: predicted only" }.to_owned(),
                method.largest_batch_told(),
                method.throughput_there.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1}")),
                share(method.peak_fitted.r_squared),
                share(method.latency_fitted.r_squared),
                held(percent(point.overhead())),
                held(milliseconds(point.at_budget.latency_ns)),
            ]);
        }
        writeln!(f, "{table}")?;
        self.write_held_out(f)?;
        self.recommendation.reasons.iter().try_for_each(|reason| writeln!(f, "{reason}"))?;
        writeln!(f)?;
        self.write_recommendation(f)
    }
}

impl Advice {
    /// Full strength at batch sizes that no fit has seen: foretold, planned, measured.
    fn write_held_out(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new([
            "held out",
            "batch",
            "peak: fit (MiB)",
            "planned",
            "measured",
            "samples/s: fit",
            "planned",
            "measured",
        ]);
        for method in &self.methods {
            for point in method.points.iter().filter(|point| point.held_out) {
                let batch = point.batch as f64;
                let rate = |ns: f64| format!("{:.1}", per_second(batch, ns));
                let measured = |text: &dyn Fn(Figures) -> String| point.measured.map_or_else(|| "-".to_owned(), text);
                table.row([
                    method.method.to_owned(),
                    point.batch.to_string(),
                    mib(method.peak.peak_bytes(batch).max(0.0) as u64),
                    mib(point.full_strength.peak_bytes),
                    measured(&|figures| mib(figures.peak_bytes)),
                    rate(method.latency.latency_ns(batch)),
                    rate(point.full_strength.latency_ns as f64),
                    measured(&|figures| rate(figures.latency_ns as f64)),
                ]);
            }
        }
        writeln!(f, "{table}")?;
        let measured = |of: &dyn Fn(&MethodAdvice, &Point, Figures) -> (f64, f64)| {
            let points = self.methods.iter().flat_map(|method| method.points.iter().map(move |point| (method, point)));
            let held_out = points.filter(|(_, point)| point.held_out);
            let pairs = held_out.filter_map(|(method, point)| Some(of(method, point, point.measured?)));
            Quality::of(&pairs.collect::<Vec<_>>())
        };
        let peak =
            measured(&|method, point, found| (method.peak.peak_bytes(point.batch as f64), found.peak_bytes as f64));
        let throughput = measured(&|method, point, found| {
            let batch = point.batch as f64;
            let foretold = per_second(batch, method.latency.latency_ns(batch));
            (foretold, per_second(batch, found.latency_ns as f64))
        });
        for (what, quality) in [("peak", peak), ("throughput", throughput)] {
            writeln!(
                f,
                "{what} foretold against measured: R {}, R² {}, worst {:.1}%",
                share(quality.r),
                share(quality.r_squared),
                100.0 * quality.worst_share,
            )?;
        }
        writeln!(f)
    }

    fn write_recommendation(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.recommendation.method {
            Some("keep") => {
                writeln!(f, "use keep: at a batch of {} the job fits, and nothing need be done", self.batch)?
            }
            Some(method) => {
                writeln!(f, "use {method} at a batch of {}: of what holds the budget it is the fastest", self.batch)?
            }
            None => writeln!(f, "no method holds the budget at a batch of {}", self.batch)?,
        }
        let fastest = self.methods.iter().find(|method| Some(method.method) == self.recommendation.fastest);
        let Some((fastest, rate)) = fastest.and_then(|method| Some((method, method.throughput_there?))) else {
            return Ok(());
        };
        writeln!(
            f,
            "the highest throughput is that of {} at its largest batch, {}: {rate:.1} samples/s",
            fastest.method,
            fastest.largest_batch_told(),
        )?;
        if self.methods.iter().any(|method| method.may_be_larger) {
            writeln!(
                f,
                "+: more may fit. That is {REACH} times the largest batch that was recorded, and no fit reaches further: --batches"
            )?;
        }
        Ok(())
    }
}

fn share(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.4}"))
}
