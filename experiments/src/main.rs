//! The `plimsoll` command.

mod agreement;
mod chosen;
mod commands;
mod evaluation;
mod loops;
mod progress;
mod results;
mod table;
mod tensorboard;

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
    /// Train a policy for a model family
    Train(commands::train::Arguments),
    /// Plan a recorded iteration under a budget, without running it
    Plan(commands::plan::Arguments),
    /// Compare a policy with the baselines, predicted and on the real loop
    Evaluate(commands::evaluate::Arguments),
    /// Run a workload's training loop under a budget
    Run(commands::run::Arguments),
    /// Say what a policy, trace or plan file holds
    Inspect(commands::inspect::Arguments),
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Record(arguments) => commands::record::run(arguments),
        Command::Train(arguments) => commands::train::run(arguments),
        Command::Plan(arguments) => commands::plan::run(arguments),
        Command::Evaluate(arguments) => commands::evaluate::run(arguments),
        Command::Run(arguments) => commands::run::run(arguments),
        Command::Inspect(arguments) => commands::inspect::run(arguments),
    }
}

fn main() -> std::process::ExitCode {
    match run(Arguments::parse().command) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("plimsoll: {error:#}");
            std::process::ExitCode::FAILURE
        }
    }
}
