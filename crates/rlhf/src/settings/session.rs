//! Settings of `rlhf session`.

use std::path::PathBuf;

use serde::Serialize;

use rlhf_base::schema::{RUN, Settings, defaults};

/// Settings of `rlhf session`.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct SessionConfig {
    /// Unix socket at which to wait for one client, which only this user can open; its file must not exist [default: requests are on
    /// standard input, replies on standard output].
    #[setting(heading = RUN)]
    pub socket: Option<PathBuf>,
}

impl Default for SessionConfig {
    /// Returns the defaults of the flags.
    fn default() -> Self {
        defaults()
    }
}
