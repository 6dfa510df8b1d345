//! A CUDA device for programs where there is none: libtorch's own CUDA half over libraries that stand in for NVIDIA's.
//! What it can tell, and what not, is in `stand_in/device.h`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use plimsoll_runtime::torch::Session;
use plimsoll_runtime::torch::device::{DeviceName, Engines, PAGE_LOCKED_LIMIT_BYTES};
use tch::Device;

use crate::go_without;
use crate::python::torch_packages;

/// Names the device to a test that [`before_late_device`] has started.
const DEVICE: &str = "PLIMSOLL_TEST_DEVICE";

/// Does what the test called `name` is about on a late device: in another process, which runs that test again, before it. Nothing where
/// tests go without a device.
pub fn before_late_device(name: &str, folder: &str, seed: u64, test: impl FnOnce(DeviceName)) {
    if let Ok(device) = std::env::var(DEVICE) {
        return test(device.parse().expect("the name of a device"));
    }
    let Some(stand_in) = StandIn::make(&Path::new(folder).join("stand-in")) else { return };
    let mut again = Command::new(std::env::current_exe().expect("this program's own path"));
    let again = again.args(["--exact", name, "--nocapture"]).env(DEVICE, "cuda").envs(stand_in.late(seed));
    let output = again.output().expect("this program can be started");
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{said}");
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{said}{complaints}");
}

/// Opens a device: where tensors go, what counts its bytes, and what copies them.
pub fn open(name: DeviceName) -> (Device, Session, Engines) {
    let device = name.open().expect("the device is there");
    let session = Session::install_on(device).expect("the first session");
    (device, session, Engines::open(name, PAGE_LOCKED_LIMIT_BYTES).expect("the device copies"))
}

/// The libraries.
pub struct StandIn {
    folder: PathBuf,
}

impl StandIn {
    /// Makes them in `folder`, where they stay for the next time. None where the libtorch in use has no CUDA half, or comes
    /// without CUDA's headers, and tests go without.
    pub fn make(folder: &Path) -> Option<StandIn> {
        let libtorch = Path::new(env!("LIBTORCH"));
        let needed = ["lib/libtorch_cuda.so", "../nvidia/cu13/include/cuda_runtime_api.h"];
        if !needed.iter().all(|file| libtorch.join(file).exists()) {
            go_without("cuda", "this libtorch has no CUDA half, or no CUDA headers beside it");
            return None;
        }
        // Two tests of a process do not make them at once.
        static MAKING: Mutex<()> = Mutex::new(());
        let _making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
        let makefile = concat!(env!("CARGO_MANIFEST_DIR"), "/stand_in/Makefile");
        let mut make = Command::new("make");
        make.args(["--no-print-directory", "--jobs=2", "-f", makefile]);
        make.arg(format!("LIBTORCH={}", libtorch.display())).arg(format!("OUT={}", folder.display()));
        // It is no part of the make that runs the tests.
        let made = make.env_remove("MAKEFLAGS").env_remove("MAKELEVEL").output().expect("make is there");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        Some(StandIn { folder: folder.to_owned() })
    }

    /// What puts a late device before a program; what it draws is drawn from `seed`.
    pub fn late(&self, seed: u64) -> Vec<(&'static str, OsString)> {
        // By two threads MKL's products give other bits from the same inputs now and then, where cores are short.
        let alone = || "1".to_owned();
        self.environment(
            "late",
            [("STAND_IN_SEED", seed.to_string()), ("OMP_NUM_THREADS", alone()), ("MKL_NUM_THREADS", alone())],
        )
    }

    /// What puts a paced device before a program, Python or not: one of so much memory, and of the pace of `machine`, a file
    /// in `configs/hardware/`.
    pub fn paced(&self, machine: &str, bytes: u64) -> Vec<(&'static str, OsString)> {
        let machine = format!("{}/../configs/hardware/{machine}.toml", env!("CARGO_MANIFEST_DIR"));
        let mut set = self.environment("paced", [("STAND_IN_MACHINE", machine), ("STAND_IN_BYTES", bytes.to_string())]);
        let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("stand_in/python");
        let packages = [own].into_iter().chain(torch_packages().into_iter().flatten());
        set.push(("PYTHONPATH", std::env::join_paths(packages).expect("no path has a colon")));
        set
    }

    fn environment<const N: usize>(
        &self,
        form: &str,
        settings: [(&'static str, String); N],
    ) -> Vec<(&'static str, OsString)> {
        let runtime = self.folder.join(form).join("libcudart.so.13");
        let libraries = [("LD_PRELOAD", runtime.into()), ("LD_LIBRARY_PATH", self.folder.clone().into())];
        libraries.into_iter().chain(settings.map(|(name, value)| (name, value.into()))).collect()
    }
}
