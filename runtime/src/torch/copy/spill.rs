//! A file that nobody else can see, that vanishes with the process, and that takes no memory.
//!
//! The file has no name, so nothing is left behind however the process ends. Where the file system can, bytes go
//! past the page cache (direct I/O); elsewhere they are written out and dropped from it at once: a cache would take the
//! memory that was to be saved.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use super::CopyError;
use super::slabs::PAGE_BYTES;

/// The file. Offsets, lengths and addresses are whole pages.
#[derive(Debug)]
pub(super) struct SpillFile {
    file: File,
    is_direct: bool,
}

/// Where nobody has asked for the signal, a file that reaches a limit of the process is an error and not its end.
fn outlive_limits() {
    // SAFETY: any bytes are a `sigaction`, which the system fills in; a signal that is ignored runs no handler.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGXFSZ, std::ptr::null(), &mut action) == 0 && action.sa_sigaction == libc::SIG_DFL {
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        }
    }
}

impl SpillFile {
    /// Makes the file in `directory`. `page` is a page of memory to try direct I/O with.
    pub(super) fn create(directory: &Path, page: &mut [u8]) -> Result<Self, CopyError> {
        outlive_limits();
        let file = nameless(directory)
            .or_else(|error| if lacks_nameless_files(&error) { unlinked(directory) } else { Err(error) })
            .map_err(|error| failed("creating it", &error, PAGE_BYTES))?;
        let is_direct = set_direct(&file, true) && takes_direct(&file, page);
        if !is_direct {
            set_direct(&file, false);
        }
        Ok(SpillFile { file, is_direct })
    }

    /// Makes sure that the disk has room for these bytes, so that writing them later cannot find it full.
    pub(super) fn reserve(&self, range: Range<u64>) -> Result<(), CopyError> {
        let (start, bytes) = (range.start as libc::off_t, (range.end - range.start) as libc::off_t);
        loop {
            // SAFETY: the descriptor is open.
            if unsafe { libc::fallocate(self.file.as_raw_fd(), 0, start, bytes) } == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                // The file system cannot reserve; then writing tells.
                Some(libc::EOPNOTSUPP | libc::ENOSYS) => return Ok(()),
                _ => return Err(failed("reserving room", &error, bytes as usize)),
            }
        }
    }

    pub(super) fn write(&self, pages: &[u8], offset: u64) -> Result<(), CopyError> {
        let written = self
            .file
            .write_all_at(pages, offset)
            .and_then(|()| if self.is_direct { Ok(()) } else { self.write_out(offset, pages.len()) });
        written.map_err(|error| failed("writing", &error, pages.len()))
    }

    pub(super) fn read(&self, pages: &mut [u8], offset: u64) -> Result<(), CopyError> {
        let read = self.file.read_exact_at(pages, offset);
        if !self.is_direct {
            self.leave_cache(offset, pages.len());
        }
        read.map_err(|error| failed("reading", &error, pages.len()))
    }

    fn write_out(&self, offset: u64, bytes: usize) -> io::Result<()> {
        let (offset_signed, length) = (offset as libc::off64_t, bytes as libc::off64_t);
        let now = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
        // SAFETY: the descriptor is open.
        if unsafe { libc::sync_file_range(self.file.as_raw_fd(), offset_signed, length, now) } != 0 {
            let error = io::Error::last_os_error();
            // A file system without this (tmpfs) has no disk to write to.
            if !matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EINVAL | libc::ESPIPE | libc::EOPNOTSUPP)) {
                return Err(error);
            }
        }
        self.leave_cache(offset, bytes);
        Ok(())
    }

    fn leave_cache(&self, offset: u64, bytes: usize) {
        // Advice: without it the bytes are right as well.
        // SAFETY: the descriptor is open.
        unsafe {
            libc::posix_fadvise(
                self.file.as_raw_fd(),
                offset as libc::off_t,
                bytes as libc::off_t,
                libc::POSIX_FADV_DONTNEED,
            );
        }
    }
}

/// A file that never has a name.
fn nameless(directory: &Path) -> io::Result<File> {
    // Without O_EXCL it could be given a name later.
    let flags = libc::O_TMPFILE | libc::O_EXCL;
    OpenOptions::new().read(true).write(true).mode(0o600).custom_flags(flags).open(directory)
}

/// Whether the file system, or the system, knows no nameless files.
fn lacks_nameless_files(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR | libc::EINVAL))
}

/// A file that has lost its name. `tempfile` makes it for its owner alone, under a name that nobody can guess.
fn unlinked(directory: &Path) -> io::Result<File> {
    let named = tempfile::Builder::new().prefix(".plimsoll-").tempfile_in(directory)?;
    let (file, path) = named.into_parts();
    path.close()?;
    Ok(file)
}

fn set_direct(file: &File, direct: bool) -> bool {
    // SAFETY: the descriptor is open; these commands take and give integers.
    unsafe {
        let flags = libc::fcntl(file.as_raw_fd(), libc::F_GETFL);
        let flags = if direct { flags | libc::O_DIRECT } else { flags & !libc::O_DIRECT };
        libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags) == 0
    }
}

/// Whether direct I/O in pages works here: some file systems take the flag and refuse the transfer.
fn takes_direct(file: &File, page: &mut [u8]) -> bool {
    page.fill(0x5a);
    let written = file.write_all_at(page, 0).is_ok();
    page.fill(0);
    written && file.read_exact_at(page, 0).is_ok() && page.iter().all(|&byte| byte == 0x5a)
}

fn failed(call: &'static str, error: &io::Error, bytes: usize) -> CopyError {
    match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => CopyError::Full { bytes },
        _ => CopyError::File { call, message: error.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::super::slabs::{Mapped, Pool};
    use super::*;

    #[test]
    fn both_kinds_of_file_are_the_owners_alone_and_have_no_name() {
        let directory = tempfile::tempdir().unwrap();
        for make in [nameless, unlinked] {
            let file = make(directory.path()).unwrap();
            let facts = file.metadata().unwrap();
            assert_eq!((facts.nlink(), facts.mode() & 0o077), (0, 0));
            assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn bytes_come_back_with_and_without_the_page_cache() {
        let directory = tempfile::tempdir().unwrap();
        let room = Pool::new(Box::new(Mapped), u64::MAX).take(2 * PAGE_BYTES).unwrap();
        // SAFETY: the slab has two pages, and is used here alone.
        let pages = unsafe { std::slice::from_raw_parts_mut(room.at(0), 2 * PAGE_BYTES) };
        let mut file = SpillFile::create(directory.path(), &mut pages[..PAGE_BYTES]).unwrap();
        for is_direct in [file.is_direct, false] {
            assert!(set_direct(&file.file, is_direct));
            file.is_direct = is_direct;
            file.reserve(0..5 * PAGE_BYTES as u64).unwrap();
            pages.iter_mut().zip(0_u32..).for_each(|(byte, index)| *byte = (index % 251) as u8);
            file.write(pages, 3 * PAGE_BYTES as u64).unwrap();
            pages.fill(0);
            file.read(pages, 3 * PAGE_BYTES as u64).unwrap();
            assert!(pages.iter().zip(0_u32..).all(|(&byte, index)| byte == (index % 251) as u8));
        }
    }

    #[test]
    fn a_directory_that_is_not_there_is_an_error_that_says_so() {
        let error = SpillFile::create(Path::new("/nowhere/at/all"), &mut [0; PAGE_BYTES]).unwrap_err();
        assert!(matches!(&error, CopyError::File { message, .. } if message.contains("No such file")), "{error}");
    }
}
