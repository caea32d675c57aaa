//! Other programs with a time limit, such as `nvidia-smi`; and the Python interpreter that runs scripts that are part of this program.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// The variable in which the Python package says where it has found libtorch, in words for `rlhf doctor`.
pub const LIBTORCH_FROM: &str = "RLHF_LIBTORCH_FROM";

/// Returns true if the Python package has started this program.
pub fn is_of_python_package() -> bool {
    std::env::var_os(LIBTORCH_FROM).is_some()
}

/// Time to wait for the rest of the error output after a process has ended. A child that the process left behind may keep the output open.
const AFTER_END: Duration = Duration::from_millis(500);

/// The variable that names a Python other than `python3`.
const PYTHON: &str = "RLHF_PYTHON";
/// Python program that reads the length of another program and the program itself from standard input, and runs it: a command line
/// with the whole program would fill the list of processes.
const LOADER: &str = "import sys
f = open(0, 'rb', 0, closefd=False)
n = int(f.readline() or sys.exit(1))
s = b''
while len(s) < n:
    s += f.read(n - len(s)) or sys.exit(1)
exec(compile(s, '{name}', 'exec'))";

/// Returns the Python of the user: the value of `RLHF_PYTHON`, or `python3`.
pub fn python() -> String {
    std::env::var(PYTHON).ok().filter(|path| !path.is_empty()).unwrap_or("python3".into())
}

/// Returns the end of the message about a Python that cannot be started.
pub fn python_hint() -> String {
    format!(" (install Python 3.9 or newer, or name one in {PYTHON})")
}

/// Returns the argument of `python -c` for a program that is read from standard input; tracebacks call it `name`.
pub fn loader(name: &str) -> String {
    LOADER.replace("{name}", name)
}

/// Returns the first standard input of a Python that runs [`loader`]: the text of the program.
pub fn loaded(program: &str) -> String {
    format!("{}\n{program}", program.len())
}

/// Returns true if a process has exited. Reads `/proc` if possible rather than collecting the exit status: until that is collected, the
/// process id, which may also be the id of its group, cannot be reused.
pub fn has_exited(child: &mut Child) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id()));
    match stat.as_deref().map(|stat| stat.rsplit_once(") ").and_then(|(_, state)| state.chars().next())) {
        Ok(Some(state)) => matches!(state, 'Z' | 'X'),
        _ => matches!(child.try_wait(), Ok(Some(_))),
    }
}

/// Output of a process that has ended.
#[derive(Debug)]
pub struct Ended {
    /// Whether it ended with exit code 0.
    pub success: bool,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

/// Runs a command to its end; kills it after `limit`.
///
/// # Errors
/// If it cannot be started, or takes longer.
pub fn output(command: &mut Command, limit: Duration) -> Result<Ended, String> {
    let started = Started::new(command)?;
    let mut stdout = String::new();
    let deadline = Instant::now() + limit;
    let status = started.finish(deadline, |line| {
        stdout.push_str(&line);
        stdout.push('\n');
    });
    let (status, stderr) = status.ok_or_else(|| format!("no response in {} s", limit.as_secs()))?;
    Ok(Ended { success: status.success(), stdout, stderr })
}

/// A process whose output is read on threads.
pub struct Started {
    child: Child,
    lines: Receiver<String>,
    /// Receives the error output when it is closed.
    stderr: Receiver<String>,
}

impl Started {
    /// Starts a process.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn new(command: &mut Command) -> Result<Self, String> {
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| error.to_string())?;
        let (Some(stdout), Some(mut errors)) = (child.stdout.take(), child.stderr.take()) else {
            return Err("no pipes to it".into());
        };
        let (sender, lines) = channel();
        let pass_on = move || {
            for line in BufReader::new(stdout).split(b'\n').map_while(Result::ok) {
                if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                    break;
                }
            }
        };
        let (sender, stderr) = channel();
        let collect = move || {
            let mut bytes = Vec::new();
            let _ = errors.read_to_end(&mut bytes);
            let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
        };
        let builder = || std::thread::Builder::new().name("output".into());
        if let Err(error) = builder().spawn(pass_on).and_then(|_| builder().spawn(collect)) {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("no thread to read its output: {error}"));
        }
        Ok(Self { child, lines, stderr })
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Passes lines on until the process ends. Returns its status and standard error; `None` if it was killed at `deadline`.
    pub fn finish(mut self, deadline: Instant, mut line: impl FnMut(String)) -> Option<(ExitStatus, String)> {
        let left = || deadline.saturating_duration_since(Instant::now());
        while !left().is_zero()
            && let Ok(text) = self.lines.recv_timeout(left())
        {
            line(text);
        }
        // Its standard output is closed, so the process has ended or is about to.
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some((status, self.stderr.recv_timeout(AFTER_END).unwrap_or_default()));
            }
            if Instant::now() >= deadline {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_program_that_does_not_respond_is_killed() {
        let error = output(&mut shell("exec sleep 30"), Duration::from_millis(200)).unwrap_err();
        assert!(error.contains("no response"), "{error}");
        let ended = output(&mut shell("echo out; echo err >&2; exit 3"), Duration::from_secs(20)).unwrap();
        assert_eq!((ended.success, ended.stdout.as_str(), ended.stderr.as_str()), (false, "out\n", "err\n"));
        assert!(output(&mut shell("while :; do echo more; done"), Duration::from_millis(200)).is_err());
        assert!(output(&mut Command::new("/nowhere/program"), Duration::from_secs(1)).is_err());
    }

    #[test]
    fn a_child_that_keeps_an_output_open_does_not_hold_the_result() {
        let start = Instant::now();
        let result = output(&mut shell("echo out; sleep 20 >/dev/null &"), Duration::from_secs(10)).unwrap();
        assert!(result.success && result.stdout == "out\n" && start.elapsed() < Duration::from_secs(5));
        let result = output(&mut shell("echo out; sleep 20 2>/dev/null &"), Duration::from_millis(300)).unwrap();
        assert!(result.success && result.stdout == "out\n" && start.elapsed() < Duration::from_secs(8));
    }
}
