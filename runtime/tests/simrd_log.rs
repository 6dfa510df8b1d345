//! The promise: a log of simrd means what simrd takes it to mean, and one that means nothing is refused by its line.

use plimsoll_runtime::baselines::online::{OnlineRun, Outcome, Program, Rule};
use plimsoll_runtime::import::simrd::Log;
use plimsoll_runtime::trace::{Class, OperatorId, Phase, StorageId};
use plimsoll_runtime::{Lineage, Trace};

/// A small training step: convolution, view, pooling with two results, in-place ReLU, linear layer, and back.
const SMALL: &str = include_str!("data/small.simrd.log");

fn log() -> Log {
    Log::read(SMALL.as_bytes()).expect("the log is lawful")
}

fn trace() -> Trace {
    log().trace("small", "by-hand").expect("the log makes a trace")
}

fn refusal(text: &str) -> String {
    Log::read(text.as_bytes()).expect_err("the log is unlawful").to_string()
}

#[test]
fn a_log_becomes_the_trace_that_it_is_about() {
    let trace = trace();
    let names: Vec<&str> =
        (0..trace.operators.len() as u32).map(|index| trace.operator_name(OperatorId(index))).collect();
    let forward = ["conv", "view", "max_pool2d_backward", "relu_", "linear", "constant", "loss"];
    let backward = ["linear_backward", "pool_backward", "conv_backward", "sum"];
    assert_eq!(names, [&forward[..], &backward[..]].concat());
    let phases: Vec<Phase> = trace.operators.iter().map(|operator| operator.phase).collect();
    assert_eq!(
        phases,
        [[Phase::Forward; 7].as_slice(), &[Phase::Backward; 4]].concat(),
        "by the annotation, not by name"
    );
    assert_eq!(trace.initial_storages, 2, "what stands before START is not there");
    let bytes: Vec<u64> = trace.storages.iter().map(|storage| storage.bytes).collect();
    assert_eq!(bytes, [4096, 8192, 40960, 20480, 4096, 20480, 12288, 512, 4, 20480, 40960, 4096, 8]);
    let class = |storage: usize| trace.storages[storage].class;
    assert_eq!(
        [class(0), class(2), class(3), class(7)],
        [Class::Parameter, Class::Activation, Class::Temporary, Class::Input]
    );
    assert_eq!([class(10), class(11)], [Class::Temporary, Class::Gradient]);
    assert_eq!(trace.operators[3].frees, [StorageId(3)], "a mutation lets go of the old tensor");
    assert_eq!(trace.operators[9].frees, [10, 2].map(StorageId), "a storage lives as long as a view of it");
    assert_eq!(trace.makespan_ns, 100 + 1 + 50 + 10 + 70 + 5 + 80 + 60 + 110 + 3);
    // All up to `pool_backward` but the old `b`, and `c`, `b` and `g` after their last use.
    assert_eq!(trace.peak_bytes, 4096 + 8192 + 40960 + 4096 + 20480 + 40960 + 4);
    assert_eq!(trace.peak_bytes, Lineage::of(&trace).keep_all_peak_bytes());
}

#[test]
fn without_pressure_a_program_runs_as_it_was_logged() {
    let (log, trace) = (log(), trace());
    for rule in Rule::ALL {
        let run = log.program().run(rule, u64::MAX, 0);
        let OnlineRun { outcome, makespan_ns, recompute_ns, evictions, .. } = run;
        assert_eq!((outcome, makespan_ns, recompute_ns, evictions), (Outcome::Held, trace.makespan_ns, 0, 0));
        // Online, nothing ever frees a constant.
        assert_eq!(run.peak_bytes, trace.peak_bytes + 512);
    }
}

#[test]
fn a_view_is_made_again_with_its_storage_and_results_come_back_together() {
    // At `pool_backward` the budget lacks one byte. Only `a` is free to go: `db` and `idx` are in use, `x` and `w` are
    // constants, `l` is small. `conv_backward` then needs `conv` and the view again.
    let (log, trace) = (log(), trace());
    let budget_bytes = trace.peak_bytes + 512 - 1;
    let run = log.program().run(Rule::Largest, budget_bytes, u64::MAX);
    assert_eq!((run.outcome, run.recompute_ns, run.evictions), (Outcome::Held, 100 + 1, 1));
    assert!(run.peak_bytes <= budget_bytes);
}

#[test]
fn too_many_reruns_and_too_few_bytes_are_outcomes() {
    let (log, trace) = (log(), trace());
    let run = log.program().run(Rule::Largest, trace.peak_bytes + 512 - 1, 99);
    assert_eq!(run.outcome, Outcome::Thrashed);
    let constants = 4096 + 8192;
    let run = log.program().run(Rule::Largest, constants + 40960 - 1, u64::MAX);
    assert_eq!(run.outcome, Outcome::OutOfMemory { needed_bytes: constants + 40960 });
}

#[test]
fn a_trace_without_views_and_mutations_runs_online_like_its_log() {
    let text: String = SMALL.lines().filter(|line| !line.contains("relu_")).map(|line| format!("{line}\n")).collect();
    let text = text.replace("\"ARGS\":[\"v\"]", "\"ARGS\":[\"a\"]").replace("[\"da\",\"v\"]", "[\"da\",\"a\"]");
    let log = Log::read(text.as_bytes()).expect("the log is lawful");
    let trace = log.trace("small", "by-hand").expect("the log makes a trace");
    let program = Program::of(&trace);
    let run = program.run(Rule::Dtr, u64::MAX, 0);
    assert_eq!((run.peak_bytes, run.makespan_ns), (trace.peak_bytes, trace.makespan_ns));
    let mut held = 0;
    for percent in 40..100 {
        let budget_bytes = trace.peak_bytes * percent / 100;
        let run = program.run(Rule::Dtr, budget_bytes, u64::MAX);
        match run.outcome {
            Outcome::Held => {
                assert!(run.peak_bytes <= budget_bytes && run.evictions > 0, "{percent}: {run:?}");
                assert_eq!(run.makespan_ns, trace.makespan_ns + run.recompute_ns, "{percent}: {run:?}");
                held += 1;
            }
            Outcome::OutOfMemory { needed_bytes } => assert!(needed_bytes > budget_bytes, "{percent}: {run:?}"),
            Outcome::Thrashed => panic!("{percent}: {run:?}"),
        }
    }
    assert!((1..60).contains(&held), "{held} of 60 budgets are held");
}

#[test]
fn malformed_logs_are_refused_by_their_line() {
    let start = "{\"INSTRUCTION\":\"ANNOTATE\",\"ANNOTATION\":\"START\"}\n";
    let constant = "{\"INSTRUCTION\":\"CONSTANT\",\"NAME\":\"x\"}\n";
    let memory = |bytes: &str| format!("{{\"INSTRUCTION\":\"MEMORY\",\"NAME\":\"x\",\"MEMORY\":\"{bytes}\"}}\n");
    let memory_of_y = |bytes: &str| format!("{constant}{}", memory(bytes)).replace("\"x\"", "\"y\"");
    let copy = "{\"INSTRUCTION\":\"COPY\",\"DST\":\"y\",\"SRC\":\"x\"}\n";
    let release = "{\"INSTRUCTION\":\"RELEASE\",\"NAME\":\"x\"}\n";
    let call = |alias: &str| {
        format!(
            "{{\"INSTRUCTION\":\"CALL\",\"NAME\":\"f\",\"ARGS\":[\"x\"],\"RESULT\":[\"z\"],\"TIME\":\"1\"}}\n\
             {{\"INSTRUCTION\":\"MEMORY\",\"NAME\":\"z\",\"MEMORY\":\"1\"}}\n\
             {{\"INSTRUCTION\":\"ALIAS\",\"NAME\":\"z\",\"ALIAS\":\"{alias}\"}}\n"
        )
    };
    let x = format!("{start}{constant}{}", memory("8"));
    let cases = [
        (String::new(), "line 0: expected the annotation START, found the end of the log"),
        (
            format!("{start}{{\"INSTRUCTION\":\"DANCE\"}}\n"),
            "line 2: not an instruction of simrd: unknown variant `DANCE`",
        ),
        (format!("{start}{constant}"), "line 2: expected MEMORY, found the end of the log"),
        (format!("{start}{constant}{release}"), "line 3: expected MEMORY of `x`, found RELEASE"),
        (format!("{start}{}", memory("8")), "line 2: expected what belongs to no other instruction, found MEMORY"),
        (format!("{start}{constant}{}", memory("many")), "line 3: expected a whole number, found `many`"),
        (format!("{start}{constant}{}", memory("-1")), "line 3: MEMORY is -1, expected 0 to 1152921504606846976"),
        (format!("{start}{copy}"), "line 2: no tensor is called `x`"),
        (format!("{x}{copy}{copy}"), "line 5: a tensor is called `y` already"),
        (format!("{x}{release}{copy}"), "line 5: `x` is used after its last reference was released"),
        (format!("{x}{}", call("1")), "line 6: ALIAS is 1, expected -1 to 0"),
        (
            format!("{x}{}", memory_of_y("1152921504606846976")),
            "line 5: the sum of all bytes is 1152921504606846984, expected at most 1152921504606846976",
        ),
        (format!("{start}{}", " ".repeat(2 << 20)), "line 2: a line of more than 1048576 bytes"),
    ];
    for (text, expected) in cases {
        let found = refusal(&text);
        assert!(found.starts_with(expected), "expected {expected}, found {found}");
    }
    for cut in 0..SMALL.len() {
        // Whatever is cut off: an error or a shorter log, and never a panic.
        if let Ok(log) = Log::read(&SMALL.as_bytes()[..cut]) {
            let trace = log.trace("cut", "by-hand");
            assert_eq!(trace.is_ok(), SMALL[..cut].contains("CALL"), "{cut}: {trace:?}");
        }
    }
}
