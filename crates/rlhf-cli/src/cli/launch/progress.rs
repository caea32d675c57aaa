//! Progress of a process, by the counts that Linux has of it in `/proc`.

use std::fs::read_to_string;
use std::time::{Duration, Instant};

use rustix::process::Pid;

/// Bytes that a process which saves a run writes, at least: far more than messages.
const WRITES: u64 = 1 << 20;
/// CPU time of all threads of a process that computes, at least.
const COMPUTES: Duration = Duration::from_secs(1);
/// Unit of the times in `/proc/PID/stat`.
const TICKS_PER_SECOND: u64 = 100;

/// Work that a process has done so far.
#[derive(Debug, Clone, Copy, Default)]
struct Work {
    /// Bytes written.
    written: u64,
    /// CPU time of all threads.
    computed: Duration,
    /// Whether a thread waits for a disk now, as one that flushes a file does.
    waits_for_disk: bool,
}

impl Work {
    fn of(pid: Pid) -> Self {
        let process = format!("/proc/{}", pid.as_raw_nonzero());
        Self {
            written: bytes_written(&process).unwrap_or(0),
            computed: computed(&process).unwrap_or_default(),
            waits_for_disk: waits_for_disk(&process).unwrap_or(false),
        }
    }
}

/// The last progress of a process.
#[derive(Debug)]
pub(super) struct Progress {
    /// Work up to it.
    work: Work,
    at: Instant,
    /// Time of the last progress that a hanging process cannot make: the start, or a write.
    sure_at: Instant,
    /// Whether CPU time is progress: a thread that waits for a GPU takes as much as one that computes.
    on_cpu: bool,
}

impl Progress {
    /// Begins to look at the process now.
    pub(super) fn start(pid: Pid, on_cpu: bool) -> Self {
        let now = Instant::now();
        Self { work: Work::of(pid), at: now, sure_at: now, on_cpu }
    }

    /// Returns whether the process has written, computed or waited for a disk within `idle`, and has written within `longest`.
    pub(super) fn continues(&mut self, pid: Pid, idle: Duration, longest: Duration) -> bool {
        let now = Instant::now();
        let work = Work::of(pid);
        let writes = work.written.saturating_sub(self.work.written) >= WRITES;
        let computes = self.on_cpu && work.computed.saturating_sub(self.work.computed) >= COMPUTES;
        if writes {
            self.sure_at = now;
        }
        if writes || computes || work.waits_for_disk {
            self.work = work;
            self.at = now;
        }
        now.duration_since(self.at) < idle && now.duration_since(self.sure_at) < longest
    }
}

fn bytes_written(process: &str) -> Option<u64> {
    let counts = read_to_string(format!("{process}/io")).ok()?;
    counts.lines().find_map(|line| line.strip_prefix("wchar: "))?.parse().ok()
}

fn computed(process: &str) -> Option<Duration> {
    let stat = read_to_string(format!("{process}/stat")).ok()?;
    // The state is the third field, after the name in parentheses; the times in user and kernel mode are the 14th and 15th.
    let mut times = fields(&stat)?.skip(11).map(str::parse::<u64>);
    let ticks = times.next()?.ok()? + times.next()?.ok()?;
    Some(Duration::from_millis(ticks * 1000 / TICKS_PER_SECOND))
}

fn waits_for_disk(process: &str) -> Option<bool> {
    let mut threads = std::fs::read_dir(format!("{process}/task")).ok()?.flatten();
    Some(threads.any(|thread| {
        read_to_string(thread.path().join("stat"))
            .is_ok_and(|stat| fields(&stat).and_then(|mut f| f.next()) == Some("D"))
    }))
}

/// Returns the fields of a `stat` after the name of the program, from the state on.
fn fields(stat: &str) -> Option<impl Iterator<Item = &str>> {
    Some(stat.rsplit_once(") ")?.1.split(' '))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_that_writes_or_computes_is_told_from_one_that_hangs() {
        const HOUR: Duration = Duration::from_secs(3600);
        let (writes, computes) = ("exec cat /dev/zero", "while :; do :; done");
        for (script, on_cpu, expected) in [
            (writes, true, true),
            (writes, false, true),
            (computes, true, true),
            // It may wait for a GPU.
            (computes, false, false),
            ("exec sleep 60", true, false),
        ] {
            let mut child = Command::new("sh").args(["-c", script]).stdout(Stdio::null()).spawn().unwrap();
            let pid = Pid::from_child(&child);
            let mut progress = Progress::start(pid, on_cpu);
            let began = progress.at;
            let until = began + Duration::from_millis(if expected { 20_000 } else { 1500 });
            while progress.at == began && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(100));
                assert!(progress.continues(pid, HOUR, HOUR));
            }
            assert_eq!(progress.at > began, expected, "{script}, on the CPU: {on_cpu}");
            assert!(expected || !progress.continues(pid, Duration::from_secs(1), HOUR), "{script}");
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    #[test]
    fn a_process_that_computes_without_end_is_not_waited_for_without_end() {
        let mut child = Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let pid = Pid::from_child(&child);
        let mut progress = Progress::start(pid, true);
        std::thread::sleep(Duration::from_millis(300));
        assert!(progress.continues(pid, Duration::from_secs(60), Duration::from_secs(60)));
        assert!(!progress.continues(pid, Duration::from_secs(60), Duration::from_millis(200)));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn the_fields_of_a_process_are_found_after_its_name() {
        let stat = "7 (a) b) D 1 7 7 0 -1 4194304 100 0 0 0 250 50 0 0 20 0 1 0 5";
        assert_eq!(fields(stat).unwrap().next(), Some("D"));
        assert_eq!(fields(stat).unwrap().skip(11).take(2).collect::<Vec<_>>(), ["250", "50"]);
    }
}
