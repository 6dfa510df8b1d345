//! The copy engine of a device, opened once and used by one loop after another.
//!
//! Page-locked memory is slow to get, so the engine of a CUDA device keeps its slabs from loop to loop.

use std::sync::{Arc, Mutex};

use super::cuda::CudaDriver;
use super::{DeviceError, DeviceName};
use crate::Link;
use crate::hardware::Tier;
use crate::locks::lock;
use crate::torch::copy::{SlowCopy, Ticket, TierCopies, TierUse, TimedCopies};
use crate::torch::{CopyEngine, CopyError, DeviceBytes, HostEngine, StreamEngine};

/// Page-locked memory that loops on a CUDA device may take, unless told otherwise.
pub const PAGE_LOCKED_LIMIT_BYTES: u64 = 64 << 30;

/// Why a device has no copy engine.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Its driver fails.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// A link is emulated by pacing the copies of a processor.
    #[error("a link can be emulated on the CPU alone; {0} has its own")]
    NotEmulated(DeviceName),
}

/// What makes copies for loops on one device.
#[derive(Clone)]
pub struct Engines {
    device: DeviceName,
    streams: Option<Arc<Mutex<StreamEngine>>>,
}

impl Engines {
    /// Opens the engine of `device`, with at most so much page-locked memory where it has streams.
    pub fn open(device: DeviceName, page_locked_limit_bytes: u64) -> Result<Self, EngineError> {
        let streams = match device {
            DeviceName::Cpu => None,
            DeviceName::Cuda(ordinal) => {
                let driver = Arc::new(CudaDriver::open(ordinal)?);
                Some(Arc::new(Mutex::new(StreamEngine::new(driver, page_locked_limit_bytes)?)))
            }
        };
        Ok(Engines { device, streams })
    }

    /// An engine for one loop; `pace` emulates a link.
    pub fn engine(&self, pace: Option<Link>) -> Result<Box<dyn CopyEngine>, EngineError> {
        match &self.streams {
            None => Ok(Box::new(HostEngine::new(pace))),
            Some(_) if pace.is_some() => Err(EngineError::NotEmulated(self.device)),
            Some(streams) => Ok(Box::new(Shared(Arc::clone(streams)))),
        }
    }

    /// Blocks until the device has done all that it was asked to.
    pub fn settle(&self) {
        if let DeviceName::Cuda(ordinal) = self.device {
            tch::Cuda::synchronize(ordinal as i64);
        }
    }

    /// From now on a device with streams notes when it makes each copy.
    pub fn time_copies(&self) -> Result<(), CopyError> {
        self.streams.as_ref().map_or(Ok(()), |streams| lock(streams).time_copies())
    }

    /// What it has noted: nothing where there are no streams. See [`StreamEngine::take_timed_copies`].
    pub fn take_timed_copies(&self) -> Result<Vec<TimedCopies>, CopyError> {
        self.streams.as_ref().map_or(Ok(Vec::new()), |streams| lock(streams).take_timed_copies())
    }

    /// How often the engine held up the host, and how often it had to get page-locked memory, since it was opened.
    pub fn host_waits_and_allocations(&self) -> Option<(u64, u64)> {
        let streams = lock(self.streams.as_ref()?);
        Some((streams.host_waits(), streams.page_locked_allocations()))
    }
}

/// An engine that several loops have one after another.
struct Shared(Arc<Mutex<StreamEngine>>);

impl CopyEngine for Shared {
    unsafe fn offload(&mut self, pieces: &[DeviceBytes], tier: Tier) -> Result<(Vec<SlowCopy>, Ticket), CopyError> {
        // SAFETY: passed on.
        unsafe { lock(&self.0).offload(pieces, tier) }
    }

    unsafe fn prefetch(&mut self, copies: &[(&SlowCopy, *mut u8)]) -> Result<Ticket, CopyError> {
        // SAFETY: passed on.
        unsafe { lock(&self.0).prefetch(copies) }
    }

    fn wait(&mut self, ticket: &Ticket) -> Result<(), CopyError> {
        lock(&self.0).wait(ticket)
    }

    fn has_read_out(&mut self) {
        lock(&self.0).has_read_out();
    }

    fn compute_stands(&mut self, stands: bool) {
        lock(&self.0).compute_stands(stands);
    }

    unsafe fn rescue(&mut self, copy: &SlowCopy, to: *mut u8) -> Result<(), CopyError> {
        // SAFETY: passed on.
        unsafe { lock(&self.0).rescue(copy, to) }
    }

    fn tiers(&self) -> Vec<TierUse> {
        lock(&self.0).tiers()
    }

    fn dependable_bytes(&self) -> u64 {
        lock(&self.0).dependable_bytes()
    }

    fn copies(&self) -> Vec<TierCopies> {
        lock(&self.0).copies()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_has_an_engine_for_every_link_and_a_missing_device_has_none() {
        let engines = Engines::open(DeviceName::Cpu, 0).unwrap();
        assert!(engines.engine(None).is_ok() && engines.engine(Some(Link::symmetric(1e9, 0))).is_ok());
        assert_eq!(engines.host_waits_and_allocations(), None);
        let missing = Engines::open(DeviceName::Cuda(1_000), 0).map(drop);
        assert!(matches!(missing, Err(EngineError::Device(_))), "{missing:?}");
    }
}
