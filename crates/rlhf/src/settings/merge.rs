//! Settings of `rlhf merge`.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use crate::flag::{ByteSize, MODELS, RUN, Setting, defaults, required};

/// Settings of `rlhf merge`.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct MergeConfig {
    /// Folder or hub name of the adapter; it names its base.
    #[arg(long, alias = "model", help_heading = MODELS)]
    pub model_name_or_path: PathBuf,
    /// Branch, tag or commit of `model_name_or_path`, where that is a hub name.
    #[arg(long, help_heading = MODELS, default_value = "main")]
    pub model_revision: String,
    /// Folder for the whole model.
    #[arg(long, help_heading = RUN)]
    pub output_dir: PathBuf,
    /// Replace the run, or the merged model, that `output_dir` holds.
    #[arg(long, help_heading = RUN)]
    #[serde(skip)] // As for a run.
    pub overwrite_output_dir: bool,
    /// Write weights in files of at most this size each, such as 5GB or 500MB.
    #[arg(long, help_heading = RUN, default_value = "50GB", value_name = ByteSize::NAME, value_parser = required::<ByteSize>)]
    pub max_shard_size: ByteSize,
}

impl MergeConfig {
    /// Creates a configuration with every default, for this adapter and this output folder.
    pub fn new(model_name_or_path: impl Into<PathBuf>, output_dir: impl Into<PathBuf>) -> Self {
        let mut config: Self = defaults();
        config.model_name_or_path = model_name_or_path.into();
        config.output_dir = output_dir.into();
        config
    }
}
