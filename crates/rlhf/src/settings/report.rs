//! Settings of `rlhf report`.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use crate::Result;
use crate::flag::{NONE, RUN, defaults, optional, usage};

/// Settings of `rlhf report`.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct ReportConfig {
    /// Folders of the runs, finished or not; several are drawn over one another.
    #[arg(value_name = "RUN", required = true)]
    pub runs: Vec<PathBuf>,
    /// File to write [default: report.html, in the folder of the run if there is one].
    #[arg(long, alias = "output_file", help_heading = RUN, default_value = NONE, value_parser = optional::<PathBuf>)]
    pub output: std::option::Option<PathBuf>,
    /// Replace `output` if it exists and is no report.
    #[arg(long, help_heading = RUN)]
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
    /// Errors: [`Error::Usage`](crate::Error::Usage), naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        if self.runs.is_empty() {
            return usage("runs: expected the folder of at least one run, found none");
        }
        Ok(())
    }
}
