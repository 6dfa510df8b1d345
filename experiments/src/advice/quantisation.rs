//! What quantised swapping would cost: copies of fewer bytes, for time to make them fewer and to make them whole again.
//!
//! Rounding changes a training loop's results, so Plimsoll never does it; the method is predicted, for comparison.

use std::time::Instant;

use plimsoll_runtime::Link;
use serde::Serialize;
use tch::{Kind, TchError, Tensor};

/// Elements of the tensor that is measured: 4 MiB.
const ELEMENTS: i64 = 1 << 20;
const ROUNDS: usize = 9;

/// A form in which 32-bit floating-point numbers are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// 16-bit floating point: half the bytes.
    Half,
    /// 8-bit integers and one scale for each storage: a quarter of the bytes.
    Int8,
}

impl Form {
    /// Bytes that are copied for each byte of the storage.
    pub const fn share(self) -> f64 {
        match self {
            Form::Half => 0.5,
            Form::Int8 => 0.25,
        }
    }

    fn shrink(self, tensor: &Tensor) -> Result<(Tensor, f64), TchError> {
        match self {
            Form::Half => Ok((tensor.f_to_kind(Kind::Half)?, 1.0)),
            Form::Int8 => {
                let scale = tensor.f_abs()?.f_max()?.f_double_value(&[])? / 127.0;
                let scaled = tensor.f_multiply_scalar(1.0 / scale)?.f_round()?;
                Ok((scaled.f_to_kind(Kind::Int8)?, scale))
            }
        }
    }

    fn restore(self, shrunk: &Tensor, scale: f64) -> Result<Tensor, TchError> {
        let whole = shrunk.f_to_kind(Kind::Float)?;
        if self == Form::Half { Ok(whole) } else { whole.f_multiply_scalar(scale) }
    }

    /// Compute time that this machine needs for each byte of the storage: to shrink it and to restore it, the fastest of
    /// several rounds.
    pub fn probe(self) -> Result<Cost, TchError> {
        let tensor = Tensor::f_randn([ELEMENTS], (Kind::Float, tch::Device::Cpu))?;
        let bytes = (4 * ELEMENTS) as f64;
        let mut fastest = Cost { shrink_ns_per_byte: f64::INFINITY, restore_ns_per_byte: f64::INFINITY };
        for _ in 0..ROUNDS {
            let started = Instant::now();
            let (shrunk, scale) = self.shrink(&tensor)?;
            let shrink_ns = started.elapsed().as_nanos() as f64;
            let started = Instant::now();
            let _restored = self.restore(&shrunk, scale)?;
            let restore_ns = started.elapsed().as_nanos() as f64;
            fastest.shrink_ns_per_byte = fastest.shrink_ns_per_byte.min(shrink_ns / bytes);
            fastest.restore_ns_per_byte = fastest.restore_ns_per_byte.min(restore_ns / bytes);
        }
        Ok(fastest)
    }

    /// A link that copies storages in this form: more storage bytes per second, each of which costs compute its share
    /// of the copy and the mean of shrinking and restoring, since a link tells one from the other as little as a copy's
    /// contention does.
    pub fn over(self, link: Link, cost: Cost) -> Link {
        let convert_ns_per_byte = (cost.shrink_ns_per_byte + cost.restore_ns_per_byte) / 2.0;
        Link {
            offload_bytes_per_s: link.offload_bytes_per_s / self.share(),
            prefetch_bytes_per_s: link.prefetch_bytes_per_s / self.share(),
            contention_ns_per_byte: link.contention_ns_per_byte * self.share() + convert_ns_per_byte,
            ..link
        }
    }
}

/// Compute time of quantisation, in nanoseconds for each byte of the storage.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Cost {
    /// To shrink it.
    pub shrink_ns_per_byte: f64,
    /// To restore it.
    pub restore_ns_per_byte: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restored_values_are_as_near_as_their_form_allows() {
        let tensor = Tensor::from_slice(&[-3.0f32, -0.3, 0.0, 0.1, 2.5]);
        for (form, most) in [(Form::Half, 2e-3), (Form::Int8, 3.0 / 127.0 / 2.0 + 1e-6)] {
            let (shrunk, scale) = form.shrink(&tensor).unwrap();
            let bytes = shrunk.kind().elt_size_in_bytes() as f64;
            assert_eq!(bytes / 4.0, form.share(), "{form:?}");
            let error = (form.restore(&shrunk, scale).unwrap() - &tensor).abs().max().double_value(&[]);
            assert!(error <= most, "{form:?}: {error}");
        }
    }

    #[test]
    fn a_quantised_link_copies_faster_and_costs_compute_more() {
        let link = Link { contention_ns_per_byte: 0.4, ..Link::symmetric(1e9, 5) };
        let cost = Cost { shrink_ns_per_byte: 0.3, restore_ns_per_byte: 0.1 };
        let quantised = Form::Int8.over(link, cost);
        assert_eq!(quantised.offload_ns(4_000), 5 + 1_000);
        assert_eq!(quantised.contention_ns(1_000), 300);
    }
}
