//! Reference values, comparisons, and tests in their own process.

mod program;

pub(crate) use program::{PROGRAM, Process, Started, output, start};

use rlhf::dist::World;
use rlhf::dist::launch::Launch;
use rlhf::model::ModelOptions;
use serde_json::Value;
use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{LazyLock, Mutex};
use std::time::Duration;
use tch::{Device, Kind, Tensor};

/// The folder of reference values in the repository.
pub(crate) fn golden() -> PathBuf {
    // The tests run in parallel threads already; more threads inside each would compete for the cores.
    tch::set_num_threads(1);
    // Before libtorch first asks whether there is CUDA.
    if on_gpu() {
        rlhf::device::load_ahead(rlhf::device::Device::Auto);
    }
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

/// One of the first checkpoints of TRL's runs: `{neox,llama}_{policy,ref,reward,value}`.
pub(crate) fn init(model: &str) -> PathBuf {
    golden().join("trl_new/init").join(model)
}

/// The folder whose models and PPO variants are compared: `$RLHF_GOLDEN`, else `golden`.
pub(crate) fn chosen_golden() -> PathBuf {
    let committed = golden();
    std::env::var_os("RLHF_GOLDEN").map_or(committed, PathBuf::from)
}

/// `$RLHF_GOLDEN`, for the tests of reference values that are not committed.
///
/// # Panics
/// Where the variable is not set.
#[track_caller]
pub(crate) fn required_golden() -> PathBuf {
    golden(); // one thread
    let message = "RLHF_GOLDEN: expected a folder of reference values, found nothing set";
    PathBuf::from(std::env::var_os("RLHF_GOLDEN").expect(message))
}

/// The named tensors of one golden file.
pub(crate) struct Tensors(HashMap<String, Tensor>);

impl Tensors {
    pub(crate) fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let tensor = |view: safetensors::tensor::TensorView<'_>| {
            let shape: Vec<i64> = view.shape().iter().map(|&n| n as i64).collect();
            let kind = match view.dtype() {
                safetensors::Dtype::F32 => Kind::Float,
                safetensors::Dtype::I32 => Kind::Int,
                safetensors::Dtype::I64 => Kind::Int64,
                safetensors::Dtype::U8 => Kind::Uint8,
                safetensors::Dtype::I8 => Kind::Int8,
                safetensors::Dtype::F64 => Kind::Double,
                safetensors::Dtype::BOOL => Kind::Bool,
                other => panic!("{}: unexpected dtype {other:?}", path.display()),
            };
            Tensor::from_data_size(view.data(), &shape, kind)
        };
        Self(file.iter().map(|(name, view)| (name.to_string(), tensor(view))).collect())
    }

    pub(crate) fn find(&self, name: &str) -> Option<&Tensor> {
        self.0.get(name)
    }

    pub(crate) fn get(&self, name: &str) -> &Tensor {
        self.0.get(name).unwrap_or_else(|| panic!("no golden tensor `{name}`"))
    }

    /// The reference tensor `name`, whole or as much of it as the file has: `NAME[::7]` is every seventh row of it,
    /// `NAME[..., ::7]` every seventh column.
    pub(crate) fn part(&self, name: &str) -> Part<'_> {
        let stored = [(name.to_string(), 0, 1), (format!("{name}[::7]"), 0, 7), (format!("{name}[..., ::7]"), -1, 7)];
        let stored_part = stored.iter().find_map(|(name, dim, step)| Some((self.0.get(name)?, *dim, *step)));
        let (tensor, dim, step) = stored_part.unwrap_or_else(|| panic!("no golden tensor `{name}`, whole or in part"));
        Part { tensor, dim, step }
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// The rows of an integer matrix.
    pub(crate) fn rows(&self, name: &str) -> Vec<Vec<i64>> {
        Vec::<Vec<i64>>::try_from(self.get(name).to_kind(Kind::Int64)).unwrap()
    }
}

/// The part of a tensor that a golden file has.
pub(crate) struct Part<'a> {
    pub(crate) tensor: &'a Tensor,
    dim: i64,
    step: i64,
}

impl Part<'_> {
    /// The same part of a whole tensor, or, where the part is of columns, of some rows of one.
    pub(crate) fn select(&self, whole: &Tensor) -> Tensor {
        if self.step == 1 { whole.shallow_clone() } else { whole.slice(self.dim, None, None, self.step) }
    }
}

/// Whether golden values are compared on a GPU, as `RLHF_TEST_DEVICE=cuda` asks.
fn on_gpu() -> bool {
    match std::env::var("RLHF_TEST_DEVICE").as_deref() {
        Ok("cuda") => true,
        Ok(other) => panic!("RLHF_TEST_DEVICE: expected cuda, found {other}"),
        Err(_) => false,
    }
}

/// The default options, on the device of the test.
pub(crate) fn model_options() -> ModelOptions {
    let device = if on_gpu() { rlhf::device::Device::Cuda(None).resolve().unwrap() } else { Device::Cpu };
    ModelOptions { device, ..ModelOptions::default() }
}

/// A tensor in the host's memory.
pub(crate) fn on_host(x: &Tensor) -> Tensor {
    x.to_device(Device::Cpu)
}

/// The JSON of the file `path`.
pub(crate) fn read_json(path: &Path) -> Value {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Panics with `what` unless both are finite and differ by at most `tolerance` everywhere.
pub(crate) fn assert_close(what: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(found.size(), expected.size(), "{what}: shapes");
    let found = found.to_device(expected.device());
    let gap = if found.numel() == 0 { 0.0 } else { (found - expected).abs().max().double_value(&[]) };
    note_difference(gap, tolerance);
    assert!(gap <= tolerance, "{what}: largest difference {gap:e}, allowed {tolerance:e}");
}

/// Panics with `what` unless both numbers differ by at most `tolerance`.
#[track_caller]
pub(crate) fn near(what: &str, found: f64, expected: f64, tolerance: f64) {
    note_difference((found - expected).abs(), tolerance);
    assert!((found - expected).abs() <= tolerance, "{what}: {found} is not {expected} within {tolerance:e}");
}

/// Writes a difference and what was allowed to the file that `RLHF_DIFFERENCES` names, with the test's name, if it is set: `scripts/trust.py` reads
/// them.
pub(crate) fn note_difference(gap: f64, tolerance: f64) {
    static FILE: LazyLock<Option<Mutex<File>>> = LazyLock::new(|| {
        let path = std::env::var_os("RLHF_DIFFERENCES")?;
        Some(Mutex::new(
            File::options().create(true).append(true).open(path).expect("the file of RLHF_DIFFERENCES opens"),
        ))
    });
    if let Some(file) = &*FILE {
        let test = std::thread::current().name().unwrap_or_default().to_owned();
        let line = format!("{test}\t{gap:e}\t{tolerance:e}\n");
        file.lock().unwrap().write_all(line.as_bytes()).expect("the file of RLHF_DIFFERENCES is written");
    }
}

/// Prints to standard error what a test compared, also when it passes: the test runner captures `println!`.
pub(crate) fn say(message: &str) {
    let _ = writeln!(std::io::stderr(), "{message}");
}

/// A test that runs in its own process, so that its memory can be limited and measured.
///
/// The test is `#[ignore]`d, so that only its parent runs it, and ends with [`Child::reports`].
pub(crate) struct Child<'a> {
    pub(crate) test: &'a str,
    /// Limit of its address space.
    pub(crate) address_space_gib: u64,
    pub(crate) vars: &'a [(&'a str, String)],
}

/// A free port below those that Linux gives to connections by itself, so that no other test takes it before the ranks do.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = (std::process::id() % 9000) as u16;
    loop {
        let port = 20_000 + (first + NEXT.fetch_add(1, Ordering::SeqCst)) % 12_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Runs `test`, which is `#[ignore]`d, in `world` processes that are the ranks of one group once it has called [`join_ranks`].
/// All must pass.
#[track_caller]
pub(crate) fn run_as_ranks(test: &str, world: usize, vars: &[(&str, String)]) {
    if on_gpu() {
        return say(&format!("{test}: not run, as each rank needs a GPU of its own"));
    }
    let port = free_port();
    let start = |rank: usize| {
        let place = [("RANK", rank), ("WORLD_SIZE", world), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", world)];
        Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .envs([("OMP_NUM_THREADS", "1"), ("OMP_WAIT_POLICY", "passive"), ("MASTER_ADDR", "127.0.0.1")])
            .envs(place.map(|(name, number)| (name, number.to_string())))
            .env("MASTER_PORT", port.to_string())
            .envs(vars.iter().map(|(name, value)| (name, value)))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let ranks: Vec<_> = (0..world).map(start).collect();
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{test}: rank {rank} of {world}: {}\n{stdout}{stderr}", output.status);
    }
}

/// In a test of [`run_as_ranks`]: meets the other ranks.
pub(crate) fn join_ranks() {
    let launch = Launch::from_env().unwrap().expect("this test is started by another, as one of several ranks");
    World::join(&launch, Duration::from_secs(60)).unwrap();
}

const REPORT: &str = "child reports: ";

impl Child<'_> {
    /// Runs the test, which must pass; returns its report.
    #[track_caller]
    pub(crate) fn run(&self) -> Value {
        let script = format!("ulimit -v {} && exec \"$0\" \"$@\"", self.address_space_gib << 20);
        let output = Command::new("sh")
            .args(["-c", &script])
            .arg(std::env::current_exe().unwrap())
            .args([self.test, "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .env("OMP_NUM_THREADS", "1")
            .envs(self.vars.iter().map(|(name, value)| (name, value)))
            .output()
            .unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        let report = stdout.lines().find_map(|line| Some(line.split_once(REPORT)?.1));
        match report.filter(|_| output.status.success()) {
            Some(report) => serde_json::from_str(report).unwrap(),
            None => panic!("{}: {}\n{stdout}{}", self.test, output.status, String::from_utf8_lossy(&output.stderr)),
        }
    }

    /// In the child: a variable that the parent sets.
    ///
    /// # Panics
    /// Where it is not set, as in a child that is started by itself.
    #[track_caller]
    pub(crate) fn var(name: &str) -> String {
        std::env::var(name).unwrap_or_else(|e| panic!("{name}: {e}: this test is started by another, which sets it"))
    }

    /// In the child: passes `report` to the parent.
    pub(crate) fn reports(report: &Value) {
        let _ = writeln!(std::io::stdout(), "{REPORT}{report}");
    }

    /// In the child: a number of bytes that the system keeps of this process, `VmRSS` or `VmHWM`.
    pub(crate) fn memory(name: &str) -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line =
            status.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} in {status}"));
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
    }
}
