//! Failures of rewards outside this program, and how often they are retried.

use super::{RewardInput, Score, Warn};
use rlhf_base::Error;
use rlhf_base::signals::{pause, stopped};
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Timeout and retries of a reward that is a program or a service.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RetryPolicy {
    /// Timeout for the next score of a program, or for a request to a service.
    pub timeout: Duration,
    /// Maximum number of attempts per batch; at least 1.
    pub attempts: u32,
    /// Wait before the first retry; it doubles with every further one.
    pub backoff: Duration,
}

impl Default for RetryPolicy {
    /// A timeout of two minutes, four attempts, a first wait of half a second.
    fn default() -> Self {
        Self { timeout: Duration::from_secs(120), attempts: 4, backoff: Duration::from_millis(500) }
    }
}

/// Name of the additional metric that counts repeated attempts.
pub(super) const RETRIES: &str = "retries";

/// Maximum wait before a retry.
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Maximum wait that a service may ask for. With the default retries it is less than the default of `dist_timeout`, for which other ranks
/// wait.
const MAX_ASKED: Duration = Duration::from_secs(300);
/// Wait before a retry above which a warning tells how long it is.
const LONG_WAIT: Duration = Duration::from_secs(5);

impl RetryPolicy {
    /// Calls `attempt` until it succeeds, its failure is permanent, the last attempt has failed, or the run is asked to stop. Each retry is
    /// noted in `retries`.
    pub(crate) fn run<T>(
        &self,
        retries: &Retries,
        mut attempt: impl FnMut() -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let mut failed = 0;
        loop {
            match attempt() {
                Ok(value) => return Ok(value),
                Err(failure) => {
                    failed += 1;
                    if !failure.retryable || failed >= self.attempts {
                        return Err(Failure { attempts: failed, ..failure });
                    }
                    let wait = self.wait(failed, failure.retry_after);
                    retries.note(&failure, wait);
                    if pause(wait) {
                        return Err(Failure { attempts: failed, stopped: true, ..failure });
                    }
                }
            }
        }
    }

    /// Returns the wait before the next attempt after `failed` ones; `asked` is the wait that the service asks for.
    fn wait(&self, failed: u32, asked: Option<Duration>) -> Duration {
        let backoff = self.backoff.saturating_mul(1 << (failed - 1).min(16)).min(MAX_BACKOFF);
        backoff.max(asked.unwrap_or_default().min(MAX_ASKED))
    }
}

/// The retries of a reward or a judge. The first retry causes a warning, and so does the first retry with a long wait.
#[derive(Default)]
pub(crate) struct Retries {
    /// The name of the reward or the judge, and the receiver of its warnings.
    warn: Option<(String, Warn)>,
    has_warned: AtomicBool,
    has_warned_of_long_wait: AtomicBool,
    /// Retries of the current batch.
    count: AtomicUsize,
}

impl Retries {
    /// Sets the receiver of the warnings about retries; `owner` names the reward or the judge.
    pub(crate) fn warn_by(&mut self, owner: String, warn: Warn) {
        self.warn = Some((owner, warn));
    }

    /// Starts the count of a batch.
    pub(super) fn start(&self) {
        self.count.store(0, Ordering::Relaxed);
    }

    /// Notes that `failure` is followed by another attempt after `wait`.
    fn note(&self, failure: &Failure, wait: Duration) {
        self.count.fetch_add(1, Ordering::Relaxed);
        let is_long = wait > LONG_WAIT;
        let first = !self.has_warned.swap(true, Ordering::Relaxed);
        let first_long = is_long && !self.has_warned_of_long_wait.swap(true, Ordering::Relaxed);
        if let Some((owner, warn)) = self.warn.as_ref().filter(|_| first || first_long) {
            let when = if is_long { format!(" in {} s", wait.as_secs()) } else { String::new() };
            warn(&format!("{owner}: {}; tried again{when} (reported once)", failure.message));
        }
    }

    /// Returns the metric of the last batch, where an attempt was repeated.
    pub(super) fn metric(&self) -> Option<(String, f64)> {
        let count = self.count.load(Ordering::Relaxed);
        (count > 0).then(|| (RETRIES.into(), count as f64))
    }
}

/// The reason why a batch has no valid scores.
#[derive(Debug)]
pub(crate) struct Failure {
    /// Row of the batch that caused it.
    pub(crate) row: Option<usize>,
    pub(crate) message: String,
    /// False if another attempt would fail too.
    pub(crate) retryable: bool,
    /// Wait that the service asks for before the next attempt.
    pub(crate) retry_after: Option<Duration>,
    /// Number of attempts so far.
    pub(crate) attempts: u32,
    /// True if there was no further attempt because the run is asked to stop.
    pub(crate) stopped: bool,
    /// True if replies before it may belong to other requests, so that the program is not started again.
    pub(crate) misplaced: bool,
}

impl Failure {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        let message = message.into();
        Self { row: None, message, retryable: true, retry_after: None, attempts: 1, stopped: false, misplaced: false }
    }

    pub(crate) fn at(row: usize, message: impl Into<String>) -> Self {
        Self { row: Some(row), ..Self::new(message) }
    }

    /// A failure that is not retried.
    pub(crate) fn permanent(message: impl Into<String>) -> Self {
        Self { retryable: false, ..Self::new(message) }
    }

    /// Returns the error for a batch.
    pub(crate) fn error(self, batch: &[RewardInput<'_>]) -> Error {
        let message = self.describe(batch);
        if self.stopped {
            let message = format!("{message}; not tried again, as the run is asked to end");
            stopped(message.clone()).unwrap_or(Error::Run(message))
        } else {
            Error::Run(message)
        }
    }

    /// Returns the message in one line, with the beginning of the row's prompt.
    pub(crate) fn describe(&self, batch: &[RewardInput<'_>]) -> String {
        let mut text = String::new();
        if let Some(row) = self.row {
            let _ = write!(text, "row {} of {}", row + 1, batch.len());
            if let Some(input) = batch.get(row) {
                let _ = write!(text, " (prompt {})", excerpt(input.prompt, 40));
            }
            text += ": ";
        }
        text += &self.message;
        if self.attempts > 1 {
            let _ = write!(text, " (tried {} times)", self.attempts);
        }
        text
    }
}

/// Returns the first `most` characters of a text, quoted, on one line.
pub(crate) fn excerpt(text: &str, most: usize) -> String {
    let start: String = text.chars().take(most).collect();
    let more = if start.len() < text.len() { "..." } else { "" };
    format!("{start:?}{more}")
}

/// Checks that there is one score per response, or one per token, and that all are finite.
pub(crate) fn check(scores: &[Score], batch: &[RewardInput<'_>]) -> Result<(), Failure> {
    if scores.len() != batch.len() {
        let (expected, found) = (batch.len(), scores.len());
        return Err(Failure::new(format!("expected {expected} scores, one per response, found {found}")));
    }
    for (row, (score, input)) in scores.iter().zip(batch).enumerate() {
        let tokens = input.response_ids.len();
        if let Score::Tokens(numbers) = score
            && numbers.len() != tokens
        {
            let found = numbers.len();
            return Err(Failure::at(row, format!("expected {tokens} scores, one per token, found {found}")));
        }
        if let Some(number) = score.numbers().iter().find(|number| !number.is_finite()) {
            return Err(Failure::at(row, format!("expected a finite score, found {number}")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[test]
    fn the_first_retry_of_a_reward_is_a_warning_as_is_the_first_with_a_long_wait() {
        let warnings: Arc<Mutex<Vec<String>>> = Arc::default();
        let mut retries = Retries::default();
        let seen = warnings.clone();
        retries
            .warn_by("reward `judge`".into(), Arc::new(move |message| seen.lock().unwrap().push(message.to_string())));
        for seconds in [1, 2, 30, 60] {
            retries.note(&Failure::new("HTTP status 503"), Duration::from_secs(seconds));
        }
        let told = |when: &str| format!("reward `judge`: HTTP status 503; tried again{when} (reported once)");
        assert_eq!(*warnings.lock().unwrap(), [told(""), told(" in 30 s")]);
        assert_eq!(retries.metric(), Some(("retries".to_string(), 4.0)));
        retries.start();
        assert_eq!(retries.metric(), None);
    }

    #[test]
    fn waits_double_up_to_a_minute_and_are_as_long_as_a_service_asks_up_to_five() {
        let policy = RetryPolicy { backoff: Duration::from_secs(1), ..RetryPolicy::default() };
        let wait = |failed, asked: u64| policy.wait(failed, Some(Duration::from_secs(asked))).as_secs();
        assert_eq!([1, 2, 4, 30].map(|failed| wait(failed, 0)), [1, 2, 8, 60]);
        assert_eq!([3, 90, 5000].map(|asked| wait(3, asked)), [4, 90, 300]);
    }
}
