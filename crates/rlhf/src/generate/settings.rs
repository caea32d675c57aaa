//! Settings of sampling in PPO.

use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::Result;
use crate::flag::{SAMPLING, Setting, above_zero, all, expect, no_effect, usage, zero_to_one};

/// Sampling of PPO's responses beside their temperature: in training, in evaluations and, except for the filters, in the sample
/// tables, which are greedy.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct SamplingConfig {
    /// Sample from this many likeliest tokens only; 0 for all.
    #[arg(long, help_heading = SAMPLING, default_value_t = 0)]
    pub top_k: usize,
    /// Sample from the fewest likeliest tokens that hold this much probability; 1 for all.
    #[arg(long, help_heading = SAMPLING, default_value_t = 1.0)]
    pub top_p: f64,
    /// Sample from tokens at least this many times as likely as the likeliest; 0 for all.
    #[arg(long, help_heading = SAMPLING, default_value_t = 0.0)]
    pub min_p: f64,
    /// Make tokens of the prompt and the answer less likely to come again; 1 for no penalty.
    #[arg(long, help_heading = SAMPLING, default_value_t = 1.0)]
    pub repetition_penalty: f64,
    /// Tokens of an answer, at least: before that nothing ends it.
    #[arg(long, help_heading = SAMPLING, default_value_t = 0)]
    pub min_new_tokens: usize,
    /// Stop with the token that completes this text; the flag several times for several.
    #[arg(long, help_heading = SAMPLING)]
    pub stop_strings: Vec<String>,
    /// The distribution that log-probabilities are of: the `policy`'s over the whole vocabulary, or the `filtered` one over the
    /// tokens that the filters left when an answer was sampled.
    #[arg(long, help_heading = SAMPLING, value_enum, default_value = "policy")]
    pub logprobs_of: LogprobsOf,
}

impl SamplingConfig {
    /// Checks what no other group of settings has a part in.
    pub(crate) fn check(&self) -> Result<()> {
        all([
            above_zero("top_p", self.top_p),
            zero_to_one("top_p", self.top_p),
            zero_to_one("min_p", self.min_p),
            above_zero("repetition_penalty", self.repetition_penalty),
            expect(!self.stop_strings.iter().any(String::is_empty), "stop_strings", "\"\"", "some text"),
            self.check_logprobs(),
        ])
    }

    fn check_logprobs(&self) -> Result<()> {
        if self.logprobs_of == LogprobsOf::Policy {
            return Ok(());
        }
        let filters = self.top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0 || self.min_new_tokens > 0;
        if !filters {
            return no_effect("logprobs_of", "filtered", "without top_k, top_p, min_p or min_new_tokens");
        }
        if self.repetition_penalty != 1.0 {
            return usage(format!(
                "logprobs_of = filtered with repetition_penalty = {}: a penalty filters no token, it changes the probabilities \
                 of all of them, by the text before each: expected 1, or logprobs_of = policy",
                self.repetition_penalty
            ));
        }
        Ok(())
    }
}

/// The distribution that log-probabilities are taken of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum LogprobsOf {
    /// Over the whole vocabulary, whatever filters the sampling had.
    Policy,
    /// Over the tokens that the filters left when the token was sampled: for the sampling policy, the trained policy and the
    /// reference model.
    Filtered,
}

/// A stop token with a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum StopToken {
    /// The tokenizer's end-of-sequence token.
    Eos,
}

impl Setting for StopToken {
    const NAME: &'static str = "TOKEN";
    const EXPECTED: &'static str = "eos or none; an id goes to stop_token_id";

    fn read(text: &str) -> Option<Self> {
        Self::from_str(text, true).ok()
    }
}
