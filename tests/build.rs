//! Compiles what the tests do with libtorch beyond `tch`, and lets every program find libtorch without
//! `LD_LIBRARY_PATH`.

fn main() {
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    println!("cargo:rerun-if-changed=src/beyond_tch.cpp");
    let libtorch =
        std::env::var("LIBTORCH").expect("LIBTORCH names the folder of libtorch 2.11 (`make libtorch` fetches it)");
    let include = std::path::Path::new(&libtorch).join("include");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .warnings(true)
        .flag("-isystem")
        .flag(&include)
        .file("src/beyond_tch.cpp")
        .compile("plimsoll_beyond_tch");
    println!("cargo:rustc-link-search=native={libtorch}/lib");
    println!("cargo:rustc-link-lib=torch_cpu");
    println!("cargo:rustc-link-lib=c10");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{libtorch}/lib");
}
