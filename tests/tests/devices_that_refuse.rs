//! What a CUDA device refuses is no other bits and no lost loop: one that is not there, see `tests/stand_in/`.

use plimsoll_runtime::ActionSet;
use plimsoll_runtime::torch::device::{Engines, cuda_devices};
use plimsoll_runtime::torch::{Budget, Runtime, Session};
use plimsoll_tests::fast_link;
use plimsoll_tests::stand_in::{before_late_device, open};
use tch::{Device, Kind, TchError, Tensor};

const FOLDER: &str = env!("CARGO_TARGET_TMPDIR");
const ITERATIONS: usize = 6;

/// Trains on the same input, by steps against the gradient.
struct Loop<F> {
    parameters: Vec<Tensor>,
    forward: F,
}

impl<F: Fn(&[Tensor]) -> Result<Tensor, TchError>> Loop<F> {
    fn new(parameters: usize, shape: &[i64], device: Device, forward: F) -> Self {
        tch::manual_seed(7);
        let made = (0..parameters).map(|_| Tensor::randn(shape, (Kind::Float, device)).set_requires_grad(true));
        Loop { parameters: made.collect(), forward }
    }

    fn iterate(&mut self) -> Result<f64, TchError> {
        self.parameters.iter_mut().for_each(Tensor::zero_grad);
        let loss = (self.forward)(&self.parameters)?;
        loss.f_backward()?;
        tch::no_grad(|| {
            for parameter in &mut self.parameters {
                let _ = parameter.f_sub_(&parameter.grad().f_mul_scalar(0.01)?)?;
            }
            loss.f_double_value(&[])
        })
    }

    /// What all parameters come to.
    fn state(&self) -> Vec<u64> {
        self.parameters.iter().map(|parameter| parameter.sum(Kind::Double).double_value(&[]).to_bits()).collect()
    }
}

/// What an untouched loop comes to, and takes at the most and between iterations.
struct Untouched {
    state: Vec<u64>,
    peak_bytes: u64,
    resident_bytes: u64,
}

impl Untouched {
    fn of<F: Fn(&[Tensor]) -> Result<Tensor, TchError>>(session: Session, mut training: Loop<F>) -> Self {
        session.reset_peak();
        for _ in 0..ITERATIONS {
            training.iterate().unwrap();
        }
        let (state, peak_bytes) = (training.state(), session.peak_bytes());
        Untouched { state, peak_bytes, resident_bytes: session.live_bytes() }
    }
}

/// A loop within a budget: whether it ended as the untouched one did. Every tensor can be read in any case.
fn trains<F: Fn(&[Tensor]) -> Result<Tensor, TchError>>(
    mut runtime: Runtime,
    mut training: Loop<F>,
    untouched: &Untouched,
) -> Result<(), String> {
    for _ in 0..ITERATIONS {
        let iteration = runtime.try_iteration().map_err(|error| error.to_string())?;
        let iterated = training.iterate().map_err(|error| error.to_string().lines().next().unwrap_or("").to_owned());
        if let Err(why) = iterated {
            drop(iteration);
            assert!(training.state().iter().all(|&state| f64::from_bits(state).is_finite()), "{why}");
            return Err(why);
        }
    }
    assert_eq!(training.state(), untouched.state, "other bits\n{}", runtime.report());
    Ok(())
}

fn runtime(device: Device, engines: &Engines, baseline: &str, actions: ActionSet, bytes: u64) -> Runtime {
    let builder = Runtime::builder().device(device).baseline(baseline).actions(actions).budget(Budget::bytes(bytes));
    builder.engine(engines.engine(None).unwrap()).link(fast_link()).build().unwrap()
}

/// cuDNN does a convolution in another way where it gets no workspace, and libtorch lets it.
#[test]
fn a_convolution_without_its_workspace_is_an_error() {
    before_late_device("a_convolution_without_its_workspace_is_an_error", FOLDER, 11, |name| {
        let (device, session, engines) = open(name);
        let make = || {
            let input = Tensor::ones([2, 4, 16, 16], (Kind::Float, device));
            let forward = move |kernels: &[Tensor]| {
                let mut made = input.shallow_clone();
                for kernel in kernels {
                    made = made.f_conv2d(kernel, None::<Tensor>, 1, 1, 1, 1)?.f_tanh()?;
                }
                made.f_mean(Kind::Float)
            };
            Loop::new(6, &[4, 4, 3, 3], device, forward)
        };
        let untouched = Untouched::of(session, make());
        let mut refused = Vec::new();
        for bytes in (untouched.resident_bytes..=untouched.peak_bytes).rev().step_by(4 << 10) {
            if let Err(why) = trains(runtime(device, &engines, "dtr", ActionSet::ALL, bytes), make(), &untouched) {
                assert!(why.contains(&format!("the budget of {bytes} bytes")), "{why}");
                refused.push(bytes);
            }
        }
        // A budget that has room for all but the workspace is among them.
        let span = refused.first().unwrap() - refused.last().unwrap();
        assert!(span > 24 << 10, "{refused:?} of {} bytes", untouched.peak_bytes);
    });
}

/// Before the backward pass somebody else takes memory: the line has room, and the device has not.
#[test]
fn what_was_swapped_comes_back_at_others_expense() {
    before_late_device("what_was_swapped_comes_back_at_others_expense", FOLDER, 12, |name| {
        let (device, session, engines) = open(name);
        let total_bytes = cuda_devices().unwrap()[0].total_memory_bytes;
        let make = |left_bytes: u64| {
            let input = Tensor::ones([1 << 20], (Kind::Float, device));
            let forward = move |scales: &[Tensor]| {
                session.set_device_share(1.0).unwrap();
                let mut made = vec![input.shallow_clone()];
                for scale in scales {
                    made.push(made[made.len() - 1].f_mul(scale)?.f_tanh()?);
                }
                // What presses for a while, and gives way to somebody else.
                let ballast = (0..6).map(|_| input.f_ones_like()).collect::<Result<Vec<_>, _>>()?;
                drop(ballast);
                session.empty_device_cache().unwrap();
                session.set_device_share(left_bytes as f64 / total_bytes as f64).unwrap();
                // What has been idle for longest is read, while all the rest waits for the backward pass.
                made[1].f_mul(&made[2])?.f_mean(Kind::Float)?.f_add(&made[scales.len()].f_mean(Kind::Float)?)
            };
            Loop::new(12, &[1], device, forward)
        };
        let untouched = Untouched::of(session, make(total_bytes));
        let swap = ActionSet::SWAP;
        for percent in (10..=100).rev().step_by(10) {
            let runtime = runtime(device, &engines, "capuchin", swap, untouched.peak_bytes * 7 / 10);
            let ended = trains(runtime, make(untouched.peak_bytes * percent / 100), &untouched);
            assert_eq!(ended, Ok(()), "left {percent} %");
        }
    });
}
