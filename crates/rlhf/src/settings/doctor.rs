//! Settings of `rlhf doctor`.

use serde::Serialize;

use rlhf_base::schema::{RUN, Settings, defaults};

/// Settings of `rlhf doctor`.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct DoctorConfig {
    /// Print one JSON object instead of lines: every check with its status, its text, a hint, and what it measured.
    #[setting(heading = RUN, short = "print JSON")]
    pub json: bool,
    /// Send no request to the hub.
    #[setting(heading = RUN, short = "send no request to the hub")]
    pub offline: bool,
    /// Leave out the self-test, which trains a tiny model for a few seconds.
    #[setting(heading = RUN, short = "leave out the self-test")]
    pub no_self_test: bool,
}

impl Default for DoctorConfig {
    /// Returns the defaults of the flags: every check.
    fn default() -> Self {
        defaults()
    }
}
