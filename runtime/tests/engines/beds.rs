//! Engines under test, each with the device that it copies from and to.

use std::sync::Arc;

use plimsoll_runtime::Link;
use plimsoll_runtime::hardware::Tier;
use plimsoll_runtime::torch::copy::{
    CopiedBy, CopyEngine, FileEngine, FileTier, HostEngine, StreamEngine, TieredEngine,
};
use tempfile::TempDir;

use crate::faulty::FaultyEngine;
use crate::simulated::Simulated;

/// An engine, its device, and the tiers that it has.
pub struct Bed {
    pub name: &'static str,
    pub engine: Box<dyn CopyEngine>,
    pub tiers: &'static [Tier],
    simulated: Option<Arc<Simulated>>,
    _directory: Option<TempDir>,
}

/// Device memory that tests own. On the simulated device it is used by kernels alone.
pub struct Block(Vec<u8>);

impl Block {
    pub fn of(bytes: usize) -> Self {
        Block(vec![0xEE; bytes])
    }

    pub fn start(&mut self) -> *mut u8 {
        self.0.as_mut_ptr()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }
}

/// An address that a kernel may use.
struct Address(*mut u8);
// SAFETY: blocks outlive what is queued for them, as on a device.
unsafe impl Send for Address {}

impl Bed {
    /// Has the device write a block.
    pub fn write(&mut self, block: &mut Block, bytes: &[u8]) {
        assert_eq!(block.len(), bytes.len());
        let (to, bytes) = (Address(block.start()), bytes.to_vec());
        self.compute(move || {
            let Address(to) = { to };
            // SAFETY: the block has as many bytes, and outlives what is queued.
            unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        });
    }

    /// Has the device read a block.
    pub fn read(&mut self, block: &mut Block) -> Vec<u8> {
        let (sender, receiver) = std::sync::mpsc::channel();
        let (from, count) = (Address(block.start()), block.len());
        self.compute(move || {
            let Address(from) = { from };
            // SAFETY: as above.
            sender.send(unsafe { std::slice::from_raw_parts(from, count) }.to_vec()).unwrap();
        });
        self.finish();
        receiver.recv().unwrap()
    }

    fn compute(&mut self, work: impl FnOnce() + Send + 'static) {
        let kernel = move || {
            work();
            None
        };
        match &self.simulated {
            Some(device) => device.compute(Box::new(kernel)),
            None => assert_eq!(kernel(), None::<String>),
        }
    }

    /// Lets the device do all that is queued.
    pub fn finish(&self) {
        if let Some(device) = &self.simulated {
            assert_eq!(device.finish(), Vec::<String>::new(), "{}", self.name);
        }
    }
}

/// One bed of each kind, with so much room in each tier.
pub fn beds(limit_bytes: u64) -> Vec<Bed> {
    let bed = |name, engine, tiers| Bed { name, engine, tiers, simulated: None, _directory: None };
    let link = Link::symmetric(20e9, 10_000);
    let (file, file_directory) = file(limit_bytes);
    let (beside, tiered_directory) = self::file(limit_bytes);
    let host = |copied_by, pace| Box::new(HostEngine::copied_by(copied_by, limit_bytes, pace));
    let tiered = Box::new(TieredEngine::new(host(CopiedBy::Threads, None), Box::new(beside)));
    let faultless = FaultyEngine::with_faults(*host(CopiedBy::Threads, None)).0;
    let device = Arc::new(Simulated::new(7, usize::MAX));
    let streams = StreamEngine::new(Arc::clone(&device) as _, limit_bytes).unwrap();
    vec![
        bed("host", host(CopiedBy::Threads, None), &[Tier::Host]),
        bed("host, copied by the caller", host(CopiedBy::Caller, None), &[Tier::Host]),
        bed("paced host", host(CopiedBy::Threads, Some(link)), &[Tier::Host]),
        bed("paced host, copied by the caller", host(CopiedBy::Caller, Some(link)), &[Tier::Host]),
        bed("faulty without faults", Box::new(faultless), &[Tier::Host]),
        Bed { _directory: Some(file_directory), ..bed("file", Box::new(file), &[Tier::File]) },
        Bed { _directory: Some(tiered_directory), ..bed("tiered", tiered, &[Tier::Host, Tier::File]) },
        Bed { simulated: Some(device), ..bed("streams", Box::new(streams), &[Tier::Host]) },
    ]
}

/// A file engine in a directory of its own.
pub fn file(limit_bytes: u64) -> (FileEngine, TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let tier = FileTier { directory: directory.path().to_owned(), limit_bytes, pace: None };
    (FileEngine::new(tier).unwrap(), directory)
}
