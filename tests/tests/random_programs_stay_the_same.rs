//! A slice of the fuzzer: random programs under random plans, under random budgets, and so with copies that fail, with one or
//! several batches of any length, with pieces left out, with parameters that are away between iterations, or with other threads that
//! let go of what they have used, or use it meanwhile, give the bits of their untouched selves.

use std::process::Command;

use plimsoll_tests::fuzz::{Mode, Program, Tally, Verdict, prepare};
use plimsoll_tests::one_at_a_time;
use serde::Deserialize;
use serde_json::Value;

const PROGRAMS: usize = 200;
/// Where threads are started for them.
const FEWER: usize = PROGRAMS / 2;

/// In a process of its own: in one there can be one loop at a time.
fn slice(mode: Mode, programs: usize) -> Tally {
    let mut fuzz = Command::new(env!("CARGO_BIN_EXE_fuzz"));
    fuzz.args(["--mode", &mode.name(), "--programs", &programs.to_string()]);
    let ran = fuzz.output().expect("it is built before its tests");
    let [printed, complained] = [&ran.stdout, &ran.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(ran.status.success(), "{printed}\n{complained}");
    println!("{printed}");
    let summary: Value = serde_json::from_str(printed.lines().last().expect("a summary")).unwrap();
    assert_eq!((&summary["same"], &summary["different"]), (&programs.into(), &0.into()), "{summary}");
    Tally::deserialize(&summary["meanwhile"]).unwrap()
}

fn stays_the_same(seed: u64, mode: Mode) {
    let _running = one_at_a_time();
    prepare();
    let verdict = Program::random(seed).check(mode);
    assert!(matches!(verdict, Verdict::Same(_)), "{verdict:?}");
}

/// Storages made from nothing that a plan swaps before they are first used, and drops after they were written.
#[test]
fn what_is_away_at_its_first_use() {
    stays_the_same(585, Mode::Planned);
}

/// A program that an iteration turns out to be, whose sizes are not told yet, and then turn out to be others.
#[test]
fn what_takes_over_before_its_sizes_are_told() {
    stays_the_same(1797, Mode::Accumulated);
}

#[test]
fn under_random_plans() {
    let all = slice(Mode::Planned, PROGRAMS);
    let enough = all.followed > PROGRAMS && all.reruns > 1_000 && all.swapped_bytes > 1 << 20;
    assert!(enough, "the programs test too little");
}

fn under_budgets(mode: Mode, programs: usize) -> Tally {
    let all = slice(mode, programs);
    let enough = all.followed > programs && all.reruns > 5 * programs as u64 && all.swapped_bytes > 1 << 20;
    assert!(enough && all.evictions > 5 * programs as u64 && all.refusals > 0, "the programs test too little");
    all
}

#[test]
fn under_random_budgets() {
    under_budgets(Mode::Budgeted, PROGRAMS);
}

#[test]
fn with_copies_that_fail() {
    let all = under_budgets(Mode::Faulty, PROGRAMS);
    assert!(all.failures > PROGRAMS as u64, "the programs test too little");
}

#[test]
fn with_batches_of_any_length() {
    under_budgets(Mode::Resized, PROGRAMS);
}

#[test]
fn with_some_instructions_left_out() {
    under_budgets(Mode::LeftOut, PROGRAMS);
}

#[test]
fn with_less_than_there_is_between_iterations() {
    under_budgets(Mode::LeftAway, PROGRAMS);
}

#[test]
fn with_another_thread_that_lets_go() {
    let all = slice(Mode::LetGo, PROGRAMS);
    assert!(all.followed > PROGRAMS && all.reruns > 500 && all.evictions > 500, "the programs test too little");
}

#[test]
fn with_other_threads_that_use_the_same() {
    under_budgets(Mode::Beside, FEWER);
}

#[test]
fn with_several_such_batches_in_an_iteration() {
    under_budgets(Mode::Accumulated, PROGRAMS);
}
