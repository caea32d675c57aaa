//! `rlhf report`: writes the page and prints where it is.

use std::io::{self, Write};

use rlhf::safe_text::one_line;
use rlhf::settings::ReportConfig;
use rlhf::{Error, Result};

/// Writes the report, and prints its path.
pub(crate) fn report(config: &ReportConfig) -> Result<()> {
    let path = rlhf::report::report(config)?;
    let path = path.display().to_string();
    writeln!(io::stdout(), "{}", one_line(&path)).map_err(Error::io("write to", "standard output"))
}
