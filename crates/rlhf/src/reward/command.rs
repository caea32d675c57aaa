//! A reward that is an external program, or a Python function run by a program. It is started once, and reads and writes JSON lines.

use super::lines::{Lines, MAX_LINE};
use super::printed::{Logged, Printed};
use super::retry::{Failure, Retries, check, excerpt};
use super::sources::{program_files, source_files};
use super::{RetryPolicy, Reward, RewardInput, Score, TrainerState, Warn};
use rlhf_base::dist::launch::VARIABLES;
use rlhf_base::process::{has_exited, loaded, loader, python, python_hint};
use rlhf_base::safe_text::{beginning, one_line};
use rlhf_base::signals::{add_program, kill_program};
use rlhf_base::{Error, Result};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The program that calls a Python function.
const FUNCTION: &str = include_str!("function.py");
/// The environment variable with the driver's socket, which the bridge to its functions needs.
pub(crate) const DRIVER: &str = "RLHF_DRIVER";
/// Number of bytes of a line of standard error that are kept.
pub(crate) const MAX_STDERR_LINE: usize = 4096;
/// Number of lines at the end of standard error that are shown when the program fails.
pub(crate) const STDERR_LINES: usize = 5;
/// Interval at which a program without output is checked for its exit.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Shortest wait for an extra output line after the last score of a batch.
const EXTRA_LINE_WAIT: Duration = Duration::from_millis(5);
/// Longest wait for such a line.
const MAX_EXTRA_LINE_WAIT: Duration = Duration::from_millis(500);
/// Longest wait for the last lines of a program whose input has been closed.
const MAX_END_WAIT: Duration = Duration::from_secs(10);
/// Maximum wait for the exit of a program whose input has been closed.
pub(crate) const EXIT_WAIT: Duration = Duration::from_millis(500);

/// A program that scores responses.
///
/// It is started once, by `sh -c`. It reads one JSON object per response and line from its standard input, and writes one line
/// per response, in order, to its standard output: `{"score": x}`, `{"scores": [x, ...]}` with one number per token, or a
/// number; `null` or `{"score": null}` for a response that it gives no score. With `{"error": "why"}` it reports a failure of the batch,
/// with `{"error": "why", "retry": false}` one that another attempt would have too. It is restarted after a failure. It should exit at the
/// end of its standard input, and is killed if it does not.
///
/// Each object has an `id`. A program that repeats it in its lines, `{"score": x, "id": n}`, may write the lines of a batch in any order,
/// and an extra line cannot shift its scores. Without ids an extra line is an error when it comes with the scores of its batch, when the
/// next batch is sent, or at [`Reward::finish`].
pub struct CommandReward {
    program: RestartedProgram,
    retry: RetryPolicy,
    retries: Retries,
    /// State of the run, for a Python function.
    state: Option<TrainerState>,
    /// Metrics and columns that a Python function has logged for the last batch.
    logged: Logged,
}

/// The input line for one response.
#[derive(Serialize)]
struct Line<'a> {
    /// Number of the line since the start of the program, from 1.
    id: u64,
    prompt: &'a str,
    response: &'a str,
    prompt_ids: &'a [i64],
    response_ids: &'a [i64],
    finish_reason: &'static str,
    row: &'a Value,
    /// Turns and results of tools, with an environment.
    #[serde(skip_serializing_if = "Option::is_none")]
    messages: Option<&'a [Value]>,
    /// Number of lines of this batch that follow, for programs that score in batches.
    left: usize,
}

impl CommandReward {
    /// Creates the reward without starting the program.
    pub fn new(command: impl Into<String>, retry: RetryPolicy) -> Self {
        Self::of(RestartedProgram::new(command), retry)
    }

    /// Creates the reward of the Python function `module.function`, without importing it. The Python program is `RLHF_PYTHON`, or
    /// `python3`; the working directory is on its path.
    ///
    /// The function is called as by TRL's `GRPOTrainer`: `f(prompts=..., completions=..., completion_ids=..., **columns)` with a list
    /// for each column of the rows, and returns a list of numbers, with None for a response that it gives no score. It may be a
    /// coroutine function. TRL's `trainer_state`, `log_extra` and `log_metric` are passed where it accepts them. The lines that it prints,
    /// and the traceback of an exception, go to [`Reward::print_by`]; an exception that another call would raise too is not retried.
    pub fn python(function: impl Into<String>, retry: RetryPolicy) -> Self {
        Self::of(RestartedProgram::of(Source::Python(function.into())), retry)
    }

    fn of(program: RestartedProgram, retry: RetryPolicy) -> Self {
        Self { program, retry, retries: Retries::default(), state: None, logged: Logged::default() }
    }

    /// Starts the program unless it is running, so that it initializes while something else is done. Waits until a Python function
    /// is imported.
    ///
    /// # Errors
    /// If there is no `sh` or no Python; if the function cannot be imported.
    pub fn start(&mut self) -> Result<()> {
        let timeout = self.retry.timeout;
        let started = self.program.call(|running| running.wait_until_ready(timeout));
        started.map_err(|failure| Error::Run(failure.message))
    }
}

impl Reward for CommandReward {
    fn score(&mut self, batch: &[RewardInput<'_>]) -> Result<Vec<Score>> {
        self.retries.start();
        let timeout = self.retry.timeout;
        let state = self.state.as_ref().filter(|_| self.program.is_python());
        let attempt = || {
            self.program.call(|running| {
                running.logged = Logged::default();
                state.iter().for_each(|state| running.tell(state));
                let scores = running.score(batch, timeout)?;
                Ok((scores, std::mem::take(&mut running.logged)))
            })
        };
        let (scores, logged) = self.retry.run(&self.retries, attempt).map_err(|failure| failure.error(batch))?;
        self.logged = logged;
        Ok(scores)
    }

    fn extra(&self) -> Vec<(String, f64)> {
        self.logged.means().chain(self.retries.metric()).collect()
    }

    fn columns(&self) -> Vec<(String, Vec<Value>)> {
        self.logged.columns.clone()
    }

    fn set_trainer_state(&mut self, state: &TrainerState) {
        self.state = Some(state.clone());
    }

    fn print_by(&mut self, name: &str, print: Warn) {
        let name = name.to_string();
        self.program.printed.show_by(Arc::new(move |line: &str| print(&format!("{name}: {line}"))));
    }

    /// The scripts that a program's command line names, or the modules of a function, with the modules next to them that they import.
    fn contents(&self) -> Vec<(String, Vec<u8>)> {
        match &self.program.source {
            Source::Shell(line) => program_files(line),
            Source::Python(_) => {
                source_files(self.program.running.as_ref().map_or(&[][..], |running| running.modules.as_slice()))
            }
        }
    }

    fn finish(&mut self) -> Result<()> {
        self.program.finish(|line| parse(line).is_ok()).map_err(|failure| Error::Run(failure.message))
    }

    fn warn_by(&mut self, name: &str, warn: Warn) {
        self.retries.warn_by(format!("reward `{name}`"), warn);
    }
}

/// A program that is started at its first call, and again after a failure.
pub(crate) struct RestartedProgram {
    source: Source,
    running: Option<Program>,
    /// Lines that a Python function prints.
    printed: Printed,
    /// The failure that makes it unknown which request a line belongs to, if there was one.
    misplaced: Option<String>,
}

/// The code of a program.
enum Source {
    /// A command line for `sh -c`.
    Shell(String),
    /// A Python function, `module.function`, for [`FUNCTION`].
    Python(String),
}

impl RestartedProgram {
    /// Returns the program of `command`, for `sh -c`, without starting it.
    pub(crate) fn new(command: impl Into<String>) -> Self {
        Self::of(Source::Shell(command.into()))
    }

    fn of(source: Source) -> Self {
        Self { source, running: None, printed: Printed::default(), misplaced: None }
    }

    /// Returns whether this is a Python function.
    fn is_python(&self) -> bool {
        matches!(self.source, Source::Python(_))
    }

    /// Returns the running program; starts it unless it is running.
    fn start(&mut self) -> Result<&mut Program, Failure> {
        match &mut self.running {
            Some(running) => Ok(running),
            slot => {
                let wrong = |e| match &self.source {
                    // The command line may hold a key.
                    Source::Shell(_) => Failure::permanent(format!("the program cannot be started by sh: {e}")),
                    Source::Python(_) => {
                        Failure::permanent(format!("{} cannot be started: {e}{}", python(), python_hint()))
                    }
                };
                Ok(slot.insert(Program::start(&self.source, &self.printed).map_err(wrong)?))
            }
        }
    }

    /// Calls `ask` with the running program. A failure ends the program, and is returned with the end of its standard error. After an extra
    /// line that came late, every call fails: earlier lines may belong to other rows, which another attempt would not correct.
    pub(crate) fn call<T>(&mut self, ask: impl FnOnce(&mut Program) -> Result<T, Failure>) -> Result<T, Failure> {
        if let Some(message) = &self.misplaced {
            return Err(Failure::permanent(message.clone()));
        }
        ask(self.start()?).map_err(|failure| self.failed(failure))
    }

    /// Ends the program after a failure.
    fn failed(&mut self, failure: Failure) -> Failure {
        let failure = match self.running.take() {
            // It would not be known which row its next line belongs to.
            Some(mut running) => running.explain(failure),
            None => failure,
        };
        if failure.misplaced {
            self.misplaced = Some(failure.message.clone());
        }
        failure
    }

    /// Closes the input of the program, and reads its output to the end.
    ///
    /// # Errors
    /// If there is a line for which `is_reply` is true: an extra line.
    pub(crate) fn finish(&mut self, is_reply: impl Fn(&[u8]) -> bool) -> Result<(), Failure> {
        if let Some(message) = &self.misplaced {
            return Err(Failure::permanent(message.clone()));
        }
        let finished = self.running.as_mut().map_or(Ok(()), |running| running.finish(is_reply));
        finished.map_err(|failure| self.failed(failure))?;
        self.running = None;
        Ok(())
    }

    /// Whether an extra line has come late, after which every call fails.
    pub(crate) fn is_misplaced(&self) -> bool {
        self.misplaced.is_some()
    }

    /// Ends the program.
    pub(crate) fn end(&mut self) {
        self.running = None;
    }
}

/// A running program that reads and writes lines. Threads write its input and read its standard error, so that a full pipe does not
/// block the others.
pub(crate) struct Program {
    child: Child,
    /// Input of the program; `None` closes it.
    to_child: Option<Sender<Vec<u8>>>,
    /// Output lines.
    lines: Lines,
    /// Last lines of standard error.
    stderr_tail: Arc<Mutex<VecDeque<String>>>,
    /// Disconnected at the end of standard error.
    stderr_end: Receiver<()>,
    /// Whether the output ended before all scores were read.
    output_ended: bool,
    /// Whether this is a Python function.
    is_python: bool,
    /// Whether the function is not yet imported.
    is_importing: bool,
    /// Lines that a Python function prints.
    printed: Printed,
    /// Metrics and columns that the function has logged.
    logged: Logged,
    /// The files of the modules of a Python function, once it is imported.
    modules: Vec<String>,
    /// Number of requests sent so far; the `id` of the last response.
    asked: u64,
    /// Whether replies have the id of their request; `None` before the first reply.
    echoes: Option<bool>,
    /// The longest wait for a reply, not counting the first one: of the last batch, or of all pairs of a judge.
    longest_wait: Duration,
}

impl Program {
    /// Starts the program.
    fn start(source: &Source, printed: &Printed) -> io::Result<Self> {
        let (program, script, input) = match source {
            Source::Shell(line) => ("sh".to_string(), line.clone(), String::new()),
            Source::Python(function) => {
                let input = format!("{}{}\n", loaded(FUNCTION), json!({"function": function}));
                (python(), loader("function.py"), input)
            }
        };
        let mut command = Command::new(program);
        // The program may be `rlhf score`, which must not see itself as a rank or with a driver.
        for name in VARIABLES {
            command.env_remove(name);
        }
        if matches!(source, Source::Shell(_)) {
            command.env_remove(DRIVER);
        }
        let mut child = command
            .args(["-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A separate process group: Ctrl-C must not reach the program, whose scores are needed to finish the update,
            // and the group can be killed with everything that the shell starts.
            .process_group(0)
            .spawn()?;
        add_program(&child);
        let (to_child, batches) = channel::<Vec<u8>>();
        let _ = to_child.send(input.into_bytes());
        let (end_of_stderr, stderr_end) = channel::<()>();
        let stderr_tail = Arc::new(Mutex::new(VecDeque::new()));
        if let Some(mut stdin) = child.stdin.take() {
            thread::spawn(move || {
                // The exit of the program is detected where its output is read.
                batches.iter().try_for_each(|batch| stdin.write_all(&batch).and_then(|()| stdin.flush()))
            });
        }
        let stdout = child.stdout.take().ok_or_else(|| io::Error::other("no pipe to it"))?;
        if let Some(stderr) = child.stderr.take() {
            let tail = stderr_tail.clone();
            let printed = matches!(source, Source::Python(_)).then(|| printed.clone());
            thread::spawn(move || {
                read_lines(stderr, MAX_STDERR_LINE, |text| {
                    printed.iter().for_each(|printed| printed.receive(&text));
                    let mut tail = tail.lock().unwrap_or_else(PoisonError::into_inner);
                    tail.push_back(String::from_utf8_lossy(&text).trim().chars().take(200).collect());
                    if tail.len() > STDERR_LINES {
                        tail.pop_front();
                    }
                    true
                });
                drop(end_of_stderr);
            });
        }
        let is_python = matches!(source, Source::Python(_));
        Ok(Self {
            child,
            to_child: Some(to_child),
            lines: Lines::new(stdout),
            stderr_tail,
            stderr_end,
            output_ended: false,
            is_python,
            is_importing: is_python,
            printed: printed.clone(),
            logged: Logged::default(),
            modules: Vec::new(),
            asked: 0,
            // The program of a Python function is part of rlhf and always repeats the id.
            echoes: is_python.then_some(true),
            longest_wait: Duration::ZERO,
        })
    }

    /// Waits until a Python function is imported.
    fn wait_until_ready(&mut self, timeout: Duration) -> Result<(), Failure> {
        if !std::mem::take(&mut self.is_importing) {
            return Ok(());
        }
        loop {
            match self.next_line(timeout) {
                Ok(line) => {
                    if let Some(modules) = ready(&line) {
                        self.modules = modules;
                        return Ok(());
                    }
                    // Another attempt would import the same files. A file that Python reads at its start may print other lines.
                    if let Some(failure) = reported(&line) {
                        return Err(Failure { retryable: false, ..failure });
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    let message = format!("its import did not end within {} s", timeout.as_secs_f64());
                    return Err(Failure::new(message));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    self.output_ended = true;
                    return Err(Failure::new("Python exited before the function was imported"));
                }
            }
        }
    }

    /// Sends one line, and returns the next output line.
    ///
    /// # Errors
    /// If there is no line within `timeout`, it is too long, or the program has exited or has written another line before or after it.
    pub(crate) fn ask(&mut self, mut line: Vec<u8>, timeout: Duration) -> Result<Vec<u8>, Failure> {
        self.check_silent()?;
        self.asked += 1;
        line.push(b'\n');
        if let Some(to_child) = &self.to_child {
            let _ = to_child.send(line);
        }
        let began = Instant::now();
        let reply = self.next_line(timeout);
        if self.asked > 1 {
            self.longest_wait = self.longest_wait.max(began.elapsed());
        }
        match reply {
            Ok(line) if line.len() > MAX_LINE => {
                Err(Failure::new(format!("expected a line of at most {MAX_LINE} bytes, found a longer one")))
            }
            // An extra line usually comes with the reply.
            Ok(line) => match self.lines.next(EXTRA_LINE_WAIT) {
                Ok(extra) => {
                    let line = shown(&line);
                    let extra = shown(&extra);
                    Err(Failure::new(format!("expected one line on standard output, found two: {line} and {extra}")))
                }
                Err(_) => Ok(line),
            },
            Err(RecvTimeoutError::Timeout) => Err(Failure::new(format!("no reply within {} s", timeout.as_secs_f64()))),
            Err(RecvTimeoutError::Disconnected) => {
                self.output_ended = true;
                Err(Failure::new("the program exited without a reply"))
            }
        }
    }

    /// Sends the state of the run to a Python function.
    fn tell(&mut self, state: &TrainerState) {
        if let Some(to_child) = &self.to_child {
            let _ = to_child.send(format!("{}\n", json!({"trainer_state": state})).into_bytes());
        }
    }

    /// Checks that no output waits: it would belong to earlier requests.
    fn check_silent(&mut self) -> Result<(), Failure> {
        match self.lines.waiting() {
            None => Ok(()),
            // Before the first request there is nothing to reply to, so earlier replies are not affected.
            Some(line) if self.asked == 0 => Err(extra_line(&line)),
            Some(line) => Err(self.late_line(&line)),
        }
    }

    /// Returns the failure for an extra line that was found after its batch.
    fn late_line(&self, line: &[u8]) -> Failure {
        let hint = match self.echoes {
            Some(true) => "",
            _ => {
                "; replies before it may be those of other requests (a reply that repeats the \"id\" of its request cannot be)"
            }
        };
        let message = format!("{}{hint}", extra_line(line).message);
        Failure { misplaced: true, ..Failure::permanent(message) }
    }

    /// Sends the responses and reads one score for each.
    fn score(&mut self, batch: &[RewardInput<'_>], timeout: Duration) -> Result<Vec<Score>, Failure> {
        self.wait_until_ready(timeout)?;
        self.check_silent()?;
        let first = self.asked + 1;
        let mut bytes = Vec::new();
        for (at, input) in batch.iter().enumerate() {
            let RewardInput { prompt, response, prompt_ids, response_ids, row, .. } = *input;
            let finish_reason = input.finish_reason();
            let left = batch.len() - at - 1;
            let id = first + at as u64;
            let messages = input.episode.map(|episode| episode.messages.as_slice());
            let line = Line { id, prompt, response, prompt_ids, response_ids, finish_reason, row, messages, left };
            serde_json::to_writer(&mut bytes, &line).map_err(|e| Failure::permanent(e.to_string()))?;
            bytes.push(b'\n');
        }
        self.asked += batch.len() as u64;
        if let Some(to_child) = &self.to_child {
            // Sending fails only if the program has closed its input; its exit is detected below.
            let _ = to_child.send(bytes);
        }
        let mut scores: Vec<Option<Score>> = vec![None; batch.len()];
        self.longest_wait = Duration::ZERO;
        for count in 0..batch.len() {
            let began = Instant::now();
            let (row, score) = self.read_score(count, batch.len(), first, timeout)?;
            if count > 0 {
                self.longest_wait = self.longest_wait.max(began.elapsed());
            }
            if scores[row].replace(score).is_some() {
                let id = first + row as u64;
                return Err(Failure::at(row, format!("expected one score with \"id\": {id}, found two")));
            }
        }
        let scores: Vec<Score> = scores.into_iter().flatten().collect();
        check(&scores, batch)?;
        // An extra line usually comes with the others, or after one more interval. If it comes later, the next batch or the end detects it.
        let wait = if self.echoes == Some(true) { Duration::ZERO } else { self.longest_wait * 2 };
        match self.lines.next(wait.clamp(EXTRA_LINE_WAIT, MAX_EXTRA_LINE_WAIT)) {
            Ok(line) => Err(extra_line(&line)),
            Err(_) => Ok(scores),
        }
    }

    /// Reads the next score of a batch of `len` scores, of which `count` are already read; `first` is the id of the first response. Returns
    /// the row of the score as well: the row of its id, or without an id the next one.
    fn read_score(
        &mut self,
        count: usize,
        len: usize,
        first: u64,
        timeout: Duration,
    ) -> Result<(usize, Score), Failure> {
        let problem = match self.next_line(timeout) {
            Ok(line) if line.len() > MAX_LINE => {
                Err(format!("expected a line of at most {MAX_LINE} bytes, found a longer one"))
            }
            Ok(line) => match parse(&line) {
                Err(message) => match reported(&line) {
                    Some(failure) => return Err(failure),
                    None => Err(message),
                },
                Ok((score, id)) => {
                    return self.score_row(id.as_ref(), count, len, first, &line).map(|row| (row, score));
                }
            },
            Err(RecvTimeoutError::Timeout) => Err(format!("no score within {} s", timeout.as_secs_f64())),
            Err(RecvTimeoutError::Disconnected) => {
                self.output_ended = true;
                Err(format!("the program exited after {count} of {len} scores"))
            }
        };
        problem.map_err(|message| Failure::at(count, message))
    }

    /// Returns the row of a score with this `id`, whose line is `line`.
    fn score_row(
        &mut self,
        id: Option<&Value>,
        count: usize,
        len: usize,
        first: u64,
        line: &[u8],
    ) -> Result<usize, Failure> {
        let echoes = *self.echoes.get_or_insert(id.is_some());
        let expected = match id {
            None if !echoes => return Ok(count),
            None => "the \"id\" of the request in each score, as in those before".to_string(),
            Some(_) if !echoes => "the \"id\" of the request in each score or in none".to_string(),
            Some(id) => match id.as_u64().and_then(|id| id.checked_sub(first)) {
                Some(row) if row < len as u64 => return Ok(row as usize),
                _ => format!("an \"id\" from {first} to {}", first + len as u64 - 1),
            },
        };
        Err(Failure::at(count, format!("expected {expected}, found {}", shown(line))))
    }

    /// Closes the input, and reads the output to its end, or for as long as the program may need for two replies.
    ///
    /// # Errors
    /// If there is a line for which `is_reply` is true.
    fn finish(&mut self, is_reply: impl Fn(&[u8]) -> bool) -> Result<(), Failure> {
        self.to_child = None;
        let until = Instant::now() + (self.longest_wait * 2).clamp(EXIT_WAIT, MAX_END_WAIT);
        while let Ok(line) = self.next_line(until.saturating_duration_since(Instant::now())) {
            // A program may write some last words, which are no replies.
            if self.asked > 0 && is_reply(&line) {
                return Err(self.late_line(&line));
            }
            // Some programs write without end.
            if Instant::now() >= until {
                break;
            }
        }
        Ok(())
    }

    /// Returns the next output line. Treats the output as ended when the program has exited, even if a process that it started
    /// keeps the pipe open.
    fn next_line(&mut self, timeout: Duration) -> Result<Vec<u8>, RecvTimeoutError> {
        let start = Instant::now();
        let mut exited: Option<Instant> = None;
        loop {
            let left = timeout.saturating_sub(start.elapsed());
            match self.lines.next(left.min(POLL_INTERVAL)) {
                Err(RecvTimeoutError::Timeout) if exited.is_some_and(|since| since.elapsed() > EXIT_WAIT) => {
                    return Err(RecvTimeoutError::Disconnected);
                }
                Err(RecvTimeoutError::Timeout) if !left.is_zero() => {
                    if has_exited(&mut self.child) {
                        exited.get_or_insert_with(Instant::now);
                    }
                }
                // Only the program of a Python function writes such lines, not a user's program.
                Ok(line) if self.is_python && self.logged.takes(&line) => {}
                result => return result,
            }
        }
    }

    /// Kills the program, and adds its exit status and the end of its standard error to `failure`.
    pub(crate) fn explain(&mut self, mut failure: Failure) -> Failure {
        let exited = self.output_ended && self.wait();
        if let Some(status) = self.kill().filter(|_| exited) {
            failure.message += &format!(" ({status})");
            // The shell's exit codes for a file that does not exist or is not executable.
            failure.retryable &= !matches!(status.code(), Some(126 | 127));
        }
        let _ = self.stderr_end.recv_timeout(EXIT_WAIT);
        let tail = self.stderr_tail.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_python && self.printed.is_shown() {
            return failure;
        }
        let tail: Vec<&str> = tail.iter().map(String::as_str).filter(|line| !line.is_empty()).collect();
        if !tail.is_empty() {
            failure.message += &format!("; its standard error ends with: {}", tail.join(" / "));
        }
        failure
    }

    /// Waits for the exit of the program; returns false after `EXIT_WAIT`.
    fn wait(&mut self) -> bool {
        let start = Instant::now();
        while !has_exited(&mut self.child) {
            if start.elapsed() > EXIT_WAIT {
                return false;
            }
            thread::sleep(Duration::from_millis(5));
        }
        true
    }

    /// Kills the program and every process of its group, which may outlive it; returns its exit status.
    fn kill(&mut self) -> Option<ExitStatus> {
        self.to_child = None;
        kill_program(&self.child);
        self.child.wait().ok()
    }
}

impl Drop for Program {
    /// Closes the input of the program, and kills it if it does not exit in time.
    fn drop(&mut self) {
        self.to_child = None;
        self.wait();
        self.kill();
        if self.is_python {
            // Waits so that the last lines are shown before anything that follows.
            let _ = self.stderr_end.recv_timeout(EXIT_WAIT);
        }
    }
}

/// Returns the failure for an output line that belongs to no request.
fn extra_line(line: &[u8]) -> Failure {
    let found = shown(line);
    Failure::new(format!("expected one line per request on standard output, found an extra line: {found}"))
}

/// Returns the beginning of a line for a message.
fn shown(line: &[u8]) -> String {
    excerpt(String::from_utf8_lossy(line).trim(), 80)
}

/// Calls `take` with every line that is not blank, until the end of input or until `take` returns false. A line of more than
/// `max_len` bytes is truncated to `max_len + 1` bytes, and the rest is skipped.
pub(crate) fn read_lines(input: impl Read, max_len: usize, mut take: impl FnMut(Vec<u8>) -> bool) {
    let mut input = BufReader::new(input);
    let mut skipping = false;
    loop {
        let mut line = Vec::new();
        match input.by_ref().take(max_len as u64 + 1).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let rest = skipping;
        let ends = line.ends_with(b"\n");
        skipping = !ends && line.len() > max_len;
        if ends {
            line.pop();
        }
        if !rest && !line.iter().all(u8::is_ascii_whitespace) && !take(line) {
            return;
        }
    }
}

/// Returns the failure that a line reports instead of a score: `{"error": "why"}`, with the `row` of the batch if one is known, and with
/// `retry` false if another attempt would fail too.
fn reported(line: &[u8]) -> Option<Failure> {
    let value: Value = serde_json::from_slice(line).ok()?;
    let message = one_line(value.get("error")?.as_str()?).into_owned();
    let row = value.get("row").and_then(Value::as_u64).and_then(|row| usize::try_from(row).ok());
    let retryable = value.get("retry").and_then(Value::as_bool).unwrap_or(true);
    Some(Failure { row, retryable, ..Failure::new(beginning(&message, 600)) })
}

/// Returns the files of the modules, if a line says that a Python function is imported: `{"ready": ["path", ...]}`.
fn ready(line: &[u8]) -> Option<Vec<String>> {
    let value: Value = serde_json::from_slice(line).ok()?;
    let files = value.as_object().filter(|line| line.len() == 1)?.get("ready")?.as_array()?;
    files.iter().map(|file| file.as_str().map(String::from)).collect()
}

/// Parses the score in a line, and returns the id that it repeats, if there is one.
fn parse(line: &[u8]) -> Result<(Score, Option<Value>), String> {
    let parsed: Result<Value, _> = serde_json::from_slice(line);
    let absent = parsed.as_ref().is_ok_and(|value| value.is_null() || value.get("score").is_some_and(Value::is_null));
    let value = parsed.unwrap_or(Value::Null);
    let numbers = |list: &Value| list.as_array().and_then(|list| list.iter().map(Value::as_f64).collect::<Option<_>>());
    let score = match (value.as_f64(), value["score"].as_f64()) {
        (Some(score), _) | (_, Some(score)) => Some(Score::Response(score)),
        _ => numbers(&value["scores"]).map(Score::Tokens).or(absent.then_some(Score::Absent)),
    };
    let score = score.ok_or_else(|| {
        let found = shown(line);
        format!("expected {{\"score\": x}}, {{\"scores\": [x, ...]}} or a number on standard output, found {found}")
    });
    score.map(|score| (score, value.get("id").filter(|id| !id.is_null()).cloned()))
}
