//! Run path of the tests and examples: the libtorch that they were built with, which dependent crates learn as well.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The doctests of README.md and docs/: a package from crates.io does not contain these pages.
    println!("cargo:rustc-check-cfg=cfg(repository)");
    if std::path::Path::new("../../docs/library/rust.md").exists() {
        println!("cargo:rustc-cfg=repository");
    }
    let lib = std::env::var("DEP_TCH_LIBTORCH_LIB").expect("torch-sys sets DEP_TCH_LIBTORCH_LIB");
    // For the build scripts of crates that depend on this one: DEP_RLHF_LIBTORCH_LIB.
    println!("cargo:libtorch_lib={lib}");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{lib}");
}
