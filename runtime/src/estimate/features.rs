//! The features of candidates, computed from their raw quantities: the one place that fills the feature table in.
//!
//! It knows neither traces nor timelines, so that a plan made in advance and a decision made in a running program are
//! described alike.

use crate::observation::{Candidate, FEATURE_TABLE, FEATURES, Wait};

/// What all candidates of a pressure point have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scene {
    /// Makespan of the iteration, if nothing is evicted.
    pub(crate) makespan_ns: u64,
    /// Time since its start.
    pub(crate) elapsed_ns: u64,
    pub(crate) deficit_bytes: u64,
    pub(crate) wait: Option<Wait>,
    /// Offload time already claimed up to this point.
    pub(crate) offload_claimed_ns: u64,
    /// Prefetch time already claimed after it.
    pub(crate) prefetch_claimed_ns: u64,
}

/// What is known of the time that lies ahead of one candidate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ahead {
    /// Whether its window spans the operator of the highest demand still to come.
    pub(crate) covers_peak: bool,
    /// Share of the time still to be spent over the budget that its window spans.
    pub(crate) over_budget_time: f32,
    /// Share of the bytes × time still over the budget that its eviction would take away.
    pub(crate) over_budget_area: f32,
    /// Prefetch time claimed from now until its window's end.
    pub(crate) prefetch_claimed_ns: u64,
}

/// Fills the feature table in. Of a candidate that it has described before it takes up what has not changed.
#[derive(Debug)]
pub(crate) struct Describer {
    /// Price per byte and row, in order.
    by_price: Vec<Price>,
    cheaper_bytes: Vec<u64>,
    /// Per [`Candidate::window`]: what was computed for it last.
    known: Vec<Known>,
    makespan_ns: u64,
    logarithms: Logarithms,
    logarithms_1p: Logarithms,
}

impl Default for Describer {
    fn default() -> Self {
        Describer {
            by_price: Vec::new(),
            cheaper_bytes: Vec::new(),
            known: Vec::new(),
            makespan_ns: 0,
            logarithms: Logarithms::new(f32::ln),
            logarithms_1p: Logarithms::new(f32::ln_1p),
        }
    }
}

/// A price per byte, and whose it is: as one number, which is in the order of prices and then of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Price(u64);

impl Price {
    /// Floats that are not negative are in the order of their bits.
    fn new(per_byte: f32, row: usize) -> Self {
        debug_assert!(per_byte >= 0.0);
        Price(u64::from(per_byte.to_bits()) << 32 | row as u64)
    }

    fn per_byte(self) -> f32 {
        f32::from_bits((self.0 >> 32) as u32)
    }

    fn row(self) -> usize {
        self.0 as u32 as usize
    }
}

/// Features that stand on few of a candidate's facts, and those facts.
#[derive(Clone, Copy, Debug)]
struct Known {
    gap_ns: u64,
    transfer_ns: u64,
    recompute_ns: u64,
    own_recompute_ns: u64,
    log_gap: f32,
    log_transfer_to_gap: f32,
    log_recompute_to_transfer: f32,
    own_recompute: f32,
}

const UNKNOWN: Known = Known {
    gap_ns: u64::MAX,
    transfer_ns: u64::MAX,
    recompute_ns: u64::MAX,
    own_recompute_ns: u64::MAX,
    log_gap: 0.0,
    log_transfer_to_gap: 0.0,
    log_recompute_to_transfer: 0.0,
    own_recompute: 0.0,
};

impl Known {
    /// Brings it up to date with `candidate`.
    fn learn(&mut self, candidate: &Candidate, makespan: f32) {
        let same_copies = self.gap_ns == candidate.gap_ns && self.transfer_ns == candidate.transfer_ns;
        let (transfer, gap) = (float(candidate.transfer_ns.max(1)), float(candidate.gap_ns.max(1)));
        if !same_copies {
            (self.gap_ns, self.transfer_ns) = (candidate.gap_ns, candidate.transfer_ns);
            self.log_gap = (gap / makespan).ln().clamp(-10.0, 0.0);
            self.log_transfer_to_gap = (transfer / gap).ln().clamp(-6.0, 6.0);
        }
        if !same_copies || self.recompute_ns != candidate.recompute_ns {
            self.recompute_ns = candidate.recompute_ns;
            let recompute = float(candidate.recompute_ns).max(1.0);
            self.log_recompute_to_transfer = (recompute / transfer).ln().clamp(-6.0, 6.0);
        }
        if self.own_recompute_ns != candidate.own_recompute_ns {
            self.own_recompute_ns = candidate.own_recompute_ns;
            self.own_recompute = (1000.0 * (float(candidate.own_recompute_ns) / makespan)).ln_1p();
        }
    }
}

/// Logarithms of numbers that come again and again, by their bits.
#[derive(Debug)]
struct Logarithms {
    of: fn(f32) -> f32,
    known: [(f32, f32); Logarithms::KNOWN],
}

impl Logarithms {
    const KNOWN: usize = 256;

    fn new(of: fn(f32) -> f32) -> Self {
        Logarithms { of, known: [(f32::NAN, 0.0); Logarithms::KNOWN] }
    }

    fn get(&mut self, number: f32) -> f32 {
        let bits = number.to_bits();
        let place = (bits.wrapping_mul(0x9e37_79b9) >> 24) as usize % Logarithms::KNOWN;
        let (known, value) = &mut self.known[place];
        if known.to_bits() != bits {
            (*known, *value) = (number, (self.of)(number));
        }
        *value
    }
}

impl Describer {
    /// Fills `features`, row-major `[candidates, FEATURES]` and one row more where waiting may be chosen, in the order of the
    /// feature table. `ahead` says, by row, what lies ahead of a candidate.
    pub(crate) fn describe(
        &mut self,
        scene: &Scene,
        candidates: &[Candidate],
        ahead: impl Fn(usize) -> Ahead,
        features: &mut [f32],
    ) {
        let makespan = float(scene.makespan_ns.max(1));
        let deficit = float(scene.deficit_bytes.max(1));
        let total_bytes: u64 = candidates.iter().map(|candidate| candidate.bytes).sum();
        let elapsed = float(scene.elapsed_ns);
        let left = (makespan - elapsed).max(1.0);
        let claimed_after = float(scene.prefetch_claimed_ns);
        let may_wait = f32::from(u8::from(scene.wait.is_some()));
        let [wait_stall, wait_slack] = scene.wait.map_or([0.0; 2], |wait| {
            [(1000.0 * (float(wait.stall_ns) / makespan)).ln_1p(), float(wait.slack_ns) / makespan]
        });
        self.rank_by_price(candidates);
        self.make_room(scene, candidates);
        let cheapest = self.by_price.first().map_or(0.0, |price| price.per_byte());
        let offload_backlog = (float(scene.offload_claimed_ns) / elapsed.max(1.0)).min(4.0) / 4.0;
        let prefetch_backlog = (claimed_after / left).min(4.0) / 4.0;
        let severity = (deficit / float(total_bytes.max(1))).min(1.0);
        let progress = elapsed / makespan;
        let (ln, ln_1p) = (&mut self.logarithms, &mut self.logarithms_1p);
        let mut compressed = |share: f32| ln_1p.get(1000.0 * share);
        let rows = features.as_chunks_mut::<FEATURES>().0;
        for (index, ((candidate, row), &cheaper)) in candidates.iter().zip(rows).zip(&self.cheaper_bytes).enumerate() {
            let known = &mut self.known[candidate.window.index()];
            known.learn(candidate, makespan);
            let bytes = float(candidate.bytes);
            let covered = (bytes / deficit).min(1.0);
            let transfer = float(candidate.transfer_ns.max(1));
            let recompute = float(candidate.recompute_ns);
            let own = float(candidate.own_recompute_ns).min(recompute);
            let ahead = ahead(index);
            let price = float(candidate.price_ns());
            *row = [
                covered,
                ln.get(bytes / deficit).clamp(-6.0, 6.0),
                (float(cheaper) / deficit).min(4.0) / 4.0,
                f32::from(u8::from(ahead.covers_peak)),
                known.log_gap,
                known.log_transfer_to_gap,
                known.log_recompute_to_transfer,
                compressed(float(candidate.swap_ns()) / makespan / covered),
                compressed(recompute / makespan / covered),
                known.own_recompute,
                if recompute > 0.0 { 1.0 - own / recompute } else { 0.0 },
                (float(candidate.dropped_children_bytes) / deficit).min(4.0) / 4.0,
                float(candidate.staleness_ns) / makespan,
                float(candidate.to_use_ns) / makespan,
                f32::from(u8::from(!candidate.used_again)),
                offload_backlog,
                prefetch_backlog,
                f32::from(u8::from(candidate.can_recompute)),
                progress,
                severity,
                ahead.over_budget_time,
                ahead.over_budget_area,
                compressed(price / makespan / ahead.over_budget_area.max(SHARE_MIN)),
                ln.get((price / bytes.max(1.0) + PRICE_MIN) / (cheapest + PRICE_MIN)).min(6.0) / 6.0,
                ((float(ahead.prefetch_claimed_ns) + transfer) / float(candidate.to_use_ns.max(1))).min(4.0) / 4.0,
                0.0, // `is_wait`
                may_wait,
                wait_stall,
                wait_slack,
            ];
        }
        if let Some(row) = features.chunks_exact_mut(FEATURES).nth(candidates.len()) {
            row.fill(0.0);
            for (column, value) in [
                ("offload_backlog", offload_backlog),
                ("prefetch_backlog", prefetch_backlog),
                ("progress", progress),
                ("severity", severity),
                ("is_wait", 1.0),
                ("may_wait", may_wait),
                ("wait_stall", wait_stall),
                ("wait_slack", wait_slack),
            ] {
                row[column_of(column)] = value;
            }
        }
        debug_assert!(features.iter().fold(true, |finite, feature| finite & feature.is_finite()));
    }

    /// Sees to it that there is something known, if only nothing, of every candidate.
    fn make_room(&mut self, scene: &Scene, candidates: &[Candidate]) {
        if self.makespan_ns != scene.makespan_ns {
            self.makespan_ns = scene.makespan_ns;
            self.known.clear();
        }
        let slots = candidates.iter().map(|candidate| candidate.window.index() + 1).max().unwrap_or(0);
        if self.known.len() < slots {
            self.known.resize(slots, UNKNOWN);
        }
    }

    /// For each candidate, the bytes that can be had at a lower price per byte.
    fn rank_by_price(&mut self, candidates: &[Candidate]) {
        let price = |(row, candidate): (usize, &Candidate)| {
            Price::new(float(candidate.price_ns()) / float(candidate.bytes.max(1)), row)
        };
        self.by_price.clear();
        self.by_price.extend(candidates.iter().enumerate().map(price));
        self.by_price.sort_unstable();
        self.cheaper_bytes.resize(candidates.len(), 0);
        let mut cheaper = 0;
        for price in &self.by_price {
            self.cheaper_bytes[price.row()] = cheaper;
            cheaper += candidates[price.row()].bytes;
        }
    }
}

/// Nothing takes away less of what is still over the budget, as far as its price is concerned.
const SHARE_MIN: f32 = 1e-3;
/// Prices below this, in nanoseconds per byte, are as good as nothing.
const PRICE_MIN: f32 = 1e-4;

/// Where the feature called `name` stands.
fn column_of(name: &str) -> usize {
    FEATURE_TABLE.iter().position(|feature| feature.name == name).expect("a feature of the table")
}

/// `number` as a float. Bytes and times are far below 2^63, and signed numbers are the quicker ones to convert.
fn float(number: u64) -> f32 {
    debug_assert!(i64::try_from(number).is_ok());
    number as i64 as f32
}
