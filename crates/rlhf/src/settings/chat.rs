//! Settings of `rlhf chat`.

use std::path::PathBuf;

use serde::Serialize;

use super::check::check_sizes;
use super::compute::ComputeConfig;
use super::generate::GenerateConfig;
use super::responses::SamplerConfig;
use crate::data::ChatTemplateConfig;
use rlhf_base::Result;
use rlhf_base::schema::{DATA, MODELS, SAMPLING, Settings, all, defaults};

/// Settings of `rlhf chat`.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct ChatConfig {
    /// Causal language model: a folder or a hub name.
    #[setting(positional, value_name = "MODEL")]
    pub model: PathBuf,
    /// Branch, tag or commit of `model` on the hub.
    #[setting(heading = MODELS, default = "main")]
    pub model_revision: String,
    /// Second model, which responds to the same messages after the first: a folder or a hub name.
    #[setting(heading = MODELS)]
    pub compare: Option<PathBuf>,
    /// System message of the conversation.
    #[setting(heading = DATA)]
    pub system: Option<String>,
    /// Variables of the chat template.
    #[setting(flatten)]
    #[serde(flatten)]
    pub chat_template: ChatTemplateConfig,
    /// Maximum tokens of a response.
    #[setting(heading = SAMPLING, default = 512)]
    pub max_new_tokens: usize,
    /// Sampling of each token.
    #[setting(flatten)]
    #[serde(flatten)]
    pub sampler: SamplerConfig,
    /// Seed of the sampling.
    #[setting(heading = SAMPLING, default = 42)]
    pub seed: u64,
    /// Computation.
    #[setting(flatten)]
    #[serde(flatten)]
    pub compute: ComputeConfig,
}

impl ChatConfig {
    /// Creates a configuration with every default, for this model.
    pub fn new(model: impl Into<PathBuf>) -> Self {
        let mut config: Self = defaults();
        config.model = model.into();
        config
    }

    /// Returns the settings of a response as those of `rlhf generate`.
    pub fn generate(&self) -> GenerateConfig {
        let mut config = GenerateConfig::new(&self.model);
        config.responses.max_new_tokens = Some(self.max_new_tokens);
        // A temperature that is set is used, also where the model's file has greedy decoding.
        config.responses.do_sample = self.sampler.temperature.map(|temperature| temperature != 0.0);
        config.responses.sampler = self.sampler.clone();
        config.seed = self.seed;
        config
    }

    /// Checks every setting.
    ///
    /// Errors: [`Error::Usage`](rlhf_base::Error::Usage), naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        check_sizes(self)?;
        all([self.generate().check(), self.compute.check(), self.chat_template.check()])
    }
}
