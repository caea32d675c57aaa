//! Failures of ranks: who caused one, and who is reported to have.
//!
//! A rank that ends with an error leaves its message in the store before it closes its connections. A rank whose collective
//! fails looks there first. Without a message it answers a roll call: the ranks that do not answer were killed, or hang.

use super::{Ranks, lock};
use crate::{Error, Result};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tch_ext::{Rendezvous, Store};

/// Longest wait for the other ranks' messages after a failure.
const ROLL_CALL: Duration = Duration::from_secs(3);

/// Time between two looks at the store.
const POLL: Duration = Duration::from_millis(20);

/// Key of the first error of any rank.
const FIRST_ERROR: &str = "first_error";

/// The failure that broke a world.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    /// The message, with the rank that caused it.
    pub(super) text: String,
}

/// Returns the error of a store that cannot be opened.
pub(super) fn no_store(at: &Rendezvous, message: &str) -> Error {
    let first = message.lines().next().unwrap_or_default();
    let place = format!("{}:{}", at.host, at.port);
    Error::Run(if at.serves {
        format!("rank 0: cannot serve the store of the ranks at {place}: {first}; MASTER_PORT must be a free port")
    } else {
        let seconds = at.patience.as_secs();
        format!("rank {}: found no rank 0 at MASTER_ADDR:MASTER_PORT = {place} within {seconds} s: {first}", at.rank)
    })
}

/// Announces this rank, and waits for all others.
///
/// # Errors
/// If a rank does not come in time, with the names of those that are missing.
pub(super) fn roll_call(store: &Store, at: &Rendezvous) -> Result<()> {
    let lost = |e: String| Error::Run(format!("rank {}: the store of the ranks is gone: {e}", at.rank));
    store.set(&present(at.rank), "1").map_err(lost)?;
    let until = Instant::now() + at.patience;
    let mut missing: Vec<usize> = (0..at.size).collect();
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
        if Instant::now() > until {
            let seconds = at.patience.as_secs();
            let message = format!("{} of {} did not start within {seconds} s", names(&missing), at.size);
            return Err(Error::Run(message));
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
    pub(super) fn explain(&self, message: &str) -> Failure {
        let first_line = message.lines().next().unwrap_or_default();
        let timed_out = first_line.contains("imed out") || first_line.contains("imeout");
        let text = match self.cause() {
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

    /// Answers the roll call after a failure, and looks for a reported error until all others have answered.
    fn cause(&self) -> Result<Cause, String> {
        let group = self.group();
        let store = group.store();
        store.set(&answered(self.rank), "1")?;
        let until = Instant::now() + ROLL_CALL;
        loop {
            if store.has(FIRST_ERROR)? {
                return Ok(Cause::Reported(store.get(FIRST_ERROR, ROLL_CALL)?));
            }
            let mut missing = Vec::new();
            for rank in 0..self.size {
                if !store.has(&answered(rank))? {
                    missing.push(rank);
                }
            }
            if missing.is_empty() {
                return Ok(Cause::None);
            }
            if Instant::now() > until {
                return Ok(Cause::Missing(missing));
            }
            std::thread::sleep(POLL);
        }
    }

    /// Leaves `error` in the store as this rank's, closes the connections, and, where this process serves the store, waits until
    /// the other ranks have read it.
    pub(super) fn leave(&self, error: &str) {
        let broken = lock(&self.failure).is_some();
        let mut group = self.group();
        if !broken {
            let text =
                if error.starts_with("rank ") { error.to_string() } else { format!("rank {}: {error}", self.rank) };
            let _ = group.store().set_first(FIRST_ERROR, &text);
        }
        let _ = group.store().set(&answered(self.rank), "1");
        if !broken {
            group.disconnect();
        }
        let until = Instant::now() + ROLL_CALL;
        while self.rank == 0 && self.rank_0_serves && Instant::now() < until {
            if (0..self.size).all(|rank| group.store().has(&answered(rank)).unwrap_or(true)) {
                // The last to answer has still to read the error.
                std::thread::sleep(4 * POLL);
                break;
            }
            std::thread::sleep(POLL);
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
        let of: usize = parts.next()?.parse().ok()?;
        let count: usize = parts.next()?.parse().ok()?;
        let signal = parts.next().unwrap_or("KILL").to_string();
        // A run that was started again has no fault.
        let restarted = std::env::var("TORCHELASTIC_RESTART_COUNT").is_ok_and(|count| count != "0");
        (of == rank && !restarted).then(|| Self { left: AtomicUsize::new(count), signal })
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
