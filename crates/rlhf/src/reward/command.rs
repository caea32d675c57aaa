//! A reward that is a program in any language: started once, JSON lines in, JSON lines out.

use super::{Patience, Problem, Reward, RewardInput, Score, check, excerpt};
use crate::{Error, Result};
use serde::Serialize;
use serde_json::Value;
use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The longest answer to a row in bytes, far above any real one.
const LONGEST_LINE: usize = 4 << 20;
/// Answers that are read before they are asked for: with their length this bounds what a program that prints without end takes.
const READ_AHEAD: usize = 16;
/// So many bytes of a line of standard error are looked at.
const LONGEST_SAID: usize = 4096;
/// So many of the last lines of standard error are told when the program fails.
const LINES_SAID: usize = 5;
/// How often a program that says nothing is looked at.
const LOOK: Duration = Duration::from_millis(50);
/// How long a line that nobody has asked for is waited for.
const MOMENT: Duration = Duration::from_millis(5);
/// How long a program that should end may take to do so.
const GRACE: Duration = Duration::from_millis(500);

/// A program that scores responses.
///
/// It is started by `sh -c`, once; it gets a JSON object per response on its standard input, a line each, and answers each, in
/// order, by a line on its standard output: `{"score": x}`, `{"scores": [x, ...]}` with one number per token, or a number.
/// When it fails it is started again. It ends when its standard input does, and is killed when it does not.
pub struct CommandReward {
    command: String,
    patience: Patience,
    running: Option<Running>,
}

/// What the program is told of a response.
#[derive(Serialize)]
struct Line<'a> {
    prompt: &'a str,
    response: &'a str,
    prompt_ids: &'a [i64],
    response_ids: &'a [i64],
    finish_reason: &'static str,
    row: &'a Value,
    /// How many lines of this batch follow, for programs that score several at once.
    left: usize,
}

impl CommandReward {
    /// A program, which is not started yet.
    pub fn new(command: impl Into<String>, patience: Patience) -> Self {
        Self { command: command.into(), patience, running: None }
    }

    /// Starts the program unless it runs, so that it gets ready while something else is done.
    ///
    /// # Errors
    /// If there is no `sh`.
    pub fn start(&mut self) -> Result<()> {
        self.running().map(drop).map_err(|problem| Error::Run(problem.what))
    }

    fn running(&mut self) -> Result<&mut Running, Problem> {
        match &mut self.running {
            Some(running) => Ok(running),
            none => {
                let started = Running::start(&self.command);
                // The command line may hold a key.
                let wrong = |e| Problem::lasting(format!("the program cannot be started by sh: {e}"));
                Ok(none.insert(started.map_err(wrong)?))
            }
        }
    }

    fn ask(&mut self, batch: &[RewardInput<'_>]) -> Result<Vec<Score>, Problem> {
        let timeout = self.patience.timeout;
        let answered = self.running()?.converse(batch, timeout);
        answered.map_err(|problem| match self.running.take() {
            // What it would say next belongs to no row.
            Some(mut running) => running.explain(problem),
            None => problem,
        })
    }
}

impl Reward for CommandReward {
    fn score(&mut self, batch: &[RewardInput<'_>]) -> Result<Vec<Score>> {
        let patience = self.patience;
        patience.repeat(|| self.ask(batch)).map_err(|problem| problem.error(batch))
    }
}

/// The program, with a thread for each of its pipes: however much goes through one of them, no other waits.
struct Running {
    child: Child,
    /// Until it is to end.
    to_child: Option<Sender<Vec<u8>>>,
    /// Its answers; disconnected when its output has ended.
    lines: Receiver<Vec<u8>>,
    /// The last lines of its standard error.
    said: Arc<Mutex<VecDeque<String>>>,
    /// Disconnected when its standard error has ended.
    silent: Receiver<()>,
    /// Whether its output ended before it had answered.
    ended: bool,
}

impl Running {
    fn start(command: &str) -> io::Result<Self> {
        let mut child = Command::new("sh")
            .args(["-c", command])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A group of its own: Ctrl-C is for this program, which needs scores to finish its update, and all that
            // the shell starts can be ended at once.
            .process_group(0)
            .spawn()?;
        let (to_child, batches) = channel::<Vec<u8>>();
        let (line, lines) = sync_channel(READ_AHEAD);
        let (end_of_stderr, silent) = channel::<()>();
        let said = Arc::new(Mutex::new(VecDeque::new()));
        if let Some(mut stdin) = child.stdin.take() {
            thread::spawn(move || {
                // A program that has ended is noticed where its answers are read.
                batches.iter().try_for_each(|batch| stdin.write_all(&batch).and_then(|()| stdin.flush()))
            });
        }
        if let Some(stdout) = child.stdout.take() {
            thread::spawn(move || read_lines(stdout, LONGEST_LINE, |text| line.send(text).is_ok()));
        }
        if let Some(stderr) = child.stderr.take() {
            let said = said.clone();
            thread::spawn(move || {
                read_lines(stderr, LONGEST_SAID, |text| {
                    let mut said = said.lock().unwrap_or_else(PoisonError::into_inner);
                    said.push_back(String::from_utf8_lossy(&text).trim().chars().take(200).collect());
                    if said.len() > LINES_SAID {
                        said.pop_front();
                    }
                    true
                });
                drop(end_of_stderr);
            });
        }
        Ok(Self { child, to_child: Some(to_child), lines, said, silent, ended: false })
    }

    /// Sends the responses and takes an answer to each.
    fn converse(&mut self, batch: &[RewardInput<'_>], timeout: Duration) -> Result<Vec<Score>, Problem> {
        let unasked = |line: &[u8]| {
            let found = excerpt(&String::from_utf8_lossy(line), 80);
            Problem::new(format!("expected a line per response on standard output, found one more: {found}"))
        };
        if let Ok(line) = self.lines.try_recv() {
            return Err(unasked(&line));
        }
        let mut bytes = Vec::new();
        for (at, input) in batch.iter().enumerate() {
            let RewardInput { prompt, response, prompt_ids, response_ids, row, .. } = *input;
            let (finish_reason, left) = (input.finish_reason(), batch.len() - at - 1);
            let line = Line { prompt, response, prompt_ids, response_ids, finish_reason, row, left };
            serde_json::to_writer(&mut bytes, &line).map_err(|e| Problem::lasting(e.to_string()))?;
            bytes.push(b'\n');
        }
        if let Some(to_child) = &self.to_child {
            // If nobody takes it the program has ended, and so has its output.
            let _ = to_child.send(bytes);
        }
        let mut scores = Vec::with_capacity(batch.len());
        for row in 0..batch.len() {
            let line = match self.next_line(timeout) {
                Ok(line) if line.len() > LONGEST_LINE => {
                    let what = format!("expected an answer of at most {LONGEST_LINE} bytes, found a longer line");
                    return Err(Problem::at(row, what));
                }
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) => {
                    let what = format!("no answer within {} s", timeout.as_secs_f64());
                    return Err(Problem::at(row, what));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    self.ended = true;
                    let what = format!("the program ended after {row} of {} answers", batch.len());
                    return Err(Problem::at(row, what));
                }
            };
            scores.push(parse(&line).map_err(|what| Problem::at(row, what))?);
        }
        check(&scores, batch)?;
        // One line too many comes with the others, if it does not take its time; then the next batch finds it.
        match self.lines.recv_timeout(MOMENT) {
            Ok(line) => Err(unasked(&line)),
            Err(_) => Ok(scores),
        }
    }

    /// The next answer. A program that has ended has none, even if what it has started keeps its output open.
    fn next_line(&mut self, timeout: Duration) -> Result<Vec<u8>, RecvTimeoutError> {
        let began = Instant::now();
        let mut ended: Option<Instant> = None;
        loop {
            let left = timeout.saturating_sub(began.elapsed());
            match self.lines.recv_timeout(left.min(LOOK)) {
                Err(RecvTimeoutError::Timeout) if ended.is_some_and(|since| since.elapsed() > GRACE) => {
                    return Err(RecvTimeoutError::Disconnected);
                }
                Err(RecvTimeoutError::Timeout) if !left.is_zero() => {
                    if self.has_ended() {
                        ended.get_or_insert_with(Instant::now);
                    }
                }
                found => return found,
            }
        }
    }

    /// Ends the program, and adds to `problem` how it ended and what it said.
    fn explain(&mut self, mut problem: Problem) -> Problem {
        let ended = self.ended && self.wait();
        if let Some(status) = self.kill().filter(|_| ended) {
            problem.what += &format!(" ({status})");
            // The shell's words for a program that is not there, or is none.
            problem.again &= !matches!(status.code(), Some(126 | 127));
        }
        let _ = self.silent.recv_timeout(GRACE);
        let said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let said: Vec<&str> = said.iter().map(String::as_str).filter(|line| !line.is_empty()).collect();
        if !said.is_empty() {
            problem.what += &format!("; its standard error ends with: {}", said.join(" / "));
        }
        problem
    }

    /// Whether it ends in time.
    fn wait(&mut self) -> bool {
        let began = Instant::now();
        while !self.has_ended() {
            if began.elapsed() > GRACE {
                return false;
            }
            thread::sleep(Duration::from_millis(5));
        }
        true
    }

    /// Whether it has ended. Where the system shows it, it is not asked for its status yet: until then nothing else gets its
    /// number, which is that of its group.
    fn has_ended(&mut self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()));
        match stat.as_deref().map(|stat| stat.rsplit_once(") ").and_then(|(_, state)| state.chars().next())) {
            Ok(Some(state)) => matches!(state, 'Z' | 'X'),
            _ => matches!(self.child.try_wait(), Ok(Some(_))),
        }
    }

    /// Ends the program at once, and what it has started, which may live on when it has ended; gives how it ended.
    fn kill(&mut self) -> Option<ExitStatus> {
        self.to_child = None;
        let group = format!("kill -s KILL -- -{}", self.child.id());
        let _ = Command::new("sh").args(["-c", &group]).stdin(Stdio::null()).stderr(Stdio::null()).status();
        let _ = self.child.kill();
        self.child.wait().ok()
    }
}

impl Drop for Running {
    /// Tells the program that there is no more to score, and gives it a moment.
    fn drop(&mut self) {
        self.to_child = None;
        self.wait();
        self.kill();
    }
}

/// Hands on the lines that are not blank, until there are no more or nobody wants them. Of a line of more than `most` bytes
/// it hands on the beginning, which is longer than `most`, and passes over the rest.
fn read_lines(from: impl Read, most: usize, mut take: impl FnMut(Vec<u8>) -> bool) {
    let mut from = BufReader::new(from);
    let mut passed_over = false;
    loop {
        let mut line = Vec::new();
        match from.by_ref().take(most as u64 + 1).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let (rest, ends) = (passed_over, line.ends_with(b"\n"));
        passed_over = !ends && line.len() > most;
        if ends {
            line.pop();
        }
        if !rest && !line.iter().all(u8::is_ascii_whitespace) && !take(line) {
            return;
        }
    }
}

/// The score in a line.
fn parse(line: &[u8]) -> Result<Score, String> {
    let value: Value = serde_json::from_slice(line).unwrap_or(Value::Null);
    let numbers = |list: &Value| list.as_array().and_then(|list| list.iter().map(Value::as_f64).collect::<Option<_>>());
    let score = match (value.as_f64(), value["score"].as_f64()) {
        (Some(score), _) | (_, Some(score)) => Some(Score::Response(score)),
        _ => numbers(&value["scores"]).map(Score::Tokens),
    };
    score.ok_or_else(|| {
        let found = excerpt(String::from_utf8_lossy(line).trim(), 80);
        format!("expected {{\"score\": x}}, {{\"scores\": [x, ...]}} or a number on standard output, found {found}")
    })
}
