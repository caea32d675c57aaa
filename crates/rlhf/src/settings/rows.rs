//! Settings of the commands that read rows and write rows: `generate`, `logprobs` and `score`.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::compute::ComputeConfig;
use crate::Result;
use crate::data::Columns;
use crate::flag::{DATA, NONE, RUN, all, at_least_one, optional};

/// Input, output and computation of `generate`, `logprobs` and `score`.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct RowsConfig {
    /// Dataset to read rows from: a file, a folder or a hub name [default: standard input].
    #[arg(long, help_heading = DATA, default_value = NONE, value_parser = optional::<PathBuf>)]
    pub dataset_name: std::option::Option<PathBuf>,
    /// Configuration (folder) of the dataset to use, if several have the split.
    #[arg(long, help_heading = DATA, default_value = NONE, value_parser = optional::<String>)]
    pub dataset_config: std::option::Option<String>,
    /// Split of a dataset that is a folder or on the hub.
    #[arg(long, help_heading = DATA, default_value = "test")]
    pub dataset_split: String,
    /// Columns to read as other fields: FIELD=COLUMN, separated by commas, such as prompt=question. FIELD=none ignores a field.
    #[arg(long, help_heading = DATA, value_delimiter = ',')]
    pub dataset_columns: Vec<String>,
    /// File to write to [default: standard output].
    #[arg(long, help_heading = DATA, default_value = NONE, value_parser = optional::<PathBuf>)]
    pub output_file: std::option::Option<PathBuf>,
    /// Replace `output_file` if it exists.
    #[arg(long, help_heading = DATA)]
    #[serde(skip)] // Consent to lose a file is given for one run, never by a file that the run left behind.
    pub overwrite_output_file: bool,

    /// Sequences per forward pass; affects memory and speed only.
    #[arg(long, help_heading = RUN, default_value_t = 32)]
    pub batch_size: usize,
    /// Computation.
    #[command(flatten)]
    #[serde(flatten)]
    pub compute: ComputeConfig,
}

impl RowsConfig {
    pub(super) fn check(&self) -> Result<()> {
        all([
            at_least_one("batch_size", self.batch_size),
            Columns::parse(&self.dataset_columns).map(drop),
            self.compute.check(),
        ])
    }
}
