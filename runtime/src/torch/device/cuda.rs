//! A CUDA device's driver calls, for the copy engine that streams make: `StreamEngine::new(Arc::new(driver), limit)`.
//!
//! Thin on purpose: which call comes when, and who waits for whom, is the engine's affair and tested without a GPU. The
//! driver is loaded at run time. Its primary context is shared with libtorch, and so are the streams and blocks in it.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use cudarc::driver::result::{self, event, stream};
use cudarc::driver::{CudaContext, DriverError, sys};

use super::{DeviceError, DeviceName};
use crate::locks::lock;
use crate::torch::copy::{Device, DeviceCallError, EventId, StreamId};

/// Libtorch's current stream on a device, by its C interface.
type CurrentStream = unsafe extern "C" fn(device: i32, stream: *mut *mut c_void) -> i32;

/// The driver of one CUDA device, in the context that libtorch uses.
#[derive(Debug)]
pub struct CudaDriver {
    context: Arc<CudaContext>,
    ordinal: i32,
    current_stream: CurrentStream,
    /// Marks without times that nobody holds any more. What waits for one waits for where that stood then, so it may be put elsewhere: to
    /// make one and let go of it takes the host as long as to put it somewhere.
    spare_events: Mutex<Vec<EventId>>,
    /// A kernel that does nothing; none where the driver makes none of its text, as without the compiler that it comes with.
    rest: Option<Kernel>,
}

/// A kernel of a module that stays loaded for as long as the context lives.
#[derive(Debug)]
struct Kernel(sys::CUfunction);

// SAFETY: the driver's handle is for all threads.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// The kernel that does nothing.
const REST: &CStr = c".version 6.4
.target sm_75
.address_size 64
.visible .entry rest() { ret; }
";

/// Where an event's number says that it tells times: those of the driver are addresses of words.
const TIMED: u64 = 1;

impl CudaDriver {
    /// The driver of device `ordinal`, once libtorch can use it.
    pub fn open(ordinal: usize) -> Result<Self, DeviceError> {
        DeviceName::Cuda(ordinal).open()?;
        let current_stream = current_stream()?;
        let context =
            CudaContext::new(ordinal).map_err(|error| DeviceError::Driver { message: format!("{error:?}") })?;
        let mut driver =
            CudaDriver { context, ordinal: ordinal as i32, current_stream, spare_events: Mutex::default(), rest: None };
        // SAFETY: the text and the name end with a nul, and the module is never unloaded.
        let made = driver.call("cuModuleLoadData", || unsafe {
            let module = result::module::load_data(REST.as_ptr().cast())?;
            result::module::get_function(module, c"rest".to_owned())
        });
        match made {
            Ok(kernel) => driver.rest = Some(Kernel(kernel)),
            Err(error) => {
                eprintln!("plimsoll: warning: {error}: what follows a read-out may wait for copies to the host")
            }
        }
        Ok(driver)
    }

    fn let_go(&self, event: EventId) {
        // SAFETY: it came from `create_event`, and its owner lets go of it once. It may not have been reached yet.
        let _ = self.call("cuEventDestroy", || unsafe { event::destroy(raw_event(event)) });
    }

    /// Makes a call in our context. A thread that was in another, as one that works for another device, is there again afterwards.
    fn call<T>(&self, call: &'static str, make: impl FnOnce() -> Result<T, DriverError>) -> Result<T, DeviceCallError> {
        let in_ours = || {
            let before = result::ctx::get_current()?.filter(|&context| context != self.context.cu_ctx());
            self.context.bind_to_thread()?;
            let made = make();
            // SAFETY: it was current just now.
            before.map_or(Ok(()), |context| unsafe { result::ctx::set_current(context) })?;
            made
        };
        in_ours().map_err(|error| DeviceCallError { call, message: format!("{error:?}") })
    }
}

impl Drop for CudaDriver {
    fn drop(&mut self) {
        let spare = std::mem::take(&mut *lock(&self.spare_events));
        spare.into_iter().for_each(|event| self.let_go(event));
    }
}

/// The function of libtorch's CUDA half, which has been loaded for all to see.
fn current_stream() -> Result<CurrentStream, DeviceError> {
    const NAME: &CStr = c"aoti_torch_get_current_cuda_stream";
    // SAFETY: the name is a C string.
    let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, NAME.as_ptr()) };
    if symbol.is_null() {
        let reason = format!("it has no {}", NAME.to_string_lossy());
        return Err(DeviceError::LibtorchWithoutCuda { reason });
    }
    // SAFETY: libtorch declares it `AOTITorchError (int32_t, void**)`, an error being an `int32_t`.
    Ok(unsafe { std::mem::transmute::<*mut c_void, CurrentStream>(symbol) })
}

fn raw_stream(StreamId(stream): StreamId) -> sys::CUstream {
    stream as usize as sys::CUstream
}

fn raw_event(EventId(event): EventId) -> sys::CUevent {
    (event & !TIMED) as usize as sys::CUevent
}

impl Device for CudaDriver {
    fn compute_stream(&self) -> Result<StreamId, DeviceCallError> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: `stream` is writable.
        let failed = unsafe { (self.current_stream)(self.ordinal, &mut stream) };
        if failed != 0 {
            let message = format!("libtorch gives no current stream (error {failed})");
            return Err(DeviceCallError { call: "current stream", message });
        }
        // Null is a stream as well: the default one.
        Ok(StreamId(stream as u64))
    }

    fn create_stream(&self) -> Result<StreamId, DeviceCallError> {
        // A blocking stream would wait for the default stream, and the default stream for it.
        let created = self.call("cuStreamCreate", || stream::create(stream::StreamKind::NonBlocking))?;
        Ok(StreamId(created as u64))
    }

    fn destroy_stream(&self, stream: StreamId) {
        // SAFETY: it came from `create_stream`, and its owner lets go of it once.
        let _ = self.call("cuStreamDestroy", || unsafe { stream::destroy(raw_stream(stream)) });
    }

    fn create_event(&self) -> Result<EventId, DeviceCallError> {
        if let Some(spare) = lock(&self.spare_events).pop() {
            return Ok(spare);
        }
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        Ok(EventId(self.call("cuEventCreate", || event::create(flags))? as u64))
    }

    fn create_timed_event(&self) -> Result<EventId, DeviceCallError> {
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
        Ok(EventId(self.call("cuEventCreate", || event::create(flags))? as u64 | TIMED))
    }

    fn elapsed_ns(&self, from: EventId, to: EventId) -> Result<u64, DeviceCallError> {
        // SAFETY: both live, and the caller says that they have been reached.
        let ms = self.call("cuEventElapsedTime", || unsafe { event::elapsed(raw_event(from), raw_event(to)) })?;
        Ok((f64::from(ms).max(0.0) * 1e6) as u64)
    }

    fn destroy_event(&self, event: EventId) {
        if event.0 & TIMED == 0 {
            return lock(&self.spare_events).push(event);
        }
        self.let_go(event);
    }

    fn record_event(&self, event: EventId, stream: StreamId) -> Result<(), DeviceCallError> {
        // SAFETY: both live.
        self.call("cuEventRecord", || unsafe { event::record(raw_event(event), raw_stream(stream)) })
    }

    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> Result<(), DeviceCallError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both live.
        self.call("cuStreamWaitEvent", || unsafe { stream::wait_event(raw_stream(stream), raw_event(event), flags) })
    }

    fn rest(&self, stream: StreamId) -> Result<(), DeviceCallError> {
        let Some(Kernel(rest)) = self.rest else { return Ok(()) };
        let one = (1, 1, 1);
        // SAFETY: it takes no arguments, and the stream lives.
        self.call("cuLaunchKernel", || unsafe { result::launch_kernel(rest, one, one, 0, raw_stream(stream), &mut []) })
    }

    fn is_complete(&self, event: EventId) -> Result<bool, DeviceCallError> {
        // SAFETY: it lives.
        self.call("cuEventQuery", || match unsafe { event::query(raw_event(event)) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(error),
        })
    }

    fn synchronize_event(&self, event: EventId) -> Result<(), DeviceCallError> {
        // SAFETY: it lives.
        self.call("cuEventSynchronize", || unsafe { event::synchronize(raw_event(event)) })
    }

    fn synchronize_stream(&self, stream: StreamId) -> Result<(), DeviceCallError> {
        // SAFETY: it lives.
        self.call("cuStreamSynchronize", || unsafe { stream::synchronize(raw_stream(stream)) })
    }

    fn allocate_page_locked(&self, bytes: usize) -> Result<Option<NonNull<u8>>, DeviceCallError> {
        // No flags: the default of cudarc, write-combined, is slow for the processor to read.
        // SAFETY: what is in it is read only once it has been written.
        self.call("cuMemHostAlloc", || match unsafe { result::malloc_host(bytes, 0) } {
            Ok(start) => Ok(NonNull::new(start.cast())),
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => Ok(None),
            Err(error) => Err(error),
        })
    }

    unsafe fn free_page_locked(&self, start: NonNull<u8>, _: usize) -> Result<(), DeviceCallError> {
        // SAFETY: the caller says that it came from `allocate_page_locked` and that nothing uses it.
        self.call("cuMemFreeHost", || unsafe { result::free_host(start.as_ptr().cast()) })
    }

    unsafe fn copy_from_device(
        &self,
        from: *const u8,
        to: *mut u8,
        bytes: usize,
        stream: StreamId,
    ) -> Result<(), DeviceCallError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller says that both ends are valid until the copy is done.
        self.call("cuMemcpyDtoHAsync", || unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.cast(), from as sys::CUdeviceptr, bytes, raw_stream(stream)).result()
        })
    }

    unsafe fn copy_to_device(
        &self,
        from: *const u8,
        to: *mut u8,
        bytes: usize,
        stream: StreamId,
    ) -> Result<(), DeviceCallError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: as above.
        self.call("cuMemcpyHtoDAsync", || unsafe {
            sys::cuMemcpyHtoDAsync_v2(to as sys::CUdeviceptr, from.cast(), bytes, raw_stream(stream)).result()
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::hardware::Tier;
    use crate::torch::{CopyEngine, DeviceBytes, StreamEngine};
    use tch::{Device as TorchDevice, Kind, Tensor};

    use super::*;

    /// Needs a GPU; says so where there is none.
    #[test]
    fn on_a_cuda_device_tensors_go_and_come_back_in_stream_order() {
        let driver = match CudaDriver::open(0) {
            Ok(driver) => driver,
            Err(reason) => return println!("did not run: {reason}"),
        };
        let mut engine = StreamEngine::new(Arc::new(driver), 64 << 20).unwrap();
        for round in 0..20 {
            let there = Tensor::arange(1 << 20, (Kind::Float, TorchDevice::Cuda(0))) + f64::from(round);
            let back = Tensor::zeros_like(&there);
            let bytes = 4 << 20;
            let start = there.data_ptr().cast();
            // SAFETY: both tensors live, and are used in stream order only after the waits.
            unsafe {
                let (copies, ticket) = engine.offload(&[DeviceBytes { start, bytes }], Tier::Host).unwrap();
                engine.wait(&ticket).unwrap();
                let ticket = engine.prefetch(&[(&copies[0], back.data_ptr().cast())]).unwrap();
                drop(copies);
                engine.wait(&ticket).unwrap();
            }
            let _ = there.shallow_clone().zero_();
            let expected = Tensor::arange(1 << 20, (Kind::Float, TorchDevice::Cuda(0))) + f64::from(round);
            assert!(back.equal(&expected), "round {round}");
        }
        assert_eq!(engine.host_waits(), 0);
    }

    #[test]
    fn a_device_that_is_not_there_is_an_error() {
        assert!(CudaDriver::open(1_000).is_err());
    }
}
