//! Runs `rlhf` for the integration tests: loads libtorch once, which takes a new process half a second, and forks for each command.
//!
//! `support/program.rs` starts it, and sends a [`Request`] over a socket for each command. The command runs in a process of its own, with
//! its own words, environment, working folder and output, by the code of the program's `main`.

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, WaitOptions, wait, waitpid};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

/// A command to run.
#[derive(Deserialize)]
struct Request {
    /// The command line, program name first.
    words: Vec<String>,
    /// Working folder.
    folder: PathBuf,
    /// The whole environment.
    environment: BTreeMap<String, String>,
    /// Files for standard output and standard error.
    stdout: PathBuf,
    stderr: PathBuf,
}

fn main() {
    let Some(socket) = std::env::var_os("RLHF_TEST_PROGRAM") else {
        return; // Started by `cargo test` itself.
    };
    let listener = UnixListener::bind(socket).unwrap();
    loop {
        // Its standard input ends with the process of the tests.
        let stdin = io::stdin();
        let mut polled = [PollFd::new(&listener, PollFlags::IN), PollFd::new(&stdin, PollFlags::IN)];
        let _ = poll(&mut polled, None);
        if !polled[1].revents().is_empty() {
            tch_ext::exit_at_once(0);
        }
        let (stream, _) = listener.accept().unwrap();
        while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
        if fork().is_none() {
            drop(listener);
            answer(stream);
        }
    }
}

/// Runs the command of a request in a process of its own; sends its process ID, then its status.
fn answer(mut stream: UnixStream) -> ! {
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).unwrap();
    if line.is_empty() {
        tch_ext::exit_at_once(0); // The tests have only asked whether this is ready.
    }
    let request: Request = serde_json::from_str(&line).unwrap();
    let Some(pid) = fork() else {
        drop(stream);
        run(request);
    };
    let _ = writeln!(stream, "{}", pid.as_raw_nonzero());
    let status = loop {
        match waitpid(Some(pid), WaitOptions::empty()) {
            Ok(Some((_, status))) => break status.as_raw(),
            Ok(None) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => panic!("waitpid: {error}"),
        }
    };
    let _ = writeln!(stream, "{status}");
    tch_ext::exit_at_once(0)
}

/// Becomes the program.
fn run(request: Request) -> ! {
    let files = [File::open("/dev/null"), File::create(request.stdout), File::create(request.stderr)];
    for (number, file) in (0..).zip(files) {
        // SAFETY: both are open files of this process, and nothing else refers to the replaced one.
        let replaced = unsafe { libc::dup2(file.unwrap().as_raw_fd(), number) };
        assert_eq!(replaced, number, "{}", io::Error::last_os_error());
    }
    std::env::set_current_dir(request.folder).unwrap();
    // Set before the program's first step: see `tch_ext::bound_spinning`.
    let kept = |name: &str| name == "GOMP_SPINCOUNT" || request.environment.contains_key(name);
    let others = std::env::vars().map(|(name, _)| name).filter(|name| !kept(name));
    for name in others.collect::<Vec<_>>() {
        // SAFETY: this process has one thread.
        unsafe { std::env::remove_var(name) }
    }
    for (name, value) in request.environment {
        // SAFETY: this process has one thread.
        unsafe { std::env::set_var(name, value) }
    }
    rlhf_cli::run(request.words.into_iter().map(Into::into).collect())
}

/// Forks this process. Returns the child's ID to the parent.
fn fork() -> Option<Pid> {
    // SAFETY: this process has one thread, so the child is a whole copy of it.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "{}", io::Error::last_os_error());
    Pid::from_raw(pid)
}
