//! How Plimsoll's files stand on disk: whole or not at all, and recognisably damaged when damaged.
//!
//! Traces, plans and saved training states share one envelope: a line of text that names the kind, the format version, the
//! SHA-256 of the body and its length in bytes, then the body, of the first two as JSON:
//!
//! ```text
//! plimsoll trace 1 sha256=9f86d0… bytes=48213
//! {"workload":"gpt-small",…}
//! ```
//!
//! A file may be packed by gzip, whatever its name is. This module knows nothing of what a body means.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;
use serde::{Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};

/// No file of ours is larger; a header that claims more is refused before anything is allocated.
const BODY_BYTES_MAX: u64 = 1 << 30;
/// How a file that gzip has packed begins.
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
/// The longest header line, its newline included.
const HEADER_BYTES_MAX: usize = 160;

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A recorded iteration: [`crate::Trace`].
    Trace,
    /// A planned iteration: [`crate::PlanFile`].
    Plan,
    /// A learned policy: `PolicyFile` (safetensors, not the envelope).
    Policy,
    /// What a training run needs to go on.
    TrainingState,
}

impl FileKind {
    /// What the file at `path` seems to hold; none where it is no file of ours.
    pub fn of(path: &Path) -> Result<Option<FileKind>, FileError> {
        let begin = || -> io::Result<Vec<u8>> {
            let mut begin = Vec::new();
            let file = BufReader::new(std::fs::File::open(path)?);
            unpacked(file)?.take(HEADER_BYTES_MAX as u64).read_to_end(&mut begin)?;
            Ok(begin)
        };
        let begin = begin().map_err(|error| FileError::new(path, error))?;
        let says = |kind: FileKind| begin.starts_with(format!("plimsoll {kind} ").as_bytes());
        let enveloped = [FileKind::Trace, FileKind::Plan, FileKind::TrainingState].into_iter().find(|&kind| says(kind));
        // So safetensors begin: with the length of what follows, which is JSON.
        let is_policy = || begin.get(8) == Some(&b'{');
        Ok(enveloped.or_else(|| is_policy().then_some(FileKind::Policy)))
    }

    const fn word(self) -> &'static str {
        match self {
            FileKind::Trace => "trace",
            FileKind::Plan => "plan",
            FileKind::Policy => "policy",
            FileKind::TrainingState => "training-state",
        }
    }
}

impl fmt::Display for FileKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// A file that could not be read or written, and why.
#[derive(Debug, thiserror::Error)]
#[error("{}: {reason}", path.display())]
pub struct FileError {
    path: PathBuf,
    reason: FileErrorReason,
}

/// Why a file could not be read or written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileErrorReason {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("not a plimsoll {expected} file")]
    Foreign { expected: FileKind },
    #[error("expected a plimsoll {expected} file, found a {found} file")]
    OtherKind { expected: FileKind, found: String },
    #[error("{kind} format version {found} is newer than {supported}, the newest this build reads")]
    Newer { kind: FileKind, supported: u32, found: u32 },
    #[error("truncated or extended: the header promises {expected} bytes, the file holds {found}")]
    Length { expected: u64, found: u64 },
    #[error("altered after it was written: its SHA-256 is {found}, the header says {expected}")]
    Digest { expected: String, found: String },
    #[error("malformed {kind}: {message}")]
    Malformed { kind: FileKind, message: String },
}

impl FileError {
    pub(crate) fn new(path: &Path, reason: impl Into<FileErrorReason>) -> Self {
        FileError { path: path.to_owned(), reason: reason.into() }
    }

    pub(crate) fn malformed(path: &Path, kind: FileKind, message: impl fmt::Display) -> Self {
        FileError::new(path, FileErrorReason::Malformed { kind, message: message.to_string() })
    }
}

/// The SHA-256 of `bytes`, in lower-case hexadecimal.
pub fn sha256_hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes `bytes` to `path` by way of a temporary file beside it, so that readers see all or nothing. What is there and no
/// regular file, such as a pipe or a terminal, is written to; a link is followed.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let attempt = || -> io::Result<()> {
        let path = match destination(path)? {
            Destination::File(path) => path,
            Destination::Stream => return OpenOptions::new().write(true).open(path)?.write_all(bytes),
        };
        let mut file = temporary_beside(&path)?;
        file.write_all(bytes)?;
        file.as_file().sync_all()?;
        file.persist(path).map_err(|error| error.error)?;
        Ok(())
    };
    attempt().map_err(|error| FileError::new(path, error))
}

/// Fails where [`write_whole`] would, for want of a folder or of permission: to be asked before hours of work. What takes bytes
/// as they come is not asked.
pub fn require_writable(path: &Path) -> Result<(), FileError> {
    let attempt = || match destination(path)? {
        Destination::File(path) => temporary_beside(&path).map(drop),
        Destination::Stream => Ok(()),
    };
    attempt().map_err(|error| FileError::new(path, error))
}

/// Where bytes go that are written to a path.
enum Destination {
    /// To the whole file of that name, which there may be.
    File(PathBuf),
    /// To what takes them as they come.
    Stream,
}

/// Links in a row that are followed.
const LINKS_MAX: usize = 40;

fn destination(path: &Path) -> io::Result<Destination> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        Ok(found) if !found.is_file() => Ok(Destination::Stream),
        _ => Ok(Destination::File(followed(path))),
    }
}

/// Where links lead from a path, which may be to what is yet to be written.
fn followed(path: &Path) -> PathBuf {
    let mut path = path.to_owned();
    for _ in 0..LINKS_MAX {
        let Ok(target) = path.read_link() else { break };
        path = path.parent().unwrap_or(Path::new("")).join(target);
    }
    path
}

fn temporary_beside(path: &Path) -> io::Result<tempfile::NamedTempFile> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    if !folder.is_dir() {
        return Err(io::Error::new(io::ErrorKind::NotFound, format!("there is no folder {}", folder.display())));
    }
    let before = std::fs::metadata(path).ok().map(|there| there.permissions());
    let mut builder = tempfile::Builder::new();
    builder.prefix(".plimsoll-");
    // Temporary files are private to their owner unless told; this one is for whom the one is that it replaces, or any other file.
    #[cfg(unix)]
    builder.permissions(before.clone().unwrap_or_else(|| std::os::unix::fs::PermissionsExt::from_mode(0o666)));
    let file = builder.tempfile_in(folder)?;
    if let Some(before) = before {
        file.as_file().set_permissions(before)?;
    }
    Ok(file)
}

/// What `file` holds, unpacked where gzip packed it.
pub fn unpacked(mut file: impl BufRead + 'static) -> io::Result<Box<dyn BufRead>> {
    if file.fill_buf()?.starts_with(&GZIP_MAGIC) {
        Ok(Box::new(BufReader::new(MultiGzDecoder::new(file))))
    } else {
        Ok(Box::new(file))
    }
}

/// Reads a whole file, unpacked, refusing one larger than any of ours.
pub(crate) fn read_whole(path: &Path) -> Result<Vec<u8>, FileError> {
    let too_long = |length| io::Error::other(format!("{length} bytes are more than any plimsoll file holds"));
    let attempt = || -> io::Result<Vec<u8>> {
        let file = std::fs::File::open(path)?;
        let length = file.metadata()?.len();
        if length > BODY_BYTES_MAX {
            return Err(too_long(length));
        }
        let mut bytes = Vec::with_capacity(length as usize);
        let length = unpacked(BufReader::new(file))?.take(BODY_BYTES_MAX + 1).read_to_end(&mut bytes)? as u64;
        if length > BODY_BYTES_MAX { Err(too_long(length)) } else { Ok(bytes) }
    };
    attempt().map_err(|error| FileError::new(path, error))
}

/// Writes `body` in the envelope.
pub fn write_body(path: &Path, kind: FileKind, version: u32, body: &[u8]) -> Result<(), FileError> {
    let digest = sha256_hex(body);
    let mut bytes = format!("plimsoll {kind} {version} sha256={digest} bytes={}\n", body.len()).into_bytes();
    bytes.extend_from_slice(body);
    write_whole(path, &bytes)
}

/// Reads a body of the given kind out of its envelope, checking kind, version, length and digest.
pub fn read_body(path: &Path, kind: FileKind, supported: u32) -> Result<Vec<u8>, FileError> {
    let mut bytes = read_whole(path)?;
    let body = open_envelope(&bytes, kind, supported).map_err(|reason| FileError::new(path, reason))?;
    bytes.drain(..bytes.len() - body.len());
    Ok(bytes)
}

/// Writes `body` as JSON in the envelope.
pub(crate) fn write_json(path: &Path, kind: FileKind, version: u32, body: &impl Serialize) -> Result<(), FileError> {
    let body = serde_json::to_vec(body).map_err(|error| FileError::malformed(path, kind, error))?;
    write_body(path, kind, version, &body)
}

/// Reads what is JSON in the envelope.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path, kind: FileKind, supported: u32) -> Result<T, FileError> {
    let body = read_body(path, kind, supported)?;
    serde_json::from_slice(&body).map_err(|error| FileError::malformed(path, kind, error))
}

fn open_envelope(bytes: &[u8], kind: FileKind, supported: u32) -> Result<&[u8], FileErrorReason> {
    let foreign = || FileErrorReason::Foreign { expected: kind };
    let head = &bytes[..bytes.len().min(HEADER_BYTES_MAX)];
    let newline = head.iter().position(|&byte| byte == b'\n').ok_or_else(foreign)?;
    let line = std::str::from_utf8(&head[..newline]).map_err(|_| foreign())?;
    let mut words = line.split(' ');
    if words.next() != Some("plimsoll") {
        return Err(foreign());
    }
    let found = words.next().ok_or_else(foreign)?;
    if found != kind.word() {
        return Err(FileErrorReason::OtherKind { expected: kind, found: found.to_owned() });
    }
    let version: u32 = words.next().and_then(|word| word.parse().ok()).ok_or_else(foreign)?;
    if version > supported {
        return Err(FileErrorReason::Newer { kind, supported, found: version });
    }
    let digest = words.next().and_then(|word| word.strip_prefix("sha256=")).ok_or_else(foreign)?;
    let length: u64 = words.next().and_then(|word| word.strip_prefix("bytes=")?.parse().ok()).ok_or_else(foreign)?;
    let body = &bytes[newline + 1..];
    if body.len() as u64 != length {
        return Err(FileErrorReason::Length { expected: length, found: body.len() as u64 });
    }
    let actual = sha256_hex(body);
    if actual != digest {
        return Err(FileErrorReason::Digest { expected: digest.to_owned(), found: actual });
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn written() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.plimsoll");
        write_json(&path, FileKind::Trace, 1, &vec![1, 2, 3]).unwrap();
        (folder, path)
    }

    fn refusal(path: &Path, kind: FileKind, supported: u32) -> String {
        read_json::<Vec<u32>>(path, kind, supported).unwrap_err().to_string()
    }

    #[cfg(unix)]
    #[test]
    fn files_are_as_readable_as_others_and_stay_as_readable_as_they_were() {
        use std::os::unix::fs::PermissionsExt;
        let (folder, path) = written();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode();
        let other = folder.path().join("other");
        std::fs::File::create(&other).unwrap();
        assert_eq!(mode(&path), mode(&other));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        write_whole(&path, b"mine alone").unwrap();
        assert_eq!((mode(&path) & 0o777, std::fs::read(&path).unwrap()), (0o600, b"mine alone".to_vec()));
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed_streams_written_to_and_folders_refused() {
        let (folder, path) = written();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        write_whole(&link, b"through it").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"through it");
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());

        let (ahead, later) = (folder.path().join("ahead"), folder.path().join("later"));
        std::os::unix::fs::symlink("later", &ahead).unwrap();
        write_whole(&ahead, b"to what is new").unwrap();
        assert_eq!(std::fs::read(&later).unwrap(), b"to what is new");

        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        require_writable(&pipe).unwrap();
        let reader = std::thread::spawn({
            let pipe = pipe.clone();
            move || std::fs::read(pipe).unwrap()
        });
        write_whole(&pipe, b"into it").unwrap();
        assert_eq!(reader.join().unwrap(), b"into it");

        for refused in [require_writable(folder.path()), write_whole(folder.path(), b"never")] {
            assert!(refused.unwrap_err().to_string().ends_with("is a directory"), "it is a folder");
        }
    }

    #[test]
    fn a_body_comes_back() {
        let (_folder, path) = written();
        assert_eq!(read_json::<Vec<u32>>(&path, FileKind::Trace, 1).unwrap(), [1, 2, 3]);
    }

    #[test]
    fn a_packed_body_comes_back_too_and_damage_to_it_is_named() {
        let (folder, path) = written();
        let mut packer = GzEncoder::new(Vec::new(), Compression::fast());
        packer.write_all(&std::fs::read(&path).unwrap()).unwrap();
        let packed = packer.finish().unwrap();
        let path = folder.path().join("a.plimsoll.gz");
        std::fs::write(&path, &packed).unwrap();
        assert_eq!(read_json::<Vec<u32>>(&path, FileKind::Trace, 1).unwrap(), [1, 2, 3]);
        assert_eq!(FileKind::of(&path).unwrap(), Some(FileKind::Trace));
        std::fs::write(&path, &packed[..packed.len() / 2]).unwrap();
        let refused = refusal(&path, FileKind::Trace, 1);
        assert!(refused.contains("a.plimsoll.gz") && refused.len() > "a.plimsoll.gz".len() + 8, "{refused}");
    }

    #[test]
    fn damage_is_named() {
        let (_folder, path) = written();
        let whole = std::fs::read(&path).unwrap();
        assert!(refusal(&path, FileKind::Plan, 1).contains("expected a plimsoll plan file, found a trace file"));
        assert!(refusal(&path, FileKind::Trace, 0).contains("newer"));
        std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        assert!(refusal(&path, FileKind::Trace, 1).contains("truncated"));
        let mut altered = whole.clone();
        *altered.last_mut().unwrap() = b'}';
        std::fs::write(&path, &altered).unwrap();
        assert!(refusal(&path, FileKind::Trace, 1).contains("altered"));
        std::fs::write(&path, b"\x89PNG").unwrap();
        assert_eq!(FileKind::of(&path).unwrap(), None);
        assert!(refusal(&path, FileKind::Trace, 1).contains("not a plimsoll trace file"));
    }

    #[test]
    fn an_unwritable_folder_leaves_nothing_behind() {
        let (folder, _path) = written();
        let missing = folder.path().join("no-such-folder/x");
        assert!(write_whole(&missing, b"x").unwrap_err().to_string().contains("no-such-folder"));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
