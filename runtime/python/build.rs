//! Lets the test find libtorch without `LD_LIBRARY_PATH`. The extension has to use the libtorch that Python has loaded.

fn main() {
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    let libtorch =
        std::env::var("LIBTORCH").expect("LIBTORCH names the folder of libtorch 2.11 (`make libtorch` fetches it)");
    println!("cargo:rustc-link-arg-tests=-Wl,-rpath,{libtorch}/lib");
}
