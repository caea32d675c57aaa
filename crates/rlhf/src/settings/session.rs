//! Settings of `rlhf session`.

use std::path::PathBuf;

use serde::Serialize;

use rlhf_base::schema::{RUN, Settings, defaults};

/// Settings of `rlhf session`.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct SessionConfig {
    /// Unix socket to wait for one client at [default: standard input and output]. Only this user can open it, and its file must not exist.
    #[setting(heading = RUN, short = "Unix socket for one client")]
    pub socket: Option<PathBuf>,
}

impl Default for SessionConfig {
    /// Returns the defaults of the flags.
    fn default() -> Self {
        defaults()
    }
}
