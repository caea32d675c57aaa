//! Flags of `rlhf pipeline`, beside the settings of its stages.

use std::path::PathBuf;

use clap::{ArgAction, Args};

use crate::data::settings::Stage;
use crate::flag::{CHECKPOINTS, NONE, RUN, Setting};
use crate::run::settings::{Resume, resume_or_false};

/// Flags of `rlhf pipeline`, beside the settings of each stage.
#[derive(Debug, Clone, PartialEq, Args)]
#[command(rename_all = "snake_case")]
pub struct PipelineFlags {
    /// Folder for the steps' folders: 1-sft, 2-reward and 3-ppo.
    #[arg(long, help_heading = RUN)]
    pub output_dir: PathBuf,
    /// Replace the runs that the folders of the steps hold.
    #[arg(long, help_heading = RUN)]
    pub overwrite_output_dir: bool,
    /// Steps to leave out: sft, reward, ppo. What their folders hold is used as it is.
    #[arg(long, help_heading = RUN, value_enum, value_delimiter = ',', num_args = 1.., action = ArgAction::Set)]
    pub skip: Vec<Stage>,
    /// Pass over the steps that are finished, and go on with the one that is not from its newest checkpoint.
    #[arg(
        long, help_heading = CHECKPOINTS, default_value = NONE, hide_default_value = true, value_name = Resume::NAME, value_parser = resume_or_false,
        num_args = 0..=1, default_missing_value = "true"
    )]
    pub resume_from_checkpoint: std::option::Option<Resume>,
    /// Resume also where data or models are not those that a step began with.
    #[arg(long, help_heading = CHECKPOINTS)]
    pub resume_with_changed_inputs: bool,
}
