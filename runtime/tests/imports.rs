//! Files that PyTorch wrote of one training step of a small net (convolution, batch-norm, ReLU, linear layer, SGD with
//! momentum; made for this test) become the trace that the step was.

use plimsoll_runtime::import::pytorch_trace::{ImportError, Times, read};
use plimsoll_runtime::lineage::Lineage;
use plimsoll_runtime::trace::{AccessMode, Class, OperatorId, Phase, StorageId};
use plimsoll_runtime::{Link, Plan, Timeline, Trace};

const EXECUTION: &[u8] = include_bytes!("../../tests/data/pytorch/execution.json");
const KINETO: &[u8] = include_bytes!("../../tests/data/pytorch/kineto.json");

/// Elements: convolution 8 × 3 × 3 × 3 without and 8 with bias, batch-norm 8 + 8, linear layer 10 × 2048 + 10.
const PARAMETERS: u64 = 8 * 27 + 8 + 8 + 8 + 10 * 2048 + 10;
/// Running mean and variance, and the 64-bit count of batches.
const BUFFERS_BYTES: u64 = 4 * (8 + 8) + 8;
/// What leaves the convolution and the ReLU: 16 × 8 × 16 × 16.
const MAP_BYTES: u64 = 4 * 16 * 8 * 16 * 16;

fn step() -> Trace {
    read(EXECUTION, Some(&Times::read(KINETO).unwrap()), "step", "pytorch").unwrap()
}

fn bytes(trace: &Trace, class: Class) -> u64 {
    trace.storages.iter().filter(|storage| storage.class == class).map(|storage| storage.bytes).sum()
}

fn operator<'a>(trace: &'a Trace, name: &str) -> (usize, &'a plimsoll_runtime::trace::Operator) {
    let named = |index: &usize| trace.operator_name(OperatorId(*index as u32)) == name;
    let index = (0..trace.operators.len()).find(named).unwrap_or_else(|| panic!("{name} is missing"));
    (index, &trace.operators[index])
}

#[test]
fn every_storage_is_as_large_as_it_was_and_for_what_it_was() {
    let trace = step();
    assert_eq!(bytes(&trace, Class::Parameter), 4 * PARAMETERS + BUFFERS_BYTES);
    assert_eq!(bytes(&trace, Class::OptimizerState), 4 * PARAMETERS);
    assert_eq!(bytes(&trace, Class::Gradient), 4 * PARAMETERS);
    let maps = trace.storages.iter().filter(|storage| storage.class == Class::Activation && storage.bytes == MAP_BYTES);
    // The batch-norm's result is not among them: the ReLU alone reads it, and what it makes of it is kept.
    assert_eq!(maps.count(), 2);
    assert_eq!((trace.device.as_str(), trace.workload.as_str()), ("cpu", "step"));
}

#[test]
fn operators_stand_in_their_order_in_their_phase_and_views_are_left_out() {
    let trace = step();
    let phases: Vec<Phase> = trace.operators.iter().map(|operator| operator.phase).collect();
    let rank = |phase: &Phase| [Phase::Forward, Phase::Backward, Phase::Update].iter().position(|other| other == phase);
    assert!(phases.is_sorted_by_key(rank) && phases.contains(&Phase::Update));
    let named =
        |name: &str| (0..trace.operators.len()).any(|index| trace.operator_name(OperatorId(index as u32)) == name);
    // What a layer calls inside is no operator of its own.
    assert!(named("aten::linear") && !named("aten::addmm"));
    assert!(
        ["aten::t", "aten::view", "aten::flatten", "aten::detach", "aten::reshape"].iter().all(|view| !named(view))
    );
}

#[test]
fn lives_and_uses_are_those_of_the_step() {
    let trace = step();
    let (forward, convolution) = operator(&trace, "aten::conv2d");
    let (backward, gradients) = operator(&trace, "aten::convolution_backward");
    let [map] = convolution.creates[..] else { panic!("{convolution:?}") };
    let (_, norm) = operator(&trace, "aten::batch_norm");
    assert!(norm.accesses.iter().any(|access| access.storage == map && access.mode == AccessMode::Read));
    assert_eq!(norm.accesses.iter().filter(|access| access.mode == AccessMode::SideEffect).count(), 2);
    let freed_by = |storage: StorageId| trace.operators.iter().position(|operator| operator.frees.contains(&storage));
    let (norm_backward, _) = operator(&trace, "aten::native_batch_norm_backward");
    assert_eq!(freed_by(map), Some(norm_backward), "the batch-norm's backward pass is the last to read it");
    // The input outlives the step; the convolution's backward pass reads it, and makes gradients of weight and bias.
    let input = convolution.accesses[0].storage;
    assert!(input.0 < trace.initial_storages && forward < backward && freed_by(input).is_none());
    assert!(gradients.accesses.iter().any(|access| access.storage == input));
    assert_eq!(gradients.creates.len(), 2);
    // Each parameter is written once, by the optimizer.
    let written = |storage: StorageId| {
        let accesses = trace.operators.iter().flat_map(|operator| &operator.accesses);
        accesses.filter(|access| access.storage == storage && access.mode.writes()).count()
    };
    let weight = convolution.accesses[1].storage;
    assert_eq!((trace.storages[weight.index()].bytes, written(weight)), (4 * 8 * 27, 1));
}

#[test]
fn times_come_from_the_profiler_and_add_up() {
    let trace = step();
    let lineage = Lineage::of(&trace);
    assert_eq!(trace.makespan_ns, lineage.keep_all_makespan_ns());
    assert_eq!(operator(&trace, "aten::conv2d").1.cost_ns, 378_282);
    let untimed = read(EXECUTION, None, "step", "pytorch").unwrap();
    assert_eq!((untimed.makespan_ns, untimed.peak_bytes), (0, trace.peak_bytes));
    let prediction = Timeline::new(&trace, &lineage, Link::symmetric(1e9, 0))
        .predict(&Plan::keep_all(lineage.windows().len()), u64::MAX);
    assert_eq!(prediction.peak_bytes, trace.peak_bytes);
}

#[test]
fn kernels_count_where_there_are_any() {
    // As on a GPU: each call of the step's first operators starts kernels later, and nothing else takes time.
    let kernel = |external: u64, ts: f64, dur: f64| {
        format!(r#"{{"ph":"X","cat":"kernel","name":"k","ts":{ts},"dur":{dur},"args":{{"External id":{external}}}}}"#)
    };
    let calls = std::str::from_utf8(KINETO).unwrap().strip_suffix("]}").expect("the events end the file");
    let late = 5e12;
    // 5 is called by the convolution, 10 is the count of batches, and 14 is the batch-norm's own.
    let kernels = [
        kernel(5, late, 40.0),
        kernel(5, late + 50.0, 10.0),
        kernel(10, late + 70.0, 5.0),
        kernel(14, late + 72.0, 20.0),
    ];
    let times = Times::read(format!("{calls},{}]}}", kernels.join(",")).as_bytes()).unwrap();
    let trace = read(EXECUTION, Some(&times), "step", "pytorch").unwrap();
    let found: Vec<_> = trace.operators[..4].iter().map(|operator| (operator.gap_ns, operator.cost_ns)).collect();
    assert_eq!(found, [(0, 60_000), (10_000, 5_000), (0, 17_000), (0, 0)]);
}

#[test]
fn other_files_are_refused() {
    let refusal = |json: &[u8]| read(json, None, "", "").unwrap_err().to_string();
    assert!(refusal(b"{").starts_with("not an execution trace"));
    assert!(refusal(KINETO).starts_with("not an execution trace"));
    assert!(refusal(br#"{"nodes":[]}"#).contains("no ATen operator among its 0 nodes"));
    // Each claims that the other has called it.
    let node = |id: u32, caller: u32| {
        format!(
            r#"{{"id":{id},"name":"aten::relu","ctrl_deps":{caller},"inputs":{{"values":[],"shapes":[],"strides":[]}},
                "outputs":{{"values":[],"shapes":[],"strides":[]}},
                "attrs":[{{"name":"op_schema","type":"string","value":"aten::relu(Tensor self) -> Tensor"}}]}}"#
        )
    };
    let circle = format!(r#"{{"nodes":[{},{}]}}"#, node(1, 2), node(2, 1));
    assert!(read(circle.as_bytes(), None, "", "").is_ok_and(|trace| trace.operators.len() <= 1));
    assert!(Times::read(EXECUTION).unwrap_err().to_string().starts_with("not a trace of PyTorch's profiler"));
    let times = Times::read(br#"{"traceEvents":[]}"#).unwrap();
    match read(EXECUTION, Some(&times), "", "") {
        Err(ImportError::Untimed { missing: 33, operators: 33, name, record: 2 }) => assert_eq!(name, "aten::conv2d"),
        other => panic!("{other:?}"),
    }
}
