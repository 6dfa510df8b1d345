//! Where a training loop runs: the CPU, or a CUDA device that is looked for at run time.
//!
//! One binary serves machines with and without a GPU, so nothing here links CUDA: the driver is asked
//! through `cudarc`, which loads it, and libtorch's CUDA half is loaded when a CUDA device is first wanted.

mod copies;
mod cuda;
mod engines;

use std::fmt;
use std::str::FromStr;

use cudarc::driver::{DriverError, result, sys};
use serde::Serialize;
use tch::Device;

pub use copies::{CopyProbeError, CopyRates, CopyTable};
pub use engines::{EngineError, Engines, PAGE_LOCKED_LIMIT_BYTES};

/// A device by its name: `cpu`, `cuda` or `cuda:1`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceName {
    /// The CPU.
    #[default]
    Cpu,
    /// The CUDA device with this ordinal.
    Cuda(usize),
}

/// A CUDA device that the driver knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CudaDevice {
    /// Its number, from zero.
    pub ordinal: usize,
    /// Its product name.
    pub name: String,
    /// Its memory.
    pub total_memory_bytes: u64,
}

/// Why a device cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The name is none of ours.
    #[error("unknown device `{found}`: expected cpu, cuda or cuda:N")]
    UnknownName {
        /// What was written.
        found: String,
    },
    /// There is no driver library to load.
    #[error("no NVIDIA driver on this machine, which has the cpu alone")]
    NoDriver,
    /// The driver is there and fails.
    #[error("the NVIDIA driver failed: {message}")]
    Driver {
        /// What the driver says.
        message: String,
    },
    /// The ordinal is beyond the last device.
    #[error("there is no device cuda:{wanted}: this machine has only {found} CUDA devices")]
    NoSuchDevice {
        /// The ordinal that was asked for.
        wanted: usize,
        /// How many devices there are.
        found: usize,
    },
    /// There is a GPU, but this libtorch cannot use it.
    #[error("this libtorch cannot use CUDA: {reason}")]
    LibtorchWithoutCuda {
        /// What is missing.
        reason: String,
    },
}

impl FromStr for DeviceName {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Self, DeviceError> {
        let unknown = || DeviceError::UnknownName { found: text.to_owned() };
        match text {
            "cpu" => Ok(DeviceName::Cpu),
            "cuda" => Ok(DeviceName::Cuda(0)),
            _ => {
                let ordinal = text.strip_prefix("cuda:").filter(|digits| digits.bytes().all(|b| b.is_ascii_digit()));
                ordinal.and_then(|digits| digits.parse().ok()).map(DeviceName::Cuda).ok_or_else(unknown)
            }
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceName::Cpu => f.write_str("cpu"),
            DeviceName::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl DeviceName {
    /// Whether this machine has the device, as far as its driver knows. libtorch is not asked.
    pub fn check(self) -> Result<(), DeviceError> {
        let DeviceName::Cuda(wanted) = self else { return Ok(()) };
        let found = cuda_devices()?.len();
        if wanted < found { Ok(()) } else { Err(DeviceError::NoSuchDevice { wanted, found }) }
    }

    /// What is at work there, as traces say it: `cpu`, or the product of a CUDA device, as far as its driver knows.
    pub fn product(self) -> String {
        self.cuda_device().map_or_else(|| self.to_string(), |device| device.name)
    }

    /// The CUDA device of that name, if it is one that the driver knows.
    pub fn cuda_device(self) -> Option<CudaDevice> {
        let DeviceName::Cuda(ordinal) = self else { return None };
        cuda_devices().ok()?.into_iter().nth(ordinal)
    }

    /// Makes sure that the device can be used, and returns it as libtorch knows it.
    ///
    /// Call it before any other use of libtorch: whoever asks libtorch for CUDA before its CUDA half is
    /// loaded is told for good that there is none.
    pub fn open(self) -> Result<Device, DeviceError> {
        let DeviceName::Cuda(wanted) = self else { return Ok(Device::Cpu) };
        self.check()?;
        load_libtorch_cuda().map_err(|reason| DeviceError::LibtorchWithoutCuda { reason })?;
        if !tch::Cuda::is_available() {
            let reason = "it is built without CUDA, or for another driver".to_owned();
            return Err(DeviceError::LibtorchWithoutCuda { reason });
        }
        Ok(Device::Cuda(wanted))
    }
}

/// The CUDA devices of this machine. Having none at all is [`DeviceError::NoDriver`].
pub fn cuda_devices() -> Result<Vec<CudaDevice>, DeviceError> {
    // SAFETY: loads the driver library and lets go of it again; its initialisers have no precondition.
    if !unsafe { sys::is_culib_present() } {
        return Err(DeviceError::NoDriver);
    }
    list_devices().map_err(|error| DeviceError::Driver { message: format!("{error:?}") })
}

/// Asks the driver, which must be present: `cudarc` panics where it is not.
fn list_devices() -> Result<Vec<CudaDevice>, DriverError> {
    result::init()?;
    let count = result::device::get_count()?;
    (0..count)
        .map(|ordinal| {
            let device = result::device::get(ordinal)?;
            // SAFETY: `device` comes from the driver's own `get`.
            let total_memory_bytes = unsafe { result::device::total_mem(device)? } as u64;
            Ok(CudaDevice { ordinal: ordinal as usize, name: result::device::get_name(device)?, total_memory_bytes })
        })
        .collect()
}

/// Loads libtorch's CUDA half. Nothing refers to it by name, so the linker leaves it out.
fn load_libtorch_cuda() -> Result<(), String> {
    // SAFETY: the name is a C string, and libtorch's initialisers have no precondition. The library is
    // never unloaded, because libtorch keeps pointers into it.
    let handle = unsafe { libc::dlopen(c"libtorch_cuda.so".as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if !handle.is_null() {
        return Ok(());
    }
    // SAFETY: after a failed `dlopen` on this thread, `dlerror` gives a C string that lives until the next call.
    let message = unsafe { std::ffi::CStr::from_ptr(libc::dlerror()) };
    Err(message.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_understood_and_round_trip() {
        for (text, device) in [("cpu", DeviceName::Cpu), ("cuda", DeviceName::Cuda(0)), ("cuda:3", DeviceName::Cuda(3))]
        {
            assert_eq!(text.parse(), Ok(device));
            assert_eq!(device.to_string().parse(), Ok(device));
        }
        for text in ["", "gpu", "CPU", "cuda:", "cuda:x", "cuda:+1", "cuda:-1"] {
            assert_eq!(text.parse::<DeviceName>(), Err(DeviceError::UnknownName { found: text.to_owned() }));
        }
    }

    #[test]
    fn the_cpu_is_always_there() {
        assert_eq!(DeviceName::Cpu.open(), Ok(Device::Cpu));
    }

    #[test]
    fn a_device_that_is_not_there_is_named() {
        let error = DeviceName::Cuda(1_000).open().unwrap_err();
        match cuda_devices() {
            Ok(devices) => assert_eq!(error, DeviceError::NoSuchDevice { wanted: 1_000, found: devices.len() }),
            Err(reason) => assert_eq!(error, reason),
        }
    }

    #[test]
    fn messages_say_what_to_do() {
        let none = DeviceError::NoDriver.to_string();
        assert_eq!(none, "no NVIDIA driver on this machine, which has the cpu alone");
        let beyond = DeviceError::NoSuchDevice { wanted: 2, found: 1 }.to_string();
        assert!(beyond.contains("only 1 CUDA devices"), "{beyond}");
    }
}
