//! Access to the hub, and the validity of the token: one request, for `rlhf doctor`.

use super::Hub;
use rlhf_base::Result;
use serde_json::Value;
use std::time::Duration;
use ureq::http::header;

/// Maximum number of bytes of the response that are read.
const LONGEST: u64 = 1 << 20;

/// The response of the hub to a request for the account of the token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// Reached, without a token.
    Public,
    /// Reached; the token belongs to this account.
    Account(String),
    /// Reached; the hub refuses the token.
    Refused,
    /// Reached, but this address does not verify tokens; with the status.
    Unknown(u16),
    /// Something else than a hub responded; with the status.
    NoHub(u16),
    /// The hub has no response: it cannot be reached, or is out of order.
    Failed(String),
}

impl Hub {
    /// Requests the account of the token from the hub; the whole request takes at most `limit`.
    ///
    /// # Errors
    /// If the endpoint is not an address, or the certificates cannot be read.
    pub fn access(&self, limit: Duration) -> Result<Access> {
        let url = format!("{}/api/whoami-v2", self.endpoint);
        let mut request = self.agent()?.get(&url);
        if let Some(token) = &self.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        let mut response = match request.config().timeout_global(Some(limit)).build().call() {
            Ok(response) => response,
            Err(error) => return Ok(Access::Failed(self.without_token(&error.to_string()))),
        };
        let status = response.status().as_u16();
        let text = response.body_mut().with_config().limit(LONGEST).read_to_string().unwrap_or_default();
        let json: Value = serde_json::from_str(&text).unwrap_or_default();
        Ok(match (status, &self.token) {
            (200, Some(_)) => match json["name"].as_str() {
                Some(name) => Access::Account(self.without_token(name)),
                None => Access::NoHub(status),
            },
            (401 | 403, Some(_)) => Access::Refused,
            // A hub answers with the first two, a mirror without accounts with the last two.
            (401 | 403 | 404 | 405, None) => Access::Public,
            (404 | 405, Some(_)) => Access::Unknown(status),
            (429 | 500.., _) => Access::Failed(format!("HTTP status {status}")),
            _ => Access::NoHub(status),
        })
    }

    fn without_token(&self, text: &str) -> String {
        self.token.as_ref().map_or_else(|| text.to_string(), |token| text.replace(token.as_str(), "..."))
    }
}
