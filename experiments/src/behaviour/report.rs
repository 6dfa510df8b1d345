//! The report: what follows from a history, as numbers, as JSON and as text.

use std::fmt;

use plimsoll_runtime::{Link, Trace};
use serde::Serialize;

use super::history::{Block, History, Kind};
use super::period::Period;
use crate::table::{Table, mib};

/// Bounds between the bins of access-time intervals: decades, in nanoseconds.
const BIN_BOUNDS_NS: [u64; 7] = [1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000];

/// What device memory is used for.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// What it is about.
    pub subject: String,
    /// `ns`, or `events` where the source holds no times.
    pub unit: &'static str,
    /// Time from start to end.
    pub length: u64,
    /// Most bytes in use.
    pub peak_bytes: u64,
    /// Time of that moment.
    pub peak_at: u64,
    /// How much lower the peak would be if nothing were held after its last use, where the source knows uses.
    pub dead_tail_bytes: Option<u64>,
    /// Most bytes that the allocator had reserved, where the source says.
    pub reserved_bytes: Option<u64>,
    /// Times that it ran out of memory, where the source says.
    pub out_of_memory: Option<usize>,
    /// What is in use at the peak, by kind.
    pub at_peak: Vec<KindAtPeak>,
    /// How long blocks live, by kind.
    pub lifetimes: Vec<Lifetimes>,
    /// How long they lie idle, where the source knows accesses.
    pub intervals: Option<Intervals>,
    /// What shows that iterations repeat.
    pub iteration: Iteration,
}

/// What is in use at the peak for one thing.
#[derive(Clone, Debug, Serialize)]
pub struct KindAtPeak {
    /// The thing.
    pub kind: Kind,
    /// How many blocks.
    pub blocks: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// How long blocks of one kind live.
#[derive(Clone, Debug, Serialize)]
pub struct Lifetimes {
    /// The kind.
    pub kind: Kind,
    /// How many blocks.
    pub blocks: usize,
    /// Bytes of all of them, whether or not they live at the same time.
    pub bytes: u64,
    /// How many are there from start to end.
    pub permanent: usize,
    /// Median life of the others.
    pub median: u64,
    /// The life that one in ten of the others exceeds.
    pub p90: u64,
    /// The longest life of the others.
    pub max: u64,
}

/// Access-time intervals: the idle times between two successive accesses of a block.
#[derive(Clone, Debug, Serialize)]
pub struct Intervals {
    /// How many.
    pub count: usize,
    /// Their percentiles.
    pub percentiles: Vec<Percentile>,
    /// Their distribution.
    pub histogram: Vec<Bin>,
    /// Those with the most bytes × time, the most first.
    pub outliers: Vec<Outlier>,
    /// What swapping would cost nothing.
    pub free_to_swap: FreeToSwap,
}

/// One percentile.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Percentile {
    /// Percent of the intervals that are not longer.
    pub percent: u32,
    /// The interval.
    pub interval: u64,
}

/// Intervals of about one length.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Bin {
    /// All of them are shorter; none for the last bin.
    pub below: Option<u64>,
    /// How many.
    pub intervals: usize,
    /// Bytes of their blocks, once for each interval.
    pub bytes: u64,
}

/// A block that is large and idle for long.
#[derive(Clone, Debug, Serialize)]
pub struct Outlier {
    /// Which block.
    pub block: String,
    /// What it is for.
    pub kind: Kind,
    /// Its size.
    pub bytes: u64,
    /// When it becomes idle.
    pub from: u64,
    /// How long it is.
    pub interval: u64,
    /// Whether both copies fit in the interval.
    pub free_to_swap: bool,
    /// Whether it is idle at the peak.
    pub at_peak: bool,
}

/// Intervals in which a block can be copied out and back: interval ≥ bytes / B_d2h + bytes / B_h2d, and each copy's
/// latency, which the paper leaves out.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct FreeToSwap {
    /// Bytes per second from the device.
    pub offload_bytes_per_s: f64,
    /// Bytes per second to the device.
    pub prefetch_bytes_per_s: f64,
    /// How many intervals.
    pub intervals: usize,
    /// Bytes of blocks that are idle in one of them at the peak. Each could be swapped for free alone; together they
    /// share one channel.
    pub bytes_at_peak: u64,
}

/// What shows that iterations repeat.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "evidence", rename_all = "kebab-case")]
pub enum Iteration {
    /// A recorded iteration: the recorder has matched several, and the end is where the start was.
    Recorded {
        /// Iterations that did the same.
        recorded_iterations: u32,
        /// Spread of operator times over those iterations, as a share of the times.
        time_spread: f64,
        /// Blocks at the start that are there at the end.
        surviving: usize,
        /// Blocks at the start whose place another takes by the end.
        succeeded: usize,
        /// Blocks at the start that are gone at the end.
        gone: usize,
        /// Blocks at the end that are new and take no other's place: what grows from iteration to iteration.
        new: usize,
        /// Bytes in use at the start.
        start_bytes: u64,
        /// Bytes in use at the end.
        end_bytes: u64,
    },
    /// The end of a raw stream of allocations repeats.
    Periodic {
        /// How.
        period: Period,
        /// Whole iterations.
        iterations: usize,
        /// Allocations before the rhythm is found.
        warm_up_events: usize,
        /// Bytes allocated in one iteration.
        bytes: u64,
    },
    /// It does not.
    NotFound {
        /// Allocations seen.
        events: usize,
    },
}

impl Iteration {
    /// What a trace shows.
    pub fn of_trace(trace: &Trace) -> Self {
        let initial = trace.initial_storages as usize;
        let holds_bytes = |index: usize| trace.storages[index].bytes > 0;
        let mut alive = vec![false; trace.storages.len()];
        alive[..initial].fill(true);
        for operator in &trace.operators {
            operator.creates.iter().for_each(|storage| alive[storage.index()] = true);
            operator.frees.iter().for_each(|storage| alive[storage.index()] = false);
        }
        let bytes = |alive: &dyn Fn(usize) -> bool| {
            let counted = trace.storages.iter().enumerate().filter(|&(index, _)| alive(index));
            counted.map(|(_, storage)| storage.bytes).sum::<u64>() + trace.unseen_bytes
        };
        let count = |range: std::ops::Range<usize>| range.filter(|&index| alive[index] && holds_bytes(index)).count();
        let (surviving, at_the_end) = (count(0..initial), count(0..trace.storages.len()));
        let at_the_start = (0..initial).filter(|&index| holds_bytes(index)).count();
        let succeeded = trace.carried.iter().filter(|(from, _)| holds_bytes(from.index())).count();
        let costs: u64 = trace.operators.iter().map(|operator| operator.cost_ns).sum();
        let spreads: u64 = trace.operators.iter().map(|operator| operator.spread_ns).sum();
        Iteration::Recorded {
            recorded_iterations: trace.recorded_iterations,
            time_spread: if costs == 0 { 0.0 } else { spreads as f64 / costs as f64 },
            surviving,
            succeeded,
            gone: at_the_start.saturating_sub(surviving + succeeded),
            new: at_the_end.saturating_sub(surviving + succeeded),
            start_bytes: bytes(&|index| index < initial),
            end_bytes: bytes(&|index| alive[index]),
        }
    }

    /// What a stream of allocations shows.
    pub fn of_stream(allocations: &[u64]) -> Self {
        match super::period::period(allocations) {
            None => Iteration::NotFound { events: allocations.len() },
            Some(period) => Iteration::Periodic {
                period,
                iterations: period.iterations(),
                warm_up_events: allocations.len() - period.repeating_events - period.later_events,
                bytes: allocations[..allocations.len() - period.later_events].iter().rev().take(period.events).sum(),
            },
        }
    }
}

/// An interval of a block.
struct Idle<'a> {
    block: &'a Block,
    from_tick: usize,
    until_tick: usize,
    interval: u64,
}

impl Report {
    /// Reports on `history`, with swaps over `link` and at most `outliers_max` outliers.
    pub fn of(history: &History, iteration: Iteration, link: Link, outliers_max: usize) -> Self {
        let by_kind = history.bytes_by_kind();
        let totals: Vec<u64> = by_kind.iter().map(|kinds| kinds.iter().sum()).collect();
        let peak_bytes = totals.iter().copied().max().unwrap_or(0);
        let peak = totals.iter().position(|&total| total == peak_bytes).unwrap_or(0);
        let alive = |block: &&Block| {
            let (born, died) = history.life(block);
            (born..died).contains(&peak)
        };
        let kinds =
            || Kind::ALL.into_iter().map(|kind| (kind, history.blocks.iter().filter(move |block| block.kind == kind)));
        let at_peak = kinds().map(|(kind, blocks)| {
            let blocks: Vec<&Block> = blocks.filter(alive).collect();
            KindAtPeak { kind, blocks: blocks.len(), bytes: blocks.iter().map(|block| block.bytes).sum() }
        });
        let lifetimes = kinds().map(|(kind, blocks)| lifetimes(history, kind, &blocks.collect::<Vec<_>>()));
        Report {
            subject: history.subject.clone(),
            unit: if history.timed { "ns" } else { "events" },
            length: history.length(),
            peak_bytes,
            peak_at: history.at(peak) - history.at(0),
            dead_tail_bytes: None,
            reserved_bytes: None,
            out_of_memory: None,
            at_peak: at_peak.filter(|kind| kind.blocks > 0).collect(),
            lifetimes: lifetimes.filter(|kind| kind.blocks > 0).collect(),
            intervals: history.has_accesses.then(|| intervals(history, peak, link, outliers_max)),
            iteration,
        }
    }
}

fn lifetimes(history: &History, kind: Kind, blocks: &[&Block]) -> Lifetimes {
    let passing = blocks.iter().filter(|block| block.born.is_some() || block.died.is_some());
    let mut lives: Vec<u64> = passing
        .map(|block| {
            let (born, died) = history.life(block);
            history.at(died) - history.at(born)
        })
        .collect();
    lives.sort_unstable();
    Lifetimes {
        kind,
        blocks: blocks.len(),
        bytes: blocks.iter().map(|block| block.bytes).sum(),
        permanent: blocks.len() - lives.len(),
        median: percentile(&lives, 50),
        p90: percentile(&lives, 90),
        max: percentile(&lives, 100),
    }
}

/// The least value that `percent` of `sorted` do not exceed; 0 of none.
fn percentile(sorted: &[u64], percent: usize) -> u64 {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.max(1) - 1).copied().unwrap_or(0)
}

fn intervals(history: &History, peak: usize, link: Link, outliers_max: usize) -> Intervals {
    let mut idle: Vec<Idle<'_>> = Vec::new();
    for block in &history.blocks {
        for pair in block.accesses.windows(2) {
            let (from_tick, until_tick) = (pair[0].1, pair[1].0);
            let interval = history.at(until_tick) - history.at(from_tick);
            idle.push(Idle { block, from_tick, until_tick, interval });
        }
    }
    let mut lengths: Vec<u64> = idle.iter().map(|idle| idle.interval).collect();
    lengths.sort_unstable();
    let free = |idle: &Idle<'_>| {
        history.timed && idle.interval >= link.offload_ns(idle.block.bytes) + link.prefetch_ns(idle.block.bytes)
    };
    let spans_peak = |idle: &Idle<'_>| (idle.from_tick..idle.until_tick).contains(&peak);
    let swappable: Vec<&Idle<'_>> = idle.iter().filter(|idle| free(idle)).collect();
    let free_to_swap = FreeToSwap {
        offload_bytes_per_s: link.offload_bytes_per_s,
        prefetch_bytes_per_s: link.prefetch_bytes_per_s,
        intervals: swappable.len(),
        bytes_at_peak: swappable.iter().filter(|idle| spans_peak(idle)).map(|idle| idle.block.bytes).sum(),
    };
    let percentiles = [10, 25, 50, 75, 90, 99, 100];
    let percentiles =
        percentiles.map(|percent| Percentile { percent, interval: percentile(&lengths, percent as usize) });
    let histogram = histogram(&idle);
    idle.sort_by_key(|idle| std::cmp::Reverse(u128::from(idle.block.bytes) * u128::from(idle.interval)));
    let outliers = idle.iter().take(outliers_max).map(|idle| Outlier {
        block: idle.block.label.clone(),
        kind: idle.block.kind,
        bytes: idle.block.bytes,
        from: history.at(idle.from_tick) - history.at(0),
        interval: idle.interval,
        free_to_swap: free(idle),
        at_peak: spans_peak(idle),
    });
    let outliers = outliers.collect();
    Intervals { count: lengths.len(), percentiles: percentiles.to_vec(), histogram, outliers, free_to_swap }
}

fn histogram(idle: &[Idle<'_>]) -> Vec<Bin> {
    let mut bins = vec![Bin::default(); BIN_BOUNDS_NS.len() + 1];
    for (bin, &below) in bins.iter_mut().zip(&BIN_BOUNDS_NS) {
        bin.below = Some(below);
    }
    for idle in idle {
        let bin = &mut bins[BIN_BOUNDS_NS.partition_point(|&bound| bound <= idle.interval)];
        bin.intervals += 1;
        bin.bytes += idle.block.bytes;
    }
    bins
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = |value: u64| self.time(value);
        writeln!(f, "{}", self.subject)?;
        writeln!(
            f,
            "peak {} MiB at {} of {} {}",
            mib(self.peak_bytes),
            time(self.peak_at),
            time(self.length),
            self.times()
        )?;
        if let Some(dead_tail_bytes) = self.dead_tail_bytes {
            writeln!(f, "dead tails, held after their last use: {} MiB of the peak", mib(dead_tail_bytes))?;
        }
        if let Some(reserved_bytes) = self.reserved_bytes {
            let fragmentation = 100.0 * (1.0 - self.peak_bytes as f64 / reserved_bytes.max(1) as f64);
            writeln!(f, "reserved {} MiB: fragmentation {fragmentation:.1}%", mib(reserved_bytes))?;
        }
        if let Some(times) = self.out_of_memory.filter(|&times| times > 0) {
            writeln!(f, "ran out of memory {times} times")?;
        }
        let mut table = Table::new(["in use at the peak", "blocks", "MiB", "share"]);
        for at_peak in &self.at_peak {
            let share = 100.0 * at_peak.bytes as f64 / self.peak_bytes.max(1) as f64;
            let cells = [at_peak.kind.name().to_owned(), at_peak.blocks.to_string(), mib(at_peak.bytes)];
            let [kind, blocks, bytes] = cells;
            table.row([kind, blocks, bytes, format!("{share:.1}%")]);
        }
        writeln!(f, "\n{table}")?;
        let unit = self.times();
        let mut table =
            Table::new(["lifetimes", "blocks", "MiB", "permanent", "median", "90%", &format!("longest ({unit})")]);
        for lives in &self.lifetimes {
            let passing = |value| if lives.permanent == lives.blocks { "-".to_owned() } else { time(value) };
            table.row([
                lives.kind.name().to_owned(),
                lives.blocks.to_string(),
                mib(lives.bytes),
                lives.permanent.to_string(),
                passing(lives.median),
                passing(lives.p90),
                passing(lives.max),
            ]);
        }
        writeln!(f, "{table}")?;
        match &self.intervals {
            Some(intervals) => self.write_intervals(f, intervals)?,
            None => writeln!(f, "access-time intervals: not in this source, which knows lives and no accesses\n")?,
        }
        self.write_iteration(f)
    }
}

impl Report {
    fn times(&self) -> &'static str {
        if self.unit == "ns" { "ms" } else { "events" }
    }

    fn time(&self, value: u64) -> String {
        if self.unit == "ns" { format!("{:.3}", value as f64 / 1e6) } else { value.to_string() }
    }

    fn write_intervals(&self, f: &mut fmt::Formatter<'_>, intervals: &Intervals) -> fmt::Result {
        let unit = self.times();
        let percentiles: Vec<String> = intervals
            .percentiles
            .iter()
            .map(|percentile| format!("{}% {}", percentile.percent, self.time(percentile.interval)))
            .collect();
        writeln!(
            f,
            "{} access-time intervals ({unit}), by percent that are no longer: {}\n",
            intervals.count,
            percentiles.join(", ")
        )?;
        if self.unit == "ns" {
            let mut table = Table::new(["idle for", "intervals", "MiB", "share of bytes"]);
            let bytes: u64 = intervals.histogram.iter().map(|bin| bin.bytes).sum();
            for bin in &intervals.histogram {
                let length =
                    bin.below.map_or_else(|| "longer".to_owned(), |below| format!("under {} ms", below as f64 / 1e6));
                let share = bin.bytes as f64 / bytes.max(1) as f64;
                table.row([
                    length,
                    bin.intervals.to_string(),
                    mib(bin.bytes),
                    "█".repeat((40.0 * share).round() as usize),
                ]);
            }
            writeln!(f, "{table}")?;
        }
        let mut table = Table::new([
            "large and idle for long",
            "kind",
            "at the peak",
            "free to swap",
            "MiB",
            &format!("idle ({unit})"),
        ]);
        for outlier in &intervals.outliers {
            let yes = |condition: bool| if condition { "yes" } else { "no" }.to_owned();
            table.row([
                outlier.block.clone(),
                outlier.kind.name().to_owned(),
                yes(outlier.at_peak),
                yes(outlier.free_to_swap),
                mib(outlier.bytes),
                self.time(outlier.interval),
            ]);
        }
        writeln!(f, "{table}")?;
        let free = &intervals.free_to_swap;
        if self.unit == "ns" {
            writeln!(
                f,
                "free to swap at {:.2} GB/s out and {:.2} GB/s back: {} of {} intervals, {} MiB of the peak\n",
                free.offload_bytes_per_s / 1e9,
                free.prefetch_bytes_per_s / 1e9,
                free.intervals,
                intervals.count,
                mib(free.bytes_at_peak),
            )?;
        }
        Ok(())
    }

    fn write_iteration(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.iteration {
            Iteration::Recorded {
                recorded_iterations,
                time_spread,
                surviving,
                succeeded,
                gone,
                new,
                start_bytes,
                end_bytes,
            } => {
                writeln!(
                    f,
                    "iterations repeat: {recorded_iterations} recorded ones did the same, their operators' times {:.1}% apart",
                    100.0 * time_spread,
                )?;
                writeln!(
                    f,
                    "of the blocks at the start {surviving} survive, {succeeded} have a successor, {gone} are gone; {new} are \
                     new; {} MiB at the start, {} MiB at the end",
                    mib(*start_bytes),
                    mib(*end_bytes),
                )
            }
            Iteration::Periodic { period, iterations, warm_up_events, bytes } => writeln!(
                f,
                "iterations repeat: {iterations} times the same {} allocations of {} MiB, after {warm_up_events} others",
                period.events,
                mib(*bytes),
            ),
            Iteration::NotFound { events } => {
                writeln!(f, "no iteration found: the last of {events} allocations do not repeat what came before")
            }
        }
    }
}
