//! Allocator models: how much device memory a plan makes an allocator reserve.
//!
//! A budget counts bytes in use. An allocator reserves more: it rounds, and it cannot use a gap that is too small. The
//! models replay the allocations and frees of one iteration under a schedule; they know nothing of why these are made.
//! `1 - largest use / reserved` is the fragmentation of "Dynamic Memory Management for GPU-Based Training of Deep
//! Neural Networks" (Shriram et al., IPDPS 2019), where the largest use is the most that the plan ever has in use.

mod arena;
mod caching;
mod placement;

use serde::Serialize;

use crate::lineage::Lineage;
use crate::playback::{BlockId, Event, play};
use crate::schedule::Schedule;
use crate::trace::Trace;
use arena::{Arena, Fit};
use caching::Caching;

/// What the models of one contiguous region round sizes up to: CUDA's alignment, and the granularity of cnmem, the
/// pool that vDNN and vDNN++ use.
pub const GRANULE_BYTES: u64 = 512;

/// A model of an allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Model {
    /// Every byte in use and no other: what a budget counts.
    Exact,
    /// One region; each block at the lowest address where it fits.
    FirstFit,
    /// One region; each block in the smallest gap where it fits, the lowest of equals.
    BestFit,
    /// One region, laid out in advance: the best of several allocation orders.
    VdnnPlusPlus,
    /// libtorch's caching allocator for CUDA.
    Caching,
}

impl Model {
    /// All models, from the least to the most like what PyTorch does.
    pub const ALL: [Model; 5] = [Model::Exact, Model::FirstFit, Model::BestFit, Model::VdnnPlusPlus, Model::Caching];

    /// Its name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Model::Exact => "exact",
            Model::FirstFit => "first-fit",
            Model::BestFit => "best-fit",
            Model::VdnnPlusPlus => "vdnn++",
            Model::Caching => "caching",
        }
    }

    /// Serves `requests`, and reserves as much as it takes, or at most `limit_bytes`.
    pub fn serve(self, requests: &Requests, limit_bytes: Option<u64>) -> Result<Footprint, OutOfMemory> {
        let reserved_bytes = match self {
            Model::Exact => requests.run(&mut Exact::default(), limit_bytes)?,
            Model::FirstFit => requests.run(&mut Arena::new(Fit::First), limit_bytes)?,
            Model::BestFit => requests.run(&mut Arena::new(Fit::Best), limit_bytes)?,
            Model::VdnnPlusPlus => placement::reserve(requests, limit_bytes)?,
            Model::Caching => requests.run(&mut Caching::default(), limit_bytes)?,
        };
        Ok(Footprint { reserved_bytes, used_bytes: requests.used_bytes })
    }
}

/// What an iteration makes an allocator reserve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Footprint {
    /// Most bytes reserved at any moment.
    pub reserved_bytes: u64,
    /// Most bytes in use at any moment.
    pub used_bytes: u64,
}

impl Footprint {
    /// The share of what is reserved that even the fullest moment leaves unused: from 0 to 1.
    pub fn fragmentation(&self) -> f64 {
        if self.reserved_bytes == 0 { 0.0 } else { 1.0 - self.used_bytes as f64 / self.reserved_bytes as f64 }
    }
}

/// A request that does not fit in what may be reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("out of memory before operator {operator}: {needed_bytes} bytes reserved where {limit_bytes} may be")]
pub struct OutOfMemory {
    /// Operator index at which it is made.
    pub operator: usize,
    /// Bytes that would have to be reserved.
    pub needed_bytes: u64,
    /// Bytes that may be reserved.
    pub limit_bytes: u64,
}

/// One request to an allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// For a block of so many bytes, not 0.
    Allocate(BlockId, u64),
    /// That a block be freed.
    Free(BlockId),
}

/// The requests of one iteration, in order.
#[derive(Clone, Debug, Default)]
pub struct Requests {
    /// Operator index before or in which it is made, and the request.
    steps: Vec<(u32, Request)>,
    blocks: usize,
    used_bytes: u64,
}

impl Requests {
    /// What an iteration of `trace` under `schedule` requests.
    pub fn of(trace: &Trace, lineage: &Lineage, schedule: &Schedule) -> Self {
        let mut requests = Vec::new();
        play(trace, lineage, schedule, |operator, event| match event {
            Event::Allocate { block, bytes, .. } => requests.push((operator as u32, Request::Allocate(block, bytes))),
            Event::Free(block) => requests.push((operator as u32, Request::Free(block))),
            _ => {}
        });
        Self::new(requests)
    }

    /// Any requests. Blocks are numbered from 0 in the order of their allocation.
    pub fn new(steps: Vec<(u32, Request)>) -> Self {
        let mut sizes = Vec::new();
        let (mut now_bytes, mut used_bytes) = (0, 0);
        for &(_, request) in &steps {
            match request {
                Request::Allocate(block, bytes) => {
                    assert_eq!(block.index(), sizes.len(), "blocks are numbered in the order of their allocation");
                    sizes.push(bytes);
                    now_bytes += bytes;
                }
                Request::Free(block) => now_bytes -= sizes[block.index()],
            }
            used_bytes = now_bytes.max(used_bytes);
        }
        Requests { steps, blocks: sizes.len(), used_bytes }
    }

    /// The requests: operator index and request.
    pub fn steps(&self) -> &[(u32, Request)] {
        &self.steps
    }

    /// Most bytes in use at any moment.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    fn run(&self, allocator: &mut impl Allocator, limit_bytes: Option<u64>) -> Result<u64, OutOfMemory> {
        let limit_bytes = limit_bytes.unwrap_or(u64::MAX);
        let mut reserved_bytes = 0;
        for &(operator, request) in &self.steps {
            match request {
                Request::Free(block) => allocator.free(block),
                Request::Allocate(block, bytes) => {
                    let needed_bytes = allocator.allocate(block, bytes, limit_bytes);
                    if needed_bytes > limit_bytes {
                        return Err(OutOfMemory { operator: operator as usize, needed_bytes, limit_bytes });
                    }
                    reserved_bytes = needed_bytes.max(reserved_bytes);
                }
            }
        }
        Ok(reserved_bytes)
    }
}

/// An allocator that serves one request after another, without knowing the next.
trait Allocator {
    /// Allocates a block and returns the bytes reserved then. It may reserve more than `limit_bytes`, where there is no
    /// other way; nothing is asked of it afterwards.
    fn allocate(&mut self, block: BlockId, bytes: u64, limit_bytes: u64) -> u64;

    /// Frees a block.
    fn free(&mut self, block: BlockId);
}

/// [`Model::Exact`].
#[derive(Default)]
struct Exact {
    sizes: Vec<u64>,
    used_bytes: u64,
}

impl Allocator for Exact {
    fn allocate(&mut self, _: BlockId, bytes: u64, _: u64) -> u64 {
        self.sizes.push(bytes);
        self.used_bytes += bytes;
        self.used_bytes
    }

    fn free(&mut self, block: BlockId) {
        self.used_bytes -= self.sizes[block.index()];
    }
}

#[cfg(test)]
mod tests;
