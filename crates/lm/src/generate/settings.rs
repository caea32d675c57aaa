//! Settings of sampling in PPO.

use serde::Serialize;

use rlhf_base::Result;
use rlhf_base::name_of;
use rlhf_base::schema::{
    Choices, MOST_TOKENS, SAMPLING, Settings, above_zero, all, expect, no_effect, refuse, top_k_or_minus_one,
    zero_to_one,
};

/// Sampling of PPO's responses beside their temperature: in training, in evaluations and, except for the filters, in the sample
/// tables, which are greedy.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct SamplingConfig {
    /// Sample from this many most likely tokens only; 0 for all.
    #[setting(heading = SAMPLING, default = 0, parse = top_k_or_minus_one, replay = Sampling)]
    pub top_k: usize,
    /// Nucleus sampling: sample from the fewest most likely tokens with this total probability; 1 for all.
    #[setting(heading = SAMPLING, default = 1.0, replay = Sampling, short = "nucleus sampling")]
    pub top_p: f64,
    /// Sample from tokens with at least this fraction of the probability of the most likely one; 0 for all.
    #[setting(heading = SAMPLING, default = 0.0, replay = Sampling)]
    pub min_p: f64,
    /// Penalty on tokens that are in the prompt or the response already; 1 for none.
    #[setting(heading = SAMPLING, default = 1.0, replay = Sampling)]
    pub repetition_penalty: f64,
    /// Minimum tokens of a response: nothing ends it before.
    #[setting(heading = SAMPLING, default = 0, replay = Sampling, most = MOST_TOKENS)]
    pub min_new_tokens: usize,
    /// End a response with the token that completes this text; repeat the flag for several texts.
    #[setting(heading = SAMPLING, replay = Sampling, short = "end a response at this text")]
    pub stop_strings: Vec<String>,
    /// Distribution of log-probabilities: the `policy`'s over the whole vocabulary, or the `filtered` one over the tokens that
    /// `top_k`, `top_p` and `min_p` left when a response was sampled.
    #[setting(heading = SAMPLING, default = "policy", replay = Sampling)]
    pub logprobs_of: LogprobsOf,
}

impl SamplingConfig {
    /// Checks this group of settings alone.
    pub fn check(&self) -> Result<()> {
        all([
            above_zero(name_of!(self.top_p), self.top_p),
            zero_to_one(name_of!(self.top_p), self.top_p),
            zero_to_one(name_of!(self.min_p), self.min_p),
            above_zero(name_of!(self.repetition_penalty), self.repetition_penalty),
            expect(!self.stop_strings.iter().any(String::is_empty), name_of!(self.stop_strings), "\"\"", "some text"),
            self.check_logprobs(),
        ])
    }

    fn check_logprobs(&self) -> Result<()> {
        if self.logprobs_of == LogprobsOf::Policy {
            return Ok(());
        }
        let filters = self.top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0 || self.min_new_tokens > 0;
        if !filters {
            return no_effect(name_of!(self.logprobs_of), "filtered", "without top_k, top_p, min_p or min_new_tokens");
        }
        if self.repetition_penalty != 1.0 {
            return refuse(
                name_of!(self.logprobs_of),
                format!(
                    " = filtered with repetition_penalty = {}: a penalty filters no token, it changes the probabilities \
                 of all of them, by the text before each: expected 1, or logprobs_of = policy",
                    self.repetition_penalty
                ),
            );
        }
        Ok(())
    }
}

/// The distribution that log-probabilities are taken of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Choices)]
#[serde(rename_all = "snake_case")]
#[choice(rename_all = "snake_case")]
pub enum LogprobsOf {
    /// Over the whole vocabulary, whatever filters the sampling had.
    Policy,
    /// Over the tokens that the filters left when the token was sampled: for the sampling policy, the trained policy and the
    /// reference model.
    Filtered,
}

/// A stop token with a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Choices)]
#[serde(rename_all = "snake_case")]
#[choice(value_name = "TOKEN", expected = "eos or none; an id goes to stop_token_id")]
pub enum StopToken {
    /// The tokenizer's end-of-sequence token.
    Eos,
}
