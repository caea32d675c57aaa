//! Settings of `rlhf logprobs`.

use std::path::PathBuf;

use serde::Serialize;

use super::check::check_sizes;
use super::rows::RowsConfig;
use rlhf_base::Result;
use rlhf_base::name_of;
use rlhf_base::schema::{MODELS, Settings, above_zero, all, defaults};

/// Settings of `rlhf logprobs`.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct LogprobsConfig {
    /// Causal language model: a folder or a hub name.
    #[setting(alias = "model", heading = MODELS, short = "model: folder or hub name")]
    pub model_name_or_path: PathBuf,
    /// Branch, tag or commit of `model_name_or_path` on the hub.
    #[setting(heading = MODELS, default = "main")]
    pub model_revision: String,
    /// Temperature: divides the logits; 1 is the model's own distribution.
    #[setting(heading = MODELS, default = 1.0, short = "sampling temperature")]
    pub temperature: f64,
    /// Input and output of rows, and computation.
    #[setting(flatten)]
    #[serde(flatten)]
    pub rows: RowsConfig,
}

impl LogprobsConfig {
    /// Creates a configuration with every default, for this model; set `rows.dataset_name` next.
    pub fn new(model_name_or_path: impl Into<PathBuf>) -> Self {
        let mut config: Self = defaults();
        config.model_name_or_path = model_name_or_path.into();
        config
    }

    /// Checks every setting.
    ///
    /// Errors: [`Error::Usage`](rlhf_base::Error::Usage), naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        check_sizes(self)?;
        all([above_zero(name_of!(self.temperature), self.temperature), self.rows.check()])
    }
}
