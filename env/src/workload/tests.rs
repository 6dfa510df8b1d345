//! What every workload promises.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::Device;

use super::*;

/// libtorch's generator is shared by the whole process.
pub(crate) fn one_at_a_time() -> MutexGuard<'static, ()> {
    static RUNNING: Mutex<()> = Mutex::new(());
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A tiny member of every family, by what it is.
const TINY: &str = r#"
gpt = { family = "gpt", layers = 2, width = 32, heads = 2, sequence = 32, batch = 8, dropout = 0.1, learning_rate = 3e-3 }
gpt-lengths = { family = "gpt", layers = 2, width = 32, heads = 2, shortest = 8, sequence = 32, batch = 8, dropout = 0.1, learning_rate = 3e-3 }
gpt-layer-drop = { family = "gpt", layers = 3, layer_drop = 0.3, width = 32, heads = 2, sequence = 32, batch = 8, dropout = 0.1, learning_rate = 3e-3 }
bert = { family = "bert", layers = 2, width = 32, heads = 2, sequence = 32, batch = 8, dropout = 0.1, learning_rate = 3e-3 }
vit = { family = "vit", layers = 2, width = 32, heads = 2, patch = 4, image_size = 16, classes = 4, batch = 32, dropout = 0.0, learning_rate = 3e-3 }
lstm = { family = "lstm", layers = 2, width = 32, sequence = 32, batch = 8, dropout = 0.1, learning_rate = 1e-2 }
cifar = { family = "resnet", arch = "cifar", depth = 8, width = 8, classes = 4, image_size = 16, batch = 16, learning_rate = 0.05, momentum = 0.9 }
resnet18 = { family = "resnet", arch = "resnet18", classes = 4, image_size = 32, batch = 8, learning_rate = 0.002, momentum = 0.9 }
vgg = { family = "vgg", arch = "small", depth = 7, width = 8, classes = 4, image_size = 16, batch = 16, learning_rate = 0.05, momentum = 0.9 }
densenet = { family = "densenet", arch = "small", depth = 10, width = 8, classes = 4, image_size = 16, batch = 16, learning_rate = 0.05, momentum = 0.9 }
mobilenet = { family = "mobilenet", arch = "mobilenet-v2", classes = 2, image_size = 48, batch = 8, learning_rate = 0.02, momentum = 0.5 }
squeezenet = { family = "inception", arch = "squeezenet-1.1", classes = 2, image_size = 48, batch = 16, learning_rate = 0.001, momentum = 0.9 }
unet = { family = "unet", depth = 2, width = 8, image_size = 16, batch = 8, learning_rate = 1e-2 }
autoencoder = { family = "autoencoder", depth = 2, width = 8, image_size = 16, batch = 8, penalty = 0.1, learning_rate = 1e-2 }
"#;

/// Nets of `tch::vision` that take long, on the smallest pictures that they take.
const LARGE: &str = r#"
alexnet = { family = "vgg", arch = "alexnet", classes = 4, image_size = 127, batch = 2, learning_rate = 1e-4, momentum = 0.9 }
vgg11 = { family = "vgg", arch = "vgg11", classes = 4, image_size = 224, batch = 2, learning_rate = 1e-4, momentum = 0.9 }
densenet121 = { family = "densenet", arch = "densenet121", classes = 4, image_size = 224, batch = 2, learning_rate = 1e-5, momentum = 0.9 }
efficientnet-b0 = { family = "mobilenet", arch = "efficientnet-b0", classes = 4, image_size = 32, batch = 2, learning_rate = 0.01, momentum = 0.9 }
inception-v3 = { family = "inception", arch = "inception-v3", classes = 4, image_size = 75, batch = 2, learning_rate = 0.01, momentum = 0.9 }
squeezenet-1_0 = { family = "inception", arch = "squeezenet-1.0", classes = 4, image_size = 32, batch = 2, learning_rate = 0.005, momentum = 0.9 }
"#;

fn configs(text: &str) -> BTreeMap<String, WorkloadConfig> {
    toml::from_str(text).unwrap_or_else(|error| panic!("{error}"))
}

/// The tiny member of that name.
pub(crate) fn tiny(name: &str) -> WorkloadConfig {
    configs(TINY).remove(name).unwrap()
}

fn build(config: &WorkloadConfig, seed: u64) -> Box<dyn Workload> {
    assert_eq!(config.validate(), Ok(()));
    config.build("a-name", Device::Cpu, seed).unwrap()
}

fn train(workload: &mut dyn Workload, iterations: usize) -> Vec<f64> {
    (0..iterations).map(|_| workload.iteration().unwrap()).collect()
}

#[test]
fn there_is_a_tiny_member_of_every_family() {
    let families: Vec<Family> = configs(TINY).values().map(WorkloadConfig::family).collect();
    for family in Family::ALL {
        assert!(families.contains(family), "{family}");
    }
}

#[test]
fn the_same_seed_gives_the_same_bits() {
    let _running = one_at_a_time();
    for (name, config) in configs(TINY) {
        let [mut first, mut second] = [7, 7].map(|seed| build(&config, seed));
        // In turn, so that neither may depend on what the other draws.
        for _ in 0..3 {
            let (first, second) = (first.iteration().unwrap(), second.iteration().unwrap());
            assert_eq!(first.to_bits(), second.to_bits(), "{name}");
        }
        assert!(bits(&first).unwrap() == bits(&second).unwrap(), "{name}");
    }
}

#[test]
fn another_seed_gives_other_bits() {
    let _running = one_at_a_time();
    for (name, config) in configs(TINY) {
        let [mut first, mut second] = [7, 8].map(|seed| build(&config, seed));
        assert_ne!(train(&mut *first, 1), train(&mut *second, 1), "{name}");
    }
}

#[test]
fn every_workload_learns() {
    let _running = one_at_a_time();
    for (name, config) in configs(TINY) {
        let losses = train(&mut *build(&config, 3), 40);
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        let (first, last) = (mean(&losses[..5]), mean(&losses[35..]));
        println!("{name}: {first} to {last}");
        assert!(last < 0.85 * first, "{name}: the loss went from {first} to {last}");
    }
}

#[test]
fn training_changes_every_variable_and_variables_are_the_models_own() {
    let _running = one_at_a_time();
    for (name, config) in configs(TINY) {
        let mut workload = build(&config, 1);
        let (held, before) = (workload.variables(), bits(&workload).unwrap());
        // While its bias is near 0, the scale of a normalisation that another one follows has next to no gradient.
        train(&mut *workload, 5);
        let after = bits(&workload).unwrap();
        for ((variable, before), (_, after)) in before.iter().zip(&after) {
            assert!(before != after, "{name}: {variable} stays as it was");
        }
        for ((variable, earlier), (_, now)) in held.iter().zip(workload.variables()) {
            assert_eq!(earlier.data_ptr(), now.data_ptr(), "{name}: {variable} is a copy");
        }
        assert_eq!(workload.trainable().len(), held.iter().filter(|(_, tensor)| tensor.requires_grad()).count());
        let has_norms = !matches!(
            name.as_str(),
            "gpt" | "gpt-lengths" | "gpt-layer-drop" | "bert" | "vit" | "lstm" | "squeezenet" | "autoencoder"
        );
        assert_eq!(held.iter().any(|(name, _)| name.ends_with("running_mean")), has_norms, "{name}");
    }
}

#[test]
fn nets_of_tch_train_with_a_gradient_for_every_parameter() {
    let _running = one_at_a_time();
    for (name, config) in configs(LARGE) {
        let mut workload = build(&config, 1);
        let losses = train(&mut *workload, 2);
        println!("{name}: {losses:?}");
        assert!(losses.iter().all(|loss| loss.is_finite()), "{name}: {losses:?}");
        for (index, parameter) in workload.trainable().iter().enumerate() {
            assert!(parameter.grad().defined(), "{name}: parameter {index} of {:?} has no gradient", parameter.size());
        }
    }
}

/// A tiny member with another value for a key.
fn with(name: &str, key: &str, value: impl Into<toml::Value>) -> WorkloadConfig {
    let mut tables: BTreeMap<String, toml::Table> = toml::from_str(&(TINY.to_owned() + LARGE)).unwrap();
    let mut table = tables.remove(name).unwrap();
    table.insert(key.to_owned(), value.into());
    toml::Value::Table(table).try_into().unwrap()
}

#[test]
fn an_operator_that_fails_is_an_error_of_the_iteration() {
    let _running = one_at_a_time();
    for (name, key, value) in [
        ("gpt", "heads", 5),
        ("vit", "patch", 5),
        ("unet", "image_size", 18),
        ("autoencoder", "image_size", 18),
        ("densenet", "image_size", 2),
        ("inception-v3", "image_size", 40),
    ] {
        let mut workload = with(name, key, value).build(name, Device::Cpu, 1).unwrap();
        assert!(workload.iteration().is_err(), "{name} with {key} = {value}");
    }
}

#[test]
fn implausible_values_are_named() {
    let refused = |name: &str, key: &str, value: toml::Value| {
        let found = with(name, key, value.clone()).validate().err().map(|implausible| implausible.key);
        assert_eq!(found, Some(key), "{name} with {key} = {value}");
    };
    for (name, key, value) in [
        ("gpt", "heads", 5),
        ("gpt", "layers", 0),
        ("gpt", "sequence", 1 << 20),
        ("bert", "batch", -1),
        ("bert", "heads", 3),
        ("vit", "patch", 5),
        ("vit", "classes", 0),
        ("lstm", "width", 0),
        ("cifar", "depth", 21),
        ("cifar", "width", 0),
        ("cifar", "batch", 1),
        ("resnet18", "depth", 20),
        ("vgg", "depth", 6),
        ("vgg11", "image_size", 256),
        ("densenet", "depth", 4),
        ("densenet121", "image_size", 223),
        ("mobilenet", "width", 8),
        ("squeezenet", "image_size", 31),
        ("inception-v3", "image_size", 74),
        ("unet", "image_size", 18),
        ("unet", "depth", 0),
        ("autoencoder", "image_size", 18),
    ] {
        refused(name, key, value.into());
    }
    for (name, key, value) in [
        ("gpt", "dropout", 1.0),
        ("gpt", "layer_drop", 1.0),
        ("gpt", "learning_rate", f64::NAN),
        ("lstm", "dropout", -0.1),
        ("vgg", "momentum", 1.0),
        ("unet", "learning_rate", 0.0),
        ("autoencoder", "penalty", -1.0),
    ] {
        refused(name, key, value.into());
    }
    let mut incomplete: toml::Table = toml::from_str::<BTreeMap<String, toml::Table>>(TINY).unwrap()["cifar"].clone();
    incomplete.remove("depth");
    let incomplete: WorkloadConfig = toml::Value::Table(incomplete).try_into().unwrap();
    assert_eq!(incomplete.validate().unwrap_err().key, "depth");
}

#[test]
fn flops_follow_the_structure() {
    let flops = |name: &str, key: &str, value: i64| with(name, key, value).flops();
    for (name, key, small, large, times) in [
        ("gpt", "layers", 2, 4, 2.0..2.1),
        ("bert", "batch", 8, 16, 2.0..2.1),
        ("vit", "width", 32, 64, 3.0..4.0),
        ("lstm", "width", 32, 64, 4.0..4.1),
        ("cifar", "depth", 8, 20, 2.0..3.0),
        ("vgg", "width", 8, 16, 4.0..4.1),
        ("densenet", "depth", 10, 16, 2.0..4.0),
        ("mobilenet", "image_size", 32, 64, 4.0..4.1),
        ("unet", "width", 8, 16, 4.0..4.1),
        ("autoencoder", "image_size", 16, 32, 4.0..4.1),
    ] {
        let found = flops(name, key, large) / flops(name, key, small);
        assert!(times.contains(&found), "{name} with {key} = {large} takes {found} times as much");
    }
}
