//! Switches of libtorch that `tch` does not reach: deterministic kernels, and mixed precision in bfloat16.

use std::marker::PhantomData;

use tch::Device;

use super::shim;

/// Chooses kernels that give the same bits in every run, where there are any. libtorch warns where there are none.
///
/// On a CUDA device `CUBLAS_WORKSPACE_CONFIG=:4096:8` belongs to it, before the first matrix product.
pub fn set_deterministic(on: bool) {
    shim::set_deterministic(on);
}

/// Operators of this thread run in bfloat16 where libtorch deems that safe, until this is dropped. For the forward pass:
/// the backward pass follows the forward's types.
#[must_use = "mixed precision ends where this is dropped"]
pub struct Autocast {
    on_cuda: bool,
    _of_this_thread: PhantomData<*const ()>,
}

impl Autocast {
    /// Switches it on for operators on the kind of device that `device` is.
    pub fn bf16(device: Device) -> Self {
        let on_cuda = matches!(device, Device::Cuda(_));
        shim::autocast(on_cuda, true);
        Autocast { on_cuda, _of_this_thread: PhantomData }
    }
}

impl Drop for Autocast {
    fn drop(&mut self) {
        shim::autocast(self.on_cuda, false);
    }
}
