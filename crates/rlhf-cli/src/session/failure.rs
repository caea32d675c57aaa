//! Errors as replies.

use rlhf::safe_text::one_line;
use rlhf::{Error, Refusal};
use serde_json::{Value, json};

/// Why a request has no result.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Failure {
    /// Its cause: `protocol`, `order`, `usage`, `io`, `invalid`, `run`, `reward`, `torch` or `internal`.
    kind: &'static str,
    /// The parameter or the setting that is wrong, where it is one.
    setting: Option<String>,
    message: String,
}

impl Failure {
    /// Bytes that are no request.
    pub(super) fn protocol(message: impl Into<String>) -> Self {
        Self { kind: "protocol", setting: None, message: one_line(&message.into()).into_owned() }
    }

    /// A request at a time when it cannot be done.
    pub(super) fn order(message: impl Into<String>) -> Self {
        Self { kind: "order", setting: None, message: one_line(&message.into()).into_owned() }
    }

    /// A wrong parameter or setting.
    pub(super) fn usage(setting: &str, message: impl Into<String>) -> Self {
        Self { kind: "usage", setting: Some(setting.into()), message: one_line(&message.into()).into_owned() }
    }

    /// The failure of a request for an unknown method: it belongs neither to the loop, whose methods are `known`, nor to every session.
    pub(super) fn unknown(method: &str, known: &[&str]) -> Self {
        let known = [&["hello", "open", "stop"], known].concat().join(", ");
        Self::usage("method", format!("method: expected one of {known}, found {method}"))
    }

    /// A panic, of libtorch or of this program.
    pub(super) fn internal(message: &str) -> Self {
        match Error::out_of_memory(message) {
            Some(error) => error.into(),
            None => Self { kind: "internal", setting: None, message: format!("internal: {message} (please report)") },
        }
    }

    /// The same failure, but of `setting`: the name that the client wrote, in place of the program's name.
    pub(super) fn for_setting(self, setting: &str) -> Self {
        Self { setting: Some(setting.into()), ..self }
    }

    pub(super) fn message(&self) -> &str {
        &self.message
    }

    /// The value of `error` in a reply.
    pub(super) fn to_json(&self) -> Value {
        json!({"kind": self.kind, "setting": self.setting, "message": self.message})
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let kind = match &error {
            error if error.is_usage() => "usage",
            Error::Io { .. } => "io",
            Error::Invalid { .. } | Error::Row { .. } => "invalid",
            Error::Reward { .. } => "reward",
            Error::Torch(_) => "torch",
            _ => "run",
        };
        let setting = error.refusals().iter().find_map(Refusal::setting).map(String::from);
        // Several settings have a line each.
        let message = error.to_string().replace('\n', "; ");
        Self { kind, setting, message }
    }
}
