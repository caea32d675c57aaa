//! Settings of `rlhf report`.

use std::path::PathBuf;

use serde::Serialize;

use rlhf_base::Result;
use rlhf_base::schema::{RUN, Settings, defaults, refuse};

/// Settings of `rlhf report`.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct ReportConfig {
    /// Folders of the runs, finished or not; several are drawn over one another.
    #[setting(positional, value_name = "RUN", required)]
    pub runs: Vec<PathBuf>,
    /// File to write [default: report.html, in the folder of the run if there is one].
    #[setting(alias = "output_file", heading = RUN, short = "file to write [report.html]")]
    pub output: Option<PathBuf>,
    /// Replace `output` if it exists and is no report.
    #[setting(heading = RUN, short = "replace a file that is no report")]
    #[serde(skip)] // Consent to lose a file is given for one report.
    pub overwrite_output_file: bool,
}

impl ReportConfig {
    /// Creates a configuration with every default, for these runs.
    pub fn new(runs: impl IntoIterator<Item = impl Into<PathBuf>>) -> Self {
        Self { runs: runs.into_iter().map(Into::into).collect(), ..defaults() }
    }

    /// Checks every setting.
    ///
    /// Errors: [`Error::Usage`](rlhf_base::Error::Usage), naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        if self.runs.is_empty() {
            return refuse("runs", ": expected the folder of at least one run, found none");
        }
        Ok(())
    }
}
