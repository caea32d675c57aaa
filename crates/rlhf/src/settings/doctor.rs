//! Settings of `rlhf doctor`.

use clap::Args;
use serde::Serialize;

use crate::flag::{RUN, defaults};

/// Settings of `rlhf doctor`.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct DoctorConfig {
    /// Print one JSON object instead of lines: every check with its status, its text, a hint, and what it measured.
    #[arg(long, help_heading = RUN)]
    pub json: bool,
    /// Send no request to the hub.
    #[arg(long, help_heading = RUN)]
    pub offline: bool,
    /// Leave out the self-test, which trains a tiny model for a few seconds.
    #[arg(long, help_heading = RUN)]
    pub no_self_test: bool,
}

impl Default for DoctorConfig {
    /// Returns the defaults of the flags: every check.
    fn default() -> Self {
        defaults()
    }
}
