//! Run paths: the libraries that `make install` puts beside the binary, else the libtorch that it was built with.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let lib = std::env::var("DEP_TCH_LIBTORCH_LIB").expect("torch-sys sets DEP_TCH_LIBTORCH_LIB");
    println!("cargo:rustc-env=RLHF_LIBTORCH_VERSION={}", version_of(&lib));
    println!("cargo:rustc-link-arg=-Wl,-rpath,$ORIGIN/../lib/rlhf/torch/lib");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{lib}");
}

/// Returns the version of the libtorch with this folder of libraries, for `rlhf doctor`. tch-ext has checked it.
fn version_of(lib: &str) -> String {
    let header = std::path::Path::new(lib).with_file_name("include").join("torch/headeronly/version.h");
    let text = std::fs::read_to_string(&header).unwrap_or_else(|e| panic!("{}: cannot read: {e}", header.display()));
    let rest = text.split_once("#define TORCH_VERSION ").map(|(_, rest)| rest).unwrap_or_default();
    rest.split('"').nth(1).expect("version.h has the version").to_string()
}
