//! A region laid out in advance, in the best of several allocation orders.
//!
//! vDNN++ ("Dynamic Memory Management for GPU-Based Training of Deep Neural Networks", Shriram et al., IPDPS 2019)
//! compares "heuristics and order for memory allocation" by the fragmentation that they leave: an iteration repeats, so
//! where each block goes can be decided before the first. Only the abstract was at hand, so the orders are ours: as
//! allocated; largest first; largest bytes × lifetime first. In each, every block is put at the lowest address where it
//! does not meet a block that is placed already and lives at the same time. The order that needs the fewest bytes wins.

use std::cmp::Reverse;

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

/// The address at which each block ends, with blocks placed in `order`.
fn lay_out(lives: &[Life], order: &[usize], requests: usize) -> Vec<u64> {
    let mut ends = vec![0; lives.len()];
    let mut slots: Vec<Vec<usize>> = vec![Vec::new(); requests / SLOT + 1];
    let mut met = Vec::new();
    for &block in order {
        let life = lives[block];
        let own_slots = life.born / SLOT..=life.died / SLOT;
        met.clear();
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
        let mut address = 0;
        for &(start, end) in &met {
            if start >= address + life.bytes {
                break;
            }
            address = end.max(address);
        }
        ends[block] = address + life.bytes;
        own_slots.for_each(|slot| slots[slot].push(block));
    }
    ends
}
