//! Devices: the CPU, or a GPU, whose libraries are loaded only if it is requested.

use crate::dist::launch::Launch;
use crate::process::{self, output};
use crate::schema::{Setting, expect};
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The setting `device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Device {
    /// As `cuda` if there is a GPU that libtorch can use, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU of this number. Without a number the first one, or with several ranks on a machine, that of the local rank.
    Cuda(Option<usize>),
}

impl Device {
    /// Parses `auto`, `cpu`, `cuda` or `cuda:N`.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "auto" => Some(Self::Auto),
            "cpu" => Some(Self::Cpu),
            "cuda" => Some(Self::Cuda(None)),
            _ => text.strip_prefix("cuda:")?.parse().ok().map(|number| Self::Cuda(Some(number))),
        }
    }

    /// Returns libtorch's device; loads the CUDA libraries of libtorch unless `self` is the CPU.
    ///
    /// # Errors
    /// If a GPU is requested and a library, the driver or the GPU is missing; the message names which. If a machine has more
    /// ranks than GPUs.
    pub fn resolve(self) -> Result<tch::Device> {
        match self {
            Self::Cpu => Ok(tch::Device::Cpu),
            // Without a driver, the libraries (a gigabyte) are not loaded.
            Self::Auto if !has_driver() => Ok(tch::Device::Cpu),
            Self::Auto | Self::Cuda(None) => match gpus() {
                Ok(count) => match Place::of_process().gpu(count, has_own_gpu()) {
                    Ok(number) => gpu_with_kernels(number),
                    Err(reason) => usage(self, &reason),
                },
                Err(reason) if self == Self::Auto => {
                    warn(&reason);
                    Ok(tch::Device::Cpu)
                }
                Err(reason) => usage(self, &reason),
            },
            Self::Cuda(Some(number)) => match gpus() {
                Ok(count) if number < count => gpu_with_kernels(number),
                Ok(count) => usage(self, &format!("expected a number below {count}, the number of GPUs")),
                Err(reason) => usage(self, &reason),
            },
        }
    }
}

/// The place of this process among the ranks of its machine, which share its GPUs, processors and memory.
#[derive(Debug, Clone, Copy)]
struct Place {
    rank: usize,
    ranks: usize,
}

impl Place {
    /// Reads the place from the environment of a launcher. A process that was started alone is the only rank.
    fn of_process() -> Self {
        let alone = Self { rank: 0, ranks: 1 };
        // An environment that contradicts itself is refused at the start of the program.
        Launch::from_env()
            .ok()
            .flatten()
            .map_or(alone, |launch| Self { rank: launch.local_rank, ranks: launch.local_size })
    }

    /// Returns the index of this rank's GPU among `count`. With `sees_one_gpu`, only one GPU is visible to this process, which may be this
    /// rank's own.
    fn gpu(self, count: usize, sees_one_gpu: bool) -> Result<usize, String> {
        match self.rank {
            rank if rank < count => Ok(rank),
            _ if sees_one_gpu && count == 1 => Ok(0),
            _ => Err(format!(
                "{} ranks on this machine, but libtorch can use {count} of its GPUs: start at most {count} ranks, or set \
                 --device cpu",
                self.ranks
            )),
        }
    }

    /// Returns this rank's number of processors: at least one. `available` is the number that this process may use, and
    /// `allocated` the number for all tasks that SLURM started on this machine.
    fn processors(self, available: usize, allocated: Option<usize>) -> usize {
        match allocated {
            // SLURM may have bound each task to its own processors; then the `available` ones are this rank's alone.
            Some(allocated) => available.min(allocated / self.ranks).max(1),
            None => (available / self.ranks).max(1),
        }
    }
}

/// Whether our own kernels compute on GPUs, by `RLHF_KERNELS`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GpuKernels {
    /// They do not.
    No,
    /// `cuda`: they do if they can be loaded; otherwise a line says why not.
    Cuda,
    /// `cuda-only`: if they cannot be loaded, using the GPU is an error.
    CudaOnly,
}

impl GpuKernels {
    fn of(variable: Option<&OsStr>) -> Self {
        match variable.and_then(OsStr::to_str) {
            Some("cuda") => Self::Cuda,
            Some("cuda-only") => Self::CudaOnly,
            _ => Self::No,
        }
    }
}

/// GPU `number`. Our own kernels are compiled and loaded for it if `RLHF_KERNELS` asks for them.
///
/// # Errors
/// If `RLHF_KERNELS` is `cuda-only`, and they cannot be loaded.
fn gpu_with_kernels(number: usize) -> Result<tch::Device> {
    let asked = GpuKernels::of(std::env::var_os("RLHF_KERNELS").as_deref());
    if asked == GpuKernels::No {
        return Ok(tch::Device::Cuda(number));
    }
    static TRIED: Mutex<BTreeMap<usize, Result<(), String>>> = Mutex::new(BTreeMap::new());
    let mut tried = TRIED.lock().unwrap_or_else(PoisonError::into_inner);
    let loaded = tried.entry(number).or_insert_with(|| {
        let folder = cache_folder(|name| std::env::var_os(name)).map(|folder| folder.join("kernels"));
        tch_ext::use_gpu_kernels(number, folder.as_deref()).inspect_err(|reason| {
            if asked == GpuKernels::Cuda {
                let _ =
                    writeln!(std::io::stderr(), "warning: RLHF_KERNELS = cuda: computing without kernels: {reason}");
            }
        })
    });
    match loaded {
        Err(reason) if asked == GpuKernels::CudaOnly => {
            Err(Error::Run(format!("RLHF_KERNELS = cuda-only: no kernels for GPU {number}: {reason}")))
        }
        _ => Ok(tch::Device::Cuda(number)),
    }
}

/// Returns a line with the number of our GPU kernels that this process has started; `None` unless `RLHF_KERNELS` is `cuda-only` and CUDA is
/// loaded.
pub fn started_kernels() -> Option<String> {
    let asked = GpuKernels::of(std::env::var_os("RLHF_KERNELS").as_deref());
    if asked != GpuKernels::CudaOnly || !tch_ext::is_cuda_loaded() {
        return None;
    }
    let started = tch_ext::gpu_kernels().into_iter().filter(|kernel| kernel.starts > 0);
    let (kernels, starts) = started.fold((0, 0), |(kernels, starts), kernel| (kernels + 1, starts + kernel.starts));
    Some(format!("kernels: {starts} starts of {kernels} kernels"))
}

/// The folder for files that can be made again: `$RLHF_CACHE`, or `rlhf` in the user's cache folder.
fn cache_folder(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let folder = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let user_caches = || folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")));
    folder("RLHF_CACHE").or_else(|| Some(user_caches()?.join("rlhf")))
}

/// Returns true if only one GPU is visible to this process, for example because SLURM gives each task its own.
fn has_own_gpu() -> bool {
    std::env::var("CUDA_VISIBLE_DEVICES").is_ok_and(|devices| !devices.is_empty() && !devices.contains(','))
}

/// Returns the number of GPUs of this machine that `CUDA_VISIBLE_DEVICES` does not hide, without loading the CUDA libraries.
pub fn count_gpus() -> usize {
    let names = std::fs::read_dir("/dev").into_iter().flatten().flatten().map(|entry| entry.file_name());
    let is_gpu = |name: &str| name.strip_prefix("nvidia").is_some_and(|number| number.parse::<u32>().is_ok());
    let files = names.filter(|name| name.to_str().is_some_and(is_gpu)).count();
    // Under WSL there is one file for all GPUs.
    let present = files.max(usize::from(std::path::Path::new("/dev/dxg").exists()));
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        // A number below 0 hides the GPUs after it.
        Ok(shown) => {
            shown.split(',').take_while(|id| !id.trim().is_empty() && !id.trim().starts_with('-')).count().min(present)
        }
        Err(_) => present,
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
pub fn check_threads(threads: Option<usize>) -> Result<()> {
    let Some(threads) = threads else { return Ok(()) };
    // libtorch's threads wait by spinning: with more threads than CPUs a run nearly stops.
    let most = std::thread::available_parallelism().map_or(1, usize::from);
    let expected = format!("1 to {most}, the processors there are");
    expect((1..=most).contains(&threads), "num_threads", threads, &expected)
}

/// The whole memory of `device` for this process in bytes: the machine's, or the container's limit if that is less, divided by the number
/// of ranks on this machine; for a GPU, its own memory as CUDA reports it, or `nvidia-smi` if CUDA is not loaded. `None` if it is not
/// known.
///
/// CUDA is asked once for each GPU, because a pass calls this several times.
pub fn memory(device: tch::Device) -> Option<usize> {
    match device {
        tch::Device::Cuda(number) if tch_ext::is_cuda_loaded() => {
            static MEMORY: Mutex<BTreeMap<usize, Option<usize>>> = Mutex::new(BTreeMap::new());
            let by_cuda = || tch_ext::gpu_memory(number).ok().map(|[_, total]| total);
            let mut memory = MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
            *memory.entry(number).or_insert_with(|| by_cuda().or_else(|| gpu_memory("memory.total", number)))
        }
        tch::Device::Cuda(number) => gpu_memory("memory.total", number),
        _ => whole_memory().map(|bytes| bytes / Place::of_process().ranks),
    }
}

/// The machine's memory in bytes, or the container's limit if that is less.
pub fn whole_memory() -> Option<usize> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let machine = read("/proc/meminfo")?;
    let total = machine.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB"));
    let total = total?.parse::<usize>().ok()? << 10;
    let groups = read("/proc/self/cgroup").unwrap_or_default();
    Some(memory_limit(&groups, read).map_or(total, |limit| limit.min(total)))
}

/// The smallest memory limit of the control groups in `/proc/self/cgroup`, of version 1 or 2, and of their parents; a container
/// sees its own group as the root.
pub fn memory_limit(groups: &str, read: impl Fn(&str) -> Option<String>) -> Option<usize> {
    let file = |folder: &Folder| match folder {
        Folder::Unified(folder) => format!("{folder}/memory.max"),
        Folder::Version1(folder) => format!("{folder}/memory.limit_in_bytes"),
    };
    // `max` means no limit.
    folders(groups, "memory").iter().filter_map(|folder| read(&file(folder))?.trim().parse().ok()).min()
}

/// The least memory that a limited control group has left. Pages of files count as free, because Linux gives them up first.
fn memory_left(groups: &str, read: impl Fn(&str) -> Option<String>) -> Option<usize> {
    let number = |text: Option<String>| text?.trim().parse::<usize>().ok();
    let left = |folder: &Folder| {
        let (dir, limit, used) = match folder {
            Folder::Unified(dir) => (dir, "memory.max", "memory.current"),
            Folder::Version1(dir) => (dir, "memory.limit_in_bytes", "memory.usage_in_bytes"),
        };
        let file = |name: &str| read(&format!("{dir}/{name}"));
        let stat = file("memory.stat").unwrap_or_default();
        let cached = ["total_inactive_file ", "inactive_file "];
        let cached_bytes =
            |line: &str| cached.iter().find_map(|name| line.strip_prefix(name)?.trim().parse::<usize>().ok());
        let cached = stat.lines().filter_map(cached_bytes).max().unwrap_or(0);
        let used = number(file(used)).unwrap_or(0).saturating_sub(cached);
        Some(number(file(limit))?.saturating_sub(used))
    };
    folders(groups, "memory").iter().filter_map(left).min()
}

/// The smallest CPU limit of the same control groups, in processors.
pub fn cpu_limit(groups: &str, read: impl Fn(&str) -> Option<String>) -> Option<f64> {
    let limit = |folder: &Folder| {
        let (quota, period) = match folder {
            Folder::Unified(folder) => {
                let text = read(&format!("{folder}/cpu.max"))?;
                let (quota, period) = text.trim().split_once(' ')?;
                (quota.parse::<f64>().ok()?, period.parse::<f64>().ok()?)
            }
            Folder::Version1(folder) => {
                let number = |name: &str| read(&format!("{folder}/cpu.cfs_{name}_us"))?.trim().parse::<f64>().ok();
                (number("quota")?, number("period")?)
            }
        };
        // Version 1 writes -1 for no limit.
        (quota > 0.0 && period > 0.0).then(|| quota / period)
    };
    folders(groups, "cpu").iter().filter_map(limit).min_by(f64::total_cmp)
}

/// Folder of a control group.
enum Folder {
    /// Of version 2, with all controllers.
    Unified(String),
    /// Of version 1, with one controller.
    Version1(String),
}

/// Returns the folders of the control groups in `/proc/self/cgroup` that have this controller, and of their parents.
fn folders(groups: &str, controller: &str) -> Vec<Folder> {
    let mut result = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (root, folder): (_, fn(String) -> Folder) = match controllers {
            "" => ("/sys/fs/cgroup".to_string(), Folder::Unified),
            several if several.split(',').any(|name| name == controller) => {
                (format!("/sys/fs/cgroup/{controller}"), Folder::Version1)
            }
            _ => continue,
        };
        let parents = std::path::Path::new(path).ancestors().filter_map(|group| group.to_str());
        result.extend(parents.map(|group| folder(format!("{root}{}", group.trim_end_matches('/')))));
    }
    result
}

/// Returns the memory that this machine could still give to a run, in bytes: Linux's `MemAvailable`, or the rest of the container's limit
/// if that is less. `None` if it is not known.
pub fn available_memory() -> Option<usize> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let machine = read("/proc/meminfo")?;
    let line = machine.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB"));
    let free = line?.parse::<usize>().ok()? << 10;
    let groups = read("/proc/self/cgroup").unwrap_or_default();
    Some(memory_left(&groups, read).map_or(free, |left| left.min(free)))
}

/// Time limit of `nvidia-smi`, which hangs if the driver does.
const GPU_QUERY: Duration = Duration::from_secs(5);

/// Returns the free memory in bytes of the GPU that is `cuda:number` in this process, as `nvidia-smi` reports it. `None` if that program
/// does not exist or does not respond, or if `CUDA_VISIBLE_DEVICES` hides the GPU.
pub fn available_gpu_memory(number: usize) -> Option<usize> {
    gpu_memory("memory.free", number)
}

/// Returns the value of a field of `nvidia-smi` about a GPU's memory, in bytes; `None` as for [`available_gpu_memory`].
fn gpu_memory(field: &str, number: usize) -> Option<usize> {
    let shown = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let gpu = shown_gpu(shown.as_deref(), number)?;
    let query = format!("--query-gpu={field}");
    let mut command = Command::new("nvidia-smi");
    command.args([&query, "--format=csv,noheader,nounits", "-i", &gpu]);
    let ended = output(&mut command, GPU_QUERY).ok()?;
    ended.stdout.lines().next()?.trim().parse::<usize>().ok().map(|mib| mib << 20)
}

/// Returns the number or the UUID of the GPU that is `cuda:number` if `CUDA_VISIBLE_DEVICES` is `shown`. `nvidia-smi` orders GPUs by their
/// bus, CUDA without `CUDA_DEVICE_ORDER=PCI_BUS_ID` by their speed, so on machines with different GPUs the two may differ.
fn shown_gpu(shown: Option<&str>, number: usize) -> Option<String> {
    let Some(shown) = shown else { return Some(number.to_string()) };
    let gpus = shown.split(',').map(str::trim).take_while(|id| !id.is_empty() && !id.starts_with('-'));
    gpus.map(String::from).nth(number)
}

/// Sets libtorch's number of threads. Without a setting, here or in `OMP_NUM_THREADS`, limits it to the CPUs available to the
/// container, which libtorch does not check, divided by the number of ranks on this machine.
pub fn use_threads(asked: Option<usize>) {
    let place = Place::of_process();
    let available = std::thread::available_parallelism().map_or(usize::MAX, usize::from);
    let var = std::env::var_os;
    // Ranks that torchrun started in a SLURM step are not SLURM's tasks.
    let allocated = var("SLURM_CPUS_ON_NODE").filter(|_| place.ranks > 1 && var("RANK").is_none());
    let share = place.processors(available, allocated.and_then(|text| text.to_str()?.parse().ok()));
    let too_many = var("OMP_NUM_THREADS").is_none() && tch::get_num_threads() as usize > share;
    if let Some(threads) = asked.or(too_many.then_some(share)) {
        tch::set_num_threads(threads as i32);
    }
    // torchrun sets OMP_NUM_THREADS=1 if it is unset. On a GPU one thread is enough.
    let by_torchrun = asked.is_none() && var("TORCHELASTIC_RUN_ID").is_some() && !has_driver();
    if place.ranks > 1
        && place.rank == 0
        && let Some(line) = threads_note(tch::get_num_threads() as usize, share, place.ranks, by_torchrun)
    {
        let _ = writeln!(std::io::stderr(), "{line}");
    }
}

/// Returns a line if each rank has more `threads` than its `share` of the processors, or only one because of torchrun's default.
fn threads_note(threads: usize, share: usize, ranks: usize, by_torchrun: bool) -> Option<String> {
    if threads > share {
        return Some(format!(
            "warning: {threads} threads in each of {ranks} ranks, but {share} processors for each: every rank is slower; \
             unset num_threads and OMP_NUM_THREADS"
        ));
    }
    (by_torchrun && threads == 1 && share > 1).then(|| {
        format!(
            "note: OMP_NUM_THREADS = 1, torchrun's default: each of {ranks} ranks uses 1 of its {share} processors; \
             --num_threads {share} uses all"
        )
    })
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(None) => f.write_str("cuda"),
            Self::Cuda(Some(number)) => write!(f, "cuda:{number}"),
        }
    }
}

impl serde::Serialize for Device {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

fn usage<T>(device: Device, reason: &str) -> Result<T> {
    Err(Error::refused("device", format!(" = {device}: {reason}")))
}

/// Warns, once, why a machine with a GPU computes on its CPU.
fn warn(reason: &str) {
    static WARNED: std::sync::Once = std::sync::Once::new();
    WARNED.call_once(|| {
        let _ = writeln!(std::io::stderr(), "warning: device = auto: computing on the CPU: {reason}");
    });
}

/// Whether a driver for NVIDIA GPUs is loaded.
pub fn has_driver() -> bool {
    // /dev/dxg is the GPU of Windows under WSL.
    ["/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"].iter().any(|path| std::path::Path::new(path).exists())
}

/// Loads CUDA, if there is a driver and `device` may be a GPU. Errors are returned when the device is resolved.
///
/// Each of several ranks calls this before it connects to the others: if libtorch looks for CUDA before it is loaded, it remembers for good
/// that there is none.
pub fn load_ahead(device: Device) {
    if device != Device::Cpu && has_driver() {
        let _ = gpus();
    }
}

/// Number of GPUs that libtorch can use, or the reason that it can use none.
pub fn gpus() -> Result<usize, String> {
    tch_ext::load_cuda().map_err(|message| explain(&message, cuda_command()))?;
    match tch::Cuda::device_count() {
        count @ 1.. => Ok(count as usize),
        _ => Err("CUDA is installed, but it can use no GPU: CUDA 13 needs an NVIDIA GPU of compute capability 7.5 or \
                  newer and driver 580 or newer, and CUDA_VISIBLE_DEVICES must not hide it (`nvidia-smi` lists the GPUs)"
            .into()),
    }
}

/// Returns the command that fetches CUDA's libraries, for the Python package or for a checkout.
pub fn cuda_command() -> &'static str {
    if process::is_of_python_package() { "`rlhf setup --device cuda`" } else { "`make cuda`" }
}

/// Explains an error of the dynamic linker, with a remedy: the command that fetches CUDA's libraries.
fn explain(message: &str, command: &str) -> String {
    let library = message.split(':').next().unwrap_or_default();
    if library == "libcuda.so.1" {
        "no NVIDIA driver: libcuda.so.1 not found; install the driver (580 or newer, for CUDA 13)".into()
    } else if library.ends_with("/libtorch_cuda.so") && message.contains("No such file") {
        format!("no CUDA for libtorch: expected {library}; {command} fetches it")
    } else {
        format!("libtorch's CUDA half cannot be loaded: {message}; {command} fetches what it needs")
    }
}

/// Returns whether a processor with this `/proc/cpuinfo` has instructions with which oneDNN multiplies bf16 numbers: AVX-512, newer
/// instructions of processors without it, or Arm's. Otherwise oneDNN converts the numbers to f32, which takes longer than products in f32.
/// True if it is unknown.
pub fn multiplies_bf16(info: &str) -> bool {
    let flags = info.lines().find_map(|line| {
        let (name, flags) = line.split_once(':')?;
        matches!(name.trim(), "flags" | "Features").then_some(flags)
    });
    flags.is_none_or(|flags| {
        let has = |name: &str| flags.split_whitespace().any(|flag| flag == name);
        ["avx512f", "avx512vl", "avx512bw", "avx512dq"].into_iter().all(has)
            || ["avx_ne_convert", "avx512_bf16", "amx_bf16", "bf16"].into_iter().any(has)
    })
}

/// Returns the warning of a run in bf16 on `device`, if its products are slower than those in f32 there.
pub fn slow_bf16(device: Device) -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    (!multiplies_bf16(&info) && matches!(device.resolve(), Ok(tch::Device::Cpu))).then(|| {
        "bf16 = true: this processor has no instructions for bf16 products, which are computed in f32: it saves memory, and a pass takes \
         longer than without it"
            .into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_for_bf16_products_are_read_from_the_flags_of_the_processor() {
        for (info, expected) in [
            ("flags : fpu avx2 fma", false),
            ("flags : avx2 fma avx512f avx512vl avx512bw", false),
            ("flags : avx2 fma avx512f avx512vl avx512bw avx512dq", true),
            ("flags : avx2 amx_bf16", true),
            ("Features : fp asimd", false),
            ("Features : fp asimd sve bf16", true),
            ("no such file", true),
        ] {
            assert_eq!(multiplies_bf16(info), expected, "{info}");
        }
    }

    #[test]
    fn kernels_for_gpus_are_asked_for_by_two_words_of_which_one_allows_nothing_else() {
        let kernels = |text: &str| GpuKernels::of(Some(OsStr::new(text)));
        assert_eq!(["cuda", "cuda-only"].map(kernels), [GpuKernels::Cuda, GpuKernels::CudaOnly]);
        assert_eq!(["", "plain", "CUDA", "cuda only"].map(kernels), [GpuKernels::No; 4]);
        assert_eq!(GpuKernels::of(None), GpuKernels::No);
    }

    #[test]
    fn what_can_be_made_again_is_in_the_users_folder_for_it() {
        let cache = |variables: &[(&str, &str)]| {
            cache_folder(|name| variables.iter().find(|(variable, _)| *variable == name).map(|(_, value)| value.into()))
        };
        assert_eq!(cache(&[("HOME", "/home/a")]), Some("/home/a/.cache/rlhf".into()));
        assert_eq!(cache(&[("HOME", "/home/a"), ("XDG_CACHE_HOME", "/c")]), Some("/c/rlhf".into()));
        assert_eq!(cache(&[("RLHF_CACHE", "/r"), ("XDG_CACHE_HOME", "/c")]), Some("/r".into()));
        assert_eq!(cache(&[("RLHF_CACHE", ""), ("HOME", "")]), None);
    }

    #[test]
    fn the_first_gpu_is_the_first_visible_one() {
        let gpu = |shown, number| shown_gpu(shown, number);
        assert_eq!(gpu(None, 2).as_deref(), Some("2"));
        assert_eq!(gpu(Some("3"), 0).as_deref(), Some("3"));
        assert_eq!(gpu(Some("GPU-1a2b, 5"), 1).as_deref(), Some("5"));
        assert_eq!(gpu(Some("GPU-1a2b,5"), 0).as_deref(), Some("GPU-1a2b"));
        for (shown, number) in [("", 0), ("3", 1), ("-1", 0), ("2,-1,3", 1), ("2,-1,3", 2)] {
            assert_eq!(gpu(Some(shown), number), None, "{shown}, {number}");
        }
    }

    #[test]
    fn a_device_is_read_and_written_in_the_same_words() {
        for (text, device) in [
            ("auto", Device::Auto),
            ("cpu", Device::Cpu),
            ("cuda", Device::Cuda(None)),
            ("cuda:0", Device::Cuda(Some(0))),
        ] {
            assert_eq!((Device::parse(text), device.to_string().as_str()), (Some(device), text));
        }
        for text in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "mps"] {
            assert_eq!(Device::parse(text), None, "{text}");
        }
        assert_eq!(Device::Cpu.resolve().unwrap(), tch::Device::Cpu);
    }

    #[test]
    fn the_ranks_of_a_machine_share_its_gpus_and_processors() {
        let at = |rank, ranks| Place { rank, ranks };
        assert_eq!([0, 3].map(|rank| at(rank, 4).gpu(4, false)), [Ok(0), Ok(3)]);
        // SLURM shows each task one GPU.
        assert_eq!(at(3, 4).gpu(1, true), Ok(0));
        let error = at(3, 4).gpu(2, false).unwrap_err();
        assert!(error.contains("4 ranks on this machine, but libtorch can use 2 of its GPUs"), "{error}");
        assert_eq!(
            [(16, 1), (16, 4), (3, 2), (2, 4)].map(|(there, ranks)| at(0, ranks).processors(there, None)),
            [16, 4, 1, 1]
        );
        // Tasks of SLURM on 16 processors: each bound to its own 4, or all free to use any.
        assert_eq!([4, 16, 64].map(|there| at(0, 4).processors(there, Some(16))), [4, 4, 4]);
        assert_eq!(threads_note(4, 4, 2, true), None);
        assert_eq!(threads_note(1, 4, 2, false), None);
        assert!(threads_note(1, 4, 2, true).unwrap().ends_with("--num_threads 4 uses all"));
        assert!(threads_note(4, 2, 2, false).unwrap().starts_with("warning: 4 threads in each of 2 ranks, but 2"));
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
        let processors = |groups: &str, files: &[(&str, &str)]| {
            cpu_limit(groups, |path| Some(files.iter().find(|(name, _)| *name == path)?.1.to_string()))
        };
        assert_eq!(processors(v2, &[("/sys/fs/cgroup/cpu.max", "max 100000\n")]), None);
        let nested =
            [("/sys/fs/cgroup/user/job/cpu.max", "250000 100000\n"), ("/sys/fs/cgroup/cpu.max", "400000 100000\n")];
        assert_eq!(processors(v2, &nested), Some(2.5));
        let (quota, period) = ("/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/a/cpu.cfs_period_us");
        assert_eq!(processors(v1, &[(quota, "150000\n"), (period, "100000\n")]), Some(1.5));
        assert_eq!(processors(v1, &[(quota, "-1\n"), (period, "100000\n")]), None);
    }

    #[test]
    fn a_control_group_has_its_limit_less_what_it_uses_but_for_pages_of_files() {
        let left = |groups: &str, files: &[(&str, &str)]| {
            memory_left(groups, |path| Some(files.iter().find(|(name, _)| *name == path)?.1.to_string()))
        };
        let v2 = [
            ("/sys/fs/cgroup/job/memory.max", "1000"),
            ("/sys/fs/cgroup/job/memory.current", "700\n"),
            ("/sys/fs/cgroup/job/memory.stat", "anon 500\ninactive_file 150\n"),
        ];
        assert_eq!(left("0::/job\n", &v2), Some(450));
        assert_eq!(left("0::/job\n", &v2[1..]), None);
        assert_eq!(left("0::/job\n", &v2[..1]), Some(1000));
        let v1 = [
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "900"),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1000"),
            ("/sys/fs/cgroup/memory/memory.stat", "inactive_file 10\ntotal_inactive_file 30\n"),
        ];
        assert_eq!(left("4:memory:/\n", &v1), Some(0));
    }

    #[test]
    fn a_library_missing_for_a_gpu_is_named_with_the_way_to_get_it() {
        let missing = |what: &str| format!("{what}: cannot open shared object file: No such file or directory");
        let lib = "/opt/torch/lib/libtorch_cuda.so";
        assert_eq!(
            explain(&missing(lib), "`make cuda`"),
            "no CUDA for libtorch: expected /opt/torch/lib/libtorch_cuda.so; `make cuda` fetches it"
        );
        assert!(explain(&missing("libcudnn.so.9"), "`make cuda`").contains("libcudnn.so.9: cannot open"));
        assert!(explain(&missing("libcuda.so.1"), "`make cuda`").starts_with("no NVIDIA driver: libcuda.so.1"));
    }
}
