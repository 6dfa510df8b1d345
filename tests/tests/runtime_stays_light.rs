//! What a production job links has no trainer, no libtorch and no C++ in its dependency tree.

use std::process::Command;

#[test]
fn neither_burn_nor_tch_nor_a_cpp_compiler_is_needed() {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "-p", "plimsoll-runtime", "-e", "normal,build", "--prefix", "none"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let tree = String::from_utf8(output.stdout).unwrap();
    let packages: Vec<&str> = tree.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(packages.contains(&"safetensors"), "the tree is that of the runtime: {packages:?}");
    for heavy in ["tch", "torch-sys", "cc", "cmake", "bindgen"] {
        assert!(!packages.contains(&heavy), "{heavy} is in the tree:\n{tree}");
    }
    assert!(!packages.iter().any(|package| package.starts_with("burn")), "{tree}");
}
