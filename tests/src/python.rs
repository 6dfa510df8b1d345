//! Python with the torch whose libtorch tests use, our package for it, and extensions.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::go_without;

/// Where Python finds torch, and what torch imports. None where the libtorch in use is not Python's and tests go without.
pub fn torch_packages() -> Option<[PathBuf; 2]> {
    let libtorch = Path::new(env!("LIBTORCH"));
    if !libtorch.join("__init__.py").exists() {
        go_without("python", "LIBTORCH names no libtorch of a Python package");
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

/// Builds the extension in C++ of that name among the tests, as `torch.utils.cpp_extension` does, in `folder`.
pub fn extension(name: &str, folder: &Path) -> PathBuf {
    let (libtorch, built) = (Path::new(env!("LIBTORCH")), folder.join(format!("{name}.so")));
    let mut compiler = Command::new("c++");
    compiler.args(["-std=c++17", "-O1", "-shared", "-fPIC", "-o"]).arg(&built);
    compiler.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("jobs/{name}.cpp")));
    for include in [libtorch.join("include"), python_headers()] {
        compiler.arg("-I").arg(include);
    }
    compiler.arg("-L").arg(libtorch.join("lib")).args(["-ltorch_python", "-ltorch_cpu", "-lc10"]);
    let ended = compiler.status().expect("there is a C++ compiler");
    assert!(ended.success(), "{name}: {ended}");
    built
}

/// Where the headers of Python are, if they are installed.
fn python_headers() -> PathBuf {
    let print = "import sysconfig; print(sysconfig.get_path('include'))";
    let output = Command::new("python3").args(["-c", print]).output().expect("python3 is there");
    String::from_utf8(output.stdout).expect("a path").trim().into()
}

/// Whether C++ can be compiled for Python, as `torch.compile` does.
pub fn has_headers() -> bool {
    let found = python_headers().join("Python.h").exists();
    if !found {
        println!("did not run: C++ for Python includes Python.h, which is not there");
    }
    found
}
