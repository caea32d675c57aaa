//! A process that answers the requests of several sessions. Requests and replies are JSON lines with ids; replies may come in any order.

use super::{Limits, Log};
use crate::reward::{DRIVER, EXIT_WAIT, MAX_STDERR_LINE, STDERR_LINES, excerpt, read_lines};
use rlhf_base::process::{has_exited, loaded, loader, python, python_hint};
use rlhf_base::signals::{add_program, kill_program};
use rlhf_base::{Error, Result};
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet, VecDeque};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The Python program that runs tools and environments.
const WORKER: &str = include_str!("worker.py");
/// Maximum length of a reply in bytes.
const MAX_REPLY: usize = 32 << 20;
/// Interval at which a process without output is checked for its exit.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The program that a process runs.
#[derive(Debug, Clone)]
pub(super) enum Code {
    /// A command line for `sh -c`.
    Shell(String),
    /// The Python worker, with its first request.
    Python(Value),
}

/// A running process. Threads write to its input and read its outputs.
pub(super) struct Process {
    child: Mutex<Child>,
    /// Lines for the input of the process; `None` once the input is closed.
    to_child: Mutex<Option<Sender<Vec<u8>>>>,
    replies: Arc<Mutex<Replies>>,
    /// Last lines of its standard error.
    stderr_tail: Arc<Mutex<VecDeque<String>>>,
    /// Disconnects when the process's standard error ends.
    stderr_end: Mutex<Receiver<()>>,
    /// Receives the first reply of the worker.
    first: Mutex<Receiver<Map<String, Value>>>,
    /// The message about the end of the process, once it has ended.
    end: Mutex<Option<String>>,
}

/// The requests that wait for a reply.
#[derive(Default)]
struct Replies {
    asked: u64,
    waiting: HashMap<u64, Sender<Map<String, Value>>>,
    /// Requests that nobody waits for any more; their replies are ignored.
    given_up: HashSet<u64>,
    /// Why no further reply can come, once that is so.
    ended: Option<End>,
}

#[derive(Clone)]
enum End {
    /// The process closed its standard output.
    Exited,
    /// The process wrote a line that is not a valid reply.
    Broken(String),
}

/// The error of a request without a valid reply.
pub(super) struct Unanswered {
    pub(super) message: String,
    /// True if there was no reply in time. The process may still be working on the request.
    pub(super) hangs: bool,
}

impl Process {
    /// Starts a process.
    ///
    /// # Errors
    /// If it cannot be started.
    pub(super) fn start(code: &Code, limits: &Limits, log: &Log) -> Result<Self> {
        let (mut command, input) = match code {
            Code::Shell(line) => {
                let mut command = Command::new("sh");
                // `read` waits for the first line of input, which is written after the limits are set.
                command.args(["-c", "read -r _ && eval \"$1\"", "sh", line]).env_remove(DRIVER);
                (command, "\n".to_string())
            }
            Code::Python(request) => {
                let mut command = Command::new(python());
                command.args(["-c", &loader("worker.py")]);
                (command, format!("{}{request}\n", loaded(WORKER)))
            }
        };
        limits.prepare(&mut command);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn().map_err(|e| match code {
            Code::Shell(_) => Error::Run(format!("the program cannot be started by sh: {e}")),
            Code::Python(_) => Error::Run(format!("{} cannot be started: {e}{}", python(), python_hint())),
        })?;
        add_program(&child);
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let replies: Arc<Mutex<Replies>> = Arc::default();
        let stderr_tail: Arc<Mutex<VecDeque<String>>> = Arc::default();
        let first = lock(&replies).wait_for(0);
        let (to_child, lines) = channel::<Vec<u8>>();
        let (end_of_stderr, stderr_end) = channel::<()>();
        if let (Some(stdin), Some(stdout), Some(stderr)) = pipes {
            thread::spawn(move || write_to(stdin, &lines));
            let read = replies.clone();
            thread::spawn(move || {
                read_lines(stdout, MAX_REPLY, |line| lock(&read).take(&line));
                lock(&read).end(End::Exited);
            });
            let tail = stderr_tail.clone();
            let log = log.clone();
            thread::spawn(move || {
                read_lines(stderr, MAX_STDERR_LINE, |line| {
                    log.write(&line);
                    let mut tail = lock(&tail);
                    tail.push_back(String::from_utf8_lossy(&line).trim().chars().take(200).collect());
                    if tail.len() > STDERR_LINES {
                        tail.pop_front();
                    }
                    true
                });
                drop(end_of_stderr);
            });
        }
        let set = limits.apply(&child);
        let _ = to_child.send(input.into_bytes());
        let process = Self {
            child: Mutex::new(child),
            to_child: Mutex::new(Some(to_child)),
            replies,
            stderr_tail,
            stderr_end: Mutex::new(stderr_end),
            first: Mutex::new(first),
            end: Mutex::new(None),
        };
        set.map(|()| process)
    }

    /// Waits for the first reply of the worker, which has the id 0.
    pub(super) fn first(&self, limit: Duration) -> Result<Map<String, Value>, Unanswered> {
        self.wait(0, &lock(&self.first), limit)
    }

    /// Sends a request, and returns its reply.
    ///
    /// # Errors
    /// If there is no reply within `limit`, or the process has ended.
    pub(super) fn ask(&self, request: Map<String, Value>, limit: Duration) -> Result<Map<String, Value>, Unanswered> {
        let (id, receiver) = {
            let mut replies = lock(&self.replies);
            replies.asked += 1;
            let id = replies.asked;
            (id, replies.wait_for(id))
        };
        self.send(id, request);
        self.wait(id, &receiver, limit)
    }

    /// Sends a request whose reply is ignored.
    pub(super) fn tell(&self, request: Map<String, Value>) {
        let id = {
            let mut replies = lock(&self.replies);
            replies.asked += 1;
            let id = replies.asked;
            replies.given_up.insert(id);
            id
        };
        self.send(id, request);
    }

    /// Returns whether the process has ended or can no longer be used.
    pub(super) fn has_ended(&self) -> bool {
        lock(&self.replies).ended.is_some()
    }

    /// Kills the process and all processes that it started.
    pub(super) fn kill(&self) {
        *lock(&self.to_child) = None;
        lock(&self.replies).end(End::Exited);
        let mut child = lock(&self.child);
        kill_program(&child);
        let _ = child.wait();
    }

    fn send(&self, id: u64, request: Map<String, Value>) {
        let mut line = Map::from_iter([("id".to_string(), Value::from(id))]);
        line.extend(request);
        if let Some(to_child) = &*lock(&self.to_child) {
            // If the process has exited, the thread that reads its replies detects it.
            let _ = to_child.send(format!("{}\n", Value::Object(line)).into_bytes());
        }
    }

    fn wait(
        &self,
        id: u64,
        receiver: &Receiver<Map<String, Value>>,
        limit: Duration,
    ) -> Result<Map<String, Value>, Unanswered> {
        let until = Instant::now() + limit;
        let mut exited: Option<Instant> = None;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match receiver.recv_timeout(left.min(POLL_INTERVAL)) {
                Ok(reply) => return Ok(reply),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Unanswered { message: self.explain(), hangs: false });
                }
                Err(RecvTimeoutError::Timeout) if left.is_zero() => {
                    lock(&self.replies).give_up(id);
                    let message = format!("no reply within {} s", limit.as_secs_f64());
                    return Err(Unanswered { message, hangs: true });
                }
                // A process that this one started may keep the output open after it has exited.
                Err(RecvTimeoutError::Timeout) => {
                    if has_exited(&mut lock(&self.child))
                        && exited.get_or_insert_with(Instant::now).elapsed() > EXIT_WAIT
                    {
                        lock(&self.replies).end(End::Exited);
                    }
                }
            }
        }
    }

    /// Kills the process, and returns why it ended, with the last lines of its standard error.
    fn explain(&self) -> String {
        let mut end = lock(&self.end);
        if let Some(message) = &*end {
            return message.clone();
        }
        let reason = lock(&self.replies).ended.clone().unwrap_or(End::Exited);
        let mut child = lock(&self.child);
        let since = Instant::now();
        while matches!(reason, End::Exited) && !has_exited(&mut child) && since.elapsed() < EXIT_WAIT {
            thread::sleep(Duration::from_millis(5));
        }
        let exited = has_exited(&mut child);
        kill_program(&child);
        let status = child.wait().ok().filter(|_| exited).map_or(String::new(), |status| format!(" ({status})"));
        drop(child);
        let mut message = match reason {
            End::Exited if exited => format!("the process exited{status}"),
            End::Exited => "the process closed its standard output".to_string(),
            End::Broken(message) => message,
        };
        let _ = lock(&self.stderr_end).recv_timeout(EXIT_WAIT);
        let tail = lock(&self.stderr_tail);
        let tail: Vec<&str> = tail.iter().map(String::as_str).filter(|line| !line.is_empty()).collect();
        if !tail.is_empty() {
            message += &format!("; its standard error ends with: {}", tail.join(" / "));
        }
        end.insert(message).clone()
    }
}

impl Drop for Process {
    /// Closes the input of the process, and kills it if it does not exit in time.
    fn drop(&mut self) {
        *lock(&self.to_child) = None;
        let since = Instant::now();
        while !has_exited(&mut lock(&self.child)) && since.elapsed() < EXIT_WAIT {
            thread::sleep(Duration::from_millis(5));
        }
        self.kill();
    }
}

impl Replies {
    fn wait_for(&mut self, id: u64) -> Receiver<Map<String, Value>> {
        let (sender, receiver) = channel();
        if self.ended.is_none() {
            self.waiting.insert(id, sender);
        }
        receiver
    }

    fn give_up(&mut self, id: u64) {
        if self.waiting.remove(&id).is_some() {
            self.given_up.insert(id);
        }
    }

    /// Passes a reply on to its request. Returns false if the line is not a valid reply; the process can then no longer be used.
    fn take(&mut self, line: &[u8]) -> bool {
        if self.ended.is_some() {
            return false;
        }
        match self.answer_request(line) {
            Ok(()) => true,
            Err(message) => {
                self.end(End::Broken(message));
                false
            }
        }
    }

    fn answer_request(&mut self, line: &[u8]) -> Result<(), String> {
        if line.len() > MAX_REPLY {
            return Err(format!(
                "expected a line of at most {MAX_REPLY} bytes on its standard output, found a longer one"
            ));
        }
        let shown = || excerpt(String::from_utf8_lossy(line).trim(), 80);
        let Ok(Value::Object(reply)) = serde_json::from_slice(line) else {
            return Err(format!("expected a JSON object per line on its standard output, found {}", shown()));
        };
        let Some(id) = reply.get("id").and_then(Value::as_u64) else {
            return Err(format!("expected the \"id\" of a request in each reply, found {}", shown()));
        };
        match self.waiting.remove(&id) {
            Some(sender) => {
                let _ = sender.send(reply);
                Ok(())
            }
            None if self.given_up.remove(&id) => Ok(()),
            None => Err(format!("expected the \"id\" of a request without a reply, found {}", shown())),
        }
    }

    fn end(&mut self, end: End) {
        self.ended.get_or_insert(end);
        self.waiting.clear();
    }
}

fn write_to(mut stdin: ChildStdin, lines: &Receiver<Vec<u8>>) {
    let _ = lines.iter().try_for_each(|line| stdin.write_all(&line).and_then(|()| stdin.flush()));
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
