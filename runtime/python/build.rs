//! Lets the test find libtorch without `LD_LIBRARY_PATH`, for the extension has to use the libtorch that Python has loaded; and takes
//! what `help()` says of the extension's classes from the package's stub.

use std::path::PathBuf;

const STUB: &str = "plimsoll/__init__.pyi";
const QUOTES: &str = "\"\"\"";

fn main() {
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    let libtorch =
        std::env::var("LIBTORCH").expect("LIBTORCH names the folder of libtorch 2.11 (`make libtorch` fetches it)");
    println!("cargo:rustc-link-arg-tests=-Wl,-rpath,{libtorch}/lib");
    println!("cargo:rerun-if-changed={STUB}");
    let stub = std::fs::read_to_string(STUB).expect("the stub is there");
    let folder = PathBuf::from(std::env::var("OUT_DIR").expect("cargo says where"));
    for (name, text) in documented(&stub) {
        std::fs::write(folder.join(name), text).expect("cargo's folder can be written to");
    }
}

/// What the stub says of each of its names, such as `Runtime.iteration`.
fn documented(stub: &str) -> Vec<(String, String)> {
    let (mut found, mut class, mut name) = (Vec::new(), "", String::new());
    let mut lines = stub.lines();
    while let Some(line) = lines.next() {
        let (text, indent) = (line.trim_start(), line.len() - line.trim_start().len());
        if let Some(begun) = text.strip_prefix(QUOTES) {
            let mut told = begun.to_owned();
            while !told.contains(QUOTES) {
                let line = lines.next().expect("what begins ends");
                told = told + "\n" + line.get(indent..).unwrap_or_default();
            }
            let told = told.split(QUOTES).next().unwrap_or_default().trim();
            found.push((name.clone(), told.to_owned()));
            continue;
        }
        let (kind, rest) = text.split_once(' ').unwrap_or((text, ""));
        let own = match kind {
            "class" | "def" => rest.split(['(', ':']).next().unwrap_or_default(),
            _ => kind.strip_suffix(':').unwrap_or_default(),
        };
        match (kind, indent) {
            ("class", _) => (class, name) = (own, own.to_owned()),
            (_, 0) if !own.is_empty() => name = own.to_owned(),
            (_, 4) if !own.is_empty() => name = format!("{class}.{own}"),
            _ => {}
        }
    }
    found
}
