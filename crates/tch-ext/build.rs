//! Checks the version of libtorch, compiles the shim, and sets the run path of this crate's tests.
#![expect(
    clippy::print_stderr,
    clippy::exit,
    reason = "a build script reports to cargo by its output and its exit code"
)]

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

const TORCH_VERSION: &str = "2.11.0";

/// Number of times that a thread of libgomp polls a barrier before it sleeps. `docs/internals/performance.md` has the measurements.
const SPIN_COUNT: &str = "10000";

fn main() {
    println!("cargo:rerun-if-changed=csrc");
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    // torch-sys exports the folder that it linked against.
    let lib = std::env::var("DEP_TCH_LIBTORCH_LIB").expect("torch-sys sets DEP_TCH_LIBTORCH_LIB");
    let torch = Path::new(&lib).parent().expect("libtorch's lib folder has a parent");
    check_version(torch);
    let mut shim = compiler(torch, "tch_ext");
    shim.include(empty_gloo_headers()).file("csrc/all.cpp");
    let mut spin = compiler(torch, "tch_ext_spin");
    spin.define("TCH_EXT_SPIN_COUNT", format!("\"{SPIN_COUNT}\"").as_str()).file("csrc/spin.cpp");
    let mut libraries = vec![("tch_ext".to_string(), shim), ("tch_ext_spin".to_string(), spin)];
    libraries.extend(kernels(torch));
    compile(&libraries);
    link_libgomp(&lib);
    println!("cargo:rustc-link-arg=-Wl,-rpath,{lib}");
}

/// Creates a folder with empty files in the place of gloo's headers, which c10d's headers include and the wheel lacks.
fn empty_gloo_headers() -> PathBuf {
    let folder = out_dir().join("gloo-headers");
    for name in ["algorithm", "common/error", "context", "rendezvous/store", "transport/device"] {
        let file = folder.join("gloo").join(name).with_extension("h");
        std::fs::create_dir_all(file.parent().expect("it is in a folder")).expect("OUT_DIR can be written");
        std::fs::write(&file, "").expect("OUT_DIR can be written");
    }
    folder
}

fn out_dir() -> PathBuf {
    PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"))
}

/// The compiler of the library `name`, whose objects have a folder of their own.
fn compiler(torch: &Path, name: &str) -> cc::Build {
    let mut build = cc::Build::new();
    build
        .out_dir(out_dir().join(name))
        .cpp(true)
        .std("c++17")
        .pic(true)
        .warnings(false)
        // libtorch's parallel loops are templates, compiled here.
        .flag("-fopenmp")
        .flag("-D_GLIBCXX_USE_CXX11_ABI=1")
        .include(torch.join("include"))
        .include(torch.join("include/torch/csrc/api/include"));
    if is_x86() {
        build.define("TCH_EXT_X86", None);
    }
    build
}

/// Compiles libraries of one file each, up to three at a time: crates above wait for them, and a compiler takes a gigabyte.
///
/// They are linked in the order of `libraries`: of an inline function that several have, the linker takes the first, and it must not be
/// one with instructions that the processor may lack.
fn compile(libraries: &[(String, cc::Build)]) {
    let jobs = std::env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(1usize);
    // The longest first: the shim, then the kernels with the most instructions.
    let order: Vec<usize> = (0..1).chain((1..libraries.len()).rev()).collect();
    let next = AtomicUsize::new(0);
    let objects: Vec<OnceLock<Result<Vec<PathBuf>, cc::Error>>> = libraries.iter().map(|_| OnceLock::new()).collect();
    std::thread::scope(|scope| {
        for _ in 0..jobs.min(3) {
            scope.spawn(|| {
                while let Some(&i) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let compiled = libraries[i].1.try_compile_intermediates();
                    if compiled.is_err() {
                        // No other file is begun, and the error is reported when all compilers have ended.
                        next.store(order.len(), Ordering::Relaxed);
                    }
                    let _ = objects[i].set(compiled);
                }
            });
        }
    });
    let compiled: Vec<_> = objects.into_iter().map(OnceLock::into_inner).collect();
    if let Some(error) = compiled.iter().flatten().find_map(|compiled| compiled.as_ref().err()) {
        fail(&error.to_string());
    }
    for ((name, _), objects) in libraries.iter().zip(compiled.into_iter().flatten().flatten()) {
        cc::Build::new().cpp(true).objects(objects).compile(name);
    }
}

/// The kernels, compiled once per instruction set, with libtorch's flags; its vector types depend on the macros.
fn kernels(torch: &Path) -> Vec<(String, cc::Build)> {
    let mut sets: Vec<(&str, &[&str])> = vec![("DEFAULT", &[])];
    if is_x86() {
        sets.push(("AVX2", &["-mavx2", "-mfma", "-mf16c"]));
        sets.push(("AVX512", &["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"]));
    }
    let build = |(name, flags): (&str, &[&str])| {
        let table = format!("kernels_{}", name.to_lowercase());
        let library = format!("tch_ext_{table}");
        let mut build = compiler(torch, &library);
        build
            // In every profile: unoptimized vector code is slower than plain loops, and tests run on it.
            .opt_level(3)
            .flag("-fno-math-errno")
            // Otherwise the compiler fuses some multiply-adds and not others, and results would depend on the tile.
            .flag("-ffp-contract=off")
            .flag("-Wno-psabi")
            .define("CPU_CAPABILITY", name)
            .define(&format!("CPU_CAPABILITY_{name}"), None)
            .define("TCH_EXT_KERNELS", table.as_str());
        flags.iter().for_each(|flag| {
            build.flag(flag);
        });
        build.file("csrc/kernels.cpp");
        (library, build)
    };
    sets.into_iter().map(build).collect()
}

fn is_x86() -> bool {
    std::env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "x86_64")
}

/// Links the libgomp that is part of libtorch, whatever its file name: two copies would have two thread pools.
fn link_libgomp(lib: &str) {
    let files = std::fs::read_dir(lib).into_iter().flatten().flatten();
    let names = files.filter_map(|file| file.file_name().into_string().ok());
    match names.filter(|name| name.starts_with("libgomp") && name.contains(".so")).min() {
        Some(name) => {
            println!("cargo:rustc-link-search=native={lib}");
            println!("cargo:rustc-link-lib=dylib:+verbatim={name}");
        }
        None => println!("cargo:rustc-link-lib=dylib=gomp"),
    }
}

/// Refuses another version of libtorch: its ABI differs, and the program would crash.
fn check_version(torch: &Path) {
    let header = torch.join("include/torch/headeronly/version.h");
    let text = std::fs::read_to_string(&header).unwrap_or_else(|e| {
        fail(&format!("{}: cannot read libtorch's version ({e}); expected libtorch {TORCH_VERSION}", header.display()))
    });
    let mut lines = text.lines().skip_while(|l| !l.starts_with("#define TORCH_VERSION "));
    let found = lines.by_ref().take(2).find_map(|l| l.split('"').nth(1)).unwrap_or("an unknown version");
    if found != TORCH_VERSION {
        fail(&format!("{}: expected libtorch {TORCH_VERSION}, found {found}", torch.display()));
    }
}

fn fail(message: &str) -> ! {
    eprintln!("error: {message}");
    std::process::exit(1);
}
