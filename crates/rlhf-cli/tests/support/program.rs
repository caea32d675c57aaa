//! The program `rlhf` as a process of its own, mostly without the half second in which a new process loads libtorch: as a fork of the
//! test target `program`, which has loaded it.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::json;
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::{NamedTempFile, TempDir};

/// The built program.
pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_rlhf");

/// Beginnings of names of variables that libraries read when they are loaded.
const LOADED: [&str; 10] =
    ["ATEN_", "CUDA_", "GLIBC_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "RUST_MIN_STACK"];

/// Commands that start this program again, by its path.
const STARTERS: [&str; 2] = ["doctor", "launch"];

type Variables = BTreeMap<String, String>;

/// Runs `command` to its end, without standard input. A command of the program runs as a fork, where that is the same.
pub(crate) fn output(command: &mut Command) -> Output {
    start(command).wait()
}

/// Starts `command` as [`output`] does.
pub(crate) fn start(command: &mut Command) -> Started {
    match environment(command).and_then(|environment| Some((server(&environment)?, environment))) {
        Some((socket, environment)) => Started::Fork(Fork::start(command, &socket, &environment)),
        None => {
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            Started::Process(command.spawn().unwrap())
        }
    }
}

/// A command that runs.
pub(crate) enum Started {
    Process(Child),
    Fork(Fork),
}

/// A process that was started.
pub(crate) trait Process {
    /// Its ID.
    fn id(&self) -> u32;

    fn has_ended(&mut self) -> bool;
}

impl Process for Child {
    fn id(&self) -> u32 {
        self.id()
    }

    fn has_ended(&mut self) -> bool {
        self.try_wait().unwrap().is_some()
    }
}

impl Process for Started {
    fn id(&self) -> u32 {
        match self {
            Started::Process(child) => child.id(),
            Started::Fork(fork) => fork.id,
        }
    }

    fn has_ended(&mut self) -> bool {
        match self {
            Started::Process(child) => child.has_ended(),
            Started::Fork(fork) => fork.has_ended(),
        }
    }
}

impl Started {
    /// Waits for its end.
    pub(crate) fn wait(self) -> Output {
        match self {
            Started::Process(child) => child.wait_with_output().unwrap(),
            Started::Fork(fork) => fork.wait(),
        }
    }
}

/// A fork of a server.
pub(crate) struct Fork {
    id: u32,
    stream: BufReader<UnixStream>,
    stdout: NamedTempFile,
    stderr: NamedTempFile,
}

impl Fork {
    fn start(command: &Command, socket: &Path, environment: &Variables) -> Self {
        let (stdout, stderr) = (NamedTempFile::new().unwrap(), NamedTempFile::new().unwrap());
        let folder = command.get_current_dir().map_or_else(|| std::env::current_dir().unwrap(), Path::to_path_buf);
        let words = [command.get_program()].into_iter().chain(command.get_args());
        let request = json!({
            "words": words.map(|word| word.to_str().unwrap()).collect::<Vec<_>>(),
            "folder": folder,
            "environment": environment,
            "stdout": stdout.path(),
            "stderr": stderr.path(),
        });
        let mut stream = UnixStream::connect(socket).unwrap();
        writeln!(stream, "{request}").unwrap();
        let mut stream = BufReader::new(stream);
        let id = number(&mut stream).try_into().unwrap();
        Self { id, stream, stdout, stderr }
    }

    /// Whether its status has come.
    fn has_ended(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let waits = || poll(&mut [PollFd::new(self.stream.get_ref(), PollFlags::IN)], Some(&now)).is_ok_and(|n| n > 0);
        !self.stream.buffer().is_empty() || waits()
    }

    fn wait(mut self) -> Output {
        let status = ExitStatus::from_raw(number(&mut self.stream));
        let read = |file: &NamedTempFile| std::fs::read(file.path()).unwrap();
        Output { status, stdout: read(&self.stdout), stderr: read(&self.stderr) }
    }
}

/// The number on the next line.
fn number(stream: &mut BufReader<UnixStream>) -> i32 {
    let mut line = String::new();
    stream.read_line(&mut line).unwrap();
    line.trim().parse().unwrap_or_else(|e| panic!("the server of the test target `program` has ended: {e}: {line}"))
}

/// The environment of `command`; none where a fork would differ from a process that is started: for another program, and where the program
/// starts itself again.
fn environment(command: &Command) -> Option<Variables> {
    let first = command.get_args().next().and_then(OsStr::to_str).unwrap_or_default();
    let mut words = command.get_args().chain(command.get_current_dir().map(Path::as_os_str));
    let is_text = words.all(|word| word.to_str().is_some());
    if command.get_program() != PROGRAM || STARTERS.contains(&first) || !is_text {
        return None;
    }
    let mut environment: Variables = std::env::vars().collect();
    for (name, value) in command.get_envs() {
        let name = name.to_str()?;
        match value {
            Some(value) => environment.insert(name.into(), value.to_str()?.into()),
            None => environment.remove(name),
        };
    }
    (!environment.contains_key("LD_PRELOAD")).then_some(environment)
}

/// A process of the test target `program`.
struct Server {
    folder: TempDir,
    /// Its standard input, which ends with this process, ends it.
    _process: Child,
}

/// The socket of the server for commands with this `environment`; none where the server is not built, or is older than the program.
fn server(environment: &Variables) -> Option<PathBuf> {
    static SERVERS: Mutex<Option<HashMap<Variables, Option<Server>>>> = Mutex::new(None);
    let is_loaded = |name: &str| LOADED.iter().any(|beginning| name.starts_with(beginning));
    let loaded: Variables = environment
        .iter()
        .filter(|(name, _)| is_loaded(name))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    let mut servers = SERVERS.lock().unwrap_or_else(PoisonError::into_inner);
    let servers = servers.get_or_insert_default();
    let server = servers.entry(loaded.clone()).or_insert_with(|| {
        let folder = tempfile::tempdir().unwrap();
        let others = std::env::vars_os().map(|(name, _)| name).filter(|name| name.to_str().is_some_and(is_loaded));
        let mut command = Command::new(target()?);
        for name in others {
            command.env_remove(name);
        }
        command.envs(&loaded).env("RLHF_TEST_PROGRAM", folder.path().join("socket")).stdin(Stdio::piped());
        let process = command.spawn().unwrap();
        let began = Instant::now();
        while UnixStream::connect(folder.path().join("socket")).is_err() {
            assert!(began.elapsed() < Duration::from_secs(60), "the test target `program` does not start");
            thread::sleep(Duration::from_millis(10));
        }
        Some(Server { folder, _process: process })
    });
    server.as_ref().map(|server| server.folder.path().join("socket"))
}

/// The newest build of the test target `program`, if it is not older than the library that the program is made of.
fn target() -> Option<PathBuf> {
    let here = std::env::current_exe().unwrap();
    let newest = |is_wanted: &dyn Fn(&str) -> bool| {
        let files = std::fs::read_dir(here.parent()?).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
        let wanted = files.filter(|path| is_wanted(path.file_name().and_then(OsStr::to_str).unwrap_or_default()));
        wanted.filter_map(|path| Some((path.metadata().ok()?.modified().ok()?, path))).max()
    };
    let (built, target) = newest(&|name| name.starts_with("program-") && !name.contains('.'))?;
    let (library, _) = newest(&|name| name.starts_with("librlhf_cli-") && name.ends_with(".rlib"))?;
    (built >= library).then_some(target)
}
