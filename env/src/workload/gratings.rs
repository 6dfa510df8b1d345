//! Pictures whose class is the direction of their stripes.

use std::f32::consts::{PI, TAU};

use rand::{Rng, RngExt};
use rand_distr::{Distribution, StandardNormal};
use tch::{Device, TchError, Tensor};

use super::training::Batch;

/// Stripes across the width of a picture.
const STRIPES: f32 = 4.0;
/// Standard deviation of the noise; the stripes have amplitude one.
const NOISE: f32 = 0.5;
/// How strongly each colour channel shows the stripes.
const CHANNELS: [f32; 3] = [1.0, 0.7, -0.4];

/// A source of pictures with labels that can be learnt.
pub(super) struct Gratings {
    classes: usize,
    size: usize,
}

/// Pictures and their classes.
pub(super) struct PictureBatch {
    /// Row-major `[batch, 3, size, size]`.
    pub pixels: Vec<f32>,
    /// `[batch]`.
    pub labels: Vec<i64>,
}

impl Gratings {
    /// Square pictures of `size` pixels a side, in so many classes.
    pub fn new(classes: i64, size: i64) -> Self {
        Gratings { classes: classes as usize, size: size as usize }
    }

    /// Draws new pictures, `[batch, 3, size, size]`, and their classes, `[batch]`.
    pub fn batch(&self, draw: &mut impl Rng, batch: i64, device: Device) -> Result<Batch, TchError> {
        let cut = self.cut(draw, batch as usize);
        let shape = [batch, 3, self.size as i64, self.size as i64];
        let inputs = Tensor::f_from_slice(&cut.pixels)?.f_view(shape)?.f_to_device(device)?;
        Ok(Batch::new(inputs, Tensor::f_from_slice(&cut.labels)?.f_to_device(device)?))
    }

    /// Draws `batch` new pictures. Class, phase and noise are random; the class sets the direction.
    pub fn cut(&self, draw: &mut impl Rng, batch: usize) -> PictureBatch {
        let mut cut =
            PictureBatch { pixels: Vec::with_capacity(batch * 3 * self.size * self.size), labels: Vec::new() };
        for _ in 0..batch {
            let class = draw.random_range(0..self.classes);
            let stripes = self.stripes(class, draw.random_range(0.0..TAU));
            for channel in CHANNELS {
                cut.pixels.extend(stripes.iter().map(|stripe| {
                    let noise: f32 = StandardNormal.sample(draw);
                    channel * stripe + NOISE * noise
                }));
            }
            cut.labels.push(class as i64);
        }
        cut
    }

    /// The stripes of one picture, `[size, size]`, between −1 and 1.
    fn stripes(&self, class: usize, phase: f32) -> Vec<f32> {
        let (sin, cos) = (PI * class as f32 / self.classes as f32).sin_cos();
        let step = TAU * STRIPES / self.size as f32;
        let pixels = (0..self.size).flat_map(|y| (0..self.size).map(move |x| (x as f32, y as f32)));
        pixels.map(|(x, y)| (step * (x * cos + y * sin) + phase).sin()).collect()
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    use super::*;

    #[test]
    fn a_batch_has_its_shape_and_its_seed() {
        let gratings = Gratings::new(10, 16);
        let draw = |seed| gratings.cut(&mut ChaCha8Rng::seed_from_u64(seed), 5);
        assert_eq!(draw(1).pixels.len(), 5 * 3 * 16 * 16);
        assert!(draw(1).labels.iter().all(|label| (0..10).contains(label)));
        assert_eq!(draw(1).pixels, draw(1).pixels);
        assert_ne!(draw(1).pixels, draw(2).pixels);
    }
}
