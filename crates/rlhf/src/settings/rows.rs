//! Settings of the commands that read rows and write rows: `generate`, `logprobs` and `score`.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::compute::ComputeConfig;
use crate::Result;
use crate::data::SplitConfig;
use crate::flag::{DATA, NONE, RUN, all, at_least_one, optional};

/// Input, output and computation of `generate`, `logprobs` and `score`.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct RowsConfig {
    /// Dataset to read rows from: a file, a folder or a hub name [default: standard input].
    #[arg(long, help_heading = DATA, default_value = NONE, value_parser = optional::<PathBuf>)]
    pub dataset_name: std::option::Option<PathBuf>,
    /// Its split and its columns.
    #[command(flatten)]
    #[serde(flatten)]
    pub split: SplitConfig,
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
        all([at_least_one("batch_size", self.batch_size), self.split.check(), self.compute.check()])
    }
}
