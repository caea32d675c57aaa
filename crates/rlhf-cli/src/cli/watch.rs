//! `rlhf watch`: prints where the live page of a run is, or shows the run in the terminal.

use std::io::{self, IsTerminal, Write};

use rlhf::safe_text::one_line;
use rlhf::settings::WatchConfig;
use rlhf::{Error, Result};

/// Serves the page until a signal ends it, and prints its address; or shows the run in the terminal.
pub(crate) fn watch(config: &WatchConfig) -> Result<()> {
    if config.terminal {
        return crate::watch::watch_in_terminal(&config.run);
    }
    crate::watch::watch(config, |url| {
        if io::stderr().is_terminal() {
            let run = config.run.display().to_string();
            let _ = writeln!(io::stderr(), "{} is shown at this address; Ctrl-C ends it", one_line(&run));
        }
        writeln!(io::stdout(), "{url}").map_err(Error::io("write to", "standard output"))
    })
}
