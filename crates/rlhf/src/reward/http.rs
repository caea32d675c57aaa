//! A reward that is a service: batches over HTTP, in the shape that OpenRLHF's remote reward models have.

use super::{Patience, Problem, Reward, RewardInput, Score, check, excerpt};
use crate::hub::{certificates, origin};
use crate::{Error, Result};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;
use ureq::Agent;
use ureq::http::{StatusCode, header};
use ureq::tls::{RootCerts, TlsConfig};

/// The environment variable that holds the token of the service.
pub(super) const TOKEN: &str = "RLHF_REWARD_TOKEN";

/// What stands in files in place of what comes behind the address of a service: it may be secret.
pub(crate) const LEFT_OUT: &str = "?...";

/// The longest answer that is read, in bytes.
const LONGEST_ANSWER: u64 = 256 << 20;

/// A service that scores responses.
///
/// It gets `{"query": [...], "prompts": [...], "labels": [...]}` by POST, where a query is a prompt with its response, and
/// answers `{"rewards": [...]}`, a number per query or a list with one per token, with `extra_logs` if it likes: an object of
/// numbers, or lists of them, whose means are logged.
pub struct HttpReward {
    url: String,
    settings: HttpSettings,
    agent: Agent,
    extra: Vec<(String, f64)>,
}

/// How a service is asked.
#[derive(Clone)]
pub struct HttpSettings {
    /// Sent as `Authorization: Bearer`; never printed.
    pub token: Option<String>,
    /// The column of the dataset that is sent as `labels`; null for rows without it.
    pub label_column: String,
    /// The most responses in a request.
    pub batch_size: usize,
    /// The most requests at a time.
    pub concurrency: usize,
    /// How long an answer is waited for, and how often it is asked for.
    pub patience: Patience,
}

impl Default for HttpSettings {
    /// No token, the column `label`, 32 responses in a request, 4 requests at a time.
    fn default() -> Self {
        Self {
            token: None,
            label_column: "label".into(),
            batch_size: 32,
            concurrency: 4,
            patience: Patience::default(),
        }
    }
}

/// Without the token.
impl fmt::Debug for HttpSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { token, label_column, batch_size, concurrency, patience } = self;
        let token = token.as_ref().map(|_| "...");
        f.debug_struct("HttpSettings")
            .field("token", &token)
            .field("label_column", label_column)
            .field("batch_size", batch_size)
            .field("concurrency", concurrency)
            .field("patience", patience)
            .finish()
    }
}

/// What a service said of one request.
struct Answer {
    scores: Vec<Score>,
    extra: Vec<(String, f64)>,
}

impl HttpReward {
    /// The service at `url`. Certificates are those of `SSL_CERT_FILE`, where it is set; nothing is asked yet.
    ///
    /// # Errors
    /// If `url` is no address of HTTP or holds a password; if `SSL_CERT_FILE` cannot be read.
    pub fn new(url: &str, settings: HttpSettings) -> Result<Self> {
        let wrong = |what: &str| Error::Usage(format!("reward_url = {}: expected {what}", address(url)));
        if !["http://", "https://"].iter().any(|scheme| url.len() > scheme.len() && url.starts_with(scheme)) {
            return Err(wrong("an address that begins with http:// or https://"));
        }
        if url.ends_with(LEFT_OUT) {
            return Err(wrong("the part behind the ?, which is not written to files: give the whole address"));
        }
        if origin(url).contains('@') {
            // It would stand in the card of proxies and in logs.
            return Err(wrong(&format!(
                "an address without a password; a token goes to the environment variable {TOKEN}"
            )));
        }
        let roots = match std::env::var_os("SSL_CERT_FILE").filter(|file| !file.is_empty()) {
            Some(file) if url.starts_with("https://") => certificates(Path::new(&file))?,
            _ => RootCerts::WebPki,
        };
        let agent = Agent::config_builder()
            .tls_config(TlsConfig::builder().root_certs(roots).build())
            .http_status_as_error(false)
            // The token belongs to this address, and to none that it leads to.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("rlhf/", env!("CARGO_PKG_VERSION")))
            .timeout_global(Some(settings.patience.timeout))
            .build();
        Ok(Self { url: url.to_string(), settings, agent: agent.into(), extra: Vec::new() })
    }

    /// One request.
    fn ask(&self, batch: &[RewardInput<'_>]) -> Result<Answer, Problem> {
        let label =
            |input: &RewardInput<'_>| input.row.get(&self.settings.label_column).cloned().unwrap_or(Value::Null);
        let body = json!({
            "query": batch.iter().map(|input| format!("{}{}", input.prompt, input.response)).collect::<Vec<_>>(),
            "prompts": batch.iter().map(|input| input.prompt).collect::<Vec<_>>(),
            "labels": batch.iter().map(label).collect::<Vec<_>>(),
        });
        let mut request = self.agent.post(&self.url).header(header::CONTENT_TYPE, "application/json");
        if let Some(token) = &self.settings.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        let mut response = request.send(body.to_string()).map_err(|e| self.failure(&e))?;
        let status = response.status();
        if !status.is_success() {
            let wait = response.headers().get(header::RETRY_AFTER).and_then(|wait| wait.to_str().ok()?.parse().ok());
            return Err(self.refusal(status, wait.map(Duration::from_secs)));
        }
        let text = response.body_mut().with_config().limit(LONGEST_ANSWER).read_to_string();
        self.read(&text.map_err(|e| self.failure(&e))?, batch)
    }

    /// The answer in a body.
    fn read(&self, text: &str, batch: &[RewardInput<'_>]) -> Result<Answer, Problem> {
        let value: Value = serde_json::from_str(text).unwrap_or(Value::Null);
        let score = |value: &Value| match value {
            Value::Array(list) => list.iter().map(Value::as_f64).collect::<Option<_>>().map(Score::Tokens),
            value => value.as_f64().map(Score::Response),
        };
        let Some(rewards) = value["rewards"].as_array() else {
            // The token goes first: of one that is cut in two the rest would not be found.
            let found = excerpt(&self.clean(text), 80);
            return Err(self.problem(format!("expected a JSON object with a list `rewards`, found {found}")));
        };
        let mut scores = Vec::with_capacity(rewards.len());
        for (row, reward) in rewards.iter().enumerate() {
            let wrong = || {
                format!("expected a number in `rewards`, or a list of them, found {}", self.clean(&reward.to_string()))
            };
            scores.push(score(reward).ok_or_else(|| Problem { row: Some(row), ..self.problem(wrong()) })?);
        }
        check(&scores, batch)
            .map_err(|problem| Problem { what: format!("{}: {}", self.address(), problem.what), ..problem })?;
        let mean = |value: &Value| match value {
            Value::Array(list) => {
                let numbers: Vec<f64> = list.iter().map(Value::as_f64).collect::<Option<_>>()?;
                (!numbers.is_empty()).then(|| numbers.iter().sum::<f64>() / numbers.len() as f64)
            }
            value => value.as_f64(),
        };
        let logs = value["extra_logs"].as_object();
        let extra = logs.into_iter().flatten().filter_map(|(key, value)| Some((key.clone(), mean(value)?))).collect();
        Ok(Answer { scores, extra })
    }

    fn address(&self) -> &str {
        address(&self.url)
    }

    fn problem(&self, what: impl fmt::Display) -> Problem {
        Problem::new(format!("{}: {what}", self.address()))
    }

    /// What a request without an answer means.
    fn failure(&self, error: &ureq::Error) -> Problem {
        match error {
            ureq::Error::BadUri(_) | ureq::Error::Http(_) => {
                Problem::lasting(format!("{}: not a request that can be sent (the address, {TOKEN})", self.address()))
            }
            ureq::Error::Timeout(_) => {
                self.problem(format!("no answer within {} s", self.settings.patience.timeout.as_secs_f64()))
            }
            error => self.problem(self.clean(&error.to_string())),
        }
    }

    /// What a status other than success means.
    fn refusal(&self, status: StatusCode, wait: Option<Duration>) -> Problem {
        let found = format!("{}: HTTP status {status}", self.address());
        match status.as_u16() {
            408 | 429 | 500.. => Problem { wait, ..Problem::new(found) },
            401 | 403 if self.settings.token.is_none() => {
                Problem::lasting(format!("{found}; a token goes to the environment variable {TOKEN}"))
            }
            401 | 403 => Problem::lasting(format!("{found}; the token of {TOKEN} is not accepted")),
            300..=399 => Problem::lasting(format!("{found}: it leads to another address, which is not followed")),
            _ => Problem::lasting(found),
        }
    }

    /// A text of the service's without the token, should it repeat it.
    fn clean(&self, text: &str) -> String {
        self.settings.token.as_ref().map_or(text.to_string(), |token| text.replace(token.as_str(), "..."))
    }
}

impl Reward for HttpReward {
    fn score(&mut self, batch: &[RewardInput<'_>]) -> Result<Vec<Score>> {
        let this = &*self;
        let parts: Vec<&[RewardInput<'_>]> = batch.chunks(this.settings.batch_size.max(1)).collect();
        let next = AtomicUsize::new(0);
        let answers: Mutex<BTreeMap<usize, Result<Answer, Problem>>> = Mutex::default();
        thread::scope(|scope| {
            for _ in 0..this.settings.concurrency.max(1).min(parts.len()) {
                scope.spawn(|| {
                    while let Some((at, part)) = take(&next, &parts) {
                        let answer = this.settings.patience.repeat(|| this.ask(part));
                        if answer.is_err() {
                            // The batch has failed: what is not asked yet need not be.
                            next.store(parts.len(), Ordering::Relaxed);
                        }
                        answers.lock().unwrap_or_else(PoisonError::into_inner).insert(at, answer);
                    }
                });
            }
        });
        let mut scores = Vec::with_capacity(batch.len());
        let mut logs: BTreeMap<String, (f64, f64)> = BTreeMap::new();
        for (at, answer) in answers.into_inner().unwrap_or_else(PoisonError::into_inner) {
            let Answer { scores: found, extra } = answer.map_err(|problem| {
                let row = problem.row.map(|row| at * this.settings.batch_size.max(1) + row);
                Problem { row, ..problem }.error(batch)
            })?;
            for (key, value) in extra {
                let (sum, count) = logs.entry(key).or_default();
                *sum += value * found.len() as f64;
                *count += found.len() as f64;
            }
            scores.extend(found);
        }
        self.extra = logs.into_iter().map(|(key, (sum, count))| (key, sum / count)).collect();
        Ok(scores)
    }

    fn extra(&self) -> Vec<(String, f64)> {
        self.extra.clone()
    }
}

/// The next part that nobody has taken.
fn take<'a, T>(next: &AtomicUsize, parts: &'a [T]) -> Option<(usize, &'a T)> {
    let at = next.fetch_add(1, Ordering::Relaxed);
    parts.get(at).map(|part| (at, part))
}

/// An address for people and files: without what may be secret in it.
pub(crate) fn address(url: &str) -> &str {
    let start = url.find("://").map_or(0, |at| at + 3);
    let end = url.find(['?', '#']).unwrap_or(url.len());
    let host = origin(url).rfind('@').map_or(start, |at| at + 1);
    if host > start { &url[host..end] } else { &url[..end] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_shown_without_password_and_query() {
        for (url, shown) in [
            ("http://localhost:5000/score", "http://localhost:5000/score"),
            ("https://user:secret@host/score?key=secret#x", "host/score"),
            ("http://host/score?key=secret", "http://host/score"),
        ] {
            assert_eq!(address(url), shown);
        }
    }

    #[test]
    fn addresses_that_cannot_be_are_refused() {
        for (url, words) in [
            ("localhost:5000", "reward_url = localhost:5000: expected an address that begins with http"),
            ("https://", "reward_url = https://: expected an address"),
            ("http://me:secret@host/", "expected an address without a password; a token goes to the environment"),
        ] {
            let Err(error) = HttpReward::new(url, HttpSettings::default()) else { panic!("{url} is accepted") };
            let error = error.to_string();
            assert!(error.contains(words) && !error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn no_part_of_the_token_is_told_where_an_excerpt_ends_within_it() {
        let settings = HttpSettings { token: Some("sk-abcdefgh".into()), ..HttpSettings::default() };
        let reward = HttpReward::new("http://localhost/", settings).unwrap();
        for before in 60..90 {
            let problem = reward.read(&format!("{}sk-abcdefgh", "x".repeat(before)), &[]).err().unwrap();
            assert!(problem.what.contains("a list `rewards`") && !problem.what.contains("sk"), "{}", problem.what);
        }
    }

    #[test]
    fn the_token_is_not_in_the_debug_form() {
        let settings = HttpSettings { token: Some("secret".into()), ..HttpSettings::default() };
        let text = format!("{settings:?}");
        assert!(text.contains("token: Some(\"...\")") && !text.contains("secret"), "{text}");
    }
}
