//! `rlhf serve`: prints the address, and serves until a signal.

use std::io::{self, IsTerminal, Write};

use crate::serve::Ready;
use rlhf::safe_text::one_line;
use rlhf::settings::ServeConfig;
use rlhf::{Error, Result};

/// Serves the model.
pub(crate) fn serve(config: &ServeConfig) -> Result<()> {
    crate::serve::serve(config, |Ready { name, url, note }| {
        if let Some(note) = note {
            let _ = writeln!(io::stderr(), "note: {}", one_line(note));
        }
        let hint = if io::stdout().is_terminal() { " (Ctrl-C stops it)" } else { "" };
        let mut out = io::stdout();
        let line = format!("{} is served at {url}/v1{hint}", one_line(name));
        writeln!(out, "{line}").and_then(|()| out.flush()).map_err(Error::io("write to", "standard output"))
    })
}
