//! `rlhf convert`: a GGUF file in, a model folder out, or the other way.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rlhf::safe_text::one_line;
use rlhf::settings::ConvertConfig;
use rlhf::{Error, Result};

/// Converts the model and prints a line about the output on standard output.
pub(crate) fn convert(config: &ConvertConfig) -> Result<()> {
    let report = rlhf::convert::convert(config)?;
    if let Some(note) = &report.note {
        let _ = writeln!(io::stderr(), "note: {}", one_line(note));
    }
    let out = config.output_file.as_ref().or(config.output_dir.as_ref()).map_or(Path::new(""), PathBuf::as_path);
    let line = format!("{} tensors written to {}", report.tensors, out.display());
    writeln!(io::stdout(), "{}", one_line(&line)).map_err(Error::io("write to", "standard output"))
}
