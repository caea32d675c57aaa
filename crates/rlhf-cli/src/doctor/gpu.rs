//! GPUs: the driver, CUDA's libraries next to libtorch, each GPU's name, memory and compute capability, and NCCL.

use super::finding::{Finding, variable};
use rlhf::process::{self, output};
use rlhf::{device, dist};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Least compute capability and driver of CUDA 13, which libtorch is built for.
const CAPABILITY: f64 = 7.5;
const DRIVER: u32 = 580;

/// Time limit of `nvidia-smi`, which takes seconds where the driver has to start.
const LIMIT: Duration = Duration::from_secs(10);

/// A GPU, as `nvidia-smi` describes it.
#[derive(Debug, Clone, PartialEq)]
struct Gpu {
    name: String,
    memory_mib: u64,
    capability: f64,
}

/// State of drivers, libraries and GPUs.
#[derive(Debug, Clone, Default)]
struct Seen {
    /// NVIDIA GPUs on the PCI bus.
    on_bus: usize,
    /// A driver is loaded, and its device files are visible.
    driver: bool,
    /// Version of the driver.
    driver_version: Option<String>,
    /// The linker knows the driver's library, libcuda.so.1.
    driver_library: bool,
    /// `libtorch_cuda.so` is next to libtorch.
    cuda: bool,
    /// Number of GPUs that libtorch can use, or the reason that it can use none; `None` if that was not checked.
    usable: Option<Result<usize, String>>,
    gpus: Vec<Gpu>,
    /// Value of `CUDA_VISIBLE_DEVICES`.
    visible: Option<String>,
    /// Path of the library that `make cuda` builds, or the reason that there is none; `None` if libtorch has no CUDA.
    library: Option<Result<String, String>>,
}

/// Examines GPUs. Returns the findings, and whether libtorch can use a GPU.
pub(super) fn examine() -> (Vec<Finding>, bool) {
    let folder = tch_ext::libtorch_folder().unwrap_or_default();
    let driver = device::has_driver();
    let cuda = folder.join("libtorch_cuda.so").is_file();
    let version = std::fs::read_to_string("/proc/driver/nvidia/version").ok();
    // Loads a gigabyte of libraries.
    let usable = (driver && cuda).then(device::gpus);
    let seen = Seen {
        on_bus: on_bus(Path::new("/sys/bus/pci/devices")),
        driver,
        driver_version: version.as_deref().and_then(driver_version),
        driver_library: knows_driver(&std::fs::read("/etc/ld.so.cache").unwrap_or_default()),
        cuda,
        library: cuda.then(|| library_in(&folder, usable.as_ref())),
        usable,
        gpus: if driver { described() } else { Vec::new() },
        visible: std::env::var("CUDA_VISIBLE_DEVICES").ok(),
    };
    let usable = matches!(seen.usable, Some(Ok(1..)));
    (findings(&seen), usable)
}

/// The path of the library that `make cuda` builds in libtorch's folder; or the reason that it is missing, or cannot be loaded if CUDA is.
fn library_in(folder: &Path, usable: Option<&Result<usize, String>>) -> Result<String, String> {
    let path = dist::cuda_library_in(folder)?;
    match (usable, tch_ext::graphs_error()) {
        (Some(Ok(_)), Some(error)) => Err(format!("it cannot be loaded: {error}")),
        _ => Ok(path.display().to_string()),
    }
}

/// Returns the findings about the GPU, and about the library that `make cuda` builds.
fn findings(seen: &Seen) -> Vec<Finding> {
    let gpus = seen
        .gpus
        .iter()
        .map(|gpu| json!({"name": gpu.name, "memory": gpu.memory_mib << 20, "compute_capability": gpu.capability}));
    let usable = match seen.usable {
        Some(Ok(count)) => count,
        _ => 0,
    };
    let gpu = gpu(seen)
        .with("driver", seen.driver)
        .with("driver_version", seen.driver_version.clone())
        .with("libtorch_cuda", seen.cuda)
        .with("usable", usable)
        .with("gpus", gpus.collect::<Vec<Value>>())
        .with("cuda_visible_devices", seen.visible.clone());
    let path = seen.library.as_ref().and_then(|library| library.as_ref().ok()).cloned();
    vec![gpu, library(seen, usable).with("library", path)]
}

fn gpu(seen: &Seen) -> Finding {
    if !seen.driver {
        return without_driver(seen);
    }
    let version = seen.driver_version.as_deref().unwrap_or("of unknown version");
    let driver = format!("NVIDIA driver {version}");
    let major = seen.driver_version.as_ref().and_then(|version| version.split('.').next()?.parse::<u32>().ok());
    let install = format!("install NVIDIA's driver {DRIVER} or newer");
    if let Some(gpu) = seen.gpus.iter().find(|gpu| gpu.capability > 0.0 && gpu.capability < CAPABILITY) {
        let Gpu { name, capability, .. } = gpu;
        let text =
            format!("{name}: compute capability {capability}, and CUDA 13 needs {CAPABILITY}: it cannot be used");
        return Finding::warning("gpu", text, "set --device cpu, or use a newer GPU");
    }
    if major.is_some_and(|major| major < DRIVER) {
        return Finding::failure("gpu", format!("{driver}: CUDA 13 needs {DRIVER} or newer"), install);
    }
    if seen.visible.as_ref().is_some_and(|shown| shown.trim().is_empty() || shown.trim().starts_with('-')) {
        let text = format!("{driver}; CUDA_VISIBLE_DEVICES hides every GPU: runs use the CPU");
        return Finding::warning("gpu", text, "unset CUDA_VISIBLE_DEVICES to use the GPU");
    }
    match &seen.usable {
        None => {
            let text = format!("{driver}, but no CUDA for libtorch: runs use the CPU");
            Finding::warning("gpu", text, fetch_cuda(" (3 GB)"))
        }
        Some(Err(reason)) => {
            Finding::failure("gpu", format!("{driver}: {reason}"), "correct that, or set --device cpu")
        }
        Some(Ok(count)) => {
            let describe = |gpu: &Gpu| {
                let gib = gpu.memory_mib as f64 / 1024.0;
                format!("{} ({gib:.0} GiB, compute capability {})", gpu.name, gpu.capability)
            };
            let names: Vec<String> = seen.gpus.iter().map(describe).collect();
            let names = if names.is_empty() { "`nvidia-smi` does not describe it".into() } else { names.join(", ") };
            let number = if *count == 1 { "1 GPU".to_string() } else { format!("{count} GPUs") };
            Finding::ok("gpu", format!("{number}: {names}; {driver}"))
        }
    }
}

/// The finding of a machine where no driver is loaded.
fn without_driver(seen: &Seen) -> Finding {
    let half = if seen.cuda { ", though libtorch has CUDA" } else { "" };
    if seen.on_bus > 0 {
        let text = format!("an NVIDIA GPU without a driver{half}: runs use the CPU");
        let hint = format!(
            "install NVIDIA's driver, {DRIVER} or newer; in a container, pass the GPU on (docker run --gpus all){}",
            if seen.cuda { String::new() } else { format!("; then {}", device::cuda_command()) }
        );
        return Finding::warning("gpu", text, hint);
    }
    if seen.driver_library {
        let text = format!("the driver's library is there, but no GPU is visible{half}: runs use the CPU");
        return Finding::warning(
            "gpu",
            text,
            "in a container, pass the GPU on (docker run --gpus all); else none is needed",
        );
    }
    Finding::ok("gpu", format!("no NVIDIA GPU{half}: runs use the CPU"))
}

/// The hint to fetch CUDA's libraries, with a remark on the command.
fn fetch_cuda(remark: &str) -> String {
    let command = device::cuda_command();
    let again = if process::is_of_python_package() { "" } else { ", then `make install` again" };
    format!("run {command}{remark}{again}")
}

fn library(seen: &Seen, usable: usize) -> Finding {
    const NAME: &str = "cuda library";
    let missed = |text: String| Finding::warning(NAME, text, fetch_cuda(""));
    match (&seen.library, usable) {
        (Some(Ok(path)), _) => Finding::ok(NAME, path),
        (Some(Err(_)), 0) => Finding::ok(NAME, "not there; no GPU can be used, so nothing needs it"),
        (Some(Err(reason)), 1) => missed(format!("generation takes twice as long without it: {reason}")),
        (Some(Err(reason)), count) => missed(format!(
            "{count} GPUs, of which a run can use one, and generation takes twice as long without it: {reason}"
        )),
        (None, _) => Finding::ok(NAME, "not there, as libtorch has no CUDA; ranks on CPUs use Gloo"),
    }
}

/// Number of NVIDIA GPUs on the PCI bus.
fn on_bus(devices: &Path) -> usize {
    let devices = std::fs::read_dir(devices).into_iter().flatten().flatten();
    let starts = |folder: &Path, file: &str, start: &str| {
        std::fs::read_to_string(folder.join(file)).is_ok_and(|text| text.starts_with(start))
    };
    // Class 03 is that of display controllers.
    devices.filter(|at| starts(&at.path(), "vendor", "0x10de") && starts(&at.path(), "class", "0x03")).count()
}

/// Returns the version in `/proc/driver/nvidia/version`: the first word of the driver's line that has the form of a version.
fn driver_version(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("NVRM"))?;
    let is_version = |word: &&str| {
        word.contains('.') && word.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
    };
    line.split_whitespace().find(is_version).map(String::from)
}

/// Returns true if the cache of the dynamic linker lists the driver's library.
fn knows_driver(cache: &[u8]) -> bool {
    let name = b"libcuda.so.1\0";
    cache.windows(name.len()).any(|window| window == name)
}

/// The GPUs that `nvidia-smi` lists; empty where it is missing or fails.
fn described() -> Vec<Gpu> {
    let query = ["--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"];
    let mut command = Command::new("nvidia-smi");
    command.args(query);
    if let Some(ids) = variable("CUDA_VISIBLE_DEVICES").filter(|ids| !ids.contains('-')) {
        command.args(["--id", &ids]);
    }
    output(&mut command, LIMIT).map(|ended| parsed(&ended.stdout)).unwrap_or_default()
}

fn parsed(text: &str) -> Vec<Gpu> {
    let gpu = |line: &str| {
        let mut cells = line.rsplitn(3, ',').map(str::trim);
        let capability = cells.next()?.parse().ok()?;
        Some(Gpu { capability, memory_mib: cells.next()?.parse().ok()?, name: cells.next()?.to_string() })
    };
    text.lines().filter_map(gpu).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Status;

    fn test_gpu(name: &str, capability: f64) -> Gpu {
        Gpu { name: name.into(), memory_mib: 81_559, capability }
    }

    #[test]
    fn each_combination_of_driver_and_libraries_has_its_finding() {
        let none = Seen::default();
        let driver = Seen { driver: true, driver_version: Some("580.65.06".into()), on_bus: 1, ..none.clone() };
        let whole =
            Seen { cuda: true, usable: Some(Ok(1)), gpus: vec![test_gpu("NVIDIA H100", 9.0)], ..driver.clone() };
        let refused = Some(Err("CUDA is installed, but it can use no GPU".into()));
        for (seen, status, text, hint) in [
            (none.clone(), Status::Ok, "no NVIDIA GPU: runs use the CPU", ""),
            (Seen { cuda: true, ..none.clone() }, Status::Ok, "though libtorch has CUDA", ""),
            (Seen { on_bus: 1, ..none.clone() }, Status::Warning, "without a driver", "driver, 580 or newer"),
            (Seen { driver_library: true, cuda: true, ..none }, Status::Warning, "no GPU is visible", "--gpus all"),
            (driver, Status::Warning, "no CUDA for libtorch", "make cuda"),
            (whole.clone(), Status::Ok, "1 GPU: NVIDIA H100 (80 GiB, compute capability 9)", ""),
            (Seen { usable: refused, ..whole.clone() }, Status::Failure, "it can use no GPU", "--device cpu"),
            (
                Seen { gpus: vec![test_gpu("Tesla V100", 7.0)], ..whole.clone() },
                Status::Warning,
                "needs 7.5",
                "--device cpu",
            ),
            (
                Seen { driver_version: Some("535.1".into()), ..whole.clone() },
                Status::Failure,
                "needs 580",
                "driver 580",
            ),
            (Seen { visible: Some("-1".into()), ..whole }, Status::Warning, "hides every GPU", "unset"),
        ] {
            let finding = gpu(&seen);
            assert_eq!(finding.status, status, "{}", finding.text);
            assert!(finding.text.contains(text), "{}", finding.text);
            assert!(finding.hint.unwrap_or_default().contains(hint), "{hint}");
        }
    }

    #[test]
    fn the_cuda_library_is_missed_only_where_there_is_a_gpu() {
        let missing = Seen { library: Some(Err("no CUDA library".into())), ..Seen::default() };
        let statuses = [0, 1, 2].map(|gpus| library(&missing, gpus).status);
        assert_eq!(statuses, [Status::Ok, Status::Warning, Status::Warning]);
        assert_eq!(library(&Seen::default(), 0).status, Status::Ok);
        let there = Seen { library: Some(Ok("/lib/libtch_ext_cuda.so".into())), ..Seen::default() };
        assert_eq!(findings(&there)[1].facts["library"], "/lib/libtch_ext_cuda.so");
    }

    #[test]
    fn texts_of_the_driver_are_read() {
        let text =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 13.2.0\n";
        assert_eq!(driver_version(text).as_deref(), Some("580.65.06"));
        let lines = "NVIDIA H100 80GB HBM3, 81559, 9.0\nOdd, name, 1024, 7.0\nbroken\n";
        assert_eq!(
            parsed(lines),
            [test_gpu("NVIDIA H100 80GB HBM3", 9.0), Gpu { memory_mib: 1024, ..test_gpu("Odd, name", 7.0) }]
        );
        assert!(
            knows_driver(b"ld.so-1.7.0\0libcuda.so.1\0/usr/lib/libcuda.so.1\0") && !knows_driver(b"libcudart.so.1")
        );
        let bus = tempfile::tempdir().unwrap();
        for (slot, vendor, class) in
            [("a", "0x10de\n", "0x030200\n"), ("b", "0x10de\n", "0x020700\n"), ("c", "0x8086\n", "0x030000\n")]
        {
            std::fs::create_dir(bus.path().join(slot)).unwrap();
            std::fs::write(bus.path().join(slot).join("vendor"), vendor).unwrap();
            std::fs::write(bus.path().join(slot).join("class"), class).unwrap();
        }
        assert_eq!(on_bus(bus.path()), 1);
    }
}
