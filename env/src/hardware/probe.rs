//! Measures the roofline of the machine at hand, which traces are measured on.

use std::time::Instant;

use tch::{Device, Kind, TchError, Tensor};

use super::Roofline;

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
        println!("{host:?}");
        assert!(host.flops_per_s > host.memory_bytes_per_s / 4.0, "a product reuses what it reads: {host:?}");
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
