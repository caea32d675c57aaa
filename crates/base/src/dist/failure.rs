//! Failures of ranks: who caused one, and who is reported to have.
//!
//! A rank that ends with an error leaves its message in the store before it closes its connections. A rank whose collective
//! fails looks there first. Without a message it answers a roll call: the ranks that do not answer were killed, or hang.

use super::{Ranks, lock};
use crate::error::STOPPED_BY_ALARM;
use crate::{Error, Refusal, Result, signals};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use tch_ext::{Rendezvous, Store};

/// Longest wait for the other ranks' messages after a failure.
const ROLL_CALL: Duration = Duration::from_secs(3);

/// Longest wait of the rank that serves the store for ranks that run on this machine and have not read the first error.
const LAST_READER: Duration = Duration::from_secs(10);

/// Time between two looks at the store.
const POLL: Duration = Duration::from_millis(20);

/// Longest attempt to find the store: requests to stop are looked at in between.
const ATTEMPT: Duration = Duration::from_secs(3);

/// Longest attempt to find the store for a rank that was asked to stop.
const LAST_ATTEMPT: Duration = Duration::from_secs(1);

/// Key of a roll call at the start that not all ranks have answered in time.
const ROLL_CALL_ENDED: &str = "roll_call_ended";

/// Key of the exit code of a rank that was asked to stop during the roll call.
const ROLL_CALL_STOPPED: &str = "roll_call_stopped";

/// Key of the first error of any rank.
const FIRST_ERROR: &str = "first_error";

/// An error that the ranks have agreed on.
#[derive(Debug)]
pub(super) struct Agreed {
    /// The message, on this rank.
    pub(super) text: String,
    /// Whether all ranks had the same error by themselves.
    pub(super) alike: bool,
}

impl Agreed {
    /// Whether `error` is this one, with or without more words about it.
    pub(super) fn is_in(&self, error: &Error) -> bool {
        // A long message is cut where more words are added.
        let start = self.text.char_indices().nth(300).map_or(self.text.len(), |(index, _)| index);
        error.to_string().contains(&self.text[..start])
    }
}

/// The error of rank `rank`, with its name. Stops and usage errors keep their kind, as they decide about the exit code.
pub(super) fn named(rank: usize, error: Error) -> Error {
    let text = |error: String| if error.starts_with("rank ") { error } else { format!("rank {rank}: {error}") };
    match error {
        Error::Stopped { .. } | Error::NotPushed(_) => error,
        // The reader of the output has closed it.
        Error::Io { ref source, .. } if source.kind() == std::io::ErrorKind::BrokenPipe => error,
        error => error.map_usage(text).unwrap_or_else(|other| Error::Run(text(other.to_string()))),
    }
}

/// Returns an error for the other ranks: its exit code and its message.
pub(super) fn to_bytes(error: &Error) -> Vec<u8> {
    [&[error.exit_code()], error.to_string().as_bytes()].concat()
}

/// Restores the error of another rank.
pub(super) fn from_bytes(bytes: &[u8]) -> Error {
    let (code, message) = bytes
        .split_first()
        .map_or((1, String::new()), |(code, message)| (*code, String::from_utf8_lossy(message).into_owned()));
    match code {
        2 => Error::Refused(message.lines().map(Refusal::general).collect()),
        STOPPED_BY_ALARM | 129.. => Error::Stopped { message, code },
        _ => Error::Run(message),
    }
}

/// The failure that broke a world.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    /// The message, with the rank that caused it.
    pub(super) text: String,
}

/// Returns the error of a store that cannot be opened.
pub(super) fn no_store(rendezvous: &Rendezvous, message: &str) -> Error {
    let first = message.lines().next().unwrap_or_default();
    let place = format!("{}:{}", rendezvous.host, rendezvous.port);
    Error::Run(if rendezvous.serves {
        format!("rank 0: cannot serve the store of the ranks at {place}: {first}; MASTER_PORT must be a free port")
    } else {
        let seconds = rendezvous.patience.as_secs();
        // The time limit of the last attempt would be another number of seconds.
        let cause = if first.contains("timed out") { String::new() } else { format!(": {first}") };
        format!(
            "rank {}: found no rank 0 at MASTER_ADDR:MASTER_PORT = {place} within {seconds} s{cause}",
            rendezvous.rank
        )
    })
}

/// Opens the store. A rank that is asked to stop looks for it once more, to tell the others.
fn open(rendezvous: &Rendezvous, until: Instant) -> Result<Store> {
    loop {
        let stops = signals::stopped(format!("rank {}: stopped while it looked for rank 0", rendezvous.rank));
        let left = until.saturating_duration_since(Instant::now());
        let attempt = if stops.is_some() { LAST_ATTEMPT } else { ATTEMPT };
        let patience = if rendezvous.serves { left } else { left.min(attempt) };
        match (Store::open(&Rendezvous { patience, ..rendezvous.clone() }), stops) {
            (Ok(store), _) => return Ok(store),
            (Err(_), Some(stopped)) => return Err(stopped),
            (Err(e), _) if rendezvous.serves || Instant::now() >= until => return Err(no_store(rendezvous, &e)),
            (Err(_), None) => {}
        }
    }
}

/// Opens the store, announces this rank, and waits for all others.
///
/// A rank that was started again may find the store of ranks that are about to end, on the machine of rank 0: when that store is gone, it
/// looks for the next one.
///
/// # Errors
/// If there is no store, or a rank does not come in time: the names of those that are missing.
pub(super) fn meet(rendezvous: &Rendezvous) -> Result<Store> {
    let until = Instant::now() + rendezvous.patience;
    loop {
        let store = open(rendezvous, until)?;
        match roll_call(&store, rendezvous, until) {
            Ok(()) => return Ok(store),
            Err(Absent::Ranks(message)) => return Err(Error::Run(message)),
            Err(Absent::Stopped(stopped)) => return Err(stopped),
            Err(Absent::Store(_)) if !rendezvous.serves && Instant::now() < until => std::thread::sleep(POLL),
            Err(Absent::Store(e)) => {
                return Err(Error::Run(format!("rank {}: the store of the ranks is gone: {e}", rendezvous.rank)));
            }
        }
    }
}

/// The reason for which a roll call at the start has failed.
enum Absent {
    /// The store has ended, with this error.
    Store(String),
    /// Ranks did not come in time; the message names them.
    Ranks(String),
    /// This rank was asked to stop, as by a launcher one of whose ranks has ended at the start.
    Stopped(Error),
}

/// Announces this rank, and waits for all others.
fn roll_call(store: &Store, rendezvous: &Rendezvous, until: Instant) -> std::result::Result<(), Absent> {
    let lost = Absent::Store;
    store.set(&present(rendezvous.rank), &identity()).map_err(lost)?;
    let mut missing: Vec<usize> = (0..rendezvous.size).collect();
    loop {
        let mut left = Vec::new();
        for &rank in &missing {
            if !store.has(&present(rank)).map_err(lost)? {
                left.push(rank);
            }
        }
        missing = left;
        if missing.is_empty() {
            return Ok(());
        }
        let waited = || format!("stopped while {} of {} had not started", names(&missing), rendezvous.size);
        if let Some(stopped) = signals::stopped(waited()) {
            store.set(ROLL_CALL_STOPPED, &stopped.exit_code().to_string()).map_err(lost)?;
            if rendezvous.serves {
                std::thread::sleep(25 * POLL);
            }
            return Err(Absent::Stopped(stopped));
        }
        if store.has(ROLL_CALL_STOPPED).map_err(lost)? {
            let code = store.get(ROLL_CALL_STOPPED, ROLL_CALL).map_err(lost)?;
            let message = "stopped with another rank before all ranks had started".into();
            return Err(Absent::Stopped(Error::Stopped { message, code: code.parse().unwrap_or(1) }));
        }
        // The first rank whose time is over ends the roll call for all.
        let ended = store.has(ROLL_CALL_ENDED).map_err(lost)?;
        if ended || Instant::now() > until {
            let seconds = rendezvous.patience.as_secs();
            let message = format!("{} of {} did not start within {seconds} s", names(&missing), rendezvous.size);
            store.set(ROLL_CALL_ENDED, "1").map_err(lost)?;
            if rendezvous.serves {
                std::thread::sleep(25 * POLL);
            }
            return Err(Absent::Ranks(message));
        }
        std::thread::sleep(POLL);
    }
}

fn present(rank: usize) -> String {
    format!("present/{rank}")
}

fn answered(rank: usize) -> String {
    format!("answered/{rank}")
}

/// "rank 2" or "ranks 1, 3".
fn names(ranks: &[usize]) -> String {
    let list: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, list.join(", "))
}

impl Ranks {
    /// Finds the cause of a collective's error `message`.
    pub(super) fn explain(self: &Arc<Self>, message: &str) -> Failure {
        let first_line = message.lines().next().unwrap_or_default();
        let timed_out = first_line.contains("imed out") || first_line.contains("imeout");
        // Requests to the store have no time limit: the rank that serves it may hang.
        let (sender, receiver) = mpsc::channel();
        let ranks = self.clone();
        std::thread::spawn(move || drop(sender.send(ranks.cause())));
        let Ok(cause) = receiver.recv_timeout(2 * ROLL_CALL) else {
            self.store_hangs.store(true, Ordering::SeqCst);
            let seconds = self.timeout.as_secs();
            let server = if self.rank_0_serves { "rank 0" } else { "the launcher's store" };
            return Failure { text: format!("{server} did not respond within dist_timeout = {seconds} s") };
        };
        let text = match cause {
            Ok(Cause::Reported(text)) => text,
            Ok(Cause::Missing(ranks)) if timed_out => {
                let seconds = self.timeout.as_secs();
                format!("{} did not respond within dist_timeout = {seconds} s", names(&ranks))
            }
            Ok(Cause::Missing(ranks)) => format!("{} ended without an error message (killed?)", names(&ranks)),
            Ok(Cause::None) if timed_out => {
                let seconds = self.timeout.as_secs();
                format!("rank {}: the ranks did not meet within dist_timeout = {seconds} s: {first_line}", self.rank)
            }
            Ok(Cause::None) => format!("rank {}: a collective failed: {first_line}", self.rank),
            Err(_) if self.rank_0_serves => "rank 0 ended without an error message (killed?)".into(),
            Err(_) => format!("rank {}: the launcher has ended, or another rank: {first_line}", self.rank),
        };
        Failure { text }
    }

    /// Answers the roll call after a failure, and looks for a reported error until all others have answered or are known to have
    /// ended.
    fn cause(&self) -> Result<Cause, String> {
        let group = self.group();
        let store = group.store();
        store.set(&answered(self.rank), "1")?;
        let until = Instant::now() + ROLL_CALL;
        let mut gone_since = None;
        loop {
            if store.has(FIRST_ERROR)? {
                return Ok(Cause::Reported(store.get(FIRST_ERROR, ROLL_CALL)?));
            }
            let missing = self.unanswered(store)?;
            if missing.is_empty() {
                return Ok(Cause::None);
            }
            let now = Instant::now();
            let gone: Vec<usize> =
                missing.iter().copied().filter(|&rank| State::of(store, rank) == State::Gone).collect();
            // A rank that has ended may have left its error just before.
            if !gone.is_empty() && now > *gone_since.get_or_insert(now) + 5 * POLL {
                return Ok(Cause::Missing(gone));
            }
            if now > until {
                return Ok(Cause::Missing(missing));
            }
            std::thread::sleep(POLL);
        }
    }

    /// Returns the ranks that have not answered the roll call.
    fn unanswered(&self, store: &Store) -> Result<Vec<usize>, String> {
        let mut missing = Vec::new();
        for rank in 0..self.size {
            if !store.has(&answered(rank))? {
                missing.push(rank);
            }
        }
        Ok(missing)
    }

    /// Reports `error` as [`Ranks::report_failure`] does, and, where this process serves the store, waits until the other ranks have
    /// read it.
    pub(super) fn leave(&self, error: &str) {
        self.report_failure(error);
        if self.rank == 0 && self.rank_0_serves && !self.store_hangs.load(Ordering::SeqCst) {
            self.readers.call_once(|| self.wait_for_readers(self.group().store()));
        }
    }

    /// Leaves `error` in the store as this rank's, if it is the first, and closes the connections.
    pub(super) fn report_failure(&self, error: &str) {
        let text = if error.starts_with("rank ") { error.to_string() } else { format!("rank {}: {error}", self.rank) };
        // No collective can succeed after this.
        let broken = lock(&self.failure).replace(Failure { text: text.clone() }).is_some();
        if self.store_hangs.load(Ordering::SeqCst) {
            return;
        }
        let mut group = self.group();
        if !broken {
            let _ = group.store().set_first(FIRST_ERROR, &text);
        }
        let _ = group.store().set(&answered(self.rank), "1");
        if !broken {
            group.disconnect();
        }
    }

    /// Waits until the ranks that can still do so have read the first error. A rank that computes reads it at its next collective.
    fn wait_for_readers(&self, store: &Store) {
        let start = Instant::now();
        while let Ok(missing) = self.unanswered(store) {
            let waits = |&rank: &usize| match State::of(store, rank) {
                State::Gone => false,
                State::Running => start.elapsed() < LAST_READER,
                State::Unknown => start.elapsed() < ROLL_CALL,
            };
            if !missing.iter().any(waits) {
                break;
            }
            std::thread::sleep(POLL);
        }
        // The last to answer has still to read the error.
        std::thread::sleep(4 * POLL);
    }
}

/// Name of this machine: the boot, and the namespace of process ids.
fn machine() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{}/{}", boot.trim(), namespace.display())
}

/// The process and the machine of this rank, for the other ranks.
fn identity() -> String {
    format!("{} {}", std::process::id(), machine())
}

/// State of another rank's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// It has ended.
    Gone,
    /// It is on this machine, and computes or waits.
    Running,
    /// It is stopped, or on another machine.
    Unknown,
}

impl State {
    fn of(store: &Store, rank: usize) -> Self {
        let identity = store.get(&present(rank), ROLL_CALL).unwrap_or_default();
        match identity.split_once(' ') {
            Some((pid, host)) if host == machine() => Self::of_process(pid),
            _ => Self::Unknown,
        }
    }

    /// The state of the process `pid` of this machine.
    fn of_process(pid: &str) -> Self {
        if !Path::new("/proc/self/stat").exists() {
            return Self::Unknown;
        }
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return Self::Gone };
        // The state comes after the name of the program, which is in parentheses.
        match stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()) {
            Some('Z' | 'X') => Self::Gone,
            Some('T') | None => Self::Unknown,
            Some(_) => Self::Running,
        }
    }
}

/// The cause of a failed collective, as far as the store knows it.
enum Cause {
    /// The first error that a rank reported.
    Reported(String),
    /// Ranks that reported nothing and did not answer.
    Missing(Vec<usize>),
    /// All ranks answered, and none reported an error.
    None,
}

/// A rank that kills or stops itself at a collective, for tests: `RLHF_FAULT=RANK:COUNT:SIGNAL`.
#[derive(Debug)]
pub(super) struct Fault {
    left: AtomicUsize,
    signal: String,
}

impl Fault {
    /// Reads the fault of `rank` from the environment, if it has one.
    pub(super) fn of_rank(rank: usize) -> Option<Self> {
        let text = std::env::var("RLHF_FAULT").ok()?;
        let mut parts = text.split(':');
        let faulty_rank: usize = parts.next()?.parse().ok()?;
        let count: usize = parts.next()?.parse().ok()?;
        let signal = parts.next().unwrap_or("KILL").to_string();
        // A run that was started again has no fault.
        let restarted = std::env::var("TORCHELASTIC_RESTART_COUNT").is_ok_and(|count| count != "0");
        (faulty_rank == rank && !restarted).then(|| Self { left: AtomicUsize::new(count), signal })
    }

    /// Counts a collective, and sends the signal before the one that the fault is for.
    pub(super) fn count(&self) {
        if self.left.fetch_sub(1, Ordering::SeqCst) == 1 {
            let pid = std::process::id().to_string();
            let _ = std::process::Command::new("kill").args(["-s", &self.signal, &pid]).status();
            // The signal arrives while this thread waits.
            std::thread::sleep(Duration::from_secs(3600));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_has_ended_is_known_before_it_is_waited_for() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id().to_string();
        assert_eq!(State::of_process(&pid), State::Running);
        child.kill().unwrap();
        let until = Instant::now() + Duration::from_secs(20);
        while State::of_process(&pid) != State::Gone && Instant::now() < until {
            std::thread::sleep(POLL);
        }
        assert_eq!(State::of_process(&pid), State::Gone);
        child.wait().unwrap();
        assert_eq!(State::of_process(&pid), State::Gone);
    }

    #[test]
    fn an_error_keeps_its_exit_code_on_the_other_ranks() {
        for error in [
            Error::Usage("a = 1: expected 2".into()),
            Error::Run("no".into()),
            Error::Stopped { message: "stopped".into(), code: 143 },
            Error::Stopped { message: "stopped".into(), code: STOPPED_BY_ALARM },
        ] {
            let (code, text) = (error.exit_code(), error.to_string());
            let found = from_bytes(&to_bytes(&error));
            assert_eq!((found.exit_code(), found.to_string()), (code, text));
        }
        let named = |error: Error| named(3, error).to_string();
        assert_eq!(named(Error::invalid("model", "no")), "rank 3: model: no");
        assert_eq!(named(Error::Run("rank 1: no".into())), "rank 1: no");
    }
}
