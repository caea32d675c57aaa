//! The resolved configuration that a run writes beside its results.

use std::path::Path;

use serde::Serialize;

use crate::{Error, Result};

/// First words of a file that [`write_resolved`] wrote; a user's configuration may have the same name.
pub(crate) const RESOLVED: &str = "# Every setting of this run, as resolved by rlhf ";

/// Writes every setting of a run to the file `path`, as YAML that `--config` reads back, except consent to overwrite.
///
/// Errors: [`Error::Io`]; [`Error::Invalid`] if a path among the settings is not UTF-8.
pub fn write_resolved(config: &impl Serialize, path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    let settings = serde_saphyr::to_string(config)
        .map_err(|error| Error::invalid(path, format!("the configuration cannot be written as YAML: {error}")))?;
    let text = format!("{RESOLVED}{}.\n{settings}", env!("CARGO_PKG_VERSION"));
    crate::weights::write_text(path, &text)
}
