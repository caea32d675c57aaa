//! Errors in the form of OpenAI's HTTP interface.

use crate::http_server::json_response;
use axum::response::{IntoResponse, Response};
use rlhf::safe_text::beginning;
use serde_json::{Value, json};

/// Most characters of a value that an error quotes.
pub(super) const QUOTED: usize = 80;

/// An error, with OpenAI's fields.
#[derive(Debug)]
pub(super) struct ApiError {
    status: u16,
    kind: &'static str,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
}

impl ApiError {
    /// The request is invalid; `param` is the parameter to change.
    pub(super) fn invalid(param: &str, message: impl Into<String>) -> Self {
        let param = (!param.is_empty()).then(|| param.to_string());
        Self { status: 400, kind: "invalid_request_error", message: message.into(), param, code: None }
    }

    /// The model of the request does not exist.
    pub(super) fn no_model(message: String) -> Self {
        Self { status: 404, code: Some("model_not_found"), ..Self::invalid("model", message) }
    }

    /// The prompt and the response do not fit the model.
    pub(super) fn too_long(param: &str, message: String) -> Self {
        Self { code: Some("context_length_exceeded"), ..Self::invalid(param, message) }
    }

    /// The page does not exist, has another method, or does not accept such a body.
    pub(super) fn page(status: u16, message: String) -> Self {
        Self { status, ..Self::invalid("", message) }
    }

    /// The queue is full, or the server stops.
    pub(super) fn unavailable(message: impl Into<String>) -> Self {
        Self { status: 503, kind: "server_error", ..Self::invalid("", message) }
    }

    /// The model failed.
    pub(super) fn internal(message: impl Into<String>) -> Self {
        Self { status: 500, kind: "server_error", ..Self::invalid("", message) }
    }

    /// The status of its response.
    #[cfg(test)]
    pub(super) fn status(&self) -> u16 {
        self.status
    }

    /// The error as JSON.
    pub(super) fn to_json(&self) -> Value {
        let Self { kind, message, param, code, .. } = self;
        json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        json_response(self.status, &self.to_json())
    }
}

/// The error of the parameter `name`, whose value is not the expected one.
pub(super) fn wrong(name: &str, expected: &str, found: &Value) -> ApiError {
    let found = found.to_string();
    ApiError::invalid(name, format!("`{name}`: expected {expected}, found {}", beginning(&found, QUOTED)))
}
