//! Settings of the responses of commands that generate with a model: `generate`, `eval` and `chat`.

use serde::Serialize;

use rlhf_base::schema::{ANY_ID, MOST_ROWS, MOST_TOKENS, SAMPLING, Settings, optional_top_k};

/// Responses of a model to each prompt.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct ResponsesConfig {
    /// Maximum tokens of a response [default: the model's `generation_config.json`, else 53].
    #[setting(heading = SAMPLING, most = MOST_TOKENS, short = "maximum tokens of a response")]
    pub max_new_tokens: Option<usize>,
    /// Sample the next token; `false` is greedy decoding [default: the model's `generation_config.json`, which is greedy
    /// where it has settings of sampling alone; else true].
    #[setting(heading = SAMPLING, alone = "true", equals, short = "false: greedy decoding")]
    pub do_sample: Option<bool>,
    /// Sampling of each token.
    #[setting(flatten)]
    #[serde(flatten)]
    pub sampler: SamplerConfig,
    /// Number of responses per prompt.
    #[setting(heading = SAMPLING, default = 1, most = MOST_ROWS, short = "responses per prompt")]
    pub num_return_sequences: usize,
    /// Further stop tokens, by id: separated by commas, or by repeating the flag.
    #[setting(heading = SAMPLING, delimiter = ',', most = ANY_ID)]
    pub stop_token_ids: Vec<i64>,
    /// End a response with the token that completes this text; repeat the flag for several texts.
    #[setting(heading = SAMPLING, short = "end a response at this text")]
    pub stop_strings: Vec<String>,
}

/// Sampling of each token; a setting that is not set is that of the model's `generation_config.json`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Settings)]
pub struct SamplerConfig {
    /// Sampling temperature; 0 is greedy decoding [default: the model's `generation_config.json`, else 1].
    #[setting(heading = SAMPLING, short = "sampling temperature")]
    pub temperature: Option<f64>,
    /// Sample from this many most likely tokens only; 0 for all [default: the model's `generation_config.json`, else 0].
    #[setting(heading = SAMPLING, parse = optional_top_k)]
    pub top_k: Option<usize>,
    /// Nucleus sampling: sample from the fewest most likely tokens with this total probability; 1 for all [default: the model's
    /// `generation_config.json`, else 1].
    #[setting(heading = SAMPLING, short = "nucleus sampling")]
    pub top_p: Option<f64>,
    /// Sample from tokens with at least this fraction of the probability of the most likely one; 0 for all [default: the model's
    /// `generation_config.json`, else 0].
    #[setting(heading = SAMPLING)]
    pub min_p: Option<f64>,
    /// Penalty on tokens that are in the prompt or the response already; 1 for none [default: the model's `generation_config.json`,
    /// else 1].
    #[setting(heading = SAMPLING)]
    pub repetition_penalty: Option<f64>,
}
