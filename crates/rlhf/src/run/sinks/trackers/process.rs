//! The process of a tracker: its start, its queue of lines, its replies, its end.

use super::ids::Ids;
use crate::run::output_dir::METRICS;
use crate::run::sinks::console::Console;
use crate::run::tracking::ReportTo;
use rlhf_base::dist::launch::VARIABLES;
use rlhf_base::process::{loaded, loader, python, python_hint};
use rlhf_base::safe_text::{beginning, one_line};
use rlhf_base::signals::stop_requested;
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The program that passes the lines to the clients of wandb, MLflow and trackio.
const TRACKER: &str = include_str!("tracker.py");
/// Maximum wait at the end of a run that was stopped by the user.
const STOP_WAIT: Duration = Duration::from_secs(10);
/// Maximum bytes that wait for a tracker.
const MOST_WAITING: usize = 32 << 20;
/// Maximum length of a reply, in bytes.
const MOST_REPLY: usize = 64 << 10;
/// Maximum number of warnings about one tracker.
const MOST_WARNINGS: usize = 3;
/// Maximum number of notes of one tracker.
const MOST_NOTES: usize = 10;
/// Interval at which the wait for the end looks for a request to stop.
const SLICE: Duration = Duration::from_millis(50);
/// Time after which the wait for the end is noted.
const NOTE_AFTER: Duration = Duration::from_secs(2);
/// Wait for the last replies of a process that has exited.
const REPLY_WAIT: Duration = Duration::from_millis(500);

/// The process of a tracker, with a thread for each of its pipes and one that waits for its exit.
pub(super) struct Process {
    shared: Arc<Shared>,
    /// Lines to write; `None` closes its standard input.
    lines: Option<Sender<Vec<u8>>>,
    /// Bytes of the lines that are not written yet.
    waiting: Arc<AtomicUsize>,
    /// Disconnected when the process has exited.
    exited: Receiver<()>,
    pid: u32,
}

/// State that the threads of a process share.
pub(super) struct Shared {
    /// Display name of the tracker, also in the id of its run.
    name: String,
    console: Console,
    ids: Arc<Ids>,
    /// Whether the Python package may be missing.
    may_lack: bool,
    /// Whether the last line is sent.
    ending: AtomicBool,
    warnings: AtomicUsize,
    notes: AtomicUsize,
    shown_notes: AtomicUsize,
    /// Number of the last line that it was sent.
    sent: AtomicUsize,
    /// Whether it is ready.
    is_ready: AtomicBool,
}

impl Process {
    /// Starts the process of a tracker. Returns nothing, after a warning, if it cannot be started.
    pub(super) fn start(tracker: &ReportTo, shared: Shared) -> Option<Self> {
        let (program, script, is_python) = match tracker {
            ReportTo::Command(line) => ("sh".to_string(), line.clone(), false),
            _ => (python(), loader("tracker.py"), true),
        };
        let mut command = Command::new(&program);
        command.args(["-c", &script]);
        for name in VARIABLES {
            command.env_remove(name);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // The tracker has its own process group: Ctrl-C must not end it before it has written the end of the run.
        match command.process_group(0).spawn() {
            Ok(child) => Some(Self::follow(child, Arc::new(shared), is_python)),
            Err(error) => {
                if !shared.may_lack {
                    let hint = if is_python { python_hint() } else { String::new() };
                    shared.warn(&format!("{program} cannot be started: {error}{hint}; {}", goes_through()));
                }
                None
            }
        }
    }

    /// Starts the threads of the process `child`, and sends it the program that it runs, if it is Python.
    fn follow(mut child: Child, shared: Arc<Shared>, is_python: bool) -> Self {
        let pid = child.id();
        let waiting = Arc::new(AtomicUsize::new(0));
        let (lines, to_write) = channel::<Vec<u8>>();
        let (end_of_output, output_end) = channel::<()>();
        let (has_exited, exited) = channel::<()>();
        let stderr_tail = Arc::new(Mutex::new(String::new()));
        if let Some(mut stdin) = child.stdin.take() {
            let waiting = waiting.clone();
            thread::spawn(move || {
                let program = if is_python { loaded(TRACKER) } else { String::new() };
                // If the process has exited, the thread that waits for it notices.
                let _ = stdin.write_all(program.as_bytes());
                to_write.iter().for_each(|line: Vec<u8>| {
                    let _ = stdin.write_all(&line).and_then(|()| stdin.flush());
                    waiting.fetch_sub(line.len(), Ordering::SeqCst);
                });
            });
        }
        if let Some(stdout) = child.stdout.take() {
            let shared = shared.clone();
            let end = end_of_output.clone();
            thread::spawn(move || {
                read_lines(stdout, |line| shared.reply(line));
                drop(end);
            });
        }
        if let Some(stderr) = child.stderr.take() {
            let tail = stderr_tail.clone();
            thread::spawn(move || {
                read_lines(stderr, |line| {
                    let line = String::from_utf8_lossy(line).trim().to_string();
                    if !line.is_empty() {
                        *tail.lock().unwrap_or_else(PoisonError::into_inner) = line;
                    }
                });
                drop(end_of_output);
            });
        }
        let waiter = shared.clone();
        thread::spawn(move || {
            let status = child.wait();
            let _ = output_end.recv_timeout(REPLY_WAIT);
            waiter.exited(status.ok(), &stderr_tail.lock().unwrap_or_else(PoisonError::into_inner));
            drop(has_exited);
        });
        Self { shared, lines: Some(lines), waiting, exited, pid }
    }

    /// Returns the display name of the tracker.
    pub(super) fn name(&self) -> &str {
        &self.shared.name
    }

    /// Appends a line to the queue. If too much is waiting already, this line and all later ones are dropped, with one warning.
    pub(super) fn send(&mut self, line: &Value) {
        let bytes = self.shared.numbered(line);
        if self.waiting.load(Ordering::SeqCst) + bytes.len() > MOST_WAITING {
            // Later lines would come after a gap, so none are sent.
            if self.lines.take().is_some() {
                self.shared.warn(&format!("it takes no more data; {}", goes_through()));
            }
            return;
        }
        self.push(bytes);
    }

    fn push(&self, bytes: Vec<u8>) {
        if let Some(lines) = &self.lines {
            self.waiting.fetch_add(bytes.len(), Ordering::SeqCst);
            let _ = lines.send(bytes);
        }
    }

    /// Sends the last line, and closes the standard input of the process after it.
    pub(super) fn end(&mut self, line: &Value) {
        self.shared.ending.store(true, Ordering::SeqCst);
        self.push(self.shared.numbered(line));
        self.lines = None;
    }

    /// Waits for the exit of the process, and kills it if that takes too long.
    pub(super) fn wait(self, until: &mut Until) {
        loop {
            let left = until.left();
            match self.exited.recv_timeout(left.min(SLICE)) {
                Err(RecvTimeoutError::Disconnected) | Ok(()) => return,
                Err(RecvTimeoutError::Timeout) if left.is_zero() => break,
                Err(RecvTimeoutError::Timeout) => {}
            }
            if until.is_long() {
                self.shared.console.announce_note(&format!("waiting for {}", self.name()));
            }
        }
        let seconds = until.limit.as_secs_f64();
        self.shared.warn(&format!(
            "it did not end within {seconds} s and was stopped: the end of the run may be missing there; its metrics are in {METRICS}"
        ));
        if let Some(group) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

impl Shared {
    /// Returns the state of a process that is about to start.
    pub(super) fn new(name: String, console: Console, ids: Arc<Ids>, may_lack: bool) -> Self {
        Self {
            name,
            console,
            ids,
            may_lack,
            ending: AtomicBool::new(false),
            warnings: AtomicUsize::new(0),
            notes: AtomicUsize::new(0),
            shown_notes: AtomicUsize::new(0),
            sent: AtomicUsize::new(0),
            is_ready: AtomicBool::new(false),
        }
    }

    /// Returns a line with its number, from 1, which replies may repeat.
    fn numbered(&self, line: &Value) -> Vec<u8> {
        let mut line = line.clone();
        line["line"] = (self.sent.fetch_add(1, Ordering::SeqCst) + 1).into();
        format!("{line}\n").into_bytes()
    }

    /// Writes a warning about the tracker, up to [`MOST_WARNINGS`].
    fn warn(&self, message: &str) {
        if self.warnings.fetch_add(1, Ordering::SeqCst) < MOST_WARNINGS {
            self.console.announce_warning(&format!("{}: {}", self.name, safe(message)));
        }
    }

    /// Writes a note of the tracker, up to [`MOST_NOTES`].
    fn note(&self, message: &str) {
        let message = match self.notes.fetch_add(1, Ordering::SeqCst) {
            before if before < MOST_NOTES => safe(message),
            MOST_NOTES => "its further notes are not shown".to_string(),
            _ => return,
        };
        self.shown_notes.fetch_add(1, Ordering::SeqCst);
        self.console.announce_note(&format!("{}: {message}", self.name));
    }

    /// Handles a line that the process has written. Lines that are no replies are ignored.
    fn reply(&self, line: &[u8]) {
        let Ok(Value::Object(reply)) = serde_json::from_slice(line) else { return };
        let text = |name: &str| reply.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
        let message = text("message").unwrap_or("no message");
        let kind = text("type").unwrap_or_default();
        // `ready` replies to the first line.
        let last = if kind == "ready" { 1 } else { self.sent.load(Ordering::SeqCst) as u64 };
        if let Some(found) =
            reply.get("line").filter(|found| !found.as_u64().is_some_and(|found| (1..=last).contains(&found)))
        {
            return self.warn(&format!(
                "a reply of the type `{kind}` is ignored: expected a \"line\" from 1 to {last}, found {found}"
            ));
        }
        match kind {
            "ready" if self.is_ready.swap(true, Ordering::SeqCst) => {
                let id = beginning(text("id").unwrap_or("none"), 80);
                self.warn(&format!("a second `ready` is ignored, with the id {id}: a run has one"));
            }
            "ready" => {
                if let Some(id) = text("id").filter(|id| id.len() <= 500) {
                    self.ids.set(&self.name, id);
                }
                if let Some(url) = text("url") {
                    self.console.announce_note(&format!("{}: {}", self.name, safe(url)));
                }
            }
            "note" => self.note(message),
            "warning" => self.warn(message),
            "missing" if self.may_lack => self.warnings.store(MOST_WARNINGS, Ordering::SeqCst),
            "missing" | "failed" => {
                self.warn(&format!("{message}; {}", goes_through()));
                self.warnings.store(MOST_WARNINGS, Ordering::SeqCst);
            }
            _ => {}
        }
    }

    /// Warns of a process that exited too early, or with an error that it did not report.
    fn exited(&self, status: Option<ExitStatus>, stderr_tail: &str) {
        let ending = self.ending.load(Ordering::SeqCst);
        let fine =
            ending && (status.is_some_and(|status| status.success()) || self.warnings.load(Ordering::SeqCst) > 0);
        if fine {
            return;
        }
        let status = status.map_or("unknown status".into(), |status| status.to_string());
        let tail = if stderr_tail.is_empty() { String::new() } else { format!(": {stderr_tail}") };
        if ending {
            self.warn(&format!(
                "its program failed at the end of the run ({status}){tail}; its metrics are in {METRICS}"
            ));
        } else {
            self.warn(&format!("its program ended before the end of the run ({status}){tail}; {}", goes_through()));
        }
    }
}

/// Calls `take` with every line, until the end of input. The rest of a line of more than [`MOST_REPLY`] bytes is skipped.
fn read_lines(from: impl Read, mut take: impl FnMut(&[u8])) {
    let mut from = BufReader::new(from);
    let mut skipping = false;
    loop {
        let mut line = Vec::new();
        match from.by_ref().take(MOST_REPLY as u64).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let rest = std::mem::replace(&mut skipping, !line.ends_with(b"\n"));
        if !rest {
            take(&line);
        }
    }
}

/// The end of the wait for all trackers of a run. A request to stop shortens it.
pub(super) struct Until {
    end: Instant,
    limit: Duration,
    shortened: bool,
    /// Time from which on the wait is noted; `None` after the note.
    note_at: Option<Instant>,
}

impl Until {
    pub(super) fn new(limit: Duration) -> Self {
        let now = Instant::now();
        Self { end: now + limit, limit, shortened: false, note_at: Some(now + NOTE_AFTER) }
    }

    /// Returns once whether the wait has become long.
    fn is_long(&mut self) -> bool {
        self.note_at.take_if(|at| Instant::now() >= *at).is_some()
    }

    /// Returns the time that is left.
    fn left(&mut self) -> Duration {
        if stop_requested() && !std::mem::replace(&mut self.shortened, true) {
            self.limit = self.limit.min(STOP_WAIT);
            self.end = self.end.min(Instant::now() + STOP_WAIT);
        }
        self.end.saturating_duration_since(Instant::now())
    }
}

/// Returns a message of a tracker's program for the console: one line, without the values of variables that may be secret.
fn safe(text: &str) -> String {
    let mut text = text.to_string();
    for (name, value) in std::env::vars_os() {
        let name = name.to_string_lossy().to_ascii_uppercase();
        let value = value.to_string_lossy().into_owned();
        let may_be_secret = ["KEY", "TOKEN", "PASSWORD", "SECRET"].iter().any(|word| name.contains(word));
        if may_be_secret && value.len() >= 6 {
            text = text.replace(&value, "...");
        }
    }
    beginning(&one_line(&text), 600).into_owned()
}

/// Returns the end of a warning about a tracker that has stopped working.
fn goes_through() -> String {
    format!("the run continues without it, and its metrics are in {METRICS}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_tracker_is_ready_once_and_its_notes_and_warnings_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let ids = Arc::new(Ids::read(dir.path()));
        let shared = Shared::new("command".into(), Console::Silent, ids.clone(), false);
        let reply = |reply: Value| shared.reply(reply.to_string().as_bytes());
        let first: Value = serde_json::from_slice(&shared.numbered(&json!({"type": "start"}))).unwrap();
        let second: Value = serde_json::from_slice(&shared.numbered(&json!({"type": "metrics"}))).unwrap();
        assert_eq!((&first["line"], &second["line"]), (&json!(1), &json!(2)));
        let warnings = || shared.warnings.load(Ordering::SeqCst);
        // `ready` replies to the first line.
        reply(json!({"type": "ready", "id": "of the second", "line": 2}));
        assert_eq!((ids.get("command"), warnings()), (None, 1));
        reply(json!({"type": "ready", "id": "mine", "line": 1}));
        assert_eq!((ids.get("command").as_deref(), warnings()), (Some("mine"), 1));
        reply(json!({"type": "ready", "id": "another"}));
        assert_eq!((ids.get("command").as_deref(), warnings()), (Some("mine"), 2));
        for line in [json!(3), json!(0), json!("1")] {
            reply(json!({"type": "note", "message": "early", "line": line}));
        }
        assert_eq!((warnings(), shared.notes.load(Ordering::SeqCst)), (5, 0));
        for _ in 0..50 {
            reply(json!({"type": "note", "message": "x", "line": 2}));
        }
        assert_eq!(shared.shown_notes.load(Ordering::SeqCst), MOST_NOTES + 1, "the last says that there are more");
    }
}
