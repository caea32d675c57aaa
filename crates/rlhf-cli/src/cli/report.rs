//! `rlhf report`: writes the page and prints where it is.

use std::io::{self, Write};

use rlhf::safe_text::one_line;
use rlhf::settings::ReportConfig;
use rlhf::terminal::{Colour, Stream};
use rlhf::{Error, Result};

/// Writes the report, and prints its path, with a warning for what it lacks.
pub(crate) fn report(config: &ReportConfig) -> Result<()> {
    let report = rlhf::report::report(config)?;
    for warning in &report.warnings {
        let _ = writeln!(io::stderr(), "{}", Stream::Err.labelled("warning", Colour::Yellow, &one_line(warning)));
    }
    let path = report.path.display().to_string();
    writeln!(io::stdout(), "{}", one_line(&path)).map_err(Error::io("write to", "standard output"))
}
