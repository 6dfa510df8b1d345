//! What a recorded forward pass leaves for the backward pass is what the literature says it must.
//!
//! Saved storages are those that the forward pass makes and the backward pass uses, each counted once however many views
//! of it are saved, the input included; parameters, buffers and gradients are not made by the forward pass.

use plimsoll_env::recording::record;
use plimsoll_env::workload::{GptConfig, ResnetArch, WorkloadConfig};
use plimsoll_runtime::Trace;
use plimsoll_runtime::trace::Phase;
use plimsoll_tests::{build, one_at_a_time, session, shipped_workload};

/// Records one iteration's trace. Two are the fewest that a trace is made of.
fn recorded(config: &WorkloadConfig) -> Trace {
    record(session(), build(config, 1).as_mut(), 2, "cpu").unwrap().0
}

/// The saved storages: what made each, and its bytes.
fn saved(trace: &Trace) -> Vec<(&str, u64)> {
    let border = trace.operators.iter().position(|operator| operator.phase == Phase::Backward).unwrap();
    let mut used = vec![false; trace.storages.len()];
    for access in trace.operators[border..].iter().flat_map(|operator| &operator.accesses) {
        used[access.storage.index()] = true;
    }
    let made = trace.operators[..border].iter().flat_map(|operator| {
        let name = trace.names[operator.name as usize].as_str();
        operator.creates.iter().map(move |storage| (name, storage))
    });
    made.filter(|(_, storage)| used[storage.index()])
        .map(|(name, storage)| (name, trace.storages[storage.index()].bytes))
        .collect()
}

fn bytes(saved: &[(&str, u64)]) -> u64 {
    saved.iter().map(|(_, bytes)| bytes).sum()
}

fn gpt(layers: i64, sequence: i64, width: i64, heads: i64, batch: i64) -> WorkloadConfig {
    let WorkloadConfig::Gpt(tiny) = shipped_workload("gpt-tiny") else { unreachable!("it is of that family") };
    WorkloadConfig::Gpt(GptConfig { layers, sequence, width, heads, batch, ..tiny })
}

/// "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et al. 2022), section 4.1: a layer saves
/// s·b·h·(34 + 5·a·s/h) bytes, with s the sequence, b the batch, h the width and a the heads. Numbers are of 2 bytes
/// there and of 4 here. Of the 34,
///
/// | what | there | here |
/// |---|---|---|
/// | inputs of both normalisations | 4 | 8 |
/// | input of query, key and value | 2 | 4 |
/// | query and key | 4 | 8 |
/// | value | 2 | 4 |
/// | input of attention's projection | 2 | 4 |
/// | mask of the dropout after attention | 1 | 4 |
/// | input of the perceptron | 2 | 4 |
/// | input of its non-linearity | 8 | 16 |
/// | input of its second layer | 8 | 16 |
/// | mask of the dropout after it | 1 | 4 |
/// | sum | 34 | 72 |
///
/// and of the 5: the softmax 2 and 4, the mask of its dropout 1 and 4, what the dropout leaves 2 and 4; 5 and 12. On this
/// device libtorch's masks are not of one byte, but numbers like those that they are multiplied with. The paper leaves
/// out what normalisations save beside their inputs: mean and deviation of every token, 16·s·b for the two of a layer.
#[test]
fn a_transformer_layer_saves_what_korthikanti_says() {
    let _running = one_at_a_time();
    for [s, h, a, b] in
        [[32, 64, 4, 2], [64, 64, 4, 2], [32, 128, 4, 2], [32, 64, 2, 2], [32, 64, 4, 3], [48, 96, 3, 5]]
    {
        let [fewer, more] = [2, 3].map(|layers| recorded(&gpt(layers, s, h, a, b)));
        let of_a_layer = bytes(&saved(&more)) - bytes(&saved(&fewer));
        let formula = 72 * s * b * h + 12 * a * s * s * b + 16 * s * b;
        assert_eq!(of_a_layer, formula as u64, "s {s}, h {h}, a {a}, b {b}: {:?}", saved(&fewer));
    }
}

/// The activations of ResNet-50 at batch 32 with pictures of 224 by 224, in numbers of 4 bytes, where each convolution
/// saves its input, each normalisation its own, the pool its input and its indices, and rectifiers and sums are in place:
/// 2,621.75 MiB, the input included. `tch`'s net rectifies and adds out of place, which saves the same: what a
/// rectifier makes is what the next layer saves, and what it was made from goes.
///
/// Batches of two and three tell what a picture takes and what does not depend on the batch: 0.2 MiB of means and
/// deviations. What the loss saves, 0.12 MiB, is no activation of the net.
#[test]
fn resnet_50_saves_what_its_layers_say() {
    const MIB: f64 = (1 << 20) as f64;
    let _running = one_at_a_time();
    let WorkloadConfig::Resnet(mut config) = shipped_workload("resnet18-vision") else { unreachable!("it is one") };
    (config.arch, config.image_size, config.classes) = (ResnetArch::Resnet50, 224, 1_000);
    let [two, three] = [2, 3].map(|batch| {
        config.batch = batch;
        recorded(&WorkloadConfig::Resnet(config.clone()))
    });
    let [two, three] = [saved(&two), saved(&three)];
    let of_a_picture = bytes(&three) - bytes(&two);
    let at_32 = bytes(&two) + 30 * of_a_picture;
    let mib = at_32 as f64 / MIB;
    println!("{mib} MiB at batch 32");
    assert!((mib / 2_621.75 - 1.0).abs() < 0.005, "{mib} MiB: {two:?}");
    // A logarithm for every class, and the label.
    let of_the_loss = 4 * config.classes as u64 + 8;
    assert_eq!(32 * (of_a_picture - of_the_loss), (2_621.75 * MIB) as u64, "to the byte, without the loss");
}
