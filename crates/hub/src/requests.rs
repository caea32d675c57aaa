//! Requests of an upload. The token is sent to the hub alone, and a request that may succeed later is repeated.

use super::download::Bar;
use super::local::LocalFile;
use super::{ATTEMPTS, Failure, Hub, origin};
use rlhf_base::safe_text::one_line;
use rlhf_base::signals::stop_requested;
use rlhf_base::{Error, Result};
use serde_json::Value;
use std::cell::Cell;
use std::io::{self, Read, Write};
use std::time::{Duration, Instant};
use ureq::http::{HeaderMap, Response, StatusCode, header};
use ureq::{Agent, Body, SendBody};

/// Timeout of most responses.
const QUICK: Duration = Duration::from_secs(60);
/// Timeout of the response to a commit of many files or to the completion of a large one.
pub(super) const SLOW: Duration = Duration::from_secs(600);
/// Time without a note after which a wait is noted.
const QUIET: Duration = Duration::from_secs(5);
/// Rate below which sending a file counts as stalled, in bytes per second.
const SLOWEST: u64 = 20_000;
/// Bytes of a response that are read.
const LONGEST_RESPONSE: u64 = 10 << 20;
/// The hub's own address, which its responses name even where a mirror is used.
const HUGGING_FACE: &str = "https://huggingface.co";
/// Media type of git's large files.
const LFS: &str = "application/vnd.git-lfs+json";

/// Body of a request. A request without one is a GET, one with a file a PUT, any other a POST.
pub(super) enum Content<'a> {
    None,
    Json(&'a Value),
    /// As git's extension for large files sends JSON.
    Lfs(&'a Value),
    /// JSON lines.
    Lines(&'a [u8]),
    /// A part of a file.
    File {
        file: &'a LocalFile,
        from: u64,
        len: u64,
        bar: Option<&'a Bar>,
    },
}

/// A request.
pub(super) struct Request<'a> {
    /// The action, for errors, as a verb phrase: "create the repository".
    pub(super) what: String,
    pub(super) url: String,
    pub(super) content: Content<'a>,
    /// Statuses other than success that the caller handles.
    pub(super) accepts: &'static [u16],
    /// Whether the token is sent, if the address is the hub's.
    pub(super) with_token: bool,
    /// Timeout of the response.
    pub(super) patience: Duration,
}

/// A response.
pub(super) struct Reply {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    /// The body; null if it is not JSON.
    pub(super) json: Value,
    /// The server's own words for an error.
    pub(super) words: String,
}

/// Sends the requests for one repository.
pub(super) struct Client {
    pub(super) hub: Hub,
    /// Name of the repository, as errors show it.
    pub(super) name: String,
    /// The owners that the token may write to, if the repository's owner is not known to be one of them.
    pub(super) owners: Option<String>,
    /// Whether waits are noted on standard error.
    pub(super) speaks: Cell<bool>,
    /// Start of the requests, or the last note.
    noted: Cell<Instant>,
    agent: Agent,
}

impl Client {
    pub(super) fn new(hub: Hub, name: String) -> Result<Self> {
        let agent = hub.agent()?;
        Ok(Self { hub, name, owners: None, speaks: Cell::new(true), noted: Cell::new(Instant::now()), agent })
    }

    /// An address of the hub's interface.
    pub(super) fn api(&self, path: &str) -> String {
        format!("{}/api/{path}", self.hub.endpoint)
    }

    /// Checks an address of a response, and replaces the hub's own by the mirror's where one is set.
    ///
    /// # Errors
    /// If it is not an address.
    pub(super) fn address(&self, value: &Value) -> Result<String, Failure> {
        match value.as_str().filter(|url| url.starts_with("https://") || url.starts_with("http://")) {
            Some(url) => match url.strip_prefix(HUGGING_FACE).filter(|rest| rest.starts_with('/')) {
                Some(rest) => Ok(format!("{}{rest}", self.hub.endpoint)),
                None => Ok(url.to_string()),
            },
            // It may be signed, so it is not printed.
            None => Err(self.error("expected an address to upload to from the hub, found another text").into()),
        }
    }

    /// Sends a POST of JSON to the hub's interface, with the token.
    pub(super) fn post(&self, what: &str, path: &str, json: &Value, accepts: &'static [u16]) -> Result<Reply, Failure> {
        let (url, content) = (self.api(path), Content::Json(json));
        self.send(&Request { what: what.into(), url, content, accepts, with_token: true, patience: QUICK })
    }

    /// Sends a GET to the hub's interface, with the token.
    pub(super) fn get(&self, what: &str, path: &str, accepts: &'static [u16]) -> Result<Reply, Failure> {
        let (url, content) = (self.api(path), Content::None);
        self.send(&Request { what: what.into(), url, content, accepts, with_token: true, patience: QUICK })
    }

    /// Sends a request once, and follows redirects on its host, such as those of a renamed repository.
    pub(super) fn send(&self, request: &Request<'_>) -> Result<Reply, Failure> {
        let mut at = request.url.clone();
        for _ in 0..5 {
            let response = self.call(request, &at)?;
            let to = response.headers().get(header::LOCATION).and_then(|to| to.to_str().ok()).unwrap_or_default();
            let to = if to.starts_with('/') { format!("{}{to}", origin(&at)) } else { to.to_string() };
            if matches!(response.status().as_u16(), 307 | 308) && origin(&to) == origin(&at) {
                at = to;
                continue;
            }
            return self.reply(request, &at, response);
        }
        Err(self.error(&format!("{}: redirected more than 5 times", request.what)).into())
    }

    fn call(&self, request: &Request<'_>, at: &str) -> Result<Response<Body>, Failure> {
        let length = if let Content::File { len, .. } = request.content { len } else { 0 };
        let patience = request.patience + Duration::from_secs(length / SLOWEST);
        let token = self.hub.token.as_ref().filter(|_| request.with_token && origin(at) == origin(&self.hub.endpoint));
        let token = token.map(|token| format!("Bearer {token}"));
        if let Content::None = request.content {
            let mut call = self.agent.get(at);
            if let Some(token) = token {
                call = call.header(header::AUTHORIZATION, token);
            }
            return call.call().map_err(|error| self.failed(request, at, error));
        }
        let is_file = matches!(request.content, Content::File { .. });
        let mut call = if is_file { self.agent.put(at) } else { self.agent.post(at) };
        if let Some(token) = token {
            call = call.header(header::AUTHORIZATION, token);
        }
        call = match request.content {
            Content::Json(_) => call.header(header::CONTENT_TYPE, "application/json"),
            Content::Lfs(_) => call.header(header::CONTENT_TYPE, LFS).header(header::ACCEPT, LFS),
            Content::Lines(_) => call.header(header::CONTENT_TYPE, "application/x-ndjson"),
            // Without it the body would be sent in chunks, which storage services refuse.
            _ => call.header(header::CONTENT_LENGTH, length.to_string()),
        };
        let call =
            call.config().timeout_send_body(Some(patience)).timeout_recv_response(Some(request.patience)).build();
        let sent = match &request.content {
            Content::Json(json) | Content::Lfs(json) => call.send(json.to_string()),
            Content::Lines(lines) => call.send(*lines),
            Content::File { file, from, len, bar } => {
                let mut reader = Counted { inner: file.reader(*from, *len), at: *from, bar: *bar };
                call.send(SendBody::from_reader(&mut reader))
            }
            Content::None => call.send_empty(),
        };
        sent.map_err(|error| self.failed(request, at, error))
    }

    /// The failure of a request without a response. The address of a storage service is secret.
    fn failed(&self, request: &Request<'_>, at: &str, error: ureq::Error) -> Failure {
        match Failure::from(error) {
            Failure::Transient(why, wait) => {
                Failure::Transient(format!("cannot {}: {why}, at {}", request.what, origin(at)), wait)
            }
            Failure::Permanent(_) if origin(at) != origin(&self.hub.endpoint) => {
                self.error("the hub named an address to upload to that is not valid").into()
            }
            failure @ Failure::Permanent(_) => failure,
        }
    }

    fn reply(&self, request: &Request<'_>, at: &str, mut response: Response<Body>) -> Result<Reply, Failure> {
        let (status, headers) = (response.status(), response.headers().clone());
        let read = response.body_mut().with_config().limit(LONGEST_RESPONSE).lossy_utf8(true).read_to_string();
        let text = read.map_err(|error| self.failed(request, at, error))?;
        let json: Value = serde_json::from_str(&text).unwrap_or(Value::Null);
        let words = self.words(&headers, &text, &json);
        if status.is_success() || request.accepts.contains(&status.as_u16()) {
            return Ok(Reply { status, headers, json, words });
        }
        Err(self.refusal(&request.what, at, &Reply { status, headers, json, words }))
    }

    /// The server's own words for an error, as `huggingface_hub` finds them.
    fn words(&self, headers: &HeaderMap, text: &str, json: &Value) -> String {
        let in_header = headers.get("x-error-message").and_then(|words| words.to_str().ok());
        let several = json["errors"].as_array().into_iter().flatten().filter_map(|error| error["message"].as_str());
        let listed = json["error"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let single =
            [&json["error"], &json["error"]["message"], &json["message"]].into_iter().filter_map(Value::as_str);
        let mut words: Vec<&str> = in_header.into_iter().chain(single).chain(listed).chain(several).collect();
        if words.is_empty() && json.is_null() && !text.trim_start().starts_with('<') {
            words.push(text.trim());
        }
        words.dedup();
        let words: String = words.join("; ").chars().take(300).collect();
        self.clean(&words)
    }

    /// The failure for a status other than success.
    fn refusal(&self, what: &str, at: &str, reply: &Reply) -> Failure {
        let status = reply.status;
        let separator = if reply.words.is_empty() { "" } else { ": " };
        let found = format!("HTTP status {status}{separator}{}", reply.words);
        let (endpoint, name) = (&self.hub.endpoint, &self.name);
        if matches!(status.as_u16(), 402 | 413 | 507) {
            return self.error(&format!("cannot {what}: it exceeds the storage limits of the hub ({found})")).into();
        }
        if origin(at) != origin(endpoint) {
            return match status.as_u16() {
                408 | 425 | 429 | 500.. => self.transient(what, at, reply),
                _ => self.error(&format!("cannot {what}: {found} from {}", origin(at))).into(),
            };
        }
        let owners = self.owners.as_ref().map(|owners| format!("; it may write to repositories of {owners}"));
        let owners = owners.unwrap_or_default();
        let code = reply.headers.get("x-error-code").and_then(|code| code.to_str().ok());
        let message = match status.as_u16() {
            // 409 and 412: another commit came in between.
            408 | 409 | 412 | 429 | 500.. => {
                return Failure::Transient(format!("cannot {what}: {found}"), retry_after(&reply.headers));
            }
            401 => format!(
                "{endpoint} does not accept the access token ({found}): set HF_TOKEN to a token with write access, from \
                 {endpoint}/settings/tokens"
            ),
            403 => {
                format!(
                    "cannot {what}: the access token does not allow it ({found}); it needs write access to {name}{owners}"
                )
            }
            404 if code == Some("RevisionNotFound") => format!("cannot {what}: no such branch ({found})"),
            404 => format!("cannot {what}: no such repository, or the access token may not read it ({found}){owners}"),
            _ => format!("cannot {what}: {found}"),
        };
        self.error(&message).into()
    }

    /// The failure for a response of a storage service, whose address is secret.
    pub(super) fn transient(&self, what: &str, at: &str, reply: &Reply) -> Failure {
        let separator = if reply.words.is_empty() { "" } else { ": " };
        let found = format!("HTTP status {}{separator}{}", reply.status, reply.words);
        Failure::Transient(format!("cannot {what}: {found} from {}", origin(at)), retry_after(&reply.headers))
    }

    /// Sends a request until it succeeds, a few times at most.
    pub(super) fn repeat<T>(&self, request: impl Fn() -> Result<T, Failure>) -> Result<T, Failure> {
        super::repeat(request, |failed, failure| self.wait(failed, failure))
    }

    /// Waits before the next attempt after `failed` ones; returns the failure if there is none left. A long wait is noted.
    pub(super) fn wait(&self, failed: u32, failure: Failure) -> Result<(), Failure> {
        let left = failed < ATTEMPTS && !stop_requested();
        if let Failure::Transient(what, asked) = &failure
            && left
        {
            let wait = self.hub.delay(failed, *asked);
            if self.speaks.get() && self.noted.get().elapsed() + wait >= QUIET {
                let (name, seconds) = (&self.name, wait.as_secs_f64().round());
                let note = self.clean(&format!("{name}: {what}; next attempt in {seconds} s"));
                let _ = writeln!(io::stderr(), "note: {}", one_line(&note));
                self.noted.set(Instant::now());
            }
        }
        self.hub.wait((failed, ATTEMPTS), failure)
    }

    /// An error about the repository, without the token, in case the server repeated it.
    pub(super) fn error(&self, message: &str) -> Error {
        Error::invalid(&self.name, self.clean(message))
    }

    /// The error of the last attempt.
    pub(super) fn give_up(&self, failure: Failure) -> Error {
        match failure {
            Failure::Permanent(error) => error,
            Failure::Transient(what, _) if stop_requested() => self.error(&format!("{what} (interrupted)")),
            Failure::Transient(what, _) => self.error(&format!("{what} (tried {ATTEMPTS} times)")),
        }
    }

    fn clean(&self, text: &str) -> String {
        self.hub.token.as_ref().map_or(text.to_string(), |token| text.replace(token.as_str(), "..."))
    }
}

/// The wait that a server requests: `Retry-After` in seconds, or the `t` of the hub's `RateLimit: "api";r=0;t=55`.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let limit = || text("ratelimit")?.split(';').find_map(|part| part.trim().strip_prefix("t=")?.trim().parse().ok());
    let seconds = text("retry-after").and_then(|seconds| seconds.trim().parse().ok()).or_else(limit)?;
    Some(Duration::from_secs(seconds))
}

/// Shows the bytes that are read on a progress bar.
struct Counted<'a, R> {
    inner: R,
    at: u64,
    bar: Option<&'a Bar>,
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.at += read as u64;
        if let Some(bar) = self.bar {
            bar.at(self.at);
        }
        Ok(read)
    }
}
