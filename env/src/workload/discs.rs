//! Noisy pictures of discs, and masks that say which pixels are in one.

use rand::{Rng, RngExt};
use rand_distr::{Distribution, StandardNormal};
use tch::{Device, TchError, Tensor};

use super::training::Batch;

/// Discs in a picture; they may overlap.
const DISCS: usize = 3;
/// Least and greatest radius, as a share of the picture's side.
const RADIUS: [f32; 2] = [0.1, 0.3];
/// Standard deviation of the noise; a disc is one brighter than what surrounds it.
const NOISE: f32 = 0.5;

/// Draws pictures `[batch, 1, size, size]`, and masks `[batch, size, size]` that are 1 in a disc and 0 elsewhere.
pub(super) fn discs(draw: &mut impl Rng, batch: i64, size: i64, device: Device) -> Result<Batch, TchError> {
    let mask: Vec<i64> = (0..batch).flat_map(|_| mask(draw, size as usize)).collect();
    let noisy = |&inside: &i64| {
        let noise: f32 = StandardNormal.sample(draw);
        inside as f32 + NOISE * noise
    };
    let pixels: Vec<f32> = mask.iter().map(noisy).collect();
    let inputs = Tensor::f_from_slice(&pixels)?.f_view([batch, 1, size, size])?.f_to_device(device)?;
    Ok(Batch::new(inputs, Tensor::f_from_slice(&mask)?.f_view([batch, size, size])?.f_to_device(device)?))
}

/// The mask of one picture, `[size, size]`.
fn mask(draw: &mut impl Rng, size: usize) -> Vec<i64> {
    let mut disc = || (draw.random::<f32>(), draw.random::<f32>(), draw.random_range(RADIUS[0]..RADIUS[1]));
    let discs: [(f32, f32, f32); DISCS] = std::array::from_fn(|_| disc());
    let inside = |x: f32, y: f32| discs.iter().any(|(at_x, at_y, radius)| (x - at_x).hypot(y - at_y) < *radius);
    let share = |pixel: usize| (pixel as f32 + 0.5) / size as f32;
    (0..size * size).map(|pixel| i64::from(inside(share(pixel % size), share(pixel / size)))).collect()
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    use super::*;

    #[test]
    fn what_is_in_a_disc_is_brighter() {
        let Batch { inputs: pictures, targets: masks, .. } =
            discs(&mut ChaCha8Rng::seed_from_u64(1), 8, 16, Device::Cpu).unwrap();
        assert_eq!((pictures.size(), masks.size()), (vec![8, 1, 16, 16], vec![8, 16, 16]));
        let mean = |inside: i64| pictures.squeeze_dim(1).masked_select(&masks.eq(inside)).mean(None).double_value(&[]);
        let (outside, inside) = (mean(0), mean(1));
        assert!(outside.abs() < 0.1 && (inside - 1.0).abs() < 0.1, "{outside} outside, {inside} inside");
    }
}
