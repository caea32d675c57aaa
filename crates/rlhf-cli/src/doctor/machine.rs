//! This build, its libtorch, and the processors, memory and disks of the machine.

use super::finding::{Build, Finding, bytes, variable};
use rlhf::hub::Hub;
use rlhf::{device, process};
use rustix::fs::{Access, access, statvfs};
use rustix::process::{Resource, getrlimit};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Version of the libtorch that this program was compiled with.
const LIBTORCH: &str = env!("RLHF_LIBTORCH_VERSION");

/// Bytes of memory below which a warning is due: with the libraries, a run of a model of some 100 million parameters needs them.
const MEMORY: u64 = 2 << 30;

/// Version, commit and architecture of this program.
pub(super) fn rlhf(build: Build) -> Finding {
    let commit = build.commit.map_or(String::new(), |commit| format!(" (commit {commit})"));
    let arch = std::env::consts::ARCH;
    Finding::ok("rlhf", format!("{}{commit}, {arch} Linux", build.version))
        .with("version", build.version)
        .with("commit", build.commit)
        .with("arch", arch)
}

/// Version and folder of the libtorch in use, and OpenMP libraries, of which there must be one.
pub(super) fn libtorch() -> Finding {
    let folder = match tch_ext::libtorch_folder() {
        Ok(folder) => folder,
        Err(error) => return Finding::failure("libtorch", error, "build rlhf again, with `make install`"),
    };
    let version = version_near(&folder);
    let openmp = openmp_libraries(&read("/proc/self/maps").unwrap_or_default());
    let from = variable(process::LIBTORCH_FROM);
    let library_path = variable("LD_LIBRARY_PATH").is_some();
    let finding = libtorch_finding(&folder, from.as_deref(), version.as_deref(), &openmp, library_path);
    finding
        .with("version", version.as_deref().unwrap_or(LIBTORCH))
        .with("built_with", LIBTORCH)
        .with("folder", folder.display().to_string())
        .with("from", from)
        // tch-ext is compiled so, and would not link with another one.
        .with("cxx11_abi", true)
        .with("mkl", tch::utils::has_mkl())
        .with("onednn", tch::utils::has_mkldnn())
        .with("openmp", openmp)
}

/// Compares the libtorch in use with the one of the build. If the launcher of the Python package started the program, `from` names the
/// source of libtorch, and `folder` has only links.
fn libtorch_finding(
    folder: &Path,
    from: Option<&str>,
    version: Option<&str>,
    openmp: &[String],
    library_path: bool,
) -> Finding {
    let place = from.map_or_else(|| format!("in {}", folder.display()), |from| format!("({from})"));
    // Without `+cpu` and the like.
    let plain = |version: &str| version.split('+').next().unwrap_or_default().to_string();
    if let Some(version) = version.filter(|version| plain(version) != LIBTORCH) {
        let hint = if library_path {
            "unset LD_LIBRARY_PATH, or remove that folder from it".to_string()
        } else {
            format!("build rlhf again with libtorch {LIBTORCH}: `make install`")
        };
        return Finding::failure("libtorch", format!("{version} {place}: expected {LIBTORCH}"), hint);
    }
    if openmp.len() > 1 {
        let text = format!("two OpenMP libraries, with a thread pool each: {}", openmp.join(", "));
        return Finding::warning("libtorch", text, "unset LD_PRELOAD and LD_LIBRARY_PATH, or build rlhf again");
    }
    Finding::ok("libtorch", format!("{} {place}, C++11 ABI", version.unwrap_or(LIBTORCH)))
}

/// Returns the version that a C++ header or a Python file next to the folder of the libraries names. `make install` copies neither.
fn version_near(folder: &Path) -> Option<String> {
    let torch = folder.parent()?;
    let quoted = |text: &str, start: &str| {
        let (_, rest) = text.split_once(start)?;
        rest.split(['"', '\'']).nth(1).map(String::from)
    };
    let header = read(torch.join("include/torch/headeronly/version.h"));
    let python = read(torch.join("version.py"));
    header
        .and_then(|text| quoted(&text, "#define TORCH_VERSION "))
        .or_else(|| python.and_then(|text| quoted(&text, "__version__ = ")))
}

/// Returns the paths of the OpenMP libraries among the mapped files of a process.
fn openmp_libraries(maps: &str) -> Vec<String> {
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    let is_openmp = |path: &&str| {
        let name = path.rsplit('/').next().unwrap_or_default();
        ["libgomp", "libiomp", "libomp"].iter().any(|start| name.starts_with(start))
    };
    paths.filter(is_openmp).map(String::from).collect::<BTreeSet<_>>().into_iter().collect()
}

/// The processor, its vector instructions, and those that the kernels use.
pub(super) fn cpu() -> Finding {
    let plain = variable("RLHF_KERNELS").is_some_and(|value| value == "plain");
    cpu_finding(&read("/proc/cpuinfo").unwrap_or_default(), variable("ATEN_CPU_CAPABILITY").as_deref(), plain)
}

/// Instruction sets in ATen's order, with the flags of `/proc/cpuinfo` that each needs, as `kernels.cpp` is compiled for them.
const SETS: [(&str, &str, &[&str]); 2] = [
    ("avx512", "AVX-512", &["avx512f", "avx512vl", "avx512bw", "avx512dq", "fma"]),
    ("avx2", "AVX2", &["avx2", "fma"]),
];

fn cpu_finding(info: &str, capability: Option<&str>, plain: bool) -> Finding {
    let field = |names: &[&str]| {
        let mut lines = info.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(name, _)| names.contains(&name.trim())).map(|(_, value)| value.trim().to_string())
    };
    let model = field(&["model name", "Model", "CPU part"]).unwrap_or_else(|| "unknown processor".into());
    let flags = field(&["flags", "Features"]).unwrap_or_default();
    let flags: BTreeSet<&str> = flags.split_whitespace().collect();
    let has = |needed: &[&str]| needed.iter().all(|flag| flags.contains(flag));
    let best = SETS.iter().find(|(.., needed)| has(needed));
    let forced = capability.and_then(|name| SETS.iter().find(|set| set.0 == name));
    let neon = flags.contains("asimd");
    let used = match (forced, capability) {
        (Some(set), _) => set.1,
        (None, Some("default")) => "none",
        _ => best.map_or(if neon { "NEON" } else { "none" }, |set| set.1),
    };
    let extra: Vec<&str> = [("avx512_bf16", "AVX-512 BF16"), ("amx_bf16", "AMX BF16"), ("bf16", "BF16")]
        .into_iter()
        .filter_map(|(flag, name)| flags.contains(flag).then_some(name))
        .collect();
    // As oneDNN does: besides the sets of `extra` it uses AVX-512, or the instructions of later processors without it.
    let multiplies_bf16 = has(SETS[0].2) || flags.contains("avx_ne_convert");
    let more = if !extra.is_empty() {
        format!("; {} for bf16 products", extra.join(", "))
    } else if multiplies_bf16 {
        String::new()
    } else {
        "; no instructions for bf16 products, which are computed in f32: --bf16 saves memory, and time in generation alone".into()
    };
    let text = format!("{model}: kernels for {used}{more}");
    let finding = match (forced, capability) {
        (Some(set), _) if !has(set.2) => Finding::failure(
            "cpu",
            format!("{model}: ATEN_CPU_CAPABILITY = {}, which this processor lacks: runs crash", set.0),
            "unset ATEN_CPU_CAPABILITY",
        ),
        _ if plain => {
            Finding::warning("cpu", format!("{text}; RLHF_KERNELS = plain turns them off"), "unset RLHF_KERNELS")
        }
        (_, Some(name)) if best.is_some_and(|best| best.1 != used) => Finding::warning(
            "cpu",
            format!("{text}: ATEN_CPU_CAPABILITY = {name} hides faster instructions"),
            "unset ATEN_CPU_CAPABILITY",
        ),
        _ if used == "none" => Finding::warning(
            "cpu",
            format!("{model}: neither AVX2 nor NEON: several times slower"),
            "use another processor; in a virtual machine, pass the host's instructions on",
        ),
        _ => Finding::ok("cpu", text),
    };
    let names = ["avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16"];
    let sets: Vec<&str> = names.into_iter().filter(|name| flags.contains(name)).collect();
    finding.with("model", model).with("instructions", sets).with("kernels", used)
}

/// Threads of libtorch, and the processors that they share.
#[derive(Debug, Clone, Default)]
struct Threads {
    /// Threads that a run without `num_threads` has.
    threads: usize,
    /// Processors that this process may use, by its affinity and its control group.
    usable: usize,
    /// Processors of the machine.
    online: usize,
    /// Physical cores of the machine, where they are known.
    cores: Option<usize>,
    /// Limit of the control group, in processors.
    limit: Option<f64>,
    omp_num_threads: Option<String>,
    omp_wait_policy: Option<String>,
}

/// Number of threads against the number of processors.
pub(super) fn threads() -> Finding {
    let info = read("/proc/cpuinfo").unwrap_or_default();
    let online = info.lines().filter(|line| line.starts_with("processor")).count();
    let usable = std::thread::available_parallelism().map_or(online.max(1), usize::from);
    let groups = read("/proc/self/cgroup").unwrap_or_default();
    threads_finding(&Threads {
        threads: usize::try_from(tch::get_num_threads()).unwrap_or(1),
        usable,
        online: online.max(1),
        cores: cores(&info),
        limit: device::cpu_limit(&groups, |path| read(path)),
        omp_num_threads: variable("OMP_NUM_THREADS"),
        omp_wait_policy: variable("OMP_WAIT_POLICY"),
    })
    .with("gomp_spincount", variable("GOMP_SPINCOUNT"))
}

fn threads_finding(seen: &Threads) -> Finding {
    let Threads { threads, usable, online, .. } = *seen;
    let cores_text = seen.cores.map_or(String::new(), |cores| format!(" ({cores} cores)"));
    let machine = if usable < online {
        format!("{usable} of the machine's {online} processors{cores_text}")
    } else {
        format!("{online} processor{}{cores_text}", if online == 1 { "" } else { "s" })
    };
    let text = format!("{threads} thread{} on {machine}", if threads == 1 { "" } else { "s" });
    let number = seen.omp_num_threads.as_ref().map(|text| {
        // A list has a number for each level of nesting.
        text.split(',').next().unwrap_or_default().trim().parse::<usize>().ok().filter(|&number| number > 0)
    });
    let asked = seen.omp_num_threads.as_deref().unwrap_or_default();
    let finding = match number {
        Some(None) => Finding::warning(
            "threads",
            format!("{text}: OMP_NUM_THREADS = {asked} is no number of threads, and is ignored"),
            format!("set OMP_NUM_THREADS to a number from 1 to {usable}, or unset it"),
        ),
        _ if threads > usable => Finding::warning(
            "threads",
            format!("{text}: they wait for one another, and runs are many times slower"),
            match number {
                Some(_) => format!("unset OMP_NUM_THREADS, or set it to {usable}"),
                None => format!("set --num_threads {usable}"),
            },
        ),
        // MKL bounds the threads by the cores.
        Some(Some(number)) if number > usable => Finding::warning(
            "threads",
            format!("{text}: OMP_NUM_THREADS = {asked} is above their number"),
            format!("unset OMP_NUM_THREADS, or set it to {usable}"),
        ),
        Some(Some(_)) if threads * 2 <= usable => Finding::warning(
            "threads",
            format!("{text}: OMP_NUM_THREADS = {asked} leaves processors idle"),
            format!("unset OMP_NUM_THREADS, or set --num_threads {usable}"),
        ),
        _ if seen.omp_wait_policy.as_deref().is_some_and(|policy| policy.eq_ignore_ascii_case("active")) => {
            Finding::warning(
                "threads",
                format!(
                    "{text}: with OMP_WAIT_POLICY = active, waiting threads take the processors from other programs"
                ),
                "unset OMP_WAIT_POLICY",
            )
        }
        _ => Finding::ok("threads", text),
    };
    finding
        .with("threads", threads)
        .with("usable_processors", usable)
        .with("processors", online)
        .with("cores", seen.cores)
        .with("cgroup_processors", seen.limit)
        .with("omp_num_threads", seen.omp_num_threads.clone())
        .with("omp_wait_policy", seen.omp_wait_policy.clone())
}

/// Returns the number of physical cores in `/proc/cpuinfo`; `None` where it does not list them.
fn cores(info: &str) -> Option<usize> {
    let mut ids = BTreeSet::new();
    for processor in info.split("\n\n") {
        let field = |name: &str| {
            let mut lines = processor.lines().filter_map(|line| line.split_once(':'));
            lines.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim().to_string())
        };
        if let Some(core) = field("core id") {
            ids.insert((field("physical id"), core));
        }
    }
    (!ids.is_empty()).then_some(ids.len())
}

/// Memory in bytes.
#[derive(Debug, Clone, Copy, Default)]
struct Memory {
    total: u64,
    available: u64,
    /// Limit of the control group.
    limit: Option<u64>,
    /// `ulimit -v`: limit of the addresses of this process, and those that it uses.
    addresses: Option<(u64, u64)>,
}

impl Memory {
    /// Bytes that a run may use.
    fn usable(&self) -> u64 {
        let addresses = self.addresses.map(|(limit, used)| limit.saturating_sub(used));
        [Some(self.available), self.limit, addresses].into_iter().flatten().min().unwrap_or(0)
    }
}

/// Memory of the machine, and limits on it.
pub(super) fn memory() -> Finding {
    let meminfo = read("/proc/meminfo").unwrap_or_default();
    let status = read("/proc/self/status").unwrap_or_default();
    let groups = read("/proc/self/cgroup").unwrap_or_default();
    let limit = device::memory_limit(&groups, |path| read(path)).map(|limit| limit as u64);
    let total = kib(&meminfo, "MemTotal:").unwrap_or(0);
    let used = kib(&status, "VmSize:").unwrap_or(0);
    memory_finding(&Memory {
        total,
        available: kib(&meminfo, "MemAvailable:").unwrap_or(0),
        // Version 1 has a huge number for no limit.
        limit: limit.filter(|&limit| limit < total),
        addresses: getrlimit(Resource::As).current.map(|limit| (limit, used)),
    })
}

fn memory_finding(seen: &Memory) -> Finding {
    let limit = seen.limit.map_or(String::new(), |limit| format!("; this container may use {}", bytes(limit)));
    let text = format!("{} of {} available{limit}", bytes(seen.available), bytes(seen.total));
    let usable = seen.usable();
    let finding = match seen.addresses {
        Some((addresses, _)) => Finding::warning(
            "memory",
            format!("{text}; ulimit -v is {}, of which libraries take a part without using it", bytes(addresses)),
            "run `ulimit -v unlimited` first, and limit memory by a control group",
        ),
        None if usable < MEMORY => Finding::warning(
            "memory",
            format!("{text}: little for PPO, which takes about 40 bytes per parameter"),
            "end other programs, raise the container's limit, or train small models and adapters (--use_peft)",
        ),
        None => Finding::ok("memory", text),
    };
    finding
        .with("total", seen.total)
        .with("available", seen.available)
        .with("cgroup_limit", seen.limit)
        .with("address_space_limit", seen.addresses.map(|(limit, _)| limit))
        .with("usable", usable)
}

/// Returns the bytes of a line `NAME: N kB`.
fn kib(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}

/// A folder that runs write to.
struct Place {
    name: &'static str,
    path: PathBuf,
    /// The check fails below this many free bytes.
    least: u64,
    /// A warning is due below this many free bytes.
    enough: u64,
    /// Consequence of too few free bytes, or of a folder that cannot be written.
    consequence: &'static str,
    hint: &'static str,
}

/// Space and permissions of the working folder, the cache of the hub, and the folder of temporary files.
pub(super) fn disks() -> Vec<Finding> {
    let places = [
        Place {
            name: "working folder",
            path: std::env::current_dir().unwrap_or_else(|_| ".".into()),
            least: 64 << 20,
            enough: 5 << 30,
            consequence: "a checkpoint takes 12 bytes per trained parameter",
            hint: "give --output_dir a folder on another disk, or free space",
        },
        Place {
            name: "hub cache",
            path: Hub::from_env().cache,
            least: 0,
            enough: 5 << 30,
            consequence: "models from the hub are downloaded to it",
            hint: "set HF_HOME to a folder that can be written, on a disk with space",
        },
        Place {
            name: "temporary files",
            path: std::env::temp_dir(),
            least: 0,
            enough: 256 << 20,
            consequence: "the self-test writes a model of 1 MiB there",
            hint: "set TMPDIR to a folder that can be written, on a disk with space",
        },
    ];
    places.iter().map(disk).collect()
}

fn disk(place: &Place) -> Finding {
    let Place { name, path, consequence, .. } = place;
    let shown = path.display();
    // A folder that does not exist yet would be created in the nearest one that does.
    let existing = path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let writable = existing.is_dir() && access(existing, Access::WRITE_OK | Access::EXEC_OK).is_ok();
    let space =
        statvfs(existing).map(|disk| [disk.f_bavail, disk.f_blocks].map(|blocks| blocks.saturating_mul(disk.f_frsize)));
    // Some network file systems report no size.
    let space = space.ok().filter(|[_, total]| *total > 0);
    let free = space.map_or(u64::MAX, |[free, _]| free);
    let finding = if !writable {
        let at = if existing == path { String::new() } else { format!(", nor created in {}", existing.display()) };
        Finding::warning(name, format!("{shown} cannot be written{at}: {consequence}"), place.hint)
    } else if free < place.least {
        Finding::failure(name, format!("{} free in {shown}: {consequence}", bytes(free)), place.hint)
    } else if free < place.enough {
        Finding::warning(name, format!("{} free in {shown}: {consequence}", bytes(free)), place.hint)
    } else {
        let free = if space.is_some() { bytes(free) } else { "unknown space".into() };
        Finding::ok(name, format!("{free} free in {shown}"))
    };
    finding
        .with("path", shown.to_string())
        .with("writable", writable)
        .with("free", space.map(|[free, _]| free))
        .with("total", space.map(|[_, total]| total))
}

fn read(path: impl AsRef<Path>) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Status;

    fn status_and_hint(finding: &Finding) -> (Status, &str) {
        (finding.status, finding.hint.as_deref().unwrap_or_default())
    }

    #[test]
    fn another_libtorch_than_that_of_the_build_is_a_failure() {
        let folder = Path::new("/opt/torch/lib");
        let one = ["/opt/torch/lib/libgomp.so.1".to_string()];
        for version in [Some(LIBTORCH.to_string()), Some(format!("{LIBTORCH}+cpu")), None] {
            let finding = libtorch_finding(folder, None, version.as_deref(), &one, true);
            assert_eq!(finding.status, Status::Ok, "{}", finding.text);
        }
        let other = libtorch_finding(folder, None, Some("2.4.1+cu121"), &one, true);
        assert_eq!(other.status, Status::Failure);
        assert!(other.text.contains("2.4.1+cu121") && other.hint.unwrap().starts_with("unset LD_LIBRARY_PATH"));
        let two = [one[0].clone(), "/usr/lib/libomp.so".into()];
        assert_eq!(libtorch_finding(folder, None, None, &two, false).status, Status::Warning);
        let named = libtorch_finding(folder, Some("from $LIBTORCH, /mine"), None, &one, false);
        assert_eq!(named.text, format!("{LIBTORCH} (from $LIBTORCH, /mine), C++11 ABI"));
    }

    #[test]
    fn openmp_libraries_are_found_among_the_mapped_files() {
        let maps = "7f00-7f01 r-xp 0 08:01 1  /opt/my torch/lib/libgomp-24e2ab19.so.1.0.0\n\
                    7f02-7f03 r--p 0 08:01 1  /opt/my torch/lib/libgomp-24e2ab19.so.1.0.0\n\
                    7f04-7f05 rw-p 0 00:00 0\n7f06-7f07 r-xp 0 08:01 2  /usr/lib/libc.so.6\n";
        assert_eq!(openmp_libraries(maps), ["/opt/my torch/lib/libgomp-24e2ab19.so.1.0.0"]);
        assert_eq!(openmp_libraries(&format!("{maps}8-9 r-xp 0 0 3 /usr/lib/libomp.so.5\n")).len(), 2);
    }

    #[test]
    fn the_kernels_are_those_of_the_processor_or_of_the_variable() {
        let info = |flags: &str| format!("processor\t: 0\nmodel name\t: Fast One\nflags\t\t: fpu {flags}\n");
        let avx512 = info("avx2 fma avx512f avx512vl avx512bw avx512dq amx_bf16");
        let avx2 = info("avx2 fma");
        let kernels = |finding: &Finding| finding.facts["kernels"].as_str().unwrap().to_string();
        for (info, capability, used, status) in [
            (&avx512, None, "AVX-512", Status::Ok),
            (&avx512, Some("avx512"), "AVX-512", Status::Ok),
            (&avx512, Some("avx2"), "AVX2", Status::Warning),
            (&avx512, Some("default"), "none", Status::Warning),
            (&avx2, None, "AVX2", Status::Ok),
            (&avx2, Some("avx512"), "AVX-512", Status::Failure),
            (&info("sse2"), None, "none", Status::Warning),
        ] {
            let finding = cpu_finding(info, capability, false);
            assert_eq!(
                (kernels(&finding).as_str(), finding.status),
                (used, status),
                "{capability:?}: {}",
                finding.text
            );
        }
        assert!(cpu_finding(&avx512, None, false).text.contains("AMX BF16"));
        assert!(cpu_finding(&avx2, None, false).text.contains("bf16 products, which are computed in f32"));
        assert_eq!(status_and_hint(&cpu_finding(&avx512, None, true)), (Status::Warning, "unset RLHF_KERNELS"));
        let arm = "processor : 0\nFeatures : fp asimd sve bf16\nCPU part : 0xd40\n";
        assert_eq!(kernels(&cpu_finding(arm, None, false)), "NEON");
        let older_arm = "processor : 0\nFeatures : fp asimd sve\nCPU part : 0xd0c\n";
        assert!(cpu_finding(older_arm, None, false).text.contains("NEON; no instructions for bf16 products"));
    }

    #[test]
    fn threads_beyond_the_processors_and_idle_processors_are_warnings() {
        let seen = Threads { threads: 8, usable: 8, online: 8, cores: Some(4), ..Threads::default() };
        assert_eq!(threads_finding(&seen).text, "8 threads on 8 processors (4 cores)");
        assert_eq!(threads_finding(&seen).status, Status::Ok);
        let set = |text: &str| Some(text.to_string());
        let many = Threads { threads: 64, omp_num_threads: set("64"), ..seen.clone() };
        assert_eq!(
            status_and_hint(&threads_finding(&many)),
            (Status::Warning, "unset OMP_NUM_THREADS, or set it to 8")
        );
        let bounded = Threads { threads: 8, ..many };
        assert!(threads_finding(&bounded).text.ends_with("OMP_NUM_THREADS = 64 is above their number"));
        let few = Threads { threads: 1, omp_num_threads: set("1"), ..seen.clone() };
        assert!(threads_finding(&few).text.contains("idle"));
        let wrong = Threads { omp_num_threads: set("all"), ..seen.clone() };
        assert!(threads_finding(&wrong).text.contains("OMP_NUM_THREADS = all"));
        let pinned = Threads { threads: 1, usable: 1, ..seen.clone() };
        assert_eq!(threads_finding(&pinned).text, "1 thread on 1 of the machine's 8 processors (4 cores)");
        assert_eq!(threads_finding(&pinned).status, Status::Ok);
        let active = Threads { omp_wait_policy: set("ACTIVE"), ..seen };
        assert_eq!(status_and_hint(&threads_finding(&active)), (Status::Warning, "unset OMP_WAIT_POLICY"));
        let info = "processor: 0\nphysical id: 0\ncore id: 0\n\nprocessor: 1\nphysical id: 0\ncore id: 0\n\n\
                    processor: 2\nphysical id: 1\ncore id: 0\n";
        assert_eq!((cores(info), cores("processor: 0\n")), (Some(2), None));
    }

    #[test]
    fn limits_on_memory_count_as_the_memory_there_is() {
        let seen = Memory { total: 64 << 30, available: 32 << 30, ..Memory::default() };
        assert_eq!((memory_finding(&seen).status, seen.usable()), (Status::Ok, 32 << 30));
        let container = Memory { limit: Some(1 << 30), ..seen };
        assert_eq!((memory_finding(&container).status, container.usable()), (Status::Warning, 1 << 30));
        let limited = Memory { addresses: Some((8 << 30, 3 << 30)), ..seen };
        assert_eq!(limited.usable(), 5 << 30);
        assert!(status_and_hint(&memory_finding(&limited)).1.contains("ulimit -v unlimited"));
        assert_eq!(kib("MemTotal:   2048 kB\nMemFree: 1 kB\n", "MemTotal:"), Some(2 << 20));
    }

    #[test]
    fn a_folder_without_space_or_permission_is_named_with_its_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let place = |path: PathBuf, least, enough| Place {
            name: "place",
            path,
            least,
            enough,
            consequence: "runs write there",
            hint: "use another",
        };
        let there = disk(&place(folder.path().join("not/yet"), 0, 1));
        assert_eq!(there.status, Status::Ok, "{}", there.text);
        assert_eq!(disk(&place(folder.path().into(), 0, u64::MAX)).status, Status::Warning);
        assert_eq!(disk(&place(folder.path().into(), u64::MAX, u64::MAX)).status, Status::Failure);
        // The file system of processes has no size.
        let sizeless = disk(&place("/proc".into(), 0, u64::MAX));
        assert_eq!((&sizeless.facts["free"], sizeless.text.contains("0 MiB")), (&serde_json::Value::Null, false));
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        let below = disk(&place(file.join("cache"), 0, 1));
        assert_eq!(status_and_hint(&below), (Status::Warning, "use another"), "{}", below.text);
    }
}
