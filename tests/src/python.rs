//! Python with the torch whose libtorch tests use, and our package for it.

use std::path::{Path, PathBuf};
use std::process::Command;

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

/// Puts the package into `folder`, with the extension as it was built beside the test that is running.
pub fn package(folder: &Path) -> &Path {
    let built = std::env::current_exe().expect("this program's own path").with_file_name("lib_plimsoll.so");
    let stage = Path::new(env!("CARGO_MANIFEST_DIR")).join("../runtime/python/stage.sh");
    let staged = Command::new("sh").args([&stage, &built, folder]).status().expect("sh is there");
    assert!(staged.success(), "{}: {staged}", stage.display());
    folder
}

/// What has `torch.compile` keep what it makes in `folder`, and not find out which vectors the processor has: that takes longer than
/// all else it does.
pub fn compiler(folder: &Path) -> [(&'static str, PathBuf); 2] {
    [("TORCHINDUCTOR_CACHE_DIR", folder.to_owned()), ("TORCHINDUCTOR_VEC_ISA_OK", "0".into())]
}

/// Whether C++ can be compiled for Python, as `torch.compile` does.
pub fn has_headers() -> bool {
    let print = "import sysconfig; print(sysconfig.get_path('include'))";
    let output = Command::new("python3").args(["-c", print]).output().expect("python3 is there");
    let folder = String::from_utf8(output.stdout).expect("a path");
    let found = Path::new(folder.trim()).join("Python.h").exists();
    if !found {
        println!("did not run: what torch.compile generates includes Python.h, which is not there");
    }
    found
}
