//! Devices: the CPU, or a GPU, whose libraries are loaded only if it is requested.

use crate::flag::{Setting, expect};
use crate::{Error, Result};
use std::fmt;
use std::io::Write;

/// The setting `device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Device {
    /// The first GPU if there is one that libtorch can use, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU of this number.
    Cuda(usize),
}

impl Device {
    /// Parses `auto`, `cpu`, `cuda` or `cuda:N`.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "auto" => Some(Self::Auto),
            "cpu" => Some(Self::Cpu),
            "cuda" => Some(Self::Cuda(0)),
            _ => text.strip_prefix("cuda:")?.parse().ok().map(Self::Cuda),
        }
    }

    /// Returns libtorch's device; loads the CUDA libraries of libtorch unless `self` is the CPU.
    ///
    /// # Errors
    /// If a GPU is requested and a library, the driver or the GPU is missing; the message names which.
    pub fn resolve(self) -> Result<tch::Device> {
        match self {
            Self::Cpu => Ok(tch::Device::Cpu),
            // Without a driver, the libraries (a gigabyte) are not loaded.
            Self::Auto if !has_driver() => Ok(tch::Device::Cpu),
            Self::Auto => match gpus() {
                Ok(_) => Ok(tch::Device::Cuda(0)),
                Err(reason) => {
                    warn(&reason);
                    Ok(tch::Device::Cpu)
                }
            },
            Self::Cuda(number) => match gpus() {
                Ok(count) if number < count => Ok(tch::Device::Cuda(number)),
                Ok(count) => usage(self, &format!("expected a number below {count}, the number of GPUs")),
                Err(reason) => usage(self, &reason),
            },
        }
    }
}

impl Setting for Device {
    const NAME: &'static str = "DEVICE";
    const EXPECTED: &'static str = "auto, cpu, cuda or cuda:N";

    fn read(text: &str) -> Option<Self> {
        Self::parse(text)
    }
}

/// Checks that the number of threads is at most the number of CPUs.
pub(crate) fn check_threads(threads: Option<usize>) -> Result<()> {
    let Some(threads) = threads else { return Ok(()) };
    // libtorch's threads wait by spinning: with more threads than CPUs a run nearly stops.
    let most = std::thread::available_parallelism().map_or(1, usize::from);
    let expected = format!("1 to {most}, the processors there are");
    expect((1..=most).contains(&threads), "num_threads", threads, &expected)
}

/// The memory available on `device` in bytes: the machine's, or the container's limit if that is less; unknown
/// for a GPU.
pub(crate) fn memory(device: tch::Device) -> Option<usize> {
    if device != tch::Device::Cpu {
        return None;
    }
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let machine = read("/proc/meminfo")?;
    let total = machine.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB"));
    let total = total?.parse::<usize>().ok()? << 10;
    let groups = read("/proc/self/cgroup").unwrap_or_default();
    Some(memory_limit(&groups, read).map_or(total, |limit| limit.min(total)))
}

/// The smallest memory limit of the control groups in `/proc/self/cgroup`, of version 1 or 2, and of their parents; a container
/// sees its own group as the root.
fn memory_limit(groups: &str, read: impl Fn(&str) -> Option<String>) -> Option<usize> {
    let mut least = None;
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            several if several.split(',').any(|name| name == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        for group in std::path::Path::new(path).ancestors().filter_map(|group| group.to_str()) {
            let limit = read(&format!("{root}{}/{file}", group.trim_end_matches('/')));
            // `max` means no limit.
            let limit = limit.and_then(|text| text.trim().parse::<usize>().ok());
            least = least.into_iter().chain(limit).min();
        }
    }
    least
}

/// Sets libtorch's number of threads. Without a setting, here or in `OMP_NUM_THREADS`, limits it to the CPUs available to the
/// container, which libtorch does not check.
pub fn use_threads(asked: Option<usize>) {
    let there = std::thread::available_parallelism().map_or(usize::MAX, usize::from);
    let too_many = std::env::var_os("OMP_NUM_THREADS").is_none() && tch::get_num_threads() as usize > there;
    if let Some(threads) = asked.or(too_many.then_some(there)) {
        tch::set_num_threads(threads as i32);
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(0) => f.write_str("cuda"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

impl serde::Serialize for Device {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

fn usage<T>(device: Device, reason: &str) -> Result<T> {
    Err(Error::Usage(format!("device = {device}: {reason}")))
}

/// Warns, once, why a machine with a GPU computes on its CPU.
fn warn(reason: &str) {
    static TOLD: std::sync::Once = std::sync::Once::new();
    TOLD.call_once(|| {
        let _ = writeln!(std::io::stderr(), "warning: device = auto: computing on the CPU: {reason}");
    });
}

/// Whether a driver for NVIDIA GPUs is loaded.
fn has_driver() -> bool {
    // /dev/dxg is the GPU of Windows under WSL.
    ["/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"].iter().any(|path| std::path::Path::new(path).exists())
}

/// Number of GPUs that libtorch can use, or the reason that it can use none.
fn gpus() -> Result<usize, String> {
    tch_ext::load_cuda().map_err(|message| explain(&message))?;
    match tch::Cuda::device_count() {
        count @ 1.. => Ok(count as usize),
        _ => Err("CUDA is installed, but it can use no GPU: CUDA 13 needs an NVIDIA GPU of compute capability 7.5 or \
                  newer and driver 580 or newer, and CUDA_VISIBLE_DEVICES must not hide it (`nvidia-smi` lists the GPUs)"
            .into()),
    }
}

/// Explains an error of the dynamic linker, with a remedy.
fn explain(message: &str) -> String {
    let library = message.split(':').next().unwrap_or_default();
    if library == "libcuda.so.1" {
        "no NVIDIA driver: libcuda.so.1 not found; install the driver (580 or newer, for CUDA 13)".into()
    } else if library.ends_with("/libtorch_cuda.so") && message.contains("No such file") {
        format!("no CUDA for libtorch: expected {library}; `make cuda` fetches it")
    } else {
        format!("libtorch's CUDA half cannot be loaded: {message}; `make cuda` fetches what it needs")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_read_and_written_in_the_same_words() {
        for (text, device) in
            [("auto", Device::Auto), ("cpu", Device::Cpu), ("cuda", Device::Cuda(0)), ("cuda:3", Device::Cuda(3))]
        {
            assert_eq!((Device::parse(text), device.to_string().as_str()), (Some(device), text));
        }
        for text in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "mps"] {
            assert_eq!(Device::parse(text), None, "{text}");
        }
        assert_eq!(Device::Cpu.resolve().unwrap(), tch::Device::Cpu);
    }

    #[test]
    fn the_least_limit_of_both_versions_of_control_groups_counts() {
        let limit = |groups: &str, files: &[(&str, &str)]| {
            memory_limit(groups, |path| Some(files.iter().find(|(name, _)| *name == path)?.1.to_string()))
        };
        let (v2, v1) = ("0::/user/job\n", "5:cpu,cpuacct:/a\n4:memory:/docker/0123\n1:name=systemd:/b\n");
        assert_eq!(limit(v2, &[("/sys/fs/cgroup/memory.max", "max\n")]), None);
        assert_eq!(limit(v2, &[("/sys/fs/cgroup/memory.max", "900\n")]), Some(900));
        let nested = [("/sys/fs/cgroup/user/job/memory.max", "800\n"), ("/sys/fs/cgroup/user/memory.max", "700\n")];
        assert_eq!(limit(v2, &nested), Some(700));
        // A container's group has the path that it has outside, and lies at the root inside.
        assert_eq!(limit(v1, &[("/sys/fs/cgroup/memory/memory.limit_in_bytes", "600\n")]), Some(600));
        assert_eq!(limit("", &[("/sys/fs/cgroup/memory.max", "5")]), None);
    }

    #[test]
    fn what_is_missing_for_a_gpu_is_named_with_the_way_out() {
        let missing = |what: &str| format!("{what}: cannot open shared object file: No such file or directory");
        let lib = "/opt/torch/lib/libtorch_cuda.so";
        assert_eq!(
            explain(&missing(lib)),
            "no CUDA for libtorch: expected /opt/torch/lib/libtorch_cuda.so; `make cuda` fetches it"
        );
        assert!(explain(&missing("libcudnn.so.9")).contains("libcudnn.so.9: cannot open"));
        assert!(explain(&missing("libcuda.so.1")).starts_with("no NVIDIA driver: libcuda.so.1"));
    }
}
