//! Random programs under random plans against their untouched selves:
//!
//!     cargo run -p plimsoll-tests --bin fuzz -- --programs 10000 [--seed N]

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use plimsoll_tests::fuzz::{Mode, Program, Verdict};

/// Flags.
#[derive(Parser)]
struct Arguments {
    /// How many programs
    #[arg(long, default_value_t = 1_000)]
    programs: u64,
    /// The seed of the first; the others follow
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    tch::set_num_threads(1);
    plimsoll_tests::fuzz::quietly();
    let started = Instant::now();
    let (mut same, mut unlawful, mut all_followed, mut all_reruns, mut all_bytes) = (0u64, 0u64, 0, 0, 0);
    let mut seed = arguments.seed;
    while same < arguments.programs {
        let program = Program::random(seed);
        match program.check(Mode::Planned) {
            Verdict::Same { followed, reruns, swapped_bytes } => {
                same += 1;
                all_followed += followed;
                all_reruns += reruns;
                all_bytes += swapped_bytes;
                if same.is_multiple_of(500) {
                    println!("{same} programs, {:.0} s", started.elapsed().as_secs_f64());
                }
            }
            Verdict::Unlawful => unlawful += 1,
            Verdict::Different(what) => {
                println!("DIFFERENT: {what}\n{program}minimised:\n{}", program.minimised(Mode::Planned));
                return ExitCode::FAILURE;
            }
        }
        seed += 1;
    }
    println!(
        "{same} programs without a difference in {:.0} s ({unlawful} drawn that do not train): {all_followed} iterations \
         followed their plans, {all_reruns} reruns, {} MiB swapped",
        started.elapsed().as_secs_f64(),
        all_bytes >> 20,
    );
    ExitCode::SUCCESS
}
