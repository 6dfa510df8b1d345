//! Switches of libtorch that `tch` does not reach: deterministic kernels, and mixed precision in bfloat16.

use std::marker::PhantomData;

use tch::Device;

use super::shim;

/// Whether kernels must give the same bits in every run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Determinism {
    /// The fastest will do.
    NotAsked,
    /// Where libtorch calls an operator nondeterministic it warns. Some of these have a deterministic kernel all the same
    /// and do not use it then: attention's backward pass, for one.
    Preferred,
    /// Where there is no such kernel, the operator fails.
    Required,
}

/// Chooses kernels by whether they give the same bits in every run.
///
/// On a CUDA device `CUBLAS_WORKSPACE_CONFIG=:4096:8` belongs to it, before the first matrix product.
pub fn set_deterministic(determinism: Determinism) {
    shim::set_deterministic(match determinism {
        Determinism::NotAsked => 0,
        Determinism::Preferred => 1,
        Determinism::Required => 2,
    });
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
