//! Settings of the commands that read rows and write rows: `generate`, `logprobs` and `score`.

use std::path::PathBuf;

use serde::Serialize;

use super::compute::ComputeConfig;
use crate::data::SplitConfig;
use rlhf_base::Result;
use rlhf_base::name_of;
use rlhf_base::schema::{DATA, MOST_ROWS, SPEED, Settings, all, at_least_one};

/// Input, output and computation of `generate`, `logprobs` and `score`.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct RowsConfig {
    /// Dataset to read rows from: a file, a folder or a hub name [default: standard input].
    #[setting(heading = DATA, short = "dataset: file, folder or hub name")]
    pub dataset_name: Option<PathBuf>,
    /// Its split and its columns.
    #[setting(flatten)]
    #[serde(flatten)]
    pub split: SplitConfig,
    /// File to write to [default: standard output].
    #[setting(heading = DATA, short = "file to write to [standard output]")]
    pub output_file: Option<PathBuf>,
    /// Replace `output_file` if it exists.
    #[setting(heading = DATA, short = "replace a file that is no report")]
    #[serde(skip)] // Consent to lose a file is given for one run, never by a file that the run left behind.
    pub overwrite_output_file: bool,

    /// Sequences per forward pass; affects memory and speed only.
    #[setting(heading = SPEED, default = 32, most = MOST_ROWS, short = "sequences per forward pass")]
    pub batch_size: usize,
    /// Computation.
    #[setting(flatten)]
    #[serde(flatten)]
    pub compute: ComputeConfig,
}

impl RowsConfig {
    pub(super) fn check(&self) -> Result<()> {
        all([at_least_one(name_of!(self.batch_size), self.batch_size), self.split.check(), self.compute.check()])
    }
}
