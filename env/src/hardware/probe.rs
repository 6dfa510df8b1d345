//! Measures the roofline of the machine at hand, which traces are measured on.

use std::time::Instant;

use plimsoll_runtime::Link;
use plimsoll_runtime::torch::device::Engines;
use tch::{Device, Kind, TchError, Tensor};

use super::{HardwareProfile, Precision, Roofline};

/// Rounds of each measurement, of which the fastest counts: a roofline is what a machine does at best.
const ROUNDS: usize = 20;
/// Rows of a square matrix: large enough to be multiplied at full speed.
const MATRIX: i64 = 768;
/// Numbers that are copied: their bytes fit the caches of a core, because that is the fastest that bytes can move.
const COPIED: i64 = 1 << 16;
/// Numbers that a small operator adds.
const TINY: i64 = 8;

impl Roofline {
    /// What this machine does at best in 32 bits, as measured now by a matrix product, a copy and a tiny addition.
    ///
    /// It takes a fraction of a second. Other programs that run meanwhile make it slower than it is.
    pub fn of_host() -> Result<Self, TchError> {
        let random = |shape: &[i64]| Tensor::f_rand(shape, (Kind::Float, Device::Cpu));
        let (left, right, mut product) =
            (random(&[MATRIX, MATRIX])?, random(&[MATRIX, MATRIX])?, random(&[MATRIX, MATRIX])?);
        let product_s = fastest_s(1, || Tensor::f_mm_out(&product, &left, &right).map(drop))?;
        product = random(&[TINY])?;
        let launch_s = fastest_s(256, || product.f_add_scalar_(1.0).map(drop))?;
        let (source, mut target) = (random(&[COPIED])?, random(&[COPIED])?);
        let copy_s = fastest_s(64, || target.f_copy_(&source))?;
        let multiply_adds = (MATRIX * MATRIX * MATRIX) as f64;
        Ok(Roofline {
            flops_per_s: 2.0 * multiply_adds / (product_s - launch_s).max(f64::MIN_POSITIVE),
            memory_bytes_per_s: 2.0 * 4.0 * COPIED as f64 / (copy_s - launch_s).max(f64::MIN_POSITIVE),
            launch_overhead_ns: launch_s * 1e9,
            runs_ahead: false,
        })
    }
}

/// Seconds that `run` takes once: the least mean over `times` runs.
fn fastest_s(times: u32, mut run: impl FnMut() -> Result<(), TchError>) -> Result<f64, TchError> {
    let mut fastest = f64::INFINITY;
    for _ in 0..ROUNDS {
        let started = Instant::now();
        (0..times).try_for_each(|_| run())?;
        fastest = fastest.min(started.elapsed().as_secs_f64() / f64::from(times));
    }
    Ok(fastest)
}

/// Rows of a square matrix on an accelerator.
const MATRIX_ON_ACCELERATOR: i64 = 8192;
/// Bytes that are copied within an accelerator's memory: beyond any cache.
const COPIED_ON_ACCELERATOR: i64 = 1 << 30;

impl HardwareProfile {
    /// What `device` does at best, measured now; `link` is what its copies were measured to take.
    pub fn measure(name: &str, device: Device, engines: &Engines, link: Link) -> Result<Self, TchError> {
        let (rooflines, runs_ahead) = match device {
            Device::Cpu => (vec![(Precision::F32, Roofline::of_host()?)], false),
            device => (of_accelerator(device, engines)?, true),
        };
        let (_, first) = rooflines[0];
        Ok(HardwareProfile {
            name: name.to_owned(),
            flops_per_s: rooflines.iter().map(|(precision, roofline)| (*precision, roofline.flops_per_s)).collect(),
            memory_bytes_per_s: first.memory_bytes_per_s,
            launch_overhead_ns: first.launch_overhead_ns,
            runs_ahead,
            link,
        })
    }
}

/// Rooflines by how numbers are held. Matrix units that read 19 bits of 32 are not asked for: they are a setting of the
/// whole process.
fn of_accelerator(device: Device, engines: &Engines) -> Result<Vec<(Precision, Roofline)>, TchError> {
    let settled = |times: u32, mut run: Box<dyn FnMut() -> Result<(), TchError> + '_>| {
        fastest_s(1, || {
            (0..times).try_for_each(|_| run())?;
            engines.settle();
            Ok(())
        })
        .map(|seconds| seconds / f64::from(times))
    };
    let tiny = Tensor::f_zeros([TINY], (Kind::Float, device))?;
    let launch_s = settled(1024, Box::new(|| tiny.f_add_scalar(1.0).map(drop)))?;
    let source = Tensor::f_zeros([COPIED_ON_ACCELERATOR], (Kind::Uint8, device))?;
    let mut target = source.f_zeros_like()?;
    let copy_s = settled(4, Box::new(move || target.f_copy_(&source)))?;
    let memory_bytes_per_s = 2.0 * COPIED_ON_ACCELERATOR as f64 / copy_s;
    let multiply_adds = (MATRIX_ON_ACCELERATOR as f64).powi(3);
    [(Precision::F32, Kind::Float), (Precision::Bf16, Kind::BFloat16), (Precision::F16, Kind::Half)]
        .into_iter()
        .map(|(precision, kind)| {
            let side = MATRIX_ON_ACCELERATOR;
            let factor = Tensor::f_rand([side, side], (Kind::Float, device))?.f_to_kind(kind)?;
            let product = factor.f_zeros_like()?;
            let product_s = settled(2, Box::new(|| Tensor::f_mm_out(&product, &factor, &factor).map(drop)))?;
            let flops_per_s = 2.0 * multiply_adds / product_s;
            let launch_overhead_ns = 1e9 * launch_s;
            Ok((precision, Roofline { flops_per_s, memory_bytes_per_s, launch_overhead_ns, runs_ahead: true }))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use plimsoll_runtime::torch::Session;

    use super::*;
    use crate::hardware::project;
    use crate::recording::record;
    use crate::workload::tests::{one_at_a_time, tiny};

    #[test]
    fn a_recorded_loop_projected_to_this_machine_takes_the_time_that_it_took() {
        let _running = one_at_a_time();
        let host = Roofline::of_host().unwrap();
        let session = Session::install().unwrap();
        let mut workload = tiny("gpt").build("gpt", Device::Cpu, 1).unwrap();
        let (trace, _) = record(session, workload.as_mut(), 3, "cpu").unwrap();
        let projected = project(&trace, &host, &host);
        for (projected, measured) in projected.operators.iter().zip(&trace.operators) {
            let error_ns = projected.cost_ns.abs_diff(measured.cost_ns) as f64;
            assert!(error_ns <= host.launch_overhead_ns + 1.0, "{} ns is {error_ns} ns off", measured.cost_ns);
        }
        assert_eq!(projected.fingerprint(), trace.fingerprint());
    }
}
