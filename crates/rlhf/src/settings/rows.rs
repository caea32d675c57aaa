//! Settings of the commands that read rows and write rows: `generate`, `logprobs` and `score`.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use crate::Result;
use crate::data::Columns;
use crate::device::{Device, check_threads};
use crate::flag::{DATA, NONE, RUN, Setting, all, at_least_one, optional, required};
use crate::model::Dtype;

/// Input, output and computation of `generate`, `logprobs` and `score`.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct RowsConfig {
    /// Dataset to read rows from: a file, a folder or a hub name [default: standard input].
    #[arg(long, help_heading = DATA, default_value = NONE, value_parser = optional::<PathBuf>)]
    pub dataset_name: std::option::Option<PathBuf>,
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
    /// Dtype of the model's weights and computation; `auto` is that of its files.
    #[arg(long, help_heading = RUN, value_enum, default_value = "auto")]
    pub dtype: Dtype,
    /// Device to compute on: cpu, cuda, cuda:N, or `auto` for a GPU if there is one.
    #[arg(long, help_heading = RUN, default_value_t = Device::Auto, value_name = Device::NAME, value_parser = required::<Device>)]
    pub device: Device,
    /// Number of threads for tensor operations [default: one per core].
    #[arg(long, help_heading = RUN, default_value = NONE, value_parser = optional::<usize>)]
    pub num_threads: std::option::Option<usize>,
}

impl RowsConfig {
    pub(super) fn check(&self) -> Result<()> {
        all([
            at_least_one("batch_size", self.batch_size),
            Columns::parse(&self.dataset_columns).map(drop),
            check_threads(self.num_threads),
        ])
    }
}
