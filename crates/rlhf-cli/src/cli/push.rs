//! `rlhf push`: uploads a folder and prints the address of the commit.

use std::io::{self, Write};

use rlhf::safe_text::one_line;
use rlhf::settings::PushConfig;
use rlhf::{Error, Result};

/// Most names in a note.
const MOST_NAMES: usize = 20;

/// Uploads the folder. The address goes to standard output, all else to standard error.
pub(crate) fn push(config: &PushConfig) -> Result<()> {
    let report = rlhf::push::push(config, true)?;
    let note = |text: String| drop(writeln!(io::stderr(), "note: {}", one_line(&text)));
    if let Some(warning) = &report.warning {
        let _ = writeln!(io::stderr(), "warning: {}", one_line(warning));
    }
    if !report.left_out.is_empty() {
        note(format!("left out: {} (--include pushes files beside the model)", listed(&report.left_out)));
    }
    if !report.pushed.ignored.is_empty() {
        note(format!("left out by .gitignore of the folder or of the repository: {}", listed(&report.pushed.ignored)));
    }
    if let Some(name) = &report.pushed.removed {
        note(format!("removed {name} from the repository: it would be loaded in place of the new weights"));
    }
    let files = |number: usize| if number == 1 { "1 file".into() } else { format!("{number} files") };
    match (report.pushed.files, report.pushed.uploaded) {
        (0, _) if report.pushed.removed.is_none() => note("no file has changed since the last commit".into()),
        (number, 0) => note(format!("{} committed; no large file had to be uploaded", files(number))),
        (number, bytes) => note(format!("{} committed, with {bytes} bytes of large files", files(number))),
    }
    writeln!(io::stdout(), "{}", one_line(&report.url)).map_err(Error::io("write to", "standard output"))
}

/// Returns the first names, and the number of the others.
fn listed(names: &[String]) -> String {
    let first = names[..names.len().min(MOST_NAMES)].join(", ");
    match names.len().saturating_sub(MOST_NAMES) {
        0 => first,
        others => format!("{first} and {others} more"),
    }
}
