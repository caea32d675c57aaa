//! `rlhf convert`: a GGUF file in, a model folder out.

use std::io::{self, Write};

use rlhf::safe_text::one_line;
use rlhf::settings::ConvertConfig;
use rlhf::{Error, Result};

/// Converts the file and prints a line about the folder on standard output.
pub(crate) fn convert(config: &ConvertConfig) -> Result<()> {
    let report = rlhf::convert::convert(config)?;
    if let Some(note) = &report.note {
        let _ = writeln!(io::stderr(), "note: {}", one_line(note));
    }
    let line = format!("{} tensors written to {}", report.tensors, config.output_dir.display());
    writeln!(io::stdout(), "{}", one_line(&line)).map_err(Error::io("write to", "standard output"))
}
