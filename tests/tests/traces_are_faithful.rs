//! A trace says what the loop does: its operators, its peak, and what every storage is for.

use plimsoll_env::workload::WorkloadConfig;
use plimsoll_runtime::trace::Class;
use plimsoll_runtime::{Plan, Timeline, Trace};
use plimsoll_tests::{Recorded, fast_link, one_at_a_time, shipped_workload};
use tch::Tensor;

const WORKLOADS: [&str; 13] = [
    "gpt-tiny",
    "gpt-tiny-fused",
    "bert-tiny",
    "vit-tiny",
    "lstm-tiny",
    "resnet-tiny",
    "resnet-tiny-deep",
    "vgg-tiny",
    "densenet-tiny",
    "mobilenet-tiny",
    "squeezenet-tiny",
    "unet-tiny",
    "autoencoder-tiny",
];

fn size_of(tensor: &Tensor) -> u64 {
    (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64
}

/// Sizes of all storages of a class, ascending.
fn sizes(trace: &Trace, class: Class) -> Vec<u64> {
    let mut sizes: Vec<u64> =
        trace.storages.iter().filter(|storage| storage.class == class).map(|storage| storage.bytes).collect();
    sizes.sort_unstable();
    sizes
}

/// Takes each of `wanted` out of `from`, and fails where one is not there.
fn take_all(mut from: Vec<u64>, wanted: &[u64], what: &str) {
    for bytes in wanted {
        let found = from.iter().position(|other| other == bytes);
        from.remove(found.unwrap_or_else(|| panic!("{what}: a storage of {bytes} bytes is missing among {from:?}")));
    }
}

/// How many times the optimizer keeps as much as the parameters, and the bytes of a batch. Momentum is as large as the
/// parameters; Adam keeps two moments.
fn moments_and_input(config: &WorkloadConfig) -> (usize, u64) {
    let text = |batch: i64, sequence: i64| (2, (batch * sequence * 8) as u64);
    let pictures =
        |moments, batch: i64, channels: i64, size: i64| (moments, (batch * channels * size * size * 4) as u64);
    match config {
        WorkloadConfig::Gpt(config) => text(config.batch, config.sequence),
        WorkloadConfig::Bert(config) => text(config.batch, config.sequence),
        WorkloadConfig::Lstm(config) => text(config.batch, config.sequence),
        WorkloadConfig::Vit(config) => pictures(2, config.batch, 3, config.image_size),
        WorkloadConfig::Unet(config) => pictures(2, config.batch, 1, config.image_size),
        WorkloadConfig::Autoencoder(config) => pictures(2, config.batch, 3, config.image_size),
        WorkloadConfig::Resnet(config) => pictures(1, config.batch, 3, config.image_size),
        WorkloadConfig::Vgg(config) => pictures(1, config.batch, 3, config.image_size),
        WorkloadConfig::Densenet(config) => pictures(1, config.batch, 3, config.image_size),
        WorkloadConfig::Mobilenet(config) => pictures(1, config.batch, 3, config.image_size),
        WorkloadConfig::Inception(config) => pictures(1, config.batch, 3, config.image_size),
    }
}

#[test]
fn the_peak_that_was_measured_is_the_peak_that_is_predicted() {
    let _running = one_at_a_time();
    for name in WORKLOADS {
        let recorded = Recorded::of(&shipped_workload(name), 1);
        let keep_all = Plan::keep_all(recorded.lineage.windows().len());
        let prediction = Timeline::new(&recorded.trace, &recorded.lineage, fast_link()).predict(&keep_all, u64::MAX);
        println!("{name}: measured {}, predicted {}", recorded.trace.peak_bytes, prediction.peak_bytes);
        assert_eq!(recorded.lineage.keep_all_peak_bytes(), recorded.trace.peak_bytes, "{name}");
        assert_eq!(prediction.peak_bytes, recorded.trace.peak_bytes, "{name}");
    }
}

#[test]
fn the_same_loop_gives_the_same_fingerprint_and_another_loop_another() {
    let _running = one_at_a_time();
    let fingerprints: Vec<String> = WORKLOADS
        .iter()
        .map(|name| {
            let config = shipped_workload(name);
            let first = Recorded::of(&config, 1).trace.fingerprint();
            let again = Recorded::of(&config, 2).trace.fingerprint();
            assert_eq!(first, again, "{name}");
            first
        })
        .collect();
    for (index, fingerprint) in fingerprints.iter().enumerate() {
        assert!(!fingerprints[..index].contains(fingerprint), "{} is taken for another loop", WORKLOADS[index]);
    }
}

#[test]
fn a_trace_that_is_saved_and_loaded_is_the_same() {
    let _running = one_at_a_time();
    let folder = tempfile::tempdir().unwrap();
    for name in WORKLOADS {
        let trace = Recorded::of(&shipped_workload(name), 1).trace;
        let path = folder.path().join(name);
        trace.save(&path).unwrap();
        let loaded = Trace::load(&path).unwrap();
        assert_eq!(loaded, trace);
        assert_eq!(loaded.fingerprint(), trace.fingerprint());
    }
}

#[test]
fn every_storage_is_known_for_what_it_is() {
    let _running = one_at_a_time();
    for name in WORKLOADS {
        let config = shipped_workload(name);
        let recorded = Recorded::of(&config, 1);
        let trace = &recorded.trace;
        let parameters: Vec<u64> = recorded.workload.trainable().iter().map(size_of).collect();
        take_all(sizes(trace, Class::Parameter), &parameters, &format!("{name}, parameters"));
        take_all(sizes(trace, Class::Gradient), &parameters, &format!("{name}, gradients"));
        let (moments, input) = moments_and_input(&config);
        take_all(sizes(trace, Class::OptimizerState), &parameters.repeat(moments), &format!("{name}, optimizer"));
        assert!(sizes(trace, Class::Input).contains(&input), "{name}: no input of {input} bytes");
        let activations: u64 = sizes(trace, Class::Activation).iter().sum();
        assert!(activations > input, "{name}: {activations} bytes of activations");
    }
}
