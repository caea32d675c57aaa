//! Settings of `rlhf merge`.

use std::path::PathBuf;

use serde::Serialize;

use rlhf_base::schema::{ByteSize, CHECKPOINTS, MODELS, Settings, defaults};
use rlhf_lm::model::Dtype;

/// Settings of `rlhf merge`.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct MergeConfig {
    /// LoRA adapter, which names its base model: a folder or a hub name.
    #[setting(alias = "model", heading = MODELS, short = "model: folder or hub name")]
    pub model_name_or_path: PathBuf,
    /// Branch, tag or commit of `model_name_or_path` on the hub.
    #[setting(heading = MODELS, default = "main")]
    pub model_revision: String,
    /// Folder for the merged model.
    #[setting(heading = CHECKPOINTS, short = "folder to write to")]
    pub output_dir: PathBuf,
    /// Replace the run or the merged model in `output_dir`.
    #[setting(heading = CHECKPOINTS, short = "replace an existing output folder")]
    #[serde(skip)] // As for a run.
    pub overwrite_output_dir: bool,
    /// Dtype of the weights; `auto` is that of the base. From a base in fewer bits, `float32` keeps the sum whole: rounded to bfloat16
    /// it may differ by half a unit in a logit.
    #[setting(heading = CHECKPOINTS, default = "auto")]
    pub save_dtype: Dtype,
    /// Maximum size of each file of saved weights, such as 5GB or 500MB.
    #[setting(heading = CHECKPOINTS, default = "50GB", short = "maximum size of a weights file")]
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
