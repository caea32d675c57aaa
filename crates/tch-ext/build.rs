//! Checks that the libtorch in use is the one tch was made for, compiles the shim, and sets the run path of our tests.
#![allow(clippy::print_stderr, clippy::exit)] // a build script speaks to cargo

use std::path::Path;

const TORCH_VERSION: &str = "2.11.0";

fn main() {
    println!("cargo:rerun-if-changed=csrc/shim.cpp");
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    // torch-sys hands on the folder it linked against, whichever way it was found.
    let lib = std::env::var("DEP_TCH_LIBTORCH_LIB").expect("torch-sys sets DEP_TCH_LIBTORCH_LIB");
    let torch = Path::new(&lib).parent().expect("libtorch's lib folder has a parent");
    check_version(torch);
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .pic(true)
        .warnings(false)
        .flag("-D_GLIBCXX_USE_CXX11_ABI=1")
        .include(torch.join("include"))
        .include(torch.join("include/torch/csrc/api/include"))
        .file("csrc/shim.cpp")
        .compile("tch_ext");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{lib}");
}

/// Refuses a libtorch of another version: its ABI differs, and it would crash later and stranger.
fn check_version(torch: &Path) {
    let header = torch.join("include/torch/headeronly/version.h");
    let text = std::fs::read_to_string(&header).unwrap_or_else(|e| {
        fail(&format!("{}: cannot read libtorch's version ({e}); expected libtorch {TORCH_VERSION}", header.display()))
    });
    let mut lines = text.lines().skip_while(|l| !l.starts_with("#define TORCH_VERSION "));
    let found = lines.by_ref().take(2).flat_map(|l| l.split('"').nth(1)).next().unwrap_or("an unknown version");
    if found != TORCH_VERSION {
        fail(&format!("{}: expected libtorch {TORCH_VERSION}, found {found}", torch.display()));
    }
}

fn fail(message: &str) -> ! {
    eprintln!("error: {message}");
    std::process::exit(1);
}
