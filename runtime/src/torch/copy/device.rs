//! What a device with streams has to offer: the driver calls that a copy engine is made of, and nothing else.
//!
//! Two kinds exist: a GPU's driver, and the simulated device of the tests, which finishes copies late and out of order
//! and notices whoever does not wait.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::CopyError;

/// A queue of the device's work: done in order within it, in any order with respect to others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamId(pub u64);

/// A mark in a stream. It may be waited for after it has been recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EventId(pub u64);

/// A driver call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {message}")]
pub struct DeviceCallError {
    /// What was asked of the driver.
    pub call: &'static str,
    /// What the driver says.
    pub message: String,
}

impl From<DeviceCallError> for CopyError {
    fn from(DeviceCallError { call, message }: DeviceCallError) -> Self {
        CopyError::Device { call, message }
    }
}

/// A device's driver. No call but the two that synchronise makes the caller wait for the device.
pub trait Device: Send + Sync {
    /// The stream that the program's operators are queued in now.
    fn compute_stream(&self) -> Result<StreamId, DeviceCallError>;

    /// A stream of our own, which waits for no other unless told to.
    fn create_stream(&self) -> Result<StreamId, DeviceCallError>;

    /// Lets go of a stream in which nothing is queued.
    fn destroy_stream(&self, stream: StreamId);

    /// A mark that is in no stream yet.
    fn create_event(&self) -> Result<EventId, DeviceCallError>;

    /// A mark that is in no stream yet, and will tell when it was reached.
    fn create_timed_event(&self) -> Result<EventId, DeviceCallError>;

    /// Nanoseconds from one timed mark to another, which both have been reached.
    fn elapsed_ns(&self, from: EventId, to: EventId) -> Result<u64, DeviceCallError>;

    /// Lets go of a mark. What waits for it goes on waiting.
    fn destroy_event(&self, event: EventId);

    /// Puts the mark behind all that is queued in `stream` now.
    fn record_event(&self, event: EventId, stream: StreamId) -> Result<(), DeviceCallError>;

    /// What is queued in `stream` from now on waits until the mark, where it stands now, has been reached.
    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> Result<(), DeviceCallError>;

    /// Queues in `stream` what does nothing, but is no copy.
    fn rest(&self, stream: StreamId) -> Result<(), DeviceCallError>;

    /// Whether the mark has been reached.
    fn is_complete(&self, event: EventId) -> Result<bool, DeviceCallError>;

    /// Blocks until the mark has been reached.
    fn synchronize_event(&self, event: EventId) -> Result<(), DeviceCallError>;

    /// Blocks until the stream is empty.
    fn synchronize_stream(&self, stream: StreamId) -> Result<(), DeviceCallError>;

    /// Page-locked memory of the host, of exactly so many bytes; none if the system refuses.
    fn allocate_page_locked(&self, bytes: usize) -> Result<Option<NonNull<u8>>, DeviceCallError>;

    /// Gives page-locked memory back.
    ///
    /// # Safety
    ///
    /// It came from `allocate_page_locked` with as many bytes, and nothing queued uses it.
    unsafe fn free_page_locked(&self, start: NonNull<u8>, bytes: usize) -> Result<(), DeviceCallError>;

    /// Queues a copy to page-locked memory.
    ///
    /// # Safety
    ///
    /// Both ends are valid for `bytes` until the copy is done, and nothing else uses them in conflict.
    unsafe fn copy_from_device(
        &self,
        from: *const u8,
        to: *mut u8,
        bytes: usize,
        stream: StreamId,
    ) -> Result<(), DeviceCallError>;

    /// Queues a copy from page-locked memory.
    ///
    /// # Safety
    ///
    /// As for [`copy_from_device`](Device::copy_from_device).
    unsafe fn copy_to_device(
        &self,
        from: *const u8,
        to: *mut u8,
        bytes: usize,
        stream: StreamId,
    ) -> Result<(), DeviceCallError>;
}

/// A mark that is never moved once recorded, and let go of with its last user.
pub(super) struct RecordedEvent {
    pub(super) id: EventId,
    /// Where it is recorded.
    pub(super) stream: StreamId,
    device: Arc<dyn Device>,
}

impl RecordedEvent {
    /// A mark yet to be recorded, once.
    pub(super) fn create(device: &Arc<dyn Device>, stream: StreamId) -> Result<Arc<Self>, DeviceCallError> {
        Ok(Self::of(device.create_event()?, device, stream))
    }

    /// The same, which will tell when it was reached.
    pub(super) fn create_timed(device: &Arc<dyn Device>, stream: StreamId) -> Result<Arc<Self>, DeviceCallError> {
        Ok(Self::of(device.create_timed_event()?, device, stream))
    }

    fn of(id: EventId, device: &Arc<dyn Device>, stream: StreamId) -> Arc<Self> {
        Arc::new(RecordedEvent { id, stream, device: Arc::clone(device) })
    }
}

impl fmt::Debug for RecordedEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.id.fmt(f)
    }
}

impl Drop for RecordedEvent {
    fn drop(&mut self) {
        self.device.destroy_event(self.id);
    }
}
