//! What one more offload would leave exposed, behind those that the channel was given and before them.
//!
//! The channel copies in the order in which storages fall idle. A copy that could have begun long ago takes what time the channel
//! stood still since then, and delays the later ones by no more than the rest. When they may begin is as it is without that copy.

use crate::lineage::{Lineage, WindowId};

/// An offload, as the channel is asked for it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    /// The operator that it is asked for before.
    pub(super) before: u32,
    /// When that may begin, in ns.
    pub(super) from_ns: u64,
    pub(super) takes_ns: u64,
}

/// An offload in the queue.
#[derive(Clone, Copy, Debug)]
struct Offload {
    asked: Asked,
    /// When it is done, and all before it are.
    done_ns: u64,
    /// What it and those after it take.
    left_ns: u64,
    /// When they would be done if the channel had nothing to do before them.
    left_done_ns: u64,
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
        let indices = 0..lineage.keep_all_bytes().len();
        Self::in_order(indices.flat_map(|index| lineage.windows_starting(index)).copied().collect())
    }

    fn in_order(windows: Vec<WindowId>) -> Self {
        let count = windows.len();
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

    /// Lines up what is to be offloaded. `tell` knows how the channel is asked for a window's storage, after that of another.
    pub(super) fn line_up(&mut self, tell: impl Fn(WindowId, Option<WindowId>) -> Asked) {
        self.queue.clear();
        let (mut last, mut done_ns) = (None, 0);
        for (word, &bits) in self.asked.iter().enumerate() {
            let mut bits = bits;
            while bits != 0 {
                let window = self.windows[64 * word + bits.trailing_zeros() as usize];
                let asked = tell(window, last.replace(window));
                done_ns = asked.from_ns.max(done_ns) + asked.takes_ns;
                self.queue.push(Offload { asked, done_ns, left_ns: 0, left_done_ns: 0 });
                bits &= bits - 1;
            }
        }
        let (mut left_ns, mut left_done_ns) = (0, 0);
        for offload in self.queue.iter_mut().rev() {
            left_ns += offload.asked.takes_ns;
            left_done_ns = left_done_ns.max(offload.asked.from_ns + left_ns);
            (offload.left_ns, offload.left_done_ns) = (left_ns, left_done_ns);
        }
    }

    /// By how much one more would be done after `now_ns`, or all would be done later than without it, then or after that.
    pub(super) fn exposed_ns(&self, more: Asked, now_ns: u64) -> u64 {
        let place = self.queue.partition_point(|offload| offload.asked.before <= more.before);
        let (earlier, later) = self.queue.split_at(place);
        let done_ns = |offloads: &[Offload]| offloads.last().map_or(0, |offload| offload.done_ns);
        let own_ns = more.from_ns.max(done_ns(earlier)) + more.takes_ns;
        let all_ns = later.first().map_or(own_ns, |first| first.left_done_ns.max(own_ns + first.left_ns));
        own_ns.saturating_sub(now_ns).max(all_ns.saturating_sub(now_ns.max(done_ns(&self.queue))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is asked for before operators 0, 1, … may begin then, and takes so long.
    fn offloads(times: &[(u64, u64)]) -> Offloads {
        let windows: Vec<WindowId> = (0..times.len() as u32).map(WindowId).collect();
        let mut offloads = Offloads::in_order(windows.clone());
        windows.into_iter().for_each(|window| offloads.ask(window));
        offloads.line_up(|window, _| {
            let (from_ns, takes_ns) = times[window.index()];
            Asked { before: window.0, from_ns, takes_ns }
        });
        offloads
    }

    fn more(before: u32, from_ns: u64, takes_ns: u64) -> Asked {
        Asked { before, from_ns, takes_ns }
    }

    #[test]
    fn one_more_takes_the_time_in_which_the_channel_stood_still() {
        // Busy from 100 to 110, and from 200 to 250.
        let offloads = offloads(&[(100, 10), (200, 50)]);
        assert_eq!(offloads.exposed_ns(more(0, 100, 90), 250), 0, "done at 200, when the next begins");
        assert_eq!(offloads.exposed_ns(more(0, 100, 95), 250), 5, "the next begins at 205");
        assert_eq!(offloads.exposed_ns(more(0, 100, 95), 300), 0);
        assert_eq!(offloads.exposed_ns(more(1, 200, 7), 250), 7);
        assert_eq!(offloads.exposed_ns(more(9, 300, 7), 300), 7);
    }

    #[test]
    fn what_others_leave_exposed_is_not_its_own() {
        // Now is 30, and what there is goes on until 300.
        let offloads = offloads(&[(0, 100), (10, 100), (20, 100)]);
        assert_eq!(offloads.exposed_ns(more(9, 30, 7), 30), 277, "its own bytes leave at 307");
        assert_eq!(offloads.exposed_ns(more(0, 0, 7), 107), 7, "its own are gone by now, and all others are later");
    }

    #[test]
    fn a_channel_that_was_given_nothing_is_free() {
        let offloads = offloads(&[]);
        assert_eq!(offloads.exposed_ns(more(3, 40, 7), 40), 7);
        assert_eq!(offloads.exposed_ns(more(3, 40, 7), 50), 0);
    }
}
