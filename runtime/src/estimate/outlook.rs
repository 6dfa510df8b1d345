//! What is still over the budget from a pressure point on, if nothing more is evicted: when, and by how much.
//!
//! It is read off the keep-all profile and the evictions decided so far. Delays, copies under way and storages rebuilt
//! early are left out: it ranks candidates, the timeline says what fits. Between two pressure points only what was evicted
//! in between changes it, and stretches within the budget are passed over.

use std::cmp::Ordering;

use crate::lineage::{Lineage, Window, WindowId};
use crate::slack::{BLOCK, Slack};
use crate::timeline::prefetch::clamped;

/// The part of an iteration that is still over the budget, added up by operator index.
#[derive(Debug)]
pub(crate) struct Outlook {
    /// The budget less what the iteration takes with the windows of `evicted` gone.
    slack: Slack,
    /// In order.
    evicted: Vec<WindowId>,
    budget_bytes: Option<u64>,
    /// Before each operator from the pressure point on; of a block within the budget only before its first.
    before: Vec<Excess>,
    /// Per block: whether something in it is over the budget.
    exceeds: Vec<bool>,
    whole: Excess,
    /// The pressure point.
    operator: usize,
}

/// What was over the budget since the pressure point.
#[derive(Clone, Copy, Debug, Default)]
struct Excess {
    time_ns: u64,
    /// Bytes over the budget × time.
    area: f64,
}

impl Outlook {
    pub(crate) fn new(operators: usize) -> Self {
        Outlook {
            slack: Slack::new(operators),
            evicted: Vec::new(),
            budget_bytes: None,
            before: vec![Excess::default(); operators],
            exceeds: vec![false; operators.div_ceil(BLOCK)],
            whole: Excess::default(),
            operator: 0,
        }
    }

    /// Looks ahead from `operator`, with the windows `evicted` so far, which are in order.
    pub(crate) fn look(&mut self, lineage: &Lineage, evicted: &[WindowId], operator: usize, budget_bytes: u64) {
        // The last entry is what stays between iterations, and takes no time.
        let [demand @ .., _] = lineage.keep_all_bytes() else { unreachable!("there is an entry for the end") };
        if self.budget_bytes.replace(budget_bytes) != Some(budget_bytes) {
            self.evicted.clear();
            self.slack.settle(|index, _| clamped(budget_bytes) - demand[index] as i64);
        }
        self.relieve(lineage, evicted);
        self.operator = operator;
        let mut sum = Excess::default();
        for stretch in self.slack.stretches(operator..demand.len()) {
            let block = stretch.range.start / BLOCK;
            self.exceeds[block] = stretch.least < 0;
            if stretch.least >= 0 {
                self.before[block * BLOCK] = sum;
                continue;
            }
            for (index, slack) in stretch.range.zip(stretch.values) {
                self.before[index] = sum;
                let over_bytes = -(slack + stretch.added);
                if over_bytes > 0 {
                    let span_ns = lineage.start_ns(index + 1) - lineage.start_ns(index);
                    sum.time_ns += span_ns;
                    sum.area += over_bytes as f64 * span_ns as f64;
                }
            }
        }
        self.whole = sum;
    }

    /// Takes into account what is evicted now and was not before, and the other way round.
    fn relieve(&mut self, lineage: &Lineage, evicted: &[WindowId]) {
        let (mut old, mut new) = (self.evicted.iter().peekable(), evicted.iter().peekable());
        loop {
            let order = match (old.peek(), new.peek()) {
                (None, None) => break,
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (Some(old), Some(new)) => old.cmp(new),
            };
            let (changed, sign) = match order {
                Ordering::Equal => {
                    old.next();
                    new.next();
                    continue;
                }
                Ordering::Less => (old.next(), -1),
                Ordering::Greater => (new.next(), 1),
            };
            let window = lineage.window(*changed.expect("it was looked at"));
            let range = window.start as usize..(window.end as usize).min(self.before.len());
            self.slack.add(range, sign * lineage.bytes(window.storage) as i64);
        }
        self.evicted.clear();
        self.evicted.extend_from_slice(evicted);
    }

    /// What is over the budget between the pressure point and operator index `end`.
    fn until(&self, end: usize) -> Excess {
        let end = end.max(self.operator);
        match self.exceeds.get(end / BLOCK) {
            _ if end >= self.before.len() => self.whole,
            Some(true) => self.before[end],
            _ => self.before[end / BLOCK * BLOCK],
        }
    }

    /// The share of the time still over the budget that `window` spans, and the share of bytes × time still over it that
    /// evicting so many bytes would take away: an upper estimate, exact where the window is nowhere larger than what is
    /// over, or everywhere.
    pub(crate) fn shares(&self, window: &Window, bytes: u64) -> (f32, f32) {
        let Excess { time_ns, area } = self.until(window.end as usize);
        let area = area.min(bytes as f64 * time_ns as f64);
        let share = |part: f64, whole: f64| if whole > 0.0 { (part / whole) as f32 } else { 1.0 };
        (share(time_ns as f64, self.whole.time_ns as f64), share(area, self.whole.area))
    }
}
