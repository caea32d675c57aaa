//! The process of the self-test, with a time limit.

use super::finding::{Finding, Step};
use super::self_test::FOLDER;
use rlhf::process::Started;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

/// Time limit of the self-test, which takes about ten seconds.
pub(super) const LIMIT: Duration = Duration::from_secs(120);

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
    let mut at = String::from("start");
    let mut open = true;
    let id = started.id();
    let ended = started.finish(Instant::now() + limit, |line| {
        let Ok(step) = serde_json::from_str::<Step>(&line) else { return };
        match &step {
            Step::Checking(name) => {
                at.clone_from(name);
                open = true;
            }
            Step::Found(_) => open = false,
        }
        report(step);
    });
    if !matches!(&ended, Some((status, _)) if status.success()) {
        remove_folders(id);
    }
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

/// Removes the folders of a self-test that was killed, whose process had the id `id`.
fn remove_folders(id: u32) {
    let start = format!("{FOLDER}{id}-");
    let entries = std::fs::read_dir(std::env::temp_dir()).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&start)) {
        let _ = std::fs::remove_dir_all(entry.path());
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
        let mut reported = Vec::new();
        self_test(shell(script), "cpu", limit, &mut |step| reported.push(step));
        reported
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
    fn the_folder_of_a_self_test_that_is_killed_is_removed() {
        let folder = std::env::temp_dir();
        let script = format!("mkdir {}/{FOLDER}$$-1; echo $$ >&2; kill -KILL $$", folder.display());
        let killed = failure(&script, Duration::from_secs(20));
        let id = killed.text.rsplit(' ').next().unwrap().to_string();
        assert!(id.parse::<u32>().is_ok() && !folder.join(format!("{FOLDER}{id}-1")).exists(), "{}", killed.text);
    }
}
