//! When the offload channel has done what it was given, and one copy more.
//!
//! It copies in the order in which storages fall idle. A copy that could have begun long ago takes what time the channel stood still
//! since then, and delays the later ones by no more than the rest.

use crate::lineage::{Lineage, WindowId};

/// An offload that is decided on.
#[derive(Clone, Copy, Debug)]
struct Offload {
    /// The operator that it is asked for before.
    before: u32,
    /// When that may begin.
    from_ns: u64,
    /// What it takes, and all those after it.
    left_ns: u64,
    /// When all are done if the channel stands still until this one or another may begin: the latest of those up to it.
    done_ns: u64,
    /// … and of it and those after it.
    done_after_ns: u64,
}

/// The offloads that are decided on.
#[derive(Debug)]
pub(super) struct Offloads {
    /// All windows, in the order in which they are offloaded, and each one's place there.
    windows: Vec<WindowId>,
    place: Vec<u32>,
    /// One bit per place.
    asked: Vec<u64>,
    queue: Vec<Offload>,
}

impl Offloads {
    pub(super) fn new(lineage: &Lineage) -> Self {
        let count = lineage.windows().len();
        let mut windows: Vec<WindowId> = (0..count as u32).map(WindowId).collect();
        windows.sort_by_key(|&id| lineage.window(id).start);
        let mut place = vec![0; count];
        for (at, id) in (0..).zip(&windows) {
            place[id.index()] = at;
        }
        Offloads { windows, place, asked: vec![0; count.div_ceil(64)], queue: Vec::with_capacity(count) }
    }

    /// There is nothing to do.
    pub(super) fn clear(&mut self) {
        self.asked.fill(0);
    }

    /// The storage of a window is to be offloaded.
    pub(super) fn ask(&mut self, window: WindowId) {
        let place = self.place[window.index()] as usize;
        self.asked[place / 64] |= 1 << (place % 64);
    }

    /// Lines up what is asked for. `times` tells of a window before which operator it is asked for, when that may begin, and what it
    /// takes, in ns.
    pub(super) fn line_up(&mut self, times: impl Fn(WindowId) -> (u32, u64, u64)) {
        self.queue.clear();
        for (word, &bits) in self.asked.iter().enumerate() {
            let mut bits = bits;
            while bits != 0 {
                let (before, from_ns, left_ns) = times(self.windows[64 * word + bits.trailing_zeros() as usize]);
                self.queue.push(Offload { before, from_ns, left_ns, done_ns: 0, done_after_ns: 0 });
                bits &= bits - 1;
            }
        }
        let (mut left_ns, mut done_after_ns) = (0, 0);
        for offload in self.queue.iter_mut().rev() {
            left_ns += offload.left_ns;
            done_after_ns = done_after_ns.max(offload.from_ns + left_ns);
            (offload.left_ns, offload.done_after_ns) = (left_ns, done_after_ns);
        }
        let mut done_ns = 0;
        for offload in &mut self.queue {
            done_ns = done_ns.max(offload.from_ns + offload.left_ns);
            offload.done_ns = done_ns;
        }
    }

    /// When all would be done, in ns, with one more that is asked for before that operator, may begin then, and takes so long.
    pub(super) fn done_with_ns(&self, before: u32, from_ns: u64, takes_ns: u64) -> u64 {
        let place = self.queue.partition_point(|offload| offload.before <= before);
        let (earlier, later) = self.queue.split_at(place);
        let behind_ns = earlier.last().map_or(0, |offload| offload.done_ns + takes_ns);
        let (left_ns, alone_ns) = later.first().map_or((0, 0), |offload| (offload.left_ns, offload.done_after_ns));
        behind_ns.max(from_ns + takes_ns + left_ns).max(alone_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is asked for before operators 0, 1, … takes so long, and may begin then.
    fn offloads(times: &[(u64, u64)]) -> Offloads {
        let count = times.len();
        let mut offloads = Offloads {
            windows: (0..count as u32).map(WindowId).collect(),
            place: (0..count as u32).collect(),
            asked: vec![0; count.div_ceil(64)],
            queue: Vec::new(),
        };
        (0..count as u32).for_each(|window| offloads.ask(WindowId(window)));
        offloads.line_up(|window| (window.0, times[window.index()].0, times[window.index()].1));
        offloads
    }

    #[test]
    fn one_more_takes_the_time_in_which_the_channel_stood_still() {
        // Busy from 100 to 110 and from 200 to 250.
        let offloads = offloads(&[(100, 10), (200, 50)]);
        assert_eq!(offloads.done_with_ns(0, 100, 90), 250, "done at 200, when the next begins");
        assert_eq!(offloads.done_with_ns(0, 100, 95), 255, "the next begins at 205");
        assert_eq!(offloads.done_with_ns(1, 200, 5), 255);
        assert_eq!(offloads.done_with_ns(9, 300, 5), 305);
        assert_eq!(offloads.done_with_ns(9, 220, 5), 255);
    }

    #[test]
    fn where_the_channel_is_never_idle_one_more_takes_its_time() {
        let offloads = offloads(&[(0, 100), (10, 100), (20, 100)]);
        for before in 0..4 {
            assert_eq!(offloads.done_with_ns(before, 10 * u64::from(before), 7), 307);
        }
    }
}
