//! A dense layer, evaluated for some candidates at once: a column for each.
//!
//! The columns are what vector registers hold, so that a layer of any width wastes nothing. Each sum is made in the order of
//! the inputs, and each product is added with one rounding: the bits are the same on every machine, and do not depend on
//! which candidates are computed together.

use super::Dense;

/// Candidates computed together: one vector of AVX-512, two of AVX2.
pub(super) const CANDIDATES: usize = 16;
/// Outputs computed together, which hide each other's latencies.
const OUTPUTS: usize = 8;

/// A dense layer, its weights in panels of [`OUTPUTS`] outputs, the last one padded with zeros.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    inputs: usize,
    /// Whether the greater of zero and each output is taken.
    rectifies: bool,
    /// `[panels, inputs, OUTPUTS]`.
    weights: Vec<[f32; OUTPUTS]>,
    /// `[panels, OUTPUTS]`.
    bias: Vec<[f32; OUTPUTS]>,
}

impl Layer {
    pub(super) fn new(layer: &Dense, rectifies: bool) -> Self {
        let (inputs, outputs) = (layer.weights.len() / layer.outputs(), layer.outputs());
        let padded = |values: &[f32], panel: usize| {
            let values = &values[panel * OUTPUTS..outputs.min((panel + 1) * OUTPUTS)];
            let mut padded = [0.0; OUTPUTS];
            padded[..values.len()].copy_from_slice(values);
            padded
        };
        let (panels, rows) = (outputs.div_ceil(OUTPUTS), layer.weights.chunks_exact(outputs));
        Layer {
            inputs,
            rectifies,
            weights: (0..panels).flat_map(|panel| rows.clone().map(move |row| padded(row, panel))).collect(),
            bias: (0..panels).map(|panel| padded(&layer.bias, panel)).collect(),
        }
    }

    /// Outputs with their padding.
    pub(super) fn width(&self) -> usize {
        self.bias.len() * OUTPUTS
    }

    /// Writes `input · weights + bias`, rectified or not, to `out`, which is `[width, CANDIDATES]`. What `input` has beyond
    /// the layer's inputs is padding.
    pub(super) fn forward(&self, input: &[[f32; CANDIDATES]], out: &mut [[f32; CANDIDATES]]) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx512f") {
                // SAFETY: the processor has what the function asks for.
                return unsafe { vectors::forward_with_avx512(self, input, out) };
            }
            if has!("avx2") && has!("fma") {
                // SAFETY: the processor has what the function asks for.
                return unsafe { vectors::forward_with_avx2(self, input, out) };
            }
        }
        self.forward_plainly(input, out);
    }

    fn forward_plainly(&self, input: &[[f32; CANDIDATES]], out: &mut [[f32; CANDIDATES]]) {
        let panels = self.weights.chunks_exact(self.inputs).zip(&self.bias);
        for ((panel, bias), out) in panels.zip(out.as_chunks_mut::<OUTPUTS>().0) {
            *out = bias.map(|bias| [bias; CANDIDATES]);
            for (weights, values) in panel.iter().zip(input) {
                for (sums, &weight) in out.iter_mut().zip(weights) {
                    for (sum, &value) in sums.iter_mut().zip(values) {
                        *sum = weight.mul_add(value, *sum);
                    }
                }
            }
            if self.rectifies {
                out.iter_mut().flatten().for_each(|sum| *sum = sum.max(0.0));
            }
        }
    }
}

/// The same in vectors, written out, so that the sums stay in registers from the first input to the last.
#[cfg(target_arch = "x86_64")]
mod vectors {
    use std::arch::x86_64::*;
    use std::mem::transmute;

    use super::{CANDIDATES, Layer, OUTPUTS};

    macro_rules! forward {
        ($name:ident, $features:literal, $vector:ty, $outputs:literal: $splat:ident, $multiply_add:ident, $max:ident) => {
            /// [`Layer::forward`], so many outputs at a time.
            #[target_feature(enable = $features)]
            pub(super) fn $name(layer: &Layer, input: &[[f32; CANDIDATES]], out: &mut [[f32; CANDIDATES]]) {
                const VECTORS: usize = CANDIDATES * size_of::<f32>() / size_of::<$vector>();
                const { assert!(OUTPUTS.is_multiple_of($outputs)) };
                let floor = $splat(if layer.rectifies { 0.0 } else { f32::NEG_INFINITY });
                let panels = layer.weights.chunks_exact(layer.inputs).zip(&layer.bias);
                for ((panel, bias), out) in panels.zip(out.as_chunks_mut::<OUTPUTS>().0) {
                    for first in (0..OUTPUTS).step_by($outputs) {
                        let mut sums = [[$splat(0.0); VECTORS]; $outputs];
                        for output in 0..$outputs {
                            sums[output] = [$splat(bias[first + output]); VECTORS];
                        }
                        for (weights, values) in panel.iter().zip(input) {
                            // SAFETY: both are as many floats.
                            let values = unsafe { transmute::<[f32; CANDIDATES], [$vector; VECTORS]>(*values) };
                            for output in 0..$outputs {
                                let weight = $splat(weights[first + output]);
                                for vector in 0..VECTORS {
                                    let sum = &mut sums[output][vector];
                                    *sum = $multiply_add(weight, values[vector], *sum);
                                }
                            }
                        }
                        for output in 0..$outputs {
                            let rectified = sums[output].map(|sum| $max(sum, floor));
                            // SAFETY: both are as many floats.
                            let floats = unsafe { transmute::<[$vector; VECTORS], [f32; CANDIDATES]>(rectified) };
                            out[first + output] = floats;
                        }
                    }
                }
            }
        };
    }

    forward!(forward_with_avx512, "avx512f", __m512, 8: _mm512_set1_ps, _mm512_fmadd_ps, _mm512_max_ps);
    forward!(forward_with_avx2, "avx2,fma", __m256, 4: _mm256_set1_ps, _mm256_fmadd_ps, _mm256_max_ps);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SplitMix64;

    #[test]
    fn vectors_of_every_width_make_the_same_bits() {
        let mut random = SplitMix64::new(5);
        for (inputs, outputs, rectifies) in [(1, 1, false), (25, 48, true), (48, 2, false), (7, 100, true)] {
            let mut draw = |count: usize| (0..count).map(|_| random.unit() * 2.0 - 1.0).collect::<Vec<f32>>();
            let layer = Layer::new(&Dense { weights: draw(inputs * outputs), bias: draw(outputs) }, rectifies);
            let input: Vec<_> = (0..inputs + 3).map(|_| draw(CANDIDATES).try_into().unwrap()).collect();
            let [mut plain, mut wide] = [(); 2].map(|()| vec![[f32::NAN; CANDIDATES]; layer.width()]);
            layer.forward_plainly(&input, &mut plain);
            assert!(!rectifies || plain.iter().flatten().all(|&value| value >= 0.0));
            layer.forward(&input, &mut wide);
            assert_eq!(plain, wide);
            #[cfg(target_arch = "x86_64")]
            if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
                wide.fill([f32::NAN; CANDIDATES]);
                // SAFETY: the processor has what the function asks for.
                unsafe { vectors::forward_with_avx2(&layer, &input, &mut wide) };
                assert_eq!(plain, wide);
            }
        }
    }
}
