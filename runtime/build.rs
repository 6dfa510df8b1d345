//! Compiles the dispatcher shim, for the feature `torch` alone.

#[cfg(feature = "torch")]
fn main() {
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    // The C++ alone: Rust beside it does not make it be compiled again.
    for file in std::fs::read_dir("src/torch").expect("the shim's sources").flatten() {
        if file.path().extension().is_some_and(|kind| kind == "cpp" || kind == "h") {
            println!("cargo:rerun-if-changed={}", file.path().display());
        }
    }
    println!("cargo:rerun-if-changed=src/torch/cuda_declarations");
    println!("cargo:rerun-if-changed=benches/loops.cpp");
    let libtorch =
        std::env::var("LIBTORCH").expect("LIBTORCH names the folder of libtorch 2.11 (`make libtorch` fetches it)");
    let include = std::path::Path::new(&libtorch).join("include");
    // One unit: libtorch's headers are read once, and the path of an operator is inlined across files.
    let here = std::env::current_dir().expect("cargo runs build scripts in the package");
    let units = [
        "allocator",
        "accelerator",
        "entries",
        "operators",
        "switches",
        "recipe",
        "streams",
        "audit",
        "bystanders",
        "call",
        "unboxed",
        "lists",
        "composites",
        "objects",
        "interceptor",
        "region",
        "settings",
        "shim",
    ];
    let sources = units
        .map(|name| here.join(format!("src/torch/{name}.cpp")))
        .into_iter()
        .chain([here.join("benches/loops.cpp")]);
    let unit: String = sources.map(|path| format!("#include \"{}\"\n", path.display())).collect();
    let unit_path = std::path::PathBuf::from(std::env::var("OUT_DIR").expect("cargo sets it")).join("unit.cpp");
    std::fs::write(&unit_path, unit).expect("cargo's output folder can be written to");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .opt_level(3)
        .warnings(true)
        // Nobody replaces our symbols: functions may be inlined although the code can be put anywhere.
        .flag("-fvisibility=hidden")
        .flag("-fno-semantic-interposition")
        .flag("-isystem")
        .flag(here.join("src/torch/cuda_declarations"))
        .flag("-isystem")
        .flag(&include)
        .flag("-isystem")
        .flag(include.join("torch/csrc/api/include"))
        .file(unit_path)
        .compile("plimsoll_shim");
    println!("cargo:rustc-link-search=native={libtorch}/lib");
    println!("cargo:rustc-link-lib=torch_cpu");
    println!("cargo:rustc-link-lib=c10");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{libtorch}/lib");
}

#[cfg(not(feature = "torch"))]
fn main() {}
