//! Settings of `rlhf chat`.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::check::check_sizes;
use super::compute::ComputeConfig;
use super::generate::GenerateConfig;
use crate::Result;
use crate::flag::{DATA, MODELS, NONE, SAMPLING, all, defaults, optional};

/// Settings of `rlhf chat`.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct ChatConfig {
    /// Causal language model: a folder or a hub name.
    #[arg(value_name = "MODEL")]
    pub model: PathBuf,
    /// Branch, tag or commit of `model` on the hub.
    #[arg(long, help_heading = MODELS, default_value = "main")]
    pub model_revision: String,
    /// Second model, which responds to the same messages after the first: a folder or a hub name.
    #[arg(long, help_heading = MODELS, default_value = NONE, value_parser = optional::<PathBuf>)]
    pub compare: std::option::Option<PathBuf>,
    /// System message of the conversation.
    #[arg(long, help_heading = DATA, default_value = NONE, value_parser = optional::<String>)]
    pub system: std::option::Option<String>,
    /// Maximum tokens of a response.
    #[arg(long, help_heading = SAMPLING, default_value_t = 512)]
    pub max_new_tokens: usize,
    /// Sampling temperature; 0 is greedy decoding [default: the model's `generation_config.json`, else 1].
    #[arg(long, help_heading = SAMPLING, default_value = NONE, value_parser = optional::<f64>)]
    pub temperature: std::option::Option<f64>,
    /// Sample from this many most likely tokens only; 0 for all [default: the model's `generation_config.json`, else 0].
    #[arg(long, help_heading = SAMPLING, default_value = NONE, value_parser = optional::<usize>)]
    pub top_k: std::option::Option<usize>,
    /// Nucleus sampling: sample from the fewest most likely tokens with this total probability; 1 for all [default: the model's
    /// `generation_config.json`, else 1].
    #[arg(long, help_heading = SAMPLING, default_value = NONE, value_parser = optional::<f64>)]
    pub top_p: std::option::Option<f64>,
    /// Sample from tokens with at least this fraction of the probability of the most likely one; 0 for all [default: the model's
    /// `generation_config.json`, else 0].
    #[arg(long, help_heading = SAMPLING, default_value = NONE, value_parser = optional::<f64>)]
    pub min_p: std::option::Option<f64>,
    /// Penalty on tokens that are in the conversation already; 1 for none [default: the model's `generation_config.json`, else 1].
    #[arg(long, help_heading = SAMPLING, default_value = NONE, value_parser = optional::<f64>)]
    pub repetition_penalty: std::option::Option<f64>,
    /// Seed of the sampling.
    #[arg(long, help_heading = SAMPLING, default_value_t = 42)]
    pub seed: u64,
    /// Computation.
    #[command(flatten)]
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
        GenerateConfig {
            max_new_tokens: Some(self.max_new_tokens),
            // A temperature that is set is used, also where the model's file has greedy decoding.
            do_sample: self.temperature.map(|temperature| temperature != 0.0),
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed,
            ..GenerateConfig::new(&self.model)
        }
    }

    /// Checks every setting.
    ///
    /// Errors: [`Error::Usage`](crate::Error::Usage), naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        check_sizes(self)?;
        all([self.generate().check(), self.compute.check()])
    }
}
