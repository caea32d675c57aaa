//! `rlhf push`: uploads a folder and prints the address of the commit.

use std::io::{self, IsTerminal, Write};

use rlhf::safe_text::one_line;
use rlhf::settings::PushConfig;
use rlhf::{Error, Result};

/// Uploads the folder. The address goes to standard output, all else to standard error.
pub(crate) fn push(config: &PushConfig) -> Result<()> {
    let report = rlhf::push::push(config, io::stderr().is_terminal())?;
    let note = |text: String| drop(writeln!(io::stderr(), "note: {}", one_line(&text)));
    if !report.left_out.is_empty() {
        note(format!("not part of the model, and left out: {}", report.left_out.join(", ")));
    }
    match report.pushed.files {
        0 => note("no file has changed since the last commit".into()),
        files => note(format!("{files} files, {} bytes of large files were uploaded", report.pushed.uploaded)),
    }
    writeln!(io::stdout(), "{}", one_line(&report.url)).map_err(Error::io("write to", "standard output"))
}
