//! A reward that is an HTTP service, with the protocol of OpenRLHF's remote reward models.

use super::client::Client;
use super::retry::{Failure, Retries, check, excerpt};
use super::{RetryPolicy, Reward, RewardInput, Score, Warn};
use rlhf_base::Result;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Environment variable with the bearer token of the service.
pub(super) const TOKEN: &str = "RLHF_REWARD_TOKEN";

/// A service that scores responses.
///
/// A POST request sends `{"query": [...], "prompts": [...], "labels": [...]}`, where a query is a prompt with its response. The
/// reply is `{"rewards": [...]}`, with one number per query, a list of one number per token or null, and optionally `extra_logs`, an
/// object of numbers or lists of numbers, whose means are logged.
pub struct HttpReward {
    client: Client,
    settings: HttpSettings,
    retries: Retries,
    extra: Vec<(String, f64)>,
}

/// Settings of requests to a service.
#[derive(Clone)]
pub struct HttpSettings {
    /// Sent as `Authorization: Bearer`; never printed.
    pub token: Option<String>,
    /// Column of the dataset that is sent as `labels`; null for rows without it.
    pub label_column: String,
    /// Maximum number of responses per request.
    pub batch_size: usize,
    /// Maximum number of concurrent requests.
    pub concurrency: usize,
    /// Timeout and retries.
    pub retry: RetryPolicy,
}

impl Default for HttpSettings {
    /// No token, the column `label`, 32 responses per request, 4 concurrent requests.
    fn default() -> Self {
        Self {
            token: None,
            label_column: "label".into(),
            batch_size: 32,
            concurrency: 4,
            retry: RetryPolicy::default(),
        }
    }
}

/// Omits the token.
impl fmt::Debug for HttpSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { token, label_column, batch_size, concurrency, retry } = self;
        let token = token.as_ref().map(|_| "...");
        f.debug_struct("HttpSettings")
            .field("token", &token)
            .field("label_column", label_column)
            .field("batch_size", batch_size)
            .field("concurrency", concurrency)
            .field("retry", retry)
            .finish()
    }
}

/// The reply to one request.
struct Reply {
    scores: Vec<Score>,
    extra: Vec<(String, f64)>,
}

impl HttpReward {
    /// Creates a reward for the service at `url`, without connecting to it. Uses the certificates of `SSL_CERT_FILE` if it is
    /// set.
    ///
    /// # Errors
    /// If `url` is not an HTTP URL or contains a password; if `SSL_CERT_FILE` cannot be read.
    pub fn new(url: &str, settings: HttpSettings) -> Result<Self> {
        let client = Client::new("reward_url", url, settings.token.clone(), TOKEN, settings.retry.timeout)?;
        Ok(Self { client, settings, retries: Retries::default(), extra: Vec::new() })
    }

    /// Sends one request.
    fn send(&self, batch: &[RewardInput<'_>]) -> Result<Reply, Failure> {
        let label =
            |input: &RewardInput<'_>| input.row.get(&self.settings.label_column).cloned().unwrap_or(Value::Null);
        let body = json!({
            "query": batch.iter().map(|input| format!("{}{}", input.prompt, input.response)).collect::<Vec<_>>(),
            "prompts": batch.iter().map(|input| input.prompt).collect::<Vec<_>>(),
            "labels": batch.iter().map(label).collect::<Vec<_>>(),
        });
        let text = self.client.post(&body.to_string())?;
        self.read(&text, batch)
    }

    /// Parses the body of a reply.
    fn read(&self, text: &str, batch: &[RewardInput<'_>]) -> Result<Reply, Failure> {
        let value: Value = serde_json::from_str(text).unwrap_or(Value::Null);
        let score = |value: &Value| match value {
            Value::Array(list) => list.iter().map(Value::as_f64).collect::<Option<_>>().map(Score::Tokens),
            Value::Null => Some(Score::Absent),
            value => value.as_f64().map(Score::Response),
        };
        let Some(rewards) = value["rewards"].as_array() else {
            // The token is removed before the text is truncated: a token that is cut in two would not be recognized.
            let found = excerpt(&self.client.clean(text), 80);
            return Err(self.client.failure(format!("expected a JSON object with a list `rewards`, found {found}")));
        };
        let mut scores = Vec::with_capacity(rewards.len());
        for (row, reward) in rewards.iter().enumerate() {
            let wrong = || {
                format!(
                    "expected a number in `rewards`, or a list of them, found {}",
                    self.client.clean(&reward.to_string())
                )
            };
            scores.push(score(reward).ok_or_else(|| Failure { row: Some(row), ..self.client.failure(wrong()) })?);
        }
        check(&scores, batch).map_err(|failure| Failure {
            message: format!("{}: {}", self.client.address(), failure.message),
            ..failure
        })?;
        let mean = |value: &Value| match value {
            Value::Array(list) => {
                let numbers: Vec<f64> = list.iter().map(Value::as_f64).collect::<Option<_>>()?;
                (!numbers.is_empty()).then(|| numbers.iter().sum::<f64>() / numbers.len() as f64)
            }
            value => value.as_f64(),
        };
        let logs = value["extra_logs"].as_object();
        let extra = logs.into_iter().flatten().filter_map(|(key, value)| Some((key.clone(), mean(value)?))).collect();
        Ok(Reply { scores, extra })
    }
}

impl Reward for HttpReward {
    fn score(&mut self, batch: &[RewardInput<'_>]) -> Result<Vec<Score>> {
        let this = &*self;
        this.retries.start();
        let parts: Vec<&[RewardInput<'_>]> = batch.chunks(this.settings.batch_size.max(1)).collect();
        let next = AtomicUsize::new(0);
        let replies: Mutex<BTreeMap<usize, Result<Reply, Failure>>> = Mutex::default();
        thread::scope(|scope| {
            for _ in 0..this.settings.concurrency.max(1).min(parts.len()) {
                scope.spawn(|| {
                    while let Some((at, part)) = take(&next, &parts) {
                        let reply = this.settings.retry.run(&this.retries, || this.send(part));
                        if reply.is_err() {
                            // The batch has failed, so the remaining requests are not sent.
                            next.store(parts.len(), Ordering::Relaxed);
                        }
                        replies.lock().unwrap_or_else(PoisonError::into_inner).insert(at, reply);
                    }
                });
            }
        });
        let mut scores = Vec::with_capacity(batch.len());
        let mut logs: BTreeMap<String, (f64, f64)> = BTreeMap::new();
        for (at, reply) in replies.into_inner().unwrap_or_else(PoisonError::into_inner) {
            let Reply { scores: part_scores, extra } = reply.map_err(|failure| {
                let row = failure.row.map(|row| at * this.settings.batch_size.max(1) + row);
                Failure { row, ..failure }.error(batch)
            })?;
            for (key, value) in extra {
                let (sum, count) = logs.entry(key).or_default();
                *sum += value * part_scores.len() as f64;
                *count += part_scores.len() as f64;
            }
            scores.extend(part_scores);
        }
        self.extra = logs.into_iter().map(|(key, (sum, count))| (key, sum / count)).collect();
        self.extra.extend(self.retries.metric());
        Ok(scores)
    }

    fn extra(&self) -> Vec<(String, f64)> {
        self.extra.clone()
    }

    fn warn_by(&mut self, name: &str, warn: Warn) {
        self.retries.warn_by(format!("reward `{name}`"), warn);
    }
}

/// Returns the next part that no thread has taken.
fn take<'a, T>(next: &AtomicUsize, parts: &'a [T]) -> Option<(usize, &'a T)> {
    let at = next.fetch_add(1, Ordering::Relaxed);
    parts.get(at).map(|part| (at, part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_urls_are_refused() {
        for (url, words) in [
            ("localhost:5000", "reward_url = localhost:5000: expected an address that starts with http"),
            ("https://", "reward_url = https://: expected an address"),
            ("http://me:secret@host/", "expected an address without a password; a token goes to the environment"),
        ] {
            let Err(error) = HttpReward::new(url, HttpSettings::default()) else { panic!("{url} is accepted") };
            let error = error.to_string();
            assert!(error.contains(words) && !error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn no_part_of_the_token_is_shown_if_an_excerpt_ends_within_it() {
        let settings = HttpSettings { token: Some("sk-abcdefgh".into()), ..HttpSettings::default() };
        let reward = HttpReward::new("http://localhost/", settings).unwrap();
        for before in 60..90 {
            let failure = reward.read(&format!("{}sk-abcdefgh", "x".repeat(before)), &[]).err().unwrap();
            assert!(
                failure.message.contains("a list `rewards`") && !failure.message.contains("sk"),
                "{}",
                failure.message
            );
        }
    }

    #[test]
    fn the_token_is_not_in_the_debug_form() {
        let settings = HttpSettings { token: Some("secret".into()), ..HttpSettings::default() };
        let text = format!("{settings:?}");
        assert!(text.contains("token: Some(\"...\")") && !text.contains("secret"), "{text}");
    }
}
