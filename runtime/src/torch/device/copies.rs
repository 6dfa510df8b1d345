//! Measures what copies between a device and its slow tier take: by size, alone and beside compute.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, TchError, Tensor};

use super::{EngineError, Engines};
use crate::Link;
use crate::hardware::Tier;
use crate::torch::{CopyEngine, CopyError, DeviceBytes, HostEngine};

/// Rounds of each measurement, of which the fastest counts; the first gets the memory. There are fewer where those after it take long.
const ROUNDS: usize = 5;
const ROUNDS_TAKE: Duration = Duration::from_millis(50);
/// Bytes that one round copies at least, so that a small copy is not timed alone.
const ROUND_BYTES: usize = 64 << 20;
/// Most copies of a round.
const COPIES_MAX: usize = 32;
/// A round that takes less is made longer, where there is room for it: its clock tells too little.
const ROUND_LEAST_S: f64 = 5e-3;
/// Rows of the square matrices that are multiplied meanwhile.
const MATRIX: i64 = 1024;
/// Bytes of copies that tell what queueing them takes, and how many of them go each way: a device's queue holds a thousand things,
/// operators in between among them.
const QUEUED_BYTES: usize = 4 << 10;
const QUEUED: usize = 60;
/// Operators between a copy and who waits for it.
const OPERATORS_BETWEEN: usize = 4;

/// Why copies could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum CopyProbeError {
    /// There is no engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A copy failed.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// The device has no room, or cannot compute.
    #[error(transparent)]
    Torch(#[from] TchError),
}

/// What copies of one size take.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CopyRates {
    /// Bytes of one copy.
    pub bytes: u64,
    /// Bytes per second from the device, nothing else going on.
    pub offload_bytes_per_s: f64,
    /// Bytes per second to the device, nothing else going on.
    pub prefetch_bytes_per_s: f64,
    /// Bytes per second from the device while it multiplies matrices.
    pub offload_beside_compute_bytes_per_s: f64,
    /// Bytes per second to the device while it multiplies matrices.
    pub prefetch_beside_compute_bytes_per_s: f64,
    /// Compute time that every copied byte costs, in nanoseconds.
    pub contention_ns_per_byte: f64,
}

/// What copies take, by size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CopyTable {
    /// One row for each size, least first.
    pub rates: Vec<CopyRates>,
    /// What it takes the host to queue a copy among operators, and to have compute wait for it, in nanoseconds; nothing where the
    /// host makes the copies.
    pub queueing_ns: u64,
}

/// Which way a copy goes.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Out,
    Back,
}

/// Of a device's measured bandwidth, plans reckon with so much. The fastest plans let copies end just as compute needs what they bring,
/// by the times that operators took when they were recorded. A host that issues them a little faster than then makes compute wait for
/// each of those copies, and one that is slower gains nothing.
const RECKONED_SHARE: f64 = 0.9;

impl CopyTable {
    /// Sizes that tell latency from bandwidth.
    const LINK_SIZES: [usize; 2] = [64 << 10, 32 << 20];
    /// Sizes that storages of today's models have.
    pub const SIZES: [usize; 6] = [64 << 10, 256 << 10, 1 << 20, 8 << 20, 64 << 20, 256 << 20];

    /// Measures copies of `sizes` bytes each, which ascend, between `device` and its slow tier.
    pub fn measure(engines: &Engines, device: Device, sizes: &[usize]) -> Result<Self, CopyProbeError> {
        let mut bed = Bed::new(engines, device)?;
        let rates = sizes.iter().map(|&bytes| bed.rates(bytes)).collect::<Result<_, _>>()?;
        Ok(CopyTable { rates, queueing_ns: bed.queueing_ns()? })
    }

    /// The link between `device` and its slow tier that plans reckon with, measured now.
    pub fn reckoned_link(engines: &Engines, device: Device) -> Result<Link, CopyProbeError> {
        match device {
            Device::Cpu => Ok(HostEngine::probe()?),
            device => Ok(Self::measure(engines, device, &Self::LINK_SIZES)?.link(device).at_share(RECKONED_SHARE)),
        }
    }

    /// The link that fits best: bandwidth and contention of the largest copies, the time that the smallest take beyond it, and what it
    /// takes to queue one. The host copies a slab at once, a device each storage of it.
    pub fn link(&self, device: Device) -> Link {
        let (least, most) = (self.rates.first().expect("sizes"), self.rates.last().expect("sizes"));
        let (out, back) = (most.offload_bytes_per_s, most.prefetch_bytes_per_s);
        let latency_s = |rate: f64, bandwidth: f64| (least.bytes as f64 * (1.0 / rate - 1.0 / bandwidth)).max(0.0);
        let latency_s = latency_s(least.offload_bytes_per_s, out).max(latency_s(least.prefetch_bytes_per_s, back));
        let ns = (1e9 * latency_s) as u64;
        let (latency_ns, each_ns) = if device == Device::Cpu { (ns, 0) } else { (0, ns) };
        Link {
            offload_bytes_per_s: out,
            prefetch_bytes_per_s: back,
            latency_ns,
            each_ns,
            contention_each_ns: self.queueing_ns,
            contention_ns_per_byte: most.contention_ns_per_byte,
        }
    }
}

/// What measurements are made with.
struct Bed<'a> {
    engine: Box<dyn CopyEngine>,
    engines: &'a Engines,
    device: Device,
    /// A matrix, and what it takes to multiply it by itself.
    factor: Tensor,
    product_s: f64,
}

impl<'a> Bed<'a> {
    fn new(engines: &'a Engines, device: Device) -> Result<Self, CopyProbeError> {
        // Nothing is drawn: the program's own random numbers stay those that it would draw without us.
        let numbers = Tensor::f_arange(MATRIX * MATRIX, (Kind::Float, device))?;
        let factor = numbers.f_sin()?.f_reshape([MATRIX, MATRIX])?;
        let mut bed = Bed { engine: engines.engine(None)?, engines, device, factor, product_s: 0.0 };
        let nothing = Tensor::f_zeros([1], (Kind::Uint8, device))?;
        bed.product_s = bed.fastest(&nothing, 0, Way::Out, 4)? / 4.0;
        Ok(bed)
    }

    fn rates(&mut self, bytes: usize) -> Result<CopyRates, CopyProbeError> {
        let [(out_s, out_beside_s, out_cost_s), (back_s, back_beside_s, back_cost_s)] =
            [self.way(bytes, Way::Out)?, self.way(bytes, Way::Back)?];
        let rate = |seconds: f64| bytes as f64 / seconds.max(f64::MIN_POSITIVE);
        Ok(CopyRates {
            bytes: bytes as u64,
            offload_bytes_per_s: rate(out_s),
            prefetch_bytes_per_s: rate(back_s),
            offload_beside_compute_bytes_per_s: rate(out_beside_s),
            prefetch_beside_compute_bytes_per_s: rate(back_beside_s),
            contention_ns_per_byte: 1e9 * 0.5 * (out_cost_s + back_cost_s) / bytes as f64,
        })
    }

    /// Seconds of one copy, alone and beside compute, and those that it costs compute.
    fn way(&mut self, bytes: usize, way: Way) -> Result<(f64, f64, f64), CopyProbeError> {
        let mut copies = (ROUND_BYTES / bytes).clamp(1, COPIES_MAX);
        let device = Tensor::f_zeros([bytes as i64], (Kind::Uint8, self.device))?;
        let mut alone_s = self.fastest(&device, copies, way, 0)?;
        let more = ((copies as f64 * ROUND_LEAST_S / alone_s).ceil() as usize).min(COPIES_MAX);
        if more > copies
            && let Ok(longer_s) = self.fastest(&device, more, way, 0)
        {
            (copies, alone_s) = (more, longer_s);
        }
        // Half as long as the copies, then twice: the one shows what compute takes from copies, the other the reverse.
        let product_s = self.product_s;
        let products_in = |seconds: f64| ((seconds / product_s).ceil() as usize).clamp(1, 1000);
        let beside_s = self.fastest(&device, copies, way, products_in(alone_s / 2.0))?;
        let many = products_in(2.0 * alone_s);
        let (compute_s, both_s) = (self.fastest(&device, 0, way, many)?, self.fastest(&device, copies, way, many)?);
        let each = |seconds: f64| seconds / copies as f64;
        let cost_s = each((both_s - compute_s).max(0.0));
        // A device is not at its pace from the first product on.
        self.product_s = product_s.min(compute_s / many as f64);
        Ok((each(alone_s), each(beside_s.max(alone_s)), cost_s))
    }

    /// Seconds of the fastest round of [`Bed::both`].
    fn fastest(&mut self, device: &Tensor, copies: usize, way: Way, products: usize) -> Result<f64, CopyProbeError> {
        let mut fastest_s = self.both(device, copies, way, products)?;
        let started = Instant::now();
        for _ in 1..ROUNDS {
            fastest_s = fastest_s.min(self.both(device, copies, way, products)?);
            if started.elapsed() > ROUNDS_TAKE {
                break;
            }
        }
        Ok(fastest_s)
    }

    /// What it takes the host to queue one copy among operators, on a device that works through both later. None where another thread
    /// copies.
    fn queueing_ns(&mut self) -> Result<u64, CopyProbeError> {
        if self.device == Device::Cpu {
            return Ok(0);
        }
        let bytes = Tensor::f_zeros([QUEUED_BYTES as i64], (Kind::Uint8, self.device))?;
        let small = Tensor::f_zeros([1], (Kind::Float, self.device))?;
        let mut fastest_s = [f64::INFINITY; 2];
        for _ in 0..ROUNDS {
            for (copies, fastest_s) in [false, true].into_iter().zip(&mut fastest_s) {
                *fastest_s = fastest_s.min(self.among_operators(&bytes, &small, copies)?);
            }
        }
        let [operators_s, both_s] = fastest_s;
        Ok((1e9 * (both_s - operators_s).max(0.0) / (2 * QUEUED) as f64) as u64)
    }

    /// Queues operators, and copies out and back among them or not. Seconds until all is queued: a device may have other programs to
    /// work for.
    fn among_operators(&mut self, bytes: &Tensor, small: &Tensor, copies: bool) -> Result<f64, CopyProbeError> {
        let start: *mut u8 = bytes.data_ptr().cast();
        // Enough of them that a copy is done when it is waited for.
        let operators = || (0..OPERATORS_BETWEEN).try_for_each(|_| small.f_relu().map(drop));
        self.engines.settle();
        let started = Instant::now();
        for _ in 0..QUEUED {
            if copies {
                // SAFETY: the tensor lives, and nothing but these copies uses it.
                let (kept, ticket) =
                    unsafe { self.engine.offload(&[DeviceBytes { start, bytes: QUEUED_BYTES }], Tier::Host) }?;
                operators()?;
                self.engine.wait(&ticket)?;
                // SAFETY: as above.
                let ticket = unsafe { self.engine.prefetch(&[(&kept[0], start)]) }?;
                operators()?;
                self.engine.wait(&ticket)?;
                drop(kept);
            } else {
                operators()?;
                operators()?;
            }
        }
        Ok(started.elapsed().as_secs_f64())
    }

    /// Makes `copies` copies of all of a tensor and, meanwhile, `products` products. Seconds until all is done.
    fn both(&mut self, device: &Tensor, copies: usize, way: Way, products: usize) -> Result<f64, CopyProbeError> {
        let (start, bytes): (*mut u8, _) = (device.data_ptr().cast(), device.numel());
        let mut kept = Vec::new();
        if way == Way::Back && copies > 0 {
            // SAFETY: the tensor lives, and nothing writes it until the copy has been waited for.
            let (copy, ticket) = unsafe { self.engine.offload(&[DeviceBytes { start, bytes }], Tier::Host) }?;
            self.engine.wait(&ticket)?;
            kept.extend(copy);
        }
        self.engines.settle();
        let started = Instant::now();
        let mut tickets = Vec::with_capacity(copies);
        for _ in 0..copies {
            match way {
                Way::Out => {
                    // SAFETY: as above.
                    let (copy, ticket) = unsafe { self.engine.offload(&[DeviceBytes { start, bytes }], Tier::Host) }?;
                    kept.extend(copy);
                    tickets.push(ticket);
                }
                Way::Back => {
                    // SAFETY: nothing reads the tensor until the copies have been waited for; what they write is one
                    // and the same.
                    tickets.push(unsafe { self.engine.prefetch(&[(&kept[0], start)]) }?);
                }
            }
        }
        for _ in 0..products {
            drop(self.factor.f_mm(&self.factor)?);
        }
        tickets.iter().try_for_each(|ticket| self.engine.wait(ticket))?;
        self.engines.settle();
        let elapsed_s = started.elapsed().as_secs_f64();
        drop(kept);
        Ok(elapsed_s)
    }
}
