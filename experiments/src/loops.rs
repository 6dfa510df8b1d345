//! Real training loops as the commands use them: opened, recorded, compared bit for bit.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use plimsoll_env::bootstrap::median;
use plimsoll_env::config::FamilyConfig;
use plimsoll_env::recording::record;
use plimsoll_env::workload::{Workload, bits};
use plimsoll_runtime::torch::device::{CopyTable, DeviceName, Engines, PAGE_LOCKED_LIMIT_BYTES};
use plimsoll_runtime::torch::settings::{Determinism, set_deterministic};
use plimsoll_runtime::torch::{CopyEngine, Session};
use plimsoll_runtime::{Link, Trace};
use tch::{Device, TchError};

use crate::tiers::OpenTiers;

/// Iterations that a trace is made of, after the warm-up.
pub const RECORDED_ITERATIONS: usize = 7;

/// Flags of every command that runs a training loop.
#[derive(Args, Clone, Debug)]
pub struct LoopFlags {
    /// Where the loop runs: cpu, cuda or cuda:N
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    pub device: DeviceName,
    /// Seed of the model's parameters, its data and its dropout, of members that are drawn, and of a learner
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub seed: u64,
}

impl LoopFlags {
    /// Refuses another device than the CPU, for a command that runs its loops there.
    pub fn require_cpu(&self, command: &str) -> anyhow::Result<()> {
        ensure!(
            self.device == DeviceName::Cpu,
            "--device {}: `plimsoll {command}` is for the CPU; `record`, `train`, `run`, `hold`, `evaluate` and \
             `gpu-check` run loops on a GPU",
            self.device
        );
        Ok(())
    }
}

/// A device whose bytes are counted, and what copies for the loops on it.
pub struct OpenDevice {
    /// The process's connection to libtorch.
    pub session: Session,
    /// The device.
    pub device: Device,
    /// What copies.
    pub engines: Engines,
}

impl OpenDevice {
    /// Opens the device `name`.
    pub fn open(name: DeviceName) -> anyhow::Result<Self> {
        let device = name.open()?;
        let session = Session::install_on(device)?;
        Ok(OpenDevice { session, device, engines: Engines::open(name, PAGE_LOCKED_LIMIT_BYTES)? })
    }

    /// From now on a GPU's kernels are of that determinism.
    pub fn ask_for(&self, determinism: Determinism) {
        if self.device != Device::Cpu {
            set_deterministic(determinism);
        }
    }

    /// The link between the device and its slow tier that plans reckon with, measured now.
    pub fn reckoned_link(&self) -> anyhow::Result<Link> {
        Ok(CopyTable::reckoned_link(&self.engines, self.device)?)
    }

    /// Where copies go: the tiers that were opened for them, or else those of the device, as plans reckon with them.
    pub fn tiers(&self, opened: Option<OpenTiers>) -> anyhow::Result<OpenTiers> {
        opened.map_or_else(|| Ok(OpenTiers::of_device(self.reckoned_link()?)), Ok)
    }

    /// What `run` comes to, and what it takes until the device has done all of it.
    pub fn timed<R>(&self, run: impl FnOnce() -> R) -> (R, Duration) {
        self.engines.settle();
        let started = Instant::now();
        let result = run();
        self.engines.settle();
        (result, started.elapsed())
    }

    /// What copies to `tiers`.
    pub fn engine(&self, tiers: &OpenTiers) -> anyhow::Result<Box<dyn CopyEngine>> {
        if self.device == Device::Cpu { tiers.engine() } else { Ok(self.engines.engine(None)?) }
    }
}

/// A workload on its device, and its recorded iteration.
pub struct RecordedLoop {
    /// Where the loop runs.
    pub on: OpenDevice,
    /// The loop, some iterations in.
    pub workload: Box<dyn Workload>,
    /// Its trace.
    pub trace: Trace,
    /// Losses of the iterations so far.
    pub losses: Vec<f64>,
}

/// Builds a workload from its configuration.
pub fn build(config: &FamilyConfig, name: &str, device: Device, seed: u64) -> anyhow::Result<Box<dyn Workload>> {
    let workload = config.workload(name)?;
    workload.build_as(name, device, seed, config.manner).with_context(|| format!("workload {name}"))
}

impl RecordedLoop {
    /// Builds the workload `name` and records it.
    pub fn open(config: &FamilyConfig, name: &str, flags: &LoopFlags, iterations: usize) -> anyhow::Result<Self> {
        let on = OpenDevice::open(flags.device)?;
        // Runs are compared bit for bit.
        on.ask_for(config.workload(name)?.determinism());
        let mut workload = build(config, name, on.device, flags.seed)?;
        let (trace, losses) = record(on.session, workload.as_mut(), iterations, &flags.device.product())
            .with_context(|| format!("workload {name}"))?;
        Ok(RecordedLoop { on, workload, trace, losses })
    }
}

/// What an untouched loop gives: the losses of all its iterations, and the bits of everything that it trained.
pub struct Untouched {
    losses: Vec<u64>,
    variables: Vec<(String, Vec<u8>)>,
}

impl Untouched {
    /// Runs the workload `name` for `iterations` iterations with nothing in between, on a device that is open.
    pub fn run(config: &FamilyConfig, name: &str, flags: &LoopFlags, iterations: usize) -> anyhow::Result<Self> {
        Self::watch(config, name, flags, iterations, |step| step())
    }

    /// The same; every iteration is run by `watcher`.
    pub fn watch(
        config: &FamilyConfig,
        name: &str,
        flags: &LoopFlags,
        iterations: usize,
        mut watcher: impl FnMut(&mut dyn FnMut() -> Result<f64, TchError>) -> Result<f64, TchError>,
    ) -> anyhow::Result<Self> {
        let mut workload = build(config, name, flags.device.open()?, flags.seed)?;
        let mut losses = Vec::new();
        for _ in 0..iterations {
            losses.push(watcher(&mut || workload.iteration())?.to_bits());
        }
        Ok(Untouched { losses, variables: bits(workload.as_ref())? })
    }

    /// Whether losses of iterations `first..` are the same bits.
    pub fn has_losses(&self, first: usize, losses: &[f64]) -> bool {
        let bits = losses.iter().map(|loss| loss.to_bits());
        self.losses.get(first..first + losses.len()).is_some_and(|own| own.iter().copied().eq(bits))
    }

    /// Whether `workload` holds the same bits in every parameter and buffer.
    pub fn has_variables_of(&self, workload: &dyn Workload) -> anyhow::Result<bool> {
        Ok(self.variables == bits(workload)?)
    }
}

/// What the last half of a loop's iterations take beyond those of another, each beside its like, in the median; and what all take
/// together.
pub fn overheads(makespans_ns: &[u64], beside_ns: &[u64]) -> (f64, f64) {
    let over = |(&own, &other): (&u64, &u64)| own as f64 / other as f64 - 1.0;
    let late = makespans_ns.len() / 2;
    let ratios: Vec<f64> = makespans_ns[late..].iter().zip(&beside_ns[late..]).map(over).collect();
    let [own, other] = [makespans_ns, beside_ns].map(|makespans_ns| makespans_ns.iter().sum::<u64>());
    (median(ratios), over((&own, &other)))
}
