//! Flags of `rlhf pipeline`, beside the settings of its stages.

use std::path::PathBuf;

use clap::Args;

use crate::data::settings::Stage;
use crate::flag::{CHECKPOINTS, NONE, RUN, Setting};
use crate::run::settings::{Resume, resume_or_false};

/// Flags of `rlhf pipeline`, beside the settings of each stage.
#[derive(Debug, Clone, PartialEq, Args)]
#[command(rename_all = "snake_case")]
pub struct PipelineFlags {
    /// Folder for the folders of the stages: 1-sft, 2-reward and 3-ppo.
    #[arg(long, help_heading = RUN)]
    pub output_dir: PathBuf,
    /// Replace the runs in the folders of the stages.
    #[arg(long, help_heading = RUN)]
    pub overwrite_output_dir: bool,
    /// Stages to skip: sft, reward, ppo. The models in their folders are used as they are.
    #[arg(long, help_heading = RUN, value_enum, value_delimiter = ',', num_args = 1..)]
    pub skip: Vec<Stage>,
    /// Skip the stages that are finished, and resume the unfinished one from its newest checkpoint.
    #[arg(
        long, help_heading = CHECKPOINTS, default_value = NONE, value_name = Resume::NAME, value_parser = resume_or_false,
        num_args = 0..=1, default_missing_value = "true"
    )]
    pub resume_from_checkpoint: std::option::Option<Resume>,
    /// Resume even if data or models have changed since a stage started.
    #[arg(long, help_heading = CHECKPOINTS)]
    pub resume_with_changed_inputs: bool,
}
