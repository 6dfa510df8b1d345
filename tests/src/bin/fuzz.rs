//! Random programs, run in every way that [`Mode`] has, against their untouched selves:
//!
//!     cargo run -p plimsoll-tests --bin fuzz -- --programs 10000 [--seed N] [--mode MODE]
//!
//! Prints a line for whatever differs, and at the end of each mode a line of JSON that says what happened meanwhile.

use std::process::ExitCode;
use std::time::Instant;

use clap::{Parser, ValueEnum};
use plimsoll_tests::fuzz::{Mode, Program, Tally, Verdict};
use serde_json::json;

/// Flags.
#[derive(Parser)]
struct Arguments {
    /// How many programs
    #[arg(long, default_value_t = 1_000)]
    programs: u64,
    /// The seed of the first; the others follow
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// One way to run them; all unless told
    #[arg(long)]
    mode: Option<Mode>,
    /// Name every program that differs, and go on
    #[arg(long)]
    keep_going: bool,
}

fn main() -> ExitCode {
    let Arguments { programs, seed, mode, keep_going } = Arguments::parse();
    plimsoll_tests::fuzz::prepare();
    let modes = mode.map_or(Mode::value_variants().to_vec(), |mode| vec![mode]);
    for mode in modes {
        let different = run(mode, programs, seed, keep_going);
        if let Some(program) = different.first() {
            println!("{program}minimised:\n{}", program.minimised(mode));
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// Runs `programs` of them, from `seed` on, and says how those differ that do. Returns them.
fn run(mode: Mode, programs: u64, mut seed: u64, keep_going: bool) -> Vec<Program> {
    let started = Instant::now();
    let (mut same, mut unlawful, mut all, mut different) = (0, 0, Tally::default(), Vec::new());
    while same + (different.len() as u64) < programs && (keep_going || different.is_empty()) {
        let program = Program::random(seed);
        match program.check(mode) {
            Verdict::Same(tally) => {
                same += 1;
                all += tally;
                if same.is_multiple_of(500) {
                    println!("{same} programs, {:.0} s", started.elapsed().as_secs_f64());
                }
            }
            Verdict::Unlawful => unlawful += 1,
            Verdict::Different(what) => {
                println!("DIFFERENT ({mode:?}), seed {seed}: {what}");
                different.push(program);
            }
        }
        seed += 1;
    }
    let summary = json!({
        "mode": mode.name(),
        "same": same,
        "different": different.len(),
        "drawn_that_do_not_train": unlawful,
        "seconds": started.elapsed().as_secs(),
        "meanwhile": all,
    });
    println!("{summary}");
    different
}
