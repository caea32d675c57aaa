//! Other processes with a time limit: Python, `nvidia-smi`, and the self-test.

use super::finding::{Finding, Step};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time limit of the self-test, which takes about ten seconds.
pub(super) const LIMIT: Duration = Duration::from_secs(120);

/// Output of a process that has ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) success: bool,
    pub(super) stdout: String,
    pub(super) stderr: String,
}

/// Runs a command to its end; kills it after `limit`.
///
/// # Errors
/// If it cannot be started, or takes longer.
pub(super) fn output(command: &mut Command, limit: Duration) -> Result<Ended, String> {
    let started = Started::new(command)?;
    let (mut stdout, deadline) = (String::new(), Instant::now() + limit);
    let status = started.finish(deadline, |line| {
        stdout.push_str(&line);
        stdout.push('\n');
    });
    let (status, stderr) = status.ok_or_else(|| format!("no response in {} s", limit.as_secs()))?;
    Ok(Ended { success: status.success(), stdout, stderr })
}

/// Runs the self-test in its own process, and passes its steps on. A process that crashes or hangs is a failure.
pub(super) fn self_test(mut command: Command, device: &str, limit: Duration, report: &mut dyn FnMut(Step)) {
    let started = match Started::new(&mut command) {
        Ok(started) => started,
        Err(error) => {
            let text = format!("on {device}: cannot start its process: {error}");
            return report(Step::Found(Finding::failure(
                "self-test",
                text,
                "raise the limits on processes and memory",
            )));
        }
    };
    let (mut at, mut open) = (String::from("start"), true);
    let ended = started.finish(Instant::now() + limit, |line| {
        let Ok(step) = serde_json::from_str::<Step>(&line) else { return };
        match &step {
            Step::Checking(name) => (at, open) = (name.clone(), true),
            Step::Found(_) => open = false,
        }
        report(step);
    });
    let place = if open { format!("on {device}, at `{at}`") } else { format!("on {device}, after `{at}`") };
    let Some((status, stderr)) = ended else {
        let text = format!("{place}: not done after {} s", limit.as_secs());
        let hint =
            "end other programs that use the processors; OMP_NUM_THREADS above the number of processors does this too";
        return report(Step::Found(Finding::failure("self-test", text, hint)));
    };
    if !status.success() {
        report(Step::Found(crash(&place, status, &stderr)));
    }
}

/// The failure of a self-test whose process ended by itself.
fn crash(place: &str, status: ExitStatus, stderr: &str) -> Finding {
    let words = stderr.trim().lines().last().unwrap_or_default();
    let words = words.trim_start_matches("error: ");
    let reason = match (status.signal(), words) {
        (Some(signal), "") => format!("ended by signal {signal}"),
        (Some(signal), words) => format!("ended by signal {signal}: {words}"),
        (None, "") => format!("ended with exit code {}", status.code().unwrap_or(-1)),
        (None, words) => words.to_string(),
    };
    let no_memory = ["alloc", "memory", "Thread creation failed", "thread"].iter().any(|word| words.contains(word));
    let hint = match status.signal() {
        // SIGILL.
        Some(4) => {
            "this processor lacks an instruction: build rlhf and libtorch on this machine, unset ATEN_CPU_CAPABILITY"
        }
        // SIGKILL.
        Some(9) => "the system may have ended it for its memory: see `dmesg`, and raise the container's limit",
        _ if no_memory => "raise the limits on memory and threads (ulimit -v, ulimit -u, the container's)",
        _ => "run `make install` again; if it stays, report this with the output of `rlhf doctor --json`",
    };
    Finding::failure("self-test", format!("{place}: {reason}"), hint)
}

/// A process whose output is read on threads.
struct Started {
    child: Child,
    lines: Receiver<String>,
    stderr: JoinHandle<String>,
}

impl Started {
    fn new(command: &mut Command) -> Result<Self, String> {
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| error.to_string())?;
        let (Some(stdout), Some(mut stderr)) = (child.stdout.take(), child.stderr.take()) else {
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
        let collect = move || {
            let mut bytes = Vec::new();
            let _ = stderr.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let builder = || std::thread::Builder::new().name("output".into());
        let stderr = match builder().spawn(pass_on).and_then(|_| builder().spawn(collect)) {
            Ok(stderr) => stderr,
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("no thread to read its output: {error}"));
            }
        };
        Ok(Self { child, lines, stderr })
    }

    /// Passes lines on until the process ends. Returns its status and standard error; `None` if it was killed at `deadline`.
    fn finish(mut self, deadline: Instant, mut line: impl FnMut(String)) -> Option<(ExitStatus, String)> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(text) => line(text),
                Err(RecvTimeoutError::Timeout) => {
                    let _ = self.child.kill();
                    let _ = self.child.wait();
                    return None;
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        // Its standard output is closed, so it has ended, or ends now.
        while Instant::now() < deadline {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some((status, self.stderr.join().unwrap_or_default()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Status;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    fn steps(script: &str, limit: Duration) -> Vec<Step> {
        let mut found = Vec::new();
        self_test(shell(script), "cpu", limit, &mut |step| found.push(step));
        found
    }

    fn failure(script: &str, limit: Duration) -> Finding {
        match steps(script, limit).pop() {
            Some(Step::Found(finding)) if finding.status == Status::Failure => finding,
            other => panic!("{script}: {other:?}"),
        }
    }

    #[test]
    fn a_self_test_that_crashes_or_hangs_is_a_failure_with_its_place() {
        let long = Duration::from_secs(20);
        let checking = r#"echo '{"checking":"update"}';"#;
        assert_eq!(steps(checking, long), [Step::Checking("update".into())]);
        let killed = failure(&format!("{checking} kill -ILL $$"), long);
        assert!(killed.text.contains("at `update`: ended by signal 4"), "{}", killed.text);
        assert!(killed.hint.unwrap().contains("instruction"));
        let told = failure(&format!("{checking} echo 'libgomp: Thread creation failed' >&2; exit 1"), long);
        assert!(told.text.ends_with("libgomp: Thread creation failed") && told.hint.unwrap().contains("ulimit"));
        let start = Instant::now();
        let hung = failure(&format!("{checking} exec sleep 30"), Duration::from_millis(300));
        assert!(hung.text.contains("not done") && start.elapsed() < Duration::from_secs(10));
        assert!(failure("exit 7", long).text.contains("exit code 7"));
    }

    #[test]
    fn a_program_that_does_not_respond_is_killed() {
        let error = output(shell("exec sleep 30").arg(""), Duration::from_millis(200)).unwrap_err();
        assert!(error.contains("no response"), "{error}");
        let ended = output(&mut shell("echo out; echo err >&2; exit 3"), Duration::from_secs(20)).unwrap();
        assert_eq!((ended.success, ended.stdout.as_str(), ended.stderr.as_str()), (false, "out\n", "err\n"));
        assert!(output(&mut Command::new("/nowhere/program"), Duration::from_secs(1)).is_err());
    }
}
