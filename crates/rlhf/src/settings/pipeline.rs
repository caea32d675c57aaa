//! Flags of `rlhf pipeline`, beside the settings of its stages.

use std::path::PathBuf;

use crate::data::settings::Stage;
use crate::run::settings::{Resume, resume_or_false};
use rlhf_base::schema::{CHECKPOINTS, RUN, Settings};

/// Flags of `rlhf pipeline`, beside the settings of each stage.
#[derive(Debug, Clone, PartialEq, Settings)]
pub struct PipelineFlags {
    /// Folder for the folders of the stages: 1-sft, 2-reward and 3-ppo; and 4-dpo and 5-distill where the file has such a section.
    #[setting(heading = CHECKPOINTS, short = "folder to write to")]
    pub output_dir: PathBuf,
    /// Replace the runs in the folders of the stages.
    #[setting(heading = CHECKPOINTS, short = "replace an existing output folder")]
    pub overwrite_output_dir: bool,
    /// Stages to skip: sft, reward, ppo, dpo, distill. The models in their folders are used as they are.
    #[setting(heading = RUN, delimiter = ',', several, short = "stages to skip, such as reward,ppo")]
    pub skip: Vec<Stage>,
    /// Skip the stages that are finished, and resume the unfinished one from its newest checkpoint.
    #[setting(heading = CHECKPOINTS, parse = resume_or_false, alone = "true", short = "resume from the newest checkpoint")]
    pub resume_from_checkpoint: Option<Resume>,
    /// Resume even if data or models have changed since a stage started.
    #[setting(heading = CHECKPOINTS)]
    pub resume_with_changed_inputs: bool,
}
