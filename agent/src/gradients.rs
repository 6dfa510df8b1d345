//! The gradient as one vector over all parameters.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use rayon::prelude::*;

/// Transitions that one thread takes through the networks together: few enough that their activations stay
/// in its cache.
pub(crate) const SHARD_TRANSITIONS: usize = 16;

/// The loss, or its gradient, became infinite or undefined.
#[derive(Debug, PartialEq)]
pub(crate) struct Diverged;

/// Scales the gradient of `model` down to a norm of at most `norm_max`, and returns the norm it had.
///
/// burn's own clipping takes each parameter's norm by itself, which changes the gradient's direction.
pub(crate) fn clip_norm<M: Module>(gradients: &mut GradientsParams, model: &M, norm_max: f64) -> Result<f64, Diverged> {
    let mut squares = SumOfSquares { gradients, sum: 0.0 };
    model.visit(&mut squares);
    let norm = squares.sum.sqrt();
    if !norm.is_finite() {
        return Err(Diverged);
    }
    if norm > norm_max {
        model.visit(&mut Scale { gradients, factor: norm_max / norm });
    }
    Ok(norm)
}

/// What shards told beside their losses, each with its share of the minibatch.
pub(crate) type Told<T> = Vec<(T, f64)>;

/// The gradient of the mean loss over a minibatch, that mean, and what else each shard told with its share of the
/// minibatch.
///
/// It is the sum over shards of a fixed size, so that it has the same bits however many threads there
/// are. Each thread has a fork of the model: gradients recorded on one graph would wait for each other.
pub(crate) fn of_shards<M, S, T>(
    model: &M,
    device: &Device,
    minibatch: &[S],
    loss: impl Fn(&M, &[S]) -> (Tensor<1>, T) + Sync,
) -> Result<(GradientsParams, f64, Told<T>), Diverged>
where
    M: Module + Sync,
    S: Sync,
    T: Send,
{
    let shards = minibatch.par_chunks(SHARD_TRANSITIONS).map(|shard| {
        let model = model.clone().fork(device);
        let share = shard.len() as f64 / minibatch.len() as f64;
        let (loss, told) = loss(&model, shard);
        let value = f64::from(loss.clone().into_scalar::<f32>());
        if !value.is_finite() {
            return Err(Diverged);
        }
        Ok((GradientsParams::from_grads((loss * share).backward(), &model), value, told, share))
    });
    let (mut gradients, mut mean, mut told) = (GradientsParams::new(), 0.0, Vec::new());
    for (of_shard, value, told_by_shard, share) in shards.collect::<Result<Vec<_>, Diverged>>()? {
        accumulate(&mut gradients, of_shard, model);
        mean += value * share;
        told.push((told_by_shard, share));
    }
    Ok((gradients, mean, told))
}

/// Adds one gradient of `model` to another.
fn accumulate<M: Module>(sum: &mut GradientsParams, other: GradientsParams, model: &M) {
    model.visit(&mut Add { sum, other });
}

struct Add<'a> {
    sum: &'a mut GradientsParams,
    other: GradientsParams,
}

impl ModuleVisitor for Add<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(other) = self.other.remove::<D>(param.id) {
            let sum = match self.sum.remove::<D>(param.id) {
                Some(sum) => sum + other,
                None => other,
            };
            self.sum.register(param.id, sum);
        }
    }
}

struct SumOfSquares<'a> {
    gradients: &'a GradientsParams,
    sum: f64,
}

impl ModuleVisitor for SumOfSquares<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.get::<D>(param.id) {
            self.sum += f64::from(gradient.square().sum().into_scalar::<f32>());
        }
    }
}

struct Scale<'a> {
    gradients: &'a mut GradientsParams,
    factor: f64,
}

impl ModuleVisitor for Scale<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.remove::<D>(param.id) {
            self.gradients.register(param.id, gradient.mul_scalar(self.factor));
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;

    use super::*;

    /// Its loss is the sum of `weights · [3, 0]` and `bias · 4`: a gradient of norm 5.
    #[derive(Module, Debug)]
    struct Line {
        weights: Param<Tensor<1>>,
        bias: Param<Tensor<1>>,
    }

    fn line(device: &Device) -> Line {
        let param = |values: Vec<f32>| {
            let length = values.len();
            Param::from_data(TensorData::new(values, [length]), device)
        };
        Line { weights: param(vec![1.0, 2.0]), bias: param(vec![0.5]) }
    }

    fn gradients(line: &Line, slope: f32, device: &Device) -> GradientsParams {
        let slope: Tensor<1> = Tensor::from_data(TensorData::from([slope, 0.0]), device);
        let loss = (line.weights.val() * slope).sum() + line.bias.val() * 4.0;
        GradientsParams::from_grads(loss.backward(), line)
    }

    #[test]
    fn the_norm_is_taken_over_all_parameters_together() {
        let device = Device::flex().autodiff();
        let line = line(&device);
        let mut sum = gradients(&line, 3.0, &device);
        assert_eq!(clip_norm(&mut sum, &line, 10.0).unwrap(), 5.0);
        accumulate(&mut sum, gradients(&line, 3.0, &device), &line);
        assert_eq!(clip_norm(&mut sum, &line, 2.5).unwrap(), 10.0);
        let clipped = |id| sum.get::<1>(id).unwrap().into_data().try_into_vec::<f32>().unwrap();
        assert_eq!((clipped(line.weights.id), clipped(line.bias.id)), (vec![1.5, 0.0], vec![2.0]));
    }

    #[test]
    fn a_gradient_that_is_not_finite_is_refused() {
        let device = Device::flex().autodiff();
        let line = line(&device);
        for slope in [f32::NAN, f32::INFINITY, 1e30] {
            assert_eq!(clip_norm(&mut gradients(&line, slope, &device), &line, 1.0), Err(Diverged), "{slope}");
        }
    }
}
