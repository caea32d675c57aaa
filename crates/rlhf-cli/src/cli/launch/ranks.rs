//! The processes of `rlhf launch`, one per rank: their environment, output, signals and end.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::{self, BufRead, BufReader, IsTerminal, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt, parent_id};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rlhf::dist::launch::{LAUNCHED_BY, LAUNCHER};
use rlhf::signals::{Requests, is_ignored};
use rlhf::terminal::Stream;
use rlhf::{Error, Result};
use rustix::process::{Pid, Signal, kill_process_group, set_parent_process_death_signal, test_kill_process};
use signal_hook::consts::{SIGABRT, SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGTSTP};
use signal_hook::iterator::Signals;
use signal_hook::low_level::{emulate_default_handler, signal_name};

use super::progress::Progress;

/// Time before SIGTERM in which the other ranks can notice a failed rank and print their own error: longer than they look for the cause.
/// A training run takes SIGTERM for a request to stop after its update.
const NOTICE: Duration = Duration::from_secs(4);
/// Time after a failure at which SIGKILL ends the remaining ranks. A rank 0 that makes progress is spared: it saves the run once it
/// notices the failure, at its next collective.
const KILL: Duration = Duration::from_secs(10);
/// Time without progress after which rank 0 is killed too: it may wait for a reward.
const IDLE: Duration = Duration::from_secs(30);
/// Time without writing after which rank 0 is killed, though it computes or waits for a disk: the default of `dist_timeout`.
const LONGEST: Duration = Duration::from_secs(1800);
/// Time between two looks at the progress of rank 0.
const LOOK: Duration = Duration::from_secs(1);
/// Time between a second request to stop and SIGKILL.
const KILL_AFTER_SECOND_STOP: Duration = Duration::from_secs(1);
/// Failures within this time have one cause: the operating system may report the rank that died after one that noticed it.
const SAME_CAUSE: Duration = Duration::from_millis(200);
/// Maximum wait for the last output of ranks that have ended.
const LAST_OUTPUT: Duration = Duration::from_secs(1);

/// An event that the launcher waits for.
pub(super) enum Event {
    /// A rank of this machine, from 0, has ended.
    Ended(usize, ExitStatus),
    /// A signal has reached the launcher.
    Signal(i32),
}

/// The end of all ranks.
pub(super) enum End {
    Done,
    /// On request, with the exit code of the program.
    Stopped(u8),
    /// Because of one rank, which the message names, with its exit code: 128 plus the number of the signal that killed it.
    Failed {
        message: String,
        code: u8,
        /// Whether the launcher was asked to stop the ranks.
        stop_requested: bool,
    },
}

/// One start of all ranks of this machine.
pub(super) struct Start<'a> {
    pub(super) program: &'a Path,
    pub(super) arguments: &'a [OsString],
    pub(super) local_ranks: usize,
    /// Number of the first rank of this machine among all ranks.
    pub(super) first_rank: usize,
    /// Number of ranks on all machines.
    pub(super) size: usize,
    pub(super) host: &'a str,
    pub(super) port: u16,
    pub(super) restart: usize,
    pub(super) max_restarts: usize,
    /// Whether the ranks compute on the CPU.
    pub(super) on_cpu: bool,
}

/// Installs the handlers of the launcher, and returns the channel of its events.
pub(super) fn events() -> io::Result<(Sender<Event>, Receiver<Event>)> {
    let (sender, events) = channel();
    // Under `nohup` SIGHUP stays ignored, here and in the ranks.
    let signals = [SIGINT, SIGTERM, SIGHUP, SIGTSTP].into_iter();
    let mut signals = Signals::new(signals.filter(|&signal| signal != SIGHUP || !is_ignored(SIGHUP)))?;
    let to_launcher = sender.clone();
    thread::Builder::new().name("signals".into()).spawn(move || {
        for signal in signals.forever() {
            let _ = to_launcher.send(Event::Signal(signal));
        }
    })?;
    Ok((sender, events))
}

/// Makes the system kill this process when the launcher that started it ends, so that no rank is left behind. Does nothing in
/// a process that `rlhf launch` did not start.
pub(crate) fn end_with_launcher() {
    let launcher = std::env::var(LAUNCHER).ok().and_then(|id| id.parse::<u32>().ok());
    let Some(launcher) = launcher else { return };
    if parent_id() == launcher {
        let _ = set_parent_process_death_signal(Some(Signal::KILL));
    }
    // The launcher may have ended before. A process that a rank started has another parent too, but then the launcher lives.
    let pid = i32::try_from(launcher).ok().and_then(Pid::from_raw);
    if parent_id() != launcher && pid.is_some_and(|pid| test_kill_process(pid).is_err()) {
        tch_ext::exit_at_once(1);
    }
}

/// The ranks of this machine.
pub(super) struct Ranks {
    first_rank: usize,
    /// The process groups of the ranks that run, by their number on this machine.
    running: BTreeMap<usize, Pid>,
    /// The failed ranks, in order; without those that the launcher ended.
    failures: Vec<(Instant, usize, ExitStatus)>,
    /// The exit code of ranks that ended on request.
    stopped: Option<u8>,
    /// Counts the signals to the launcher as requests to stop.
    requests: Requests,
    /// Number of requests to stop so far.
    stops: usize,
    /// The signals that all ranks were sent.
    sent: Vec<i32>,
    /// When SIGTERM and SIGKILL go to the ranks that still run.
    term_at: Option<Instant>,
    kill_at: Option<Instant>,
    /// Whether the ranks compute on the CPU.
    on_cpu: bool,
    /// The progress of rank 0, if it is on this machine, after a failure of another rank.
    main: Option<Progress>,
    /// Whether rank 0 was killed because it made no progress after a failure.
    main_hung: bool,
    /// The rank that each rank names in its error as the cause.
    named: Named,
    /// Disconnected when all output is written.
    output: Receiver<()>,
}

/// Ranks that errors name, by the rank that prints the error.
type Named = Arc<Mutex<BTreeMap<usize, usize>>>;

impl Ranks {
    /// No running rank yet, on a machine whose first rank is `first_rank`.
    fn new(first_rank: usize, on_cpu: bool, output: Receiver<()>) -> Self {
        Self {
            first_rank,
            running: BTreeMap::new(),
            failures: Vec::new(),
            stopped: None,
            requests: Requests::default(),
            stops: 0,
            sent: Vec::new(),
            term_at: None,
            kill_at: None,
            on_cpu,
            main: None,
            main_hung: false,
            named: Named::default(),
            output,
        }
    }

    /// Starts the ranks. Rank 0 of this machine has the terminal; the lines of the others are marked with their rank.
    ///
    /// # Errors
    /// If a process cannot be started; the others are killed then.
    pub(super) fn start(start: &Start<'_>, events: &Sender<Event>) -> Result<Self> {
        let (written, output) = channel();
        let mut ranks = Self::new(start.first_rank, start.on_cpu, output);
        for local_rank in 0..start.local_ranks {
            let mut child = match start.command(local_rank).spawn() {
                Ok(child) => child,
                Err(error) => {
                    ranks.send(Signal::KILL);
                    return Err(Error::io("start a rank", start.program)(error));
                }
            };
            let rank = start.first_rank + local_rank;
            if let Some(stdout) = child.stdout.take() {
                copy_lines(rank, stdout, Stream::Out, (written.clone(), None));
            }
            if let Some(stderr) = child.stderr.take() {
                copy_lines(rank, stderr, Stream::Err, (written.clone(), Some(ranks.named.clone())));
            }
            ranks.running.insert(local_rank, Pid::from_child(&child));
            wait_for(local_rank, child, events.clone());
        }
        Ok(ranks)
    }

    /// Waits for the end of all ranks. A failed rank ends the others, and a signal to the launcher goes to all of them.
    pub(super) fn wait(mut self, events: &Receiver<Event>) -> End {
        while !self.running.is_empty() {
            let deadline = self.term_at.into_iter().chain(self.kill_at).min();
            let event = match deadline {
                Some(at) => events.recv_timeout(at.saturating_duration_since(Instant::now())),
                None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match event {
                Ok(Event::Ended(rank, status)) => self.ended(rank, status),
                Ok(Event::Signal(SIGTSTP)) => self.suspend(),
                Ok(Event::Signal(signal)) => self.request_stop(signal),
                Err(_) => self.escalate(),
            }
        }
        // Wait for the end of their output, unless a process that a rank started still has it open.
        let _ = self.output.recv_timeout(LAST_OUTPUT);
        self.end()
    }

    fn ended(&mut self, local_rank: usize, status: ExitStatus) {
        self.running.remove(&local_rank);
        let rank = self.first_rank + local_rank;
        let code = exit_code(status);
        let requested = match (status.code(), status.signal()) {
            // A training run that a signal stopped, whoever sent it.
            (Some(code), _) => [SIGHUP, SIGINT, SIGTERM].contains(&(code - 128)),
            (None, signal) => signal.is_some_and(|signal| self.sent.contains(&signal)),
        };
        if status.success() {
            return;
        }
        if requested {
            let stopped = self.stopped.get_or_insert(code);
            // The program ends as its main rank does.
            if rank == 0 && status.code().is_some() {
                *stopped = code;
                // Rank 0 has saved the run; ranks that are still starting may look for it.
                if self.kill_at.is_none() {
                    (self.term_at, self.kill_at) = (Some(Instant::now() + NOTICE), Some(Instant::now() + KILL));
                }
            }
            return;
        }
        let now = Instant::now();
        if self.failures.is_empty() && self.kill_at.is_none() {
            (self.term_at, self.kill_at) = (Some(now + NOTICE), Some(now + KILL));
            self.main = self.main_rank().map(|pid| Progress::start(pid, self.on_cpu));
        }
        self.failures.push((now, rank, status));
    }

    /// Sends the signals that are due.
    fn escalate(&mut self) {
        let now = Instant::now();
        if self.term_at.is_some_and(|at| at <= now) {
            self.term_at = None;
            self.send(Signal::TERM);
        }
        if self.kill_at.is_some_and(|at| at <= now) {
            let main = self.main_rank();
            // A second request to stop is not delayed.
            let after_failure = main.zip(self.main.as_mut()).filter(|_| self.stops < 2);
            let works = after_failure.map(|(pid, progress)| progress.continues(pid, IDLE, LONGEST));
            self.main_hung = works == Some(false);
            let spared = if works == Some(true) { self.running.remove(&0) } else { None };
            self.kill_at = spared.map(|_| now + LOOK);
            self.send(Signal::KILL);
            self.running.extend(spared.map(|pid| (0, pid)));
        }
    }

    /// Returns rank 0, if it runs on this machine.
    fn main_rank(&self) -> Option<Pid> {
        self.running.get(&0).copied().filter(|_| self.first_rank == 0)
    }

    /// Passes a signal on to all ranks: the first ends a training run after its update, a second one at once.
    fn request_stop(&mut self, signal: i32) {
        // The ranks may have got it themselves.
        let Some(number) = self.requests.count(Instant::now()) else { return };
        if let Some(known) = Signal::from_named_raw(signal) {
            self.send(known);
        }
        self.stops = number;
        if number > 1 {
            self.stopped.get_or_insert((128 + signal) as u8);
            self.kill_at = Some(Instant::now() + KILL_AFTER_SECOND_STOP);
        }
    }

    /// Suspends the ranks and the launcher, as Ctrl-Z does one process, until the launcher is continued.
    fn suspend(&mut self) {
        self.send(Signal::STOP);
        let _ = emulate_default_handler(SIGTSTP);
        self.send(Signal::CONT);
    }

    fn send(&mut self, signal: Signal) {
        self.sent.push(signal.as_raw());
        for pid in self.running.values() {
            // It may have ended a moment ago.
            let _ = kill_process_group(*pid, signal);
        }
    }

    fn end(&self) -> End {
        match self.cause() {
            Some((rank, status)) => End::Failed {
                message: if self.main_hung {
                    format!("{}; rank 0 made no progress after that, and was killed", description(rank, status))
                } else {
                    description(rank, status)
                },
                code: exit_code(status),
                stop_requested: self.stops > 0,
            },
            None => self.stopped.map_or(End::Done, End::Stopped),
        }
    }

    /// Returns the rank that caused the failure, and its status: a rank that a signal killed at about the time of the first failure, or
    /// else the rank that failed first. If the error of that rank names another failed rank as the cause, it is the named one: rank 0
    /// serves the store, so it ends after the ranks that read its error there.
    fn cause(&self) -> Option<(usize, ExitStatus)> {
        let first = self.failures.first()?.0;
        let together = self.failures.iter().take_while(|(at, ..)| *at <= first + SAME_CAUSE);
        // A rank that notices the loss of another one may abort.
        let killed = together.clone().find(|(.., status)| status.signal().is_some_and(|signal| signal != SIGABRT));
        if let Some(&(_, rank, status)) = killed {
            return Some((rank, status));
        }
        let failed = |rank: usize| self.failures.iter().find(|(_, failed_rank, _)| *failed_rank == rank);
        let (_, first, status) = *self.failures.first()?;
        let named = self.named.lock().unwrap_or_else(PoisonError::into_inner).get(&first).copied();
        let named = named.and_then(failed).map(|&(_, rank, status)| (rank, status));
        named.or(Some((first, status)))
    }
}

impl Start<'_> {
    /// Returns the words of this command line before the command of the ranks, one per line.
    fn launched_by(&self) -> OsString {
        let words: Vec<OsString> = rlhf::terminal::words().into_iter().skip(1).collect();
        let end = words.iter().skip(1).position(|word| self.arguments.first() == Some(word)).map_or(1, |at| at + 1);
        words[..end.min(words.len())].join(OsStr::new("\n"))
    }

    /// Returns the command of a rank of this machine, with the environment that torchrun gives.
    fn command(&self, local_rank: usize) -> Command {
        let rank = self.first_rank + local_rank;
        let mut command = Command::new(self.program);
        command.args(self.arguments);
        for (name, number) in [
            ("RANK", rank),
            ("WORLD_SIZE", self.size),
            ("LOCAL_RANK", local_rank),
            ("LOCAL_WORLD_SIZE", self.local_ranks),
            ("GROUP_RANK", self.first_rank / self.local_ranks),
            ("MASTER_PORT", usize::from(self.port)),
            ("TORCHELASTIC_RESTART_COUNT", self.restart),
            ("TORCHELASTIC_MAX_RESTARTS", self.max_restarts),
            (LAUNCHER, std::process::id() as usize),
        ] {
            command.env(name, number.to_string());
        }
        command.env("MASTER_ADDR", self.host).env(LAUNCHED_BY, self.launched_by());
        // Variables of a launcher that started this one.
        command.env_remove("TORCHELASTIC_USE_AGENT_STORE").env_remove("TORCHELASTIC_RUN_ID");
        // A group of its own: Ctrl-C reaches the launcher alone, which passes each signal on once.
        command.process_group(0);
        if local_rank > 0 {
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        } else if io::stdin().is_terminal() {
            // A process in the background that reads from the terminal is suspended.
            command.stdin(Stdio::null());
        }
        command
    }
}

fn wait_for(local_rank: usize, mut child: Child, events: Sender<Event>) {
    thread::spawn(move || {
        let status = child.wait().unwrap_or_else(|_| ExitStatus::from_raw(1 << 8));
        let _ = events.send(Event::Ended(local_rank, status));
    });
}

/// Copies the lines of a rank to the launcher's own stream, marked with the rank, in a new thread, which drops `written` at the end.
/// Notes the rank that an error names.
fn copy_lines(
    rank: usize,
    from: impl Read + Send + 'static,
    to: Stream,
    (written, named): (Sender<()>, Option<Named>),
) {
    thread::spawn(move || {
        // The line may hold the progress bar of rank 0.
        let clear = if Stream::Err.moves_cursor() { "\r\x1b[K" } else { "" };
        let mut lines = BufReader::new(from);
        let mut line = Vec::new();
        while lines.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
            let mut text = format!("{clear}[rank {rank}] ").into_bytes();
            text.extend_from_slice(line.strip_suffix(b"\n").unwrap_or(&line));
            if let (Some(named), Some(cause)) = (&named, rank_in_error(&line)) {
                named.lock().unwrap_or_else(PoisonError::into_inner).insert(rank, cause);
            }
            text.push(b'\n');
            // Without a reader the rank must not be blocked.
            let _ = match to {
                Stream::Out => io::stdout().lock().write_all(&text),
                Stream::Err => io::stderr().lock().write_all(&text),
            };
            line.clear();
        }
        drop(written);
    });
}

/// Returns the rank that the error in `line` begins with, as in `error: rank 0: ...`.
fn rank_in_error(line: &[u8]) -> Option<usize> {
    let rest = std::str::from_utf8(line).ok()?.strip_prefix("error: rank ")?;
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    rest[..end].parse().ok()
}

/// Returns the exit code that a shell reports for `status`.
fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    u8::try_from(code).unwrap_or(1)
}

/// Returns how a rank ended: `rank 2 was killed by signal 9 (SIGKILL)`, `rank 2 exited with code 1`.
fn description(rank: usize, status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) => {
            let name = signal_name(signal).map(|name| format!(" ({name})")).unwrap_or_default();
            let hint = if signal == SIGKILL { ", as when memory runs out" } else { "" };
            format!("rank {rank} was killed by signal {signal}{name}{hint}")
        }
        None => format!("rank {rank} exited with code {}", exit_code(status)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_0_of_all_machines_is_not_the_first_rank_of_another_one() {
        let mut ranks = Ranks::new(0, true, channel().1);
        assert_eq!(ranks.main_rank(), None);
        ranks.running.insert(0, Pid::INIT);
        assert_eq!(ranks.main_rank(), Some(Pid::INIT));
        ranks.first_rank = 2;
        assert_eq!(ranks.main_rank(), None);
    }

    #[test]
    fn the_cause_is_the_rank_that_the_first_error_names_if_it_has_failed_too() {
        assert_eq!(rank_in_error(b"error: rank 0: the reward failed\n"), Some(0));
        assert_eq!(rank_in_error(b"error: rank 12 ended without an error message (killed?)\n"), Some(12));
        assert_eq!(
            [&b"error: no such file"[..], b"rank 0: x", b"error: ranks 1, 2 of 3"].map(rank_in_error),
            [None; 3]
        );
        let mut ranks = Ranks::new(0, true, channel().1);
        let now = Instant::now();
        let exited = ExitStatus::from_raw(1 << 8);
        // Rank 0 waits until rank 1 has read its error.
        ranks.failures = vec![(now, 1, exited), (now + Duration::from_secs(2), 0, exited)];
        assert_eq!(ranks.cause().unwrap().0, 1);
        ranks.named.lock().unwrap().insert(1, 0);
        assert_eq!(ranks.cause().unwrap().0, 0);
        // A named rank that has not failed here, such as a rank of another machine, is only in the text of the error.
        ranks.named.lock().unwrap().insert(1, 3);
        assert_eq!(ranks.cause().unwrap().0, 1);
        // A rank that was killed has no words.
        ranks.failures.push((now, 2, ExitStatus::from_raw(9)));
        ranks.failures.swap(1, 2);
        assert_eq!(ranks.cause().unwrap().0, 2);
    }

    #[test]
    fn the_end_of_a_rank_is_described_in_one_line() {
        let killed = |signal| ExitStatus::from_raw(signal);
        let exited = |code| ExitStatus::from_raw(code << 8);
        assert_eq!(description(2, killed(9)), "rank 2 was killed by signal 9 (SIGKILL), as when memory runs out");
        assert_eq!(description(0, killed(11)), "rank 0 was killed by signal 11 (SIGSEGV)");
        assert_eq!(description(2, exited(1)), "rank 2 exited with code 1");
        assert_eq!([killed(9), exited(1), exited(0)].map(exit_code), [137, 1, 0]);
    }
}
