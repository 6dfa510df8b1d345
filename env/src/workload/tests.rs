//! What every workload promises.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::{Device, Tensor};

use super::*;

/// libtorch's generator is shared by the whole process.
fn one_at_a_time() -> MutexGuard<'static, ()> {
    static RUNNING: Mutex<()> = Mutex::new(());
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn gpt() -> WorkloadConfig {
    WorkloadConfig::Gpt(GptConfig {
        layers: 2,
        width: 32,
        heads: 2,
        sequence: 32,
        batch: 8,
        dropout: 0.1,
        learning_rate: 3e-3,
    })
}

fn cifar() -> WorkloadConfig {
    WorkloadConfig::Resnet(ResnetConfig {
        arch: Arch::Cifar,
        depth: Some(8),
        width: Some(8),
        classes: 4,
        image_size: 16,
        batch: 32,
        learning_rate: 0.05,
        momentum: 0.9,
    })
}

fn vision() -> WorkloadConfig {
    WorkloadConfig::Resnet(ResnetConfig {
        arch: Arch::Resnet18,
        depth: None,
        width: None,
        classes: 4,
        image_size: 32,
        batch: 8,
        learning_rate: 0.01,
        momentum: 0.9,
    })
}

fn train(workload: &mut dyn Workload, iterations: usize) -> Vec<f64> {
    (0..iterations).map(|_| workload.iteration().unwrap()).collect()
}

/// The bits of every variable, by name.
fn bits(workload: &dyn Workload) -> Vec<(String, Vec<u32>)> {
    let bits = |tensor: &Tensor| {
        let values = Vec::<f32>::try_from(tensor.flatten(0, -1)).unwrap();
        values.into_iter().map(f32::to_bits).collect()
    };
    workload.variables().into_iter().map(|(name, tensor)| (name, bits(&tensor))).collect()
}

#[test]
fn the_same_seed_gives_the_same_bits() {
    let _running = one_at_a_time();
    for config in [gpt(), cifar(), vision()] {
        let mut first = config.build("first", Device::Cpu, 7).unwrap();
        let mut second = config.build("second", Device::Cpu, 7).unwrap();
        // In turn, so that neither may depend on what the other draws.
        let losses: Vec<_> = (0..4).map(|_| (first.iteration().unwrap(), second.iteration().unwrap())).collect();
        assert!(losses.iter().all(|(first, second)| first.to_bits() == second.to_bits()), "{losses:?}");
        assert_eq!(bits(&*first), bits(&*second));
    }
}

#[test]
fn another_seed_gives_other_bits() {
    let _running = one_at_a_time();
    for config in [gpt(), cifar()] {
        let mut first = config.build("first", Device::Cpu, 7).unwrap();
        let mut second = config.build("second", Device::Cpu, 8).unwrap();
        assert_ne!(train(&mut *first, 1), train(&mut *second, 1));
    }
}

#[test]
fn every_workload_learns() {
    let _running = one_at_a_time();
    for config in [gpt(), cifar(), vision()] {
        let losses = train(&mut *config.build("learner", Device::Cpu, 1).unwrap(), 40);
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        let (first, last) = (mean(&losses[..5]), mean(&losses[35..]));
        assert!(last < 0.85 * first, "the loss went from {first} to {last}");
    }
}

#[test]
fn variables_are_the_models_own() {
    let _running = one_at_a_time();
    let mut workload = cifar().build("cifar", Device::Cpu, 1).unwrap();
    let held = workload.variables();
    let before = bits(&*workload);
    train(&mut *workload, 1);
    let after = bits(&*workload);
    assert!(before.iter().zip(&after).all(|(before, after)| before.1 != after.1), "training changes every variable");
    let read_again: Vec<f32> = (&held[0].1.flatten(0, -1)).try_into().unwrap();
    assert_eq!(read_again.into_iter().map(f32::to_bits).collect::<Vec<_>>(), after[0].1);
    assert!(held.iter().any(|(name, _)| name.ends_with("running_mean")));
    assert_eq!(workload.trainable().len(), held.iter().filter(|(_, tensor)| tensor.requires_grad()).count());
}

#[test]
fn implausible_sizes_are_named() {
    let WorkloadConfig::Gpt(good) = gpt() else { unreachable!() };
    let refused = |bad: GptConfig| WorkloadConfig::Gpt(bad).validate().unwrap_err().key;
    assert_eq!(gpt().validate(), Ok(()));
    assert_eq!(refused(GptConfig { heads: 5, ..good.clone() }), "heads");
    assert_eq!(refused(GptConfig { layers: 0, ..good.clone() }), "layers");
    assert_eq!(refused(GptConfig { sequence: 1 << 40, ..good.clone() }), "sequence");
    assert_eq!(refused(GptConfig { dropout: 1.0, ..good.clone() }), "dropout");
    assert_eq!(refused(GptConfig { learning_rate: f64::NAN, ..good }), "learning_rate");

    let WorkloadConfig::Resnet(good) = cifar() else { unreachable!() };
    let refused = |bad: ResnetConfig| WorkloadConfig::Resnet(bad).validate().unwrap_err().key;
    assert_eq!(cifar().validate(), Ok(()));
    assert_eq!(refused(ResnetConfig { depth: Some(21), ..good.clone() }), "depth");
    assert_eq!(refused(ResnetConfig { depth: None, ..good.clone() }), "depth");
    assert_eq!(refused(ResnetConfig { arch: Arch::Resnet18, ..good.clone() }), "depth");
    assert_eq!(refused(ResnetConfig { batch: 1, ..good }), "batch");
}
