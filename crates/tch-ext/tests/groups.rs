//! Process groups: every collective of Gloo among 1, 2 and 4 processes, of NCCL on one GPU, and the library of NCCL itself.
//!
//! The processes are this test program, started again with the variable `TCH_EXT_GROUP`.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tch::{Device, Kind, Tensor};
use tch_ext::{Group, Reduce, Rendezvous, Store};

/// `RANK SIZE PORT` of a started process.
const CHILD: &str = "TCH_EXT_GROUP";
/// Time limit of the collectives: long, so that a failure within a second is not the time limit.
const TIMEOUT: Duration = Duration::from_secs(60);
const CPU_KINDS: [Kind; 5] = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half, Kind::Int64];

/// Started processes; dropping kills those that still run.
struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Ranks {
    /// Starts `size` processes that run the test `name`.
    fn start(name: &str, size: usize) -> Self {
        let port = free_port();
        let start = |rank: usize| {
            let mut child = Command::new(std::env::current_exe().unwrap());
            child.args(["--exact", name, "--nocapture"]).env(CHILD, format!("{rank} {size} {port}"));
            child.env("OMP_NUM_THREADS", "1").stdout(Stdio::piped());
            child.spawn().unwrap()
        };
        Self((0..size).map(start).collect())
    }

    /// The output of a process, line by line.
    fn output(&mut self, rank: usize) -> impl Iterator<Item = String> + use<> {
        let output: ChildStdout = self.0[rank].stdout.take().unwrap();
        BufReader::new(output).lines().map_while(Result::ok)
    }
}

/// A free port below those that Linux gives to connections by itself.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = (std::process::id() % 9000) as u16;
    loop {
        let port = 20_000 + (first + NEXT.fetch_add(1, Ordering::SeqCst)) % 12_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// One test with processes at a time: they share the machine's CPUs.
fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Joins the group, in a process that [`Ranks::start`] started.
fn join() -> Option<Group> {
    let text = std::env::var(CHILD).ok()?;
    let numbers: Vec<usize> = text.split(' ').map(|number| number.parse().unwrap()).collect();
    let [rank, size, port] = numbers[..] else { panic!("{CHILD}={text}") };
    Some(connect(rank, size, port as u16))
}

fn connect(rank: usize, size: usize, port: u16) -> Group {
    let store = Store::open(&Rendezvous {
        host: "127.0.0.1".into(),
        port,
        serves: rank == 0,
        prefix: "test".into(),
        rank,
        size,
        patience: TIMEOUT,
        timeout: TIMEOUT,
    });
    Group::connect(store.unwrap(), rank, size, TIMEOUT).unwrap()
}

/// Prints a line that the parent process reads.
#[expect(clippy::print_stdout, reason = "the parent process reads it")]
fn report(line: &str) {
    println!("{line}");
}

#[expect(clippy::print_stderr, reason = "a skipped test is reported")]
fn skip(reason: &str) {
    eprintln!("SKIPPED: {reason}");
}

/// The number at `i` in the tensors of process `rank`: small integers, exact in every dtype, and so are their sums.
fn number(rank: usize, i: usize) -> i64 {
    (rank + 1) as i64 * (1 + i as i64 % 7)
}

fn tensor(kind: Kind, device: Device, count: usize, f: impl Fn(usize) -> i64) -> Tensor {
    Tensor::from_slice(&(0..count).map(f).collect::<Vec<_>>()).to_kind(kind).to_device(device)
}

fn expect(name: &str, found: &Tensor, f: impl Fn(usize) -> i64) {
    let numbers = Vec::<i64>::try_from(found.to_kind(Kind::Int64).to_device(Device::Cpu)).unwrap();
    let expected: Vec<i64> = (0..numbers.len()).map(f).collect();
    assert_eq!(numbers, expected, "{name} of {found:?}");
}

/// Runs each collective that computes, and those that copy, in `kind`; checks every number.
fn collectives_that_compute(group: &Group, kind: Kind, device: Device) {
    let (rank, size) = (group.rank(), group.size());
    let sum = |i| (0..size).map(|r| number(r, i)).sum::<i64>();
    for count in [1, 5, 1000] {
        let mut x = tensor(kind, device, count, |i| number(rank, i));
        group.all_reduce(&mut x, Reduce::Sum).unwrap().wait().unwrap();
        expect("sum", &x, sum);

        let mut x = tensor(kind, device, count, |i| number(rank, i));
        group.all_reduce(&mut x, Reduce::Max).unwrap().wait().unwrap();
        expect("max", &x, |i| number(size - 1, i));

        let whole = tensor(kind, device, count * size, |i| number(rank, i));
        let mut part = tensor(kind, device, count, |_| 0);
        group.reduce_scatter(&mut part, &whole).unwrap().wait().unwrap();
        expect("reduce_scatter", &part, |i| sum(rank * count + i));
        expect("reduce_scatter's input", &whole, |i| number(rank, i));
    }
    collectives_that_copy(group, kind, device);
}

fn collectives_that_copy(group: &Group, kind: Kind, device: Device) {
    let (rank, size) = (group.rank(), group.size());
    for count in [1, 5, 1000] {
        for root in 0..size {
            let mut x = tensor(kind, device, count, |i| number(rank, i));
            group.broadcast(&mut x, root).unwrap().wait().unwrap();
            expect("broadcast", &x, |i| number(root, i));
        }
        let part = tensor(kind, device, count, |i| number(rank, i));
        let mut whole = tensor(kind, device, count * size, |_| 0);
        group.all_gather(&mut whole, &part).unwrap().wait().unwrap();
        expect("all_gather", &whole, |i| number(i / count, i % count));
    }
}

/// Sizes and dtypes that do not fit are refused before a process waits for another.
fn refusals(group: &Group, device: Device) {
    let f32s = |count| Tensor::zeros([count], (Kind::Float, device));
    let size = group.size() as i64;
    let (mut whole, part) = (f32s(3 * size + 1), f32s(3));
    let e = group.all_gather(&mut whole, &part).unwrap_err();
    assert!(e.contains("all_gather: expected") && e.contains("parts of"), "{e}");
    let e = group.reduce_scatter(&mut f32s(3), &whole).unwrap_err();
    assert!(e.contains("reduce_scatter: expected"), "{e}");
    let other = Tensor::zeros([3], (Kind::Double, device));
    assert!(group.all_gather(&mut f32s(3 * size), &other).is_err(), "another dtype");
    let mut transposed = Tensor::zeros([3, 2], (Kind::Float, device)).transpose(0, 1);
    let e = group.all_reduce(&mut transposed, Reduce::Sum).unwrap_err();
    assert!(e.contains("all_reduce: expected a contiguous tensor"), "{e}");
    assert!(group.broadcast(&mut Tensor::zeros([2], (Kind::Bool, device)), 0).is_err(), "bool");
}

fn store(group: &Group) {
    let (store, rank, size) = (group.store(), group.rank(), group.size());
    assert!(!store.has("nobody sets this").unwrap());
    let first = store.set_first("first", &format!("rank {rank}")).unwrap();
    store.set(&format!("seen by {rank}"), &first).unwrap();
    for other in 0..size {
        assert_eq!(store.get(&format!("seen by {other}"), TIMEOUT).unwrap(), first, "all see one first value");
        assert!(store.has(&format!("seen by {other}")).unwrap());
    }
    store.set(&format!("empty {rank}"), "").unwrap();
    assert_eq!(store.get(&format!("empty {rank}"), TIMEOUT).unwrap(), "");
    let started = Instant::now();
    assert!(store.get("nobody sets this", Duration::from_millis(50)).is_err());
    assert!(started.elapsed() < TIMEOUT / 2, "a missing key is an error at the time limit given");
}

#[test]
fn every_collective_has_exact_results_among_1_2_and_4_processes() {
    if let Some(group) = join() {
        for kind in CPU_KINDS {
            collectives_that_compute(&group, kind, Device::Cpu);
        }
        collectives_that_copy(&group, Kind::Uint8, Device::Cpu);
        refusals(&group, Device::Cpu);
        store(&group);
        // All calls are done on all ranks before rank 0, which serves the store, exits.
        group.barrier().unwrap();
        return report("all collectives are right");
    }
    let _alone = alone();
    for size in [1, 2, 4] {
        let mut ranks = Ranks::start("every_collective_has_exact_results_among_1_2_and_4_processes", size);
        for rank in 0..size {
            let lines: Vec<String> = ranks.output(rank).collect();
            assert!(
                lines.iter().any(|line| line.contains("all collectives are right")),
                "rank {rank} of {size}: {lines:?}"
            );
            assert!(ranks.0[rank].wait().unwrap().success(), "rank {rank} of {size}");
        }
    }
}

#[test]
fn a_killed_process_fails_the_others_next_collective_within_a_second() {
    if let Some(group) = join() {
        let mut x = tensor(Kind::Float, Device::Cpu, 1000, |i| i as i64);
        group.all_reduce(&mut x, Reduce::Sum).unwrap().wait().unwrap();
        report("ready");
        if group.rank() + 1 == group.size() {
            std::thread::sleep(TIMEOUT);
        }
        let e = group.all_reduce(&mut x, Reduce::Sum).and_then(tch_ext::Pending::wait).unwrap_err();
        report(&format!("failed: {}", e.lines().next().unwrap_or_default()));
        // Without the group's destructor: another rank may have exited.
        tch_ext::exit_at_once(0);
    }
    let _alone = alone();
    for size in [2, 4] {
        let mut ranks = Ranks::start("a_killed_process_fails_the_others_next_collective_within_a_second", size);
        let mut outputs: Vec<_> = (0..size).map(|rank| ranks.output(rank)).collect();
        for output in &mut outputs {
            assert!(output.any(|line| line.contains("ready")));
        }
        ranks.0[size - 1].kill().unwrap();
        let killed = Instant::now();
        for (rank, output) in outputs[..size - 1].iter_mut().enumerate() {
            let line = output.find(|line| line.contains("failed: ")).unwrap_or_default();
            assert!(line.contains("Connection") || line.contains("Read error"), "rank {rank} of {size}: {line:?}");
            assert!(killed.elapsed() < Duration::from_secs(1), "rank {rank} of {size}: {:?}", killed.elapsed());
        }
    }
}

/// This crate declares some of gloo's classes itself. A vtable or type information of them in the program would replace
/// libtorch's.
#[test]
fn the_program_defines_no_class_of_gloo() {
    let program = std::env::current_exe().unwrap();
    let Ok(output) = Command::new("nm").args(["--demangle", "--defined-only"]).arg(&program).output() else {
        return skip("no `nm` on PATH (binutils)");
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let symbols = String::from_utf8_lossy(&output.stdout);
    assert!(symbols.contains("tch_ext_group_connect"), "the shim's symbols are in the program");
    let wrong: Vec<&str> = symbols
        .lines()
        .filter(|line| {
            ["vtable for ", "typeinfo for ", "typeinfo name for ", "VTT for "].iter().any(|s| line.contains(s))
        })
        .filter(|line| line.contains("gloo::") || line.contains("ProcessGroupGloo"))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The CUDA library beside libtorch's own, if `make cuda` has built it.
fn cuda_library() -> Option<String> {
    let path = tch_ext::libtorch_folder().unwrap().join(tch_ext::CUDA_LIBRARY);
    path.is_file().then(|| path.to_str().unwrap().to_string())
}

fn group_of_one() -> Group {
    connect(0, 1, free_port())
}

#[test]
fn the_cuda_library_loads_behind_libtorchs_cuda_libraries() {
    let Some(path) = cuda_library() else { return skip("no CUDA library; `make cuda` builds it") };
    let _alone = alone();
    // Fails without a driver, once libtorch_cuda.so is loaded.
    if let Err(e) = tch_ext::load_cuda() {
        assert!(e.starts_with("libcuda.so.1"), "{e}");
    }
    if let Err(e) = group_of_one().with_nccl(&path, 0, TIMEOUT) {
        assert!(e.contains("no GPUs found"), "{e}");
    }
}

#[test]
#[ignore = "needs a GPU, `make cuda` and RLHF_TEST_CUDA=1"]
fn every_collective_of_nccl_has_exact_results_on_one_gpu() {
    if std::env::var_os("RLHF_TEST_CUDA").is_none() {
        return skip("RLHF_TEST_CUDA is not set");
    }
    let _alone = alone();
    tch_ext::load_cuda().unwrap();
    let path = cuda_library().expect("`make cuda` has built it");
    let gloo = group_of_one();
    let group = gloo.with_nccl(&path, 0, TIMEOUT).unwrap();
    for kind in [Kind::Float, Kind::BFloat16] {
        collectives_that_compute(&group, kind, Device::Cuda(0));
    }
    refusals(&group, Device::Cuda(0));
    group.barrier().unwrap();
    store(&group);
}
