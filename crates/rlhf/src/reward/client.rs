//! Requests to a service: one address, its token, a timeout, and failures that show no secret.

use super::address::{LEFT_OUT, address};
use super::retry::Failure;
use rlhf_base::safe_text::{beginning, one_line};
use rlhf_base::{Error, Result};
use rlhf_hub::{certificates, origin};
use serde_json::Value;
use std::fmt;
use std::path::Path;
use std::time::Duration;
use ureq::Agent;
use ureq::http::{StatusCode, header};
use ureq::tls::{RootCerts, TlsConfig};

/// Maximum size of a reply in bytes.
const MAX_REPLY: u64 = 256 << 20;

/// Maximum size of the body of an error whose message is shown, in bytes.
const MAX_ERROR: u64 = 64 << 10;

/// Maximum length of the message of an error that is shown, in characters.
const SHOWN: usize = 200;

/// Sends JSON to the address of a service.
pub(crate) struct Client {
    url: String,
    /// Sent as `Authorization: Bearer`; never printed.
    token: Option<String>,
    /// Environment variable of the token, for messages.
    variable: &'static str,
    timeout: Duration,
    agent: Agent,
}

impl Client {
    /// Creates a client without connecting. `setting` is the name of the setting with the address. Uses the certificates of
    /// `SSL_CERT_FILE` if it is set.
    ///
    /// # Errors
    /// If `url` is not an HTTP URL or contains a password; if `SSL_CERT_FILE` cannot be read.
    pub(crate) fn new(
        setting: &str,
        url: &str,
        token: Option<String>,
        variable: &'static str,
        timeout: Duration,
    ) -> Result<Self> {
        let wrong = |what: &str| Error::refused(setting, format!(" = {}: expected {what}", address(url)));
        if !["http://", "https://"].iter().any(|scheme| url.len() > scheme.len() && url.starts_with(scheme)) {
            return Err(wrong("an address that starts with http:// or https://"));
        }
        if url.ends_with(LEFT_OUT) {
            return Err(wrong("the part after the ?, which is not written to files: give the whole address"));
        }
        if origin(url).contains('@') {
            // A password in the URL would end up in logs of proxies and servers.
            return Err(wrong(&format!(
                "an address without a password; a token goes to the environment variable {variable}"
            )));
        }
        let roots = match std::env::var_os("SSL_CERT_FILE").filter(|file| !file.is_empty()) {
            Some(file) if url.starts_with("https://") => certificates(Path::new(&file))?,
            _ => RootCerts::WebPki,
        };
        let agent = Agent::config_builder()
            .tls_config(TlsConfig::builder().root_certs(roots).build())
            .http_status_as_error(false)
            // The token must not be sent to another address.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("rlhf/", env!("CARGO_PKG_VERSION")))
            .timeout_global(Some(timeout))
            .build();
        Ok(Self { url: url.to_string(), token, variable, timeout, agent: agent.into() })
    }

    /// Sends one request with this JSON. Returns the body of the reply.
    ///
    /// # Errors
    /// If there is no reply in time, or its status is no success.
    pub(crate) fn post(&self, body: &str) -> Result<String, Failure> {
        let mut request = self.agent.post(&self.url).header(header::CONTENT_TYPE, "application/json");
        if let Some(token) = &self.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        let mut response = request.send(body).map_err(|e| self.request_failure(&e))?;
        let status = response.status();
        if !status.is_success() {
            let wait = response.headers().get(header::RETRY_AFTER).and_then(|wait| wait.to_str().ok()?.parse().ok());
            let body = response.body_mut().with_config().limit(MAX_ERROR).read_to_string().unwrap_or_default();
            return Err(self.status_failure(status, wait.map(Duration::from_secs), &self.clean(&body)));
        }
        let text = response.body_mut().with_config().limit(MAX_REPLY).read_to_string();
        text.map_err(|e| self.request_failure(&e))
    }

    /// The address, without parts that may be secret.
    pub(crate) fn address(&self) -> &str {
        address(&self.url)
    }

    /// Returns a failure with the address before its message.
    pub(crate) fn failure(&self, what: impl fmt::Display) -> Failure {
        Failure::new(format!("{}: {what}", self.address()))
    }

    /// Returns the failure for a request without a reply.
    fn request_failure(&self, error: &ureq::Error) -> Failure {
        match error {
            ureq::Error::BadUri(_) | ureq::Error::Http(_) => Failure::permanent(format!(
                "{}: not a request that can be sent (the address, {})",
                self.address(),
                self.variable
            )),
            ureq::Error::Timeout(_) => self.failure(format!("timed out after {} s", self.timeout.as_secs_f64())),
            error => self.failure(self.clean(&error.to_string())),
        }
    }

    /// Returns the failure for an HTTP status other than success, with the message in the `body`.
    fn status_failure(&self, status: StatusCode, wait: Option<Duration>, body: &str) -> Failure {
        let message = error_message(body).map_or(String::new(), |message| format!(": {message}"));
        let problem = format!("{}: HTTP status {status}{message}", self.address());
        let variable = self.variable;
        match status.as_u16() {
            408 | 429 | 500.. => Failure { retry_after: wait, ..Failure::new(problem) },
            401 | 403 if self.token.is_none() => {
                Failure::permanent(format!("{problem}; a token goes to the environment variable {variable}"))
            }
            401 | 403 => Failure::permanent(format!("{problem}; the token of {variable} is not accepted")),
            300..=399 => Failure::permanent(format!("{problem}: it leads to another address, which is not followed")),
            _ => Failure::permanent(problem),
        }
    }

    /// Removes the token, and the part after the ? of the address, from a text of the service.
    pub(crate) fn clean(&self, text: &str) -> String {
        let query = self.url.split_once('?').map(|(_, query)| query).filter(|query| !query.is_empty());
        let secrets = self.token.as_deref().into_iter().chain(query);
        secrets.fold(text.to_string(), |text, secret| text.replace(secret, "..."))
    }
}

/// Returns the message in the body of an error, shortened: `error.message`, `error`, `message` or `detail` of a JSON object, or a plain
/// text.
fn error_message(body: &str) -> Option<String> {
    let parsed: Option<Value> = serde_json::from_str(body).ok();
    let text = match &parsed {
        Some(value) => {
            let places = [&value["error"]["message"], &value["error"], &value["message"], &value["detail"]];
            places.into_iter().find_map(Value::as_str)?
        }
        // A page of a web server says no more than its status.
        None if body.trim_start().starts_with('<') => return None,
        None => body,
    };
    let text = one_line(text.trim());
    (!text.is_empty()).then(|| beginning(&text, SHOWN).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_of_a_refusal_is_read_from_json_or_text() {
        for (body, message) in [
            (
                r#"{"error": {"message": "Unsupported value: 'temperature'", "code": 3}}"#,
                Some("Unsupported value: 'temperature'"),
            ),
            (r#"{"error": "no such model"}"#, Some("no such model")),
            (r#"{"message": "too long"}"#, Some("too long")),
            (r#"{"detail": "Not Found"}"#, Some("Not Found")),
            (" overloaded\n", Some("overloaded")),
            ("<html><body>502</body></html>", None),
            (r#"{"detail": [{"loc": ["body"]}]}"#, None),
            ("", None),
        ] {
            assert_eq!(error_message(body).as_deref(), message, "{body}");
        }
        assert!(error_message(&"x".repeat(10_000)).unwrap().chars().count() < 300);
    }
}
