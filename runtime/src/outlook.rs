//! What is still over the budget from a pressure point on, if nothing more is evicted: when, and by how much.
//!
//! It is read off the keep-all profile and the evictions decided so far. Delays, copies under way and storages rebuilt
//! early are left out: it ranks candidates, the timeline says what fits.

use crate::lineage::{Lineage, Window, WindowId};

/// The part of an iteration that is still over the budget, added up by operator index.
#[derive(Debug, Default)]
pub(crate) struct Outlook {
    /// Scratch: bytes that evictions give back, as differences between operators.
    relieved_bytes: Vec<i64>,
    /// Before each operator: time over the budget since the pressure point.
    time_ns: Vec<u64>,
    /// Before each operator: bytes over the budget × time since the pressure point.
    area: Vec<f64>,
    /// The pressure point.
    operator: usize,
}

impl Outlook {
    /// Looks ahead from `operator`, with the windows `evicted` so far.
    pub(crate) fn look(&mut self, lineage: &Lineage, evicted: &[WindowId], operator: usize, budget_bytes: u64) {
        // The last entry is what stays between iterations, and takes no time.
        let [demand @ .., _] = lineage.keep_all_bytes() else { unreachable!("there is an entry for the end") };
        self.operator = operator;
        self.relieved_bytes.clear();
        self.relieved_bytes.resize(demand.len() + 1, 0);
        for &id in evicted {
            let window = lineage.window(id);
            let bytes = lineage.bytes(window.storage) as i64;
            self.relieved_bytes[window.start as usize] += bytes;
            self.relieved_bytes[(window.end as usize).min(demand.len())] -= bytes;
        }
        let mut relieved: i64 = self.relieved_bytes[..operator.min(demand.len())].iter().sum();
        let (mut time_ns, mut area) = (0, 0.0);
        self.time_ns.clear();
        self.area.clear();
        for (index, &bytes) in demand.iter().enumerate().skip(operator) {
            self.time_ns.push(time_ns);
            self.area.push(area);
            relieved += self.relieved_bytes[index];
            let over_bytes = bytes as i64 - relieved - budget_bytes as i64;
            if over_bytes > 0 {
                let span_ns = lineage.start_ns(index + 1) - lineage.start_ns(index);
                time_ns += span_ns;
                area += over_bytes as f64 * span_ns as f64;
            }
        }
        self.time_ns.push(time_ns);
        self.area.push(area);
    }

    /// The share of the time still over the budget that `window` spans, and the share of bytes × time still over it that
    /// evicting so many bytes would take away: an upper estimate, exact where the window is nowhere larger than what is
    /// over, or everywhere.
    pub(crate) fn shares(&self, window: &Window, bytes: u64) -> (f32, f32) {
        let last = self.time_ns.len() - 1;
        let end = (window.end as usize).saturating_sub(self.operator).min(last);
        let area = self.area[end].min(bytes as f64 * self.time_ns[end] as f64);
        let share = |part: f64, whole: f64| if whole > 0.0 { (part / whole) as f32 } else { 1.0 };
        (share(self.time_ns[end] as f64, self.time_ns[last] as f64), share(area, self.area[last]))
    }
}
