//! A region laid out in advance, in the best of several allocation orders.
//!
//! vDNN++ ("Dynamic Memory Management for GPU-Based Training of Deep Neural Networks", Shriram et al., IPDPS 2019)
//! compares "heuristics and order for memory allocation" by the fragmentation that they leave: an iteration repeats, so
//! where each block goes can be decided before the first. Only the abstract was at hand, so the orders are ours: as
//! allocated; largest first; largest bytes × lifetime first. In each, every block is put at the lowest address where it
//! does not meet a block that is placed already and lives at the same time. The order that needs the fewest bytes wins.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::{GRANULE_BYTES, OutOfMemory, Request, Requests};

/// Requests in one slot of the index of what lives when.
const SLOT: usize = 64;

/// A block's life, in requests, and its size.
#[derive(Clone, Copy)]
struct Life {
    born: usize,
    died: usize,
    bytes: u64,
}

/// Most bytes reserved by the best order.
pub(super) fn reserve(requests: &Requests, limit_bytes: Option<u64>) -> Result<u64, OutOfMemory> {
    let lives = lives(requests);
    let as_allocated: Vec<usize> = (0..lives.len()).collect();
    let mut largest_first = as_allocated.clone();
    largest_first.sort_by_key(|&block| Reverse(lives[block].bytes));
    let mut longest_and_largest_first = as_allocated.clone();
    longest_and_largest_first.sort_by_key(|&block| {
        let Life { born, died, bytes } = lives[block];
        Reverse(u128::from(bytes) * (died - born) as u128)
    });
    let orders = [as_allocated, largest_first, longest_and_largest_first];
    let laid_out = orders.iter().map(|order| lay_out(&lives, order, requests.steps.len()));
    let ends = laid_out.min_by_key(|ends| ends.iter().copied().max()).expect("there are three orders");
    let limit_bytes = limit_bytes.unwrap_or(u64::MAX);
    let mut needed = requests.steps.iter().filter_map(|&(operator, request)| match request {
        Request::Allocate(block, _) => Some((operator, ends[block.index()])),
        Request::Free(_) => None,
    });
    match needed.find(|&(_, end)| end > limit_bytes) {
        Some((operator, needed_bytes)) => Err(OutOfMemory { operator: operator as usize, needed_bytes, limit_bytes }),
        None => Ok(ends.into_iter().max().unwrap_or(0)),
    }
}

fn lives(requests: &Requests) -> Vec<Life> {
    let mut lives: Vec<Life> = Vec::with_capacity(requests.blocks);
    for (now, &(_, request)) in requests.steps.iter().enumerate() {
        match request {
            Request::Allocate(_, bytes) => {
                let bytes = bytes.next_multiple_of(GRANULE_BYTES);
                lives.push(Life { born: now, died: requests.steps.len(), bytes });
            }
            Request::Free(block) => lives[block.index()].died = now,
        }
    }
    lives
}

/// Addresses that are taken, as ranges that do not touch: by their starts, their ends.
#[derive(Default)]
struct Taken(BTreeMap<u64, u64>);

impl Taken {
    fn take(&mut self, mut start: u64, mut end: u64) {
        // Those that it touches become one with it.
        while let Some((&before, &its_end)) = self.0.range(..=end).next_back().filter(|&(_, &its_end)| its_end >= start)
        {
            self.0.remove(&before);
            (start, end) = (start.min(before), end.max(its_end));
        }
        self.0.insert(start, end);
    }

    fn ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        self.0.iter().map(|(&start, &end)| (start, end))
    }
}

/// The address at which each block ends, with blocks placed in `order`.
fn lay_out(lives: &[Life], order: &[usize], requests: usize) -> Vec<u64> {
    let first_death = lives.iter().map(|life| life.died).min().unwrap_or(0);
    let last_birth = lives.iter().map(|life| life.born).max().unwrap_or(0);
    // Most blocks of some iterations are there all the time: they meet every other one, and are not looked for one by one.
    let meets_all = |life: Life| life.born < first_death && last_birth < life.died;
    let (mut all, mut by_those) = (Taken::default(), Taken::default());
    let mut ends = vec![0; lives.len()];
    let mut slots: Vec<Vec<usize>> = vec![Vec::new(); requests / SLOT + 1];
    let mut met = Vec::new();
    for &block in order {
        let life = lives[block];
        let own_slots = life.born / SLOT..=life.died / SLOT;
        met.clear();
        if meets_all(life) {
            met.extend(all.ranges());
        } else {
            met.extend(by_those.ranges());
            for slot in own_slots.clone() {
                for &other in &slots[slot] {
                    let Life { born, died, bytes } = lives[other];
                    // It stands in each of its slots: it counts in the first that both have.
                    let first = (born / SLOT).max(*own_slots.start()) == slot;
                    if first && born < life.died && life.born < died {
                        met.push((ends[other] - bytes, ends[other]));
                    }
                }
            }
            met.sort_unstable();
        }
        let mut address = 0;
        for &(start, end) in &met {
            if start >= address + life.bytes {
                break;
            }
            address = end.max(address);
        }
        ends[block] = address + life.bytes;
        all.take(address, ends[block]);
        if meets_all(life) {
            by_those.take(address, ends[block]);
        } else {
            own_slots.for_each(|slot| slots[slot].push(block));
        }
    }
    ends
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SplitMix64;

    /// The same, looking at every block that is placed already.
    fn lay_out_directly(lives: &[Life], order: &[usize]) -> Vec<u64> {
        let mut ends = vec![0; lives.len()];
        for (placed, &block) in order.iter().enumerate() {
            let life = lives[block];
            let meets = |&&other: &&usize| lives[other].born < life.died && life.born < lives[other].died;
            let met = order[..placed].iter().filter(meets);
            let mut met: Vec<_> = met.map(|&other| (ends[other] - lives[other].bytes, ends[other])).collect();
            met.sort_unstable();
            let first_gap = met.iter().fold(0, |address: u64, &(start, end)| match start >= address + life.bytes {
                true => address,
                false => address.max(end),
            });
            ends[block] = first_gap + life.bytes;
        }
        ends
    }

    #[test]
    fn blocks_are_placed_as_if_each_looked_at_every_other() {
        let mut random = SplitMix64::new(1);
        for _ in 0..300 {
            let requests = 20 + random.below(600);
            let there_all_the_time = random.below(20);
            let lives: Vec<Life> = (0..there_all_the_time + random.below(120))
                .map(|block| {
                    let bytes = GRANULE_BYTES * (1 + random.below(9)) as u64;
                    if block < there_all_the_time {
                        return Life { born: block, died: requests, bytes };
                    }
                    let born = there_all_the_time.min(requests - 2) + random.below(requests / 2);
                    Life { born, died: born + 1 + random.below(requests), bytes }
                })
                .map(|life| Life { died: life.died.min(requests), born: life.born.min(requests - 1), ..life })
                .collect();
            let mut order: Vec<usize> = (0..lives.len()).collect();
            for place in (1..order.len()).rev() {
                order.swap(place, random.below(place + 1));
            }
            assert_eq!(lay_out(&lives, &order, requests), lay_out_directly(&lives, &order));
        }
    }
}
