//! Settings of `rlhf watch`.

use std::path::PathBuf;

use serde::Serialize;

use rlhf_base::Result;
use rlhf_base::name_of;
use rlhf_base::schema::{MOST_PORT, RUN, Settings, all, at_most, defaults, no_effect};

/// The address of this machine that no other machine reaches.
const LOOPBACK: &str = "127.0.0.1";

/// Settings of `rlhf watch`.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct WatchConfig {
    /// Folder of the run, in progress or ended.
    #[setting(positional, value_name = "RUN")]
    pub run: PathBuf,
    /// Show the run in the terminal instead of a page.
    #[setting(heading = RUN, short = "show the run in the terminal")]
    pub terminal: bool,
    /// TCP port of the page; 0 is a free one.
    #[setting(heading = RUN, default = 0, most = MOST_PORT, short = "TCP port; 0 for a free one")]
    pub port: usize,
    /// Address of this machine to serve the page on. Any but 127.0.0.1 may let other machines read the run.
    #[setting(heading = RUN, default = LOOPBACK, value_name = "HOST", short = "address to listen on")]
    pub host: String,
}

impl WatchConfig {
    /// Creates a configuration with every default, for this run.
    pub fn new(run: impl Into<PathBuf>) -> Self {
        Self { run: run.into(), ..defaults() }
    }

    /// Checks every setting.
    ///
    /// Errors: [`Error::Usage`](rlhf_base::Error::Usage), naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        let needs_page = |name: &str, value: &dyn std::fmt::Display, is_default: bool| {
            if is_default || !self.terminal { Ok(()) } else { no_effect(name, value, "with terminal") }
        };
        all([
            at_most::<Self>(name_of!(self.port), self.port),
            needs_page(name_of!(self.port), &self.port, self.port == 0),
            needs_page(name_of!(self.host), &self.host, self.host == LOOPBACK),
        ])
    }

    /// Returns the port; 0 if [`WatchConfig::check`] refuses it.
    pub fn port(&self) -> u16 {
        u16::try_from(self.port).unwrap_or(0)
    }
}
