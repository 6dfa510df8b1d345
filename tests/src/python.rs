//! Python with the torch whose libtorch tests use.

use std::path::{Path, PathBuf};

/// Where Python finds torch, and what torch imports. None where the libtorch in use is not Python's.
pub fn torch_packages() -> Option<[PathBuf; 2]> {
    let libtorch = Path::new(env!("LIBTORCH"));
    if !libtorch.join("__init__.py").exists() {
        return None;
    }
    let imported = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.tools/python");
    assert!(imported.exists(), "run `make tools` first");
    Some([libtorch.parent().expect("it is a folder in another").to_owned(), imported])
}
