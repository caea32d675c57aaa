//! How responses are sampled and where they end.

use crate::Result;
use crate::generate::{GenerationConfig, StopStrings};
use crate::model::{CausalLm, ModelConfig};
use crate::rng::Purpose;
use crate::settings::{EosInLoss, LogprobsOf, PpoConfig, StopToken};
use crate::tokenizer::Tokenizer;

/// Whether the log-probabilities of sampling are not those that training takes.
pub(crate) fn recomputes_logprobs(policy: &CausalLm, config: &PpoConfig) -> bool {
    // Decoding notes those of the whole vocabulary.
    let filtered = config.sampling.logprobs_of == LogprobsOf::Filtered;
    filtered || !policy.is_exact() || config.logprob_temperature() != config.temperature
}

/// The tokens that end a response by the settings; none where nothing does.
///
/// # Errors
/// If it is eos, and the tokenizer has none.
pub fn stop_tokens(config: &PpoConfig, tokenizer: &Tokenizer) -> Result<Vec<i64>> {
    match (config.stop_token, config.stop_token_id) {
        (Some(StopToken::Eos), _) => {
            tokenizer.require_eos()?;
            Ok(tokenizer.eos_ids().to_vec())
        }
        (None, id) => Ok(Vec::from_iter(id)),
    }
}

/// The texts that end a response by the settings, as `tokenizer` makes them of tokens.
///
/// # Errors
/// If one of them is empty.
pub fn stop_strings(config: &PpoConfig, tokenizer: &Tokenizer) -> Result<Option<StopStrings>> {
    let strings = &config.sampling.stop_strings;
    (!strings.is_empty()).then(|| StopStrings::new(tokenizer, strings.clone())).transpose()
}

/// How update `update`, counted from 0, samples its responses, which end with one of the tokens `stop`; [`stop_strings`] come
/// from a tokenizer.
pub fn generation(config: &PpoConfig, stop: &[i64], update: usize) -> GenerationConfig {
    GenerationConfig {
        stop_token_ids: stop.to_vec(),
        seed: config.run.seed,
        purpose: Purpose::Sampling,
        step: update as u64,
        batch_size: config.local_rollout_forward_batch_size,
        repetition_penalty: config.sampling.repetition_penalty,
        min_new_tokens: config.sampling.min_new_tokens,
        keep_sets: config.sampling.logprobs_of == LogprobsOf::Filtered,
        ..GenerationConfig::new(config.sampling(), config.response_length)
    }
}

/// The end tokens of responses of `model` that are in no loss.
pub(crate) fn left_out_of_losses(eos_in_loss: EosInLoss, tokenizer: &Tokenizer, model: &ModelConfig) -> Vec<i64> {
    let eos = tokenizer.eos_ids().iter().copied();
    match eos_in_loss {
        EosInLoss::Always => Vec::new(),
        EosInLoss::Never => eos.collect(),
        EosInLoss::UnlessPad => eos.filter(|&id| Some(id) == deepspeed_chat_pad(tokenizer, model)).collect(),
    }
}

/// The token that DeepSpeed-Chat pads texts of `model` with: eos, but for Llama, whose tokenizer keeps its own padding token; `None`
/// where it would add one that no text has.
pub(crate) fn deepspeed_chat_pad(tokenizer: &Tokenizer, model: &ModelConfig) -> Option<i64> {
    let is_llama = model.family.name == "llama";
    if is_llama { tokenizer.pad() } else { tokenizer.eos().or(tokenizer.pad()) }
}
