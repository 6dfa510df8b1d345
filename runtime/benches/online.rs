//! How long an online run takes: DTR on a chain of layers, and on the authors' logs where PLIMSOLL_SIMRD names a folder
//! that holds them.

use std::fs::File;
use std::io::BufReader;
use std::path::PathBuf;

use divan::Bencher;
use flate2::read::GzDecoder;
use plimsoll_runtime::baselines::online::{Program, Rule};
use plimsoll_runtime::import::simrd::Log;
use plimsoll_runtime::{Lineage, Trace};

#[path = "../tests/support/script.rs"]
#[allow(dead_code)]
mod script;

fn main() {
    divan::main();
}

/// `layers` layers, each made from the one before, and read in reverse order.
fn chain(layers: u32) -> Trace {
    let mut script = script::Script::new(1);
    for layer in 1..=layers {
        script.run(100 + u64::from(layer % 7)).reads(layer - 1).creates(layer);
    }
    for layer in (1..=layers).rev() {
        script.run(100).reads(layer).frees(layer);
    }
    script.trace()
}

#[divan::bench(args = [1_000, 4_000])]
fn dtr_on_a_chain(bencher: Bencher<'_, '_>, layers: u32) {
    let trace = chain(layers);
    let budget_bytes = Lineage::of(&trace).keep_all_peak_bytes() / 2;
    let program = Program::of(&trace);
    bencher.bench(|| program.run(Rule::Dtr, budget_bytes, u64::MAX));
}

/// Keep-all peaks of the logs, in bytes.
const LOGS: [(&str, u64); 3] =
    [("unet-6", 8_415_764_640), ("resnet32-56", 10_061_179_152), ("lstm-128", 5_595_127_736)];

#[divan::bench(args = LOGS.map(|(name, _)| name))]
fn dtr_at_half_on_a_log(bencher: Bencher<'_, '_>, name: &str) {
    let Some(folder) = std::env::var_os("PLIMSOLL_SIMRD").map(PathBuf::from) else {
        println!("not run: PLIMSOLL_SIMRD names no folder");
        return;
    };
    let file = File::open(folder.join(format!("{name}.log.gz"))).expect("the log is there");
    let log = Log::read(BufReader::new(GzDecoder::new(file))).expect("the log is lawful");
    let peak_bytes = LOGS.iter().find(|(other, _)| *other == name).expect("an argument is one of them").1;
    bencher.bench(|| log.program().run(Rule::Dtr, peak_bytes / 2, u64::MAX));
}
