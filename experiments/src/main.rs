//! The `plimsoll` command.

mod advice;
mod agreement;
mod behaviour;
mod chosen;
mod chrome;
mod commands;
mod evaluation;
mod exact;
mod explanation;
mod gpu_check;
mod held_out;
mod highs;
mod interrupt;
mod learner_log;
mod link;
mod logs;
mod loops;
mod machine;
mod margin;
mod members;
mod online;
mod outputs;
mod patient;
mod probed;
mod progress;
mod provenance;
mod results;
mod served;
#[cfg(test)]
mod support;
mod svg;
mod table;
mod tensorboard;
mod tiers;
mod two_level;

use clap::{Parser, Subcommand};

/// Keeps a training job under an absolute memory budget: records its loop, trains a policy that chooses for every
/// tensor storage to keep, swap or recompute it, and runs the loop under that policy.
#[derive(Parser)]
#[command(name = "plimsoll", version, max_term_width = 110)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Record a workload's training loop as a trace
    Record(commands::record::Arguments),
    /// Turn what another tool recorded into a trace
    Import(commands::import::Arguments),
    /// Train a policy for a model family
    Train(commands::train::Arguments),
    /// Train a policy further on a running training loop, rewarded by what is measured
    ///
    /// The reward is the measured makespan and the measured peak of the real loop. At the end the policy that it started
    /// from and the one that training led to take turns on the loop, and the start is kept unless the other is measured
    /// faster by twice the standard error.
    Finetune(commands::finetune::Arguments),
    /// Plan a recorded iteration under a budget, without running it
    Plan(commands::plan::Arguments),
    /// Compare a policy with the baselines, predicted and on the real loop
    Evaluate(Box<commands::evaluate::Arguments>),
    /// Sum up what `evaluate --held-out` reported about several families or policies, as tables in Markdown
    Summarise(commands::summarise::Arguments),
    /// Run a workload's training loop under a budget
    Run(commands::run::Arguments),
    /// Run training loops under budgets from their first iteration on, as a job would, and compare every bit
    ///
    /// Each loop runs untouched, and then within every budget: kept there by evicting when bytes run out, then by plan.
    /// Losses and final parameters are compared bit for bit. Where a budget cannot be held, the least that is found to be
    /// feasible takes its place.
    Hold(commands::hold::Arguments),
    /// Say which way of saving memory pays for a workload at a budget, and what batch a fit says is the largest
    ///
    /// Records the loop at several batch sizes, plans each of them for every method (keep, recompute, swap, swap of 16-
    /// and 8-bit copies, and a policy), fits peak and time by least squares, and compares the fits with runs of the loop
    /// at batch sizes that were held out. Quantised swaps change results: they are predicted and never carried out.
    Advise(commands::advise::Arguments),
    /// Report what device memory is used for, how long, and what of it lies idle
    ///
    /// Lifetimes, access-time intervals (their distribution, and the blocks that are large and idle for long: those that
    /// could be swapped for free over the link), bytes by kind at the peak, and the evidence that iterations repeat.
    /// From a trace, or from what torch.cuda.memory._dump_snapshot() writes after
    /// torch.cuda.memory._record_memory_history(), which knows lives and no accesses.
    Behaviour(commands::behaviour::Arguments),
    /// Write what a plan is predicted to do as a Chrome trace, for Perfetto
    ///
    /// The trace has a lane for compute (operators, reruns, stalls, contention) and one for each copy channel, a counter
    /// of device bytes, and markers where the budget pressed. Open it at https://ui.perfetto.dev or chrome://tracing.
    Export(commands::export::Arguments),
    /// Check everything on a GPU, by importance, within some minutes
    ///
    /// Bits and budgets; a loop that runs out of memory; makespan and peak of every policy at every budget; the same models
    /// in plain PyTorch; what the interceptor costs. Everything is written to DIR/gpu-check.json as it goes, so that a
    /// check that is cut short still counts, beside traces and timetables for Perfetto.
    GpuCheck(commands::gpu_check::Arguments),
    /// Measure this machine's link and compute, and describe it as configs/hardware/ does
    Probe(commands::probe::Arguments),
    /// Say what a policy, trace or plan file holds
    Inspect(commands::inspect::Arguments),
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Record(arguments) => commands::record::run(arguments),
        Command::Import(arguments) => commands::import::run(arguments),
        Command::Train(arguments) => commands::train::run(arguments),
        Command::Finetune(arguments) => commands::finetune::run(arguments),
        Command::Plan(arguments) => commands::plan::run(arguments),
        Command::Evaluate(arguments) => commands::evaluate::run(*arguments),
        Command::Summarise(arguments) => commands::summarise::run(arguments),
        Command::Run(arguments) => commands::run::run(arguments),
        Command::Hold(arguments) => commands::hold::run(arguments),
        Command::Advise(arguments) => commands::advise::run(arguments),
        Command::Behaviour(arguments) => commands::behaviour::run(arguments),
        Command::Export(arguments) => commands::export::run(arguments),
        Command::GpuCheck(arguments) => commands::gpu_check::run(arguments),
        Command::Probe(arguments) => commands::probe::run(arguments),
        Command::Inspect(arguments) => commands::inspect::run(arguments),
    }
}

/// Keeps memory that is freed for what is allocated next. Loops and training free and allocate the same blocks over and
/// over; where the C library gives large ones back to the system in between, an iteration pays for every page that it
/// touches anew, and the less the smaller its peak: a cost of having a CPU for a device, which no plan can be told.
fn keep_freed_memory() {
    /// The largest that the C library takes.
    const MMAP_THRESHOLD_BYTES: i32 = 32 << 20;
    // SAFETY: sets two parameters of the C allocator.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
    }
}

/// What libtorch takes from the environment before a GPU's first matrix product, where nobody says otherwise.
fn settle_matrix_products() {
    let settings = [
        // So that they give the same bits in every run.
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        // So that no memory is taken late, by the first product of its kind on another thread, in the midst of what is measured.
        ("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1"),
    ];
    for (name, value) in settings.into_iter().filter(|(name, _)| std::env::var_os(name).is_none()) {
        // SAFETY: there is no second thread yet.
        unsafe { std::env::set_var(name, value) };
    }
}

/// Ends quietly where what reads our output has had enough, as `plimsoll behaviour TRACE | head`: like other tools of the
/// command line, by the signal that Rust ignores unless told.
fn end_with_the_reader() {
    // SAFETY: sets a signal's disposition before there is a second thread.
    #[cfg(unix)]
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
}

fn main() -> std::process::ExitCode {
    end_with_the_reader();
    keep_freed_memory();
    settle_matrix_products();
    match run(Arguments::parse().command) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("plimsoll: {error:#}");
            std::process::ExitCode::FAILURE
        }
    }
}
