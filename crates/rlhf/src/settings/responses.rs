//! Settings of the responses of commands that generate with a model: `generate`, `eval` and `chat`.

use clap::Args;
use serde::Serialize;

use crate::flag::{NONE, SAMPLING, optional, optional_top_k};

/// Responses of a model to each prompt.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct ResponsesConfig {
    /// Maximum tokens of a response [default: the model's `generation_config.json`, else 53].
    #[arg(long, help_heading = SAMPLING, default_value = NONE, value_parser = optional::<usize>)]
    pub max_new_tokens: std::option::Option<usize>,
    /// Sample the next token; `false` is greedy decoding [default: the model's `generation_config.json`, which is greedy
    /// where it has settings of sampling alone; else true].
    #[arg(
        long, help_heading = SAMPLING, default_value = NONE, value_parser = optional::<bool>,
        num_args = 0..=1, default_missing_value = "true", require_equals = true
    )]
    pub do_sample: std::option::Option<bool>,
    /// Sampling of each token.
    #[command(flatten)]
    #[serde(flatten)]
    pub sampler: SamplerConfig,
    /// Number of responses per prompt.
    #[arg(long, help_heading = SAMPLING, default_value_t = 1)]
    pub num_return_sequences: usize,
    /// Further stop tokens, by id: separated by commas, or by repeating the flag.
    #[arg(long, help_heading = SAMPLING, value_delimiter = ',')]
    pub stop_token_ids: Vec<i64>,
    /// End a response with the token that completes this text; repeat the flag for several texts.
    #[arg(long, help_heading = SAMPLING)]
    pub stop_strings: Vec<String>,
}

/// Sampling of each token; a setting that is not set is that of the model's `generation_config.json`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct SamplerConfig {
    /// Sampling temperature; 0 is greedy decoding [default: the model's `generation_config.json`, else 1].
    #[arg(long, help_heading = SAMPLING, default_value = NONE, value_parser = optional::<f64>)]
    pub temperature: std::option::Option<f64>,
    /// Sample from this many most likely tokens only; 0 for all [default: the model's `generation_config.json`, else 0].
    #[arg(long, help_heading = SAMPLING, default_value = NONE, value_parser = optional_top_k)]
    pub top_k: std::option::Option<usize>,
    /// Nucleus sampling: sample from the fewest most likely tokens with this total probability; 1 for all [default: the model's
    /// `generation_config.json`, else 1].
    #[arg(long, help_heading = SAMPLING, default_value = NONE, value_parser = optional::<f64>)]
    pub top_p: std::option::Option<f64>,
    /// Sample from tokens with at least this fraction of the probability of the most likely one; 0 for all [default: the model's
    /// `generation_config.json`, else 0].
    #[arg(long, help_heading = SAMPLING, default_value = NONE, value_parser = optional::<f64>)]
    pub min_p: std::option::Option<f64>,
    /// Penalty on tokens that are in the prompt or the response already; 1 for none [default: the model's `generation_config.json`,
    /// else 1].
    #[arg(long, help_heading = SAMPLING, default_value = NONE, value_parser = optional::<f64>)]
    pub repetition_penalty: std::option::Option<f64>,
}
