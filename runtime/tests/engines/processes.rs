//! What engines do to the system around them: nothing is left behind, memory is given back, refusals are answers.
//!
//! Each test runs itself once more as a process of its own, which can be killed or put under a limit.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use plimsoll_runtime::hardware::Tier;
use plimsoll_runtime::torch::copy::{CopyEngine, CopyError, DeviceBytes, FileEngine, FileTier, HostEngine};

use crate::beds::Block;
use crate::draw::Draw;

const ROLE: &str = "PLIMSOLL_TEST_PROCESS";

/// The directory that this process works in, if it is one that a test has started.
fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

fn start(test: &str, directory: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args([&format!("processes::{test}"), "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, directory)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Runs the process to its end, which must be a good one.
fn run(test: &str, directory: &Path) {
    let output = start(test, directory).wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

fn file(directory: &str, limit_bytes: u64) -> FileEngine {
    FileEngine::new(FileTier { directory: directory.into(), limit_bytes, pace: None }).unwrap()
}

fn offload(engine: &mut dyn CopyEngine, block: &mut Block, tier: Tier) -> Result<(), CopyError> {
    let piece = DeviceBytes { bytes: block.len(), start: block.start() };
    // SAFETY: the block lives, unwritten, until the wait.
    let (copies, ticket) = unsafe { engine.offload(&[piece], tier) }?;
    engine.wait(&ticket)?;
    // Its room stays taken.
    std::mem::forget(copies);
    Ok(())
}

fn limit(resource: libc::__rlimit_resource_t, bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: `limit` is readable.
    assert_eq!(unsafe { libc::setrlimit(resource, &limit) }, 0);
}

/// Memory of this process: resident, and data (what `RLIMIT_DATA` limits).
fn memory_bytes() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let field = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    };
    (field("VmRSS:"), field("VmData:"))
}

#[test]
fn a_process_that_is_killed_leaves_no_file_behind() {
    if let Some(directory) = role() {
        let mut engine = file(&directory, 1 << 30);
        offload(&mut engine, &mut Block::of(32 << 20), Tier::File).unwrap();
        println!("\nready");
        loop {
            offload(&mut engine, &mut Block::of(1 << 20), Tier::File).unwrap();
            std::thread::park_timeout(std::time::Duration::from_millis(1));
            engine = file(&directory, 1 << 30);
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let mut process = start("a_process_that_is_killed_leaves_no_file_behind", directory.path());
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "ready"));
    let listed = || std::fs::read_dir(directory.path()).unwrap().count();
    assert_eq!(listed(), 0, "the file has a name while it is in use");
    process.kill().unwrap();
    process.wait().unwrap();
    assert_eq!(listed(), 0, "a file was left behind");
}

#[test]
fn a_disk_that_is_full_is_an_answer_and_bytes_that_are_there_stay() {
    let Some(directory) = role() else {
        let directory = tempfile::tempdir().unwrap();
        return run("a_disk_that_is_full_is_an_answer_and_bytes_that_are_there_stay", directory.path());
    };
    let mut engine = file(&directory, 1 << 30);
    limit(libc::RLIMIT_FSIZE, 2 << 20);
    let bytes = Draw::seeded(1).bytes(1 << 20);
    let mut block = Block::of(1 << 20);
    let piece = DeviceBytes { bytes: block.len(), start: block.start() };
    // SAFETY: the blocks live until all copies are made, and are used between them only.
    unsafe {
        block.start().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        let (copies, ticket) = engine.offload(&[piece], Tier::File).unwrap();
        engine.wait(&ticket).unwrap();
        for _ in 0..3 {
            let refused = offload(&mut engine, &mut Block::of(2 << 20), Tier::File);
            assert!(matches!(refused, Err(CopyError::Full { .. })), "{refused:?}");
        }
        assert_eq!(engine.tiers()[0].held_bytes, 1 << 20, "the room of what was refused is lost");
        block.start().write_bytes(0, bytes.len());
        let ticket = engine.prefetch(&[(&copies[0], block.start())]).unwrap();
        engine.wait(&ticket).unwrap();
        assert!(std::slice::from_raw_parts(block.start(), bytes.len()) == bytes);
        // And there is room for what fits.
        offload(&mut engine, &mut Block::of(1 << 20), Tier::File).unwrap();
    }
}

#[test]
fn memory_that_the_system_refuses_is_an_answer() {
    let Some(_) = role() else {
        let directory = tempfile::tempdir().unwrap();
        return run("memory_that_the_system_refuses_is_an_answer", directory.path());
    };
    let mut engine = HostEngine::new(None);
    let mut block = Block::of(64 << 20);
    limit(libc::RLIMIT_DATA, memory_bytes().1 + (48 << 20));
    let refused = offload(&mut engine, &mut block, Tier::Host);
    assert_eq!(refused, Err(CopyError::Full { bytes: 64 << 20 }));
    offload(&mut engine, &mut Block::of(16 << 20), Tier::Host).unwrap();
}

#[test]
fn what_is_freed_leaves_the_process() {
    let Some(directory) = role() else {
        let directory = tempfile::tempdir().unwrap();
        return run("what_is_freed_leaves_the_process", directory.path());
    };
    const BYTES: usize = 64 << 20;
    let mut block = Block::of(BYTES);
    let piece = DeviceBytes { bytes: BYTES, start: block.start() };
    let before = memory_bytes().0;
    // Through the file, the memory taken is that of its buffers.
    let mut engine = file(&directory, 1 << 30);
    for _ in 0..4 {
        offload(&mut engine, &mut block, Tier::File).unwrap();
    }
    let through_file = memory_bytes().0.saturating_sub(before);
    assert!(through_file < 16 << 20, "a file tier with 256 MiB in it takes {through_file} bytes of memory");
    drop(engine);
    // In the host's memory, slabs of ever other sizes do not pile up, and all goes with the engine.
    let mut engine = HostEngine::new(None);
    for cut in 0..12 {
        // SAFETY: the block lives, unwritten, until the wait.
        let (copies, ticket) =
            unsafe { engine.offload(&[DeviceBytes { bytes: BYTES - cut * 100_000, ..piece }], Tier::Host) }.unwrap();
        engine.wait(&ticket).unwrap();
        drop(copies);
        let more = memory_bytes().0.saturating_sub(before);
        assert!(more < (2 * BYTES + (16 << 20)) as u64, "{more} bytes after {cut} sizes of 64 MiB");
    }
    drop(engine);
    let more = memory_bytes().0.saturating_sub(before);
    assert!(more < 16 << 20, "{more} bytes stay after the engine is gone");
}
