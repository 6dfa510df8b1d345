//! `plimsoll probe`.

use std::path::{Path, PathBuf};

use anyhow::ensure;
use clap::Args;
use plimsoll_runtime::file::write_whole;
use plimsoll_runtime::torch::device::{CopyTable, DeviceName};

use crate::machine::PROFILES;
use crate::outputs::{require_outputs, write_json};
use crate::probed::Probed;
use crate::table::Table;

/// Flags.
#[derive(Args)]
pub struct Arguments {
    /// What to measure: cpu, cuda or cuda:N
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    device: DeviceName,
    /// The machine's name in the file
    #[arg(long, value_name = "NAME")]
    name: String,
    /// Where to write the description [default: configs/hardware/NAME.toml]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Where to write the table of copies as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> anyhow::Result<()> {
    let plain = !arguments.name.is_empty()
        && arguments.name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '-');
    ensure!(plain, "--name {}: expected letters, digits and hyphens", arguments.name);
    let out = arguments.out.unwrap_or_else(|| Path::new(PROFILES).join(format!("{}.toml", arguments.name)));
    require_outputs(&[("--out", Some(&out)), ("--json", arguments.json.as_ref())])?;
    let probed = Probed::of(arguments.device, &arguments.name)?;
    write_whole(&out, probed.to_toml().as_bytes())?;
    if let Some(path) = &arguments.json {
        write_json(path, &probed.copies)?;
    }
    print(&probed.copies);
    println!("{}: {}", out.display(), probed.machine);
    Ok(())
}

fn print(copies: &CopyTable) {
    let mut table =
        Table::new(["KiB", "out GB/s", "back GB/s", "out beside compute", "back beside compute", "ns/byte"]);
    let rate = |bytes_per_s: f64| format!("{:.2}", bytes_per_s / 1e9);
    for rates in &copies.rates {
        table.row([
            (rates.bytes >> 10).to_string(),
            rate(rates.offload_bytes_per_s),
            rate(rates.prefetch_bytes_per_s),
            rate(rates.offload_beside_compute_bytes_per_s),
            rate(rates.prefetch_beside_compute_bytes_per_s),
            format!("{:.4}", rates.contention_ns_per_byte),
        ]);
    }
    print!("{table}");
    if copies.queueing_ns > 0 {
        println!("queueing a copy among operators takes the host {:.1} µs", copies.queueing_ns as f64 / 1e3);
    }
}
